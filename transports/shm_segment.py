"""Shared memory between two ranks: who writes where, and how the memory comes to the other side.

A rank makes one segment for each peer and is its only writer; the peer maps it read-only. So no two
processes ever write to the same byte, and the memory management unit enforces it. The layout is the
same in both segments of a pair. `w` is who made the segment, `r` its peer:

    words    u32, each with one writer, `w`:
             waiting[class]          how often `w` has begun to wait for slots of `r` to come back
             closing                 1 once `w` flushes its last parcels
             sleeps                  how often `w` has begun to wait for something to take
             published[class]        how many parcels `w` has put into this segment
             reclaimed[class][slot]  generation of the payload in a slot of the *peer's* segment
                                     which `w` has read for the last time
    ring     [class][slot][64], preludes of parcels, in the order of `published`
    columns  [class][slot][slot_bytes], of the parcel whose payload begins in that slot
    slots    [class][slot][slot_bytes], payloads from `w` to `r`
    common   memory that is not the transport's own (`Transport.common`)

Memory that was never touched is none: most of it is the room that the largest parcels would take.

A segment is a memfd, whose descriptor goes over the pair's unix socket after the handshake. It has
no name, so nothing is left behind whoever is killed when, and no process but these two can open it.
It is sealed against shrinking, since reading behind the end of a file ends a process, and against
new writers. The reader checks seals and size before it maps anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import mmap
import os
import socket
import struct
import threading
import warnings
from dataclasses import dataclass

import numpy as np
import torch

from asyncmoe.errors import ConfigError, ProtocolError
from asyncmoe.transport import ParcelClass
from asyncmoe.wire import PRELUDE_BYTES

# Indices of words; those before the first are `waiting` of each class.
_CLOSING, _SLEEPS, _PUBLISHED, _RECLAIMED = 2, 3, 4, 16
_WORD_BYTES = 4
_PAGE_BYTES = 4096
_MODE = 0o600
_NOEXEC_SEAL = 8  # MFD_NOEXEC_SEAL of linux/memfd.h: some systems allow no memfd without it
_SEAL_FUTURE_WRITE = 16  # F_SEAL_FUTURE_WRITE of linux/fcntl.h: no new mapping may be writable
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
_RECORD = struct.Struct("<4sIQQQ")  # magic, version, slots, slot_bytes, common_bytes
_MAGIC = b"aShm"
_VERSION = 2


class Fence:
    """What this thread read and wrote before a call is done before all that it does after it.

    Python has no fences, but its locks are made of acquires and releases: what stands before a
    release does not move behind it, what stands behind an acquire does not move before it, and a
    release is not exchanged with an acquire behind it. So a release and then an acquire are a full
    fence, on x86 (where each is a locked instruction) and on ARM (where they keep their order).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()  # held but for the instant of a call

    def __call__(self) -> None:
        self._lock.release()
        self._lock.acquire()


