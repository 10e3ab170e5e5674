"""The checkpoint that the benchmarks run on, made on the spot: random weights of a stated shape."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

SHAPE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "moe_intermediate_size": 256,
    "vocab_size": 32000,
    "initializer_range": 0.05,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


# The same size, with the family's own switches: the router's weights as they are, no norm of heads.
OLMOE: dict[str, Any] = {
    "model_type": "olmoe",
    "intermediate_size": 256,
    "norm_topk_prob": False,
    "eos_token_id": None,  # the family's own lies beyond this vocabulary
    "pad_token_id": None,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {"qwen3_moe": {}, "olmoe": OLMOE}


def write_config(path: Path, changes: dict[str, Any]) -> Path:
    """A directory with config.json alone, for `model.load_format = "dummy"`."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(SHAPE | changes))
    return path


def write_checkpoint(path: Path, architecture: str = "qwen3_moe") -> Path:
    """One of `ARCHITECTURES` with bfloat16 weights, as `transformers` initialises and saves them.

    There are no tokenizer files.
    """
    import torch
    import transformers

    torch.manual_seed(0)
    settings = SHAPE | ARCHITECTURES[architecture] | {"torch_dtype": None}
    config = transformers.AutoConfig.for_model(**settings)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(path)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path, help="directory to write to")
    parser.add_argument("--architecture", choices=ARCHITECTURES, default="qwen3_moe")
    arguments = parser.parse_args()
    write_checkpoint(arguments.path, arguments.architecture)


if __name__ == "__main__":
    main()
