"""Receive buffers and who owns them: a lease is temporary ownership of one buffer.

A buffer is written by the transport (filling), then read by the rank (held), and belongs to nobody
again (free) only after the last read. A transfer that fails halfway leaves its buffer quarantined:
it has no new owner until the transport has proof that no late write can reach it. Each change of
owner raises the buffer's generation.

The pool of `make_pool` is compiled where that is there (`native/src/columns/lease.cpp`); it is used
like the one here.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum

import torch

from asyncmoe import native

_SMALLEST_BYTES = 4096


class LeaseState(IntEnum):
    """Where a lease stands. It only ever moves to the right, and at most once to each."""

    FILLING = 0  # the transport writes
    HELD = 1  # the payload is visible, the rank reads
    QUARANTINED = 2  # given up while it was filling; a late write may still come
    FREE = 3  # over: the buffer may have a new owner


_FILLING, _HELD, _QUARANTINED, _FREE = LeaseState


class Block:
    """Memory that is leased again and again."""

    __slots__ = ("generation", "id", "memory", "tensor")

    def __init__(self, block_id: int, tensor: torch.Tensor) -> None:
        self.id = block_id
        self.generation = 0
        self.tensor = tensor  # uint8 [capacity]
        self.memory = tensor.numpy().data if tensor.is_cpu else memoryview(b"")  # host memory only


class Lease:
    """Ownership of `nbytes` bytes. All methods raise `RuntimeError` in the wrong state."""

    __slots__ = ("_block", "_on_free", "_pool", "generation", "id", "nbytes", "state")

    def __init__(
        self,
        pool: LeasePool,
        block: Block,
        nbytes: int,
        on_free: Callable[[], None] | None = None,
    ) -> None:
        self._pool, self._block, self._on_free = pool, block, on_free
        self.nbytes = nbytes
        self.id, self.generation = block.id, block.generation  # together they name this lease
        self.state = _FILLING

    @property
    def memory(self) -> memoryview:
        """The leased bytes of host memory, to be filled."""
        return self._block.memory[: self.nbytes]

    def rows(self, dtype: torch.dtype, rows: int, hidden: int) -> torch.Tensor:
        """The leased bytes as [rows, hidden] of `dtype`, without a copy."""
        return rows_of(self._block.tensor, dtype, rows, hidden)

    def arrived(self) -> None:
        """The payload is visible: filling -> held."""
        self._move(_FILLING, _HELD)

    def release(self) -> None:
        """The last read is over: held -> free."""
        self._move(_HELD, _FREE)

    def abandon(self) -> None:
        """The transfer failed: filling -> quarantined."""
        self._move(_FILLING, _QUARANTINED)

    def quiet(self) -> None:
        """No late write can come any more: quarantined -> free."""
        self._move(_QUARANTINED, _FREE)

    def _move(self, source: LeaseState, target: LeaseState) -> None:
        if self.state is not source:
            raise RuntimeError(
                f"lease {self.id} generation {self.generation} is {self.state.name}, "
                f"not {source.name}: it cannot become {target.name}"
            )
        self.state = target
        if target is _FREE:
            self._pool._reclaim(self._block, self._on_free is None)
            if self._on_free is not None:
                self._on_free()


def rows_of(memory: torch.Tensor, dtype: torch.dtype, rows: int, hidden: int) -> torch.Tensor:
    """The first bytes of `memory` (uint8 [n]) as [rows, hidden] of `dtype`, without a copy."""
    nbytes = rows * hidden * dtype.itemsize
    if not nbytes:
        return torch.empty((rows, hidden), dtype=dtype, device=memory.device)
    return memory.narrow(0, 0, nbytes).view(dtype).view(rows, hidden)


_IDLE_BYTES = 256 << 20


def _host_memory(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8)


def make_pool(
    idle_bytes: int = _IDLE_BYTES, allocate: Callable[[int], torch.Tensor] = _host_memory
) -> LeasePool:
    """As `LeasePool`, compiled if that is there."""
    kind = LeasePool if native.columns is None else native.columns.LeasePool
    pool: LeasePool = kind(idle_bytes, allocate)
    return pool


class LeasePool:
    """The buffers of one rank, in sizes that are powers of two so that they fit each other.

    Promises: a buffer has one lease at a time; at most `idle_bytes` lie free; a lease that is
    neither released nor proven quiet is counted for ever.
    """

    def __init__(
        self,
        idle_bytes: int = _IDLE_BYTES,
        allocate: Callable[[int], torch.Tensor] = _host_memory,
    ) -> None:
        self._limit_bytes = idle_bytes
        self._allocate = allocate  # size in bytes -> uint8 [size]: pinned or registered memory
        self._idle: dict[int, list[Block]] = {}
        self._live: dict[int, Lease] = {}
        self._blocks = 0
        self.idle_bytes = 0

    def obtain(self, nbytes: int) -> Lease:
        """Lease at least `nbytes` bytes, aligned for any dtype, in state filling."""
        size = max(_SMALLEST_BYTES, 1 << (nbytes - 1).bit_length())
        idle = self._idle.get(size)
        if idle:
            block = idle.pop()  # the most recent, which is the likeliest to be in the cache
            self.idle_bytes -= size
        else:
            block = self.block(self._allocate(size))
        return self._lease(Lease(self, block, nbytes))

    def adopt(self, memory: torch.Tensor, on_free: Callable[[], None]) -> Lease:
        """Lease memory that is not the pool's: `memory` (uint8 [n]) is read in place.

        `on_free` is called when the lease has become free; the memory is never reused here.
        """
        return self.lend(self.block(memory), memory.numel(), on_free)

    def block(self, memory: torch.Tensor) -> Block:
        """Make memory that is not the pool's known to it, so that it can be lent often."""
        self._blocks += 1
        return Block(self._blocks, memory)

    def lend(self, block: Block, nbytes: int, on_free: Callable[[], None]) -> Lease:
        """Lease the first `nbytes` of such memory, which nobody else leases now; as `adopt`."""
        return self._lease(Lease(self, block, nbytes, on_free))

    @property
    def filling(self) -> int:
        """Leases that a transport writes to."""
        return self._count(_FILLING)

    @property
    def held(self) -> int:
        """Leases that the rank reads."""
        return self._count(_HELD)

    @property
    def quarantined(self) -> int:
        """Leases whose transfer failed and that are not proven quiet."""
        return self._count(_QUARANTINED)

    @property
    def live(self) -> int:
        """Leases that are not free. 0 once everything has come to its end."""
        return len(self._live)

    def _lease(self, lease: Lease) -> Lease:
        self._live[lease.id] = lease
        return lease

    def _count(self, state: LeaseState) -> int:
        return sum(lease.state is state for lease in self._live.values())

    def _reclaim(self, block: Block, reuse: bool) -> None:
        """A lease has ended: whoever names it from now on is stale."""
        del self._live[block.id]
        block.generation += 1
        size = block.tensor.numel()
        if reuse and self.idle_bytes + size <= self._limit_bytes:
            self._idle.setdefault(size, []).append(block)
            self.idle_bytes += size
