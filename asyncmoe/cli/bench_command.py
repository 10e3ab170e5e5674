"""`asyncmoe bench`: the rates of a synthetic run, and with `--where` what its time went into."""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import orjson

from asyncmoe import configflags
from asyncmoe.cli import workload_bench
from asyncmoe.cli.numberflags import whole
from asyncmoe.cli.synthetic import Finished, random_prompts, run_batch
from asyncmoe.cli.timetable import time_table
from asyncmoe.cli.untilsignal import run_until_signal
from asyncmoe.config import Config
from asyncmoe.errors import ConfigError
from asyncmoe.frontend.engine import AsyncEngine
from asyncmoe.metrics.account import Account, accounts

WARM_TOKENS = 4
REDRAW_S = 1.0


@dataclass(frozen=True, slots=True)
class Run:
    """What the command line asks for besides the configuration."""

    batch: int
    prompt: int
    new: int
    seed: int
    where: bool
    as_json: bool


def add_parser(subparsers: Any) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "bench",
        help="measure rates, and where the time goes",
        description="Answer a batch of equal random prompts at once, after a short run to warm up, "
        "and print tokens per second, time to the first token and time between tokens. A step is "
        "one token for every request. With any flag of a workload it runs that instead, live, and "
        "prints the metrics that users and papers define.",
    )
    parser.add_argument(
        "--where",
        action="store_true",
        help="also print where the time of a step went, on each rank; on a terminal it is shown "
        "while it runs",
    )
    parser.add_argument("--batch", type=whole(1), default=32, help="requests at once (default 32)")
    parser.add_argument("--prompt", type=whole(1), default=64, help="prompt tokens (default 64)")
    parser.add_argument("--new", type=whole(1), default=64, help="new tokens of each (default 64)")
    parser.add_argument("--seed", type=whole(0), default=0, help="of the prompts (default 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    workload_bench.add_arguments(parser)
    configflags.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print. Returns the exit status; raises `AsyncMoeError`."""
    config = configflags.from_args(args)
    if workload_bench.is_asked(args):
        if args.where:
            raise ConfigError("--where is for the run of equal prompts; a workload has a report")
        command = shlex.join(["asyncmoe", *sys.argv[1:]])
        return workload_bench.run(config, args, command)
    asked = Run(args.batch, args.prompt, args.new, args.seed, args.where, args.json)
    return run_until_signal(_bench(config, asked))


async def _bench(config: Config, asked: Run) -> int:
    engine = await AsyncEngine.start(config)
    try:
        vocab = engine.rank.spec.vocab
        prompts = random_prompts(asked.batch, asked.prompt, vocab, asked.seed)
        await run_batch(engine, prompts, min(asked.new, WARM_TOKENS))
        before, tokens_before = await engine.stats(), engine.tokens_out

        async def table() -> str:
            steps = (engine.tokens_out - tokens_before) / asked.batch
            return time_table(accounts(before, await engine.stats()), max(steps, 1.0))

        live = asked.where and not asked.as_json and sys.stdout.isatty()
        async with _redrawn(table) if live else _nothing():
            done = await run_batch(engine, prompts, asked.new)
        where = accounts(before, await engine.stats())
    finally:
        await engine.close()
    report = _report(engine, asked, done, where)
    if asked.as_json:
        sys.stdout.write(orjson.dumps(report).decode() + "\n")
    else:
        sys.stdout.write(_text(report, where if asked.where else {}, asked) + "\n")
    return 0


def _report(
    engine: AsyncEngine, asked: Run, done: Finished, where: dict[int, Account]
) -> dict[str, Any]:
    report = {
        "model": engine.config.model.name,
        "ranks": engine.rank.placement.world,
        "scheduler": engine.config.scheduler.name,
        "transport": engine.transport_name,
        "batch": asked.batch,
        "prompt": asked.prompt,
        "new": asked.new,
        **done.rates(),
    }
    if asked.where:
        figures = {str(rank): each.figures(asked.new) for rank, each in where.items()}
        report["where"] = {"steps": asked.new, "ranks": figures}
    return report


def _text(report: dict[str, Any], where: dict[int, Account], asked: Run) -> str:
    first, between = report["ttft_ms"], report["itl_ms"]
    decode = report["decode_tokens_per_s"]
    lines = [
        f"{report['model']}: {asked.batch} requests of {asked.prompt} + {asked.new} tokens, "
        f"{report['ranks']} ranks over {report['transport']}, {report['scheduler']}",
        f"{report['tokens_per_s']:.1f} tokens/s"
        + ("" if decode is None else f", {decode:.1f} once all have their first"),
        f"first token after {first['p50']:.1f} ms (p99 {first['p99']:.1f} ms)"
        + ("" if decode is None else f", then {between['p50']:.2f} ms (p99 {between['p99']:.2f})"),
    ]
    if where:
        lines += [f"\na step of {asked.batch} tokens, prompts included:", ""]
        lines.append(time_table(where, asked.new))
    return "\n".join(lines)


@asynccontextmanager
async def _redrawn(table: Any) -> AsyncIterator[None]:
    """Show `await table()` in one place of the terminal, anew each second."""

    async def draw() -> None:
        lines = 0
        try:
            while True:
                await asyncio.sleep(REDRAW_S)
                text = await table()
                sys.stdout.write(_up(lines) + text + "\n")
                sys.stdout.flush()
                lines = text.count("\n") + 1
        finally:
            sys.stdout.write(_up(lines))

    drawing = asyncio.create_task(draw())
    try:
        yield
    finally:
        drawing.cancel()
        with suppress(asyncio.CancelledError):
            await drawing


@asynccontextmanager
async def _nothing() -> AsyncIterator[None]:
    yield


def _up(lines: int) -> str:
    """To the line that many above, with all below it cleared."""
    return f"\x1b[{lines}A\x1b[J" if lines else ""
