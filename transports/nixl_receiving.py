"""What one peer writes to this rank over NIXL: its slots, and which parcels are whole.

What `make_receiving` gives is compiled where that is there
(`native/src/columns/nixl_receiving.cpp`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from asyncmoe import native
from asyncmoe.errors import ProtocolError
from asyncmoe.lease import Block, Lease, LeasePool
from asyncmoe.transport import ParcelClass
from asyncmoe.transports.nixl_slots import ReceiverSlots
from asyncmoe.transports.nixl_wire import Freed, NoteKind, Written, decode_note, encode_note
from asyncmoe.transports.shm_segment import Geometry
from asyncmoe.twophase import Inbound, Transfer

_TELL_BYTES = 256 << 10  # of slots that are free again: what is written next is in the caches then


def make_receiving(
    leases: LeasePool,
    memory: torch.Tensor,
    geometry: Geometry,
    generation: int,
    on_free: Callable[[], None],
    compiled: bool,
) -> Receiving:
    """As `Receiving`, compiled if asked for."""
    if not compiled:
        return Receiving(leases, memory, geometry, generation, on_free)
    receiving: Receiving = native.columns.NixlReceiving(
        leases, memory, geometry.slots, geometry.slot_bytes, generation, on_free
    )
    return receiving


class _Due:
    """A parcel that was announced: `left` bytes of its payload are not there."""

    __slots__ = ("left", "transfer")

    def __init__(self, transfer: Transfer) -> None:
        self.transfer, self.left = transfer, transfer.payload_bytes


class Receiving:
    """Both classes of one peer."""

    def __init__(
        self,
        leases: LeasePool,
        memory: torch.Tensor,
        geometry: Geometry,
        generation: int,
        on_free: Callable[[], None],
    ) -> None:
        """`memory`: the arena. `on_free` is called when there begins to be something to tell the
        peer, and each time while there is `enough`; after `stop` once, when nothing is held."""
        self._leases, self._memory, self._geometry = leases, memory, geometry
        self._generation, self._on_free = generation, on_free
        self._inbound: Inbound | None = None
        self._slots = {int(kind): ReceiverSlots(geometry) for kind in ParcelClass}
        self._blocks: dict[tuple[int, int], Block] = {}  # (class, first slot) -> its memory
        self._next = dict.fromkeys(map(int, ParcelClass), 0)  # sequence of the next control frame
        self._due: dict[tuple[int, int], _Due] = {}  # (class, sequence) -> announced, not whole
        self._early: dict[tuple[int, int], int] = {}  # bytes whose control frame is not here yet
        self._freed: list[Freed] = []  # what the peer has to be told of
        self._freed_slots = 0
        self._stopped = False
        self.held = 0  # payloads that lie in slots

    def begin(self, inbound: Inbound) -> None:
        """Hand over to `inbound`."""
        self._inbound = inbound

    @property
    def due(self) -> int:
        """Payloads that were announced and are not whole."""
        return len(self._due)

    @property
    def enough(self) -> bool:
        """Whether the peer should be told of its slots soon, and not when it suits."""
        free, geometry = self._freed_slots, self._geometry
        return 4 * free >= geometry.slots or free * geometry.slot_bytes >= _TELL_BYTES

    def place(self, transfer: Transfer) -> Lease | None:
        """Own the slots that a control frame names; None for one without a payload. Raises
        `ProtocolError`."""
        kind, nbytes = transfer.parcel_class, transfer.payload_bytes
        if not nbytes:
            return None
        first, bits = self._slots[kind].accept(transfer.slot, transfer.generation, nbytes)
        block = self._blocks.get((kind, first))
        if block is None:  # from that slot on, since a payload may take more than one
            begin = (kind - 1) * self._geometry.class_bytes + first * self._geometry.slot_bytes
            memory = self._memory[begin : kind * self._geometry.class_bytes]
            block = self._blocks[kind, first] = self._leases.block(memory)
        self.held += 1
        return self._leases.lend(block, nbytes, partial(self._give_back, kind, first, bits))

    def announced(self, transfer: Transfer) -> bool:
        """A control frame is here: whether its parcel is whole, and was handed over. Raises
        `ProtocolError`."""
        if self._stopped:
            return True
        kind, sequence = transfer.parcel_class, transfer.sequence
        self._next[kind] = sequence + 1
        early = self._early.pop((kind, sequence), 0)
        if not transfer.payload_bytes:
            assert self._inbound is not None
            self._inbound.arrived(transfer)
            return True
        self._due[kind, sequence] = _Due(transfer)
        return self._complete((kind, sequence), early)

    def on_written(self, note: bytes) -> None:
        """A notification WRITTEN. Raises `ProtocolError` if it is not allowed."""
        written: Sequence[Written | Freed] = decode_note(note)[1]
        for entry in written:
            assert isinstance(entry, Written)
            if not self._stopped:  # by who took what the one before has completed
                self._written(entry)

    def _written(self, entry: Written) -> None:
        key = entry.kind, entry.sequence
        if key in self._due:
            self._complete(key, entry.nbytes)
            return
        first = self._next[entry.kind]
        if not first <= entry.sequence < first + self._geometry.slots:
            raise ProtocolError(
                f"notification sequence is {entry.sequence}; allowed: {first} and the next "
                f"{self._geometry.slots}, or one that is under way"
            )
        self._early[key] = self._early.get(key, 0) + entry.nbytes

    def _complete(self, key: tuple[int, int], nbytes: int) -> bool:
        due = self._due[key]
        if nbytes > due.left:
            size = due.transfer.payload_bytes
            raise ProtocolError(
                f"notifications of {size - due.left + nbytes} bytes for a payload of {size}"
            )
        due.left -= nbytes
        if due.left:
            return False
        del self._due[key]
        assert self._inbound is not None
        self._inbound.arrived(due.transfer)
        return True

    def _give_back(self, kind: int, first: int, bits: int) -> None:
        generation = self._slots[kind].give_back(first, bits)
        self.held -= 1
        if self._stopped:
            if not self.held:
                self._on_free()
            return
        self._freed.append(Freed(kind, first, generation))
        self._freed_slots += bits.bit_count()
        if len(self._freed) == 1 or self.enough:
            self._on_free()

    def freed_note(self) -> bytes | None:
        """What the peer is to be told of; None if that is nothing."""
        freed, self._freed, self._freed_slots = self._freed, [], 0
        return encode_note(NoteKind.FREED, self._generation, freed) if freed else None

    def stop(self) -> None:
        """The peer is gone: forget what is not whole. Arrivals that are held stay readable."""
        self._stopped = True
        self._inbound = None
        self._due.clear()
        self._early.clear()
        self._blocks.clear()
