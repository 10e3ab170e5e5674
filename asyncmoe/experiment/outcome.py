"""What an experiment found: its figures beside the published ones, and every run's metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncmoe.experiment.figures import DEFAULT_METRIC, Reference, read_figures
from asyncmoe.experiment.grid import Setting
from asyncmoe.experiment.schema import Experiment
from asyncmoe.report.results import Published, Results, Run

_DIGITS = 6  # significant ones of a figure


@dataclass(frozen=True, slots=True)
class Outcome:
    """An experiment and its results, by setting: `pool.run_all` says what they are."""

    experiment: Experiment
    settings: Sequence[Setting]
    results: Sequence[Mapping[str, Any]]

    @property
    def ended(self) -> list[tuple[Setting, Mapping[str, Any]]]:
        """The runs that have metrics."""
        pairs = zip(self.settings, self.results, strict=True)
        return [(setting, result) for setting, result in pairs if "error" not in result]

    @property
    def failed(self) -> dict[str, str]:
        """Why the others have none, by label."""
        pairs = zip(self.settings, self.results, strict=True)
        return {s.label: str(result["error"]) for s, result in pairs if "error" in result}

    def figures(self) -> dict[str, Any]:
        """The result, JSON-ready; equal for equal seeds, bar `run` where costs are asked for."""
        found: dict[str, Any] = {"workloads": self._workloads()}
        if self.experiment.run_costs:
            found["run"] = {
                setting.label: _rounded(result["cost"]) for setting, result in self.ended
            }
        if self.failed:
            found["failed"] = self.failed
        return found

    def _workloads(self) -> dict[str, Any]:
        metrics = {
            tuple(sorted(setting.names.items())): result["metrics"]
            for setting, result in self.ended
        }
        figures = read_figures(self.experiment)
        found = {}
        for workload in self.experiment.workloads:
            ours = {
                figure.name: figure.of(
                    [
                        None if (run := metrics.get(_key(each, workload))) is None else each.of(run)
                        for each in figure.references()
                    ]
                )
                for figure in figures
            }
            published = self.experiment.published.get(workload, {})
            found[workload] = {"ours": _rounded(ours), "published": published}
        return found

    def comparison(self) -> dict[str, Any]:
        """One entry for each run, with what is mostly compared or why it failed, JSON-ready."""
        return {
            "runs": [
                {**self._told_apart(setting), **_compared(result)}
                for setting, result in zip(self.settings, self.results, strict=True)
            ]
        }

    def comparison_text(self) -> str:
        """The same as a table."""
        apart = [*self._told_apart(self.settings[0])]
        rows = [
            [*(run[name] for name in apart), *(_cell(run.get(name)) for name in _COMPARED)]
            for run in self.comparison()["runs"]
        ]
        names = [*apart, *_COMPARED]
        wide = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
        return "\n".join(
            "  ".join(f"{cell:<{width}}" for cell, width in zip(row, wide, strict=True)).rstrip()
            for row in [names, *rows]
        )

    def costs_text(self) -> str:
        """What the simulation itself took, a line for each run; empty for live ones."""
        return "".join(
            f"{setting.label}: {cost['virtual_s']:.2f} virtual s took {cost['real_s']:.1f} s, "
            f"{cost['cpu_s']:.1f} of the CPU; {cost['steps']} steps, {cost['parcels']} parcels"
            f"{'' if result['metrics']['tokens'] else '; no token came in the window'}\n"
            for setting, result in self.ended
            if (cost := result["cost"])
        )

    def _told_apart(self, setting: Setting) -> dict[str, str]:
        several = [d for d, names in self.experiment.dimensions().items() if len(names) > 1]
        return {d: setting.names[d] for d in several or ["system"]}

    def report(self, command: str) -> Results:
        """Everything, for the report and for the file of results."""
        experiment = self.experiment
        values = experiment.model_dump(exclude_none=True, exclude={"published", "figures"})
        return Results(
            title=experiment.title or experiment.name,
            world=experiment.world,
            command=command,
            config=values,
            workload=values["workloads"],
            measure=self.settings[0].measure.model_dump(),
            runs=[
                Run(
                    setting.label,
                    setting.series,
                    dict(setting.names),
                    {k: v for k, v in result["metrics"].items() if k != "cluster"},
                    result["metrics"]["cluster"],
                )
                for setting, result in self.ended
            ],
            published=self._published(),
            failed=self.failed,
        )

    def _published(self) -> list[Published]:
        return [
            Published(
                f"{workload}: {name}",
                published,
                found["ours"].get(name),
                "tokens/s" if name.endswith("_tok_s") else "",
                self.experiment.source,
                self.experiment.notes.get(name, ""),
            )
            for workload, found in self._workloads().items()
            for name, published in found["published"].items()
        ]

    def text(self) -> str:
        """The figures as a table."""
        lines = []
        for workload, found in self._workloads().items():
            lines.append(f"{workload}:")
            for name, value in found["ours"].items():
                theirs = found["published"].get(name)
                told = "" if theirs is None else f"   published {theirs:g}"
                lines.append(f"  {name:<24} {'-' if value is None else f'{value:.6g}':>12}{told}")
        return "\n".join(lines)


_COMPARED = (
    DEFAULT_METRIC,
    "itl_ms",
    "itl_p99_ms",
    "slowest_1_percent_itl_ms",
    "ttft_ms",
    "attention_rows",
    "expert_rows",
    "device_utilisation",
)


def _key(reference: Reference, workload: str) -> tuple[tuple[str, str], ...]:
    return tuple(sorted({**reference.names, "workload": workload}.items()))


def _compared(result: Mapping[str, Any]) -> dict[str, Any]:
    if "error" in result:
        return {"error": result["error"]}
    metrics = result["metrics"]
    every, slowest = metrics["all"], metrics["slowest_1_percent"]
    itl, ttft, late = every["itl_ms"] or {}, every["ttft_ms"] or {}, slowest["itl_ms"] or {}
    cluster = metrics["cluster"]
    values = (
        metrics[DEFAULT_METRIC],
        itl.get("mean"),
        itl.get("p99"),
        late.get("mean"),
        ttft.get("mean"),
        cluster["mean_rows"]["attention"],
        cluster["mean_rows"]["expert"],
        cluster["device_utilisation"],
    )
    return _rounded(dict(zip(_COMPARED, values, strict=True)))


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _rounded(values: Mapping[str, float | None]) -> dict[str, float | None]:
    return {k: None if v is None else float(f"{v:.{_DIGITS}g}") for k, v in values.items()}
