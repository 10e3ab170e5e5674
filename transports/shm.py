"""Parcels through shared memory, for ranks of one machine.

The sender writes a payload once, into a slot that it owns, and the receiver reads it there: the
lease is the slot. Control frames and messages go over a unix socket, so a receiver wakes without
polling, and columns are out of the peer's reach before they are checked. Every pair has two
segments, each with one writer (`shm_segment.py`), and each class of a pair has slots of its own, so
that a combine never waits for a dispatch (`shm_slots.py` has flags, generations and their order).
A sender that finds no free slots keeps its parcels, and the parcels' sources, until the receiver
gives slots back; nothing else of this rank waits for that.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from asyncmoe.errors import ConfigError, PeerLost
from asyncmoe.lease import Block, Lease
from asyncmoe.link import Link
from asyncmoe.linked import LinkedTransport, Peer
from asyncmoe.reach import Reach, UnixReach
from asyncmoe.transport import Parcel, ParcelClass, Posted, Receiver, TransportContext
from asyncmoe.transports.shm_segment import CLOSING, Geometry, Segment, exchange, read_only_tensor
from asyncmoe.transports.shm_slots import ReceiverSlots, SenderSlots
from asyncmoe.twophase import Transfer
from asyncmoe.wire import FrameKind, Prelude, encode_signal, payload_memory, readdress

_PAGE_BYTES = 4096
_SLOT_BYTES = 64 << 10
_FEWEST_SLOTS = 1024  # where the options say nothing
_MOST_SLOTS = 1 << 16
_LARGEST_SLOT_BYTES = 1 << 30
_COPY_BYTES_PER_TURN = 1 << 20  # so that a large payload does not keep the loop


class ShmTransport(LinkedTransport):
    """See the module. Options: `slot_bytes` and `slots`, of each class towards each peer."""

    name = "shm"
    option_names = ("slot_bytes", "slots")

    def __init__(self, context: TransportContext) -> None:
        super().__init__(context)
        if context.device.type != "cpu":
            raise ConfigError(f"transport shm moves host memory; device is {context.device}")
        self._geometry = geometry_of(context)
        self._closing = False

    async def close(self) -> None:
        """See `Transport`. If cancelled, disconnects at once."""
        self._closing = True
        try:
            async with asyncio.timeout(self.context.peer_timeout_s):
                await asyncio.gather(*(_shm(peer).flush() for peer in self._peers.values()))
                await super().close()
        except TimeoutError:
            pass
        finally:
            self._end("this rank closed its transport")

    def _reachable(self, peer: int) -> Peer:
        if self._closing and peer in self._peers:
            raise PeerLost(peer, "this rank closed its transport")
        return super()._reachable(peer)

    def _reach(self) -> Reach:
        return UnixReach()

    async def _meet(self, sock: socket.socket, peer: int) -> tuple[Segment, Segment]:
        return await exchange(sock, self._geometry)

    def _make_peer(self, link: Link, generation: int, receiver: Receiver, met: Any) -> Peer:
        return ShmPeer(self, link, generation, receiver, *met)

    def _transmit(self, peer: Peer, parcel: Parcel) -> Posted:
        return _shm(peer).sending[parcel.kind].post(parcel)

    def _body(self, transfer: Transfer) -> Sequence[memoryview]:
        return (memoryview(transfer.columns),)

    def _filled(self, peer: Peer, transfer: Transfer) -> None:
        peer.inbound.arrived(transfer)

    def _quarantined(self, peer: Peer, leases: Sequence[Lease]) -> None:
        # The slots are the peer's: whatever it still writes there, this rank never looks again.
        for lease in leases:
            lease.quiet()


class ShmPeer(Peer):
    """A peer with a segment each way."""

    def __init__(
        self,
        transport: ShmTransport,
        link: Link,
        generation: int,
        receiver: Receiver,
        mine: Segment,
        theirs: Segment,
    ) -> None:
        super().__init__(transport, link, generation, receiver)
        self._leases = transport.leases
        self._slot_bytes = mine.geometry.slot_bytes
        self.sending = {
            kind: SendLane(
                self, SenderSlots(mine, theirs, kind), mine.slots(kind), self._look_whether_flushed
            )
            for kind in ParcelClass
        }
        self._receiving = {int(kind): ReceiverSlots(mine, theirs, kind) for kind in ParcelClass}
        self._payloads = {int(kind): read_only_tensor(theirs.slots(kind)) for kind in ParcelClass}
        self._blocks: dict[tuple[int, int], Block] = {}  # (class, first slot), made on first use
        self._closing, self._peer_closing = mine.word(CLOSING), theirs.word(CLOSING)
        self._notice = encode_signal(FrameKind.NOTICE, transport.context.rank)
        self._flushed: asyncio.Future[None] | None = None

    def on_notice(self) -> None:
        """See `LinkHandler`: the peer gave slots back, or is about to close."""
        for lane in self.sending.values():
            lane.advance()
        self._look_whether_flushed()

    def give_up(self, error: PeerLost) -> None:
        """See `Peer`. The mappings last as long as arrivals that are held."""
        for lane in self.sending.values():
            lane.clear()
        super().give_up(error)
        self.sending, self._receiving, self._payloads, self._blocks = {}, {}, {}, {}
        self._closing = self._peer_closing = memoryview(b"\1")
        self._look_whether_flushed()

    async def flush(self) -> None:
        """Wait until all parcels are in slots, or the peer is lost or closes and so takes none."""
        if self.link.error is None:
            self._closing[0] = 1
            self.link.send((self._notice,))
            self._flushed = asyncio.get_running_loop().create_future()
            self._look_whether_flushed()
            await self._flushed

    def _look_whether_flushed(self) -> None:
        if self._flushed is None or self._flushed.done():
            return
        if self._peer_closing[0] or not any(lane.waiting for lane in self.sending.values()):
            self._flushed.set_result(None)

    def _place(self, prelude: Prelude) -> Lease:
        kind = prelude.parcel_class
        slots = self._receiving[kind]
        first, bits = slots.accept(prelude)
        block = self._blocks.get((kind, first))
        if block is None:  # from that slot on, since a payload may take more than one
            memory = self._payloads[kind][first * self._slot_bytes :]
            block = self._blocks[kind, first] = self._leases.block(memory)
        on_free = partial(self._give_back, slots, first, bits)
        return self._leases.lend(block, prelude.payload_bytes, on_free)

    def _give_back(self, slots: ReceiverSlots, first: int, bits: int) -> None:
        if slots.give_back(first, bits) and self.link.error is None:
            self.link.send((self._notice,))


class SendLane:
    """What this rank sends to one peer in one class, in the order posted."""

    def __init__(
        self, peer: Peer, slots: SenderSlots, memory: memoryview, on_empty: Callable[[], None]
    ) -> None:
        self._peer, self._slots, self._memory, self._on_empty = peer, slots, memory, on_empty
        self._queue: deque[_Outgoing] = deque()
        self._loop = asyncio.get_running_loop()
        self._turn: asyncio.Handle | None = None  # when `advance` goes on by itself

    @property
    def waiting(self) -> int:
        """Parcels that are not whole in slots."""
        return len(self._queue)

    def post(self, parcel: Parcel) -> Posted:
        """See `Transport`."""
        slots, size = self._slots, parcel.payload.nbytes
        count = slots.count(size)
        first, generation = -1, 0
        if not self._queue:
            first = slots.find(count)
            if first >= 0:
                generation = slots.next_generation(first)
        frame, posted = self._peer.outbound.parcel(parcel, first + 1, generation)
        payload = payload_memory(parcel.payload)
        if first >= 0:
            slots.take(first, count)
            if size <= _COPY_BYTES_PER_TURN:  # as most do: at once, without a place in the queue
                begin = slots.offset(first)
                self._memory[begin : begin + size] = payload
                self._send(first, frame, posted)
                return posted
        self._queue.append(_Outgoing(frame, posted, payload, count, first))
        if len(self._queue) == 1:
            self.advance()
        return posted

    def advance(self) -> None:
        """Fill slots and send control frames, until there are no slots or it takes too long."""
        left = _COPY_BYTES_PER_TURN
        while self._queue and self._peer.link.error is None:
            head = self._queue[0]
            if head.first < 0 and not self._find_slots(head):
                return  # `on_notice` goes on
            left -= self._copy(head, left)
            if head.done == len(head.payload):
                self._queue.popleft()
                self._send(head.first, head.frame, head.posted)
            if left <= 0:
                self._go_on_later()
                return
        if not self._queue:
            self._on_empty()

    def _send(self, first: int, frame: bytes, posted: Posted) -> None:
        """The payload is in its slots."""
        self._slots.publish(first)
        self._peer.link.send((frame,))
        self._peer.outbound.sent(posted)

    def clear(self) -> None:
        """Forget everything: nothing is read any more."""
        self._queue.clear()
        if self._turn is not None:
            self._turn.cancel()

    def _find_slots(self, head: _Outgoing) -> bool:
        first = self._slots.find(head.count)
        if first < 0:
            first = self._slots.wait(head.count)
        if first < 0:
            return False
        head.frame = readdress(head.frame, first + 1, self._slots.next_generation(first))
        self._slots.take(first, head.count)
        head.first = first
        return True

    def _copy(self, head: _Outgoing, most: int) -> int:
        """Write up to `most` bytes of the payload; returns how many."""
        done, whole = head.done, len(head.payload)
        size = min(most, whole - done)
        begin = self._slots.offset(head.first) + done
        self._memory[begin : begin + size] = head.payload[done : done + size]
        head.done += size
        return size

    def _go_on_later(self) -> None:
        if self._queue and self._turn is None:
            self._turn = self._loop.call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._turn = None
        self.advance()


class _Outgoing:
    """A parcel that is not whole in slots."""

    __slots__ = ("count", "done", "first", "frame", "payload", "posted")

    def __init__(
        self, frame: bytes, posted: Posted, payload: memoryview, count: int, first: int
    ) -> None:
        self.frame, self.posted, self.payload = frame, posted, payload
        self.count = count  # slots that it takes
        self.first = first  # of its slots, or -1
        self.done = 0  # bytes that are written


def _shm(peer: Peer) -> ShmPeer:
    assert isinstance(peer, ShmPeer)
    return peer


def geometry_of(context: TransportContext) -> Geometry:
    """What options and limits say. Raises `ConfigError` naming the option."""
    slot_bytes = whole_option(context, "slot_bytes", _SLOT_BYTES, _LARGEST_SLOT_BYTES)
    if slot_bytes % _PAGE_BYTES:
        raise ConfigError(
            f"transport.options.slot_bytes is {slot_bytes}; allowed: multiples of {_PAGE_BYTES}"
        )
    enough = -(-context.limits.parcel_bytes // slot_bytes)
    slots = whole_option(context, "slots", max(_FEWEST_SLOTS, enough), _MOST_SLOTS)
    if slots < enough:
        raise ConfigError(
            f"transport.options.slots is {slots}; allowed: at least {enough} of {slot_bytes} "
            f"bytes, to hold one parcel of transport.parcel_bytes = {context.limits.parcel_bytes}"
        )
    return Geometry(slots, slot_bytes)


def whole_option(context: TransportContext, name: str, default: int, most: int) -> int:
    value = context.options.get(name, default)
    if type(value) is not int or not 1 <= value <= most:
        raise ConfigError(f"transport.options.{name} is {value!r}; allowed: 1 to {most}, whole")
    return value
