"""A passage: a batch that is alone on its rank goes through several stages in one piece of work.

While all experts of the coming layers live here and nothing else is queued, every work-conserving
scheduler would pick the batch's next stage each time. So the batch need not touch a queue, nor the
loop: it stays with the device from A(l) on, through E(l), A(l+1), … to H, and its tokens are those
of the way through the queues, bit for bit. Decode steps of which nobody has to decide anything go
on from there to A(0) of their next tokens, and the loop hears of each token while the device works
on those behind it. A passage ends before the next attention stage as soon as something else wants
to run or memory is to be given back; its rows then wait in that stage's queue like any others, and
the scheduler decides. It ends as well where a request does.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from asyncmoe.herald import Herald
from asyncmoe.rows import Rows
from asyncmoe.sampler import Course, Sampled
from asyncmoe.stage import Kind
from asyncmoe.steps import AttentionStep, HeadStep
from asyncmoe.walk import Walk


@dataclass(frozen=True, slots=True)
class Passed:
    """How far a passage went."""

    next_stage: int | None  # attention stage whose queue the rows join; None: they are behind H
    sampled: Sampled | None  # of H
    stages: list[tuple[int, float]]  # the stages passed, in order, and seconds of compute


@dataclass(slots=True)
class Passage:
    """`first` and the stages behind it, up to A(`end`), or through H where `head` is given, and
    then, where there is a `course`, those of the next tokens."""

    first: AttentionStep
    end: int  # the MoE layer before whose attention stage the rows stop at the latest
    head: HeadStep | None
    local: Sequence[Tensor]  # per MoE layer: int64 [experts], local index of each expert
    herald: Herald
    course: Course | None = None  # of rows that go on behind H; None: they do not
    kind = Kind.ATTENTION
    # Decode steps that the loop was told of and those that it has heard of.
    _counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(2, np.int64))
    _told: deque[Passed] = field(default_factory=deque)
    _walk: Walk | None = None

    @property
    def stage(self) -> int:
        """The stage that the rows were queued for."""
        return self.first.stage

    @property
    def row_count(self) -> int:
        """Rows of the batch."""
        return self.first.row_count

    def unheard(self) -> Passed | None:
        """On the loop: the oldest step that it was told of and has not heard of; None: no such."""
        if self._told:
            return self._told.popleft()
        walk = self._walk
        turn = None if walk is None else walk.unheard()
        if walk is None or turn is None:
            return None
        return self._step_of(walk, turn)

    def heard(self) -> None:
        """On the loop: what it was told of has been seen to."""
        self._counts[1] += 1

    def __call__(self) -> Passed:
        first, head = self.first, self.head
        passed = self._pass(first, head)
        while head is not None and passed.sampled is not None and self._goes_on(passed.sampled):
            walk = self._make_walk(first.rows, passed.sampled.tokens, head)
            if walk is None:
                first = first.following(passed.sampled.tokens)
                head = head.following(first.rows)
            self._counts[0] += 1
            self._told.append(passed)
            self.herald.tell()
            if walk is not None:
                return self._walk_on(walk)
            passed = self._pass(first, head)
        return passed

    def _goes_on(self, sampled: Sampled) -> bool:
        """Whether the rows go on to their next tokens without the loop."""
        if self.course is None or not self.course.goes_on(sampled):
            return False
        told, heard = self._counts.tolist()
        return bool(told - heard < self.herald.LEAD) and not self.herald.wanted()

    def _pass(self, first: AttentionStep, head: HeadStep | None) -> Passed:
        clock, herald = time.perf_counter, self.herald
        enter_s = clock()
        x = first.entering()
        begin_s = clock()
        layers = range(first.layer, self.end)
        x, seconds = first.model.through(
            layers, x, first.rows.batch, first.cache, self.local, herald.wanted
        )
        stages = list(enumerate(seconds, 2 * first.layer))
        stages[0] = first.stage, seconds[0] + begin_s - enter_s
        end = first.layer + len(seconds) // 2
        if head is None or end < self.end:
            return self._leave(end, x, stages)
        begin_s = clock()
        sampled = head.of(x)
        stages.append((head.stage, clock() - begin_s))
        return Passed(None, sampled, stages)

    def _leave(self, layer: int, x: Tensor, stages: list[tuple[int, float]]) -> Passed:
        self.first.table.keep(self.first.rows.columns.slots, x)
        return Passed(2 * layer, None, stages)

    def _make_walk(self, rows: Rows, tokens: NDArray[np.int64], head: HeadStep) -> Walk | None:
        """The steps behind that of `rows`, if they can be compiled."""
        herald, course = self.herald, self.course
        if course is None or herald.counter < 0 or head.sampling.draws is not None:
            return None
        if not self.first.model.walks:
            return None
        self._walk = Walk(rows, tokens, course, self.end, self._counts, herald)
        return self._walk

    def _walk_on(self, walk: Walk) -> Passed:
        with self.herald.held():
            x, layers, turn = self.first.model.walk(walk, self.first.cache, self.local)
        if layers < self.end:
            return self._leave(layers, x, walk.stages(turn)[: 2 * layers])
        return self._step_of(walk, turn)

    def _step_of(self, walk: Walk, turn: int) -> Passed:
        """A whole step of a walk."""
        return Passed(None, walk.sampled(turn), walk.stages(turn))
