"""The checkpoint that the benchmarks run on, made on the spot: random weights of a stated shape."""

from __future__ import annotations

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


def write_config(path: Path, changes: dict[str, Any]) -> Path:
    """A directory with config.json alone, for `model.load_format = "dummy"`."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(SHAPE | changes))
    return path


def write_checkpoint(path: Path) -> Path:
    """The same with bfloat16 weights, as `transformers` initialises and saves them."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**{**SHAPE, "torch_dtype": None})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(path)
    return path
