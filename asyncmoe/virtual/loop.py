"""An asyncio event loop on virtual time: when nothing is ready, the clock jumps to the next timer.

Work takes no virtual time by itself; what takes time is said so, by timers and by `Lane.charge`. So
a run of hours takes as long as its Python does, and nothing in it depends on the machine: the same
seed gives the same run, event for event.

Many ranks share the loop, and each has a **lane**: the callbacks of one rank, in the order in which
they became ready, as on a loop of its own. Lanes take turns. With a seed the next lane is drawn
from those that are ready, so that every seed is another interleaving of the ranks; the order within
a lane stays, since asyncio promises it and code may rely on it. A lane is also the time of its
rank's host: while it is charged for work, its callbacks wait.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
import threading
from collections import deque
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from random import Random
from typing import TYPE_CHECKING, Any, NoReturn

from asyncmoe.errors import AsyncMoeError

if TYPE_CHECKING:
    from asyncmoe.virtual.costs import Costs

_MANY = 100  # cancelled timers from which on it is worth to sweep them out
_TASKS_NAMED = 5  # in the message about a standstill


class Standstill(AsyncMoeError):
    """Nothing is ready and no timer is set: whoever still waits would wait for ever."""


class NotVirtual(AsyncMoeError):
    """Something of the real world was asked for: a socket, a thread, a process, a signal."""


class Lane:
    """The callbacks of one rank, and the time of its host."""

    __slots__ = (
        "_loop", "_seen_s", "busy_from_s", "busy_until_s", "context", "costs", "dead", "free_s",
        "hidden_s", "name", "queued", "ready", "worked_s",
    )  # fmt: skip

    def __init__(self, loop: VirtualLoop, name: str, costs: Costs | None = None) -> None:
        """`costs`: what the rank's device and host take; None for no time at all."""
        self.name, self.costs = name, costs
        self.context = contextvars.copy_context()  # what is called in it belongs to this lane
        self.context.run(_LANE.set, self)
        self.free_s = 0.0  # when the host is done with what it was charged for
        self.worked_s = 0.0  # all that it was charged for
        self.hidden_s = 0.0  # of that, while the device computed
        self.busy_from_s = self.busy_until_s = 0.0  # the device's present or last time of work
        self._seen_s: float | None = None
        self.dead = False  # a dead lane's callbacks are dropped
        self.ready: deque[_Handle] = deque()
        self.queued = False  # whether the loop has it among its ready or waiting lanes
        self._loop = loop

    def charge(self, seconds: float) -> float:
        """The host works for `seconds`, after what it works at already; when it will be done."""
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

    def counts(self, seconds: float) -> None:
        """The last `seconds` that were charged are of the code that is called next: its first look
        at `clock` comes before them."""
        if seconds:
            self._seen_s = self.worked_s - seconds

    def clock(self) -> float:
        """CPU seconds of the host so far, for counters that take differences."""
        seen_s, self._seen_s = self._seen_s, None
        return self.worked_s if seen_s is None else seen_s

    def kill(self) -> None:
        """Run nothing more in it, as when its process dies."""
        self.dead = True
        self.ready.clear()


_LANE: contextvars.ContextVar[Lane] = contextvars.ContextVar("asyncmoe_lane")


def current_lane() -> Lane | None:
    """The lane of the callback or task that runs; None outside a virtual loop."""
    return _LANE.get(None)


