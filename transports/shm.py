"""Parcels through shared memory, for ranks of one machine.

The sender writes a payload once, into a slot that it owns, and the receiver reads it there: the
lease is the slot. The preludes of parcels stand in a ring beside, and a unix socket carries
messages, heartbeats, and the notices that wake whoever sleeps, so nobody polls. Every pair has two
segments, each with one writer (`shm_segment.py`), and each class of a pair has slots of its own, so
that a combine never waits for a dispatch (`shm_lanes.py` has owners, generations and their order).
A sender that finds no free slots keeps its parcels, and the parcels' sources, until the receiver
gives slots back; nothing else of this rank waits for that.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from typing import Any

from asyncmoe import native
from asyncmoe.errors import ConfigError, PeerLost, ProtocolError
from asyncmoe.lease import Lease, LeasePool
from asyncmoe.link import Link
from asyncmoe.linked import LinkedTransport, Peer
from asyncmoe.reach import Reach, UnixReach
from asyncmoe.transport import Parcel, ParcelClass, Posted, TransportContext
from asyncmoe.transport import Receiver as Upward
from asyncmoe.transports.shm_lanes import Bell, Receiver, Sender
from asyncmoe.transports.shm_segment import Geometry, Segment, exchange, read_only_tensor
from asyncmoe.twophase import Transfer, is_plain
from asyncmoe.wire import FrameKind, encode_signal

_PAGE_BYTES = 4096
_SLOT_BYTES = 64 << 10
_FEWEST_SLOTS = 1024  # where the options say nothing
_MOST_SLOTS = 1 << 16
_LARGEST_SLOT_BYTES = 1 << 30
_PARCELS_PER_TURN = 64  # of each class


class ShmTransport(LinkedTransport):
    """See the module. Options: `slot_bytes` and `slots`, of each class towards each peer."""

    name = "shm"
    option_names = ("slot_bytes", "slots")

    def __init__(self, context: TransportContext) -> None:
        super().__init__(context)
        if context.device.type != "cpu":
            raise ConfigError(f"transport shm moves host memory; device is {context.device}")
        self._geometry = geometry_of(context)

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

    def _reach(self) -> Reach:
        return UnixReach()

    async def _meet(self, sock: socket.socket, peer: int) -> tuple[Segment, Segment]:
        return await exchange(sock, self._geometry)

    def _make_peer(self, link: Link, generation: int, receiver: Upward, met: Any) -> Peer:
        return ShmPeer(self, link, generation, receiver, *met)

    def open(self) -> None:
        """See `LinkedTransport`."""
        super().open()
        for peer in self._peers.values():
            _shm(peer).take()

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
        receiver: Upward,
        mine: Segment,
        theirs: Segment,
    ) -> None:
        super().__init__(transport, link, generation, receiver)
        self._loop = asyncio.get_running_loop()
        self.segment = mine
        lanes = _Lanes(self, mine, theirs, transport.leases)
        self.sending, self._bell = lanes.sending, lanes.bell
        self._by_class = [None, *self.sending.values()]  # to hash an enum's member takes long
        self._receiving = list(lanes.receiving.values())
        self._told = True  # of all that was published, if the peer sleeps
        self._more = False  # something to take was left for the next turn
        self._closing, self._peer_closing = mine.closing, theirs.closing
        self._notice = (encode_signal(FrameKind.NOTICE, transport.context.rank),)
        self._turn: asyncio.Handle | None = None  # what is left to do behind this turn of the loop
        self._flushed: asyncio.Future[None] | None = None

    # -- sending ---------------------------------------------------------------------------------

    def post(self, parcel: Parcel) -> Posted:
        """See `Transport`. The first of a turn of the loop is copied at once, the others behind it
        together: a copy leaves little in the caches of what runs between copies."""
        lane = self._by_class[parcel.kind]
        assert lane is not None
        if self._turn is not None:
            return lane.post(parcel, False)
        self._told = False
        self._turn = self._loop.call_soon(self._next_turn)
        return lane.post(parcel, True)

    def notify(self) -> None:
        """The peer waits for slots that have come back: tell it."""
        if self.link.error is None:
            self.link.send(self._notice)

    def on_notice(self) -> None:
        """See `LinkHandler`: there is something to take, there are slots, or the peer is about to
        close."""
        self._advance([lane for lane in self.sending.values() if lane.waiting])
        self._take()
        self._look_whether_flushed()

    def _advance(self, lanes: Sequence[Sender]) -> None:
        """Go on with what was too much at once, or has waited for slots, and wake the peer."""
        for lane in lanes:
            if lane.advance():
                self._told = False
            if lane.may_advance:
                self._go_on()
        if not self._told and self.link.error is None:
            self._told = True
            if self._bell.due():
                self.link.send(self._notice)

    # -- receiving -------------------------------------------------------------------------------

    def on_announced(self, transfer: Transfer) -> None:
        """See `LinkHandler`: it would be none of the ring's."""
        raise ProtocolError("a parcel on the socket; allowed: in shared memory")

    def on_leave(self) -> None:
        """See `LinkHandler`: all that was published is there."""
        for lane in self._receiving:
            while lane.take(_PARCELS_PER_TURN):
                pass

    def take(self) -> None:
        """As `_take`, where nobody else sees to a `ProtocolError`."""
        try:
            self._take()
        except ProtocolError as error:
            self.link.lose(f"malformed frame: {error}")

    def _take(self) -> None:
        """Hand over what is there, within bounds, and ask to be woken if that was all."""
        if not self._receiving:
            return  # it is over
        dispatch, combine = self._receiving
        while True:
            self._more = dispatch.take(_PARCELS_PER_TURN)
            self._more |= combine.take(_PARCELS_PER_TURN)
            if self._more:
                self._go_on()
                return
            if self.link.error is not None:
                return
            self._bell.sleep()
            if not (dispatch.pending or combine.pending):
                return

    def _go_on(self) -> None:
        if self._turn is None:
            self._turn = self._loop.call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._turn = None
        if self.link.error is not None:
            return
        self._advance([lane for lane in self.sending.values() if lane.may_advance])
        if self._more:
            self.take()
        self._look_whether_flushed()

    # -- the end ---------------------------------------------------------------------------------

    def give_up(self, error: PeerLost) -> None:
        """See `Peer`. The mappings last as long as arrivals that are held."""
        for sender in self.sending.values():
            sender.clear()
        for receiver in self._receiving:
            receiver.stop()
        super().give_up(error)
        if self.sending:
            self.sending, self._receiving, self._by_class = {}, [], []
            del self.segment, self._bell
        self._closing = self._peer_closing = memoryview(b"\1")
        self._look_whether_flushed()

    async def flush(self) -> None:
        """Wait until all parcels are in slots, or the peer is lost or closes and so takes none."""
        if self.link.error is None:
            self._closing[0] = 1
            self.link.send(self._notice)
            self._flushed = self._loop.create_future()
            self._look_whether_flushed()
            await self._flushed

    def _look_whether_flushed(self) -> None:
        if self._flushed is None or self._flushed.done():
            return
        if self._peer_closing[0] or not any(lane.waiting for lane in self.sending.values()):
            self._flushed.set_result(None)


