"""`asyncmoe bench` with a workload: a live run, its figures, and the report."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

from asyncmoe.cli import workload_flags
from asyncmoe.cli.untilsignal import run_until_signal
from asyncmoe.config import Config
from asyncmoe.errors import AsyncMoeError
from asyncmoe.metrics.recorder import Recorder
from asyncmoe.metrics.summary import MeasureConfig
from asyncmoe.outfile import check_writable, write_file
from asyncmoe.report.page import write_report
from asyncmoe.report.results import Results, Run
from asyncmoe.workload.liverun import run_live
from asyncmoe.workload.workload import WorkloadConfig

REDRAW_S = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that make `bench` run a workload."""
    workload_flags.add_arguments(parser)
    group = parser.add_argument_group("results of a workload")
    group.add_argument("--output", metavar="FILE", help="write all results as JSON")
    group.add_argument("--report", metavar="FILE", help="write a report as one HTML file")
    group.add_argument(
        "--record-routing",
        metavar="FILE",
        help="write which experts every token went to (Parquet), for --routing replay:FILE",
    )


def is_asked(args: argparse.Namespace) -> bool:
    """Whether the command line asks for a workload."""
    asked = workload_flags.given(args, WorkloadConfig), workload_flags.given(args, MeasureConfig)
    return any(asked) or any((args.output, args.report, args.record_routing))


def run(config: Config, args: argparse.Namespace, command: str) -> int:
    """Run it, print and write what came of it. Returns the exit status; raises `AsyncMoeError`."""
    values = workload_flags.given(args, WorkloadConfig)
    values.setdefault("lengths", f"fixed:{args.prompt},{args.new}")
    if not values.keys() & {"requests", "duration_s"}:
        values["requests"] = args.batch
    workload = workload_flags.workload({**values, "seed": args.seed})
    measure = workload_flags.measure(workload_flags.given(args, MeasureConfig))
    for flag in ("output", "report"):
        if getattr(args, flag) is not None:
            check_writable(Path(getattr(args, flag)), f"--{flag}")
    if args.record_routing is not None:
        path = str(Path(args.record_routing).expanduser().absolute())
        model = config.model.model_copy(update={"record_routing": path})
        config = config.model_copy(update={"model": model})
    made: list[Run] = []
    status = run_until_signal(_measured(config, workload, measure, made, not args.json))
    if not made:
        return status
    if not made[0].metrics["tokens"]:
        ends = made[0].metrics["requests"]
        raise AsyncMoeError(f"no request got a token; how they ended: {ends}")
    _tell(_results(config, workload, measure, made[0], command), args)
    return status


async def _measured(
    config: Config, workload: WorkloadConfig, measure: MeasureConfig, made: list[Run], show: bool
) -> int:
    """Append the run to `made`, unless a signal ends it."""
    name = config.scheduler.name
    with _progress(workload) as started:
        made.append(
            await run_live(
                config,
                workload,
                measure,
                name=name,
                series=name,
                settings={"scheduler": name, "transport": config.transport.name},
                started=started if show else None,
            )
        )
    return 0


def _results(
    config: Config, workload: WorkloadConfig, measure: MeasureConfig, run: Run, command: str
) -> Results:
    ranks = "1 rank" if config.cluster.ranks == 1 else f"{config.cluster.ranks} ranks"
    return Results(
        title=f"{config.model.name} on {ranks}: {workload.lengths}, {workload.arrivals}",
        world="live",
        command=command,
        config=_shown(config),
        workload=workload.model_dump(exclude_none=True),
        measure=measure.model_dump(),
        runs=[run],
    )


def _tell(results: Results, args: argparse.Namespace) -> None:
    text = results.to_json().decode() + "\n" if args.json else _text(results, results.runs[0])
    sys.stdout.write(text)
    if args.output is not None:
        write_file(Path(args.output), results.to_json() + b"\n")
    if args.report is not None:
        write_report(results, Path(args.report))


def _shown(config: Config) -> dict[str, Any]:
    """What differs from the defaults, without secrets."""
    shown = config.model_dump(exclude_defaults=True)
    shown.get("cluster", {}).pop("token", None)
    return {name: section for name, section in shown.items() if section}


def _text(results: Results, run: Run) -> str:
    metrics, latency = run.metrics, run.metrics["all"]
    requests, goodput = metrics["requests"], metrics["goodput"]
    window = metrics["window"]
    lines = [
        results.title,
        f"{metrics['tokens_per_s']:.1f} tokens/s over {window['end_s'] - window['begin_s']:.1f} s, "
        f"{metrics['best_tokens_per_s']:.1f} in the best {metrics['best_window_s']:.1f} s",
        f"{requests['arrived']} requests came, {metrics['accepted']['requests_per_s']:.2f}/s were "
        f"taken, {requests['completed']} completed, "
        + ", ".join(f"{requests[n]} {n}" for n in ("failed", "refused", "overloaded")),
        f"goodput {goodput['requests_per_s']:.2f} requests/s within TTFT "
        f"{goodput['ttft_target_ms']:g} ms and ITL {goodput['itl_target_ms']:g} ms",
        "",
        f"{'ms':24}{'mean':>10}{'p50':>10}{'p90':>10}{'p99':>10}{'max':>10}",
        _line("TTFT", latency["ttft_ms"]),
        _line("ITL", latency["itl_ms"]),
        _line("completion", latency["completion_ms"]),
        _line("ITL, slowest 1 %", metrics["slowest_1_percent"]["itl_ms"]),
        _line("ITL, slowest request", metrics["slowest"]["itl_ms"]),
        "",
    ]
    cluster = run.cluster
    rows = ", ".join(f"{kind} {mean:.1f}" for kind, mean in cluster["mean_rows"].items())
    lines += [
        f"devices busy {100 * (cluster['device_utilisation'] or 0):.0f} %; CPU time hidden behind "
        f"compute {100 * (cluster['hidden_share'] or 0):.0f} %; rows of a batch: {rows}",
    ]
    return "\n".join(lines) + "\n"


def _line(name: str, spread: dict[str, float] | None) -> str:
    if spread is None:
        return f"{name:24}{'-':>10}"
    return f"{name:24}" + "".join(
        f"{spread[p]:10.2f}" for p in ("mean", "p50", "p90", "p99", "max")
    )


@contextmanager
def _progress(workload: WorkloadConfig) -> Iterator[Any]:
    """Gives what takes the recorder of the run; shows it on a terminal until the end."""
    tasks: list[asyncio.Task[None]] = []

    def started(recorder: Recorder) -> None:
        if sys.stderr.isatty():
            tasks.append(asyncio.create_task(_draw(recorder, workload)))

    try:
        yield started
    finally:
        for task in tasks:
            task.cancel()


async def _draw(recorder: Recorder, workload: WorkloadConfig) -> None:
    loop = asyncio.get_running_loop()
    begin_s, by_time = loop.time(), workload.duration_s is not None
    total = workload.duration_s if by_time else workload.requests
    form = "{l_bar}{bar}| {n:.0f}/{total:.0f} {unit} {postfix}"
    with tqdm(total=total, unit="s" if by_time else "requests", bar_format=form) as bar:
        while True:
            await asyncio.sleep(REDRAW_S)
            passed_s = loop.time() - begin_s
            bar.n = min(passed_s, total or passed_s) if by_time else recorder.ended_count
            bar.set_postfix_str(
                f"{recorder.token_count / passed_s:.0f} tokens/s, {recorder.running_count} running"
            )
