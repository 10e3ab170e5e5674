"""The contract of a device: it runs a stage's compute off the loop, in the order submitted."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeVar

import torch

from asyncmoe.cores import Cores

T = TypeVar("T")


class Device(ABC):
    """One compute stream beside the loop.

    Promises, for every implementation:
    - work runs one piece at a time, in the order submitted;
    - `submit` never blocks the loop; the future completes on the loop that called it, after the
      work's reads and writes of tensors are done and visible to the loop and to later work;
    - an exception in the work is set on its future, and later work still runs;
    - cancelling the future does not stop work that has begun.
    """

    torch_device: torch.device

    def __init__(self, threads: int, cores: Cores | None = None) -> None:
        """`threads`: CPU threads that one piece of work may use; `cores`: where they stay."""
        self.threads, self.cores = threads, cores

    @abstractmethod
    def submit(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Queue `work` and return a future of its result."""

    @abstractmethod
    def busy_s(self) -> float:
        """Seconds of compute since the start, for the share of time that was hidden behind it."""

    @abstractmethod
    async def close(self) -> None:
        """Finish what is queued, if that takes no more than seconds, and release threads and
        streams. Idempotent."""
