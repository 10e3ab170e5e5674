"""One pair of ranks on a stack of matched transfers: its contract, its bursts, its windows."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch

WINDOW_PARCELS, WINDOW_BYTES = 64, 16 << 20  # of one class in one direction, and not yet taken
BURST_BYTES = 512 << 10  # from which on a burst that both sides know is closed


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
    """One direction of a pair: gathers what one turn of the loop brings into a burst, or, where
    both sides launch the same bursts, what comes up to `end`."""

    def __init__(self, launch: Callable[[Sequence[Operation]], None], most: int | None) -> None:
        self._launch, self._most = launch, most
        self._waiting: list[Operation] = []
        self._ended: list[list[Operation]] = []  # bursts from before `open`
        self._under_way = 0  # bursts
        self._open = self._scheduled = False

    def open(self) -> None:
        """The pair is connected."""
        self._open = True
        ended, self._ended = self._ended, []
        for burst in ended:
            self._launch(burst)
        if self._waiting:
            self._schedule()

    def add(self, operation: Operation) -> None:
        """Launch `operation` after all that were added before."""
        self._waiting.append(operation)
        if self._most is not None:
            self._schedule()

    def end(self) -> bool:
        """What was added since the last call is a burst; False if that is nothing."""
        burst, self._waiting = self._waiting, []
        if not burst:
            return False
        if self._open:
            self._launch(burst)
        else:
            self._ended.append(burst)
        return True

    def _schedule(self) -> None:
        may = self._open and self._most is not None and self._under_way < self._most
        if may and not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._begin)

    def _begin(self) -> None:
        self._scheduled = False
        if not self._waiting:
            return
        burst, self._waiting = self._waiting, []
        last = burst[-1]
        burst[-1] = Operation(last.tensor, partial(self._end, last.done))
        self._under_way += 1
        self._launch(burst)

    def _end(self, done: Callable[[], None]) -> None:
        self._under_way -= 1
        if self._waiting:
            self._schedule()
        done()


class Window:
    """How much of a class is announced in one direction and not taken. One parcel always fits."""

    __slots__ = ("_sizes", "nbytes")

    def __init__(self) -> None:
        self._sizes: deque[int] = deque()  # bytes of each parcel, columns included, in order
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._sizes)

    def fits(self, nbytes: int) -> bool:
        """Whether one more parcel may be announced."""
        some = len(self._sizes)
        return not some or (some < WINDOW_PARCELS and self.nbytes + nbytes <= WINDOW_BYTES)

    def put(self, nbytes: int) -> None:
        """A parcel was announced."""
        self._sizes.append(nbytes)
        self.nbytes += nbytes

    def take(self, count: int) -> None:
        """The first `count` parcels were taken."""
        for _ in range(count):
            self.nbytes -= self._sizes.popleft()


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
