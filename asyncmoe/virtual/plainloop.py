"""The virtual loop without a compiler: the twin of `native/src/columns/timeline.cpp`."""

from __future__ import annotations

import asyncio
import contextvars
import math
from collections import deque
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Any

from asyncmoe.virtual.loop import LANE, VirtualLoop

if TYPE_CHECKING:
    from asyncmoe.virtual.costs import Costs

_MANY = 100  # cancelled timers from which on it is worth to sweep them out


class PlainLane:
    """See `Lane`."""

    __slots__ = (
        "_loop", "_seen_s", "busy_from_s", "busy_until_s", "context", "costs", "dead", "free_s",
        "hidden_s", "name", "queued", "ready", "worked_s",
    )  # fmt: skip

    def __init__(self, loop: PlainLoop, name: str, costs: Costs | None = None) -> None:
        self.name, self.costs = name, costs
        self.context = contextvars.copy_context()
        self.context.run(LANE.set, self)
        self.free_s = 0.0
        self.worked_s = 0.0
        self.hidden_s = 0.0
        self.busy_from_s = self.busy_until_s = 0.0  # the device's present or last time of work
        self._seen_s: float | None = None
        self.dead = False
        self.ready: deque[_Handle] = deque()
        self.queued = False  # whether the loop has it among its ready or waiting lanes
        self._loop = loop

    def charge(self, seconds: float) -> float:
        """See `Lane`."""
        now_s, begin_s = self._loop.now_s, self.free_s
        if begin_s < now_s:
            begin_s = now_s
        if not seconds:
            return begin_s
        self.free_s = end_s = begin_s + seconds
        self.worked_s += seconds
        if begin_s < self.busy_until_s and end_s > self.busy_from_s:
            self.hidden_s += min(end_s, self.busy_until_s) - max(begin_s, self.busy_from_s)
        return end_s

    def compute(self, before_s: float, seconds: float) -> float:
        """See `Lane`."""
        begin_s = self.charge(before_s)
        if begin_s < self.busy_until_s:
            begin_s = self.busy_until_s
        else:
            self.busy_from_s = begin_s
        self.busy_until_s = begin_s + seconds
        return self.busy_until_s

    def counts(self, seconds: float) -> None:
        """See `Lane`."""
        if seconds:
            self._seen_s = self.worked_s - seconds

    def clock(self) -> float:
        """See `Lane`."""
        seen_s, self._seen_s = self._seen_s, None
        return self.worked_s if seen_s is None else seen_s

    def kill(self) -> None:
        """See `Lane`."""
        self.dead = True
        self.ready.clear()


class _Handle(asyncio.TimerHandle):
    """A callback. What `asyncio.Handle` does for debugging is left out, since it takes longer."""

    __slots__ = ("lane",)

    def __init__(
        self,
        lane: PlainLane,
        when_s: float,
        callback: Callable[..., Any],
        args: tuple[Any, ...],
        loop: PlainLoop,
        context: contextvars.Context,
    ) -> None:
        self.lane, self._when, self._loop = lane, when_s, loop
        self._callback, self._args, self._context = callback, args, context
        self._cancelled = self._scheduled = False
        self._repr = self._source_traceback = None

    def cancel(self) -> None:
        """See `asyncio.Handle`."""
        if not self._cancelled:
            self._cancelled = True
            self._callback = _nothing
            self._args = ()
            self._loop.note_cancelled(self)


