"""One peer of a NIXL rank: both directions of its parcels, its notifications, and how it ends."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Any

from asyncmoe.errors import PeerLost, ProtocolError
from asyncmoe.lease import Block, Lease
from asyncmoe.link import Link
from asyncmoe.linked import LinkedTransport, Peer
from asyncmoe.transport import Parcel, ParcelClass, Posted, Receiver
from asyncmoe.transports.nixl_agent import Agent, NixlError
from asyncmoe.transports.nixl_courier import Batch, Courier
from asyncmoe.transports.nixl_lane import Outgoing, SendLane
from asyncmoe.transports.nixl_memory import Arena
from asyncmoe.transports.nixl_slots import ReceiverSlots
from asyncmoe.transports.nixl_wire import (
    Freed,
    NoteKind,
    Place,
    Written,
    decode_note,
    encode_note,
    note_generation,
)
from asyncmoe.transports.shm_segment import Geometry
from asyncmoe.twophase import Transfer
from asyncmoe.wire import FrameKind, encode_signal

_LOG = logging.getLogger(__name__)
_TELL_S = 0.001  # for which slots that were read wait for others, while there are enough


class NixlPeer(Peer):
    """A peer, the arena that it writes to, and the arena there that this rank writes to."""

    placed = True

    def __init__(
        self,
        transport: LinkedTransport,
        link: Link,
        generation: int,
        receiver: Receiver,
        geometry: Geometry,
        courier: Courier,
        place: Place,
        arena: Arena,
        registered: Any,
    ) -> None:
        super().__init__(transport, link, generation, receiver)
        self.agent = place.name
        self.copies = True
        self.greeted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._geometry = geometry
        self._limits, self._leases = transport.context.limits, transport.leases
        self._self = transport.context.rank
        self._generation, self._courier = generation, courier
        self._arena, self._registered = arena, registered
        self._receiving = {int(kind): ReceiverSlots(self._geometry) for kind in ParcelClass}
        self._blocks: dict[tuple[int, int], Block] = {}  # (class, first slot) -> its memory
        self._lanes = {
            kind: SendLane(self.outbound, kind, self._geometry, place.address)
            for kind in (ParcelClass.COMBINE, ParcelClass.DISPATCH)  # the first goes first
        }
        self._next = dict.fromkeys(map(int, ParcelClass), 0)  # sequence of the next control frame
        self._due: dict[tuple[int, int], _Due] = {}  # (class, sequence) -> announced, not whole
        self._early: dict[tuple[int, int], int] = {}  # bytes whose control frame is not here yet
        self._freed: list[Freed] = []  # what the peer has to be told of
        self._freed_slots = 0
        self._tell: asyncio.TimerHandle | None = None
        self._asked = False  # the peer wants to know when all of its parcels are whole
        self._flushed: asyncio.Future[None] | None = None
        self._flush_asked = self._peer_whole = self._gone = False
        courier.add(self)

    def greet(self) -> None:
        """Say over NIXL that the way is open."""
        self._courier.notify(self, encode_note(NoteKind.HELLO, self._generation))

    # -- sending ---------------------------------------------------------------------------------

    def post(self, parcel: Parcel) -> Posted:
        """See `Transport`."""
        posted = self._lanes[parcel.kind].post(parcel)
        self._courier.ready(self)
        return posted

    @property
    def waits(self) -> bool:
        """See `Client`."""
        return (
            self._flushed is not None
            or not self.greeted.done()
            or any(lane.waits for lane in self._lanes.values())
        )

    def next_batch(self) -> Batch | None:
        """See `Client`: what there is, combine parcels first, up to a write's bound."""
        touched: list[tuple[Outgoing, int]] = []
        batch = Batch(partial(self._written_out, touched))
        entries: list[Written] = []
        for lane in self._lanes.values():
            lane.load(batch, entries, touched)
        if not touched:
            return None
        batch.note = encode_note(NoteKind.WRITTEN, self._generation, entries)
        return batch

    def begun(self, batch: Batch) -> None:
        """See `Client`."""
        if batch.frames and self.link.error is None:
            self.link.send(batch.frames)

    def _written_out(self, touched: list[tuple[Outgoing, int]]) -> None:
        for outgoing, nbytes in touched:
            outgoing.unwritten -= nbytes
            if not outgoing.unwritten:
                self.outbound.sent(outgoing.posted)
        self._look_whether_flushed()

    def fail(self, reason: str) -> None:
        """See `Client`."""
        self.link.lose(reason)

    # -- notifications ---------------------------------------------------------------------------

    def on_note(self, note: bytes) -> None:
        """See `Client`."""
        if note_generation(note) != self._generation:
            _LOG.warning("rank %d: a notification that is not rank %d's", self._self, self.rank)
            return
        kind, entries = decode_note(note)
        if kind == NoteKind.HELLO:
            if not self.greeted.done():
                self.greeted.set_result(None)
        elif kind == NoteKind.WHOLE:
            self._peer_whole = True
            self._look_whether_flushed()
        for entry in entries:
            if isinstance(entry, Written):
                self._written(entry)
            else:
                self._lanes[ParcelClass(entry.kind)].slots.give_back(entry.first, entry.generation)
        if kind == NoteKind.FREED:
            self._courier.ready(self)

    def _written(self, entry: Written) -> None:
        key = entry.kind, entry.sequence
        due = self._due.get(key)
        if due is not None:
            due.left -= entry.nbytes
            self._complete(due)
            return
        first = self._next[entry.kind]
        if not first <= entry.sequence < first + self._geometry.slots:
            raise ProtocolError(
                f"notification sequence is {entry.sequence}; allowed: {first} and the next "
                f"{self._geometry.slots}, or one that is under way"
            )
        self._early[key] = self._early.get(key, 0) + entry.nbytes

    def _complete(self, due: _Due) -> None:
        """More of a payload has come: hand the parcel over if that was all. Raises
        `ProtocolError`."""
        if due.left < 0:
            raise ProtocolError(
                f"notifications of {due.transfer.payload_bytes - due.left} bytes for a payload of "
                f"{due.transfer.payload_bytes}"
            )
        if due.left:
            return
        del self._due[due.transfer.parcel_class, due.transfer.sequence]
        self._courier.due -= 1
        self.inbound.arrived(due.transfer)
        self._look_whether_whole()

    # -- receiving -------------------------------------------------------------------------------

    def on_announced(self, transfer: Transfer) -> None:
        """See `LinkHandler`."""
        kind, sequence, nbytes = transfer.parcel_class, transfer.sequence, transfer.payload_bytes
        self._next[kind] = sequence + 1
        early = self._early.pop((kind, sequence), 0)
        if not nbytes:
            self.inbound.arrived(transfer)
            return
        due = self._due[kind, sequence] = _Due(transfer, nbytes - early)
        self._courier.due += 1
        self._complete(due)
        if due.left:
            self._courier.look()  # most often it is there already
            self._courier.something_happened()

    def _place(self, transfer: Transfer) -> Lease | None:
        kind, nbytes = transfer.parcel_class, transfer.payload_bytes
        if not nbytes:
            return None
        slots = self._receiving[kind]
        first, bits = slots.accept(transfer.slot, transfer.generation, nbytes)
        block = self._blocks.get((kind, first))
        if block is None:  # from that slot on, since a payload may take more than one
            begin = (kind - 1) * self._geometry.class_bytes + first * self._geometry.slot_bytes
            end = kind * self._geometry.class_bytes
            memory = self._arena.memory[begin:end]
            block = self._blocks[kind, first] = self._leases.block(memory)
        on_free = partial(self._give_back, slots, kind, first, bits)
        return self._leases.lend(block, nbytes, on_free)

    def _give_back(self, slots: ReceiverSlots, kind: int, first: int, bits: int) -> None:
        generation = slots.give_back(first, bits)
        if self._gone:
            self._look_whether_retired()
            return
        self._freed.append(Freed(kind, first, generation))
        self._freed_slots += bits.bit_count()
        if 4 * self._freed_slots >= self._geometry.slots:
            self._tell_freed()
        elif self._tell is None:
            self._tell = asyncio.get_running_loop().call_later(_TELL_S, self._tell_freed)

    def _tell_freed(self) -> None:
        if self._tell is not None:
            self._tell.cancel()
            self._tell = None
        freed, self._freed, self._freed_slots = self._freed, [], 0
        if freed and not self._gone:
            self._courier.notify(self, encode_note(NoteKind.FREED, self._generation, freed))

    # -- the end ---------------------------------------------------------------------------------

    def on_notice(self) -> None:
        """See `LinkHandler`: the peer is about to close."""
        self._asked = True
        self._look_whether_whole()

    def _look_whether_whole(self) -> None:
        if self._asked and not self._due:
            self._asked = False
            self._courier.notify(self, encode_note(NoteKind.WHOLE, self._generation))

    async def flush(self) -> None:
        """Wait until the peer has all that was posted whole, or is lost."""
        if self.link.error is None and not self._gone:
            self._flushed = asyncio.get_running_loop().create_future()
            self._courier.something_happened()
            self._look_whether_flushed()
            await self._flushed

    def _look_whether_flushed(self) -> None:
        if self._flushed is None or self._flushed.done() or self.link.error is not None:
            return
        lanes = self._lanes.values()
        if self.outbound.unsent or any(lane.waits for lane in lanes):
            return
        if self._peer_whole or not any(lane.slots.out for lane in lanes):
            self._flushed.set_result(None)
        elif not self._flush_asked:
            self._flush_asked = True
            self.link.send((encode_signal(FrameKind.NOTICE, self._self),))

    def give_up(self, error: PeerLost) -> None:
        """See `Peer`. Arrivals that are held stay readable."""
        if self._gone:
            return
        self._gone = True
        self._courier.due -= len(self._due)
        self._due.clear()
        self._early.clear()
        self._tell_freed()
        for lane in self._lanes.values():
            lane.clear()
        super().give_up(error)
        for future in (self.greeted, self._flushed):
            if future is not None and not future.done():
                future.set_result(None)

    def _fail_sources(self, error: PeerLost) -> None:
        def part(agent: Agent) -> None:
            self.outbound.fail(error)
            try:
                agent.withdraw(self._registered)
                agent.forget(self.agent)
            except NixlError as trouble:
                _LOG.debug("rank %d parts from rank %d: %s", self._self, self.rank, trouble)
            self._registered = None
            self._look_whether_retired()

        self._courier.remove(self, part)

    def _look_whether_retired(self) -> None:
        if self._registered is None and not any(s.held for s in self._receiving.values()):
            self._arena.retire()


class _Due:
    """A parcel that was announced: `left` bytes of its payload are not there."""

    __slots__ = ("left", "transfer")

    def __init__(self, transfer: Transfer, left: int) -> None:
        self.transfer, self.left = transfer, left
