"""The stacks under the transports, called directly: what a transport is measured against.

Each moves payloads of one size from rank 0 to rank 1, `depth` in flight, and does nothing else: no
columns, no checks, no leases, one buffer or one ring of buffers. `Memcpy` is not even a transfer:
it is the one copy that shared memory cannot do without.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import socket
import time
from abc import ABC, abstractmethod
from collections import deque
from datetime import timedelta
from typing import Any

import torch

from asyncmoe.netbench.plan import group_of
from asyncmoe.transport import Directory, Limits, TransportContext

_ACK = b"x" * 64
_HOST = "127.0.0.1"


class Raw(ABC):
    """One side of a pair; rank 0 sends."""

    def __init__(self, rank: int, directory: Directory) -> None:
        self._rank, self._directory, self._timeout_s = rank, directory, 0.0

    async def open(self, timeout_s: float) -> None:
        """Connect."""
        self._timeout_s = timeout_s
        await self._open()

    @abstractmethod
    async def _open(self) -> None:
        """Connect."""

    @abstractmethod
    async def run(self, size: int, depth: int, count: int) -> float | None:
        """Move `count` payloads of `size` bytes; seconds until rank 1 has all, on rank 0."""

    @abstractmethod
    async def close(self) -> None:
        """Disconnect."""

    async def _hear(self, key: str) -> str:
        return await self._directory.lookup(f"raw/{key}", self._timeout_s)

    def _say(self, key: str, value: str) -> None:
        self._directory.publish(f"raw/{key}", value)


def make_raw(carrier: str, rank: int, directory: Directory) -> Raw | None:
    """The stack under a transport; None if there is none to compare with."""
    kind = _KINDS.get(carrier.rpartition(":")[2])
    return None if kind is None else kind(rank, directory)


class Socket(Raw):
    """A loopback TCP socket with blocking calls; each payload is acknowledged with 64 bytes."""

    async def _open(self) -> None:
        if self._rank == 1:
            with socket.create_server((_HOST, 0)) as listener:
                self._say("port", str(listener.getsockname()[1]))
                self._sock, _ = await asyncio.to_thread(listener.accept)
        else:
            self._sock = socket.create_connection((_HOST, int(await self._hear("port"))))
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def run(self, size: int, depth: int, count: int) -> float | None:
        """See `Raw`."""
        if self._rank == 1:
            self._take(size, count)
            return None
        payload, sock = bytes(size), self._sock
        begin_s = time.perf_counter()
        got = 0
        for sent in range(count):
            while sent - got // len(_ACK) >= depth:
                got += len(sock.recv(4096))
            sock.sendall(payload)
        while got < count * len(_ACK):
            got += len(sock.recv(4096))
        return time.perf_counter() - begin_s

    def _take(self, size: int, count: int) -> None:
        buffer, sock = memoryview(bytearray(size)), self._sock
        for _ in range(count):
            got = 0
            while got < size:
                read = sock.recv_into(buffer[got:])
                if not read:
                    return
                got += read
            sock.sendall(_ACK)

    async def close(self) -> None:
        """See `Raw`."""
        self._sock.close()


class Memcpy(Raw):
    """Copies by rank 0 into a ring of `depth` slots of shared memory; rank 1 does nothing."""

    async def _open(self) -> None:
        pass

    async def run(self, size: int, depth: int, count: int) -> float | None:
        """See `Raw`."""
        if self._rank == 1:
            return None
        payload = memoryview(bytearray(size))
        with mmap.mmap(-1, size * depth) as shared:
            ring = [memoryview(shared)[i * size : (i + 1) * size] for i in range(depth)]
            for slot in ring:
                slot[:] = payload  # its pages are there from now on
            begin_s = time.perf_counter()
            for number in range(count):
                ring[number % depth][:] = payload
            took_s = time.perf_counter() - begin_s
            for slot in ring:
                slot.release()
        return took_s

    async def close(self) -> None:
        """See `Raw`."""


class Gloo(Raw):
    """Gloo's sends and receives between two ranks. Receives are posted ahead; each quarter of a
    depth is acknowledged with a byte, as a send ends when the kernel has the payload."""

    async def _open(self) -> None:
        import torch.distributed

        distributed: Any = torch.distributed  # whose public names are not marked so
        gloo = distributed.ProcessGroupGloo
        first, timeout = self._rank == 0, timedelta(seconds=self._timeout_s)
        port = 0 if first else int(await self._hear("port"))
        self._store = distributed.TCPStore(_HOST, port, 2, first, timeout, wait_for_workers=False)
        if first:
            self._say("port", str(self._store.port))
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=_HOST)]
        options._timeout = timeout
        self._group: Any = await asyncio.to_thread(gloo, self._store, self._rank, 2, options)

    async def run(self, size: int, depth: int, count: int) -> float | None:
        """See `Raw`."""
        group = group_of(depth)
        groups = -(-count // group)
        if self._rank == 1:
            self._take(size, depth // group, group, groups)
            return None
        payload, told = torch.zeros(size, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
        send, receive = self._group.send, self._group.recv
        under_way: deque[tuple[Any, list[Any]]] = deque()  # acknowledgement, and what for
        begin_s = time.perf_counter()
        for _ in range(groups):
            if len(under_way) == depth // group:
                under_way[0][0].wait()
                under_way.popleft()
            sends = [send([payload], 1, 0) for _ in range(group)]
            under_way.append((receive([told], 1, 1), sends))
        for acknowledged, _ in under_way:
            acknowledged.wait()
        return (time.perf_counter() - begin_s) * count / (groups * group)

    def _take(self, size: int, ahead: int, group: int, groups: int) -> None:
        """All of them, with `ahead` groups of receives posted."""
        receive, send = self._group.recv, self._group.send
        rings = [[torch.zeros(size, dtype=torch.uint8) for _ in range(group)] for _ in range(ahead)]
        told = torch.zeros(1, dtype=torch.uint8)
        posted = deque([receive([each], 0, 0) for each in ring] for ring in rings[:groups])
        telling: deque[Any] = deque()
        for number in range(groups):
            for each in posted[0]:
                each.wait()
            posted.popleft()
            if number + ahead < groups:
                posted.append([receive([each], 0, 0) for each in rings[number % ahead]])
            telling.append(send([told], 0, 1))
            if len(telling) > ahead:  # complete long ago
                telling.popleft()
        for each in telling:
            each.wait()

    async def close(self) -> None:
        """See `Raw`."""
        self._group = self._store = None


class Ucxx(Raw):
    """ucxx's own asyncio interface, with its progress thread and Python futures."""

    async def _open(self) -> None:
        from asyncmoe.transports.ucx_config import config_of  # the same options as the transport's

        cpu = torch.device("cpu")
        context = TransportContext(self._rank, 2, self._directory, Limits(), cpu, b"")
        config = await config_of(context)
        import ucxx

        self._ucxx: Any = ucxx
        ucxx.init(options=config, progress_mode="thread", enable_python_future=True)
        if self._rank == 1:
            met: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            self._listener: Any = ucxx.create_listener(met.set_result)
            self._say("port", str(self._listener.port))
            self._endpoint: Any = await met
        else:
            self._endpoint = await ucxx.create_endpoint(_HOST, int(await self._hear("port")))

    async def run(self, size: int, depth: int, count: int) -> float | None:
        """See `Raw`."""
        import numpy as np

        first = self._rank == 0
        move = self._endpoint.send if first else self._endpoint.recv
        ring = [np.zeros(size, np.uint8) for _ in range(1 if first else depth)]
        under_way: deque[asyncio.Task[Any]] = deque()
        begin_s = time.perf_counter()
        for number in range(count):
            if len(under_way) == depth:
                await under_way.popleft()
            under_way.append(asyncio.ensure_future(move(ring[number % len(ring)])))
        while under_way:
            await under_way.popleft()
        end = np.zeros(1, np.uint8)
        await (self._endpoint.recv(end) if first else self._endpoint.send(end))
        return time.perf_counter() - begin_s if first else None

    async def close(self) -> None:
        """See `Raw`."""
        self._endpoint.abort()
        self._listener = self._endpoint = None
        self._ucxx.reset()