class PlainLoop(VirtualLoop):
    """See `VirtualLoop`."""

    main: PlainLane

    def _set_up(self, draw: Callable[[], float] | None, slack_s: float) -> None:
        self._draw, self._slack_s = draw, slack_s
        self.now_s = 0.0
        self.events = 0
        self.on_event = None
        self._turns: deque[PlainLane] = deque()  # ready lanes, each once
        self._timers: list[tuple[float, int, _Handle | PlainLane]] = []
        self._number = 0  # of the next timer, so that equal times keep their order
        self._dropped = 0  # cancelled timers in `_timers`
        self.main = PlainLane(self, "main")

    def lane(self, name: str, costs: Costs | None = None) -> PlainLane:
        """See `VirtualLoop`."""
        return PlainLane(self, name, costs)

    @property
    def timers(self) -> int:
        """See `VirtualLoop`."""
        return len(self._timers)

    def time(self) -> float:
        """See asyncio."""
        return self.now_s

    # ---- what asyncio calls

    def call_soon(  # type: ignore[override]  # the stubs' TypeVarTuple
        self,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        """See asyncio."""
        if context is None:
            context = contextvars.copy_context()
        handle = _Handle(self._lane_of(context), self.now_s, callback, args, self, context)
        self._make_ready(handle)
        return handle

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        """See asyncio. A time that is past counts as now."""
        if context is None:
            context = contextvars.copy_context()
        handle = _Handle(self._lane_of(context), when, callback, args, self, context)
        handle._scheduled = True
        self._number = number = self._number + 1
        heappush(self._timers, (when, number, handle))
        return handle

    def _lane_of(self, context: contextvars.Context) -> PlainLane:
        lane = context.get(LANE)
        return lane if isinstance(lane, PlainLane) else self.main

    def call_later(  # type: ignore[override]
        self,
        delay: float,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        """See asyncio."""
        return self.call_at(self.now_s + delay, callback, *args, context=context)

    def note_cancelled(self, handle: _Handle) -> None:
        """Sweep cancelled timers out once they are the most, so that they cost no memory."""
        if not handle._scheduled:
            return
        self._dropped += 1
        if self._dropped > _MANY and 2 * self._dropped > len(self._timers):
            self._timers = [
                t for t in self._timers if isinstance(t[2], PlainLane) or not t[2]._cancelled
            ]
            heapify(self._timers)
            self._dropped = 0

    # ---- running

    def _run_once(self) -> None:
        """Run what is ready, let the clock jump, and so on until `stop`; for `run_forever`."""
        turns, draw = self._turns, self._draw
        while not self._stopping:
            if turns:
                if draw is not None and len(turns) > 1:
                    turns.rotate(-int(draw() * len(turns)))
                self._turn(turns.popleft())
                continue
            if not self._timers or self._timers[0][0] == math.inf:
                self._stand_still()
            when_s = self._timers[0][0]
            if not self._take_out():
                continue
            self.now_s = max(self.now_s, when_s)
            if draw is not None:
                # All timers of this very moment, so that the choice is among all of them.
                while self._timers and self._timers[0][0] <= self.now_s:
                    self._take_out()

    def _take_out(self) -> bool:
        """Make the first timer ready; false if it is void."""
        due = heappop(self._timers)[2]
        if isinstance(due, PlainLane):
            self._turns.append(due)
            return True
        due._scheduled = False
        if due._cancelled:
            self._dropped -= 1
            return False
        self._make_ready(due)
        return not due.lane.dead

    def _make_ready(self, handle: _Handle) -> None:
        lane = handle.lane
        if not lane.dead:
            lane.ready.append(handle)
            if not lane.queued:
                lane.queued = True
                self._turns.append(lane)

    def _turn(self, lane: PlainLane) -> None:
        """Run the first of a lane's callbacks."""
        if lane.free_s - self._slack_s > self.now_s:  # look at it again when its host is free
            self._number = number = self._number + 1
            heappush(self._timers, (lane.free_s - self._slack_s, number, lane))
            return
        try:
            if lane.ready:  # else it died
                self._call(lane, lane.ready.popleft())
        finally:
            lane.queued = bool(lane.ready)
            if lane.queued:
                self._turns.append(lane)

    def _call(self, lane: PlainLane, handle: _Handle) -> None:
        if handle._cancelled:
            return
        self.events += 1
        callback = handle._callback
        if self.on_event is not None:
            self.on_event(self.now_s, lane.name, callback)
        try:
            handle._context.run(callback, *handle._args)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:
            self._report(callback, error, handle)


def _nothing() -> None:
    pass
