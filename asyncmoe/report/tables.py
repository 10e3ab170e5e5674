"""The tables of a report: every metric of every run, and published figures beside ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from asyncmoe.report.results import Published, Run

Value = Callable[[Run], Any]
_LATENCIES = (
    ("ttft_ms", "time to first token, ms"),
    ("itl_ms", "time between tokens, ms"),
    ("request_itl_ms", "the same, mean of a request, ms"),
    ("completion_ms", "request completion, ms"),
)
NOTHING = "\u2013"  # a dash, for a figure that there is not
_GROUPS = (
    ("all", "all requests"),
    ("slowest_1_percent", "slowest 1 %"),
    ("slowest", "slowest request"),
)


def metric_table(runs: Sequence[Run]) -> str:
    """A row for each metric, a column for each run."""
    body: list[str] = []
    for group, rows in _groups():
        cells = [(name, [_shown(value(run)) for run in runs]) for name, value in rows]
        shown = [(name, values) for name, values in cells if any(v != NOTHING for v in values)]
        if shown:
            body.append(
                f'<tr class="group"><th colspan="{len(runs) + 1}">{escape(group)}</th></tr>'
            )
            body += [_row(name, values) for name, values in shown]
    head = "".join(f"<th>{escape(run.name)}</th>" for run in runs)
    return _table(f"<th></th>{head}", "".join(body))


def published_table(figures: Sequence[Published]) -> str:
    """Published figures, ours, and their ratio; empty without any."""
    if not figures:
        return ""
    rows = []
    for each in figures:
        ratio = None if each.ours is None or not each.published else each.ours / each.published
        values = [
            f"{_shown(each.published)} {each.unit}",
            NOTHING if each.ours is None else f"{_shown(each.ours)} {each.unit}",
            _shown(ratio),
            each.source,
            each.note,
        ]
        rows.append(_row(each.what, values))
    head = (
        "<th></th><th>published</th><th>ours</th><th>ours / published</th><th>source</th><th></th>"
    )
    return _table(head, "".join(rows))


def _groups() -> list[tuple[str, list[tuple[str, Value]]]]:
    return [
        (
            "throughput",
            [
                ("tokens/s, whole window", _at("metrics", "tokens_per_s")),
                ("tokens/s, evenly counted", _at("metrics", "steady_tokens_per_s")),
                ("tokens/s, best window", _at("metrics", "best_tokens_per_s")),
                ("best window, s", _at("metrics", "best_window_s")),
                ("accepted, requests/s", _at("metrics", "accepted", "requests_per_s")),
                ("accepted, output tokens/s", _at("metrics", "accepted", "output_tokens_per_s")),
                ("requests in flight, mean", _at("metrics", "accepted", "mean_in_flight")),
                ("goodput, requests/s", _at("metrics", "goodput", "requests_per_s")),
                ("goodput, tokens/s", _at("metrics", "goodput", "tokens_per_s")),
                ("completed within both targets, share", _at("metrics", "goodput", "share")),
            ],
        ),
        (
            "requests",
            [
                (name, _at("metrics", "requests", name))
                for name in ("arrived", "completed", "aborted", "failed", "refused", "overloaded")
            ],
        ),
        *((title, _latency_rows(group)) for group, title in _GROUPS),
        (
            "ranks",
            [
                ("device utilisation", _at("cluster", "device_utilisation")),
                ("CPU time hidden behind compute, share", _at("cluster", "hidden_share")),
                *(
                    (f"rows of a batch, {kind}", _at("cluster", "mean_rows", kind))
                    for kind in ("attention", "expert", "head")
                ),
                *(
                    (
                        f"wait of a batch's oldest row, {kind}, {p}, ms",
                        _at("cluster", "oldest_wait_ms", kind, p),
                    )
                    for kind in ("attention", "expert", "head")
                    for p in ("p50", "p99")
                ),
                *(
                    (
                        f"{name.replace('_', ' ')}, mean of a rank",
                        _at("cluster", "gauges", name, "mean"),
                    )
                    for name in ("used_slots", "used_kv_blocks", "outbox_rows", "outstanding_rows")
                ),
            ],
        ),
    ]


def _latency_rows(group: str) -> list[tuple[str, Value]]:
    rows: list[tuple[str, Value]] = [("requests", _at("metrics", group, "requests"))]
    for name, label in _LATENCIES:
        rows += [
            (f"{label}, {part}", _at("metrics", group, name, part))
            for part in ("mean", "p50", "p90", "p99", "max")
        ]
    return rows


def _at(*path: str) -> Value:
    def value(run: Run) -> Any:
        at: Any = {"metrics": run.metrics, "cluster": run.cluster}
        for name in path:
            at = at.get(name) if isinstance(at, Mapping) else None
        return at

    return value


def _shown(value: Any) -> str:
    if value is None:
        return NOTHING
    if isinstance(value, int):
        return f"{value:,}".replace(",", " ")
    digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2 if abs(value) >= 1 else 3
    return f"{value:,.{digits}f}".replace(",", " ")


def _row(name: str, values: Sequence[str]) -> str:
    return f"<tr><th>{escape(name)}</th>{''.join(f'<td>{escape(v)}</td>' for v in values)}</tr>"


def _table(head: str, body: str) -> str:
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )
