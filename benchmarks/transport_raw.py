"""The tcp transport beside a bare loopback socket: GB/s, and what a parcel costs the loop.

Two processes. The sender keeps `depth` parcels of 180 KiB in flight, each acknowledged by a short
message; the bare socket does the same with as many bytes. Both run in turn; best of the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing as mp
import socket
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
import uvloop

from asyncmoe.directory import MemoryDirectory
from asyncmoe.transport import (
    Arrival,
    Limits,
    Parcel,
    ParcelClass,
    Posted,
    TransportContext,
)
from asyncmoe.transports.tcp import TcpTransport

_HIDDEN = 2880  # 32 rows of 2880 in bfloat16 are 180 KiB
_TOP_K = 4


class _Receiver:
    """Acknowledges parcels, those of one turn of the loop together, and counts what comes back."""

    def __init__(self) -> None:
        self.transport: TcpTransport | None = None
        self.acknowledged = 0
        self.progress = asyncio.Event()
        self.gone = asyncio.Event()
        self._arrived = 0

    def on_parcel(self, arrival: Arrival) -> None:
        arrival.release()
        if not self._arrived:
            asyncio.get_running_loop().call_soon(self._acknowledge, arrival.source)
        self._arrived += 1

    def on_message(self, source: int, message: bytes) -> None:
        self.acknowledged += int.from_bytes(message, "little")
        self.progress.set()

    def on_peer_lost(self, peer: int, error: Exception) -> None:
        self.gone.set()

    def _acknowledge(self, source: int) -> None:
        assert self.transport is not None
        self.transport.send(source, self._arrived.to_bytes(4, "little"))
        self._arrived = 0


def dispatch(rows: int, hidden: int) -> Parcel:
    """A dispatch parcel as an attention stage makes it."""
    pairs = rows * _TOP_K
    return Parcel(
        ParcelClass.DISPATCH,
        1,
        np.arange(rows, dtype=np.uint32),
        np.zeros(rows, np.uint32),
        np.zeros(pairs, np.uint8),
        torch.zeros((rows, hidden), dtype=torch.bfloat16),
        np.full(rows, _TOP_K, np.uint8),
        np.zeros(pairs, np.uint16),
        np.ones(pairs, np.float32),
    )


async def _connect(rank: int, pipe: Connection) -> tuple[TcpTransport, _Receiver]:
    directory = MemoryDirectory()
    context = TransportContext(rank, 2, directory, Limits(), torch.device("cpu"), b"benchmark")
    transport, receiver = TcpTransport(context), _Receiver()
    receiver.transport = transport
    starting = asyncio.create_task(transport.start(receiver))
    loop = asyncio.get_running_loop()
    pipe.send(await directory.lookup(f"tcp/{rank}", 10.0))
    directory.publish(f"tcp/{1 - rank}", await loop.run_in_executor(None, pipe.recv))
    await starting
    return transport, receiver


def _serve(pipe: Connection) -> None:
    """The receiving process: the transport first, then the bare socket."""

    async def transport() -> None:
        tcp, receiver = await _connect(1, pipe)
        busy_s = time.process_time()
        await receiver.gone.wait()
        pipe.send(time.process_time() - busy_s)
        await tcp.close()

    while (order := pipe.recv()) is not None:
        if order == "transport":
            uvloop.run(transport())
        else:
            _serve_raw(pipe, order)


def _serve_raw(pipe: Connection, size: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send(listener.getsockname()[1])
        sock, _ = listener.accept()
    buffer = memoryview(bytearray(size))
    with sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while True:
            got = 0
            while got < size:
                read = sock.recv_into(buffer[got:])
                if not read:
                    return
                got += read
            sock.sendall(b"x" * 64)


def _raw(pipe: Connection, size: int, depth: int, count: int) -> float:
    """Seconds for `count` payloads over a bare socket."""
    pipe.send(size)
    payload = bytes(size)
    with socket.create_connection(("127.0.0.1", pipe.recv())) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        begin_s = time.perf_counter()
        acknowledged = 0
        for sent in range(count):
            while sent - acknowledged // 64 >= depth:
                acknowledged += len(sock.recv(4096))
            sock.sendall(payload)
        while acknowledged < 64 * count:
            acknowledged += len(sock.recv(4096))
        return time.perf_counter() - begin_s


async def _ours(pipe: Connection, parcel: Parcel, depth: int, count: int) -> dict[str, float]:
    """Seconds for `count` parcels, µs of a post, µs of CPU of the receiving process per parcel."""
    pipe.send("transport")
    tcp, receiver = await _connect(0, pipe)
    posts_s: list[float] = []
    posted: list[Posted] = []
    begin_s = time.perf_counter()
    for sent in range(count):
        while sent - receiver.acknowledged >= depth:
            receiver.progress.clear()
            await receiver.progress.wait()
        before_s = time.perf_counter()
        posted.append(tcp.post(1, parcel))
        posts_s.append(time.perf_counter() - before_s)
    while receiver.acknowledged < count:
        receiver.progress.clear()
        await receiver.progress.wait()
    total_s = time.perf_counter() - begin_s
    assert all(p.source_free and p.error is None for p in posted)
    await tcp.close()
    receive_s = await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
    return {
        "seconds": total_s,
        "post_us": float(np.median(posts_s)) * 1e6,
        "receive_us": receive_s / count * 1e6,
    }


def measure(rows: int, hidden: int, depth: int, count: int, rounds: int) -> dict[str, Any]:
    """Best of `rounds` for both, taken in turn."""
    context = mp.get_context("spawn")
    pipe, far = context.Pipe()
    server = context.Process(target=_serve, args=(far,))
    server.start()
    parcel = dispatch(rows, hidden)
    size = rows * hidden * 2
    ours, raw = [], []
    for _ in range(rounds):
        raw.append(_raw(pipe, size, depth, count))
        ours.append(uvloop.run(_ours(pipe, parcel, depth, count)))
    pipe.send(None)
    server.join()
    gigabytes = size * count / 1e9
    best = gigabytes / min(run["seconds"] for run in ours)
    best_raw = gigabytes / min(raw)
    return {
        "size": size,
        "rows": rows,
        "depth": depth,
        "gb_per_s": round(best, 3),
        "raw_gb_per_s": round(best_raw, 3),
        "ratio": round(best / best_raw, 3),
        "post_us": round(min(run["post_us"] for run in ours), 1),
        "receive_us": round(min(run["receive_us"] for run in ours), 1),
    }


def main() -> None:
    """Print one JSON object, or a line per result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--depth", type=int, default=16)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    shapes = [(32, _HIDDEN), (64, 512)]
    results = [measure(*s, arguments.depth, arguments.count, arguments.rounds) for s in shapes]
    if arguments.json:
        print(json.dumps({"results": results}))
    else:
        for result in results:
            print("  ".join(f"{key} {value}" for key, value in result.items()))


if __name__ == "__main__":
    main()
