"""Micro-queues: the ready rows of one stage on one rank, kept as array segments.

Attention and head stages queue whole chunks (a decode step is a chunk of one row), since the rows
of a chunk attend to each other; expert stages queue rows, which are independent and may be split
anywhere. Nothing here loops over rows.

What `make_queues` gives is compiled where that is there (`native/src/columns/queues.cpp`); it is
used like `Queues`, and says the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from asyncmoe import native
from asyncmoe.expertcolumns import ExpertColumns, expert_columns
from asyncmoe.packed import pack
from asyncmoe.stage import Kind, StageChain
from asyncmoe.transport import Parcel


@dataclass(slots=True)
class ChunkSegment:
    """Chunks that became ready together."""

    chunks: NDArray[np.int64]
    rows: NDArray[np.int64]  # rows of each chunk
    total: int  # rows together
    joined_s: float
    joined_decision: int


class ChunkQueue:
    """Ready chunks of an attention or head stage, first in first out."""

    def __init__(self) -> None:
        self.rows = 0
        self._segments: deque[ChunkSegment] = deque()

    @property
    def oldest(self) -> tuple[float, int]:
        """Loop time and decision at which the oldest chunk joined. The queue must not be empty."""
        head = self._segments[0]
        return head.joined_s, head.joined_decision

    def put(self, segment: ChunkSegment) -> None:
        """Append chunks."""
        self._segments.append(segment)
        self.rows += segment.total

    def take(self, max_rows: int) -> NDArray[np.int64]:
        """Remove and return chunks of up to `max_rows` rows together; at least one chunk."""
        taken: list[NDArray[np.int64]] = []
        room = max_rows
        while self._segments:
            head = self._segments[0]
            if head.total <= room:
                taken.append(self._segments.popleft().chunks)
                room -= head.total
                self.rows -= head.total
                continue
            upto = int(np.searchsorted(np.cumsum(head.rows), room, side="right"))
            if upto == 0 and taken:
                break
            upto = max(upto, 1)
            taken.append(head.chunks[:upto])
            used = int(head.rows[:upto].sum())
            self.rows -= used
            head.chunks, head.rows = head.chunks[upto:], head.rows[upto:]
            head.total -= used
            if not len(head.chunks):
                self._segments.popleft()
            break
        return taken[0] if len(taken) == 1 else np.concatenate(taken)

    def remove(self, chunks: NDArray[np.int64]) -> None:
        """Take `chunks` out wherever they stand; those not queued are ignored."""
        kept: deque[ChunkSegment] = deque()
        for segment in self._segments:
            keep = ~np.isin(segment.chunks, chunks)
            gone = int(segment.rows[~keep].sum())
            self.rows -= gone
            if keep.any():
                segment.chunks, segment.rows = segment.chunks[keep], segment.rows[keep]
                segment.total -= gone
                kept.append(segment)
        self._segments = kept


class Hold:
    """A lease shared by the pieces of a split parcel: released when the last row was read."""

    __slots__ = ("_release", "_rows")

    def __init__(self, rows: int, release: Callable[[], None] | None = None) -> None:
        """`release`: None where nobody waits for the memory."""
        self._rows, self._release = rows, release

    def read(self, rows: int) -> None:
        """`rows` rows have been read for the last time."""
        self._rows -= rows
        if self._rows == 0 and self._release is not None:
            self._release()


@dataclass(slots=True)
class RowSegment:
    """Rows of one dispatch parcel that wait for their expert stage."""

    source: int  # home rank of the rows
    parcel: Parcel
    hold: Hold
    joined_s: float
    joined_decision: int


class Taken:
    """Rows that were taken for a batch, in ascending order of their source."""

    def __init__(self, segments: list[RowSegment]) -> None:
        self._segments = sorted(segments, key=lambda segment: segment.source)
        self.rows = sum(segment.parcel.rows for segment in segments)

    @property
    def payloads(self) -> list[torch.Tensor]:
        """Of each parcel, [rows, hidden]."""
        return [segment.parcel.payload for segment in self._segments]

    def columns(
        self, local: NDArray[np.int64], local_experts: int, per_expert: bool
    ) -> ExpertColumns:
        """See `expert_columns`."""
        parcels = [(segment.source, pack(segment.parcel)) for segment in self._segments]
        return expert_columns(parcels, local, local_experts, per_expert)

    def read(self, held_rows: NDArray[np.int64]) -> None:
        """All rows have been read for the last time: take them off `held_rows`, which counts those
        of each source [ranks], and let go of their memory."""
        for segment in self._segments:
            held_rows[segment.source] -= segment.parcel.rows
        for segment in self._segments:
            segment.hold.read(segment.parcel.rows)
        self._segments = []


class RowQueue:
    """Ready rows of an expert stage, first in first out."""

    def __init__(self) -> None:
        self.rows = 0
        self._segments: deque[RowSegment] = deque()

    @property
    def oldest(self) -> tuple[float, int]:
        """Loop time and decision at which the oldest row joined. The queue must not be empty."""
        head = self._segments[0]
        return head.joined_s, head.joined_decision

    def has(self, source: int) -> bool:
        """Whether rows of this source wait."""
        return any(segment.source == source for segment in self._segments)

    def put(self, segment: RowSegment) -> None:
        """Append the rows of a parcel."""
        self._segments.append(segment)
        self.rows += segment.parcel.rows

    def take(self, max_rows: int) -> list[RowSegment]:
        """Remove and return up to `max_rows` rows; the last parcel is split if it must be."""
        taken: list[RowSegment] = []
        room = max_rows
        while self._segments and room > 0:
            head = self._segments[0]
            rows = head.parcel.rows
            if rows <= room:
                taken.append(self._segments.popleft())
                room -= rows
                continue
            piece = RowSegment(head.source, head.parcel.piece(0, room), head.hold, *self.oldest)
            head.parcel = head.parcel.piece(room, rows)
            taken.append(piece)
            room = 0
        self.rows -= max_rows - room
        return taken

    def discard(self, source: int, slots: NDArray[np.uint32], epochs: NDArray[np.uint32]) -> int:
        """Drop the queued rows of `source` with these (slot, epoch); return how many there were."""
        dead = row_key(slots, epochs)
        dropped = 0
        kept: deque[RowSegment] = deque()
        for segment in self._segments:
            if segment.source == source:
                gone = np.isin(row_key(segment.parcel.slot, segment.parcel.epoch), dead)
                count = int(gone.sum())
                if count:
                    dropped += count
                    if count < segment.parcel.rows:
                        segment.parcel = segment.parcel.select(np.flatnonzero(~gone))
                        kept.append(segment)
                    segment.hold.read(count)
                    continue
            kept.append(segment)
        self._segments = kept
        self.rows -= dropped
        return dropped


def row_key(slots: NDArray[np.uint32], epochs: NDArray[np.uint32]) -> NDArray[np.uint64]:
    """Slot and epoch as one number."""
    return (slots.astype(np.uint64) << np.uint64(32)) | epochs.astype(np.uint64)


class Queues:
    """All micro-queues of one rank, with their depths and ages as arrays over the chain."""

    def __init__(self, chain: StageChain) -> None:
        self.chain = chain
        self.rows = np.zeros(len(chain), np.int64)
        self.total = 0  # rows of all stages
        self.oldest_s = np.zeros(len(chain), np.float64)
        self.oldest_decision = np.zeros(len(chain), np.int64)
        self.decision = 0  # batches executed so far
        self._queues: list[ChunkQueue | RowQueue] = [
            RowQueue() if kind is Kind.EXPERT else ChunkQueue() for kind in chain.kinds
        ]
        self._latest: dict[int, tuple[int, float]] = {}  # source: stage and time of its last rows

    def put_chunks(
        self,
        stage: int,
        chunks: NDArray[np.int64],
        rows: NDArray[np.int64],
        now_s: float,
        total: int | None = None,
    ) -> None:
        """Chunks of `rows` rows each became ready for an attention or head stage.

        `total`: their rows together, where that is known.
        """
        queue = self._queues[stage]
        assert isinstance(queue, ChunkQueue)
        if not queue.rows:
            self.oldest_s[stage], self.oldest_decision[stage] = now_s, self.decision
        if total is None:
            total = int(rows.sum())
        queue.put(ChunkSegment(chunks, rows, total, now_s, self.decision))
        self.rows[stage] = queue.rows
        self.total += total

    def put_parcel(
        self, source: int, parcel: Parcel, release: Callable[[], None] | None, now_s: float
    ) -> None:
        """Rows became ready for an expert stage. `release` is called once all have been read."""
        stage = parcel.stage
        queue = self._queues[stage]
        assert isinstance(queue, RowQueue)
        self._latest[source] = stage, now_s
        before = queue.rows
        if not before:
            self.oldest_s[stage], self.oldest_decision[stage] = now_s, self.decision
        hold = Hold(parcel.rows, release)
        queue.put(RowSegment(source, parcel, hold, now_s, self.decision))
        self.rows[stage] = queue.rows
        self.total += queue.rows - before

    def take_chunks(self, stage: int, max_rows: int) -> NDArray[np.int64]:
        """See `ChunkQueue.take`."""
        queue = self._queues[stage]
        assert isinstance(queue, ChunkQueue)
        chunks = queue.take(max_rows)
        self._note(stage, queue)
        return chunks

    def take_rows(self, stage: int, max_rows: int) -> Taken:
        """See `RowQueue.take`."""
        queue = self._queues[stage]
        assert isinstance(queue, RowQueue)
        segments = queue.take(max_rows)
        self._note(stage, queue)
        return Taken(segments)

    def remove_chunks(self, stage: int, chunks: NDArray[np.int64]) -> None:
        """See `ChunkQueue.remove`."""
        queue = self._queues[stage]
        assert isinstance(queue, ChunkQueue)
        queue.remove(chunks)
        self._note(stage, queue)

    def discard(self, source: int, slots: NDArray[np.uint32], epochs: NDArray[np.uint32]) -> int:
        """Drop dead rows of `source` from all expert stages; return how many there were."""
        dropped = 0
        for stage, queue in enumerate(self._queues):
            if isinstance(queue, RowQueue) and queue.rows:
                dropped += queue.discard(source, slots, epochs)
                self._note(stage, queue)
        return dropped

    def awaits(self, stage: int, reach: int, since_s: float) -> bool:
        """Whether a source without rows at expert stage `stage` should have some soon: its last
        rows came, not before `since_s`, to one of the `reach` layers before, around the chain."""
        chain, queue = self.chain, self._queues[stage]
        assert isinstance(queue, RowQueue)
        for source, (latest, came_s) in self._latest.items():
            behind = (chain.layer(stage) - chain.layer(latest)) % chain.layers
            if came_s >= since_s and 0 < behind <= reach and not queue.has(source):
                return True
        return False

    def _note(self, stage: int, queue: ChunkQueue | RowQueue) -> None:
        rows = queue.rows
        self.total += rows - int(self.rows[stage])
        self.rows[stage] = rows
        if rows:
            self.oldest_s[stage], self.oldest_decision[stage] = queue.oldest


def are_plain(queues: object) -> bool:
    """Whether these are `Queues` itself, and not its compiled twin."""
    return isinstance(queues, Queues)


def make_queues(chain: StageChain) -> Queues:
    """As `Queues`, compiled if that is there."""
    kind = Queues if native.columns is None else native.columns.Queues
    queues: Queues = kind(chain)
    return queues
