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

from asyncmoe import native
from asyncmoe.errors import ConfigError, PeerLost, ProtocolError, UnknownName
from asyncmoe.lease import Lease, make_pool
from asyncmoe.link import Link
from asyncmoe.mesh import Meeting, connect_all
from asyncmoe.reach import Reach, TcpReach
from asyncmoe.transport import Parcel, Posted, Receiver, Transport, TransportContext
from asyncmoe.twophase import Transfer, make_inbound, make_outbound, report_fault


class Peer:
    """One connected rank: its link and both directions of the two phases."""

    placed: ClassVar[bool] = False  # whether `_place` has a say in where payloads go

    def __init__(
        self, transport: LinkedTransport, link: Link, generation: int, receiver: Receiver
    ) -> None:
        context = transport.context
        self.rank = link.peer
        self.link = link
        self.whole = transport.whole
        self.outbound = make_outbound(context.rank, generation, context.limits)
        self.inbound = make_inbound(
            link.peer,
            generation,
            context.limits,
            transport.leases,
            receiver.on_parcel,
            receiver.on_message,
            self._place if self.placed else None,
        )
        self._transport, self._receiver = transport, receiver

    def post(self, parcel: Parcel) -> Posted:
        """Send control frame and payload; `outbound.sent` is due once nothing reads the source."""
        return self.link.post(self.outbound, parcel)

    def door(self) -> Callable[[Parcel], Posted] | None:
        """What posts like `post` and looks itself whether the link is lost, if it is compiled: then
        nothing of Python's runs between who posts and the transport. It may refer to the peer until
        `give_up`."""
        return None

    def on_announced(self, transfer: Transfer) -> None:
        """See `LinkHandler`. `inbound.arrived` is due once the payload is visible."""
        raise NotImplementedError

    def on_notice(self) -> None:
        """See `LinkHandler`. For peers of transports that send notices."""
        raise ProtocolError("a notice, which this transport does not send")

    def on_taken(self, parcel_class: int, count: int) -> None:
        """See `LinkHandler`. For peers of transports that count them."""
        raise ProtocolError("a frame of kind taken, which this transport does not send")

    def on_leave(self) -> None:
        """See `LinkHandler`."""

    def _place(self, transfer: Transfer) -> Lease | None:
        """See `Inbound`, which asks only where `placed` is set."""
        return None

    def on_lost(self, error: PeerLost) -> None:
        """See `LinkHandler`."""
        self.give_up(error)
        try:
            self._receiver.on_peer_lost(self.rank, error)
        except Exception as fault:
            report_fault(self.rank, fault)

    def give_up(self, error: PeerLost) -> None:
        """End everything that is under way with this peer, whose link is gone."""
        self._transport._doors.pop(self.rank, None)
        self._transport._quarantined(self, self.inbound.abandon())
        self._fail_sources(error)

    def _fail_sources(self, error: PeerLost) -> None:
        """Fail what is on its way to the peer: at once, as nothing but the link reads sources."""
        self.outbound.fail(error)


class LinkedTransport(Transport):
    """A transport with one `Link` to each peer."""

    name: ClassVar[str]  # what ranks are published under
    whole: ClassVar[bool] = False  # whether payloads follow their columns on the link
    option_names: ClassVar[tuple[str, ...]] = ("advertise_host",)

    def __init__(self, context: TransportContext) -> None:
        super().__init__(context)
        for option in context.options:
            if option not in self.option_names:
                raise UnknownName(f"option of transport {self.name}", option, self.option_names)
        host = context.options.get("advertise_host", "localhost")
        if not isinstance(host, str) or not host:
            raise ConfigError(
                f"transport.options.advertise_host is {host!r}; allowed: a name or an address"
            )
        self.leases = make_pool()
        self._peers: dict[int, Peer] = {}
        self._closing = False  # set by who flushes more than the links: nothing more is taken
        self._doors: dict[int, Callable[[Parcel], Posted]] = {}  # by rank, of those that have one

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
        for rank, peer in self._peers.items():
            door = peer.door()
            if door is not None:
                self._doors[rank] = door
        if self._doors:
            # An attribute of the instance, so that whoever posts calls the compiled table itself.
            self.post = native.columns.by_key(self._doors, self.post)  # type: ignore[method-assign]

    def open(self) -> None:
        """The second half: what has arrived since, and from now on, is handed over."""
        for peer in self._peers.values():
            peer.link.open(peer)

    def post(self, peer: int, parcel: Parcel) -> Posted:
        """See `Transport`."""
        state = self._peers.get(peer)
        if state is None or state.link.error is not None or self._closing:
            state = self._reachable(peer)
        return state.post(parcel)

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

    def _shut(self) -> None:
        """Everything goes the way of `post` from now on, which knows why it cannot."""
        self._doors.clear()
        self.__dict__.pop("post", None)  # which refers to its own transport

    def _end(self, reason: str) -> None:
        self._shut()
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
    def _quarantined(self, peer: Peer, leases: Sequence[Lease]) -> None:
        """These leases' transfers are given up: make each `quiet` once no write can come."""

    def _reachable(self, peer: int) -> Peer:
        state = self._peers.get(peer)
        if state is None:
            raise ValueError(f"rank {self.context.rank} has no connection to rank {peer}")
        if self._closing:
            raise PeerLost(peer, "this rank closed its transport")
        state.link.check()
        return state
