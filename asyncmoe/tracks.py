"""Tracks of a home rank: which micro-batch a chunk goes with, so that all have about as many rows.

Where the scheduling rule has one track there is nothing to decide. Otherwise a new chunk joins the
track with fewest rows, behind an earlier chunk of its request if there is one, and at each decode
step rows move over from a track that has too many.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from asyncmoe.chunks import NONE, ChunkTable
from asyncmoe.stage import StageChain


class Tracks:
    """The tracks of one home rank; a track is told by its A0."""

    def __init__(self, chain: StageChain, chunks: ChunkTable) -> None:
        self._chunks, self._tracks, self._stages = chunks, chain.tracks, chain.track_stages

    def first_stage(self, earlier: int) -> int:
        """A0 for a chunk that comes behind chunk `earlier` of its request (or NONE)."""
        if self._tracks == 1:
            return 0
        if earlier != NONE:
            return int(self._chunks.stage[earlier]) // self._stages * self._stages
        return int(self._rows().argmin()) * self._stages

    def next_stages(self, chunks: NDArray[np.int64]) -> NDArray[np.int64]:
        """[chunks] A0 of the next decode step of chunks that have left H."""
        if self._tracks == 1:
            return np.zeros(len(chunks), np.int64)
        track = self._chunks.stage[chunks].astype(np.int64) // self._stages
        rows = self._rows()
        for one in np.unique(track).tolist():
            least = int(rows.argmin())
            here = np.flatnonzero(track == one)
            moved = min(int(rows[one] - rows[least]) // 2, len(here))
            if moved > 0:
                track[here[-moved:]] = least
                rows[least] += moved
                rows[one] -= moved
        return track * self._stages

    def _rows(self) -> NDArray[np.int64]:
        """[tracks] rows in the layers."""
        used = np.flatnonzero(self._chunks.request != NONE)
        track = self._chunks.stage[used] // self._stages
        rows = np.bincount(track, self._chunks.rows[used], self._tracks)
        return rows.astype(np.int64)
