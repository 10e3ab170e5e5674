"""Results as pictures: throughput beside the raw stack, and latency, over the payload's size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from asyncmoe.errors import MissingDependency

_SUBJECTS = {
    "gb_per_s": "throughput, GB/s",
    "p50_us": "median time until acknowledged, µs",
    "cpu_s_per_gb": "CPU seconds per GB",
}


def check() -> None:
    """Raise `MissingDependency` if no picture can be made."""
    try:
        import matplotlib  # noqa: F401 - whether it is there
    except ModuleNotFoundError as error:
        raise MissingDependency("a plot", "matplotlib", "plot") from error


def draw(results: list[dict[str, Any]], folder: Path) -> list[Path]:
    """One PNG for each subject and depth; returns where they are."""
    from matplotlib.figure import Figure  # draws without a display

    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for depth in sorted({each["depth"] for each in results}):
        chosen = [each for each in results if each["depth"] == depth]
        for key, label in _SUBJECTS.items():
            figure = Figure(figsize=(8, 5), layout="constrained")
            axes = figure.subplots()
            _lines(axes, chosen, key)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xlabel("payload, bytes")
            axes.set_ylabel(label)
            axes.set_title(f"{label}, {depth} in flight")
            axes.grid(visible=True, alpha=0.3)
            axes.legend()
            path = folder / f"{key}-depth{depth}.png"
            figure.savefig(path, dpi=120)
            made.append(path)
    return made


def _lines(axes: Any, results: list[dict[str, Any]], key: str) -> None:
    """A line for each transport and set of flows; the raw stack's throughput is dashed."""
    for name, flows in sorted({(r["transport"], tuple(r["flows"])) for r in results}):
        points = [r for r in results if r["transport"] == name and tuple(r["flows"]) == flows]
        points.sort(key=lambda r: r["size"])
        sizes = [r["size"] for r in points]
        (line,) = axes.plot(
            sizes, [r[key] for r in points], marker="o", label=f"{name} {' '.join(flows)}"
        )
        raw = [r["raw_gb_per_s"] for r in points]
        if key == "gb_per_s" and None not in raw:
            axes.plot(sizes, raw, "--", color=line.get_color(), label=f"{name}, raw stack")
