"""What a loop and a compute thread hand each other: work one way, and what became of it the other.

`CompiledHandover` is used where compiled code is there. It wakes the loop as the very last thing
that the thread does for a piece of work, and by a file descriptor of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import time
from collections.abc import Callable
from typing import Any, Protocol

from asyncmoe import native
from asyncmoe.device import Done, Submit

_Item = tuple[Callable[[], Any], Done, asyncio.AbstractEventLoop]


class Handover(Protocol):
    """One compute thread's."""

    @property
    def busy_s(self) -> float:
        """Seconds in work, up to now."""

    def submitter(self) -> Submit:
        """A function of work and what is called then, for the loop that runs now.

        Raises `RuntimeError` behind `close`.
        """

    def serve(self) -> None:
        """Do the work that is submitted, on this thread, until the end."""

    def end(self) -> None:
        """`serve` returns once what was submitted before is done."""

    def close(self) -> None:
        """Nothing is submitted any more, and what is not over yet may be nobody's. Idempotent."""


class PlainHandover:
    """By a queue, and by the loop's own way to be called from other threads."""

    def __init__(self) -> None:
        self._busy_s = 0.0
        self._began_s: float | None = None  # the work that runs now
        self._closed = False
        # SimpleQueue is in C and hands over without a Python-level lock
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()

    @property
    def busy_s(self) -> float:
        """See `Handover`."""
        busy_s, began_s = self._busy_s, self._began_s  # in this order nothing counts twice
        return busy_s + (0.0 if began_s is None else time.perf_counter() - began_s)

    def submitter(self) -> Submit:
        """See `Handover`."""
        if self._closed:
            raise RuntimeError("the device is closed")
        put, loop = self._queue.put, asyncio.get_running_loop()
        return lambda work, done: put((work, done, loop))

    def serve(self) -> None:
        """See `Handover`."""
        while (item := self._queue.get()) is not None:
            work, done, loop = item
            self._began_s = begin_s = time.perf_counter()
            result, failure = _outcome(work)
            compute_s = time.perf_counter() - begin_s
            self._began_s = None
            self._busy_s += compute_s
            # A closed loop has left this thread behind, see `CpuDevice.close`.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(done, result, failure, compute_s)
            # nothing of a batch outlives it here
            del item, work, done, loop, result, failure

    def end(self) -> None:
        """See `Handover`."""
        self._queue.put(None)

    def close(self) -> None:
        """See `Handover`."""
        self._closed = True


class CompiledHandover:
    """By compiled code, which waits, and knows what to call then."""

    def __init__(self) -> None:
        self._native = native.columns.Handover()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ends = -1, -1  # to read from and to write to
        self._closed = False
        self.end: Callable[[], None] = self._native.end

    @property
    def busy_s(self) -> float:
        """See `Handover`."""
        busy_s: float = self._native.busy_s
        return busy_s

    def submitter(self) -> Submit:
        """See `Handover`."""
        loop = asyncio.get_running_loop()
        if self._closed:
            raise RuntimeError("the device is closed")
        if loop is not self._loop:
            if self._loop is not None and not self._loop.is_closed():
                raise RuntimeError("a device works for one event loop at a time")
            self._leave()
            if self._ends[0] < 0:
                self._ends = _signal_ends()
            loop.add_reader(self._ends[0], self._native.deliver)
            self._native.signal_to(self._ends[1], self._ends[0])
            self._loop = loop
        made: Submit = self._native.submitter()
        return made

    def _leave(self) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it is closed already
                self._loop.remove_reader(self._ends[0])
            self._loop = None

    def serve(self) -> None:
        """See `Handover`."""
        take, tell = self._native.take, self._native.tell
        while (work := take()) is not None:
            result, failure = _outcome(work)
            tell(result, failure)
            del work, result, failure  # nothing of a batch outlives it here

    def close(self) -> None:
        """See `Handover`."""
        self._closed = True
        try:
            if self._loop is asyncio.get_running_loop():
                self._native.deliver()
        finally:
            self._leave()
            self._native.signal_to(-1, -1)
            for end in set(self._ends) - {-1}:
                os.close(end)
            self._ends = -1, -1


def _outcome(work: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """What it gives or raises: a panic in an extension, too, must not end the thread."""
    try:
        return work(), None
    except BaseException as error:
        return None, error


def make_handover() -> Handover:
    """Compiled if that is there."""
    return PlainHandover() if native.columns is None else CompiledHandover()


def _signal_ends() -> tuple[int, int]:
    """Descriptors to read from and to write to, that do not block; may be the same one."""
    if hasattr(os, "eventfd"):
        both = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        return both, both
    ends = os.pipe()
    for end in ends:
        os.set_blocking(end, False)
    return ends
