"""`asyncmoe simulate`: an experiment of a file, in the virtual world."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

from asyncmoe.cli.numberflags import whole
from asyncmoe.cli.untilsignal import run_until_signal
from asyncmoe.experiment.figures import read_figures
from asyncmoe.experiment.grid import Setting, settings
from asyncmoe.experiment.outcome import Outcome
from asyncmoe.experiment.pool import Result, run_all
from asyncmoe.experiment.precheck import check
from asyncmoe.experiment.schema import Experiment, load
from asyncmoe.outfile import check_writable, write_file
from asyncmoe.report.results import Results


def add_parser(subparsers: Any) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "simulate",
        help="run an experiment in the virtual world",
        description="Run the engine on modelled devices and links, once for each combination that "
        "the file asks for, and print its figures. See docs/experiments.md.",
    )
    parser.add_argument("file", type=Path, metavar="EXPERIMENT.toml")
    add_run_arguments(parser)


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """What `simulate` and `compare` have in common."""
    parser.add_argument(
        "--quick", action="store_true", help="the short window of the file, for a first look"
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--report", type=Path, metavar="FILE.html", help="write a report as well")
    parser.add_argument(
        "--results", type=Path, metavar="FILE.json", help="write every run's metrics as well"
    )
    parser.add_argument("--seed", type=whole(0), metavar="N", help="instead of the file's")
    parser.add_argument(
        "--jobs", type=whole(1), metavar="N", help="runs at once (default: one for each core)"
    )


def run(args: argparse.Namespace) -> int:
    """Run it. Returns the exit status; raises `AsyncMoeError`."""
    return run_experiment(load(args.file), args, Outcome.figures, Outcome.text)


def run_experiment(
    experiment: Experiment,
    args: argparse.Namespace,
    as_json: Callable[[Outcome], dict[str, Any]],
    as_text: Callable[[Outcome], str],
) -> int:
    """Run, print and write what `args` ask for. Returns the exit status; raises `AsyncMoeError`.

    Where runs failed, or a signal ended them, what the others gave is printed all the same.
    """
    if args.seed is not None:
        experiment = experiment.model_copy(update={"seed": args.seed})
    figures = read_figures(experiment)  # a mistake in them is known before hours of work
    runs = settings(experiment, args.quick)
    check(runs)
    for flag in ("results", "report"):
        if getattr(args, flag) is not None:
            check_writable(getattr(args, flag), f"--{flag}")
    # Live runs would take each other's time.
    jobs = 1 if experiment.world == "live" else args.jobs or len(os.sched_getaffinity(0))
    found: list[Result] = [{"error": "it was ended before it was through"} for _ in runs]

    def check_metrics(number: int) -> None:
        for figure in figures:
            figure.check(runs[number].names, found[number]["metrics"])

    status = run_until_signal(_run(runs, jobs, found, check_metrics))
    outcome = Outcome(experiment, runs, found)
    sys.stderr.write(outcome.costs_text())
    if outcome.ended or args.json:
        text = orjson.dumps(as_json(outcome)).decode() if args.json else as_text(outcome)
        sys.stdout.write(text + "\n")
    if args.results is not None or args.report is not None:
        _write(outcome.report(_command()), args)
    return status


async def _run(
    runs: list[Setting], jobs: int, found: list[Result], check_metrics: Callable[[int], None]
) -> int:
    await run_all(runs, jobs, found, check_metrics)
    return int(any("error" in each for each in found))


def _write(results: Results, args: argparse.Namespace) -> None:
    if args.results is not None:
        write_file(args.results, results.to_json())
    if args.report is not None:
        from asyncmoe.report.page import write_report

        write_report(results, args.report)


def _command() -> str:
    """This command, to be typed again."""
    return shlex.join(["asyncmoe", *sys.argv[1:]])
