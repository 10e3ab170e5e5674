"""What one rank writes to one peer over NIXL: which parcels have slots, what is written next.

What `make_sending` gives is compiled where that is there (`native/src/columns/nixl_sending.cpp`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from asyncmoe import native
from asyncmoe.transport import Parcel, ParcelClass, Posted
from asyncmoe.transports.nixl_slots import SenderSlots
from asyncmoe.transports.nixl_wire import Freed, NoteKind, Written, decode_note, encode_note
from asyncmoe.transports.shm_segment import Geometry
from asyncmoe.twophase import Outbound
from asyncmoe.wire import readdress

BATCH_BYTES = 3 << 19  # that are written together, and that the loop may copy in a turn
WRITE_BYTES = 4 << 20  # of a larger parcel in one write

Place = tuple[int, int, int]  # address, bytes and device
Places = NDArray[np.uint64]  # [pieces, 3] of that, as the library takes them


def make_sending(
    outbound: Outbound,
    geometry: Geometry,
    address: int,
    generation: int,
    host_device: int,
    compiled: bool,
) -> Sending:
    """As `Sending`, compiled if asked for: then payloads must be in host memory."""
    if not compiled:
        return Sending(outbound, geometry, address, generation, host_device)
    sending: Sending = native.columns.NixlSending(
        outbound,
        geometry.slots,
        geometry.slot_bytes,
        address,
        generation,
        host_device,
        BATCH_BYTES,
        WRITE_BYTES,
    )
    return sending


class Batch:
    """What is written together, and what is due behind it."""

    __slots__ = ("entries", "frames", "locals", "nbytes", "note", "payloads", "remotes", "touched")

    def __init__(self) -> None:
        self.payloads: list[torch.Tensor] = []  # whose memory is read
        self.locals: list[Place] = []  # which parts of it
        self.remotes: list[Place] = []  # and where they go
        self.frames: list[bytes] = []  # control frames of the parcels that are then under way
        self.nbytes = 0
        self.note = b""
        self.entries: list[Written] = []
        self.touched: list[tuple[Outgoing, int]] = []  # and how many bytes of each

    @property
    def local(self) -> Places:
        """Which parts of the payloads are read."""
        return np.array(self.locals, np.uint64)

    @property
    def remote(self) -> Places:
        """Where they go."""
        return np.array(self.remotes, np.uint64)


class Outgoing:
    """A parcel that is not whole at the peer."""

    __slots__ = ("begun", "first", "frame", "nbytes", "payload", "posted", "sequence", "unwritten")

    def __init__(
        self,
        frame: bytes,
        posted: Posted,
        payload: torch.Tensor,
        sequence: int,
    ) -> None:
        self.frame, self.posted, self.payload, self.sequence = frame, posted, payload, sequence
        self.nbytes = payload.nbytes
        self.first = -1  # of its slots, or -1: it has none yet
        self.begun = 0  # bytes that the library has
        self.unwritten = self.nbytes  # bytes whose source is not free


class Sending:
    """Both classes, in the order posted each; `address` is that of the arena at the peer, and
    `host_device` what the library takes host memory at this side to be of."""

    def __init__(
        self,
        outbound: Outbound,
        geometry: Geometry,
        address: int,
        generation: int,
        host_device: int,
    ) -> None:
        self._outbound, self._generation = outbound, generation
        self._lanes = {
            kind: _Lane(outbound, kind, geometry, address, host_device)
            for kind in (ParcelClass.COMBINE, ParcelClass.DISPATCH)  # the first goes first
        }

    @property
    def waits(self) -> bool:
        """Whether there are parcels of which the library does not have everything."""
        return any(lane.queue for lane in self._lanes.values())

    @property
    def out(self) -> int:
        """Payloads that the peer has not read for the last time."""
        return sum(lane.slots.out for lane in self._lanes.values())

    def post(self, parcel: Parcel) -> Posted:
        """See `Transport`."""
        return self._lanes[parcel.kind].post(parcel)

    def next_batch(self) -> Batch | None:
        """What there is, combine parcels first, up to a write's bound; None if there is nothing,
        or there are no slots for it."""
        batch = Batch()
        for lane in self._lanes.values():
            lane.load(batch)
        if not batch.touched:
            return None
        batch.note = encode_note(NoteKind.WRITTEN, self._generation, batch.entries)
        return batch

    def written_out(self, batch: Batch) -> None:
        """Nothing reads the batch's sources any more."""
        for outgoing, nbytes in batch.touched:
            outgoing.unwritten -= nbytes
            if not outgoing.unwritten:
                self._outbound.sent(outgoing.posted)

    def on_freed(self, note: bytes) -> None:
        """A notification FREED. Raises `ProtocolError` if it is not allowed."""
        freed: Sequence[Written | Freed] = decode_note(note)[1]
        for entry in freed:
            assert isinstance(entry, Freed)
            self._lanes[ParcelClass(entry.kind)].slots.give_back(entry.first, entry.generation)

    def clear(self) -> None:
        """Forget everything that the library does not have."""
        for lane in self._lanes.values():
            lane.queue.clear()


class _Lane:
    """What this rank sends to one peer in one class."""

    def __init__(
        self,
        outbound: Outbound,
        kind: ParcelClass,
        geometry: Geometry,
        address: int,
        host_device: int,
    ) -> None:
        self.slots = SenderSlots(geometry)
        self.queue: deque[Outgoing] = deque()
        self._outbound, self._kind, self._geometry = outbound, kind, geometry
        self._address = address + (kind - 1) * geometry.class_bytes
        self._host_device = host_device
        self._sequence = 0

    def post(self, parcel: Parcel) -> Posted:
        """See `Transport`."""
        frame, posted = self._outbound.parcel(parcel)
        self.queue.append(Outgoing(frame, posted, parcel.payload, self._sequence))
        self._sequence += 1
        return posted

    def load(self, batch: Batch) -> None:
        """Add to `batch` what fits."""
        while self.queue:
            head, size = self.queue[0], 0
            if head.nbytes:
                small = head.nbytes <= BATCH_BYTES
                fits = batch.nbytes + head.nbytes <= BATCH_BYTES if small else not batch.entries
                if not fits:
                    return  # it goes in the next
                # Not before now: the fewer slots are out, the more of them are in the caches.
                if head.first < 0 and not self._find_slots(head):
                    return
                size = min(head.nbytes if small else WRITE_BYTES, head.nbytes - head.begun)
                self._add_piece(batch, head, size)
            batch.touched.append((head, size))
            head.begun += size
            if head.begun == head.nbytes:
                self.queue.popleft()
                batch.frames.append(head.frame)

    def _add_piece(self, batch: Batch, head: Outgoing, size: int) -> None:
        payload = head.payload
        device = payload.get_device() if payload.is_cuda else 0
        target = self._address + head.first * self._geometry.slot_bytes + head.begun
        batch.payloads.append(payload)
        source = payload.data_ptr() + head.begun
        batch.locals.append((source, size, device if payload.is_cuda else self._host_device))
        batch.remotes.append((target, size, device))
        batch.nbytes += size
        batch.entries.append(Written(int(self._kind), size, head.sequence))

    def _find_slots(self, head: Outgoing) -> bool:
        count = self._geometry.count(head.nbytes)
        first = self.slots.find(count)
        if first < 0:
            return False
        head.frame = readdress(head.frame, first + 1, self.slots.next_generation(first))
        self.slots.take(first, count)
        head.first = first
        return True