class Nixl(Raw):
    """A NIXL agent without a progress thread: writes with notifications, polled without pause.

    A slot is written again once rank 1 has said, by a notification, that it has seen it: one for
    all that it finds at once.
    """

    async def _open(self) -> None:
        from asyncmoe.transports.nixl_agent import _NIXL

        self._agent: Any = _NIXL.nixl_agent(
            f"raw-{self._rank}-{os.getpid()}",
            _NIXL.nixl_agent_config(enable_prog_thread=False, backends=[]),
        )
        self._agent.create_backend("UCX", {"ucx_error_handling_mode": "none"})
        self._runs = 0

    async def run(self, size: int, depth: int, count: int) -> float | None:
        """See `Raw`."""
        agent, first = self._agent, self._rank == 0
        self._runs += 1
        memory = torch.zeros(size * (1 if first else depth), dtype=torch.uint8)
        where = memory.data_ptr()
        registered = agent.register_memory([(where, memory.nbytes, 0, "")], "DRAM")
        self._say(f"{self._runs}/{self._rank}", f"{where} {agent.get_agent_metadata().hex()}")
        target, metadata = (await self._hear(f"{self._runs}/{1 - self._rank}")).split()
        peer = agent.add_remote_agent(bytes.fromhex(metadata))
        peer = peer.decode() if isinstance(peer, bytes) else peer
        took_s = None
        if first:
            mine = agent.get_xfer_descs([(where, size, 0)], "DRAM")
            theirs = [(int(target) + slot * size, size, 0) for slot in range(depth)]
            handles = [
                agent.initialize_xfer("WRITE", mine, agent.get_xfer_descs([t], "DRAM"), peer, b"w")
                for t in theirs
            ]
            took_s = self._write(handles, peer, count)
            for handle in handles:
                handle.release()
            agent.send_notif(peer, b"over")
        else:
            self._acknowledge(peer, count)
            self._until_notes(peer, b"over")
        agent.deregister_memory(registered)
        agent.remove_remote_agent(peer)
        return took_s

    def _write(self, handles: list[Any], peer: str, count: int) -> float:
        agent, acknowledged, busy = self._agent, 0, set[Any]()
        begin_s = time.perf_counter()
        for number in range(count):
            while number - acknowledged >= len(handles):
                acknowledged += sum(map(int, self._until_notes(peer)))
            handle = handles[number % len(handles)]
            if handle in busy:
                busy.remove(handle)
                self._finish(handle)
            if agent.transfer(handle) != "DONE":
                busy.add(handle)
        while acknowledged < count:
            acknowledged += sum(map(int, self._until_notes(peer)))
        for handle in busy:
            self._finish(handle)
        return time.perf_counter() - begin_s

    def _finish(self, handle: Any) -> None:
        while (state := self._agent.check_xfer_state(handle)) != "DONE":
            if state == "ERR":
                raise OSError("a NIXL write failed")

    def _acknowledge(self, peer: str, count: int) -> None:
        while count > 0:
            seen = len(self._until_notes(peer))
            self._agent.send_notif(peer, b"%d" % seen)
            count -= seen

    def _until_notes(self, peer: str, note: bytes = b"") -> list[bytes]:
        """The next notifications, which may have to be one in particular."""
        deadline_s = time.monotonic() + self._timeout_s
        while time.monotonic() < deadline_s:
            notes: list[bytes] = self._agent.get_new_notifs().get(peer, [])
            if notes and (not note or note in notes):
                return notes
        raise TimeoutError("no notification of a NIXL peer")

    async def close(self) -> None:
        """See `Raw`."""
        self._agent = None


_KINDS: dict[str, type[Raw]] = {
    "gloo": Gloo,
    "nixl": Nixl,
    "shm": Memcpy,
    "tcp": Socket,
    "ucx": Ucxx,
}
