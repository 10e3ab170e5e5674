"""One pair of ranks on UCX: an endpoint, tags for both directions, and how the two take leave."""

from __future__ import annotations

import asyncio
import itertools
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from asyncmoe.errors import ProtocolError, RankFailed
from asyncmoe.transports.matched_pair import Operation, Pair, fail, settle
from asyncmoe.transports.ucx_worker import UcxError, Worker, memory_of

# Of a card: magic, length and checksum of the rest; then the channel, and UCX's address.
_HEAD, _CHANNEL = struct.Struct("<4sII"), struct.Struct("<I")
_MAGIC = b"aUcx"
_NUMBER_BITS = 32
_FAREWELL = (1 << _NUMBER_BITS) - 1  # the number of the last message of a direction
_CHANNEL_MASK = _FAREWELL << _NUMBER_BITS
_COMPUTED_POLL_S = 50e-6
_SETTLE_POLL_S = 2e-3

Numbered = Sequence[tuple[int, Operation]]  # with tags


class UcxPair(Pair):
    """See the module. `channel` is for what the peer sends, and no other pair's in this worker."""

    bursts = 64  # UCX matches by tag, so that there need be no pauses between bursts

    def __init__(self, peer: int, worker: Worker, channel: int, patience_s: float) -> None:
        """`patience_s`: for which a peer that is not dead may take leave before it is cut off."""
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._peer, self._worker, self._patience_s = peer, worker, patience_s
        self._endpoint: Any = None
        self._channel, self._peer_channel = channel, 0
        self._in, self._out = tags(channel), tags(0)
        self._receives: dict[int, Any] = {}  # by tag; posted and not known to be complete
        self._sends = 0  # likewise
        self._connected: asyncio.Future[None] = self._loop.create_future()
        self._aborted = self._said_farewell = False
        self._deadline_s = 0.0  # when patience ends

    async def introduce(self) -> bytes:
        """See `Pair`."""
        return make_card(self._channel, self._worker.address)

    async def connect(self, card: bytes) -> None:
        """See `Pair`. UCX connects with the first message, so an empty one goes each way."""
        try:
            self._peer_channel, address = read_card(card)
            self._endpoint = self._worker.connect(address, self._dead)
        except (ProtocolError, UcxError) as error:
            raise RankFailed(self._peer, f"no UCX connection: {error}") from error
        self._out = tags(self._peer_channel)
        greeted: asyncio.Future[None] = self._loop.create_future()
        self._post_receive(bytearray(), next(self._in), partial(settle, self._connected, None))
        self._post_send(bytearray(), next(self._out), partial(settle, greeted, None))
        await self._connected
        await greeted

    def send(self, burst: Sequence[Operation]) -> None:
        """See `Pair`. After an abort neither launches anything."""
        numbered = [(next(self._out), operation) for operation in burst]
        device = burst[0].tensor.device
        if device.type == "cuda":
            self._send_computed(torch.cuda.current_stream(device).record_event(), numbered)
        else:
            self._send_all(numbered)

    def receive(self, burst: Sequence[Operation]) -> None:
        """See `Pair`."""
        for tensor, done in burst:
            if not self._aborted:
                self._post_receive(memory_of(tensor), next(self._in), done)

    def _send_computed(self, computed: Any, numbered: Numbered) -> None:
        """Once the device has written what is to be sent."""
        if computed.query():
            self._send_all(numbered)
        else:
            self._loop.call_later(_COMPUTED_POLL_S, self._send_computed, computed, numbered)

    def _send_all(self, numbered: Numbered) -> None:
        for tag, (tensor, done) in numbered:
            if not self._aborted:
                self._post_send(memory_of(tensor), tag, done)

    def _post_send(self, memory: Any, tag: int, done: Callable[[], None]) -> None:
        try:
            self._worker.send(self._endpoint, memory, tag, partial(self._sent, done))
            self._sends += 1
        except UcxError as error:
            self._broken(error)

    def _post_receive(self, memory: Any, tag: int, done: Callable[[], None]) -> None:
        over = partial(self._received, tag, done)
        try:
            self._receives[tag] = self._worker.receive(self._endpoint, memory, tag, over)
        except UcxError as error:
            self._broken(error)

    def _sent(self, done: Callable[[], None], error: Exception | None) -> None:
        self._sends -= 1
        self._over(done, error)

    def _received(self, tag: int, done: Callable[[], None], error: Exception | None) -> None:
        del self._receives[tag]
        self._over(done, error)

    def _over(self, done: Callable[[], None], error: Exception | None) -> None:
        if error is not None:
            self._broken(error)
        elif not self._aborted:
            done()

    def _dead(self) -> None:
        self._broken(UcxError("the peer is gone"))

    def _broken(self, error: Exception) -> None:
        if self._aborted:
            return
        if self._connected.done():
            self.failed(str(error))
        else:
            fail(self._connected, RankFailed(self._peer, f"no UCX connection: {error}"))

    # -- the end ---------------------------------------------------------------------------------

    def abort(self) -> None:
        """See `Pair`.

        Receives that no message has matched are drained at once. With a peer that lives, what has
        begun goes on to its end, each side refuses what the other sent in vain, and says farewell
        behind its last message. A dead one's endpoint ends everything by itself. A peer that is
        neither is cut off when patience ends.
        """
        if self._aborted:
            return
        self._aborted = True
        fail(self._connected, RankFailed(self._peer, "the connection was given up"))
        self._deadline_s = self._loop.time() + self._patience_s
        if self._endpoint is not None and not self._worker.closed:
            self._drain()
            self._post_receive(bytearray(), _farewell(self._channel), _nothing)
        self._settle()

    def _settle(self) -> None:
        if self._worker.closed:
            self._endpoint = None
        elif self._endpoint is not None:
            self._worker.refuse(self._channel << _NUMBER_BITS, _CHANNEL_MASK)
            if not self._sends and not self._said_farewell:
                self._said_farewell = True
                self._post_send(bytearray(), _farewell(self._peer_channel), _nothing)
            if self._may_be_closed():
                endpoint, self._endpoint = self._endpoint, None
                self._drain()
                self._worker.end(endpoint)
        if self._endpoint is None and not self._sends and not self._receives:
            settle(self.quiet, None)
        else:
            self._loop.call_later(_SETTLE_POLL_S, self._settle)

    def _may_be_closed(self) -> bool:
        # The peer's farewell is one of the receives.
        nothing_is_under_way = not self._sends and not self._receives
        dead = not self._endpoint.alive
        return nothing_is_under_way or dead or self._loop.time() > self._deadline_s

    def _drain(self) -> None:
        """Let no message match a receive any more."""
        for tag, request in self._receives.items():
            if not request.completed:
                with suppress(UcxError):  # then the endpoint's end ends it
                    self._worker.drain(tag)


