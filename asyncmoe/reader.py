"""Frames off a non-blocking stream socket: bytes go straight to where they belong.

What follows a prelude is scattered by `recvmsg_into` to its columns and its leased buffer, together
with the next prelude, so that a steady stream costs one system call a frame and no copy. Work per
call is bounded, so that a busy peer does not starve the others of the loop.

The one that `make_reader` gives is compiled where that is there (`native/src/columns/reader.cpp`).
It reads a little ahead, as far as the next columns are likely to reach, and is used like this one.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

from asyncmoe import native
from asyncmoe.transport import Limits
from asyncmoe.twophase import Inbound, Transfer, is_plain
from asyncmoe.wire import PRELUDE_BYTES, FrameKind, decode_prelude

_CALLS_PER_READ = 16
_BYTES_PER_READ = 4 << 20

OnParcel = Callable[[Transfer], None]
OnSignal = Callable[[int, int, int], None]


def make_reader(
    sock: socket.socket,
    inbound: Inbound,
    limits: Limits,
    whole: bool,
    on_parcel: OnParcel,
    on_signal: OnSignal,
) -> Reader:
    """As `Reader`, compiled if `inbound` is."""
    if is_plain(inbound):
        return Reader(sock, inbound, limits, whole, on_parcel, on_signal)
    reader: Reader = native.columns.Reader(sock.fileno(), inbound, whole, on_parcel, on_signal)
    return reader


class Reader:
    """Reads what one peer sends, and hands over what is whole."""

    def __init__(
        self,
        sock: socket.socket,
        inbound: Inbound,
        limits: Limits,
        whole: bool,
        on_parcel: OnParcel,
        on_signal: OnSignal,
    ) -> None:
        """Messages go to `inbound`. So do parcels if they are `whole` on this socket; if their
        payloads move elsewhere, `on_parcel` is told of each whose columns are here. `on_signal`:
        kind, class and rows of a frame without a body; heartbeats are not told.
        """
        self._sock: socket.socket | None = sock  # None: stopped
        self._inbound, self._limits, self._whole = inbound, limits, whole
        self._on_parcel, self._on_signal = on_parcel, on_signal
        self._head = memoryview(bytearray(PRELUDE_BYTES))
        self._wanted: list[memoryview] = [self._head]  # where incoming bytes go, in order
        self._left = PRELUDE_BYTES  # bytes up to the end of the next prelude
        self._transfer: Transfer | None = None  # the frame before that prelude: a parcel
        self._message: bytearray | None = None  # or a message
        self.reads = 0  # calls of `read`

    def on_readable(
        self, on_read: Callable[[int], object], on_trouble: Callable[[Exception], object]
    ) -> Callable[[], object]:
        """What the loop is to call when there is something: it reads, and tells what that returned,
        unless it is 0, or raised."""

        def called() -> None:
            try:
                if more := self.read():
                    on_read(more)
            except Exception as error:
                on_trouble(error)

        return called

    def read(self) -> int:
        """Take what is there, within bounds: 1 if there may be more, 0 if there is nothing more
        for now, or this was stopped, -1 if the peer has ended the stream.

        Raises `OSError`, and `ProtocolError` for a frame that is not allowed.
        """
        self.reads += 1
        budget = _BYTES_PER_READ
        for _ in range(_CALLS_PER_READ):
            if self._sock is None:
                return 0
            try:
                got = self._sock.recvmsg_into(self._wanted)[0]
            except (BlockingIOError, InterruptedError):
                return 0
            if not got:
                return -1
            self._take(got)
            budget -= got
            if budget <= 0:
                break
        return 1 if self._sock is not None else 0

    def stop(self) -> None:
        """Hand over nothing more, and never touch the socket again."""
        self._sock = None

    def _take(self, got: int) -> None:
        """Account for `got` bytes at the front of `_wanted`."""
        self._left -= got
        if self._left:
            _advance(self._wanted, got)
        if self._left <= PRELUDE_BYTES and self._within:
            self._finish()
        if self._left == 0 and self._sock is not None:
            self._begin()

    @property
    def _within(self) -> bool:
        return self._transfer is not None or self._message is not None

    def _begin(self) -> None:
        """A prelude is whole: find out where its frame goes."""
        self._wanted, self._left = [self._head], PRELUDE_BYTES
        prelude = decode_prelude(self._head, self._limits)
        if prelude.kind == FrameKind.PARCEL:
            self._transfer = transfer = self._inbound.accept(prelude)
            transfer.columns = columns = bytearray(prelude.column_bytes)
            body = [memoryview(columns)]
            if self._whole:
                body.append(transfer.payload)
        elif prelude.kind == FrameKind.MESSAGE:
            self._inbound.message(prelude)
            self._message = bytearray(prelude.payload_bytes)
            body = [memoryview(self._message)]
        else:
            if prelude.kind != FrameKind.HEARTBEAT:
                self._on_signal(prelude.kind, prelude.parcel_class, prelude.rows)
            return
        body = [view for view in body if view]
        self._left += sum(map(len, body))
        self._wanted = [*body, self._head]
        if not body:
            self._finish()

    def _finish(self) -> None:
        """The frame is whole."""
        message, self._message = self._message, None
        transfer, self._transfer = self._transfer, None
        if message is not None:
            self._inbound.deliver_message(bytes(message))
        elif transfer is not None and self._whole:
            self._inbound.arrived(transfer)
        elif transfer is not None:
            self._on_parcel(transfer)


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
