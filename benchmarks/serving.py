"""Tokens per second through the HTTP server beside those of the engine alone: what HTTP costs.

One engine with its server, in turn driven directly, where a caller is woken once for each answer,
and by clients in a process of their own, which share the machine with it and give way to it
(`sseclient.py`): a streamed completion each, over a connection each that stays open. The rate is
new tokens per second from the first request to the last answer's end; each figure is the best of
the repeats. That both go through one engine in one process keeps luck with memory out of the ratio.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import uvloop
from checkpoints import ARCHITECTURES, write_checkpoint
from command import count, counts, run_command
from roofline import read_shape
from sseclient import ClientProcess
from throughput import synthetic_prompts

from asyncmoe import configfile
from asyncmoe.cli.main import GC_THRESHOLD
from asyncmoe.cli.synthetic import run_batch
from asyncmoe.frontend.engine import AsyncEngine
from asyncmoe.server import running_server


def write_tokenizer(path: Path, vocab: int) -> None:
    """A byte-level tokenizer, as most models have, of `vocab` made-up words: every token of a
    random model has text."""
    words = {f"\u0120w{number}": number for number in range(vocab)}  # U+0120 is a space
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(words, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))


async def offline_s(engine: AsyncEngine, prompts: list[list[int]], new_tokens: int) -> float:
    """Seconds for all answers by the engine alone."""
    return (await run_batch(engine, np.asarray(prompts), new_tokens)).whole_s


async def measure(arguments: argparse.Namespace, model: str) -> list[dict[str, Any]]:
    """Both rates for every number of streams."""
    settings = {
        "model.name": model,
        "cluster.ranks": arguments.ranks,
        "server.port": 0,
        "log.level": "warning",
    }
    results = []
    async with running_server(configfile.load(overrides=settings)) as server:
        gc.freeze()  # as `asyncmoe serve` does, and the next
        gc.set_threshold(GC_THRESHOLD, *gc.get_threshold()[1:])
        clients = await ClientProcess.start(server.url)
        try:
            for streams in arguments.streams:
                results.append(await compare(arguments, server.engine, clients, streams))
                print(json.dumps(results[-1]), file=sys.stderr)
        finally:
            await clients.close()
    return results


async def compare(
    arguments: argparse.Namespace, engine: AsyncEngine, clients: ClientProcess, streams: int
) -> dict[str, Any]:
    """Both rates for one number of streams, in turn."""
    prompts = synthetic_prompts(streams, arguments.prompt, engine.rank.spec.vocab)
    await offline_s(engine, prompts, 2)  # warms up
    await clients.run(prompts, 2)
    alone_s, http_s = float("inf"), float("inf")
    for _ in range(arguments.repeats):
        alone_s = min(alone_s, await offline_s(engine, prompts, arguments.new))
        http_s = min(http_s, await clients.run(prompts, arguments.new))
    tokens = streams * arguments.new
    return {
        "streams": streams,
        "ranks": arguments.ranks,
        "offline_tok_s": tokens / alone_s,
        "http_tok_s": tokens / http_s,
        "ratio": alone_s / http_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="checkpoint directory; default makes one with a tokenizer")
    parser.add_argument("--architecture", choices=ARCHITECTURES, default="qwen3_moe",
                        help="of the checkpoint that is made")  # fmt: skip
    parser.add_argument("--streams", type=counts, default=[1, 8, 32])
    parser.add_argument("--ranks", type=count, default=1)
    parser.add_argument("--prompt", type=count, default=64, help="prompt tokens")
    parser.add_argument("--new", type=count, default=64, help="new tokens")
    parser.add_argument("--repeats", type=count, default=4)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model
        if model is None:
            model = str(write_checkpoint(Path(folder), arguments.architecture))
            write_tokenizer(Path(folder), read_shape(model).vocab)
        results = uvloop.run(measure(arguments, model))
    if arguments.json:
        print(json.dumps({"results": results}))
        return
    print("streams  offline tok/s  http tok/s  ratio")
    for r in results:
        print(
            f"{r['streams']:7} {r['offline_tok_s']:14.1f} {r['http_tok_s']:11.1f} {r['ratio']:6.3f}"
        )


if __name__ == "__main__":
    run_command(main)
