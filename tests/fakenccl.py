"""A stand-in for NCCL and CUDA alone, in one process: it matches sends with receives, and watches.

Streams run in order, a group is over when all its operations are matched, calls are not done when
they return, and an abort ends what is under way on its side. What the transport must never do is
kept in `faults`.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from asyncmoe.transports.nccl import NcclTransport
from asyncmoe.transports.nccl_library import Library


class World:
    """All communicators of a test."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.communicators: list[FakeCommunicator] = []
        self.groups: list[int] = []  # operations of each
        self.faults: list[str] = []
        self.state = 0  # what healthy communicators report
        self.holding = False  # whether nothing is matched for now
        self.entered = threading.local()

    def both_ends(self, identity: bytes) -> list[FakeCommunicator]:
        """The communicators that share an identity."""
        return [c for c in self.communicators if c.identity == identity]

    def match(self) -> None:
        """Match what can be."""
        with self.lock:
            for sender in self.communicators:
                for receiver in self.both_ends(sender.identity):
                    if sender.rank == 0 and receiver.rank == 1 and not self.holding:
                        self._match(sender.operations, receiver.operations)

    def _match(self, sends: deque[Any], receives: deque[Any]) -> None:
        while sends and receives:
            (source, sent), (target, received) = sends.popleft(), receives.popleft()
            if source.shape != target.shape or source.dtype != target.dtype:
                self.faults.append(f"{source.shape} {source.dtype} into {target.shape}")
            target.copy_(source)
            sent.left -= 1
            received.left -= 1


class Group:
    """Operations that were launched together, and the event behind them."""

    def __init__(self) -> None:
        self.left = 0

    def query(self) -> bool:
        """As a CUDA event."""
        return self.left <= 0


class FakeStream:
    """A stream, which knows its last group."""

    _handles = iter(range(1, 1 << 30))

    def __init__(self) -> None:
        self.cuda_stream = next(self._handles)
        self.group = Group()

    def wait_event(self, event: Group) -> None:
        """Nothing is computed here."""

    def record_event(self) -> Group:
        """As a CUDA stream."""
        return self.group

    def synchronize(self) -> None:
        """Only called behind an abort, when all is over."""
        assert self.group.query()


class FakeCommunicator:
    """One end of a communicator of two."""

    def __init__(self, world: World, owner: int, rank: int, identity: bytes) -> None:
        self.world, self.owner, self.rank, self.identity = world, owner, rank, identity
        self.operations: deque[tuple[torch.Tensor, Group]] = deque()
        self.aborted, self._in_progress = False, True

    def send(self, sendbuf: torch.Tensor, peer: int, *, stream: int) -> None:
        """As nccl4py's."""
        self._enqueue(sendbuf, 0, stream)

    def recv(self, recvbuf: torch.Tensor, peer: int, *, stream: int) -> None:
        """As nccl4py's."""
        self._enqueue(recvbuf, 1, stream)

    def _enqueue(self, tensor: torch.Tensor, rank: int, stream: int) -> None:
        if self.rank != rank or self.aborted or self._in_progress:
            self.world.faults.append(f"a call in a wrong state, of rank {rank}")
        self.world.entered.calls.append((self, tensor, stream))

    def get_async_error(self) -> int:
        """Each call is in progress for one look."""
        if self.aborted:
            self.world.faults.append("a call behind the abort")
        was, self._in_progress = self._in_progress, False
        return 7 if was or not self._met() else self.world.state

    def _met(self) -> bool:
        return len(self.world.both_ends(self.identity)) == 2

    def abort(self) -> None:
        """End what this end has under way."""
        with self.world.lock:
            self.aborted = True
            for _, group in self.operations:
                group.left -= 1
            self.operations.clear()

    def launch(self, tensors: list[torch.Tensor], group: Group) -> None:
        """The end of a group."""
        if self.operations:
            self.world.faults.append("a second burst behind one that is under way")
        self._in_progress = True
        group.left = len(tensors)
        self.operations.extend((tensor, group) for tensor in tensors)


class FakeLibrary(Library):
    """See the module."""

    world: World

    def __init__(self, device: torch.device) -> None:
        self.thread_blocks = 132
        self._streams: dict[int, FakeStream] = {}

    def enter(self) -> None:
        """There is no device."""

    def unique_id(self) -> bytes:
        """As NCCL's, of 128 bytes."""
        return os.urandom(128)

    def communicator(self, rank: int, unique_id: bytes, ctas: int) -> Any:
        """See `Library`."""
        made = FakeCommunicator(self.world, id(self), rank, unique_id)
        with self.world.lock:
            self.world.communicators.append(made)
        return made

    @contextmanager
    def group(self) -> Iterator[None]:
        """See `Library`."""
        calls = self.world.entered.calls = []
        yield
        communicator, _, handle = calls[0]
        group = self._streams[handle].group = Group()
        with self.world.lock:
            self.world.groups.append(len(calls))
            communicator.launch([tensor for _, tensor, _ in calls], group)
        self.world.match()

    def stream(self) -> Any:
        """See `Library`."""
        stream = FakeStream()
        self._streams[stream.cuda_stream] = stream
        return stream

    def computed(self) -> Any:
        """See `Library`."""
        return Group()

    def empty(self, nbytes: int) -> torch.Tensor:
        """See `Library`."""
        return torch.zeros(nbytes, dtype=torch.uint8)

    def reason(self, state: int) -> str:
        """See `Library`."""
        return f"state {state}"


def transport_on(world: World) -> type[NcclTransport]:
    """The transport over the stand-in."""
    library = type("LibraryOf", (FakeLibrary,), {"world": world})
    return type("NcclOnFake", (NcclTransport,), {"library_type": library})
