"""Generates with vLLM on its CPU back end and prints one JSON line per batch.

`peers.py` runs this file with the Python of vLLM's own environment, so that it imports nothing of
ours. A line holds the seconds of the runs for all tokens and for one: {"batch", "all_s", "one_s"}.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def main() -> None:
    settings: dict[str, Any] = json.loads(sys.argv[1])
    import vllm

    longest = settings["prompt"] + settings["new"]
    llm = vllm.LLM(
        model=settings["model"],
        skip_tokenizer_init=True,
        enable_prefix_caching=False,  # the prompts are the same in each repeat
        max_model_len=longest + 16,
        max_num_seqs=max(settings["batch"]),
        max_num_batched_tokens=max(2048, longest + 16),
        disable_log_stats=True,
    )

    def seconds(prompts: list[list[int]], new: int) -> float:
        params = vllm.SamplingParams(
            temperature=0, max_tokens=new, ignore_eos=True, detokenize=False
        )
        begin_s = time.perf_counter()
        outputs = llm.generate(
            [{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False
        )
        taken_s = time.perf_counter() - begin_s
        assert all(len(output.outputs[0].token_ids) == new for output in outputs)
        return taken_s

    for batch in settings["batch"]:
        prompts = settings["prompts"][:batch]
        seconds(prompts, 2)  # warms up, and compiles
        runs = [
            (seconds(prompts, settings["new"]), seconds(prompts, 1))
            for _ in range(settings["repeats"])
        ]
        all_s, one_s = (min(column) for column in zip(*runs, strict=True))
        print(json.dumps({"batch": batch, "all_s": all_s, "one_s": one_s}), flush=True)


if __name__ == "__main__":
    main()
