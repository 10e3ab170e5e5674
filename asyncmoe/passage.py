"""A passage: a batch that is alone on its rank goes through several stages in one piece of work.

While all experts of the coming layers live here and nothing else is queued, every work-conserving
scheduler would pick the batch's next stage each time. So the batch need not touch a queue, nor the
loop: it stays with the device from A(l) on, through E(l), A(l+1), … to H, and its tokens are those
of the way through the queues, bit for bit. It ends early, before the next attention stage, as soon
as something else wants to run or memory is to be given back; its rows then wait in that stage's
queue like any others, and the scheduler decides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from asyncmoe.sampler import Sampled
from asyncmoe.stage import Kind
from asyncmoe.steps import AttentionStep, HeadStep


@dataclass(frozen=True, slots=True)
class Passed:
    """How far a passage went."""

    next_stage: int | None  # attention stage whose queue the rows join; None: they left H
    sampled: Sampled | None  # of H
    stages: Sequence[tuple[int, float]]  # the stages passed, in order, and seconds of compute


@dataclass(slots=True)
class Passage:
    """`first` and the stages behind it, up to A(`end`), or through H where `head` is given."""

    first: AttentionStep
    end: int  # the MoE layer before whose attention stage the rows stop at the latest
    head: HeadStep | None
    local: Sequence[Tensor]  # per MoE layer: int64 [experts], local index of each expert
    wanted: Callable[[], bool]  # whether to stop before the next attention stage
    kind = Kind.ATTENTION

    @property
    def stage(self) -> int:
        """The stage that the rows were queued for."""
        return self.first.stage

    @property
    def row_count(self) -> int:
        """Rows of the batch."""
        return self.first.row_count

    def __call__(self) -> Passed:
        first, clock = self.first, time.perf_counter
        enter_s = clock()
        x = first.entering()
        begin_s = clock()
        x, seconds = first.model.through(
            range(first.layer, self.end), x, first.rows.batch, first.cache, self.local, self.wanted
        )
        stages = list(enumerate(seconds, 2 * first.layer))
        stages[0] = first.stage, seconds[0] + begin_s - enter_s
        end = first.layer + len(seconds) // 2
        if self.head is None or end < self.end:
            return self._leave(end, x, stages)
        begin_s = clock()
        sampled = self.head.of(x)
        stages.append((self.head.stage, clock() - begin_s))
        return Passed(None, sampled, stages)

    def _leave(self, layer: int, x: Tensor, stages: list[tuple[int, float]]) -> Passed:
        self.first.table.keep(self.first.rows.columns.slots, x)
        return Passed(2 * layer, None, stages)
