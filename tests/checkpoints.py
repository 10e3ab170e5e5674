"""Small random checkpoints of the three families, written by `transformers`, and its answers."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

# Small products on shared cores: more threads only wait for each other.
torch.set_num_threads(1)

FAMILIES = ("mixtral", "olmoe", "qwen3_moe")
VOCAB = 384

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "num_experts_per_tok": 4,
    # spread logits, so that rounding does not flip a greedy token
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_OWN: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 16},
    "olmoe": {"num_experts": 16},
    "qwen3_moe": {"num_experts": 16, "moe_intermediate_size": 48, "norm_topk_prob": True,
                  "head_dim": 16},
}  # fmt: skip


def make_checkpoint(
    path: Path | str,
    family: str,
    *,
    dtype: torch.dtype = torch.float32,
    shard_size: str = "1GB",
    seed: int = 0,
    **config_overrides: Any,
) -> Path:
    """Write a random checkpoint of `family` to the directory `path` and return it.

    4 layers, 16 experts top-4, hidden 64, vocabulary 384, unless overridden. A small `shard_size`
    ("100KB") makes several files with an index. There are no tokenizer files.
    """
    settings = _COMMON | _OWN[family] | config_overrides
    config = transformers.AutoConfig.for_model(family, **settings)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:  # norms and biases start at one and zero, which would hide bugs
                parameter.add_(torch.randn_like(parameter) * (0.1 if "norm" in name else 0.05))
    model.save_pretrained(path, max_shard_size=shard_size)
    return Path(path)


@functools.lru_cache(maxsize=1)
def _session_directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="asyncmoe-checkpoints-")


@functools.cache
def _cached(family: str, overrides: str) -> Path:
    directory = tempfile.mkdtemp(prefix=f"{family}-", dir=_session_directory().name)
    return make_checkpoint(directory, family, **json.loads(overrides))


def cached_checkpoint(family: str, **config_overrides: Any) -> Path:
    """`make_checkpoint` in float32, made once per test session. Tests must not change the files."""
    return _cached(family, json.dumps(config_overrides, sort_keys=True))


def edit_json(path: Path, **changes: Any) -> None:
    """Change keys of a JSON file; the value `...` removes one."""
    value = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in value.items() if v is not ...}))


@functools.lru_cache(maxsize=4)
def reference_model(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The checkpoint as `transformers` runs it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    return model.eval()


@torch.inference_mode()
def reference_logits(
    path: Path, token_ids: Sequence[int], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """float32 [tokens, vocab] for one sequence in one pass."""
    logits: torch.Tensor = reference_model(path, dtype)(torch.tensor([token_ids])).logits
    return logits[0].float()


@torch.inference_mode()
def reference_greedy(
    path: Path,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    dtype: torch.dtype = torch.float32,
) -> list[list[int]]:
    """The `new_tokens` greedy tokens after each prompt, each prompt alone, not ending at EOS."""
    model = reference_model(Path(path), dtype)
    answers = []
    for prompt in prompts:
        ids = model.generate(
            torch.tensor([list(prompt)]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        answers.append(ids[0, len(prompt) :].tolist())
    return answers
