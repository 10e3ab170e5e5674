"""Steps: one batch of one stage, with its columns and its compute for the device. A step is a
callable without arguments that runs on the compute thread. What it reads of the home's tables is
gathered on the loop, which may change them meanwhile; an expert batch's columns are its own, and
are made beside its compute.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from asyncmoe import native
from asyncmoe.expertcolumns import ExpertColumns
from asyncmoe.microqueue import Taken
from asyncmoe.model import Cache, ExpertBatch, Model, RowBatch
from asyncmoe.routing import Routed, Router
from asyncmoe.sampler import Sampled, SamplerBatch, sample
from asyncmoe.stage import Kind
from asyncmoe.tokentable import TokenTable

if TYPE_CHECKING:
    from asyncmoe.home import Home


@dataclass(slots=True)
class Rows:
    """The rows of an attention or head batch: segments of one row first, then longer chunks."""

    block_tokens: int  # of the KV pool
    request_ids: torch.Tensor  # see `RowBatch`
    singles: int  # segments of one row
    chunks: NDArray[np.int64]  # [segments]
    counts: NDArray[np.int64]  # [segments] rows of each
    slots: NDArray[np.int64]  # [rows]
    epochs: NDArray[np.uint32]  # [rows]
    part_count: NDArray[np.int64]  # [rows]
    query_start: NDArray[np.int64]  # [segments + 1] first row of each segment, and one past all
    positions: NDArray[np.int64]  # [rows]
    cache_index: NDArray[np.int64]  # [rows]
    context: NDArray[np.int64]  # [segments] tokens up to each segment's last row
    block_table: NDArray[np.int64]  # [segments, blocks]
    request: NDArray[np.int64]  # [segments]
    _batch: RowBatch | None = None

    @property
    def ends(self) -> NDArray[np.int64]:
        """[segments] one past each segment's last row."""
        return self.query_start[1:]

    @property
    def batch(self) -> RowBatch:
        """The columns as the model takes them; made on first use, which the compute thread has."""
        if self._batch is None:
            self._batch = RowBatch(
                positions=torch.from_numpy(self.positions),
                cache_index=torch.from_numpy(self.cache_index),
                decode_rows=self.singles,
                query_start=torch.from_numpy(self.query_start),
                context_len=torch.from_numpy(self.context),
                block_table=torch.from_numpy(self.block_table),
                request=torch.from_numpy(self.request),
                block_tokens=self.block_tokens,
                request_ids=self.request_ids,
            )
        return self._batch

    def alive(self, table: TokenTable) -> NDArray[np.bool_]:
        """[segments] which have not been cancelled since. A request's rows die together."""
        last = self.ends - 1
        alive: NDArray[np.bool_] = table.epoch[self.slots[last]] == self.epochs[last]
        return alive

    def all_alive(self, table: TokenTable) -> bool:
        """Whether no segment has been cancelled since."""
        if native.columns is None:
            return bool(self.alive(table).all())
        alive: bool = native.columns.all_alive(self.ends, self.slots, self.epochs, table.epoch)
        return alive


def gather_rows(home: Home, chunks: NDArray[np.int64]) -> Rows:
    """Collect the columns of these chunks' rows from the tables of the home rank."""
    table, chunk_table, pool = home.table, home.chunks, home.pool
    if native.columns is not None:
        columns = native.columns.gather_rows(
            chunks, chunk_table.rows, chunk_table.first_slot, chunk_table.request,
            chunk_table.slots, table.position, table.epoch, table.part_count, pool.table,
            pool.block_tokens,
        )  # fmt: skip
        return Rows(pool.block_tokens, home.id_of_row, *columns)
    counts = chunk_table.rows[chunks]
    order = np.argsort(counts > 1, kind="stable")
    chunks, counts = chunks[order], counts[order]
    singles = int(np.count_nonzero(counts == 1))
    longer = [chunk_table.slots[chunk] for chunk in chunks[singles:].tolist()]
    slots = np.concatenate([chunk_table.first_slot[chunks[:singles]], *longer])
    query_start = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    request = chunk_table.request[chunks]
    positions = table.position[slots]
    context = positions[query_start[1:] - 1] + 1
    blocks = -(-int(context.max()) // pool.block_tokens)
    return Rows(
        pool.block_tokens,
        home.id_of_row,
        singles,
        chunks,
        counts,
        slots,
        table.epoch[slots],
        table.part_count[slots],
        query_start,
        positions,
        pool.index(np.repeat(request, counts), positions),
        context,
        pool.table[request, :blocks],
        request,
    )


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
    routed: Routed | None = None  # all rows, as parcels; None: still to be routed


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
    router: Router | None = None  # routes the rows here, where they are not in the loop's way
    kind = Kind.ATTENTION

    @property
    def row_count(self) -> int:
        """Rows of the batch."""
        return len(self.rows.slots)

    def entering(self) -> torch.Tensor:
        """The rows' hidden state [rows, hidden]."""
        return _merged(self.layer == 0, self.rows, self.tokens, self.model, self.table)

    def __call__(self) -> AttentionResult:
        rows = self.rows
        out = self.model.attention(self.layer, self.entering(), rows.batch, self.cache)
        if self.table.has_columns:
            self.table.residual.index_copy_(0, torch.from_numpy(rows.slots), out.residual)
        hidden, experts, weights = out.hidden, out.experts.numpy(), out.weights.numpy()
        if self.router is None:
            return AttentionResult(hidden, experts, weights)
        routed = self.router(self.stage + 1, rows.slots, rows.epochs, hidden, experts, weights)
        return AttentionResult(hidden, experts, weights, routed)


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
    model: Model
    taken: Taken
    row_count: int
    local: NDArray[np.int64]  # [experts] local index of each expert of the layer
    local_experts: int
    per_expert: bool  # an output row per pair; otherwise one per row
    _columns: ExpertColumns | None = None
    kind = Kind.EXPERT

    @property
    def columns(self) -> ExpertColumns:
        """See `expert_columns`. Made on first use, which the compute thread has: that takes time
        which grows with the rows, and the loop must not."""
        if self._columns is None:
            self._columns = self.taken.columns(self.local, self.local_experts, self.per_expert)
        return self._columns

    def __call__(self) -> torch.Tensor:
        payloads = self.taken.payloads
        row, weight, counts, gather, _ = self.columns
        if not len(row):  # rows that no expert here was chosen for
            return payloads[0].new_zeros((len(gather), payloads[0].shape[1]))
        # Rows without columns are all alike.
        alone = len(payloads) == 1 or not payloads[0].shape[1]
        x = payloads[0] if alone else torch.cat(payloads)
        batch = ExpertBatch(
            row=torch.from_numpy(row),
            weight=torch.from_numpy(weight),
            counts=torch.from_numpy(counts),
            gather=torch.from_numpy(gather),
        )
        return self.model.experts(self.layer, x, batch)
