"""Runs the stages of models by hand, A0 E0 A1 … H on one thread, with a scrambled paged cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from asyncmoe.model import Cache, ExpertBatch, LoadPlan, Model, RowBatch


@dataclass
class Sequence_:
    """One request: its row of the block table and how many of its tokens are in the cache."""

    row: int
    cached: int = 0
    logits: list[Tensor] = field(default_factory=list)


class StageRunner:
    """The home rank's model and the models that hold the experts, which may be several."""

    def __init__(
        self,
        home: Model,
        owners: Sequence[tuple[Model, LoadPlan]],
        *,
        requests: int = 8,
        context: int = 128,
        block_tokens: int = 4,
    ) -> None:
        self.home, self.owners = home, owners
        self.block_tokens = block_tokens
        width = context // block_tokens
        blocks = torch.randperm(requests * width, generator=torch.Generator().manual_seed(7))
        self.table = blocks.view(requests, width)
        self.cache: Cache = [
            {
                name: torch.zeros((requests * width, block_tokens, *t.shape), dtype=t.dtype)
                for name, t in layer.per_token.items()
            }
            for layer in home.spec.caches
        ]

    def step(self, tokens: Sequence[tuple[Sequence_, Sequence[int]]]) -> list[Tensor]:
        """Run one batch of segments, decode rows (one token) first; logits of each segment's rows."""
        batch = self._batch(tokens)
        x = self.home.embed(torch.tensor([t for _, ids in tokens for t in ids]))
        for layer in range(len(self.home.spec.moe_layers)):
            routed = self.home.attention(layer, x, batch, self.cache)
            total = routed.residual.float()
            for model, plan in self.owners:
                part = expert_batch(routed.experts, routed.weights, plan.experts[layer])
                if len(part.row):
                    total += model.experts(layer, routed.hidden, part).float()
            x = total.to(routed.residual.dtype)
        assert self.home.has_finish == (
            self.home.spec.moe_layers[-1] < self.home.spec.decoder_layers - 1
        )
        x = self.home.finish(x, batch, self.cache)
        for sequence, ids in tokens:
            sequence.cached += len(ids)
        return list(self.home.logits(x).split([len(ids) for _, ids in tokens]))

    def _batch(self, tokens: Sequence[tuple[Sequence_, Sequence[int]]]) -> RowBatch:
        lengths = torch.tensor([len(ids) for _, ids in tokens])
        rows = torch.tensor([sequence.row for sequence, _ in tokens])
        cached = torch.tensor([sequence.cached for sequence, _ in tokens])
        starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        segment = torch.repeat_interleave(lengths)
        positions = torch.arange(len(segment)) - starts[segment] + cached[segment]
        block = self.table[rows[segment], positions // self.block_tokens]
        decode = next((i for i, n in enumerate(lengths.tolist()) if n > 1), len(tokens))
        return RowBatch(
            positions=positions,
            cache_index=block * self.block_tokens + positions % self.block_tokens,
            decode_rows=decode,
            query_start=starts,
            context_len=cached + lengths,
            block_table=self.table[rows],
            request=rows,
            block_tokens=self.block_tokens,
        )


def expert_batch(experts: Tensor, weights: Tensor, local: Sequence[int]) -> ExpertBatch:
    """The pairs of all rows with the experts in `local`, one output row per row of x."""
    rows, top_k = experts.shape
    index = {expert: i for i, expert in enumerate(local)}
    pairs = sorted(
        (index[e], row, k)
        for row, chosen in enumerate(experts.tolist())
        for k, e in enumerate(chosen)
        if e in index
    )
    gather = torch.full((rows, top_k), -1)
    for pair, (_, row, k) in enumerate(pairs):
        gather[row, k] = pair
    counts = torch.zeros(len(local), dtype=torch.int64)
    for expert, _, _ in pairs:
        counts[expert] += 1
    row = torch.tensor([row for _, row, _ in pairs], dtype=torch.int64)
    weight = torch.stack([weights[row, k] for _, row, k in pairs]) if pairs else weights[:0, 0]
    return ExpertBatch(row, weight, counts, gather)


def whole_plan(model_layers: int, experts: int) -> LoadPlan:
    """Everything on one rank."""
    return LoadPlan(True, (tuple(range(experts)),) * model_layers)
