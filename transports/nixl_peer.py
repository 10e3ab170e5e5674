"""One peer of a NIXL rank: both directions of its parcels, its notifications, and how it ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from asyncmoe.errors import PeerLost
from asyncmoe.lease import Lease
from asyncmoe.link import Link
from asyncmoe.linked import LinkedTransport, Peer
from asyncmoe.transport import Parcel, Posted, Receiver
from asyncmoe.transports.nixl_agent import Agent, NixlError
from asyncmoe.transports.nixl_courier import Courier
from asyncmoe.transports.nixl_memory import Arena
from asyncmoe.transports.nixl_receiving import make_receiving
from asyncmoe.transports.nixl_sending import BATCH_BYTES, Batch, Sending, make_sending
from asyncmoe.transports.nixl_wire import (
    NoteKind,
    Place,
    decode_note,
    encode_note,
    note_generation,
)
from asyncmoe.transports.shm_segment import Geometry
from asyncmoe.twophase import Transfer, is_plain
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
        here: Agent,
        place: Place,
        arena: Arena,
        registered: Any,
    ) -> None:
        super().__init__(transport, link, generation, receiver)
        self.agent = place.name
        self.copies = True
        self.greeted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._self = transport.context.rank
        self._generation, self._courier = generation, courier
        self._written = encode_note(NoteKind.WRITTEN, generation)  # how notifications begin
        self._freed = encode_note(NoteKind.FREED, generation)
        self._arena, self._registered = arena, registered
        compiled = not is_plain(self.inbound)
        self._receiving = make_receiving(
            transport.leases, arena.memory, geometry, generation, self._slots_free, compiled
        )
        self._receiving.begin(self.inbound)
        self._sending = make_sending(
            self.outbound,
            geometry,
            place.address,
            generation,
            here.source_device,
            compiled and place.kind == "DRAM",
        )
        self.express = here.express(self.agent, self._sending, link, BATCH_BYTES)
        self._due = 0  # as the courier counts
        self._tell: asyncio.Handle | None = None  # of `_tell_freed`
        self._tells_soon = False  # namely in the next turn
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
        posted = self._sending.post(parcel)
        self._courier.ready(self)
        return posted

    def door(self) -> Callable[[Parcel], Posted] | None:
        """See `Peer`."""
        sending: Any = self._sending
        if isinstance(sending, Sending):
            return None
        door: Callable[[Parcel], Posted] = sending.poster(
            self.link, partial(self._courier.ready, self)
        )
        return door

    @property
    def waits(self) -> bool:
        """See `Client`."""
        return self._flushed is not None or not self.greeted.done() or self._sending.waits

    def next_batch(self) -> Batch | None:
        """See `Client`."""
        return self._sending.next_batch()

    def begun(self, batch: Batch) -> None:
        """See `Client`."""
        if batch.frames and self.link.error is None:
            self.link.send(batch.frames)

    def written_out(self, batch: Batch) -> None:
        """See `Client`."""
        self._sending.written_out(batch)
        self._look_whether_flushed()

    def wrote(self) -> None:
        """See `Client`."""
        self._look_whether_flushed()

    def fail(self, reason: str) -> None:
        """See `Client`."""
        self.link.lose(reason)

    # -- notifications ---------------------------------------------------------------------------

    def on_note(self, note: bytes) -> None:
        """See `Client`."""
        if note.startswith(self._freed):
            self._sending.on_freed(note)
            if self._sending.waits:
                self._courier.ready(self)
        elif note.startswith(self._written):
            try:
                self._receiving.on_written(note)
            finally:
                self._count_due()
            self._look_whether_whole()
        elif note_generation(note) == self._generation:
            self._greeted_or_whole(decode_note(note)[0])
        else:
            _LOG.warning("rank %d: a notification that is not rank %d's", self._self, self.rank)

    def _greeted_or_whole(self, kind: int) -> None:
        if kind == NoteKind.WHOLE:
            self._peer_whole = True
            self._look_whether_flushed()
        elif not self.greeted.done():
            self.greeted.set_result(None)

    def _count_due(self) -> None:
        due = self._receiving.due
        self._courier.due += due - self._due
        self._due = due

    # -- receiving -------------------------------------------------------------------------------

    def on_announced(self, transfer: Transfer) -> None:
        """See `LinkHandler`."""
        try:
            whole = self._receiving.announced(transfer)
        finally:
            self._count_due()
        if whole:
            self._look_whether_whole()
        else:
            self._courier.look()  # most often it is there already
            self._courier.something_happened()

    def _place(self, transfer: Transfer) -> Lease | None:
        return self._receiving.place(transfer)

    def _slots_free(self) -> None:
        if self._gone:
            self._look_whether_retired()
        elif self._receiving.enough:
            if not self._tells_soon:  # behind this turn, in which more may come back
                self._tells_soon = True
                self._plan_to_tell(asyncio.get_running_loop().call_soon(self._tell_freed))
        elif self._tell is None:
            self._plan_to_tell(asyncio.get_running_loop().call_later(_TELL_S, self._tell_freed))

    def _plan_to_tell(self, tell: asyncio.Handle) -> None:
        if self._tell is not None:
            self._tell.cancel()
        self._tell = tell

    def _tell_freed(self) -> None:
        if self._tell is not None:
            self._tell.cancel()
            self._tell, self._tells_soon = None, False
        note = self._receiving.freed_note()
        if note is not None and not self._gone:
            self._courier.notify(self, note)

    # -- the end ---------------------------------------------------------------------------------

    def on_notice(self) -> None:
        """See `LinkHandler`: the peer is about to close."""
        self._asked = True
        self._look_whether_whole()

    def _look_whether_whole(self) -> None:
        if self._asked and not self._receiving.due:
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
        if self.outbound.unsent or self._sending.waits:
            return
        if self._peer_whole or not self._sending.out:
            self._flushed.set_result(None)
        elif not self._flush_asked:
            self._flush_asked = True
            self.link.send((encode_signal(FrameKind.NOTICE, self._self),))

    def give_up(self, error: PeerLost) -> None:
        """See `Peer`. Arrivals that are held stay readable."""
        if self._gone:
            return
        self._gone = True
        self._receiving.stop()
        self._count_due()
        self._tell_freed()
        self._sending.clear()
        super().give_up(error)
        for future in (self.greeted, self._flushed):
            if future is not None and not future.done():
                future.set_result(None)

    def _fail_sources(self, error: PeerLost) -> None:
        def part(agent: Agent) -> None:
            self.express = None  # which refers to the link, and lets go of what it keeps
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
        if self._registered is None and not self._receiving.held:
            self._arena.retire()
