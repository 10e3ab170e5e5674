"""Asking an executor to look at its queues, from whatever puts rows there.

What `make_bell` gives is compiled where that is there (`native/src/columns/bell.cpp`), since each
parcel rings; it is used like `Bell`, and says the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sized
from typing import Any

from asyncmoe import native


class Bell:
    """Rings of one turn of the loop are heard as one."""

    def __init__(
        self, call_soon: Callable[[Callable[[], None]], Any], hear: Callable[[], None],
        running: Sized, enough: int,
    ) -> None:  # fmt: skip
        """`hear` is called in the loop's next turn, by `call_soon`; not while as many as `enough`
        are `running`, whose end is a look at the queues as well."""
        self._call_soon, self._hear = call_soon, hear
        self._running, self._enough = running, enough
        # Something beside the running batch wants this rank. Read by the compute thread.
        self.wanted = False
        self.rung = False  # `hear` is to come
        self.mute = False  # for ever
        self.wanted_at = 0  # where `wanted` is in memory; 0: nowhere

    def ring(self) -> None:
        """Rows became ready."""
        self.wanted = True
        if not self.rung and not self.mute and len(self._running) < self._enough:
            self.rung = True
            self._call_soon(self._hear)


def make_bell(
    call_soon: Callable[[Callable[[], None]], Any], hear: Callable[[], None],
    running: Sized, enough: int,
) -> Bell:  # fmt: skip
    """As `Bell`, compiled if that is there."""
    kind = Bell if native.columns is None else native.columns.Bell
    bell: Bell = kind(call_soon, hear, running, enough)
    return bell
