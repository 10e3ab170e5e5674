"""A march: decode steps that all ranks of a machine take together, each in one compiled call.

Every rank passes its own rows through attention and router, puts them into the memory that it
shares with each other rank, computes its experts' sums for all ranks' rows, and gives them back
there: no queue, loop or GIL is between (`native/src/kernels/march.h`). Each waits for what it needs
and for nothing else, so that a march is as quick as its slowest rank; rows are those of the way
through the queues, bit for bit. When ranks march, and when they stop, is in `marches.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from asyncmoe.passage import Passage, Passed
from asyncmoe.stage import Kind
from asyncmoe.stats import RankTimes
from asyncmoe.transport import Common
from asyncmoe.walk import Walk

_LINE_BYTES = 64
_LEFT = 1  # u64 of a half: the march that its writer has left


def march_bytes(rows: int, row_bytes: int, top_k: int) -> int:
    """Bytes of the memory, each way, in which two ranks march with at most `rows` rows each."""

    def lines(nbytes: int) -> int:
        return -(-nbytes // _LINE_BYTES) * _LINE_BYTES

    return (
        _LINE_BYTES
        + 2 * lines(rows * row_bytes)
        + lines(rows * top_k * np.dtype(np.int64).itemsize)
        + lines(rows * top_k * np.dtype(np.float32).itemsize)
    )


class Fellows:
    """The ranks that may march together, and what one of them shares with the others."""

    def __init__(
        self,
        rank: int,
        commons: dict[int, Common],
        rows: int,
        owner: NDArray[np.uint16],
    ) -> None:
        """
        Args:
            commons: by rank; all but this one.
            rows: the most that a rank marches with.
            owner: [MoE layers, experts] rank of each expert.
        """
        self.rank, self.world, self.rows = rank, len(commons) + 1, rows
        self.owner = np.ascontiguousarray(owner, np.uint16)
        self.broken = np.zeros(1, np.uint8)  # read by compute threads: 1 ends a march at once
        self._commons = commons  # keeps the memory
        self.half_bytes = min(common.mine.nbytes for common in commons.values())
        self._heads = [np.frombuffer(each.mine, np.uint64, 2) for each in commons.values()]
        self.halves = [(0, 0)] * self.world  # addresses, by rank: this rank's half, the other's
        for other, common in commons.items():
            self.halves[other] = _address(common.mine), _address(common.theirs)

    def leave(self, number: int) -> None:
        """Nobody shall wait for this rank in this march."""
        for head in self._heads:
            head[_LEFT] = number

    def break_off(self) -> None:
        """A march that is under way ends at once, and so does every later one."""
        self.broken[0] = 1


def _address(memory: memoryview) -> int:
    return np.frombuffer(memory, np.uint8).ctypes.data


class Tally:
    """What a rank has computed in a march, for its own rows and for those of others.

    The compute thread counts while the loop reads: each number is whole, and grows.
    """

    def __init__(self) -> None:
        self.counts = np.zeros((2, len(Kind)), np.int64)  # batches, rows; by kind of stage
        self.seconds = np.zeros(len(Kind) + 1)  # of compute, by kind of stage; then waited
        self._counted = self.counts.copy(), self.seconds.copy()

    def tell(self, times: RankTimes) -> None:
        """Add what `times` does not have yet."""
        now = self.counts.copy(), self.seconds.copy()
        (batches, rows), seconds = now[0] - self._counted[0], now[1] - self._counted[1]
        self._counted = now
        for kind in Kind:
            times.kinds[kind].add(int(rows[kind]), float(seconds[kind]), int(batches[kind]))
        times.march_wait_s += float(seconds[-1])


@dataclass(frozen=True, slots=True)
class Together:
    """Which march."""

    fellows: Fellows
    number: int  # greater than that of any before
    # Is called on the loop, before anything is done with the rows: whether it ended as agreed.
    over: Callable[[bool], None]


@dataclass(slots=True, kw_only=True)
class March(Passage):
    """The part of one rank, as a piece of work for its device. `first` is A0 of all its rows.

    The stages that it passes are in its `tally`.
    """

    together: Together
    tally: Tally = field(default_factory=Tally)
    _agreed: bool = False

    def is_over(self) -> None:
        """On the loop: the device is done with it."""
        self.together.over(self._agreed)

    def __call__(self) -> Passed:
        """Its rows are at A0 again, or have tokens of which the loop was not told."""
        first, course, together = self.first, self.course, self.together
        try:
            assert course is not None
            self._walk = walk = Walk(
                first.rows, first.tokens, course, self.end, self._counts, self.herald, follows=False
            )
            with self.herald.held():
                layers, turn, self._agreed = first.model.march(
                    walk, first.cache, self.local, together.fellows, together.number, self.tally
                )
        finally:
            if not self._agreed:
                together.fellows.leave(together.number)
        if layers < self.end or not self.row_count:
            return Passed(0, None, [])
        return self._step_of(walk, turn)

    def _step_of(self, walk: Walk, turn: int) -> Passed:
        return Passed(None, walk.sampled(turn), [])
