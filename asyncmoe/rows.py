"""The rows of an attention or head batch, and their columns in the tables of the home rank.

The loop may change the tables while the batch is with the device, so that it reads them when the
batch is prepared, in one pass over as little memory as may be. What the model needs is made of that
on the compute thread, where it does not keep the loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from asyncmoe.kvcache import BlockPool
from asyncmoe.model import RowBatch
from asyncmoe.tokentable import TokenTable

if TYPE_CHECKING:
    from asyncmoe.home import Home


class RowColumns(NamedTuple):
    """Of segments of one row first, then of longer chunks."""

    counts: NDArray[np.int64]  # [segments] rows of each
    slots: NDArray[np.int64]  # [rows]
    epochs: NDArray[np.uint32]  # [rows]
    part_count: NDArray[np.uint8]  # [rows]
    query_start: NDArray[np.int64]  # [segments + 1] first row of each segment, and one past all
    positions: NDArray[np.int64]  # [rows]
    cache_index: NDArray[np.int64]  # [rows]
    context: NDArray[np.int64]  # [segments] tokens up to each segment's last row
    block_table: NDArray[np.int64]  # [segments, blocks]
    request: NDArray[np.int64]  # [segments]


class Gathered(Protocol):
    """What was read of the tables."""

    @property
    def singles(self) -> int:
        """Segments of one row."""

    @property
    def rows(self) -> int:
        """Rows of all segments."""

    def columns(self, pool: BlockPool) -> tuple[Any, ...]:
        """See `RowColumns`. The block tables of a batch stay as they are until it is over."""

    def at_slots(self, column: NDArray[np.int64]) -> NDArray[np.int64]:
        """[rows] a column of the token table."""


@dataclass(frozen=True, slots=True)
class PlainGathered:
    """`Gathered`, not compiled."""

    counts: NDArray[np.int64]
    request: NDArray[np.int64]
    slots: NDArray[np.int64]
    epochs: NDArray[np.uint32]
    part_count: NDArray[np.uint8]
    positions: NDArray[np.int64]

    @property
    def singles(self) -> int:
        """See `Gathered`."""
        return int(np.count_nonzero(self.counts == 1))

    @property
    def rows(self) -> int:
        """See `Gathered`."""
        return len(self.slots)

    def columns(self, pool: BlockPool) -> RowColumns:
        """See `Gathered`."""
        query_start = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.counts)])
        context = self.positions[query_start[1:] - 1] + 1
        blocks = pool.needed(int(context.max()))
        return RowColumns(
            self.counts,
            self.slots,
            self.epochs,
            self.part_count,
            query_start,
            self.positions,
            pool.index(np.repeat(self.request, self.counts), self.positions),
            context,
            pool.table[self.request, :blocks],
            self.request,
        )

    def at_slots(self, column: NDArray[np.int64]) -> NDArray[np.int64]:
        """See `Gathered`."""
        found: NDArray[np.int64] = column[self.slots]
        return found


@dataclass(slots=True)
class Rows:
    """The rows of an attention or head batch."""

    request_ids: torch.Tensor  # see `RowBatch`
    pool: BlockPool
    chunks: NDArray[np.int64]  # [segments] those of one row first
    gathered: Gathered
    _columns: RowColumns | None = None
    _batch: RowBatch | None = None

    @property
    def count(self) -> int:
        """How many."""
        return self.gathered.rows

    @property
    def columns(self) -> RowColumns:
        """Made on first use, which the compute thread has: their time grows with the rows."""
        if self._columns is None:
            self._columns = RowColumns._make(self.gathered.columns(self.pool))
        return self._columns

    @property
    def ends(self) -> NDArray[np.int64]:
        """[segments] one past each segment's last row."""
        return self.columns.query_start[1:]

    @property
    def batch(self) -> RowBatch:
        """The columns as the model takes them; made on first use, as `columns`."""
        if self._batch is None:
            columns = self.columns
            self._batch = RowBatch(
                positions=torch.from_numpy(columns.positions),
                cache_index=torch.from_numpy(columns.cache_index),
                decode_rows=self.gathered.singles,
                query_start=torch.from_numpy(columns.query_start),
                context_len=torch.from_numpy(columns.context),
                block_table=torch.from_numpy(columns.block_table),
                request=torch.from_numpy(columns.request),
                block_tokens=self.pool.block_tokens,
                request_ids=self.request_ids,
            )
        return self._batch

    def following(self) -> Rows:
        """The next decode steps of the same requests, which are all segments of one row.

        They share the epochs with these: whoever renews the slots brings them up to date.
        """
        columns, pool = self.columns, self.pool
        positions, context = columns.positions + 1, columns.context + 1
        blocks, block_table = pool.needed(int(context.max())), columns.block_table
        if block_table.shape[1] < blocks:
            block_table = pool.table[columns.request, :blocks]
        following = columns._replace(
            positions=positions,
            cache_index=pool.index(columns.request, positions),
            context=context,
            block_table=block_table,
        )
        return Rows(self.request_ids, pool, self.chunks, self.gathered, following)

    def alive(self, table: TokenTable) -> NDArray[np.bool_]:
        """[segments] which have not been cancelled since. A request's rows die together."""
        last = self.ends - 1
        columns = self.columns
        alive: NDArray[np.bool_] = table.epoch[columns.slots[last]] == columns.epochs[last]
        return alive


def no_rows(home: Home) -> Rows:
    """A batch of no rows at all."""
    none = np.zeros(0, np.int64)
    gathered = PlainGathered(none, none, none, none.astype(np.uint32), none.astype(np.uint8), none)
    columns = RowColumns(
        none, none, gathered.epochs, gathered.part_count, np.zeros(1, np.int64), none, none, none,
        home.pool.table[none], none,
    )  # fmt: skip
    return Rows(home.id_of_row, home.pool, none, gathered, columns)


def gather_rows(home: Home, chunks: NDArray[np.int64]) -> Rows:
    """Collect the columns of these chunks' rows from the tables of the home rank."""
    gathered: Gathered
    if home.books is not None:
        chunks, gathered = home.books.gather(chunks)
    else:
        chunks, gathered = _gather(home, chunks)
    return Rows(home.id_of_row, home.pool, chunks, gathered)


def _gather(home: Home, chunks: NDArray[np.int64]) -> tuple[NDArray[np.int64], PlainGathered]:
    table, chunk_table = home.table, home.chunks
    counts = chunk_table.rows[chunks].astype(np.int64)
    order = np.argsort(counts > 1, kind="stable")
    chunks, counts = chunks[order], counts[order]
    singles = int(np.count_nonzero(counts == 1))
    longer = [chunk_table.slots[chunk] for chunk in chunks[singles:].tolist()]
    first = chunk_table.first_slot[chunks[:singles]].astype(np.int64)
    slots = np.concatenate([first, *longer])
    return chunks, PlainGathered(
        counts,
        chunk_table.request[chunks].astype(np.int64),
        slots,
        table.epoch[slots],
        table.part_count[slots],
        table.position[slots].astype(np.int64),
    )