@dataclass(frozen=True, slots=True)
class Geometry:
    """How a segment is divided; the same in both segments of a pair."""

    slots: int  # of each class
    slot_bytes: int
    common_bytes: int = 0

    @property
    def ring_at(self) -> int:
        """Where the rings begin, as all that follows in bytes."""
        return _pages((_RECLAIMED + len(ParcelClass) * self.slots) * _WORD_BYTES)

    @property
    def columns_at(self) -> int:
        """Where the memory for columns begins."""
        return self.ring_at + _pages(len(ParcelClass) * self.slots * PRELUDE_BYTES)

    @property
    def slots_at(self) -> int:
        """Where the slots begin."""
        return self.columns_at + len(ParcelClass) * self.class_bytes

    @property
    def class_bytes(self) -> int:
        """Bytes of the slots of one class."""
        return self.slots * self.slot_bytes

    @property
    def common_at(self) -> int:
        """Where the common memory begins."""
        return self.slots_at + len(ParcelClass) * self.class_bytes

    @property
    def size_bytes(self) -> int:
        """Bytes of a segment."""
        return self.common_at + self.common_bytes

    def count(self, nbytes: int) -> int:
        """Adjacent slots that a payload of `nbytes` takes; at least one."""
        return max(1, -(-nbytes // self.slot_bytes))


class Segment:
    """One mapping. It lasts until the last view of it is gone, also after `w` has died."""

    def __init__(self, geometry: Geometry, mapping: mmap.mmap) -> None:
        self.geometry = geometry
        self.memory = memoryview(mapping)
        self._words = self.memory[: geometry.ring_at].cast("I")
        self.closing = self._words[_CLOSING : _CLOSING + 1]  # as all words u32 [1]
        self.sleeps = self._words[_SLEEPS : _SLEEPS + 1]

    def waiting(self, kind: ParcelClass) -> memoryview:
        """How often its writer has begun to wait for slots of a class."""
        return self._words[kind - 1 : kind]

    def published(self, kind: ParcelClass) -> memoryview:
        """How many parcels of a class were put into this segment."""
        index = _PUBLISHED + kind - 1
        return self._words[index : index + 1]

    def reclaimed(self, kind: ParcelClass) -> memoryview:
        """The flags of the slots of the peer's segment, u32 [slots]."""
        first = _RECLAIMED + (kind - 1) * self.geometry.slots
        return self._words[first : first + self.geometry.slots]

    def ring(self, kind: ParcelClass) -> memoryview:
        """The preludes of a class, u8 [slots * 64]."""
        nbytes = self.geometry.slots * PRELUDE_BYTES
        first = self.geometry.ring_at + (kind - 1) * nbytes
        return self.memory[first : first + nbytes]

    def columns(self, kind: ParcelClass) -> memoryview:
        """The memory for columns of a class, u8 [slots * slot_bytes]."""
        return self._of_class(self.geometry.columns_at, kind)

    def payloads(self, kind: ParcelClass) -> memoryview:
        """The slots of a class, u8 [slots * slot_bytes]."""
        return self._of_class(self.geometry.slots_at, kind)

    @property
    def common(self) -> memoryview:
        """What is not the transport's own, u8 [common_bytes]."""
        return self.memory[self.geometry.common_at :]

    def _of_class(self, begin: int, kind: ParcelClass) -> memoryview:
        first = begin + (kind - 1) * self.geometry.class_bytes
        return self.memory[first : first + self.geometry.class_bytes]


def _pages(nbytes: int) -> int:
    return -(-nbytes // _PAGE_BYTES) * _PAGE_BYTES


def read_only_tensor(memory: memoryview) -> torch.Tensor:
    """`memory` as uint8 [n], without a copy. To write to it ends the process."""
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # that it is read-only
        return torch.from_numpy(np.frombuffer(memory, np.uint8))


async def exchange(sock: socket.socket, geometry: Geometry) -> tuple[Segment, Segment]:
    """Make a segment, give it to the peer at the other end of `sock`, and map the peer's.

    Returns (this rank's, the peer's). Raises `ProtocolError` if the peer's is not what this rank
    was told to expect, `ConfigError` if this system cannot make one, `OSError`.
    """
    mine, descriptor = make_segment(geometry)
    try:
        record = _RECORD.pack(_MAGIC, _VERSION, *_numbers(geometry))
        socket.send_fds(sock, [record], [descriptor])
    finally:
        os.close(descriptor)
    descriptor = await _receive(sock, geometry)
    try:
        return mine, map_segment(descriptor, geometry)
    finally:
        os.close(descriptor)


def make_segment(geometry: Geometry) -> tuple[Segment, int]:
    """A new segment and the descriptor that lets the peer map it. Raises `ConfigError`."""
    try:
        descriptor = _memfd()
        try:
            os.fchmod(descriptor, _MODE)
            os.ftruncate(descriptor, geometry.size_bytes)
            mapping = mmap.mmap(descriptor, geometry.size_bytes)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        except BaseException:
            os.close(descriptor)
            raise
    except (OSError, AttributeError) as error:
        raise ConfigError(
            f"transport shm needs sealed memory of {geometry.size_bytes} bytes (memfd of Linux 5.1 "
            f"or newer): {error}"
        ) from error
    return Segment(geometry, mapping), descriptor


def map_segment(descriptor: int, geometry: Geometry) -> Segment:
    """Map a peer's segment. Raises `ProtocolError` if it is not of this geometry, or not safe."""
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError as error:
        raise ProtocolError(f"segment is no sealed memory: {error}") from error
    if seals & _SEALS != _SEALS:
        raise ProtocolError(f"segment seals are {seals:#x}; allowed: {_SEALS:#x} and more")
    size = os.fstat(descriptor).st_size
    if size != geometry.size_bytes:
        raise ProtocolError(f"segment size is {size}; allowed: {geometry.size_bytes}")
    return Segment(geometry, mmap.mmap(descriptor, size, prot=mmap.PROT_READ))


def check_record(data: bytes, geometry: Geometry) -> None:
    """Raise `ProtocolError` unless the peer says that its segment is as ours."""
    if len(data) != _RECORD.size:
        raise ProtocolError(f"segment record has {len(data)} bytes; allowed: {_RECORD.size}")
    magic, version, *numbers = _RECORD.unpack(data)
    if (magic, version) != (_MAGIC, _VERSION):
        raise ProtocolError(
            f"segment magic and version are {magic!r} and {version}; "
            f"allowed: {_MAGIC!r} and {_VERSION}"
        )
    names = "slots", "slot_bytes", "common_bytes"
    for name, value, allowed in zip(names, numbers, _numbers(geometry), strict=True):
        if value != allowed:
            raise ProtocolError(
                f"segment field {name} is {value}; allowed: {allowed}, as the configuration of "
                "this rank has it"
            )


def _numbers(geometry: Geometry) -> tuple[int, int, int]:
    return geometry.slots, geometry.slot_bytes, geometry.common_bytes


def _memfd() -> int:
    """Anonymous memory of nobody else's."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create("asyncmoe", flags | _NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:  # this Linux does not know that flag
            raise
        return os.memfd_create("asyncmoe", flags)


async def _receive(sock: socket.socket, geometry: Geometry) -> int:
    """The descriptor of the peer's segment, after its record has been checked."""
    data, descriptors = b"", list[int]()
    try:
        while len(data) < _RECORD.size:
            await _readable(sock)
            with contextlib.suppress(BlockingIOError):
                piece, more, _, _ = socket.recv_fds(
                    sock, _RECORD.size - len(data), 1, socket.MSG_CMSG_CLOEXEC
                )
                descriptors += more
                data += piece
                if not piece:
                    raise ProtocolError("the other side ended the exchange of segments")
        check_record(data, geometry)
        if len(descriptors) != 1:
            raise ProtocolError(f"segment came with {len(descriptors)} descriptors; allowed: 1")
        return descriptors.pop()
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


async def _readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(sock, wake)
    try:
        await ready
    finally:
        loop.remove_reader(sock)
