"""`asyncmoe generate`: one prompt, one answer."""

from __future__ import annotations

import argparse
import sys
from typing import Any, TextIO

import numpy as np
import orjson

from asyncmoe import configflags
from asyncmoe.cli import samplingflags
from asyncmoe.cli.untilsignal import run_until_signal
from asyncmoe.config import Config
from asyncmoe.errors import RequestFailed
from asyncmoe.frontend.engine import AsyncEngine
from asyncmoe.frontend.output import RequestOutput
from asyncmoe.frontend.prompts import Prompt
from asyncmoe.sampling import SamplingParams


def add_parser(subparsers: Any) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "generate",
        help="answer one prompt",
        description="Answer one prompt. The answer goes to standard output, all else to standard "
        "error.",
    )
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="the prompt as text")
    prompt.add_argument("--prompt-ids", metavar="IDS", help="the prompt as token ids: 5,17,9")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of streaming the text"
    )
    samplingflags.add_arguments(parser, temperature=0.0, max_tokens=128)
    configflags.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Answer the prompt. Returns the exit status; raises `AsyncMoeError`."""
    config, params = configflags.from_args(args), samplingflags.from_args(args)
    prompt: Prompt = args.prompt
    if args.prompt_ids is not None:
        prompt = samplingflags.token_ids(args.prompt_ids, "prompt-ids")
    return run_until_signal(_generate(config, prompt, params, as_json=args.json))


async def _generate(config: Config, prompt: Prompt, params: SamplingParams, as_json: bool) -> int:
    engine = await AsyncEngine.start(config)
    try:
        if as_json:
            async with engine.generate(prompt, params) as generation:
                output = await generation.complete()
        else:
            output = await _stream(engine, prompt, params, sys.stdout)
        report = _report(engine, output)
    finally:
        await engine.close()
    if as_json:
        sys.stdout.write(orjson.dumps(report).decode() + "\n")
    else:
        sys.stderr.write(summary(report) + "\n")
    return 0


async def _stream(
    engine: AsyncEngine, prompt: Prompt, params: SamplingParams, out: TextIO
) -> RequestOutput:
    """Write the text as it comes, or the ids where there is no tokenizer."""
    last: RequestOutput | None = None
    async for last in engine.generate(prompt, params):
        ids = "".join(f"{token} " for token in last.new_token_ids)
        out.write(ids if last.delta is None else last.delta)
        out.flush()
    if last is None:
        raise RequestFailed("the request ended without an answer")
    out.write("\n")
    return last


def _report(engine: AsyncEngine, output: RequestOutput) -> dict[str, Any]:
    report = {
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "prompt_tokens": len(output.prompt_token_ids),
        **timing(output),
        "ranks": engine.rank.placement.world,
        "scheduler": engine.config.scheduler.name,
        "transport": engine.transport_name,
    }
    if output.logprobs is not None:
        report["logprobs"] = [
            {"token_id": each.token_id, "logprob": each.logprob, "top": each.top}
            for each in output.logprobs
        ]
    return report


def timing(output: RequestOutput) -> dict[str, Any]:
    """Rates of one answer: over all of its time, to the first token, and between tokens."""
    transcript = output.transcript
    whole_s = transcript.token_times_s[-1] - transcript.arrival_s
    gaps_ms = np.array(transcript.gaps_s) * 1e3
    p50, p99 = (float(np.percentile(gaps_ms, q)) if len(gaps_ms) else None for q in (50, 99))
    return {
        "tokens_per_s": len(transcript.token_ids) / whole_s,
        "ttft_s": transcript.ttft_s,
        "itl_ms": {
            "mean": float(gaps_ms.mean()) if len(gaps_ms) else None,
            "p50": p50,
            "p99": p99,
        },
    }


def summary(report: dict[str, Any]) -> str:
    """The numbers of one answer in a line."""
    gap = report["itl_ms"]
    between = "" if gap["mean"] is None else f", then {gap['p50']:.1f} ms (p99 {gap['p99']:.1f} ms)"
    return (
        f"{len(report['token_ids'])} tokens, {report['tokens_per_s']:.1f} tokens/s; first after "
        f"{report['ttft_s'] * 1e3:.0f} ms{between}; {report['ranks']} ranks over "
        f"{report['transport']}, {report['scheduler']}"
    )
