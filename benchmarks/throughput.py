"""Tokens per second of asyncmoe against `transformers`, same checkpoint, same run.

Static batches of equal prompts: what `generate` is best at. Each figure is the best of the repeats,
in turn, so that a busy moment of the machine does not fall on one side only. `decode_tok_s` is
batch * (new - 1) / (time for all tokens - time for one); `prefill_tok_s` is prompt tokens per
second of the run for one token; `tok_s` is new tokens per second of it all. `roofline_fraction` is
the decode rate as a fraction of the most that this machine allows (`roofline.py`), measured before.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import roofline
from checkpoints import ARCHITECTURES, write_checkpoint
from command import count, counts, run_command
from machine import Machine, measure_machine

from asyncmoe.checkpoint import find_directory
from asyncmoe.cli.numberflags import number, whole

Run = Callable[[list[list[int]], int], None]  # (prompts, new tokens)
LEAST_PROMPT_ID = 10  # small ids may mean something


@dataclass(frozen=True, slots=True)
class Engine:
    """Something that generates greedily; `run` returns when all tokens are there."""

    name: str
    run: Run
    close: Callable[[], None] = lambda: None


def asyncmoe_engine(model: str, ranks: int, **settings: Any) -> Engine:
    """Ours."""
    from asyncmoe import LLM, SamplingParams

    llm = LLM(model=model, ranks=ranks, **{"log.level": "warning", **settings})

    def run(prompts: list[list[int]], new_tokens: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
        outputs = llm.generate(prompts, params, progress=False)
        assert all(len(output.token_ids) == new_tokens for output in outputs)

    return Engine(f"asyncmoe, {ranks} ranks", run, llm.close)


def transformers_engine(model: str) -> Engine:
    """`transformers` with grouped_mm experts, the faster of its kinds."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        find_directory(model), dtype="auto", experts_implementation="grouped_mm"
    ).eval()

    def run(prompts: list[list[int]], new_tokens: int) -> None:
        with torch.inference_mode():
            ids = reference.generate(
                torch.tensor(prompts),
                attention_mask=torch.ones(len(prompts), len(prompts[0]), dtype=torch.long),
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        assert ids.shape[1] == len(prompts[0]) + new_tokens

    return Engine("transformers", run)


def synthetic_prompts(batch: int, prompt: int, vocab: int) -> list[list[int]]:
    """Prompts that share no beginning."""
    ids = vocab - LEAST_PROMPT_ID
    return [[(7 * i + 13 * j) % ids + LEAST_PROMPT_ID for j in range(prompt)] for i in range(batch)]


def timed(run: Run, prompts: list[list[int]], new_tokens: int) -> float:
    """Seconds of one run."""
    begin_s = time.perf_counter()
    run(prompts, new_tokens)
    return time.perf_counter() - begin_s


def rates(all_s: float, one_s: float, batch: int, prompt: int, new: int) -> dict[str, float]:
    """The three figures; see the module."""
    return {
        "tok_s": batch * new / all_s,
        "decode_tok_s": batch * (new - 1) / max(all_s - one_s, 1e-9),
        "prefill_tok_s": batch * prompt / one_s,
    }


def best_rates(
    engines: Sequence[Engine],
    prompts: list[list[int]],
    new: int,
    repeats: int,
    limit_s: float,
) -> list[dict[str, float]]:
    """The rates of each engine, all in turn; no further repeat begins after `limit_s`."""
    for engine in engines:
        engine.run(prompts, 2)  # warms up
    best: dict[tuple[int, int], float] = {}
    begin_s = time.perf_counter()
    for repeat in range(repeats):
        if repeat and time.perf_counter() - begin_s > limit_s:
            break
        for new_tokens in (1, new):
            for index, engine in enumerate(engines):
                seconds = timed(engine.run, prompts, new_tokens)
                best[index, new_tokens] = min(seconds, best.get((index, new_tokens), seconds))
    shape = (len(prompts), len(prompts[0]), new)
    return [rates(best[index, new], best[index, 1], *shape) for index in range(len(engines))]


def compare(
    mine: dict[str, float],
    other: dict[str, float],
    shape: roofline.Shape,
    machine: Machine,
    batch: int,
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    """One line of the result."""
    context = arguments.prompt + arguments.new / 2
    step_s = roofline.total(roofline.decode_step(shape, batch, context)).least_s(machine)
    prompt_s = roofline.total(roofline.prefill(shape, batch, arguments.prompt)).least_s(machine)
    return {
        "batch": batch,
        **mine,
        "transformers": other,
        "tok_s_ratio": mine["tok_s"] / other["tok_s"],
        "ratio": mine["decode_tok_s"] / other["decode_tok_s"],
        "prefill_ratio": mine["prefill_tok_s"] / other["prefill_tok_s"],
        "roofline_fraction": mine["decode_tok_s"] * step_s / batch,
        "prefill_roofline_fraction": (
            mine["prefill_tok_s"] * prompt_s / (batch * arguments.prompt)
        ),
    }


def measure(arguments: argparse.Namespace, model: str, machine: Machine) -> list[dict[str, Any]]:
    """All batches; `transformers` and ours at every rank count run in turn."""
    shape = roofline.read_shape(model)
    results: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        engines = [transformers_engine(model)]
        for ranks in arguments.ranks:
            engine = asyncmoe_engine(model, ranks)
            stack.callback(engine.close)
            engines.append(engine)
        for batch in arguments.batch:
            prompts = synthetic_prompts(batch, arguments.prompt, shape.vocab)
            other, *ours = best_rates(
                engines, prompts, arguments.new, arguments.repeats, arguments.limit_s
            )
            for ranks, mine in zip(arguments.ranks, ours, strict=True):
                result = compare(mine, other, shape, machine, batch, arguments)
                results.append({"ranks": ranks, **result})
                print(json.dumps(results[-1]), file=sys.stderr)
    return results


def print_table(machine: Machine, results: list[dict[str, Any]]) -> None:
    """What `--json` prints, for people."""
    print(f"{machine.threads} threads read {machine.read_bytes_s / 1e9:.1f} GB/s")
    print("ranks batch  decode tok/s  x transformers  of roofline  prefill tok/s  x  whole x")
    for r in results:
        print(
            f"{r['ranks']:5} {r['batch']:5} {r['decode_tok_s']:13.1f} {r['ratio']:15.2f} "
            f"{r['roofline_fraction']:12.0%} {r['prefill_tok_s']:14.0f} {r['prefill_ratio']:5.2f} "
            f"{r['tok_s_ratio']:5.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="checkpoint directory; default makes one")
    parser.add_argument("--architecture", choices=ARCHITECTURES, default="qwen3_moe",
                        help="of the checkpoint that is made")  # fmt: skip
    parser.add_argument("--batch", type=counts, default=[1, 8, 32, 128])
    parser.add_argument("--ranks", type=counts, default=[1, 2])
    parser.add_argument("--prompt", type=count, default=64, help="prompt tokens")
    parser.add_argument(
        "--new",
        type=whole(2),
        default=64,
        help="new tokens; the decode rate is that of those after one",
    )
    parser.add_argument("--repeats", type=count, default=3, help="most repeats of a batch")
    parser.add_argument("--limit-s", type=number(0.0, 1e6), default=30.0,
                        help="no further repeat of a batch begins after this")  # fmt: skip
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    machine = measure_machine()
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or str(write_checkpoint(Path(folder), arguments.architecture))
        results = measure(arguments, model, machine)
    if arguments.json:
        print(json.dumps({"machine": machine.report(), "results": results}))
    else:
        print_table(machine, results)


if __name__ == "__main__":
    run_command(main)
