"""Runs the stages of models by hand, A0 E0 A1 … H on one thread, with a scrambled paged cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asyncmoe.checkpoint import open_checkpoint
from asyncmoe.config import ModelConfig
from asyncmoe.model import Cache, ExpertBatch, LoadPlan, Model, RowBatch


@dataclass
class Request:
    """One request: its row of the block table and how many of its tokens are in the cache."""

    row: int
    cached: int = 0


class StageRunner:
    """The home rank's model, and the models with their plans that hold the experts."""

    def __init__(
        self,
        home: Model,
        owners: Sequence[tuple[Model, LoadPlan]],
        *,
        requests: int = 8,
        context: int = 128,
        block_tokens: int = 4,
    ) -> None:
        self.home, self.owners, self.block_tokens = home, owners, block_tokens
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

    @torch.inference_mode()
    def step(self, segments: Sequence[tuple[Request, Sequence[int]]]) -> list[Tensor]:
        """Run one batch, segments of one token first; gives the logits of each segment's rows."""
        batch = self._batch(segments)
        x = self.home.embed(torch.tensor([token for _, ids in segments for token in ids]))
        for layer in range(len(self.home.spec.moe_layers)):
            routed = self.home.attention(layer, x, batch, self.cache)
            total = routed.residual.float()
            for model, plan in self.owners:
                part = expert_batch(routed.experts, routed.weights, plan.experts[layer])
                if len(part.row):
                    total = total + model.experts(layer, routed.hidden, part).float()
            x = total.to(routed.residual.dtype)
        if self.home.has_finish:
            x = self.home.finish(x, batch, self.cache)
        for request, ids in segments:
            request.cached += len(ids)
        return list(self.home.logits(x).split([len(ids) for _, ids in segments]))

    def _batch(self, segments: Sequence[tuple[Request, Sequence[int]]]) -> RowBatch:
        lengths = torch.tensor([len(ids) for _, ids in segments])
        rows = torch.tensor([request.row for request, _ in segments])
        cached = torch.tensor([request.cached for request, _ in segments])
        starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        segment = torch.repeat_interleave(lengths)
        positions = torch.arange(len(segment)) - starts[segment] + cached[segment]
        block = self.table[rows[segment], positions // self.block_tokens]
        decode = next((i for i, n in enumerate(lengths.tolist()) if n > 1), len(segments))
        used = -(-int((cached + lengths).max()) // self.block_tokens)
        return RowBatch(
            positions=positions,
            cache_index=block * self.block_tokens + positions % self.block_tokens,
            decode_rows=decode,
            query_start=starts,
            context_len=cached + lengths,
            block_table=self.table[rows, :used],
            request=rows,
            block_tokens=self.block_tokens,
        )

    def play(
        self, sequences: Sequence[Sequence[int]], chunks: Sequence[int], prompts: Sequence[int]
    ) -> list[Tensor]:
        """Logits [tokens, vocab] of each sequence, all in the same batches.

        Sequence i runs `prompts[i]` tokens as prefill, `chunks[i]` at a time, the rest one by one.
        """
        requests = [Request(row) for row in range(len(sequences))]
        logits: list[list[Tensor]] = [[] for _ in sequences]
        while True:
            batch = []
            for i, request in enumerate(requests):
                left = prompts[i] - request.cached
                size = min(chunks[i], left) if left > 0 else 1
                ids = sequences[i][request.cached : request.cached + size]
                if ids:
                    batch.append((i, ids))
            if not batch:
                return [torch.cat(parts) for parts in logits]
            batch.sort(key=lambda item: len(item[1]) > 1)
            parts = self.step([(requests[i], ids) for i, ids in batch])
            for (i, _), part in zip(batch, parts, strict=True):
                logits[i].append(part)


def expert_batch(experts: Tensor, weights: Tensor, local: Sequence[int]) -> ExpertBatch:
    """The pairs of all rows with the experts in `local`, one output row per row of x."""
    rows, top_k = experts.shape
    index = {expert: i for i, expert in enumerate(local)}
    pairs = sorted(
        (index[expert], row, k)
        for row, chosen in enumerate(experts.tolist())
        for k, expert in enumerate(chosen)
        if expert in index
    )
    gather = torch.full((rows, top_k), -1)
    counts = torch.zeros(len(local), dtype=torch.int64)
    for pair, (expert, row, k) in enumerate(pairs):
        gather[row, k] = pair
        counts[expert] += 1
    at = torch.tensor(pairs, dtype=torch.int64).view(-1, 3)
    return ExpertBatch(at[:, 1], weights[at[:, 1], at[:, 2]], counts, gather)


def whole_plan(moe_layers: int, experts: int) -> LoadPlan:
    """Everything on one rank."""
    return LoadPlan(True, (tuple(range(experts)),) * moe_layers)


def make_runner(path: Path, *, model: dict[str, Any] | None = None, **options: Any) -> StageRunner:
    """One rank with all of the checkpoint; `model` are keys of `ModelConfig`."""
    checkpoint = open_checkpoint(ModelConfig(name=str(path), **(model or {})))
    plan = whole_plan(len(checkpoint.spec.moe_layers), checkpoint.spec.experts)
    loaded = checkpoint.load(plan, torch.device("cpu"))
    return StageRunner(loaded, [(loaded, plan)], **options)
