"""The driver: submits a workload to a target, live or virtual, and notes what comes of it.

It knows time only as the target's loop's, and lives in callbacks: a target of any speed is driven
by the same code.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from asyncmoe.metrics.recorder import FAULTS, Recorder
from asyncmoe.workload.workload import Workload

RETRY_S = 0.1  # until another request takes the place of one of a closed loop that was not served


class Listener(Protocol):
    """What a target tells. Calls are made on the loop."""

    def on_tokens(self, requests: Sequence[int], now_s: float) -> None:
        """Each of these requests has one token more; a request may be named twice."""

    def on_end(self, request: int, reason: str) -> None:
        """No more tokens will come, after "length", "stop", "aborted", "failed", "refused" or
        "overloaded". Exactly once for each request that was submitted."""


class Target(Protocol):
    """What a workload is run on."""

    def now_s(self) -> float:
        """The clock that `Listener.on_tokens` reports by, in seconds."""

    def listen(self, listener: Listener) -> None:
        """Tell `listener` from now on."""

    def submit(self, request: int, workload: Workload) -> None:
        """Begin request number `request` of `workload` (numbers beyond its length start over).

        Never blocks; whatever goes wrong is told by `on_end`. Requests have ids in the order in
        which they are submitted.
        """

    def abort(self, request: int) -> None:
        """Give a request up; `on_end` follows. One that has ended is ignored."""


async def drive(
    target: Target, workload: Workload, recorder: Recorder, stop: asyncio.Event | None = None
) -> None:
    """Run `workload` on `target` and note everything in `recorder`.

    Returns when all requests have ended. At the workload's end of time, and when `stop` is set, no
    more are submitted and those under way are aborted; so they are if this is cancelled.
    """
    drive = _Drive(target, workload, recorder)
    target.listen(drive)
    watch = None if stop is None else asyncio.ensure_future(stop.wait())
    if watch is not None:
        watch.add_done_callback(lambda _: drive.stop())
    try:
        drive.begin()
        await drive.ended
    finally:
        drive.stop()
        if watch is not None:
            watch.cancel()


class _Drive:
    """One run."""

    def __init__(self, target: Target, workload: Workload, recorder: Recorder) -> None:
        self._target, self._workload, self._recorder = target, workload, recorder
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._running: dict[int, None] = {}  # in order of submission
        self._next = 0
        self._stopped = False
        self._begin_s = 0.0  # loop time
        self._timers: list[asyncio.TimerHandle] = []

    def begin(self) -> None:
        """Submit what is due and set the clocks."""
        workload, self._begin_s = self._workload, self._loop.time()
        self._recorder.begin(workload, self._target.now_s())
        if workload.duration_s is not None:
            self._timers = [self._loop.call_at(self._begin_s + workload.duration_s, self.stop)]
        if workload.in_flight is None:
            self._submit_due()
        else:
            self._fill_loop(workload.in_flight)
        self._finish_if_over()

    def stop(self) -> None:
        """Submit nothing more and abort what runs. Idempotent."""
        if self._stopped:
            return
        self._stopped = True
        for timer in self._timers:
            timer.cancel()
        self._recorder.finish(self._target.now_s())
        for request in list(self._running):
            self._target.abort(request)
        self._finish_if_over()

    def on_tokens(self, requests: Sequence[int], now_s: float) -> None:
        """See `Listener`."""
        self._recorder.tokens(requests, now_s)

    def on_end(self, request: int, reason: str) -> None:
        """See `Listener`."""
        del self._running[request]
        self._recorder.ended(request, self._target.now_s(), reason)
        if self._workload.in_flight is not None and not self._stopped:
            # Later: a target that refuses at once would be asked again from within itself.
            if reason in FAULTS:
                self._loop.call_later(RETRY_S, self._replace)
            else:
                self._loop.call_soon(self._replace)
        else:
            self._finish_if_over()

    def _fill_loop(self, missing: int) -> None:
        """Closed loop: start what it begins with, at once or one after the other."""
        gap_s = self._workload.spread_s / missing
        if not gap_s:
            for _ in range(missing):
                self._submit_next()
            return

        def start(number: int) -> None:
            self._submit_next()
            if number + 1 < missing and not self._stopped:
                at_s = self._begin_s + gap_s * (number + 1)
                self._timers[1:] = [self._loop.call_at(at_s, start, number + 1)]

        start(0)

    def _replace(self) -> None:
        self._submit_next()
        self._finish_if_over()

    def _submit_due(self) -> None:
        """Open loop: everything whose time has come, and a timer for the next."""
        if self._stopped:
            return
        arrival_s = self._workload.arrival_s
        due = int(arrival_s.searchsorted(self._loop.time() - self._begin_s, "right"))
        while self._next < due:
            self._submit_next()
        if self._next < len(self._workload):
            at_s = self._begin_s + float(arrival_s[self._next])
            self._timers[1:] = [self._loop.call_at(at_s, self._submit_due)]

    def _submit_next(self) -> None:
        """The next request of the workload, if there is one."""
        if self._stopped or not self._has_more:
            return
        request, self._next = self._next, self._next + 1
        self._running[request] = None
        self._recorder.submitted(request, self._target.now_s())
        self._target.submit(request, self._workload)

    @property
    def _has_more(self) -> bool:
        return self._next < len(self._workload) or self._workload.repeats

    def _finish_if_over(self) -> None:
        if not self._running and (self._stopped or not self._has_more) and not self.ended.done():
            self.ended.set_result(None)
