"""One limit for work of several steps, each of which may wait."""

from __future__ import annotations

import time


class Deadline:
    """A moment `timeout_s` after the object was made."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._end_s = time.monotonic() + timeout_s

    @property
    def left_s(self) -> float:
        """Seconds that are left, 0 when it is over."""
        return max(0.0, self._end_s - time.monotonic())
