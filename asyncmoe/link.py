"""One authenticated, framed connection to a peer, on a non-blocking stream socket.

Outgoing frames are lists of buffers that go out through `sendmsg` without being joined; a frame is
*sent* when the kernel has taken its last byte. Incoming bytes are scattered by `recvmsg_into`
straight to where the handler wants them, together with the next prelude, so that a steady stream
costs one system call a frame, one more a wake-up, and no copy. Work per wake-up is bounded, so that
a busy peer does not starve the others of the loop. Heartbeats keep an idle link alive; a silent one
is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice
from typing import Protocol

from asyncmoe import native
from asyncmoe.errors import FAREWELL, PeerLost, ProtocolError
from asyncmoe.packed import Buffer
from asyncmoe.transport import Limits
from asyncmoe.wire import (
    PRELUDE_BYTES,
    FrameKind,
    Prelude,
    decode_prelude,
    encode_signal,
)

_READS_PER_WAKE = 16
_READ_BYTES_PER_WAKE = 4 << 20
_WRITES_PER_WAKE = 16
_BUFFERS_PER_WRITE = 64
_TICKS_PER_TIMEOUT = 5  # a heartbeat per tick without other output; lost after a silent timeout


class LinkHandler(Protocol):
    """Who gives the frames of a link their meaning. All calls are made on the loop."""

    def on_frame(self, prelude: Prelude) -> Sequence[memoryview]:
        """A parcel or message begins: the memory for what follows its prelude on this link.

        Raises `ProtocolError` to refuse it, which costs the peer the connection.
        """

    def on_filled(self) -> None:
        """That memory is filled. Raises `ProtocolError` as `on_frame`."""

    def on_notice(self) -> None:
        """A notice: something has changed that both sides see. Raises `ProtocolError` likewise."""

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
        self._send, self._receive = _calls(sock)
        self._loop = asyncio.get_running_loop()
        self._handler: LinkHandler | None = None
        self._timeout_s = peer_timeout_s
        self._tick_s = peer_timeout_s / _TICKS_PER_TIMEOUT
        self._timer = self._loop.call_later(self._tick_s, self._tick)
        self._silent_ticks = 0
        self._wrote = False
        self._queue: deque[Buffer] = deque()  # what has to go out, in order
        self._marks: deque[tuple[int, Callable[[], object]]] = deque()  # (offset, what to call)
        self._queued = 0  # bytes ever queued
        self._sent = 0  # bytes ever taken by the kernel
        self._head = memoryview(bytearray(PRELUDE_BYTES))
        self._wanted: list[memoryview] = [self._head]  # where incoming bytes go, in order
        self._left = PRELUDE_BYTES  # bytes up to the end of the next prelude
        self._filling = False  # whether the handler's memory stands before that prelude
        self._again: asyncio.Handle | None = None  # reads on in the loop's next turn
        self._ended: asyncio.Future[None] | None = None  # set by `close`: resolved at the end
        sock.setblocking(False)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def open(self, handler: LinkHandler) -> None:
        """Begin to read; everything that arrived since the handshake is handed over now."""
        self._handler = handler
        if self.error is None:
            self._silent_ticks = 0
            self._loop.add_reader(self._sock, self._on_readable)
        else:
            self._loop.call_soon(handler.on_lost, self.error)

    def send(self, buffers: Sequence[Buffer], on_sent: Callable[[], object] | None = None) -> None:
        """Queue one frame. Its buffers must not change until `on_sent`, which is called once the
        kernel has all of them, maybe before this returns, or never if the link is lost first.

        Raises `PeerLost` if it is lost already.
        """
        self.check()
        self._enqueue(buffers, on_sent)

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
            self._loop.add_reader(self._sock, self._discard)
            self._enqueue([encode_signal(FrameKind.GOODBYE, self._rank)], self._no_more)
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
        self._send = self._receive = _closed  # the descriptor may soon be somebody else's
        self._queue.clear()
        self._marks.clear()
        self._wanted.clear()
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    def _tick(self) -> None:
        # Silence is counted in ticks of this loop: if this rank itself was busy for long, a single
        # tick fires when it is back, and the peer is not blamed.
        self._timer = self._loop.call_later(self._tick_s, self._tick)
        if self._handler is not None:
            self._silent_ticks += 1
            if self._silent_ticks >= _TICKS_PER_TIMEOUT:
                self.lose(f"silent for {self._timeout_s:g} s")
                return
        if not self._wrote and not self._queue:
            self._enqueue([encode_signal(FrameKind.HEARTBEAT, self._rank)], None)
        self._wrote = False

    # -- sending ---------------------------------------------------------------------------------

    def _enqueue(self, buffers: Sequence[Buffer], on_sent: Callable[[], object] | None) -> None:
        idle = not self._queue
        for buffer in buffers:
            if buffer:
                self._queue.append(buffer)
                self._queued += len(buffer)
        if on_sent is not None:
            self._marks.append((self._queued, on_sent))
        if idle and not self._write(1):
            self._loop.add_writer(self._sock, self._on_writable)

    def _on_writable(self) -> None:
        if self._write(_WRITES_PER_WAKE) and self._sock.fileno() >= 0:
            self._loop.remove_writer(self._sock)

    def _write(self, most: int) -> bool:
        """Give the kernel what it takes, in at most `most` calls; whether nothing is left."""
        queue = self._queue
        for _ in range(most):
            try:
                taken = self._send(queue)
            except OSError as error:
                self._fault(error)
                return True
            if taken < 0:
                return False
            self._wrote = True
            self._sent += taken
            while taken and taken >= len(queue[0]):
                taken -= len(queue.popleft())
            if taken:
                queue[0] = memoryview(queue[0])[taken:]
            marks = self._marks
            while marks and marks[0][0] <= self._sent:
                marks.popleft()[1]()
            if not queue:
                return True
        return False

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

    def _on_readable(self) -> None:
        # Up to the call that says that there is no more, or it is over: of a connection that was
        # reset, uvloop tells once and never again, also while there are bytes before the reset.
        budget = _READ_BYTES_PER_WAKE
        for _ in range(_READS_PER_WAKE):
            try:
                got = self._receive(self._wanted)
            except OSError as error:
                self._fault(error)
                return
            if got < 0:
                return
            if not got:
                self.lose("the connection ended without a goodbye")
                return
            self._silent_ticks = 0
            try:
                self._take(got)
            except ProtocolError as error:
                self.lose(f"malformed frame: {error}")
                return
            budget -= got
            if self.error is not None:
                return
            if budget <= 0:
                break
        if self._again is None:
            self._again = self._loop.call_soon(self._read_on)

    def _read_on(self) -> None:
        """Let others have their turn of the loop, then go on."""
        self._again = None
        if self.error is None:
            self._on_readable()

    def _take(self, got: int) -> None:
        """Account for `got` bytes at the front of `_wanted`."""
        self._left -= got
        if self._left:
            _advance(self._wanted, got)
        if self._filling and self._left <= PRELUDE_BYTES:
            self._filling = False
            self._filled()
        if self._left == 0 and self.error is None:
            self._begin()

    def _begin(self) -> None:
        """A prelude is whole: ask where its frame goes."""
        assert self._handler is not None
        self._wanted, self._left = [self._head], PRELUDE_BYTES
        prelude = decode_prelude(self._head, self._limits)
        if prelude.kind == FrameKind.GOODBYE:
            self.lose(FAREWELL)
        elif prelude.kind == FrameKind.NOTICE:
            self._handler.on_notice()
        elif prelude.kind != FrameKind.HEARTBEAT:
            body = [view for view in self._handler.on_frame(prelude) if view]
            self._left = sum(map(len, body)) + PRELUDE_BYTES
            self._wanted = [*body, self._head]
            self._filling = bool(body)
            if not body:
                self._filled()

    def _filled(self) -> None:
        assert self._handler is not None
        self._handler.on_filled()

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


def _calls(
    sock: socket.socket,
) -> tuple[Callable[[Iterable[Buffer]], int], Callable[[Iterable[memoryview]], int]]:
    """How the socket is written from some buffers, and read into some.

    Both return a number of bytes, -1 if they would have to wait, and raise `OSError`.
    """
    if native.columns is not None:
        fd = sock.fileno()
        return partial(native.columns.send, fd), partial(native.columns.receive, fd)

    def send(buffers: Iterable[Buffer]) -> int:
        with contextlib.suppress(BlockingIOError, InterruptedError):
            return sock.sendmsg(islice(buffers, _BUFFERS_PER_WRITE))
        return -1

    def receive(buffers: Iterable[memoryview]) -> int:
        with contextlib.suppress(BlockingIOError, InterruptedError):
            return sock.recvmsg_into(buffers)[0]
        return -1

    return send, receive


def _closed(buffers: object) -> int:
    raise OSError(errno.EBADF, "the connection is closed")


def _advance(views: list[memoryview], count: int) -> None:
    """Drop the first `count` bytes of `views`."""
    whole = 0
    for view in views:
        if count < len(view):
            break
        count -= len(view)
        whole += 1
    del views[:whole]
    if count:
        views[0] = views[0][count:]
