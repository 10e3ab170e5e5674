"""The base of stacks whose transfers are matched: a send here, a receive there, in the same order.

Such stacks (Gloo, NCCL) ask both sides to launch the same transfers, with the same shapes, in the
same order, and nothing that was launched can be cancelled. The link says what is to come:

1. A parcel is announced by its control frame, and its send is launched.
2. The receiver checks the frame, takes a lease, and launches the receive. Frames arrive in order,
   so both sides launch a direction's transfers in the order of its control frames.
3. When the payload is whole the receiver says so, with a frame TAKEN. Then the source is free, if
   the library has not said so before.

What one turn of the loop posts is announced together, at its end. Where the library completes
several transfers together, both sides must launch the same bursts: then a frame NOTICE follows the
control frames of each.

A sender announces at most a `Window` of each class that was not taken; what is beyond waits in its
own process. So nothing is launched that would wait for more than the other side's loop: a dispatch
that waits for credits or for its window is not launched, and no combine stands behind it. The
receiver holds the sender to the window before it allocates, which bounds the leases in filling.

Each pair of ranks has a connection of its own in the library. When a peer is lost that one is
aborted, and until the library is quiet its receives stay in quarantine and its sources not free.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any

from asyncmoe.deadline import Deadline
from asyncmoe.errors import PeerLost, ProtocolError, RankFailed
from asyncmoe.lease import Lease
from asyncmoe.link import Link
from asyncmoe.linked import LinkedTransport, Peer
from asyncmoe.transport import Arrival, Parcel, Posted, Receiver, TransportContext
from asyncmoe.transports.matched_flow import WINDOW_PARCELS, make_receiving, make_sending
from asyncmoe.transports.matched_pair import Lane, Operation, Pair
from asyncmoe.twophase import Transfer
from asyncmoe.wire import FrameKind, encode_signal, encode_taken

_CARD = struct.Struct("<I")
_CARD_BYTES = 4096
_encode_taken = lru_cache(maxsize=4 * WINDOW_PARCELS)(encode_taken)  # they are always the same


class MatchedPeer(Peer):
    """One peer: windows and lanes of both directions."""

    placed = True

    def __init__(
        self,
        transport: MatchedTransport,
        link: Link,
        generation: int,
        receiver: Receiver,
        pair: Pair,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._rank, self._alike = transport.context.rank, pair.bursts is None
        # Both are called for each parcel, and so go to where it is known.
        self._receiving = receiving = make_receiving(
            transport.leases,
            None if self._alike else self._receive_soon,
            self._tell_soon,
        )
        self._place = receiving.place  # type: ignore[method-assign]
        self.on_announced = receiving.announced  # type: ignore[method-assign]
        super().__init__(transport, link, generation, receiver)
        receiving.begin(self.inbound)
        self.pair = pair
        pair.failed = partial(self._failed, transport.name)
        notice = encode_signal(FrameKind.NOTICE, self._rank) if self._alike else None
        self._sending = make_sending(self.outbound, notice, self._leave_soon)
        self._sends, self._receives = Lane(pair.send, pair.bursts), Lane(pair.receive, pair.bursts)
        self._flushed: asyncio.Future[None] | None = None
        self._connecting: asyncio.Future[None] | None = None
        self.connected = False

    async def connect(self, card: bytes) -> None:
        """Connect the pair. Raises `RankFailed`."""
        self._connecting = asyncio.ensure_future(self.pair.connect(card))
        try:
            await self._connecting
        except (RankFailed, asyncio.CancelledError) as error:
            if self.link.error is None:
                raise
            raise RankFailed(self.rank, self.link.error.reason) from error
        self.connected = True
        self._sends.open()
        self._receives.open()

    # -- sending ---------------------------------------------------------------------------------

    def post(self, parcel: Parcel) -> Posted:
        """See `Transport`."""
        return self._sending.post(parcel)

    def _leave_soon(self) -> None:
        self._loop.call_soon(self._leave)

    def _leave(self) -> None:
        """The turn is over: announce what it brought, and launch it."""
        frames, bursts = self._sending.leave()
        if self.link.error is not None:
            return
        self.link.send(frames)
        for payloads, posted in bursts:
            if self._alike:  # the peer says when it has them
                self._sends.put([Operation(payload, _nothing) for payload in payloads])
            else:
                sent = self.outbound.sent
                self._sends.put(
                    [
                        Operation(payload, partial(sent, one))
                        for payload, one in zip(payloads, posted, strict=True)
                    ]
                )

    def on_taken(self, parcel_class: int, count: int) -> None:
        """See `LinkHandler`."""
        # Payloads arrive in order over both classes: if this many have, the first so many have.
        self.pair.taken(self._sending.taken(parcel_class, count))
        if self._flushed is not None and not self._flushed.done() and self.flushed:
            self._flushed.set_result(None)

    @property
    def flushed(self) -> bool:
        """Whether the peer has all that was posted, or is lost."""
        return self.link.error is not None or self._sending.idle

    async def flush(self) -> None:
        """Wait until that is so."""
        if not self.flushed:
            self._flushed = asyncio.get_running_loop().create_future()
            await self._flushed

    # -- receiving -------------------------------------------------------------------------------

    def on_notice(self) -> None:
        """See `LinkHandler`: what was announced is a burst."""
        burst = self._receiving.take() if self._alike else []
        if not burst:
            raise ProtocolError("a notice; allowed: none, or one behind each burst of payloads")
        operations = [Operation(each.rows, _nothing) for each in burst]
        operations[-1] = Operation(operations[-1].tensor, partial(self._arrived, burst))
        self._receives.put(operations)

    def _receive_soon(self) -> None:
        self._loop.call_soon(self._receive)

    def _receive(self) -> None:
        """The turn is over: launch the receives of what it has announced."""
        burst = self._receiving.take()
        if burst:
            self._receives.put([Operation(e.rows, partial(self._arrived, [e])) for e in burst])

    def _arrived(self, transfers: Sequence[Transfer]) -> None:
        try:
            self._receiving.arrived(transfers)
        except ProtocolError as error:
            self.link.lose(f"malformed frame: {error}")

    def _tell_soon(self) -> None:
        self._loop.call_soon(self._tell)  # this turn may bring more

    def _tell(self) -> None:
        for kind, whole in self._receiving.told():
            if self.link.error is None:
                self.link.send((_encode_taken(self._rank, kind, whole),))

    # -- the end ---------------------------------------------------------------------------------

    def _failed(self, name: str, reason: str) -> None:
        self.link.lose(f"its {name} connection failed: {reason}")

    def give_up(self, error: PeerLost) -> None:
        """See `Peer`."""
        self._sending.stop()
        self._receiving.stop()
        if self._connecting is not None:
            self._connecting.cancel()
        self.pair.abort()
        super().give_up(error)
        if self._flushed is not None and not self._flushed.done():
            self._flushed.set_result(None)

    def _fail_sources(self, error: PeerLost) -> None:
        self.pair.quiet.add_done_callback(lambda _: self.outbound.fail(error))


class MatchedTransport(LinkedTransport):
    """A transport whose payloads go through a `Pair` for each peer."""

    def __init__(self, context: TransportContext) -> None:
        super().__init__(context)
        self._gate: Gate | None = None
        self._pairs: list[Pair] = []
        self._met: dict[int, tuple[MatchedPeer, bytes]] = {}  # by rank; with the peer's card

    async def start(self, receiver: Receiver) -> None:
        """See `Transport`."""
        deadline = Deadline(self.context.start_timeout_s)
        self._gate = Gate(receiver)
        try:
            await super().start(self._gate)
            await self._connect_pairs(deadline)
        except BaseException:
            self.abort()
            await self._settle()
            raise

    async def _connect_pairs(self, deadline: Deadline) -> None:
        try:
            async with asyncio.timeout(deadline.left_s):
                await asyncio.gather(*(peer.connect(card) for peer, card in self._met.values()))
        except TimeoutError:
            missing = sorted(rank for rank, (peer, _) in self._met.items() if not peer.connected)
            raise TimeoutError(
                f"rank {self.context.rank} has no {self.name} connection to ranks {missing} in the "
                f"{deadline.timeout_s:.3g} s that were left of cluster.start_timeout_s"
            ) from None

    async def close(self) -> None:
        """See `Transport`. If cancelled, disconnects at once."""
        if self._gate is not None:
            self._gate.close()
        peers = [peer for peer, _ in self._met.values()]
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(self.context.peer_timeout_s):
                    await asyncio.gather(*(peer.flush() for peer in peers))
            for peer in peers:
                if not peer.flushed:
                    peer.link.drop("it did not take what was sent before the end")
            await super().close()
        finally:
            self._end("this rank closed its transport")
            await self._settle()

    async def _settle(self) -> None:
        """Wait until the library is quiet, at most the peer timeout."""
        if self._pairs:
            quiet = [pair.quiet for pair in self._pairs]
            await asyncio.wait(quiet, timeout=self.context.peer_timeout_s)

    def _end(self, reason: str) -> None:
        super()._end(reason)
        for pair in self._pairs:  # also those whose link never came up
            pair.abort()

    @abstractmethod
    def _make_pair(self, peer: int) -> Pair:
        """This rank's side of the connection with `peer`."""

    async def _meet(self, sock: socket.socket, peer: int) -> tuple[Pair, bytes]:
        pair = self._make_pair(peer)
        self._pairs.append(pair)
        mine = await pair.introduce()
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(sock, _CARD.pack(len(mine)) + mine)
        (length,) = _CARD.unpack(await _read(sock, _CARD.size))
        if length > _CARD_BYTES:
            raise ProtocolError(f"a card of {length} bytes; allowed: {_CARD_BYTES}")
        return pair, await _read(sock, length)

    def _make_peer(self, link: Link, generation: int, receiver: Receiver, met: Any) -> Peer:
        pair, card = met
        peer = MatchedPeer(self, link, generation, receiver, pair)
        self._met[peer.rank] = peer, card
        return peer

    def _quarantined(self, peer: Peer, leases: Sequence[Lease]) -> None:
        def proven(_: object) -> None:
            for lease in leases:
                lease.quiet()

        self._met[peer.rank][0].pair.quiet.add_done_callback(proven)


class Gate(Receiver):
    """Hands over until it is closed: while this rank flushes, it takes but does not look."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver: Receiver | None = receiver

    def close(self) -> None:
        """Hand over nothing more."""
        self._receiver = None

    def on_parcel(self, arrival: Arrival) -> None:
        """See `Receiver`."""
        if self._receiver is None:
            arrival.release()
        else:
            self._receiver.on_parcel(arrival)

    def on_message(self, source: int, message: bytes) -> None:
        """See `Receiver`."""
        if self._receiver is not None:
            self._receiver.on_message(source, message)

    def on_peer_lost(self, peer: int, error: Exception) -> None:
        """See `Receiver`."""
        if self._receiver is not None:
            self._receiver.on_peer_lost(peer, error)


def _nothing() -> None:
    """For a send of which nobody is told."""


async def _read(sock: socket.socket, count: int) -> bytes:
    """Exactly `count` bytes. Raises `ProtocolError` if the other side ends before."""
    data = b""
    while len(data) < count:
        piece = await asyncio.get_running_loop().sock_recv(sock, count - len(data))
        if not piece:
            raise ProtocolError("the other side ended before it had introduced itself")
        data += piece
    return data
