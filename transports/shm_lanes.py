"""What two ranks do with their segments: who owns which slot when, and how both sides find out.

A slot goes round between two owners. The sender owns it while it is free and while it fills it: the
payload, its columns in the memory beside, then the prelude in the next entry of the ring, which
names the first slot and its next generation, and last it counts `published` up. The receiver looks
at entries up to that count, copies prelude and columns out of the peer's reach, and checks them as
it would a frame from a socket. It owns the slots until the last read, and gives them back by
writing their generation to `reclaimed`. A payload larger than a slot takes adjacent ones, whose
flags are those of the first. There is an entry for each slot, so an entry is never written while
its last parcel is still to be taken.

What orders these accesses, on x86 and on ARM: between what is written and the word that says so
there is a fence, and so there is between a word that is read and what it speaks of. Words are
aligned u32, and never seen in halves.

Nobody spins. A receiver that finds nothing more counts `sleeps` up and looks once more; a sender
looks at `sleeps` behind what it publishes, once for all of a turn of its loop, and answers each new
count with one notice on the socket (`Bell`). A sender that finds no slots counts `waiting` up, and
looks once more; a receiver that gives slots back looks at `waiting` behind them, and answers
likewise. Each side has a fence between its write and its look, so at least one of them sees the
other's: no wake-up is lost, and none is sent while nobody waits.

Where there are compiled parts and the two phases are compiled, so are these lanes
(`native/src/columns/shm_*.cpp`); they are used like the ones here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import islice

import torch

from asyncmoe.errors import ProtocolError
from asyncmoe.lease import Block, Lease, LeasePool
from asyncmoe.transport import ParcelClass, Posted
from asyncmoe.transports.shm_segment import Fence, Segment, read_only_tensor
from asyncmoe.twophase import Inbound, Outbound
from asyncmoe.wire import PRELUDE_BYTES, Prelude, decode_prelude, payload_memory, readdress

_U32 = 0xFFFFFFFF
_LOOK_BACK = 16  # slots taken first are the likeliest to be back
_COPY_BYTES_PER_TURN = 1 << 20  # so that a large payload does not keep the loop


class SenderSlots:
    """The slots of one class that this rank fills for one peer."""

    def __init__(self, mine: Segment, theirs: Segment, kind: ParcelClass) -> None:
        self._geometry, slots = mine.geometry, mine.geometry.slots
        self._free = (1 << slots) - 1  # bit i: slot i
        self._out: dict[int, tuple[int, int]] = {}  # first slot -> (bits, generation), oldest first
        self.generations = [0] * slots
        self._reclaimed, self._waiting = theirs.reclaimed(kind), mine.waiting(kind)
        self._fence = Fence()

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

    def take(self, first: int, count: int) -> int:
        """Own these slots, which `find` has found, for one payload; returns its generation."""
        bits = ((1 << count) - 1) << first
        generation = self.generations[first] = (self.generations[first] + 1) & _U32
        self._free ^= bits
        self._out[first] = bits, generation
        return generation

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


class Sender:
    """What this rank sends to one peer in one class, in the order posted."""

    def __init__(
        self, mine: Segment, theirs: Segment, kind: ParcelClass, outbound: Outbound
    ) -> None:
        self.slots = SenderSlots(mine, theirs, kind)
        self._mine, self._kind, self._outbound = mine, kind, outbound
        self._memory, self._columns = mine.payloads(kind), mine.columns(kind)
        self._ring, self._published = mine.ring(kind), mine.published(kind)
        self._queue: deque[_Outgoing] = deque()
        self._starved = False  # the first of them found no slots
        self._fence = Fence()

    @property
    def waiting(self) -> int:
        """Parcels that are not whole in slots."""
        return len(self._queue)

    @property
    def may_advance(self) -> bool:
        """Whether `advance` should go on soon: they wait for their turn and not for slots."""
        return bool(self._queue) and not self._starved

    @property
    def generations(self) -> list[int]:
        """By slot: how often it was taken."""
        return self.slots.generations

    def post(self, frame: bytes, posted: Posted, tensor: torch.Tensor, at_once: bool) -> Posted:
        """Queue a numbered parcel. A small one `at_once` is in its slots when this returns, if
        there are some; for others `advance` is due."""
        payload = payload_memory(tensor)
        count = self._mine.geometry.count(max(len(payload), len(frame) - PRELUDE_BYTES))
        self._queue.append(_Outgoing(frame, posted, payload, count))
        if at_once and len(self._queue) == 1:
            self.advance()
        return posted

    def advance(self) -> bool:
        """Fill slots and publish, until there are no slots or it takes too long. Whether any was
        published."""
        left, any_whole = _COPY_BYTES_PER_TURN, False
        while self._queue and left > 0:
            head = self._queue[0]
            if head.first < 0 and not self._find_slots(head):
                break  # a notice goes on
            left -= self._copy(head, left)
            if head.done < len(head.payload):
                break
            self._queue.popleft()
            self._publish(head)
            any_whole = True
        return any_whole

    def clear(self) -> None:
        """Forget what is not published."""
        self._queue.clear()

    def _find_slots(self, head: _Outgoing) -> bool:
        first = self.slots.find(head.count)
        if first < 0:
            first = self.slots.wait(head.count)
        self._starved = first < 0
        if self._starved:
            return False
        head.frame = readdress(head.frame, first + 1, self.slots.take(first, head.count))
        head.first = first
        return True

    def _copy(self, head: _Outgoing, most: int) -> int:
        """Write up to `most` bytes of the payload; returns how many."""
        done, whole = head.done, len(head.payload)
        size = min(most, whole - done)
        begin = head.first * self._mine.geometry.slot_bytes + done
        self._memory[begin : begin + size] = head.payload[done : done + size]
        head.done += size
        return size

    def _publish(self, head: _Outgoing) -> None:
        """The payload is whole: columns and prelude follow, and the peer may look."""
        self._put(head.frame, head.first)
        self._outbound.sent(head.posted)

    def _put(self, frame: bytes, first: int) -> None:
        columns = frame[PRELUDE_BYTES:]
        begin = first * self._mine.geometry.slot_bytes
        self._columns[begin : begin + len(columns)] = columns
        published = self._published[0]
        entry = published % self._mine.geometry.slots * PRELUDE_BYTES
        self._ring[entry : entry + PRELUDE_BYTES] = frame[:PRELUDE_BYTES]
        self._fence()
        self._published[0] = (published + 1) & _U32


class _Outgoing:
    """A parcel that is not published."""

    __slots__ = ("count", "done", "first", "frame", "payload", "posted")

    def __init__(self, frame: bytes, posted: Posted, payload: memoryview, count: int) -> None:
        self.frame, self.posted, self.payload = frame, posted, payload
        self.count = count  # slots that it takes
        self.first = -1  # of its slots, once it has some
        self.done = 0  # bytes that are written


class ReceiverSlots:
    """The slots of one class that one peer fills for this rank."""

    def __init__(self, mine: Segment, theirs: Segment, kind: ParcelClass) -> None:
        self.geometry = theirs.geometry
        self._held = 0  # bit i: slot i
        self._reclaimed, self._waiting = mine.reclaimed(kind), theirs.waiting(kind)
        self._answered = 0
        self._fence = Fence()

    def accept(self, slot: int, generation: int, nbytes: int) -> tuple[int, int]:
        """Own the slots that a prelude names: (the first, the bits of all).

        `slot`, `generation`: its fields; `nbytes`: of the payload or its columns, if those are
        longer. Raises `ProtocolError` if they are not there, held, or of another generation.
        """
        first, count = slot - 1, self.geometry.count(nbytes)
        if not 0 <= first <= self.geometry.slots - count:
            raise ProtocolError(
                f"frame field lease is {slot}; allowed: 1 to "
                f"{self.geometry.slots - count + 1} for {count} slots"
            )
        bits = ((1 << count) - 1) << first
        if self._held & bits:
            raise ProtocolError(f"frame field lease is {slot}, which this rank holds")
        expected = (self._reclaimed[first] + 1) & _U32
        if generation != expected:
            raise ProtocolError(
                f"frame field generation is {generation}; allowed: {expected} for slot {first}"
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


class Receiver:
    """What one peer sends to this rank in one class."""

    def __init__(
        self,
        mine: Segment,
        theirs: Segment,
        kind: ParcelClass,
        inbound: Inbound,
        leases: LeasePool,
        on_asked: Callable[[], None],
    ) -> None:
        """`on_asked`: called when slots have come back for which the peer waits."""
        self._slots = ReceiverSlots(mine, theirs, kind)
        self._kind, self._leases = kind, leases
        self._inbound: Inbound | None = inbound  # None: stopped
        self._on_asked = on_asked
        self._memory = read_only_tensor(theirs.payloads(kind))
        self._columns, self._ring = theirs.columns(kind), theirs.ring(kind)
        self._published, self._taken = theirs.published(kind), 0
        self._blocks: dict[int, Block] = {}  # by first slot, made on first use
        self._fence = Fence()

    @property
    def pending(self) -> bool:
        """Whether there is something to take."""
        return self._inbound is not None and self._published[0] != self._taken

    def take(self, most: int) -> bool:
        """Hand over what is there, at most `most` parcels; whether there is more. Raises
        `ProtocolError`."""
        for _ in range(most):
            inbound, published = self._inbound, self._published[0]
            if inbound is None or published == self._taken:
                return False
            self._fence()
            self._take_next(inbound, published)
        return self.pending

    def stop(self) -> None:
        """Look at nothing more. Mappings last as long as arrivals that are held."""
        self._inbound = None
        self._blocks = {}
        del self._memory

    def _take_next(self, inbound: Inbound, published: int) -> None:
        slots, taken = self._slots.geometry.slots, self._taken
        if (published - taken) & _U32 > slots:
            raise ProtocolError(
                f"word published is {published}; allowed: {taken} to {taken + slots}"
            )
        at = taken % slots * PRELUDE_BYTES
        prelude = decode_prelude(bytes(self._ring[at : at + PRELUDE_BYTES]), inbound.limits)
        if prelude.parcel_class != self._kind:
            raise ProtocolError(
                f"frame field parcel_class is {prelude.parcel_class}; allowed: {self._kind:d}"
            )
        inbound.check_order(prelude)
        transfer = inbound.admit(prelude, self._lease(prelude))
        begin = (prelude.lease - 1) * self._slots.geometry.slot_bytes
        transfer.columns = bytes(self._columns[begin : begin + prelude.column_bytes])
        self._taken = (taken + 1) & _U32
        inbound.arrived(transfer)

    def _lease(self, prelude: Prelude) -> Lease:
        nbytes = max(prelude.payload_bytes, prelude.column_bytes)
        first, bits = self._slots.accept(prelude.lease, prelude.generation, nbytes)
        block = self._blocks.get(first)
        if block is None:  # from that slot on, since a payload may take more than one
            memory = self._memory[first * self._slots.geometry.slot_bytes :]
            block = self._blocks[first] = self._leases.block(memory)
        on_free = partial(self._give_back, first, bits)
        return self._leases.lend(block, prelude.payload_bytes, on_free)

    def _give_back(self, first: int, bits: int) -> None:
        if self._slots.give_back(first, bits) and self._inbound is not None:
            self._on_asked()


class Bell:
    """Who sleeps, and is to be woken."""

    def __init__(self, mine: Segment, theirs: Segment) -> None:
        self._mine, self._theirs = mine.sleeps, theirs.sleeps
        self._answered = 0
        self._fence = Fence()

    def due(self) -> bool:
        """Behind what was published: whether the peer is to be sent a notice."""
        self._fence()
        sleeps: int = self._theirs[0]
        asleep, self._answered = sleeps != self._answered, sleeps
        return asleep

    def sleep(self) -> None:
        """Ask to be woken. Whoever calls this has to look once more before it waits."""
        self._mine[0] = (self._mine[0] + 1) & _U32
        self._fence()


def lowest_run(free: int, count: int) -> int:
    """The lowest i with bits i to i + count - 1 of `free` set, or -1."""
    length = 1
    while length < count and free:
        step = min(length, count - length)
        free &= free >> step  # bit i: a run of `length + step` begins at i
        length += step
    return (free & -free).bit_length() - 1
