"""The base of all transports that have a link to every peer: everything but the payload's way.

Control frames, control messages, heartbeats, loss and close are the same whatever moves the
payload, so they are here. A subclass says how a payload leaves, which memory the link itself fills,
when a payload is visible, and when a transfer that was given up is quiet.
"""

from __future__ import annotations

import asyncio
import socket
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from asyncmoe.errors import PeerLost, ProtocolError, UnknownName
from asyncmoe.lease import Lease, LeasePool
from asyncmoe.link import Link
from asyncmoe.mesh import Meeting, connect_all
from asyncmoe.reach import Reach, TcpReach
from asyncmoe.transport import Arrival, Parcel, Posted, Receiver, Transport, TransportContext
from asyncmoe.twophase import Inbound, Outbound, Transfer
from asyncmoe.wire import FrameKind, Prelude


class Peer:
    """One connected rank: its link and both directions of the two phases."""

    def __init__(
        self, transport: LinkedTransport, link: Link, generation: int, receiver: Receiver
    ) -> None:
        context = transport.context
        self.rank = link.peer
        self.link = link
        self.outbound = Outbound(context.rank, generation, context.limits)
        self.inbound = Inbound(
            link.peer, generation, context.limits, transport.leases, self._deliver, self._place
        )
        self._transport, self._receiver = transport, receiver
        self._transfer: Transfer | None = None  # the frame that the link fills: a parcel
        self._message: bytearray | None = None  # or a message

    def on_frame(self, prelude: Prelude) -> Sequence[memoryview]:
        """See `LinkHandler`."""
        if prelude.kind == FrameKind.TAKEN:
            self.on_taken(prelude)
            return ()
        if prelude.kind != FrameKind.PARCEL:
            self.inbound.message(prelude)
            self._message = bytearray(prelude.payload_bytes)
            return (memoryview(self._message),)
        self._transfer = self.inbound.accept(prelude)
        return self._transport._body(self._transfer)

    def on_filled(self) -> None:
        """See `LinkHandler`."""
        message, self._message = self._message, None
        transfer, self._transfer = self._transfer, None
        if message is not None:
            self._guard(self._receiver.on_message, self.rank, bytes(message))
        elif transfer is not None:
            self._transport._filled(self, transfer)

    def on_notice(self) -> None:
        """See `LinkHandler`. For peers of transports that send notices."""
        raise ProtocolError("a notice, which this transport does not send")

    def on_taken(self, prelude: Prelude) -> None:
        """The peer has `prelude.rows` more parcels of `prelude.parcel_class` whole. For peers of
        transports that count them."""
        raise ProtocolError("a frame of kind taken, which this transport does not send")

    def _place(self, prelude: Prelude) -> Lease | None:
        """See `Inbound`. For peers of transports whose senders choose the place."""
        return None

    def on_lost(self, error: PeerLost) -> None:
        """See `LinkHandler`."""
        self.give_up(error)
        self._guard(self._receiver.on_peer_lost, self.rank, error)

    def give_up(self, error: PeerLost) -> None:
        """End everything that is under way with this peer, whose link is gone."""
        self._transfer = self._message = None
        self._transport._quarantined(self, self.inbound.abandon())
        self._fail_sources(error)

    def _fail_sources(self, error: PeerLost) -> None:
        """Fail what is on its way to the peer: at once, as nothing but the link reads sources."""
        self.outbound.fail(error)

    def _deliver(self, arrival: Arrival) -> None:
        self._guard(self._receiver.on_parcel, arrival)

    def _guard(self, call: Callable[..., None], *arguments: object) -> None:
        """A fault of the receiver is not the peer's: report it and read on.

        A `ProtocolError` is the peer's: the receiver found out what the frame alone did not show.
        """
        try:
            call(*arguments)
        except ProtocolError:
            raise
        except Exception as error:
            asyncio.get_running_loop().call_exception_handler(
                {"message": f"receiver failed on input of rank {self.rank}", "exception": error}
            )


class LinkedTransport(Transport):
    """A transport with one `Link` to each peer."""

    name: ClassVar[str]  # what ranks are published under
    option_names: ClassVar[tuple[str, ...]] = ("advertise_host",)

    def __init__(self, context: TransportContext) -> None:
        super().__init__(context)
        for option in context.options:
            if option not in self.option_names:
                raise UnknownName(f"option of transport {self.name}", option, self.option_names)
        self.leases = LeasePool()
        self._peers: dict[int, Peer] = {}

    async def start(self, receiver: Receiver) -> None:
        """See `Transport`."""
        await self.connect(receiver)
        self.open()

    async def connect(self, receiver: Receiver) -> None:
        """The first half of `start`: every pair is up and can be posted to. Raises as `start`."""
        if not self.context.others:
            return

        def connected(link: Link, generation: int, met: Any) -> None:
            self._peers[link.peer] = self._make_peer(link, generation, receiver, met)

        try:
            meeting = Meeting(self.name, self._reach(), self._meet, connected)
            await connect_all(self.context, meeting)
        except BaseException:
            self.abort()
            raise

    def open(self) -> None:
        """The second half: what has arrived since, and from now on, is handed over."""
        for peer in self._peers.values():
            peer.link.open(peer)

    def post(self, peer: int, parcel: Parcel) -> Posted:
        """See `Transport`."""
        return self._transmit(self._reachable(peer), parcel)

    def send(self, peer: int, message: bytes) -> None:
        """See `Transport`."""
        state = self._reachable(peer)
        state.link.send((state.outbound.message(len(message)), message))

    async def close(self) -> None:
        """See `Transport`. If cancelled, disconnects at once."""
        try:
            await asyncio.gather(*(peer.link.close() for peer in self._peers.values()))
        finally:
            self._end("this rank closed its transport")

    def cut(self, peer: int, reason: str) -> None:
        """See `Transport`."""
        self._peers[peer].link.lose(reason)

    def abort(self) -> None:
        """Disconnect from all peers at once, as a crash would."""
        self._end("this rank aborted its transport")

    def _end(self, reason: str) -> None:
        for peer in self._peers.values():
            peer.link.drop(reason)
            peer.give_up(PeerLost(peer.rank, reason))

    def _reach(self) -> Reach:
        """How ranks reach each other."""
        return TcpReach(self.context.bind_host, self.context.options.get("advertise_host"))

    async def _meet(self, sock: socket.socket, peer: int) -> Any:
        """What the two sides tell each other before the link takes the socket over.

        Raises `ProtocolError`, `OSError`: then the two are not connected.
        """
        return None

    def _make_peer(self, link: Link, generation: int, receiver: Receiver, met: Any) -> Peer:
        """The state of one connection; `met` is what `_meet` returned."""
        return Peer(self, link, generation, receiver)

    @abstractmethod
    def _transmit(self, peer: Peer, parcel: Parcel) -> Posted:
        """Send control frame and payload; report local completion to `peer.outbound.sent`."""

    @abstractmethod
    def _body(self, transfer: Transfer) -> Sequence[memoryview]:
        """The memory that the link fills with what follows the parcel's prelude on it."""

    @abstractmethod
    def _filled(self, peer: Peer, transfer: Transfer) -> None:
        """That memory is filled; `peer.inbound.arrived` is due once the payload is visible."""

    @abstractmethod
    def _quarantined(self, peer: Peer, leases: Sequence[Lease]) -> None:
        """These leases' transfers are given up: make each `quiet` once no write can come."""

    def _reachable(self, peer: int) -> Peer:
        state = self._peers.get(peer)
        if state is None:
            raise ValueError(f"rank {self.context.rank} has no connection to rank {peer}")
        state.link.check()
        return state
