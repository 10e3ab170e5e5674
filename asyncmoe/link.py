"""One authenticated, framed connection to a peer, on a non-blocking stream socket.

What goes over it is written by a `Writer` and read by a `Reader`; this is what is around them: when
the loop has to call which, heartbeats that keep an idle link alive, and how a link ends, orderly or
not. A silent peer is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from asyncmoe.errors import FAREWELL, PeerLost, ProtocolError
from asyncmoe.packed import Buffer
from asyncmoe.reader import Reader, make_reader
from asyncmoe.transport import Limits, Parcel, Posted
from asyncmoe.twophase import Inbound, Outbound, Transfer
from asyncmoe.wire import FrameKind, encode_signal
from asyncmoe.writer import Writer, make_writer

_WRITES_PER_WAKE = 16
_TICKS_PER_TIMEOUT = 5  # a heartbeat per tick without other output; lost after a silent timeout


class LinkHandler(Protocol):
    """Who gives the frames of a link their meaning. All calls are made on the loop."""

    inbound: Inbound  # takes the messages, and the parcels if they are whole
    whole: bool  # whether payloads follow their columns on this link

    def on_announced(self, transfer: Transfer) -> None:
        """A parcel's control frame is here, and its payload is to come elsewhere.

        Raises `ProtocolError` to refuse it, which costs the peer the connection.
        """

    def on_notice(self) -> None:
        """A notice: something has changed that both sides see. Raises `ProtocolError` likewise."""

    def on_taken(self, parcel_class: int, count: int) -> None:
        """The peer has `count` more parcels of a class whole. Raises `ProtocolError` likewise."""

    def on_leave(self) -> None:
        """The peer sends nothing more: what it has sent elsewhere is due before the link is lost.
        Raises `ProtocolError` likewise."""

    def on_lost(self, error: PeerLost) -> None:
        """The link is gone, not by this side's wish; called once, from the loop itself."""


