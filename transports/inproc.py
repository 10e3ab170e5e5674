"""Ranks that share one loop: parcels change hands without leaving memory.

Frames are encoded and checked as on any other transport, but the payload is read where the sender
has it: its source becomes free when the receiver releases the arrival. The default for one rank,
where it has nothing to do, and the quickest way to run several ranks in one process.
"""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Callable
from functools import partial

import torch

from asyncmoe.deadline import Deadline
from asyncmoe.directory import MemoryDirectory
from asyncmoe.errors import FAREWELL, ConfigError, PeerLost, ProtocolError, RankFailed, UnknownName
from asyncmoe.lease import make_pool
from asyncmoe.transport import Common, Parcel, Posted, Receiver, Transport, TransportContext
from asyncmoe.twophase import make_inbound, make_outbound
from asyncmoe.wire import PRELUDE_BYTES, decode_prelude

_GENERATION = 0  # a pair of ranks in one process meets once


class InprocTransport(Transport):
    """See the module. Ranks find each other in a `MemoryDirectory`, and must share a loop."""

    def __init__(self, context: TransportContext) -> None:
        super().__init__(context)
        for option in context.options:
            raise UnknownName("option of transport inproc", option, ())
        self.leases = make_pool()
        self._peers: dict[int, _Pair] = {}
        self._halves: dict[int, memoryview] = {}  # that it shares with each peer and writes to
        self._loop: asyncio.AbstractEventLoop | None = None

    async def start(self, receiver: Receiver) -> None:
        """See `Transport`."""
        self._loop = asyncio.get_running_loop()
        context, directory = self.context, self.context.directory
        if context.world == 1:
            return
        if not isinstance(directory, MemoryDirectory):
            raise ConfigError(
                "transport inproc joins ranks of one process; use tcp between several"
            )
        deadline = Deadline(context.start_timeout_s)
        directory.offer(f"inproc/{context.rank}", self)
        for peer in set(range(context.world)) - {context.rank}:
            other = await directory.find(f"inproc/{peer}", deadline.left_s)
            if not isinstance(other, InprocTransport) or other._loop is not self._loop:
                raise RankFailed(peer, "inproc ranks must share one loop")
            self._peers[peer] = _Pair(self, other, receiver)
            self._halves[peer] = _zeroed(context.common_bytes)
        # A rank that is done earlier may post at once: nobody goes on before all can receive.
        directory.offer(f"inproc/{context.rank}/ready", True)
        for peer in self._peers:
            await directory.find(f"inproc/{peer}/ready", deadline.left_s)

    def post(self, peer: int, parcel: Parcel) -> Posted:
        """See `Transport`."""
        return self._reachable(peer).post(parcel)

    def send(self, peer: int, message: bytes) -> None:
        """See `Transport`."""
        self._reachable(peer).send(message)

    async def close(self) -> None:
        """See `Transport`. Arrivals that peers still read stay readable."""
        for pair in self._peers.values():
            pair.leave(FAREWELL, "this rank closed its transport")
        await asyncio.sleep(0)  # what was posted before is delivered now

    def abort(self) -> None:
        """Leave at once; to the peers it looks as any loss does."""
        for pair in self._peers.values():
            pair.leave("it aborted its transport", "this rank aborted its transport")

    def common(self, peer: int) -> Common | None:
        """See `Transport`."""
        if not self.context.common_bytes:
            return None
        try:
            other = self._reachable(peer).other
        except PeerLost:
            return None
        return Common(self._halves[peer], other._halves[self.context.rank].toreadonly())

    def _reachable(self, peer: int) -> _Pair:
        pair = self._peers.get(peer)
        if pair is None:
            raise ValueError(f"rank {self.context.rank} has no connection to rank {peer}")
        if pair.error is not None:
            raise PeerLost(peer, pair.error.reason)
        return pair


class _Pair:
    """One rank's side of its connection to another."""

    def __init__(self, mine: InprocTransport, other: InprocTransport, receiver: Receiver) -> None:
        context = mine.context
        self.rank, self.peer = context.rank, other.context.rank
        self.error: PeerLost | None = None
        self._mine, self.other, self._receiver = mine, other, receiver
        self._loop = asyncio.get_running_loop()
        self._outbound = make_outbound(self.rank, _GENERATION, context.limits)
        self._inbound = make_inbound(
            self.peer, _GENERATION, context.limits, mine.leases, receiver.on_parcel
        )

    @property
    def _far(self) -> _Pair:
        return self.other._peers[self.rank]

    def post(self, parcel: Parcel) -> Posted:
        frame, posted = self._outbound.parcel(parcel)
        free = partial(self._outbound.sent, posted)
        payload = parcel.payload.flatten().view(torch.uint8)
        self._loop.call_soon(self._far._take_parcel, frame, payload, free)
        return posted

    def send(self, message: bytes) -> None:
        frame = self._outbound.message(len(message))
        self._loop.call_soon(self._far._take_message, frame, bytes(message))

    def leave(self, reason: str, own_reason: str) -> None:
        """This side ends it; the other is told after everything that was sent before."""
        self._loop.call_soon(self._far._lose, reason)
        if self.error is None:
            self._end(PeerLost(self.peer, own_reason))

    def _lose(self, reason: str) -> None:
        error = PeerLost(self.peer, reason)
        self._outbound.fail(error)
        if self.error is None:
            self._end(error)
            self._receiver.on_peer_lost(self.peer, error)

    def _end(self, error: PeerLost) -> None:
        """Nothing more is taken in; what refers to the receiver is let go."""
        self.error = error
        self._inbound.abandon()

    def _take_parcel(self, frame: bytes, payload: torch.Tensor, free: Callable[[], None]) -> None:
        if self.error is not None:
            return  # the sender's side is told by `_lose`
        try:
            prelude = decode_prelude(frame[:PRELUDE_BYTES], self._mine.context.limits)
            lease = self._mine.leases.adopt(payload, free)
            columns = memoryview(frame)[PRELUDE_BYTES:]
            self._inbound.arrived(self._inbound.accept(prelude, columns, lease))
        except ProtocolError as error:
            self._refuse(error)

    def _take_message(self, frame: bytes, message: bytes) -> None:
        if self.error is not None:
            return
        try:
            self._inbound.message(decode_prelude(frame, self._mine.context.limits))
            self._receiver.on_message(self.peer, message)
        except ProtocolError as error:
            self._refuse(error)

    def _refuse(self, error: ProtocolError) -> None:
        """A frame that this side does not allow ends the connection, on both sides."""
        self._inbound.abandon()
        self._far._lose(f"it refused a frame: {error}")
        self._lose(f"malformed frame: {error}")


def _zeroed(nbytes: int) -> memoryview:
    """Memory that is none until it is touched."""
    return memoryview(mmap.mmap(-1, nbytes)) if nbytes else memoryview(b"")
