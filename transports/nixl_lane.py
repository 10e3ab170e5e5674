"""What one rank sends to one peer in one class: which parcels have slots, what is written next."""

from __future__ import annotations

from collections import deque

import torch

from asyncmoe.transport import Parcel, ParcelClass, Posted
from asyncmoe.transports.nixl_agent import Piece
from asyncmoe.transports.nixl_courier import BATCH_BYTES, WRITE_BYTES, Batch
from asyncmoe.transports.nixl_slots import SenderSlots
from asyncmoe.transports.nixl_wire import Written
from asyncmoe.transports.shm_segment import Geometry
from asyncmoe.twophase import Outbound
from asyncmoe.wire import readdress


class SendLane:
    """What this rank sends to one peer in one class, in the order posted."""

    def __init__(
        self, outbound: Outbound, kind: ParcelClass, geometry: Geometry, arena_address: int
    ) -> None:
        self.slots = SenderSlots(geometry)
        self._outbound, self._kind, self._geometry = outbound, kind, geometry
        self._address = arena_address + (kind - 1) * geometry.class_bytes
        self._sequence = 0
        self._starved = 0  # parcels that found no slots
        self._queue: deque[Outgoing] = deque()  # not all of them is with the library

    @property
    def waits(self) -> bool:
        """Whether parcels are left, which can only be for want of slots."""
        return bool(self._queue)

    def post(self, parcel: Parcel) -> Posted:
        """See `Transport`."""
        nbytes = parcel.payload.nbytes
        count = self._geometry.count(nbytes)
        first, generation = -1, None
        if nbytes and not self._starved:
            first = self.slots.find(count)
            if first >= 0:
                generation = self.slots.next_generation(first)
        frame, posted = self._outbound.parcel(parcel, first + 1, generation)
        if first >= 0:
            self.slots.take(first, count)
        elif nbytes:
            self._starved += 1
        self._queue.append(Outgoing(frame, posted, parcel.payload, nbytes, first, self._sequence))
        self._sequence += 1
        return posted

    def load(
        self,
        batch: Batch,
        entries: list[Written],
        touched: list[tuple[Outgoing, int]],
    ) -> None:
        """Add to `batch` what fits, and to `touched` which parcels and how much of each."""
        while self._queue:
            head, size = self._queue[0], 0
            if head.nbytes:
                small = head.nbytes <= BATCH_BYTES
                most = BATCH_BYTES - batch.nbytes if small else WRITE_BYTES
                if (small and head.nbytes > most) or (batch.pieces and not small):
                    return  # it goes in the next
                if head.first < 0 and not self._find_slots(head):
                    return  # for those that come back
                size = min(most, head.nbytes - head.begun)
                target = self._address + head.first * self._geometry.slot_bytes + head.begun
                batch.pieces.append(Piece(head.payload, head.begun, size, target))
                batch.nbytes += size
                entries.append(Written(int(self._kind), size, head.sequence))
            touched.append((head, size))
            head.begun += size
            if head.begun == head.nbytes:
                self._queue.popleft()
                batch.frames.append(head.frame)

    def clear(self) -> None:
        """Forget everything that the library does not have."""
        self._queue.clear()
        self._starved = 0

    def _find_slots(self, head: Outgoing) -> bool:
        count = self._geometry.count(head.nbytes)
        first = self.slots.find(count)
        if first < 0:
            return False
        head.frame = readdress(head.frame, first + 1, self.slots.next_generation(first))
        self.slots.take(first, count)
        self._starved -= 1
        head.first = first
        return True


class Outgoing:
    """A parcel that is not whole at the peer."""

    __slots__ = ("begun", "first", "frame", "nbytes", "payload", "posted", "sequence", "unwritten")

    def __init__(
        self,
        frame: bytes,
        posted: Posted,
        payload: torch.Tensor,
        nbytes: int,
        first: int,
        sequence: int,
    ) -> None:
        self.frame, self.posted, self.payload = frame, posted, payload
        self.nbytes, self.sequence = nbytes, sequence
        self.first = first  # of its slots, or -1
        self.begun = 0  # bytes that the library has
        self.unwritten = nbytes  # bytes whose source is not free
