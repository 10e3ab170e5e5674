"""`asyncmoe transports`: which transports work on this machine, and how they compare on it."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

import orjson

from asyncmoe import registry
from asyncmoe.cli.numberflags import number, several, whole
from asyncmoe.errors import UnknownName
from asyncmoe.netbench.plan import FOCUS_BYTES, MIB, PATTERNS, SWEEP_BYTES, Plan

# Not compared unless they are named: one joins ranks of one process, and two are made of others.
_NOT_COMPARED = ("auto", "impaired", "inproc")
_DEPTHS = (1, 16)
_MOST_BYTES = 1024 * MIB
_MOST_DEPTH = 4096
_COLUMNS = (
    ("transport", "transport"),
    ("size", "bytes"),
    ("depth", "depth"),
    ("flows", "ranks"),
    ("gb_per_s", "GB/s"),
    ("raw_gb_per_s", "raw GB/s"),
    ("ratio", "ratio"),
    ("p50_us", "p50 µs"),
    ("p99_us", "p99 µs"),
    ("cpu_s_per_gb", "CPU s/GB"),
    ("idle_cpu", "idle CPU"),
)


def add_parser(subparsers: Any) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "transports",
        help="list the transports that work here, or compare them",
        description="list: try every transport on this machine. bench: measure them between "
        "processes, each beside the stack under it called directly.",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="{list,bench}")
    listed = actions.add_parser(
        "list", help="try every transport on this machine", allow_abbrev=False
    )
    bench = actions.add_parser("bench", help="measure them between processes", allow_abbrev=False)
    for action in (listed, bench):
        action.add_argument("--json", action="store_true", help="print JSON")
    bench.add_argument(
        "--transports", type=_names, metavar="A,B", help="which; by default all that are compared"
    )
    bench.add_argument("--ranks", type=whole(2, 64), default=2, help="processes (default 2)")
    bench.add_argument(
        "--pattern",
        choices=PATTERNS,
        default=PATTERNS[0],
        help="each pair of ranks in turn, or all others to rank 0 at once (default pairs)",
    )
    bench.add_argument(
        "--sizes",
        type=several(whole(1, _MOST_BYTES)),
        default=(FOCUS_BYTES,),
        metavar="N,N",
        help=f"bytes of a payload (default {FOCUS_BYTES})",
    )
    bench.add_argument(
        "--sweep", action="store_true", help="sizes from 4 KiB to 16 MiB instead of --sizes"
    )
    bench.add_argument(
        "--depth",
        type=several(whole(1, _MOST_DEPTH)),
        default=_DEPTHS,
        metavar="N,N",
        help="parcels in flight (default 1,16)",
    )
    bench.add_argument(
        "--seconds", type=number(0.001, 3600), default=0.5, help="of each round (default 0.5)"
    )
    bench.add_argument(
        "--rounds", type=whole(1, 1000), default=3, help="of each case; the best counts (3)"
    )
    bench.add_argument(
        "--idle", type=number(0.001, 3600), default=1.0, help="seconds for idle CPU (default 1)"
    )
    bench.add_argument("--plot", type=Path, metavar="FOLDER", help="also draw PNG files there")


def run(args: argparse.Namespace) -> int:
    """Print. Returns the exit status; raises `AsyncMoeError`."""
    return _list(args.json) if args.action == "list" else _bench(args)


def _list(as_json: bool) -> int:
    from asyncmoe.cli.trials import try_transports  # brings torch

    trials = try_transports()
    if as_json:
        _print_json({"transports": [dataclasses.asdict(trial) for trial in trials]})
    else:
        for trial in trials:
            sys.stdout.write(f"{trial.name:<10} {trial.status:<8} {trial.detail}\n")
    return int(any(trial.status == "broken" for trial in trials))


def _bench(args: argparse.Namespace) -> int:
    from asyncmoe.netbench.run import BenchFailed
    from asyncmoe.netbench.run import run as measure

    if args.plot is not None:
        from asyncmoe.netbench import plots

        plots.check()
    known = registry.names("transports")
    chosen = args.transports or [name for name in known if name not in _NOT_COMPARED]
    for name in chosen:
        if name.partition(":")[0] not in known and ".py:" not in name:
            raise UnknownName("transport", name, known)
    sizes = SWEEP_BYTES if args.sweep else args.sizes
    shape = (args.ranks, args.pattern, sizes, args.depth, args.seconds, args.rounds, args.idle)
    results: list[dict[str, Any]] = []
    skipped: list[dict[str, str]] = []
    for name in chosen:
        try:
            results += measure(Plan(name, *shape))
        except BenchFailed as error:
            skipped.append({"transport": name, "reason": str(error)})
    if args.json:
        _print_json({"results": results, "skipped": skipped})
    else:
        sys.stdout.write(_table(results))
        for each in skipped:
            sys.stdout.write(f"{each['transport']}: not measured: {each['reason']}\n")
    if args.plot is not None and results:
        for path in plots.draw(results, args.plot):
            print(path, file=sys.stderr)
    return int(not results)


def _table(results: list[dict[str, Any]]) -> str:
    cells = [[title for _, title in _COLUMNS]]
    cells += [[_cell(result[key]) for key, _ in _COLUMNS] for result in results]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ("  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in cells)
    return "".join(f"{line}\n" for line in lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return " ".join(value) if isinstance(value, list) else str(value)


def _print_json(value: Any) -> None:
    sys.stdout.write(orjson.dumps(value).decode() + "\n")


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]