class _Lanes:
    """The lanes between two segments, compiled if the two phases are."""

    def __init__(self, peer: ShmPeer, mine: Segment, theirs: Segment, leases: LeasePool) -> None:
        self.sending: dict[ParcelClass, Sender] = {}
        self.receiving: dict[ParcelClass, Receiver] = {}
        if is_plain(peer.inbound):
            self.bell = Bell(mine, theirs)
            for kind in ParcelClass:
                self.sending[kind] = Sender(mine, theirs, kind, peer.outbound)
                self.receiving[kind] = Receiver(
                    mine, theirs, kind, peer.inbound, leases, peer.notify
                )
            return
        compiled, ours, others = native.columns, _compiled(mine), _compiled(theirs)
        self.bell = compiled.ShmBell(ours, others)
        for kind in ParcelClass:
            self.sending[kind] = compiled.ShmSender(ours, others, kind, peer.outbound)
            memory = read_only_tensor(theirs.payloads(kind))
            self.receiving[kind] = compiled.ShmReceiver(
                ours, others, kind, peer.inbound, leases, memory, peer.notify
            )


def _compiled(segment: Segment) -> Any:
    """The same segment for compiled lanes."""
    form = segment.geometry
    offsets = form.ring_at, form.columns_at, form.slots_at
    return native.columns.Segment(segment.memory, form.slots, form.slot_bytes, *offsets)


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
