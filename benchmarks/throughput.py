"""Tokens per second of asyncmoe against `transformers`, same checkpoint, same run.

Static batches of equal prompts: what `generate` is best at. Each figure is the best of the repeats,
in turn, so that a busy moment of the machine does not fall on one side only.
`decode_tok_s` is batch * (new - 1) / (time for all tokens - time for one); `prefill_tok_s` is
prompt tokens per second of the run for one token; `tok_s` is new tokens per second of it all.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from checkpoints import write_checkpoint

Run = Callable[[list[list[int]], int], None]  # (prompts, new tokens)


def asyncmoe_run(model: str, ranks: int) -> tuple[Run, Callable[[], None]]:
    """Greedy generation by asyncmoe, and how to end it."""
    from asyncmoe import LLM, SamplingParams

    llm = LLM(model=model, ranks=ranks, **{"log.level": "warning"})

    def run(prompts: list[list[int]], new_tokens: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
        outputs = llm.generate(prompts, params, progress=False)
        assert all(len(output.token_ids) == new_tokens for output in outputs)

    return run, llm.close


def transformers_run(model: str) -> tuple[Run, Callable[[], None]]:
    """Greedy generation by `transformers` with grouped_mm experts, the faster of its two kinds."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype="auto").eval()

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

    return run, lambda: None


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


def measure(arguments: argparse.Namespace, model: str) -> list[dict[str, Any]]:
    """All batches, ours at every rank count and theirs."""
    results = []
    for ranks in arguments.ranks:
        ours, close = asyncmoe_run(model, ranks)
        theirs, _ = transformers_run(model)
        try:
            for batch in arguments.batch:
                results.append(compare(arguments, ours, theirs, batch) | {"ranks": ranks})
                print(json.dumps(results[-1]), file=sys.stderr)
        finally:
            close()
    return results


def compare(arguments: argparse.Namespace, ours: Run, theirs: Run, batch: int) -> dict[str, Any]:
    """One batch size: both in turn, the best of each."""
    prompts = [
        [(7 * i + 13 * j) % 31000 + 10 for j in range(arguments.prompt)] for i in range(batch)
    ]
    best: dict[tuple[str, int], float] = {}
    for run in (ours, theirs):
        run(prompts, 2)  # warms up
    for _ in range(arguments.repeats):
        for new_tokens in (1, arguments.new):
            for name, run in (("ours", ours), ("theirs", theirs)):
                seconds = timed(run, prompts, new_tokens)
                best[name, new_tokens] = min(seconds, best.get((name, new_tokens), seconds))
    shape = (batch, arguments.prompt, arguments.new)
    mine = rates(best["ours", arguments.new], best["ours", 1], *shape)
    other = rates(best["theirs", arguments.new], best["theirs", 1], *shape)
    return {
        "batch": batch,
        **mine,
        "transformers": other,
        "tok_s_ratio": mine["tok_s"] / other["tok_s"],
        "ratio": mine["decode_tok_s"] / other["decode_tok_s"],
        "prefill_ratio": mine["prefill_tok_s"] / other["prefill_tok_s"],
    }


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="checkpoint directory; default makes one")
    parser.add_argument("--batch", type=numbers, default=[1, 8, 32])
    parser.add_argument("--ranks", type=numbers, default=[1, 2])
    parser.add_argument("--prompt", type=int, default=64, help="prompt tokens")
    parser.add_argument("--new", type=int, default=64, help="new tokens")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or str(write_checkpoint(Path(folder)))
        results = measure(arguments, model)
    if arguments.json:
        print(json.dumps({"results": results}))
        return
    print("ranks batch   tok/s  x transformers   decode x   prefill x")
    for r in results:
        print(
            f"{r['ranks']:5} {r['batch']:5} {r['tok_s']:7.1f} {r['tok_s_ratio']:15.2f} "
            f"{r['ratio']:10.2f} {r['prefill_ratio']:11.2f}"
        )


if __name__ == "__main__":
    main()
