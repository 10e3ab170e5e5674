"""One directed link of an impaired transport: when what is put on it comes out at the other end."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from random import Random

from asyncmoe.errors import PeerLost
from asyncmoe.transport import ParcelClass, Posted
from asyncmoe.transports.impaired_options import Fractions, Impairment

Lane = ParcelClass | None  # None: messages


class Repeats:
    """Which parcels of a link and class cross it twice: the same draws on both of its sides."""

    def __init__(self, probability: float, seed: int, source: int, target: int, kind: int) -> None:
        self._probability = probability
        self._random = Random(f"{seed} {source} {target} {kind} repeats")

    def draw(self) -> bool:
        """Whether the next one does."""
        return self._probability > 0 and self._random.random() < self._probability


class Source:
    """The source side of a parcel that is transmitted `copies` times: free after the last."""

    def __init__(self, copies: int) -> None:
        self.posted = Posted()
        self._left = copies
        self._error: Exception | None = None

    def one_is_free(self, posted: Posted) -> None:
        """One transmission needs the payload no more."""
        self._end_one(posted.error)

    def fail(self, error: PeerLost) -> None:
        """One transmission will not be."""
        self._end_one(error)

    def _end_one(self, error: Exception | None) -> None:
        self._error = self._error or error
        self._left -= 1
        if not self._left:
            self.posted.complete(self._error)


class ImpairedLink:
    """The link from one rank to another, in its sender. Times are seconds since `begin`."""

    def __init__(
        self, source: int, target: int, impairment: Impairment, fractions: Fractions, seed: int
    ) -> None:
        self.target = target
        self.delays = impairment.delays
        self.error: PeerLost | None = None
        self.repeats = {
            kind: Repeats(impairment.duplicate, seed, source, target, kind) for kind in ParcelClass
        }
        self._impairment, self._fractions = impairment, fractions
        self._random = Random(f"{seed} {source} {target} delays")
        self._lanes: dict[Lane, _Lane] = {lane: _Lane(self) for lane in (None, *ParcelClass)}
        self._free_s = 0.0  # when all that was put so far has left the sender
        self._stall_s = self._time_to_stall()  # when the next stall begins
        self._flushed: asyncio.Future[None] | None = None

    def begin(self, loop_s: float) -> None:
        """Time 0 is `loop_s` on the loop's clock."""
        for lane in self._lanes.values():
            lane.begin(loop_s)

    def put(
        self,
        lane: Lane,
        nbytes: int,
        transmit: Callable[[], None],
        drop: Callable[[PeerLost], None],
    ) -> None:
        """Call `transmit` when `nbytes` bytes have crossed, or `drop` if they never will.

        At once if nothing delays this link.
        """
        to = self._lanes[lane]
        if not self.delays:
            to.transmit(transmit, drop)
            return
        to.put(self._due_s(to.now_s(), nbytes), transmit, drop)

    def lose(self, error: PeerLost) -> None:
        """Drop everything, now and later. Idempotent."""
        if self.error is None:
            self.error = error
            for lane in self._lanes.values():
                lane.drop_all(error)
            self.look_whether_flushed()

    async def flush(self) -> None:
        """Wait until nothing is on the link any more."""
        self._flushed = asyncio.get_running_loop().create_future()
        self.look_whether_flushed()
        await self._flushed

    def look_whether_flushed(self) -> None:
        """A lane may have become empty."""
        if (
            self._flushed is not None
            and not self._flushed.done()
            and not any(lane.waiting for lane in self._lanes.values())
        ):
            self._flushed.set_result(None)

    def _due_s(self, now_s: float, nbytes: int) -> float:
        """When something that is put now comes out."""
        what = self._impairment
        begin_s = max(now_s, self._free_s)
        end_s = begin_s
        if what.mbit_per_s is not None:
            end_s = self._fractions.end_of(begin_s, nbytes * 8e-6 / what.mbit_per_s)
        self._free_s = end_s = self._stalled(begin_s, end_s)
        due_s = end_s + what.latency_ms * 1e-3
        if what.jitter_ms:
            due_s += self._random.uniform(0, what.jitter_ms) * 1e-3
        if what.reorder and self._random.random() < what.reorder:
            due_s += what.reorder_ms * 1e-3
        return due_s

    def _stalled(self, begin_s: float, end_s: float) -> float:
        """The end of a transmission, with the stalls that fall into it."""
        while self._stall_s <= end_s < float("inf"):
            over_s = self._stall_s + self._impairment.stall_s
            if over_s > begin_s:
                end_s += over_s - max(begin_s, self._stall_s)
            self._stall_s = over_s + self._time_to_stall()
        return end_s

    def _time_to_stall(self) -> float:
        every_s = self._impairment.stall_every_s
        return float("inf") if every_s is None else self._random.expovariate(1 / every_s)


class _Lane:
    """What is on the link in one lane, in order."""

    def __init__(self, link: ImpairedLink) -> None:
        self._link = link
        self._queue: deque[tuple[float, Callable[[], None], Callable[[PeerLost], None]]] = deque()
        self._last_s = 0.0  # when the last one comes out
        self._begin_s = 0.0  # on the loop's clock
        self._timer: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> int:
        """How much is on its way."""
        return len(self._queue)

    def begin(self, loop_s: float) -> None:
        """See `ImpairedLink`."""
        self._begin_s = loop_s

    def now_s(self) -> float:
        """Seconds since `begin`."""
        return asyncio.get_running_loop().time() - self._begin_s

    def put(
        self, due_s: float, transmit: Callable[[], None], drop: Callable[[PeerLost], None]
    ) -> None:
        """Let it out at `due_s`, and not before what is ahead of it."""
        self._last_s = max(due_s, self._last_s)
        self._queue.append((self._last_s, transmit, drop))
        if self._timer is None:
            self._wait()

    def transmit(self, transmit: Callable[[], None], drop: Callable[[PeerLost], None]) -> None:
        """Let it out now."""
        try:
            transmit()
        except PeerLost as error:
            drop(error)

    def drop_all(self, error: PeerLost) -> None:
        """Let nothing out any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        queue, self._queue = self._queue, deque()
        for _, _, drop in queue:
            drop(error)

    def _wait(self) -> None:
        due_s = self._queue[0][0]
        if due_s < float("inf"):  # else the link is down for good
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(self._begin_s + due_s, self._go)

    def _go(self) -> None:
        self._timer = None
        now_s = self.now_s()
        while self._queue and self._queue[0][0] <= now_s:
            _, transmit, drop = self._queue.popleft()
            self.transmit(transmit, drop)
        if self._queue and self._timer is None:
            self._wait()
        self._link.look_whether_flushed()
