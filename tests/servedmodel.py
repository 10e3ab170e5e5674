"""A tiny random checkpoint that can be served: with a tokenizer and a chat template."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from asyncmoe.config import Config
from tests.checkpoints import VOCAB, make_checkpoint

SPECIAL = ("<pad>", "<bos>", "<eos>")
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def make_served_checkpoint(path: Path, **overrides: Any) -> Path:
    """Like `make_checkpoint`, for qwen3_moe, with a tokenizer whose token n ≥ 259 is " w<n>"."""
    make_checkpoint(path, "qwen3_moe", **overrides)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"Ġw{n}" for n in range(len(SPECIAL) + len(letters), VOCAB)]
    vocab = {text: n for n, text in enumerate([*SPECIAL, *letters, *words])}
    core = tokenizers.Tokenizer(models.BPE(vocab, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(SPECIAL))
    core.save(str(path / "tokenizer.json"))
    settings = {"chat_template": TEMPLATE, "eos_token": "<eos>", "bos_token": "<bos>"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def served_config(path: Path, **sections: dict[str, Any]) -> Config:
    """A configuration for tests: one thread, any free port."""
    return Config.model_validate(
        {
            "model": {"name": str(path)},
            "device": {"threads": 1},
            "server": {"port": 0, "served_name": "test"},
            **sections,
        }
    )


async def eventually(condition: Callable[[], Awaitable[bool]], timeout_s: float = 15.0) -> None:
    """Wait until `condition` holds. Raises `TimeoutError`."""
    async with asyncio.timeout(timeout_s):
        while not await condition():  # noqa: ASYNC110 - what it looks at tells nobody
            await asyncio.sleep(0.02)
