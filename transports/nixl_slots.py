"""Slots of registered memory: which are free, and who may touch them when.

The sender chooses a payload's slots among those that it knows to be free, and names the first, with
its next generation, in the control frame. The receiver owns them until the last read, and then says
so with slot and generation. Both count generations alike, so a word about an owner of long ago is
found out on either side. A payload larger than a slot takes adjacent ones.
"""

from __future__ import annotations

from asyncmoe.errors import ProtocolError
from asyncmoe.transports.shm_lanes import lowest_run
from asyncmoe.transports.shm_segment import Geometry

_U32 = 0xFFFFFFFF


class SenderSlots:
    """The slots of one class that this rank fills for one peer."""

    def __init__(self, geometry: Geometry) -> None:
        self._free = (1 << geometry.slots) - 1  # bit i: slot i
        self._out: dict[int, tuple[int, int]] = {}  # first slot -> (bits, generation)
        self._generation = [0] * geometry.slots

    def find(self, count: int) -> int:
        """The first of `count` adjacent free slots, or -1. The lowest, which are in the caches."""
        return lowest_run(self._free, count)

    def next_generation(self, first: int) -> int:
        """The generation that slot `first` gets when it is taken."""
        return (self._generation[first] + 1) & _U32

    def take(self, first: int, count: int) -> None:
        """Own these slots, which `find` has found, for one payload."""
        bits = ((1 << count) - 1) << first
        generation = self._generation[first] = self.next_generation(first)
        self._free ^= bits
        self._out[first] = bits, generation

    def give_back(self, first: int, generation: int) -> None:
        """The peer has read a payload for the last time. Raises `ProtocolError`: not that one."""
        bits, expected = self._out.get(first, (0, None))
        if generation != expected:
            raise ProtocolError(
                f"slot {first} comes back with generation {generation}; allowed: {expected}"
            )
        del self._out[first]
        self._free |= bits

    @property
    def out(self) -> int:
        """Payloads that the peer has not read for the last time."""
        return len(self._out)


class ReceiverSlots:
    """The slots of one class that one peer fills for this rank."""

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry
        self._generation = [0] * geometry.slots
        self.held = 0  # bit i: slot i

    def accept(self, slot: int, generation: int, nbytes: int) -> tuple[int, int]:
        """Own the slots that a control frame names: (the first, the bits of all).

        `slot`, `generation`: its fields; `nbytes`: of the payload. Raises `ProtocolError` if
        they are not there, held, or of another generation.
        """
        first, count = slot - 1, self._geometry.count(nbytes)
        most = self._geometry.slots - count
        if not 0 <= first <= most:
            raise ProtocolError(
                f"frame field lease is {slot}; allowed: 1 to {most + 1} for {count} slots"
            )
        bits = ((1 << count) - 1) << first
        if self.held & bits:
            raise ProtocolError(f"frame field lease is {slot}, which this rank holds")
        expected = (self._generation[first] + 1) & _U32
        if generation != expected:
            raise ProtocolError(f"frame field generation is {generation}; allowed: {expected}")
        self._generation[first] = expected
        self.held |= bits
        return first, bits

    def give_back(self, first: int, bits: int) -> int:
        """The last read is over. Returns the generation that has ended."""
        self.held ^= bits
        return self._generation[first]
