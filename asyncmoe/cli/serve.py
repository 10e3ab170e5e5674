"""`asyncmoe serve`: the HTTP server, until SIGINT or SIGTERM."""

from __future__ import annotations

import argparse
import asyncio
import gc
from typing import Any

from asyncmoe import configflags
from asyncmoe.cli.untilsignal import run_until_signal
from asyncmoe.config import Config
from asyncmoe.server import running_server


def add_parser(subparsers: Any) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "serve",
        help="serve OpenAI's completions API over HTTP",
        description="Serve OpenAI's completions API over HTTP. SIGINT and SIGTERM end all ranks; "
        "running requests are told.",
    )
    configflags.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal. Returns the exit status; raises `AsyncMoeError`."""
    return run_until_signal(serve(configflags.from_args(args)), interrupted=0)


async def serve(config: Config) -> int:
    """Serve until this is cancelled. Prints the address once requests are welcome."""
    async with running_server(config) as server:
        gc.freeze()  # torch's objects are many and stay: a walk over them would stall the loop
        print(f"{server.model_name} is served at {server.url}", flush=True)
        await asyncio.get_running_loop().create_future()
    return 0
