"""Frames onto a non-blocking stream socket: buffers go out as they are, without being joined.

The one that `make_writer` gives is compiled where that is there (`native/src/columns/writer.cpp`);
it is used like this one.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice

from asyncmoe import native
from asyncmoe.packed import Buffer
from asyncmoe.transport import Parcel, Posted
from asyncmoe.twophase import Outbound
from asyncmoe.wire import payload_memory

_BUFFERS_PER_CALL = 64

OnFull = Callable[[], object]
OnFault = Callable[[OSError], object]


def make_writer(sock: socket.socket, on_full: OnFull, on_fault: OnFault) -> Writer:
    """As `Writer`, compiled if that is there."""
    if native.columns is None:
        return Writer(sock, on_full, on_fault)
    writer: Writer = native.columns.Writer(sock.fileno(), on_full, on_fault)
    return writer


class Writer:
    """Sends frames to one peer, in order. A frame is *sent* once the kernel has its last byte."""

    def __init__(self, sock: socket.socket, on_full: OnFull, on_fault: OnFault) -> None:
        """`on_full` is called when the kernel takes no more for now: then `write` is due as soon
        as it does. `on_fault` is called when the socket is broken."""
        self._sock: socket.socket | None = sock  # None: stopped
        self._on_full, self._on_fault = on_full, on_fault
        self._queue: deque[Buffer] = deque()  # what has to go out, in order
        self._marks: deque[tuple[int, Callable[[], object]]] = deque()  # (offset, what to call)
        self._queued = 0  # bytes ever queued
        self.sent = 0  # bytes ever taken by the kernel

    @property
    def idle(self) -> bool:
        """Whether nothing waits."""
        return not self._queue

    def send(self, buffers: Iterable[Buffer], on_sent: Callable[[], object] | None = None) -> None:
        """Queue one frame. Its buffers must not change until `on_sent`, which is called once the
        kernel has all of them, maybe before this returns, or never if this is stopped first."""
        idle = not self._queue
        for buffer in buffers:
            if buffer:
                self._queue.append(buffer)
                self._queued += len(buffer)
        if on_sent is not None:
            self._marks.append((self._queued, on_sent))
        if idle and not self.write(1):
            self._on_full()

    def post(self, outbound: Outbound, parcel: Parcel) -> Posted:
        """Number a parcel and queue it with its payload. Raises as `Outbound.parcel`."""
        frame, posted = outbound.parcel(parcel)
        self.send((frame, payload_memory(parcel.payload)), partial(outbound.sent, posted))
        return posted

    def repeater(self, frame: bytes) -> Callable[[], object]:
        """What sends this very frame, each time that it is called."""
        return partial(self.send, (frame,))

    def write(self, most: int) -> bool:
        """Give the kernel what it takes, in at most `most` calls; whether nothing is left."""
        queue = self._queue
        for _ in range(most):
            taken = 0
            if queue:
                try:
                    taken = self._give()
                except (BlockingIOError, InterruptedError):
                    return False
                except OSError as error:
                    self._on_fault(error)
                    return True
            self._taken(taken)
            if not queue:
                return True
        return False

    def stop(self) -> None:
        """Forget everything, and never touch the socket again."""
        self._sock = None
        self._queue.clear()
        self._marks.clear()

    def _give(self) -> int:
        assert self._sock is not None
        return self._sock.sendmsg(islice(self._queue, _BUFFERS_PER_CALL))

    def _taken(self, count: int) -> None:
        """Account for bytes that the kernel has. What is called may send more."""
        queue, marks = self._queue, self._marks
        self.sent += count
        while count and count >= len(queue[0]):
            count -= len(queue.popleft())
        if count:
            queue[0] = memoryview(queue[0])[count:]
        while marks and marks[0][0] <= self.sent:
            marks.popleft()[1]()