class Link:
    """A connection that has passed the handshake. Heartbeats run at once, reading after `open`."""

    def __init__(
        self, sock: socket.socket, rank: int, peer: int, limits: Limits, peer_timeout_s: float
    ) -> None:
        self.peer = peer
        self.error: PeerLost | None = None  # why nothing can be sent any more
        self._sock, self._rank, self._limits = sock, rank, limits
        self._loop = asyncio.get_running_loop()
        self._writer = make_writer(sock, self._wait_to_write, self._fault)
        self._reader: Reader | None = None
        self._readable: Callable[[], object] | None = None  # of the reader
        self._handler: LinkHandler | None = None
        self._timeout_s = peer_timeout_s
        self._tick_s = peer_timeout_s / _TICKS_PER_TIMEOUT
        self._timer = self._loop.call_later(self._tick_s, self._tick)
        self._silent_ticks = 0
        self._reads_before = 0  # at the last tick
        self._sent_before = 0  # bytes, likewise
        self._again: asyncio.Handle | None = None  # reads on in the loop's next turn
        self._ended: asyncio.Future[None] | None = None  # set by `close`: resolved at the end
        sock.setblocking(False)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def open(self, handler: LinkHandler) -> None:
        """Begin to read; everything that arrived since the handshake is handed over now."""
        self._handler = handler
        if self.error is not None:
            self._loop.call_soon(handler.on_lost, self.error)
            return
        self._silent_ticks = 0
        self._reader = make_reader(
            self._sock,
            handler.inbound,
            self._limits,
            handler.whole,
            handler.on_announced,
            self._on_signal,
        )
        self._readable = self._reader.on_readable(self._on_read, self._on_trouble)
        self._loop.add_reader(self._sock, self._readable)

    def send(self, buffers: Sequence[Buffer], on_sent: Callable[[], object] | None = None) -> None:
        """Queue one frame; see `Writer.send`. Raises `PeerLost` if the link is lost already."""
        if self.error is not None:
            self.check()
        self._writer.send(buffers, on_sent)

    def post(self, outbound: Outbound, parcel: Parcel) -> Posted:
        """Queue a parcel whole; see `Writer.post`. Raises `PeerLost` likewise."""
        if self.error is not None:
            self.check()
        return self._writer.post(outbound, parcel)

    def poster(self, outbound: Outbound) -> Callable[[Parcel], Posted] | None:
        """`post` for that direction, compiled, if that is there. It refers to this link."""
        writer: Any = self._writer
        return None if isinstance(writer, Writer) else writer.poster(outbound, self)

    def repeater(self, frame: bytes) -> Callable[[], object]:
        """What queues this very frame, each time that it is called while the link is not lost."""
        return self._writer.repeater(frame)

    def check(self) -> None:
        """Raise `PeerLost` if nothing can be sent any more."""
        if self.error is not None:
            # A new one each time: an exception raised again keeps all its callers' frames alive.
            raise PeerLost(self.peer, self.error.reason)

    async def close(self) -> None:
        """Send what is queued and a goodbye, wait until the peer has seen it, and disconnect.

        Takes at most the peer timeout. Nothing more is handed over, `on_lost` neither. Idempotent.
        """
        if self._ended is None:
            self._ended = self._loop.create_future()
            if self.error is not None:
                self._ended.set_result(None)
                return
            self.error = PeerLost(self.peer, "this rank closed its transport")
            self._timer.cancel()
            self._stop_reading()
            self._loop.add_reader(self._sock, self._discard)
            self._writer.send([encode_signal(FrameKind.GOODBYE, self._rank)], self._no_more)
        try:
            async with asyncio.timeout(self._timeout_s):
                await asyncio.shield(self._ended)
        except TimeoutError:
            pass
        finally:
            self._disconnect()

    def drop(self, reason: str) -> None:
        """Disconnect at once, by this side's wish."""
        if self.error is None:
            self.error = PeerLost(self.peer, reason)
        self._disconnect()

    def lose(self, reason: str) -> None:
        """The peer, or the way to it, is gone: disconnect and report it. Idempotent."""
        if self.error is not None:
            return
        self.error = PeerLost(self.peer, reason)
        self._disconnect()
        if self._handler is not None:
            # Not from here: this may be deep inside a `post` of the one who is to be told.
            self._loop.call_soon(self._handler.on_lost, self.error)

    def _disconnect(self) -> None:
        if self._sock.fileno() < 0:
            return
        self._timer.cancel()
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        self._sock.close()
        self._writer.stop()  # the descriptor may soon be somebody else's
        self._stop_reading()
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    def _tick(self) -> None:
        # Silence is counted in ticks of this loop: if this rank itself was busy for long, a single
        # tick fires when it is back, and the peer is not blamed.
        self._timer = self._loop.call_later(self._tick_s, self._tick)
        if self._reader is not None:
            reads, before = self._reader.reads, self._reads_before
            self._silent_ticks = self._silent_ticks + 1 if reads == before else 1
            self._reads_before = reads
            if self._silent_ticks >= _TICKS_PER_TIMEOUT:
                self.lose(f"silent for {self._timeout_s:g} s")
                return
        writer = self._writer
        if writer.idle and writer.sent == self._sent_before:
            writer.send([encode_signal(FrameKind.HEARTBEAT, self._rank)])
        self._sent_before = writer.sent

    # -- sending ---------------------------------------------------------------------------------

    def _wait_to_write(self) -> None:
        self._loop.add_writer(self._sock, self._on_writable)

    def _on_writable(self) -> None:
        if self._writer.write(_WRITES_PER_WAKE) and self._sock.fileno() >= 0:
            self._loop.remove_writer(self._sock)

    def _no_more(self) -> None:
        """The goodbye is out: tell the peer's kernel that no byte follows."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def _fault(self, error: OSError) -> None:
        if self._ended is None:
            self.lose(error.strerror or repr(error))
        else:
            self._disconnect()

    # -- receiving -------------------------------------------------------------------------------

    # The loop calls the reader itself, which reads up to the call that says that there is no more,
    # or it is over: of a connection that was reset, uvloop tells once and never again, also while
    # there are bytes before the reset.

    def _on_read(self, more: int) -> None:
        """There may be more, or it is over."""
        if more > 0:
            if self._again is None:
                self._again = self._loop.call_soon(self._read_on)
            return
        try:
            if self._handler is not None:
                self._handler.on_leave()
        except ProtocolError as error:
            self._on_trouble(error)
        self.lose("the connection ended without a goodbye")

    def _on_trouble(self, error: Exception) -> None:
        """Reading failed, or what was read is not allowed."""
        if isinstance(error, OSError):
            self._fault(error)
        elif isinstance(error, ProtocolError):
            self.lose(f"malformed frame: {error}")
        else:
            raise error

    def _read_on(self) -> None:
        """Let others have their turn of the loop, then go on."""
        self._again = None
        if self._readable is not None:
            self._readable()

    def _stop_reading(self) -> None:
        if self._reader is not None:
            self._reader.stop()
            self._reader = self._readable = None

    def _on_signal(self, kind: int, parcel_class: int, count: int) -> None:
        assert self._handler is not None
        if kind == FrameKind.GOODBYE:
            self._handler.on_leave()
            self.lose(FAREWELL)
        elif kind == FrameKind.NOTICE:
            self._handler.on_notice()
        else:
            self._handler.on_taken(parcel_class, count)

    def _discard(self) -> None:
        """Closing: read on so that the peer's kernel does not refuse what we sent, keep nothing."""
        try:
            got = self._sock.recv(1 << 16)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            got = b""
        if not got:
            self._disconnect()
