"""What a passage and the loop want of each other while the passage is with the device.

What there is to say is left with the passage, where the loop looks once it is woken, and before it
hears of the passage's end. Compiled code says so without the GIL (`walk.py`): it adds to a counter
of the system, for which the loop waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Final

from asyncmoe.bell import Bell


class Herald:
    """Of one executor. Made and closed on its loop; `wanted` and `tell` are for other threads."""

    LEAD: Final = 4  # most decode steps of a passage that the loop has not heard of

    def __init__(self, bell: Bell, look: Callable[[], None]) -> None:
        """`look` is called on the loop once a passage has left something to be heard of."""
        self._loop = asyncio.get_running_loop()
        self._bell, self._look = bell, look
        self.wanted_at = bell.wanted_at  # where it is in memory whether something is wanted, or 0
        self.counter = -1  # an eventfd; -1: there is none
        if self.wanted_at and hasattr(os, "eventfd"):
            self.counter = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._loop.add_reader(self.counter, self._count)
        self._holders, self._lock = 1, threading.Lock()

    def wanted(self) -> bool:
        """Whether a passage has to come back before its next attention stage."""
        return self._bell.wanted

    def tell(self) -> None:
        """A passage has left something to be heard of."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits
            self._loop.call_soon_threadsafe(self._look)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """The counter stays open meanwhile: a passage may outlive the executor, and what it writes
        must find no other file there. If it is closed already, it is -1."""
        self._hold(1)
        try:
            yield
        finally:
            self._hold(-1)

    def close(self) -> None:
        """Nobody looks any more. To be called once."""
        if self.counter >= 0:
            self._loop.remove_reader(self.counter)
            self._hold(-1)

    def _hold(self, more: int) -> None:
        with self._lock:
            self._holders += more
            if not self._holders and self.counter >= 0:
                os.close(self.counter)
                self.counter = -1

    def _count(self) -> None:
        with contextlib.suppress(BlockingIOError):  # what it counted is read already
            os.eventfd_read(self.counter)
        self._look()
