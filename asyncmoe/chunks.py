"""Chunks: the rows of one request that go through the layers together, and their order.

A decode step is a chunk of one row. The positions of a prefill depend on each other through the
KV cache, so a chunk enters an attention stage when all its rows are complete and never before the
request's earlier chunk has left that stage; several may be in the layers, one behind the other.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from asyncmoe import native
from asyncmoe.tokentable import distinct

NONE = -1


class ChunkTable:
    """Columns of all chunks in the layers. `stage` is the attention or head stage that a chunk is
    in, waits for, or enters next."""

    def __init__(self, capacity: int) -> None:
        self.request = np.full(capacity, NONE, np.int32)  # request row
        self.rows = np.zeros(capacity, np.int32)
        self.missing = np.zeros(capacity, np.int32)  # rows without all their parts
        self.stage = np.zeros(capacity, np.int32)
        self.first_slot = np.zeros(capacity, np.int32)
        self.samples = np.zeros(capacity, np.bool_)  # its last row gets a token at H
        self.slots: list[NDArray[np.int64]] = [np.empty(0, np.int64)] * capacity
        self.earlier = np.full(capacity, NONE, np.int32)  # chunk of the same request
        self.later = np.full(capacity, NONE, np.int32)
        self.parked = np.zeros(capacity, np.bool_)  # complete, but the earlier chunk is not past
        self._scratch = np.empty(capacity, np.int64)
        self._free = list(range(capacity - 1, -1, -1))

    @property
    def in_use(self) -> int:
        """Chunks in the layers."""
        return len(self.rows) - len(self._free)

    def requests_of(self, chunks: NDArray[np.int64]) -> NDArray[np.int64]:
        """[chunks] request row of each."""
        return self.request[chunks].astype(np.int64)

    def open(
        self, request: int, slots: NDArray[np.int64], earlier: int, samples: bool, stage: int = 0
    ) -> int:
        """Make a chunk of `slots`, behind chunk `earlier` of the same request (or NONE)."""
        chunk = self._free.pop()
        self.request[chunk] = request
        self.rows[chunk] = len(slots)
        self.missing[chunk] = 0
        self.stage[chunk] = stage
        self.first_slot[chunk] = slots[0]
        self.samples[chunk] = samples
        self.slots[chunk] = slots
        self.earlier[chunk] = earlier
        self.later[chunk] = NONE
        self.parked[chunk] = False
        if earlier != NONE:
            self.later[earlier] = chunk
        return chunk

    def close(self, chunks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Forget chunks; return the later chunks that may now enter their stage."""
        later = self._behind(chunks)
        self.earlier[later] = NONE
        earlier = self.earlier[chunks]
        self.later[earlier[earlier != NONE]] = NONE
        self.request[chunks] = NONE
        for chunk in chunks.tolist():
            self.slots[chunk] = self.slots[chunk][:0]
            self._free.append(chunk)
        return self._unpark(later)

    def narrow(self, chunk: int, slots: NDArray[np.int64]) -> None:
        """Go on with these slots of a chunk alone (the row that samples)."""
        self.slots[chunk] = slots
        self.rows[chunk] = len(slots)
        self.first_slot[chunk] = slots[0]

    def complete(self, chunk_of_row: NDArray[np.int64]) -> NDArray[np.int64]:
        """One row of each given chunk has all its parts; return the chunks that may go on."""
        np.subtract.at(self.missing, chunk_of_row, 1)
        complete = chunk_of_row[self.missing[chunk_of_row] == 0]
        return self.may_enter(distinct(complete, self._scratch))

    def may_enter(self, chunks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Those of the complete `chunks` that may enter their stage; the others are parked."""
        earlier = self.earlier[chunks]
        blocked = (earlier != NONE) & (self.stage[earlier] <= self.stage[chunks])
        if not blocked.any():
            return chunks
        self.parked[chunks[blocked]] = True
        free: NDArray[np.int64] = chunks[~blocked]
        return free

    def alone(self, chunks: NDArray[np.int64]) -> bool:
        """Whether no request of `chunks` has another chunk in the layers."""
        return bool(((self.earlier[chunks] == NONE) & (self.later[chunks] == NONE)).all())

    def leave(
        self, chunks: NDArray[np.int64], stage: int, missing: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """`chunks` have left their stage for the next one, `stage`, and wait for `missing` rows.

        Returns the later chunks that may now enter the stage that was left.
        """
        self.stage[chunks] = stage
        self.missing[chunks] = missing
        return self.woken(chunks)

    def woken(self, chunks: NDArray[np.int64]) -> NDArray[np.int64]:
        """`chunks` have left their stage: the later chunks that may now enter it."""
        return self._unpark(self._behind(chunks))

    def by_stage(
        self, chunks: NDArray[np.int64]
    ) -> list[tuple[int, NDArray[np.int64], NDArray[np.int64], int]]:
        """`chunks` by the stage they wait for: (stage, its chunks, rows of each, rows together)."""
        if native.columns is not None:
            groups: list[tuple[int, NDArray[np.int64], NDArray[np.int64], int]]
            groups = native.columns.by_stage(chunks, self.stage, self.rows)
            return groups
        groups, stages = [], self.stage[chunks]
        while len(chunks):  # mostly once: chunks that become ready together are of one stage
            here = stages == stages[0]
            ready = chunks[here]
            rows = self.rows[ready].astype(np.int64)
            groups.append((int(stages[0]), ready, rows, int(rows.sum())))
            chunks, stages = chunks[~here], stages[~here]
        return groups

    def _behind(self, chunks: NDArray[np.int64]) -> NDArray[np.int64]:
        """The later chunks of the same requests."""
        later = self.later[chunks].astype(np.int64)
        behind: NDArray[np.int64] = later[later != NONE]
        return behind

    def _unpark(self, chunks: NDArray[np.int64]) -> NDArray[np.int64]:
        waiting: NDArray[np.int64] = chunks[self.parked[chunks]]
        if not len(waiting):
            return waiting
        self.parked[waiting] = False
        return self.may_enter(waiting)
