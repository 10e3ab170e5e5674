"""Steps: one batch of one stage, with its columns gathered on the loop and its compute for the
device. A step is a callable without arguments that runs on the compute thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from asyncmoe.microqueue import RowSegment
from asyncmoe.model import Cache, ExpertBatch, Model, RowBatch
from asyncmoe.sampler import Sampled, SamplerBatch, sample
from asyncmoe.stage import Kind
from asyncmoe.tokentable import TokenTable

if TYPE_CHECKING:
    from asyncmoe.home import Home


@dataclass(slots=True)
class Rows:
    """The rows of an attention or head batch: segments of one row first, then longer chunks."""

    chunks: NDArray[np.int64]  # [segments]
    counts: NDArray[np.int64]  # [segments] rows of each
    slots: NDArray[np.int64]  # [rows]
    epochs: NDArray[np.uint32]  # [rows]
    part_count: NDArray[np.int64]  # [rows]
    ends: NDArray[np.int64]  # [segments] one past each segment's last row
    batch: RowBatch

    def alive(self, table: TokenTable) -> NDArray[np.bool_]:
        """[segments] which have not been cancelled since. A request's rows die together."""
        last = self.ends - 1
        alive: NDArray[np.bool_] = table.epoch[self.slots[last]] == self.epochs[last]
        return alive