class _Handle(asyncio.TimerHandle):
    """A callback. What `asyncio.Handle` does for debugging is left out, since it takes longer."""

    __slots__ = ("lane",)

    def __init__(
        self,
        lane: Lane,
        when_s: float,
        callback: Callable[..., Any],
        args: tuple[Any, ...],
        loop: VirtualLoop,
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


class VirtualLoop(asyncio.BaseEventLoop):
    """See the module. Made for `asyncio.Runner(loop_factory=lambda: VirtualLoop(seed))`.

    Promises:
    - callbacks of a lane run in the order in which they became ready; timers in the order of
      their time, then in the order in which they were set;
    - no callback runs in a lane before the host is free of what the lane was charged for, but for
      the slack;
    - the run depends on nothing but what is run and the seed;
    - sockets, threads, processes and signals are refused with `NotVirtual`, and a loop on which
      nothing can happen any more stops with `Standstill`.
    """

    _stopping: bool  # asyncio's own
    _thread_id: int | None

    def __init__(self, seed: int | None = None, slack_s: float = 0.0) -> None:
        """`seed`: of the choice among ready lanes; None lets them take turns.

        `slack_s`: how much earlier than its host is free a lane may run. What it is charged for is
        not less for it, and a run has fewer events.
        """
        super().__init__()
        self._slack_s = slack_s
        self.now_s = 0.0
        self.events = 0  # callbacks run so far
        self.on_event: Callable[[float, str, Callable[..., Any]], None] | None = None
        self._random = None if seed is None else Random(seed).random
        self._turns: deque[Lane] = deque()  # ready lanes, each once
        self._timers: list[tuple[float, int, _Handle | Lane]] = []
        self._number = 0  # of the next timer, so that equal times keep their order
        self._dropped = 0  # cancelled timers in `_timers`
        self.main = Lane(self, "main")  # of what belongs to no rank

    def lane(self, name: str, costs: Costs | None = None) -> Lane:
        """A new lane. Start its rank's task with `context=lane.context`."""
        return Lane(self, name, costs)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
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
        lane = context.get(_LANE) or self.main
        handle = _Handle(lane, self.now_s, callback, args, self, context)
        if not lane.dead:
            lane.ready.append(handle)
            if not lane.queued:
                lane.queued = True
                self._turns.append(lane)
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
        handle = _Handle(context.get(_LANE) or self.main, when, callback, args, self, context)
        handle._scheduled = True
        self._number = number = self._number + 1
        heappush(self._timers, (when, number, handle))
        return handle

    def call_later(  # type: ignore[override]
        self,
        delay: float,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        """See asyncio."""
        return self.call_at(self.now_s + delay, callback, *args, context=context)

    def call_soon_threadsafe(  # type: ignore[override]
        self,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        """See asyncio; of the loop's own thread only."""
        if self._thread_id not in (None, threading.get_ident()):
            self._refuse("a call from another thread")
        return self.call_soon(callback, *args, context=context)

    def note_cancelled(self, handle: _Handle) -> None:
        """Sweep cancelled timers out once they are the most, so that they cost no memory."""
        if not handle._scheduled:
            return
        self._dropped += 1
        if self._dropped > _MANY and 2 * self._dropped > len(self._timers):
            self._timers = [
                t for t in self._timers if isinstance(t[2], Lane) or not t[2]._cancelled
            ]
            heapify(self._timers)
            self._dropped = 0

    # ---- running

    def _run_once(self) -> None:
        """Run what is ready, let the clock jump, and so on until `stop`. What `run_forever` calls.

        One function, since a parcel of the virtual world takes several rounds of it.
        """
        turns, timers, draw, slack_s = self._turns, self._timers, self._random, self._slack_s
        while not self._stopping:
            if turns:
                if draw is not None and len(turns) > 1:
                    turns.rotate(-int(draw() * len(turns)))
                lane = turns.popleft()
                if lane.free_s - slack_s > self.now_s:
                    self._wake(lane)
                    continue
                if not lane.ready:  # it died
                    lane.queued = False
                    continue
                handle = lane.ready.popleft()
                if not handle._cancelled:
                    self.events += 1
                    if self.on_event is not None:
                        self.on_event(self.now_s, lane.name, handle._callback)
                    try:
                        handle._context.run(handle._callback, *handle._args)
                    except (SystemExit, KeyboardInterrupt):
                        raise
                    except BaseException as error:
                        self._report(handle, error)
                if lane.ready:
                    turns.append(lane)
                else:
                    lane.queued = False
                continue
            if timers is not self._timers:  # they were swept
                timers = self._timers
            if not timers or timers[0][0] == math.inf:
                self._stand_still()
            when_s, _, due = heappop(timers)
            if isinstance(due, Lane):
                turns.append(due)
            elif due._cancelled:
                self._dropped -= 1
                continue
            else:
                due._scheduled = False
                lane = due.lane
                if lane.dead:
                    continue
                lane.ready.append(due)
                if not lane.queued:
                    lane.queued = True
                    turns.append(lane)
            if when_s > self.now_s:
                self.now_s = when_s
            if draw is not None:
                self._gather()

    def _gather(self) -> None:
        """Make all timers of this very moment ready, so that the choice is among all of them."""
        timers, turns = self._timers, self._turns
        while timers and timers[0][0] <= self.now_s:
            due = heappop(timers)[2]
            if isinstance(due, Lane):
                turns.append(due)
                continue
            due._scheduled = False
            if due._cancelled:
                self._dropped -= 1
            elif not due.lane.dead:
                due.lane.ready.append(due)
                if not due.lane.queued:
                    due.lane.queued = True
                    turns.append(due.lane)

    def _wake(self, lane: Lane) -> None:
        """Look at the lane again when its host is free."""
        self._number = number = self._number + 1
        heappush(self._timers, (lane.free_s - self._slack_s, number, lane))

    def _report(self, handle: _Handle, error: BaseException) -> None:
        message = f"Exception in callback {handle._callback!r}"
        self.call_exception_handler({"message": message, "exception": error, "handle": handle})

    def _stand_still(self) -> NoReturn:
        waiting = sorted(task.get_name() for task in asyncio.all_tasks(self))
        named = ", ".join(waiting[:_TASKS_NAMED])
        more = f" and {len(waiting) - _TASKS_NAMED} more" if len(waiting) > _TASKS_NAMED else ""
        raise Standstill(
            f"at {self.now_s:.6f} s of virtual time nothing is ready and no timer is set, and "
            f"these tasks wait: {named or 'none'}{more}"
        )

    # ---- what there is not

    def _refuse(self, what: str) -> NoReturn:
        raise NotVirtual(
            f"{what} on a virtual loop: there are no sockets, threads, processes or signals in the "
            "virtual world"
        )

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> NoReturn:  # type: ignore[override]
        """Refused."""
        self._refuse("run_in_executor")

    def add_reader(self, fd: Any, callback: Any, *args: Any) -> NoReturn:  # type: ignore[override]
        """Refused."""
        self._refuse("add_reader")

    def add_writer(self, fd: Any, callback: Any, *args: Any) -> NoReturn:  # type: ignore[override]
        """Refused."""
        self._refuse("add_writer")

    def add_signal_handler(self, sig: int, callback: Any, *args: Any) -> NoReturn:  # type: ignore[override]
        """Refused."""
        self._refuse("add_signal_handler")

    async def getaddrinfo(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused."""
        self._refuse("getaddrinfo")

    async def create_connection(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused."""
        self._refuse("create_connection")

    async def create_server(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused."""
        self._refuse("create_server")

    async def subprocess_exec(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused."""
        self._refuse("subprocess_exec")

    def _process_events(self, event_list: Any) -> None:
        """Nothing comes from outside."""

    def _write_to_self(self) -> None:
        """Nobody sleeps outside."""


def _nothing() -> None:
    pass
