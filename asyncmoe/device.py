"""The contract of a device: it runs a stage's compute off the loop, in the order submitted."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch

from asyncmoe.cores import Cores

T = TypeVar("T")
# Called on the loop with the work's result or what it raised, and its seconds of compute.
Done = Callable[[Any, BaseException | None, float], None]
Submit = Callable[[Callable[[], Any], Done], None]


class Device(ABC):
    """One compute stream beside the loop.

    Promises, for every implementation:
    - work runs one piece at a time, in the order submitted;
    - `submit` never blocks the loop, and all calls come from one loop until that is closed; `done`
      is called there, in the order submitted, after the work's reads and writes of tensors are done
      and visible to the loop and to later work;
    - an exception in the work is handed to `done`, and later work still runs.
    """

    # Whether it lives on a virtual loop. Such a device is given one stage at a time, since its work
    # takes no time by itself: a passage would be over at the moment that it begins.
    virtual: ClassVar[bool] = False

    torch_device: torch.device

    def __init__(self, threads: int, cores: Cores | None = None) -> None:
        """`threads`: CPU threads that one piece of work may use; `cores`: where they stay."""
        self.threads, self.cores = threads, cores

    @abstractmethod
    def submit(self, work: Callable[[], Any], done: Done) -> None:
        """Queue `work`, and call `done` once it is over."""

    def submitter(self) -> Submit:
        """`submit` for the loop that runs now, for who calls it often there."""
        return self.submit

    def run(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Queue `work` and return a future of its result; cancelling that does not stop work that
        has begun."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def done(result: T, error: BaseException | None, compute_s: float) -> None:
            if future.done():
                return
            if isinstance(error, StopIteration):  # a future refuses it
                error = RuntimeError(f"the work raised {error!r}")
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

        self.submit(work, done)
        return future

    @abstractmethod
    def busy_s(self) -> float:
        """Seconds of compute since the start, for the share of time that was hidden behind it."""

    @abstractmethod
    async def close(self) -> None:
        """Finish what is queued, if that takes no more than seconds, and release threads and
        streams. Idempotent."""
