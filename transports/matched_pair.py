"""One pair of ranks on a stack of matched transfers: its contract, and its bursts."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch


class Operation(NamedTuple):
    """One send or receive."""

    tensor: torch.Tensor  # contiguous, not empty
    done: Callable[[], None]  # to be called on the loop once it is complete


class Pair(ABC):
    """The library's connection with one peer. All methods are called on the loop; none blocks."""

    # Under way in one direction at most. None: any number, but both sides launch the same bursts.
    bursts: ClassVar[int | None]

    def __init__(self) -> None:
        self.failed: Callable[[str], None] = _ignore  # whom to tell that the library gave up
        self.quiet = asyncio.get_running_loop().create_future()  # done once `abort` is through

    @abstractmethod
    async def introduce(self) -> bytes:
        """What the other side needs to connect, at most 4096 bytes. Raises `RankFailed`."""

    @abstractmethod
    async def connect(self, card: bytes) -> None:
        """Connect to the one who introduced itself with `card`. Raises `RankFailed`."""

    @abstractmethod
    def send(self, burst: Sequence[Operation]) -> None:
        """Launch sends, in order; as one group if the library has groups.

        The burst is over with its last `done`. Where `bursts` is None `done` need not be called for
        sends: `taken` says that they are complete. After `abort` no `done` is called.
        """

    @abstractmethod
    def receive(self, burst: Sequence[Operation]) -> None:
        """Launch receives, likewise."""

    def taken(self, count: int) -> None:  # noqa: B027 - of no interest to who knows by itself
        """The first `count` of the sends that are under way have arrived."""

    @abstractmethod
    def abort(self) -> None:
        """End everything. `quiet` is done once the library touches no buffer any more and the
        pair's threads have ended. Idempotent."""


class Lane:
    """One direction of a pair: launches bursts in order, and no more at a time than it may. Bursts
    that wait are launched as one, unless both sides know them."""

    def __init__(self, launch: Callable[[Sequence[Operation]], None], most: int | None) -> None:
        """`most`: as `Pair.bursts`."""
        self._launch, self._most = launch, most
        self._waiting: list[Sequence[Operation]] = []
        self._under_way = 0  # bursts
        self._open = False

    def open(self) -> None:
        """The pair is connected."""
        self._open = True
        self._go_on()

    def put(self, burst: Sequence[Operation]) -> None:
        """Launch `burst`, which is not empty, after all that were put before."""
        self._waiting.append(burst)
        self._go_on()

    def _go_on(self) -> None:
        if not self._open or not self._waiting:
            return
        if self._most is None:
            waiting, self._waiting = self._waiting, []
            for burst in waiting:
                self._launch(burst)
        elif self._under_way < self._most:
            operations = [each for burst in self._waiting for each in burst]
            self._waiting.clear()
            last = operations[-1]
            operations[-1] = Operation(last.tensor, partial(self._end, last.done))
            self._under_way += 1
            self._launch(operations)

    def _end(self, done: Callable[[], None]) -> None:
        self._under_way -= 1
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._go_on)
        done()


def _ignore(reason: str) -> None:
    """Before there is a link, `connect` reports."""


def settle(future: asyncio.Future[Any], result: object) -> None:
    """Set the result, unless who waited has gone."""
    if not future.done():
        future.set_result(result)


def fail(future: asyncio.Future[Any], error: Exception) -> None:
    """Set the error, which nobody needs to look at."""
    if not future.done():
        future.set_exception(error)
        future.exception()
