"""The report: one HTML file that needs nothing else."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

import orjson

from asyncmoe.outfile import write_file
from asyncmoe.report import charts
from asyncmoe.report.results import Results, Run
from asyncmoe.report.tables import NOTHING, metric_table, published_table

_STYLE = Path(__file__).with_name("style.css")
OPEN_RUNS = 1  # of the details of each run, those that are open at first


def write_report(results: Results, path: Path) -> None:
    """Write the report of `results`. Raises `ConfigError` if `path` cannot be written."""
    write_file(path, page(results).encode())


def page(results: Results) -> str:
    """The report as text; the same results give the same text."""
    sections = [
        _overview(results),
        _section("Runs that failed", _failures(results.failed)),
        _section("Published figures beside ours", published_table(results.published)),
        "".join(_details(run, index < OPEN_RUNS) for index, run in enumerate(results.runs)),
        _section("All metrics", metric_table(results.runs)),
        _section("How to make it again", _origin(results)),
    ]
    title = escape(results.title)
    style = _STYLE.read_text("utf-8")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{title}</title><style>{style}</style></head><body><main>"
        f"<header><h1>{title}</h1><p>asyncmoe, {escape(results.world)} run</p></header>"
        f"{''.join(sections)}</main></body></html>\n"
    )


def _overview(results: Results) -> str:
    tiles = _tiles(results.runs[0]) if len(results.runs) == 1 else ""
    figures = charts.throughput_against_itl(results) + charts.itl_distribution(results)
    if len(results.runs) == 1:
        figures += charts.over_time(results.runs[0])
    return _section("Throughput and latency", f'{tiles}<div class="grid">{figures}</div>')


def _tiles(run: Run) -> str:
    metrics, latency = run.metrics, run.metrics["all"]
    ttft, itl = latency["ttft_ms"], latency["itl_ms"]
    facts = [
        (
            "tokens/s",
            f"{metrics['tokens_per_s']:.0f}",
            f"best window {metrics['best_tokens_per_s']:.0f}",
        ),
        ("ITL", *_ms(itl)),
        ("TTFT", *_ms(ttft)),
        ("goodput", f"{metrics['goodput']['requests_per_s']:.2f}/s", "requests within the targets"),
    ]
    busy = run.cluster.get("device_utilisation")
    if busy is not None:
        facts.append(("devices busy", f"{100 * busy:.0f} %", "mean of ranks"))
    return (
        '<div class="tiles">'
        + "".join(
            f"<div><span>{escape(name)}</span><b>{escape(value)}</b><small>{escape(more)}</small></div>"
            for name, value, more in facts
        )
        + "</div>"
    )


def _ms(spread: dict[str, float] | None) -> tuple[str, str]:
    if spread is None:
        return NOTHING, ""
    return f"{spread['mean']:.1f} ms", f"p50 {spread['p50']:.1f}, p99 {spread['p99']:.1f}"


def _failures(failed: dict[str, str]) -> str:
    return "".join(f"<p><b>{escape(name)}</b>: {escape(why)}</p>" for name, why in failed.items())


def _details(run: Run, is_open: bool) -> str:
    drawn = [
        draw(run)
        for draw in (
            charts.queue_depth,
            charts.stage_delays,
            charts.batch_sizes,
            charts.links,
        )
    ]
    if not any(drawn):
        return ""
    opened = " open" if is_open else ""
    return (
        f"<details{opened}><summary>{escape(run.name)}</summary>"
        f'<div class="grid">{"".join(drawn)}</div></details>'
    )


def _origin(results: Results) -> str:
    parts = [f"<pre>{escape(results.command)}</pre>"]
    for name, values in (
        ("workload", results.workload),
        ("what is measured", results.measure),
        ("configuration", results.config),
    ):
        parts.append(f"<h3>{name}</h3><pre>{escape(_toml_like(values))}</pre>")
    return "".join(parts)


def _toml_like(values: dict[str, Any], prefix: str = "") -> str:
    """Keys and values, one a line; sections by their dotted names."""
    lines = []
    for key, value in values.items():
        if isinstance(value, dict) and value:
            lines.append(_toml_like(value, f"{prefix}{key}."))
        else:
            lines.append(f"{prefix}{key} = {orjson.dumps(value).decode()}")
    return "\n".join(lines)


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>" if content else ""
