"""The figures of an experiment: numbers of its runs, and ratios of two.

`ours = "async"` is the throughput of that system's run; `"async@noise:all.itl_ms.p99"` another
metric of it, under the impairment of that name; `"async / ep"` a ratio, `"1 - ep@noise / ep"` what
is lost. Names behind @ are those of models, clusters or impairments; of what is not named the first
entry counts. Each figure is made for every workload.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from asyncmoe.errors import ConfigError, UnknownName
from asyncmoe.experiment.schema import Experiment

DEFAULT_METRIC = "steady_tokens_per_s"
_REFERENCE = r"(\S+?)(?::(\S+))?"
_FIGURE = re.compile(rf"(1\s*-\s*)?{_REFERENCE}(?:\s+/\s+{_REFERENCE})?")
_FORMS = '"SYSTEM@NAME:METRIC", "A / B" or "1 - A / B"'


@dataclass(frozen=True, slots=True)
class Reference:
    """A metric of one run of each workload."""

    names: Mapping[str, str]  # by dimension, without the workload
    metric: str

    def of(self, metrics: Mapping[str, Any]) -> float | None:
        """Its value in the metrics of that run; None where there was nothing to measure.

        Raises `UnknownName`.
        """
        value: Any = metrics
        for part in self.metric.split("."):
            if value is None:
                return None
            if not isinstance(value, Mapping) or part not in value:
                raise UnknownName("metric of a figure", self.metric, _paths(metrics))
            value = value[part]
        if value is not None and not isinstance(value, int | float):
            raise UnknownName("metric of a figure", self.metric, _paths(metrics))
        return value


@dataclass(frozen=True, slots=True)
class Figure:
    """A number of the result."""

    name: str
    above: Reference
    below: Reference | None
    lost: bool  # one minus the ratio

    def references(self) -> list[Reference]:
        """One or two."""
        return [self.above] if self.below is None else [self.above, self.below]

    def check(self, names: Mapping[str, str], metrics: Mapping[str, Any]) -> None:
        """Raise `UnknownName` if it names a metric that runs like that one, of these `names` by
        dimension, do not have: those of the same model and cluster have the same."""
        for each in self.references():
            if all(each.names[like] == names[like] for like in ("model", "cluster")):
                each.of(metrics)

    def of(self, values: list[float | None]) -> float | None:
        """The figure, from the values of its references."""
        if any(value is None for value in values) or not all(values[1:]):
            return None
        above, *below = (float(value) for value in values if value is not None)
        ratio = above / below[0] if below else above
        return 1 - ratio if self.lost else ratio


def read_figures(experiment: Experiment) -> list[Figure]:
    """All figures.

    Raises `ConfigError` naming the figure that cannot be understood, `UnknownName` for a name.
    """
    return [_figure(experiment, name, text) for name, text in experiment.all_figures.items()]


def _figure(experiment: Experiment, name: str, text: str) -> Figure:
    found = _FIGURE.fullmatch(text.strip())
    if found is None or (found[1] and found[4] is None):
        raise ConfigError(f"figures.{name} is {text!r}; allowed: {_FORMS}")
    above = _reference(experiment, name, found[2], found[3])
    below = None if found[4] is None else _reference(experiment, name, found[4], found[5])
    return Figure(name, above, below, bool(found[1]))


def _reference(experiment: Experiment, figure: str, run: str, metric: str | None) -> Reference:
    system, *tags = run.split("@")
    names = {d: n[0] for d, n in experiment.dimensions().items() if d != "workload"}
    if system not in experiment.systems:
        raise UnknownName(f"system in figures.{figure}", system, experiment.systems)
    names["system"] = system
    free = {
        name: dimension
        for dimension, entries in experiment.dimensions().items()
        if dimension not in ("system", "workload")
        for name in entries
    }
    for tag in tags:
        if tag not in free:
            raise UnknownName(f"name in figures.{figure}", tag, free)
        names[free[tag]] = tag
    return Reference(names, metric or DEFAULT_METRIC)


def _paths(metrics: Mapping[str, Any], before: str = "") -> list[str]:
    """Paths of all numbers in nested maps."""
    found: list[str] = []
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            found += _paths(value, f"{before}{name}.")
        elif isinstance(value, int | float):
            found.append(before + name)
    return found
