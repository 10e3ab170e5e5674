"""The ranks of a transport test between processes: transport, scenario, world, folder.

One process imports everything, then forks a process for each rank before any thread or loop exists.
A rank that comes to its end leaves its report in the folder.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import uvloop

from asyncmoe.transport import Limits, Parcel, TransportContext
from tests.transport_kit import TOKEN, TRANSPORTS, Recorder, assert_same, make_parcel

_COUNT = 15


class FolderDirectory:
    """A `Directory` of files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def publish(self, key: str, value: str) -> None:
        path = self._folder / key.replace("/", "-")
        partial = path.with_suffix(".partial")
        partial.write_text(value)
        partial.rename(path)

    async def lookup(self, key: str, timeout_s: float) -> str:
        path = self._folder / key.replace("/", "-")
        async with asyncio.timeout(timeout_s):
            while not path.exists():  # noqa: ASYNC110 - another process makes it
                await asyncio.sleep(0.01)
        return path.read_text()


def stream_parcel(source: int, number: int) -> Parcel:
    """Parcel `number` of the stream from `source`: from nothing to 2 MiB."""
    rows = (0, 1, 32, 256, 1024)[(source + number) % 5]
    dtype = (torch.float32, torch.bfloat16)[number % 2]
    return make_parcel(1000 * source + number, rows, 512, dtype)


async def exchange(transport: Any, receiver: Recorder, rank: int, peers: list[int]) -> list[int]:
    """Send the stream to all peers and check theirs; returns the numbers that differ."""
    posted = []
    for number in range(_COUNT):
        parcel = stream_parcel(rank, number)
        posted += [transport.post(peer, parcel) for peer in peers]
        await asyncio.sleep(0)
    await receiver.until(lambda: len(receiver.arrivals) == _COUNT * len(peers), 40.0)
    wrong = []
    for peer in peers:
        mine = [arrival.parcel for arrival in receiver.arrivals if arrival.source == peer]
        for number, parcel in enumerate(mine):
            try:
                assert_same(parcel, stream_parcel(peer, number))
            except AssertionError:
                wrong.append(parcel.stage)
    return wrong


async def finish(transport: Any, receiver: Recorder, peers: list[int]) -> None:
    """Close once all peers have what they wait for."""
    for peer in peers:
        transport.send(peer, b"done")
    await receiver.until(lambda: len(receiver.messages) == len(peers), 40.0)
    receiver.release_all()
    await transport.close()


def crashed(receiver: Recorder) -> list[int]:
    """Peers lost without a goodbye; at the end whoever is done first says goodbye first."""
    return [peer for peer, error in receiver.lost if "closed its transport" not in str(error)]


async def stream(transport: Any, receiver: Recorder, rank: int, world: int) -> dict[str, Any]:
    """All ranks send to all."""
    peers = [peer for peer in range(world) if peer != rank]
    wrong = await exchange(transport, receiver, rank, peers)
    arrived = len(receiver.arrivals)
    await finish(transport, receiver, peers)
    failed = sum(peer.outbound.unsent for peer in transport._peers.values())
    return {
        "wrong": wrong,
        "arrived": arrived,
        "lost": crashed(receiver),
        "live": transport.leases.live,
        "failed_posts": failed,
    }


async def kill(transport: Any, receiver: Recorder, rank: int, world: int) -> dict[str, Any]:
    """The last rank dies while its payloads are half sent; the others then go on."""
    victim = world - 1
    if rank == victim:
        payload = torch.zeros((1024, 12288), dtype=torch.float32)  # 48 MiB
        for peer in range(victim):
            parcel = make_parcel(0, rows=1024, hidden=1)
            parcel.payload = payload
            transport.post(peer, parcel)
        os.kill(os.getpid(), signal.SIGKILL)
    begin_s = time.monotonic()
    await receiver.until(lambda: receiver.lost, 40.0)
    detected_s = time.monotonic() - begin_s
    from_victim = len(receiver.arrivals)
    peers = [peer for peer in range(victim) if peer != rank]
    await exchange(transport, receiver, rank, peers)
    arrived = len(receiver.arrivals)
    await finish(transport, receiver, peers)
    return {
        "lost": crashed(receiver),
        "from_victim": from_victim,
        "detected_s": detected_s,
        "arrived": arrived,
        "live": transport.leases.live,
    }


async def run_rank(name: str, scenario: str, world: int, folder: Path, rank: int) -> None:
    """Run the scenario as `rank` and write its report."""
    context = TransportContext(
        rank,
        world,
        FolderDirectory(folder),
        Limits(),
        torch.device("cpu"),
        TOKEN,
        start_timeout_s=40.0,
        peer_timeout_s=20.0,
    )
    transport, receiver = TRANSPORTS[name](context), Recorder()
    await transport.start(receiver)
    run = {"stream": stream, "kill": kill}[scenario]
    report = await run(transport, receiver, rank, world)
    (folder / f"report-{rank}.json").write_text(json.dumps(report))


def main() -> None:
    """Fork the ranks and wait for them."""
    name, scenario, world, folder = sys.argv[1:]
    torch.set_num_threads(1)
    for rank in range(int(world)):
        if os.fork() == 0:
            uvloop.run(run_rank(name, scenario, int(world), Path(folder), rank))
            os._exit(0)
    for _ in range(int(world)):
        os.wait()


if __name__ == "__main__":
    main()
