"""The executor: asks the scheduler for a stage, takes a batch, hands it to the device.

Up to two batches are with the device: while one computes, the next is chosen and made ready, so
that the device never waits for the loop. A batch that is alone on its rank may go
through many stages at once (`passage.py`). Everything here runs on the loop, in callbacks; there
is no task that could be left behind. What is usual between two batches is compiled where that is
there (`native/src/columns/turn.cpp`): it does what `_pump` and `_done` here do, or calls them.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from asyncmoe import native
from asyncmoe.bell import make_bell
from asyncmoe.company import Company
from asyncmoe.device import Device, Done, Submit
from asyncmoe.herald import Herald
from asyncmoe.march import March, Together
from asyncmoe.microqueue import Queues, are_plain
from asyncmoe.passage import Passage, Passed
from asyncmoe.policy import BatchPolicy
from asyncmoe.scheduler import QueueView, Scheduler
from asyncmoe.stage import Kind
from asyncmoe.stats import KindTimes, RankTimes
from asyncmoe.steps import AttentionStep, ExpertStep, HeadStep

if TYPE_CHECKING:
    from asyncmoe.attentionstages import AttentionStages
    from asyncmoe.expertstages import ExpertStages

Step = AttentionStep | ExpertStep | HeadStep | Passage
DEPTH = 2
# A scheduler that waits while nothing runs is asked again after this: no event may be to come.
ASK_AGAIN_S = 0.001
TICK_S = 0.001  # uvloop's clock goes in such steps


class Stages(Protocol):
    """What the executor drives: how a stage's batch is taken and what becomes of its result."""

    def prepare(self, stage: int, max_rows: int) -> Step:
        """Take a batch off the queue of `stage`, which is not empty, and gather its columns."""

    def passage(self, step: Step, last: Callable[[], int], herald: Herald) -> Step:
        """`step`, the only batch on this rank, with as many of the stages behind it as may be.

        `last` says behind which stage of a decode step there may be none.
        """

    def march(self, chunks: NDArray[np.int64], together: Together, herald: Herald) -> Passage:
        """A march with these decode chunks, all that this home has, which no queue has."""

    def went_on(self, step: Passage, passed: Passed) -> None:
        """`step`, which is still with the device, has got tokens and gone on to their stages."""

    def finish(self, step: Step, result: Any) -> None:
        """The device is done with `step`."""

    def failed(self, step: Step, error: BaseException) -> None:
        """The compute of `step` raised."""

    def broken(self, error: Exception) -> None:
        """The scheduler, or something of the above, raised: nothing will run any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workings:
    """What a compiled turn (`native/src/columns/turn.cpp`) has of its executor."""

    queues: Queues
    policy: BatchPolicy
    company: Company | None
    stages: Stages
    # Those stages that it sees to itself; None: it goes through `stages`.
    experts: ExpertStages | None
    attention: AttentionStages | None  # with a departure
    times: dict[Kind, KindTimes]
    depth: int  # batches with the device at once
    running: deque[Step]  # with the device, in order
    after: deque[tuple[int, Callable[[], None]]]  # if there is any, `done` is to be called
    virtual: bool  # whether no passage is ever begun
    clock: Callable[[], float]  # of CPU time
    now_s: Callable[[], float]  # loop time
    look_again: Callable[[float], None]  # at the queues, at this loop time if not before
    submit: Submit  # to the device
    executed: Callable[[int, int], None] | None  # of the rule; None: it takes no note
    travel: Callable[[int, Step], Step]  # makes a passage of an attention batch if it can be one
    fill: Callable[[], None]  # does all that is not as usual before a batch
    done: Done  # and behind one
    fail: Callable[[Exception], None]  # hears of an error of ours, a stage's or the rule's


class Executor:
    """Keeps the device of one rank busy."""

    def __init__(
        self,
        queues: Queues,
        scheduler: Scheduler,
        policy: BatchPolicy,
        device: Device,
        stages: Stages,
        times: RankTimes,
        depth: int = DEPTH,
        experts: ExpertStages | None = None,
        attention: AttentionStages | None = None,
        company: Company | None = None,
    ) -> None:
        """`depth`: batches with the device at once. `experts`, `attention`: those of `stages` whose
        batches need not go through it; None: all do. `company`: of this policy."""
        self._queues, self._scheduler, self._policy = queues, scheduler, policy
        self._device, self._stages, self._times = device, stages, times
        self._company = company
        self._depth = depth
        self._synchronous = scheduler.synchronous
        self._loop = asyncio.get_running_loop()
        self._running: deque[Step] = deque()
        self._over = 0  # batches that the device is done with
        self._after: deque[tuple[int, Callable[[], None]]] = deque()  # (then over, what to call)
        enough = sys.maxsize if self._synchronous else DEPTH
        # `_pump` and `_done`, compiled; None where that is not there, or such a rule is seldom used
        self._turn: Any = None
        hear, self._end = self._pump, self._done
        if not (are_plain(queues) or self._synchronous) and scheduler.work_conserving:
            self._turn = native.columns.Turn(self._workings(experts, attention))
            hear, self._end = self._turn.hear, self._turn.done
        self.bell = make_bell(self._loop.call_soon, hear, self._running, enough)
        if self._turn is not None:
            self._turn.open(self.bell)
        # Rows became ready. Coalesced: what arrives in one turn of the loop is seen at once.
        self.notify = self.bell.ring
        self._timer: asyncio.TimerHandle | None = None  # to look at the queues again
        self._timer_s = math.inf  # loop time when it does
        self._herald: Herald | None = None  # of passages
        if scheduler.work_conserving and not device.virtual:
            self._herald = Herald(self.bell, self._look)
        self._closed = False

    def _workings(
        self, experts: ExpertStages | None, attention: AttentionStages | None
    ) -> Workings:
        scheduler, times, device = self._scheduler, self._times, self._device
        takes_note = type(scheduler).executed is not Scheduler.executed
        return Workings(
            queues=self._queues,
            policy=self._policy,
            company=self._company,
            stages=self._stages,
            experts=experts,
            attention=None if attention is None or attention.departure is None else attention,
            times=times.kinds,
            depth=self._depth,
            running=self._running,
            after=self._after,
            virtual=device.virtual,
            clock=times.clock,
            now_s=self._loop.time,
            look_again=self._look_again,
            submit=device.submitter(),
            executed=scheduler.executed if takes_note else None,
            travel=self._travel,
            fill=self._fill,
            done=self._done,
            fail=self._break,
        )

    @property
    def computing(self) -> bool:
        """Whether a batch is with the device."""
        return bool(self._running)

    def after_running(self, callback: Callable[[], None]) -> None:
        """Call back when the batches that are now with the device are done; at once if none is."""
        if self._running:
            self.bell.wanted = True
            self._after.append((self._over + len(self._running), callback))
        else:
            callback()

    def count(self) -> None:
        """The times of this rank have what its device has done in a march up to now."""
        if self._running and isinstance(self._running[0], March):
            self._running[0].tally.tell(self._times)

    def watch(self) -> None:
        """Take all batches through `Stages.prepare` and `finish` from now on, where somebody who
        replaced these sees them."""
        if self._turn is not None:
            self._turn.watch()

    @property
    def may_march(self) -> bool:
        """Whether compiled code can hear what is wanted of it, and tell what it has."""
        return self._herald is not None and self._herald.counter >= 0

    def march(self, take: Callable[[], NDArray[np.int64]], together: Together) -> None:
        """Hand over a march with the decode chunks that `take` gives, which no queue has.

        In the loop's next turn: the end of the batch that has made them ready is yet to be seen to,
        and would be taken for something else that wants this rank.
        """
        self._loop.call_soon(self._march, take, together)

    def _march(self, take: Callable[[], NDArray[np.int64]], together: Together) -> None:
        if self._closed:
            together.fellows.leave(together.number)
            return
        assert self._herald is not None
        self.bell.wanted = bool(self._queues.total or self._after)
        try:
            step = self._stages.march(take(), together, self._herald)
            self._hand_over(step.stage, step)
        except Exception as error:
            self._break(error)

    def close(self) -> None:
        """Start nothing more; what runs is let to its end by the device, and nobody hears of it.

        Weights and caches are let go. Idempotent.
        """
        if not self._closed:
            self._closed = self.bell.mute = self.bell.wanted = True
            if self._timer is not None:
                self._timer.cancel()
            if self._turn is not None:
                self._turn.close()
            if self._herald is not None:
                self._herald.close()
            del self._stages

    def _pump(self) -> None:
        self.bell.rung = False
        try:
            self._fill()
        except Exception as error:
            self._break(error)

    def _fill(self) -> None:
        if self._synchronous:
            self._scheduler.attend(self._queues.rows)
        while len(self._running) < self._depth and not self._closed:
            if not self._queues.total:
                return
            begin_s = self._times.clock()
            stage = self._choose()
            if stage is None:
                break
            step = self._stages.prepare(stage, int(self._policy.max_rows[stage]))
            if step.kind is Kind.ATTENTION and not self._device.virtual and self._is_alone:
                step = self._travel(stage, step)
            self._hand_over(stage, step)
            self._times.kinds[step.kind].prepare_s += self._times.clock() - begin_s

    def _hand_over(self, stage: int, step: Step) -> None:
        self._note(stage, step.row_count)
        self._running.append(step)
        if self._turn is None:
            self._device.submit(step, self._end)
        else:
            self._turn.submit(step)

    def _travel(self, stage: int, step: Step) -> Step:
        """`step`, alone on this rank, as a passage if it can be one."""
        self.bell.wanted = False
        assert self._herald is not None
        last = partial(self._policy.reach, stage, step.row_count)
        return self._stages.passage(step, last, self._herald)

    def _look(self) -> None:
        """Hear what a passage has left to be heard of."""
        while not self._closed and self._running:
            step = self._running[0]
            if not isinstance(step, Passage) or (passed := step.unheard()) is None:
                return
            self._hear(step, passed)

    def _hear(self, step: Passage, passed: Passed) -> None:
        begin_s = self._times.clock()
        try:
            self._passed(step, passed, 0.0)
            note = self._note if self._turn is None else self._turn.note
            note(0, step.row_count)  # A0 of the next token
            self._stages.went_on(step, passed)
            self._times.kinds[step.kind].finish_s += self._times.clock() - begin_s
        except Exception as fault:
            self._break(fault)

    @property
    def _is_alone(self) -> bool:
        """Whether the scheduler would pick every next stage of the batch that was just taken."""
        return self._scheduler.work_conserving and not self._running and not self._queues.total

    def _note(self, stage: int, rows: int) -> None:
        """A batch of `stage` is with the device."""
        self._queues.decision += 1
        self._scheduler.executed(stage, rows)

    def _choose(self) -> int | None:
        queues, now_s = self._queues, self._loop.time()
        if self._company is not None:
            self._company.attend(now_s)
        runnable, count, first, next_s = self._policy.look(queues.rows, queues.oldest_s, now_s)
        if not count:
            if next_s is not None:
                self._look_again(next_s)
            return None
        if not self._synchronous and self._running and count == 1 and not self._is_full(first):
            return None
        if self._scheduler.work_conserving and self._is_all(first):
            return first
        stage = self._scheduler.choose(
            QueueView(
                queues.rows,
                runnable,
                queues.oldest_decision,
                queues.oldest_s,
                queues.decision,
                now_s,
            )
        )
        if stage is None:
            if not (self._running or self._synchronous):  # else something is to happen
                self._look_again(now_s + ASK_AGAIN_S)
        elif (
            not isinstance(stage, int | np.integer)
            or not 0 <= stage < len(runnable)
            or not runnable[stage]
        ):
            allowed = np.flatnonzero(runnable).tolist()
            raise ValueError(
                f"the scheduler chose stage {stage!r}; runnable are {allowed}, or None"
            )
        return stage

    def _is_full(self, stage: int) -> bool:
        """Whether a batch of the only runnable stage is chosen while another runs.

        Not if it is not full: two groups of rows that take turns would leave the scheduler no
        choice for ever, and so never meet to become one batch.
        """
        return bool(self._queues.rows[stage] >= self._policy.max_rows[stage])

    def _is_all(self, stage: int) -> bool:
        """Whether a batch of this runnable stage takes all that is queued: there is no choice."""
        rows = self._queues.rows[stage]
        return bool(rows == self._queues.total and rows <= self._policy.max_rows[stage])

    def _look_again(self, when_s: float) -> None:
        """Look at the queues then, if not before. A timer that is set for an earlier time stays,
        whether or not there is still something to see: a look costs less than timers do."""
        if not self._device.virtual:  # a loop that is to wait for less than that spins
            when_s = max(when_s, self._loop.time() + TICK_S)
        if when_s < self._timer_s:
            if self._timer is not None:
                self._timer.cancel()
            self._timer, self._timer_s = self._loop.call_at(when_s, self._timed), when_s

    def _timed(self) -> None:
        self._timer, self._timer_s = None, math.inf
        if self._queues.total:
            self.notify()

    def _break(self, error: Exception) -> None:
        stages = self._stages
        self.close()
        stages.broken(error)

    def _done(self, result: Any, error: BaseException | None, compute_s: float) -> None:
        self._look()
        if self._closed:
            return
        step = self._running.popleft()  # a device works in order
        self._over += 1
        begin_s = self._times.clock()
        try:
            if error is not None:
                self._stages.failed(step, error)
            else:
                self._passed(step, result, compute_s)
                self._stages.finish(step, result)
            if self._turn is not None:
                self._turn.tell()
            if self._synchronous:
                self._scheduler.finished(step.stage)
            while self._after and self._after[0][0] <= self._over:
                self._after.popleft()[1]()
            self._times.kinds[step.kind].finish_s += self._times.clock() - begin_s
            if self._running:
                self.notify()
            else:  # before anything else that waits for the loop: the device is idle
                self._fill()
        except Exception as fault:
            self._break(fault)

    def _passed(self, step: Step, result: Any, compute_s: float) -> None:
        """Count the stages that a piece of device work covered."""
        rows = step.row_count
        if isinstance(step, March):
            step.tally.tell(self._times)
        if not isinstance(result, Passed):
            self._times.kinds[step.kind].add(rows, compute_s)
            if self._company is not None:
                self._company.took(step.kind, compute_s)
            return
        if self._turn is not None:
            self._turn.passed(result.stages, rows)
            return
        for stage, seconds in result.stages:
            self._times.kinds[self._queues.chain.kinds[stage]].add(rows, seconds)
        for stage, _ in result.stages[1:]:
            self._note(stage, rows)
