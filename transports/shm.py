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
from collections.abc import Callable, Sequence
from typing import Any

from asyncmoe import native
from asyncmoe.errors import ConfigError, PeerLost, ProtocolError
from asyncmoe.lease import Lease, LeasePool
from asyncmoe.link import Link
from asyncmoe.linked import LinkedTransport, Peer
from asyncmoe.reach import Reach, UnixReach
from asyncmoe.transport import Common, Parcel, ParcelClass, Posted, TransportContext
from asyncmoe.transport import Receiver as Upward
from asyncmoe.transports.shm_lanes import Bell, Receiver, Sender
from asyncmoe.transports.shm_port import Port
from asyncmoe.transports.shm_segment import Geometry, Segment, exchange, read_only_tensor
from asyncmoe.twophase import Transfer, is_plain
from asyncmoe.wire import FrameKind, encode_signal

_PAGE_BYTES = 4096
_SLOT_BYTES = 64 << 10
_FEWEST_SLOTS = 1024  # where the options say nothing
_MOST_SLOTS = 1 << 16
_LARGEST_SLOT_BYTES = 1 << 30


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
        self._shut()
        try:
            async with asyncio.timeout(self.context.peer_timeout_s):
                await asyncio.gather(*(_shm(peer).flush() for peer in self._peers.values()))
                await super().close()
        except TimeoutError:
            pass
        finally:
            self._end("this rank closed its transport")

    def common(self, peer: int) -> Common | None:
        """See `Transport`."""
        if not self.context.common_bytes:
            return None
        try:
            return _shm(self._reachable(peer)).common
        except PeerLost:
            return None

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
            _shm(peer).port.take()

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
        self.segment = mine
        self.common = Common(mine.common, theirs.common)
        self._notice = (encode_signal(FrameKind.NOTICE, transport.context.rank),)
        self.port, self.sending = self._make_port(mine, theirs, transport.leases)
        self._closing, self._peer_closing = mine.closing, theirs.closing
        self._flushed: asyncio.Future[None] | None = None

    def post(self, parcel: Parcel) -> Posted:
        """See `Transport`."""
        return self.port.post(parcel)

    def door(self) -> Callable[[Parcel], Posted] | None:
        """See `Peer`."""
        return None if isinstance(self.port, Port) else self.port.post

    def notify(self) -> None:
        """The peer waits for slots that have come back: tell it."""
        if self.link.error is None:
            self.link.send(self._notice)

    def on_notice(self) -> None:
        """See `LinkHandler`."""
        self.port.on_notice()

    def on_announced(self, transfer: Transfer) -> None:
        """See `LinkHandler`: it would be none of the ring's."""
        raise ProtocolError("a parcel on the socket; allowed: in shared memory")

    def on_leave(self) -> None:
        """See `LinkHandler`: all that was published is there."""
        self.port.take_all()

    def give_up(self, error: PeerLost) -> None:
        """See `Peer`. The mappings last as long as arrivals that are held."""
        if self.sending:
            self.port.stop()
        super().give_up(error)
        if self.sending:
            self.sending = {}
            del self.segment, self.port, self.common
        self._closing = self._peer_closing = memoryview(b"\1")
        self._look_whether_flushed()

    async def flush(self) -> None:
        """Wait until all parcels are in slots, or the peer is lost or closes and so takes none."""
        if self.link.error is None:
            self._closing[0] = 1
            self.link.send(self._notice)
            self._flushed = asyncio.get_running_loop().create_future()
            self.port.on_progress = self._look_whether_flushed
            self._look_whether_flushed()
            await self._flushed

    def _look_whether_flushed(self) -> None:
        if self._flushed is None or self._flushed.done():
            return
        if self._peer_closing[0] or not self.port.waiting:
            self._flushed.set_result(None)

    def _make_port(
        self, mine: Segment, theirs: Segment, leases: LeasePool
    ) -> tuple[Port, dict[ParcelClass, Sender]]:
        """Port and lanes between two segments, compiled if the two phases are."""
        sending: dict[ParcelClass, Sender] = {}
        receiving: list[Receiver] = []
        kinds: Any = native.columns
        if is_plain(self.inbound):
            port, bell = Port, Bell(mine, theirs)
            for kind in ParcelClass:
                sending[kind] = Sender(mine, theirs, kind, self.outbound)
                receiving.append(Receiver(mine, theirs, kind, self.inbound, leases, self.notify))
        else:
            ours, others = _compiled(mine), _compiled(theirs)
            port, bell = kinds.ShmPort, kinds.ShmBell(ours, others)
            for kind in ParcelClass:
                sending[kind] = kinds.ShmSender(ours, others, kind, self.outbound)
                memory = read_only_tensor(theirs.payloads(kind))
                receiving.append(
                    kinds.ShmReceiver(ours, others, kind, self.inbound, leases, memory, self.notify)
                )
        link, loop = self.link, asyncio.get_running_loop()
        notify = link.repeater(self._notice[0])
        lanes = list(sending.values()), receiving
        return port(self.outbound, *lanes, bell, link, loop.call_soon, notify), sending


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
    return Geometry(slots, slot_bytes, context.common_bytes)


def whole_option(context: TransportContext, name: str, default: int, most: int) -> int:
    value = context.options.get(name, default)
    if type(value) is not int or not 1 <= value <= most:
        raise ConfigError(f"transport.options.{name} is {value!r}; allowed: 1 to {most}, whole")
    return value
