"""Starts the ranks of a benchmark as processes, and makes one table of what they report."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import orjson

from asyncmoe.errors import AsyncMoeError
from asyncmoe.netbench.plan import Case, Plan

_START_S = 90.0
_END_S = 5.0
_SHOWN_CHARS = 2000  # of what a rank that died said last


class BenchFailed(AsyncMoeError):
    """A benchmark has no result; the message says why."""


def run(plan: Plan) -> list[dict[str, Any]]:
    """The results of one transport, one for each case. Raises `BenchFailed`."""
    with tempfile.TemporaryDirectory(prefix="asyncmoe-bench-") as name:
        folder = Path(name)
        ranks = [_start(plan, folder, rank) for rank in range(plan.ranks)]
        cases = plan.cases()
        measuring_s = 3 * plan.rounds * plan.seconds + 5.0
        try:
            _wait(ranks, time.monotonic() + _START_S + plan.idle_s + len(cases) * measuring_s)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        reports = [_report(folder, rank) for rank in range(plan.ranks)]
    return [_result(plan, case, reports) for case in cases]


def _start(plan: Plan, folder: Path, rank: int) -> subprocess.Popen[bytes]:
    said = (folder / f"said-{rank}").open("wb")  # libraries write to both streams
    with said:
        return subprocess.Popen(
            [
                sys.executable,
                "-m",
                "asyncmoe.netbench.rank",
                plan.encode(),
                str(folder),
                str(rank),
            ],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
        )


def _wait(ranks: list[subprocess.Popen[bytes]], deadline_s: float) -> None:
    """Until all have ended, or a while after the first that failed, or it takes too long."""
    failed_s = None
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline_s:
        if failed_s is None and any(rank.poll() for rank in ranks):
            failed_s = time.monotonic()
        if failed_s is not None and time.monotonic() > failed_s + _END_S:
            return
        time.sleep(0.05)


def _report(folder: Path, rank: int) -> dict[str, Any]:
    path = folder / f"report-{rank}.json"
    if not path.exists():
        said = (folder / f"said-{rank}").read_text(errors="replace").strip()
        raise BenchFailed(f"rank {rank} left no report; it said: {said[-_SHOWN_CHARS:]}")
    report: dict[str, Any] = orjson.loads(path.read_bytes())
    if "error" in report:
        raise BenchFailed(report["error"])
    return report


def _result(plan: Plan, case: Case, reports: list[dict[str, Any]]) -> dict[str, Any]:
    """One line: the best round of a case, over all its flows."""
    rounds = [[report["ours"][case.number][n] for report in reports] for n in range(plan.rounds)]
    gigabytes, rate, best = max(
        (_rate(case, ranks) for ranks in rounds), key=lambda found: found[1]
    )
    sending = [best[source] for source, _ in case.flows]
    raw = reports[0]["raw_gb_per_s"][case.number]
    return {
        "transport": plan.transport,
        "size": case.size,
        "depth": case.depth,
        "flows": [f"{source}-{target}" for source, target in case.flows],
        "gb_per_s": round(rate, 4),
        "raw_gb_per_s": None if raw is None else round(raw, 4),
        "ratio": None if raw is None else round(rate / raw, 3),
        "p50_us": round(max(flow["p50_us"] for flow in sending), 1),
        "p99_us": round(max(flow["p99_us"] for flow in sending), 1),
        "cpu_s_per_gb": round(sum(rank["cpu_s"] for rank in best) / gigabytes, 4),
        "idle_cpu": round(max(report["idle_cpu"] for report in reports), 4),
    }


def _rate(case: Case, ranks: list[dict[str, Any]]) -> tuple[float, float, list[dict[str, Any]]]:
    """GB that moved in a round, GB/s of all flows together, and the round itself."""
    flows = [ranks[source] for source, _ in case.flows]
    gigabytes = case.size * sum(flow["count"] for flow in flows) / 1e9
    return gigabytes, gigabytes / max(flow["seconds"] for flow in flows), ranks