def tags(channel: int) -> Iterator[int]:
    """The tags of one direction, in the order of its payloads. They come again after 2**32, when
    nothing of the first time is under way: a window is far smaller."""
    for number in itertools.count():
        yield channel << _NUMBER_BITS | number % _FAREWELL


def _farewell(channel: int) -> int:
    return channel << _NUMBER_BITS | _FAREWELL


def make_card(channel: int, address: bytes) -> bytes:
    """What the other side needs to know."""
    body = _CHANNEL.pack(channel) + address
    return _HEAD.pack(_MAGIC, len(body), zlib.crc32(body)) + body


def read_card(card: bytes) -> tuple[int, bytes]:
    """Channel and UCX address. Raises `ProtocolError`; UCX itself believes any bytes."""
    if len(card) <= _HEAD.size + _CHANNEL.size:
        raise ProtocolError(f"UCX card has {len(card)} bytes; allowed: more")
    body = card[_HEAD.size :]
    head, right = _HEAD.unpack_from(card), (_MAGIC, len(body), zlib.crc32(body))
    if head != right:
        raise ProtocolError(f"UCX card has magic, length and checksum {head}; allowed: {right}")
    (channel,) = _CHANNEL.unpack_from(body)
    return channel, body[_CHANNEL.size :]


def _nothing() -> None:
    """For messages that say all by coming."""
