"""Memory that NIXL reads and writes: where payloads come from, and the arenas that peers write to.

A write that this rank no longer expects may still come: a peer that was given up may live on, and
not every way of UCX is stopped by taking the registration back (within one machine it writes with
`process_vm_writev`, which asks for none). So an arena's addresses never get another owner. When it
is over, host memory goes back to the system page by page, and the address range stays reserved: a
late write finds memory that nobody reads. GPU memory is kept as it is.
"""

from __future__ import annotations

import ctypes
import mmap
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from asyncmoe.errors import ConfigError

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
)  # fmt: skip
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_FAILED = ctypes.c_void_p(-1).value
_MAP_NORESERVE = 0x4000  # of linux/mman.h
_LARGE_PAGE_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class Span:
    """A range of addresses, as the library takes it."""

    address: int
    nbytes: int
    kind: str  # DRAM or VRAM
    device: int  # index of the GPU, 0 for DRAM

    @classmethod
    def of(cls, memory: torch.Tensor, offset: int = 0, nbytes: int | None = None) -> Span:
        """Where a contiguous tensor lies, or `nbytes` bytes of it from `offset` on."""
        kind, device = ("VRAM", memory.get_device()) if memory.is_cuda else ("DRAM", 0)
        size = memory.nbytes if nbytes is None else nbytes
        return cls(memory.data_ptr() + offset, size, kind, device)


class Arena:
    """`nbytes` bytes that one peer may write to: uint8 [nbytes] on `device`."""

    _kept: ClassVar[list[torch.Tensor]] = []  # GPU memory that a late write may still come to

    def __init__(self, nbytes: int, device: torch.device) -> None:
        """Raises `ConfigError` if there is not so much memory."""
        self._on_host = device.type == "cpu"
        try:
            self.memory = (
                _reserve(nbytes)
                if self._on_host
                else torch.empty(nbytes, dtype=torch.uint8, device=device)
            )
        except (OSError, torch.OutOfMemoryError) as error:
            raise ConfigError(
                f"transport nixl needs {nbytes} bytes on {device} for each peer, by "
                f"transport.options.slots and slot_bytes: {error}"
            ) from error
        self.span = Span.of(self.memory)

    def retire(self) -> None:
        """Nothing reads it any more: give its pages back, and keep its addresses for ever."""
        if self._on_host:
            _LIBC.madvise(self.span.address, self.span.nbytes, mmap.MADV_DONTNEED)
        else:
            self._kept.append(self.memory)


def _reserve(nbytes: int) -> torch.Tensor:
    """Fresh pages, uint8 [nbytes], which are never unmapped; none is used before it is touched."""
    address = _LIBC.mmap(
        None,
        nbytes + _LARGE_PAGE_BYTES,
        mmap.PROT_READ | mmap.PROT_WRITE,
        mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE,
        -1,
        0,
    )
    if address == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"mmap failed with errno {code}")
    # Large pages where there are any, from the first slots on, which are used most: a write within
    # a machine looks each page up.
    address += -address % _LARGE_PAGE_BYTES
    _LIBC.madvise(address, nbytes, mmap.MADV_HUGEPAGE)
    return torch.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), dtype=torch.uint8)


class Sources:
    """Registrations of the memory that writes read from, each as long as a write lasts.

    A registration may pin memory, and one that outlives its memory reads whatever was there, not
    what has that address later. Ranges never overlap, since the library looks a source up by its
    neighbour in a sorted list; a source that lies in one shares its registration.
    """

    def __init__(self, register: Callable[[Span], Any], deregister: Callable[[Any], None]) -> None:
        self._register, self._deregister = register, deregister
        self._starts: list[_Key] = []  # sorted
        self._ranges: dict[_Key, _Range] = {}

    def acquire(self, span: Span) -> bool:
        """Register `span` until `release`; False if it overlaps one that is read, without lying in
        it."""
        key, end = _Key(span.kind, span.device, span.address), span.address + span.nbytes
        index = bisect_right(self._starts, key)
        if index and self._starts[index - 1][:2] == key[:2]:
            found = self._ranges[self._starts[index - 1]]
            if found.end >= end:
                found.users += 1
                return True
            if found.end > span.address:
                return False
        behind = self._starts[index : index + 1]
        if behind and behind[0][:2] == key[:2] and behind[0].address < end:
            return False
        self._ranges[key] = _Range(end, self._register(span))
        self._starts.insert(index, key)
        return True

    def release(self, span: Span) -> None:
        """One user of `span` less."""
        key = _Key(span.kind, span.device, span.address)
        key = self._starts[bisect_right(self._starts, key) - 1]
        self._ranges[key].users -= 1
        if not self._ranges[key].users:
            del self._starts[bisect_left(self._starts, key)]
            self._deregister(self._ranges.pop(key).registered)

    def __len__(self) -> int:
        """Ranges that writes read."""
        return len(self._ranges)


class _Key(NamedTuple):
    kind: str
    device: int
    address: int


class _Range:
    """What is registered at a key."""

    __slots__ = ("end", "registered", "users")

    def __init__(self, end: int, registered: Any) -> None:
        self.end, self.registered = end, registered
        self.users = 1