def gather_rows(home: Home, chunks: NDArray[np.int64]) -> Rows:
    """Collect the columns of these chunks' rows from the tables of the home rank."""
    table, chunk_table, pool = home.table, home.chunks, home.pool
    counts = chunk_table.rows[chunks]
    if int(counts.max()) > 1:
        order = np.argsort(counts > 1, kind="stable")
        chunks, counts = chunks[order], counts[order]
        singles = int(np.count_nonzero(counts == 1))
        longer = [chunk_table.slots[chunk] for chunk in chunks[singles:].tolist()]
        slots = np.concatenate([chunk_table.first_slot[chunks[:singles]], *longer])
    else:
        singles = len(chunks)
        slots = chunk_table.first_slot[chunks]
    ends = np.cumsum(counts)
    request = chunk_table.request[chunks]
    positions = table.position[slots]
    context = positions[ends - 1] + 1
    blocks = -(-int(context.max()) // pool.block_tokens)
    batch = RowBatch(
        positions=torch.from_numpy(positions),
        cache_index=torch.from_numpy(pool.index(np.repeat(request, counts), positions)),
        decode_rows=singles,
        query_start=torch.from_numpy(np.concatenate([np.zeros(1, np.int64), ends])),
        context_len=torch.from_numpy(context),
        block_table=torch.from_numpy(pool.table[request, :blocks]),
        request=torch.from_numpy(request),
        block_tokens=pool.block_tokens,
    )
    return Rows(chunks, counts, slots, table.epoch[slots], table.part_count[slots], ends, batch)


def _merged(
    first: bool, rows: Rows, tokens: NDArray[np.int64], model: Model, table: TokenTable
) -> torch.Tensor:
    """Hidden state [rows, hidden]: embedded at the first stage, merged at later ones."""
    if first:
        return model.embed(torch.from_numpy(tokens))
    return table.merge(torch.from_numpy(rows.slots), rows.part_count)


@dataclass(slots=True)
class AttentionResult:
    """What the router of an attention batch chose, and the experts' input."""

    hidden: torch.Tensor  # [rows, hidden]
    experts: NDArray[np.int64]  # [rows, top_k]
    weights: NDArray[np.float32]  # [rows, top_k]


@dataclass(slots=True)
class AttentionStep:
    """A(layer) for a batch of rows: merge (or embed, for layer 0), attention, router."""

    stage: int
    layer: int
    rows: Rows
    tokens: NDArray[np.int64]  # [rows] token ids, for layer 0
    model: Model
    table: TokenTable
    cache: Cache
    kind = Kind.ATTENTION

    @property
    def row_count(self) -> int:
        """Rows of the batch."""
        return len(self.rows.slots)

    def entering(self) -> torch.Tensor:
        """The rows' hidden state [rows, hidden]."""
        return _merged(self.stage == 0, self.rows, self.tokens, self.model, self.table)

    def __call__(self) -> AttentionResult:
        routed = self.model.attention(self.layer, self.entering(), self.rows.batch, self.cache)
        slots = torch.from_numpy(self.rows.slots)
        self.table.residual.index_copy_(0, slots, routed.residual)
        return AttentionResult(routed.hidden, routed.experts.numpy(), routed.weights.numpy())


@dataclass(slots=True)
class HeadStep:
    """H for a batch of rows: merge, trailing dense layers, LM head and sampling."""

    stage: int
    rows: Rows
    tokens: NDArray[np.int64]  # [rows] token ids, for a model without MoE layers
    sampled_segments: NDArray[np.int64]  # segments whose last row gets a token
    sampling: SamplerBatch
    model: Model
    table: TokenTable
    cache: Cache
    kind = Kind.HEAD

    @property
    def row_count(self) -> int:
        """Rows of the batch."""
        return len(self.rows.slots)

    def __call__(self) -> Sampled | None:
        return self.of(_merged(self.stage == 0, self.rows, self.tokens, self.model, self.table))

    def of(self, x: torch.Tensor) -> Sampled | None:
        """The tokens of rows whose hidden state is x [rows, hidden]."""
        x = self.model.finish(x, self.rows.batch, self.cache)
        if not len(self.sampled_segments):
            return None
        last = self.rows.ends[self.sampled_segments] - 1
        return sample(self.model.logits(x[torch.from_numpy(last)]), self.sampling)


@dataclass(slots=True)
class ExpertStep:
    """E(layer) for a batch of rows that came from any home ranks."""

    stage: int
    layer: int
    segments: list[RowSegment]  # in ascending order of their source
    slot: NDArray[np.uint32]  # [out_rows]
    epoch: NDArray[np.uint32]  # [out_rows]
    part: NDArray[np.uint8]  # [out_rows]
    row_count: int
    batch: ExpertBatch
    model: Model
    kind = Kind.EXPERT

    def __call__(self) -> torch.Tensor:
        payloads = [segment.parcel.payload for segment in self.segments]
        x = payloads[0] if len(payloads) == 1 else torch.cat(payloads)
        return self.model.experts(self.layer, x, self.batch)


def expert_step(
    model: Model,
    stage: int,
    layer: int,
    segments: list[RowSegment],
    local: NDArray[np.int64],
    local_experts: int,
    per_expert: bool,
) -> ExpertStep:
    """Sort the pairs of `segments` by local expert and say which of them each output row sums.

    Args:
        local: [experts] local index of each expert of the layer.
        local_experts: how many of them are on this rank.
        per_expert: an output row per pair; otherwise one per row.
    """
    segments.sort(key=lambda segment: segment.source)  # so that each home's output is one slice
    parcels = [segment.parcel for segment in segments]
    slot, epoch, part, fanout, expert, weight = (
        parcels[0].columns()
        if len(parcels) == 1
        else tuple(np.concatenate(c) for c in zip(*(p.columns() for p in parcels), strict=True))
    )
    rows, pairs = len(slot), len(expert)
    of_expert = local[expert]
    order = of_expert.argsort(kind="stable")
    place = np.empty(pairs, np.int64)
    place[order] = np.arange(pairs)
    row_of_pair = np.arange(rows).repeat(fanout)
    if per_expert:
        gather = place[:, None]
        slot, epoch = slot[row_of_pair], epoch[row_of_pair]
    else:
        begin = fanout.cumsum(dtype=np.int64) - fanout
        gather = np.full((rows, int(fanout.max())), -1, np.int64)
        gather[row_of_pair, np.arange(pairs) - begin[row_of_pair]] = place
        part = part[begin]
    batch = ExpertBatch(
        row=torch.from_numpy(row_of_pair[order]),
        weight=torch.from_numpy(weight[order]),
        counts=torch.from_numpy(np.bincount(of_expert, minlength=local_experts)),
        gather=torch.from_numpy(gather),
    )
    return ExpertStep(stage, layer, segments, slot, epoch, part, rows, batch, model)
