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
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch

from asyncmoe.deadline import Deadline
from asyncmoe.errors import PeerLost, ProtocolError, RankFailed
from asyncmoe.lease import Lease, LeaseState
from asyncmoe.link import Link
from asyncmoe.linked import LinkedTransport, Peer
from asyncmoe.transport import Arrival, Parcel, ParcelClass, Posted, Receiver, TransportContext
from asyncmoe.transports.matched_pair import (
    BURST_BYTES,
    WINDOW_BYTES,
    WINDOW_PARCELS,
    Lane,
    Operation,
    Pair,
    Window,
)
from asyncmoe.twophase import Transfer
from asyncmoe.wire import PRELUDE_BYTES, FrameKind, encode_signal, encode_taken

_CARD = struct.Struct("<I")
_CARD_BYTES = 4096
_CLASSES = len(ParcelClass) + 1  # lists are indexed by class, which counts from 1


class _Outgoing(NamedTuple):
    """A parcel that was not taken."""

    frame: bytes
    payload: torch.Tensor
    posted: Posted
    nbytes: int


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
        super().__init__(transport, link, generation, receiver)
        self.pair = pair
        pair.failed = partial(self._failed, transport.name)
        self._rank = transport.context.rank
        self._loop = asyncio.get_running_loop()
        self._alike = pair.bursts is None
        self._notice = encode_signal(FrameKind.NOTICE, self._rank)
        self._sending = Lane(pair.send, pair.bursts)
        self._receiving = Lane(pair.receive, pair.bursts)
        self._frames: list[bytes] = []  # of this turn of the loop, which the link does not have
        self._burst_bytes = 0  # of the payloads behind the last NOTICE
        self._held: list[deque[_Outgoing]] = [deque() for _ in range(_CLASSES)]  # not announced
        self._out: list[deque[_Outgoing]] = [deque() for _ in range(_CLASSES)]  # announced
        self._announced = [Window() for _ in range(_CLASSES)]  # the same
        self._filling = [Window() for _ in range(_CLASSES)]  # what the peer announced to us
        self._coming: list[deque[Transfer]] = [deque() for _ in range(_CLASSES)]  # not whole
        self._whole = [0] * _CLASSES  # parcels that are, which the peer was not told
        self._telling = False
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
        self._sending.open()
        self._receiving.open()

    # -- sending ---------------------------------------------------------------------------------

    def post(self, parcel: Parcel) -> Posted:
        """See `Transport`."""
        frame, posted = self.outbound.parcel(parcel)
        payload = parcel.payload
        nbytes = len(frame) - PRELUDE_BYTES + payload.nbytes
        self._held[parcel.kind].append(_Outgoing(frame, payload, posted, nbytes))
        self._announce(parcel.kind)
        return posted

    def _announce(self, kind: int) -> None:
        held, window = self._held[kind], self._announced[kind]
        while held and window.fits(held[0].nbytes) and self.link.error is None:
            outgoing = held.popleft()
            self._out[kind].append(outgoing)
            window.put(outgoing.nbytes)
            if not self._frames:
                self._loop.call_soon(self._leave)
            self._frames.append(outgoing.frame)
            if outgoing.payload.numel():
                sent = partial(self.outbound.sent, outgoing.posted)
                self._sending.add(Operation(outgoing.payload, sent))
                self._burst_bytes += outgoing.nbytes
                if self._burst_bytes >= BURST_BYTES:
                    self._end_burst()

    def _end_burst(self) -> None:
        self._burst_bytes = 0
        if self._alike:
            self._frames.append(self._notice)
            self._sending.end()

    def _leave(self) -> None:
        """The turn is over: announce what it brought."""
        if self._burst_bytes:
            self._end_burst()
        frames, self._frames = self._frames, []
        if self.link.error is None:
            self.link.send(frames)

    def on_taken(self, parcel_class: int, count: int) -> None:
        """See `LinkHandler`."""
        window = self._announced[parcel_class]
        if count > len(window):
            raise ProtocolError(f"{count} parcels taken; announced: {len(window)}")
        window.take(count)
        out = self._out[parcel_class]
        taken = [out.popleft() for _ in range(count)]
        # Payloads arrive in order over both classes: if this many have, the first so many have.
        self.pair.taken(sum(bool(outgoing.payload.numel()) for outgoing in taken))
        for outgoing in taken:
            self.outbound.sent(outgoing.posted)
        self._announce(parcel_class)
        if self._flushed is not None and not self._flushed.done() and self.flushed:
            self._flushed.set_result(None)

    @property
    def flushed(self) -> bool:
        """Whether the peer has all that was posted, or is lost."""
        if self.link.error is not None:
            return True
        return not any(self._held) and not any(len(window) for window in self._announced)

    async def flush(self) -> None:
        """Wait until that is so."""
        if not self.flushed:
            self._flushed = asyncio.get_running_loop().create_future()
            await self._flushed

    # -- receiving -------------------------------------------------------------------------------

    def _place(self, transfer: Transfer) -> Lease | None:
        """Anywhere, but within the window: that is looked at before anything is allocated."""
        window = self._filling[transfer.parcel_class]
        nbytes = transfer.column_bytes + transfer.payload_bytes
        if not window.fits(nbytes):
            raise ProtocolError(
                f"a parcel of {nbytes} bytes behind {len(window)} with {window.nbytes} bytes that "
                f"were not taken; allowed: {WINDOW_PARCELS} with {WINDOW_BYTES} bytes"
            )
        window.put(nbytes)
        return None

    def on_notice(self) -> None:
        """See `LinkHandler`: what was announced is a burst."""
        if not (self._alike and self._receiving.end()):
            raise ProtocolError("a notice; allowed: none, or one behind each burst of payloads")

    def on_announced(self, transfer: Transfer) -> None:
        """See `LinkHandler`: launch the receive."""
        self._coming[transfer.parcel_class].append(transfer)
        if transfer.payload_bytes:
            self._receiving.add(Operation(transfer.rows, partial(self._received, transfer)))
        else:
            self._arrived(transfer)

    def _received(self, transfer: Transfer) -> None:
        if self.link.error is not None:
            return  # given up
        try:
            self._arrived(transfer)
        except ProtocolError as error:
            self.link.lose(f"malformed frame: {error}")

    def _arrived(self, transfer: Transfer) -> None:
        self.inbound.arrived(transfer)
        kind = transfer.parcel_class
        coming = self._coming[kind]
        while coming and coming[0].lease.state is not LeaseState.FILLING:
            coming.popleft()  # in order: one without a payload arrives before those ahead of it
            self._whole[kind] += 1
        if self._whole[kind] and not self._telling:
            self._telling = True  # at the end of this turn, which may bring more
            self._loop.call_soon(self._tell)

    def _tell(self) -> None:
        self._telling = False
        for kind, whole in enumerate(self._whole):
            if whole and self.link.error is None:
                self._whole[kind] = 0
                self._filling[kind].take(whole)
                self.link.send((encode_taken(self._rank, kind, whole),))

    # -- the end ---------------------------------------------------------------------------------

    def _failed(self, name: str, reason: str) -> None:
        self.link.lose(f"its {name} connection failed: {reason}")

    def give_up(self, error: PeerLost) -> None:
        """See `Peer`."""
        for outgoing in (*self._held, *self._out):
            outgoing.clear()
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
                f"rank {self.context.rank} has no {self.name} connection to ranks {missing} after "
                f"{deadline.timeout_s:.3g} s"
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


async def _read(sock: socket.socket, count: int) -> bytes:
    """Exactly `count` bytes. Raises `ProtocolError` if the other side ends before."""
    data = b""
    while len(data) < count:
        piece = await asyncio.get_running_loop().sock_recv(sock, count - len(data))
        if not piece:
            raise ProtocolError("the other side ended before it had introduced itself")
        data += piece
    return data
