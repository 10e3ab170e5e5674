"""Slots of shared memory: which are free, who may touch them when, and how both sides find out.

A slot goes round between two owners. The sender owns it while it is free and while it fills it;
it then writes the slot's next generation to `ready` and sends the control frame, which names slot
and generation. The receiver owns it until the last read, and gives it back by writing that
generation to `reclaimed`. A payload larger than a slot takes adjacent ones, whose flags are those
of the first.

What orders these accesses, on x86 and on ARM: a receiver looks at `ready` and at the slot only when
it has the control frame, and the kernel's socket passes on all that was written before it was sent.
The way back has no message: the receiver puts a fence between its last read and `reclaimed`, and
the sender writes only where it has seen that flag, which no processor reorders. Flags are aligned
u32, and never seen in halves.

A sender that finds no slots counts `waiting` up, and looks once more. A receiver that gives slots
back looks at `waiting` behind them, and answers each new count with one notice. Each side has a
fence between its write and its look, so at least one of them sees the other's: no wake-up is lost,
and none is sent while nobody waits.
"""

from __future__ import annotations

from itertools import islice

from asyncmoe.errors import ProtocolError
from asyncmoe.transport import ParcelClass
from asyncmoe.transports.shm_segment import Fence, Segment
from asyncmoe.wire import Prelude

_U32 = 0xFFFFFFFF
_LOOK_BACK = 16  # slots taken first are the likeliest to be back


class SenderSlots:
    """The slots of one class that this rank fills for one peer."""

    def __init__(self, mine: Segment, theirs: Segment, kind: ParcelClass) -> None:
        self._geometry, slots = mine.geometry, mine.geometry.slots
        self._free = (1 << slots) - 1  # bit i: slot i
        self._out: dict[int, tuple[int, int]] = {}  # first slot -> (bits, generation), oldest first
        self._generation = [0] * slots
        self._ready, self._reclaimed = mine.ready(kind), theirs.reclaimed(kind)
        self._waiting = mine.word(kind - 1)
        self._fence = Fence()

    def count(self, nbytes: int) -> int:
        """Adjacent slots that a payload takes."""
        return self._geometry.count(nbytes)

    def offset(self, first: int) -> int:
        """Where slot `first` begins in the slots of its class."""
        return first * self._geometry.slot_bytes

    def find(self, count: int) -> int:
        """The first of `count` adjacent free slots, or -1. The lowest there are: the least memory
        is touched, and what is touched was so a moment ago."""
        self._take_back(_LOOK_BACK)
        first = lowest_run(self._free, count)
        if first < 0:
            self._take_back(len(self._out))
            first = lowest_run(self._free, count)
        return first

    def wait(self, count: int) -> int:
        """As `find` after it has failed. If this returns -1, there will be a notice."""
        self._waiting[0] = (self._waiting[0] + 1) & _U32
        self._fence()
        return self.find(count)

    def next_generation(self, first: int) -> int:
        """The generation that slot `first` gets when it is taken."""
        return (self._generation[first] + 1) & _U32

    def take(self, first: int, count: int) -> None:
        """Own these slots, which `find` has found, for one payload."""
        bits = ((1 << count) - 1) << first
        generation = self._generation[first] = self.next_generation(first)
        self._free ^= bits
        self._out[first] = bits, generation

    def publish(self, first: int) -> None:
        """The payload is whole; the control frame may be sent."""
        self._ready[first] = self._generation[first]

    def _take_back(self, most: int) -> None:
        """Own those slots again, of the `most` oldest, that the peer has given back."""
        reclaimed = self._reclaimed
        back = [
            first
            for first, (_, generation) in islice(self._out.items(), most)
            if reclaimed[first] == generation
        ]
        for first in back:
            self._free |= self._out.pop(first)[0]


class ReceiverSlots:
    """The slots of one class that one peer fills for this rank."""

    def __init__(self, mine: Segment, theirs: Segment, kind: ParcelClass) -> None:
        self.geometry = theirs.geometry
        self._held = 0  # bit i: slot i
        self._ready, self._reclaimed = theirs.ready(kind), mine.reclaimed(kind)
        self._waiting = theirs.word(kind - 1)
        self._answered = 0
        self._fence = Fence()

    def accept(self, prelude: Prelude) -> tuple[int, int]:
        """Own the slots that a control frame names: (the first, the bits of all).

        Raises `ProtocolError` if they are not there, held, not ready, or of another generation.
        """
        first, count = prelude.lease - 1, self.geometry.count(prelude.payload_bytes)
        if not 0 <= first <= self.geometry.slots - count:
            raise ProtocolError(
                f"frame field lease is {prelude.lease}; allowed: 1 to "
                f"{self.geometry.slots - count + 1} for {count} slots"
            )
        bits = ((1 << count) - 1) << first
        if self._held & bits:
            raise ProtocolError(f"frame field lease is {prelude.lease}, which this rank holds")
        expected = (self._reclaimed[first] + 1) & _U32
        if prelude.generation != expected or self._ready[first] != expected:
            raise ProtocolError(
                f"slot {first} is ready with generation {self._ready[first]}, its frame says "
                f"{prelude.generation}; allowed: {expected}"
            )
        self._held |= bits
        return first, bits

    def give_back(self, first: int, bits: int) -> bool:
        """The last read is over. Whether the peer waits for a notice of that."""
        self._held ^= bits
        self._fence()
        self._reclaimed[first] = (self._reclaimed[first] + 1) & _U32
        self._fence()
        waiting: int = self._waiting[0]
        asked, self._answered = waiting != self._answered, waiting
        return asked


def lowest_run(free: int, count: int) -> int:
    """The lowest i with bits i to i + count - 1 of `free` set, or -1."""
    length = 1
    while length < count and free:
        step = min(length, count - length)
        free &= free >> step  # bit i: a run of `length + step` begins at i
        length += step
    return (free & -free).bit_length() - 1
