"""`asyncmoe demo`: two ranks, an HTTP server, one streamed answer, and where its time went."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import orjson

from asyncmoe import configfile, configflags, log
from asyncmoe.cli.numberflags import whole
from asyncmoe.cli.timetable import time_table
from asyncmoe.cli.untilsignal import run_until_signal
from asyncmoe.config import Config
from asyncmoe.errors import RequestFailed
from asyncmoe.metrics.account import accounts
from asyncmoe.server import running_server

DEFAULTS = {"cluster.ranks": 2, "server.port": 0, "log.level": "warning"}


def add_parser(subparsers: Any) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "demo",
        help="start two ranks and a server, stream one answer, show where its time went",
        description="Start two ranks and an HTTP server on loopback, stream one answer of the "
        "built-in model to the terminal, show where its time went, and stop.",
    )
    parser.add_argument(
        "--prompt", default="There was once a prince", help="what the model continues"
    )
    parser.add_argument("--max-tokens", type=whole(1), default=128, help="most new tokens")
    configflags.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run the demonstration. Returns the exit status; raises `AsyncMoeError`."""
    config = configfile.load(args.config, overrides=DEFAULTS, flags=configflags.settings(args))
    log.setup(config.log.level)
    return run_until_signal(_demo(config, args.prompt, args.max_tokens))


async def _demo(config: Config, prompt: str, max_tokens: int) -> int:
    began_s = time.monotonic()
    async with running_server(config) as server:
        engine = server.engine
        _say(
            f"{engine.rank.placement.world} ranks over {engine.transport_name} and a server at "
            f"{server.url}, up in {time.monotonic() - began_s:.1f} s"
        )
        _say(f"POST /v1/completions: {server.model_name!r} goes on from {prompt!r}\n")
        before = await engine.stats()
        body = {
            "model": server.model_name,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        sys.stdout.write(prompt)
        tokens, first_s, whole_s = await _stream_answer(f"{server.url}/v1/completions", body)
        after = await engine.stats()
        _say(
            f"\n\n{tokens} tokens in {whole_s:.2f} s over HTTP: {tokens / whole_s:.1f} tokens/s, "
            f"the first after {first_s * 1e3:.0f} ms\n"
        )
        _say(time_table(accounts(before, after)))
    _say("\nstopped")
    return 0


async def _stream_answer(url: str, body: dict[str, Any]) -> tuple[int, float, float]:
    """Show the answer as it comes. Returns tokens, seconds to the first and to the last."""
    began_s = time.monotonic()
    first_s, tokens = 0.0, 0
    async for event in _events(url, body):
        if "error" in event:
            raise RequestFailed(event["error"]["message"])
        if event.get("usage"):
            tokens = event["usage"]["completion_tokens"]
        for choice in event["choices"]:
            first_s = first_s or time.monotonic() - began_s
            sys.stdout.write(choice["text"])
            sys.stdout.flush()
    return tokens, first_s, time.monotonic() - began_s


async def _events(url: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
        if response.status != 200:
            raise RequestFailed((await response.json())["error"]["message"])
        async for line in response.content:
            data = line.removeprefix(b"data: ").strip()
            if data and data != b"[DONE]":
                yield orjson.loads(data)


def _say(text: str) -> None:
    print(text, flush=True)
