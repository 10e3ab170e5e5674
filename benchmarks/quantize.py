"""What int8 weights cost in accuracy: logits of one token per prompt, beside those of float32.

A logit is known up to a constant of its row, so that differences are those of log probabilities:
of the 20 likeliest tokens under float32, where both name them. `equal_tokens` is the share of
prompts whose likeliest token is the same; a near tie in a router moves a whole row, and the
checkpoint that is made by default is random, which has more of them than a trained one.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from checkpoints import write_checkpoint
from command import count, run_command

from asyncmoe import LLM, SamplingParams

KINDS = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantize": "int8"},
}


def first_tokens(model: str, prompts: list[list[int]], settings: dict[str, str]) -> dict[str, Any]:
    """The likeliest tokens of each prompt with their log probabilities, and bytes of weights."""
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=20)
    with LLM(model=model, **{"log.level": "warning"}, **settings) as llm:
        outputs = llm.generate(prompts, params, progress=False)
        weight_bytes = llm.stats()[0]["weight_bytes"]
    tops = [dict(output.logprobs[0].top) for output in outputs]
    return {"tops": tops, "weight_bytes": weight_bytes}


def compare(reference: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    """See the module."""
    pairs = list(zip(reference["tops"], other["tops"], strict=True))
    differences = [abs(a[token] - b[token]) for a, b in pairs for token in a.keys() & b.keys()]
    same = [max(a, key=a.__getitem__) == max(b, key=b.__getitem__) for a, b in pairs]
    return {
        "median_logit_difference": median(differences),
        "equal_tokens": sum(same) / len(same),
        "weight_mib": other["weight_bytes"] / 2**20,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="checkpoint directory or name; default makes one")
    parser.add_argument("--prompts", type=count, default=64)
    parser.add_argument("--tokens", type=count, default=96, help="tokens of a prompt")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or str(write_checkpoint(Path(folder)))
        prompts = [
            [(31 * i + 17 * j * j + j) % 500 + 10 for j in range(arguments.tokens)]
            for i in range(arguments.prompts)
        ]
        runs = {kind: first_tokens(model, prompts, settings) for kind, settings in KINDS.items()}
    results = {kind: compare(runs["float32"], runs[kind]) for kind in KINDS}
    if arguments.json:
        print(json.dumps(results))
        return
    for kind, result in results.items():
        print(f"{kind:9} {result}")


if __name__ == "__main__":
    run_command(main)
