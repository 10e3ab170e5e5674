"""An integer-exact model: its tokens tell whether every row, part and cache entry was right.

All values are whole numbers below 2**24 in float32, so any order of sums gives the same bits, and
the tokens of a request can be computed by a few lines of plain Python.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asyncmoe.checkpoint import Checkpoint, DummySource
from asyncmoe.model import (
    Cache,
    CacheSpec,
    ExpertBatch,
    LoadPlan,
    Model,
    ModelSpec,
    Routed,
    RowBatch,
    TensorSpec,
)

HIDDEN, VOCAB, MODULUS, CACHE_MODULUS = 8, 97, 101, 1009
_MIX = torch.arange(1, HIDDEN + 1, dtype=torch.float32)


def spec(layers: int = 3, experts: int = 6, top_k: int = 2, context: int = 512) -> ModelSpec:
    """The shape of a toy model; every decoder layer is a MoE layer."""
    cache = CacheSpec(per_token={"k": TensorSpec((1,), torch.float32)})
    return ModelSpec(
        architecture="toy",
        hidden=HIDDEN,
        vocab=VOCAB,
        context=context,
        decoder_layers=layers,
        moe_layers=tuple(range(layers)),
        experts=experts,
        top_k=top_k,
        dtype=torch.float32,
        caches=(cache,) * layers,
    )


def checkpoint(
    toy: ModelSpec | None = None, finishing: bool = False, poisoned: bool = False
) -> Checkpoint:
    """Stands for a checkpoint directory."""
    kind = PoisonedToyModel if poisoned else FinishingToyModel if finishing else ToyModel
    return Checkpoint(Path(), {}, kind, toy or spec(), DummySource(), {})


class ToyModel(Model):
    """See the module."""

    def __init__(self, spec: ModelSpec, plan: LoadPlan) -> None:
        self.spec, self._plan = spec, plan

    @classmethod
    def read_spec(cls, config: Mapping[str, Any], dtype: torch.dtype | None) -> ModelSpec:
        return spec()

    @classmethod
    def load(cls, config: Any, spec: ModelSpec, source: Any, plan: LoadPlan, device: Any) -> Model:
        return cls(spec, plan)

    def embed(self, token_ids: Tensor) -> Tensor:
        return embed(token_ids)

    def attention(self, layer: int, x: Tensor, batch: RowBatch, cache: Cache) -> Routed:
        x = x % MODULUS
        entries = cache[layer]["k"].view(-1)
        entries[batch.cache_index] = cache_entry(x)
        rows = torch.repeat_interleave(batch.query_start.diff())
        table = batch.block_table[rows] * batch.block_tokens
        width = table.shape[1] * batch.block_tokens
        at = (table[:, :, None] + torch.arange(batch.block_tokens)).reshape(len(rows), width)
        position = torch.arange(width)
        seen = (position <= batch.positions[:, None]).float()
        total = (entries[at] * seen * (position + 1)).sum(1) % MODULUS
        x = (x + total[:, None]) % MODULUS
        experts, weights = route(x, layer, self.spec)
        return Routed(x, x + 1, experts, weights)

    def experts(self, layer: int, x: Tensor, batch: ExpertBatch) -> Tensor:
        expert = torch.repeat_interleave(torch.tensor(self._plan.experts[layer]), batch.counts)
        out = batch.weight[:, None] * expert_output(x[batch.row], expert)
        out = torch.cat([out, torch.zeros(1, out.shape[1])])
        return out[batch.gather].sum(1)

    def finish(self, x: Tensor, batch: RowBatch, cache: Cache) -> Tensor:
        return x

    @property
    def has_finish(self) -> bool:
        return False

    def logits(self, x: Tensor) -> Tensor:
        return -(torch.arange(VOCAB) - next_token(x)[:, None]).abs().float()

    def weight_bytes(self) -> int:
        return 0


class PoisonedToyModel(ToyModel):
    """Token 50 makes everything NaN, as weights or activations that overflow do."""

    POISON = 50

    def embed(self, token_ids: Tensor) -> Tensor:
        return embed(token_ids).masked_fill(token_ids[:, None] == self.POISON, torch.nan)

    def attention(self, layer: int, x: Tensor, batch: RowBatch, cache: Cache) -> Routed:
        routed = super().attention(layer, x, batch, cache)
        routed.experts %= self.spec.experts  # a NaN as a whole number is out of any range
        return routed

    def logits(self, x: Tensor) -> Tensor:
        return super().logits(x).masked_fill(x.isnan().any(1)[:, None], torch.nan)


class FinishingToyModel(ToyModel):
    """Needs every row of a chunk in the head stage, as a model with trailing dense layers does."""

    @property
    def has_finish(self) -> bool:
        return True


def embed(tokens: Tensor) -> Tensor:
    return (tokens[:, None] * 7 + torch.arange(HIDDEN) * 3).float() % MODULUS


def cache_entry(x: Tensor) -> Tensor:
    return (x * _MIX).sum(1) % CACHE_MODULUS


def route(x: Tensor, layer: int, spec: ModelSpec) -> tuple[Tensor, Tensor]:
    first = (x * _MIX).sum(1).long() + layer
    choice = torch.arange(spec.top_k)
    return (first[:, None] + choice) % spec.experts, (first[:, None] % 3 + 1 + choice).float()


def expert_output(x: Tensor, expert: Tensor) -> Tensor:
    return (x * (expert[:, None] + 1) + expert[:, None]) % MODULUS


def next_token(x: Tensor) -> Tensor:
    return (x * _MIX).sum(1).long() % VOCAB


def reference(prompt: list[int], new_tokens: int, spec: ModelSpec) -> list[int]:
    """The new tokens of a request, computed one position at a time without any engine."""
    caches: list[list[float]] = [[] for _ in range(spec.decoder_layers)]
    tokens, answer = list(prompt), list[int]()
    for position in range(len(prompt) + new_tokens - 1):
        x = embed(torch.tensor([tokens[position]]))
        for layer, cache in enumerate(caches):
            x = x % MODULUS
            cache.append(float(cache_entry(x)[0]))
            total = sum(entry * (i + 1) for i, entry in enumerate(cache)) % MODULUS
            x = (x + total) % MODULUS
            experts, weights = route(x, layer, spec)
            parts = weights[0][:, None] * expert_output((x + 1).repeat(spec.top_k, 1), experts[0])
            x = x + parts.sum(0)
        if position >= len(prompt) - 1:
            tokens.append(int(next_token(x)[0]))
            answer.append(tokens[-1])
    return answer
