"""What a home needs of its rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from asyncmoe.messages import Message


class Host(Protocol):
    """What a home needs of its rank."""

    def now_s(self) -> float:
        """Loop time."""

    def emit(self, message: Message) -> None:
        """Send a message to the front end."""

    def discard(self, slots: NDArray[np.int64], epochs: NDArray[np.uint32]) -> None:
        """Tell the expert ranks, at best effort, that these rows are dead."""

    def wipe(self, blocks: NDArray[np.int64]) -> None:
        """Zero these KV blocks: what is not finite in them would reach their next owner, whose
        attention masks what it must not see with a factor of 0, and 0 times NaN is NaN."""

    def after_running(self, callback: Callable[[], None]) -> None:
        """Call back once the stages that now run on the device have ended."""

    def soon(self, callback: Callable[[], None]) -> None:
        """Call back in the loop's next turn, after the device was offered what is ready now."""

    @property
    def computing(self) -> bool:
        """Whether a batch is with the device."""
