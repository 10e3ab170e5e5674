"""The ranks of transport tests between processes.

One process imports everything, and then forks a process for each rank of each scenario; it never
has a thread or a loop itself. A rank that comes to its end leaves its report in a folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
import sys
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch
import uvloop

from asyncmoe.errors import PeerLost, RankFailed
from asyncmoe.transport import Arrival, Limits, Parcel, ParcelClass, TransportContext
from asyncmoe.wire import DTYPES
from tests.transport_kit import (
    TOKEN,
    TRANSPORTS,
    Reader,
    Recorder,
    assert_same,
    make_parcel,
    until_free,
)

SIZES = (0, 1, 4095, 65536, 65537, 184320, 1 << 20, (16 << 20) + 1, 64 << 20)  # bytes
STEPS = (
    "connected", "posted", "within a payload", "arrived", "released", "closing", "closed"
)  # fmt: skip
_COUNT = 15
COMMON_BYTES = 100_000
_BACKLOG = 300  # MiB for a rank that does not read


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


@cache
def stream_parcel(source: int, number: int) -> Parcel:
    """Parcel `number` of the stream from `source`: from nothing to 1 MiB."""
    rows = (0, 1, 32, 128, 512)[(source + number) % 5]
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


async def stream(transport: Any, rank: int, world: int, folder: Path) -> dict[str, Any]:
    """All ranks send to all."""
    receiver = Recorder()
    await transport.start(receiver)
    peers = [peer for peer in range(world) if peer != rank]
    wrong = await exchange(transport, receiver, rank, peers)
    arrived = len(receiver.arrivals)
    await finish(transport, receiver, peers)
    linked = getattr(transport, "_peers", {})  # of those that are not made of others
    failed = sum(peer.outbound.unsent for peer in linked.values())
    return {
        "wrong": wrong,
        "arrived": arrived,
        "lost": crashed(receiver),
        "failed_posts": failed,
    }


@cache
def sized_parcel(number: int) -> Parcel:
    """Parcel `number` of the sizes: each of SIZES as bytes, then 180 KiB of each dtype."""
    if number < len(SIZES):
        parcel = make_parcel(number, rows=1, hidden=1, dtype=torch.uint8)
        data = torch.arange(SIZES[number], dtype=torch.int32).mul_(31).add_(number)
        parcel.payload = data.to(torch.uint8)[None]
        return parcel
    dtype = DTYPES[number - len(SIZES)]
    return make_parcel(number, rows=32, hidden=5760 // dtype.itemsize, dtype=dtype)


async def sizes(transport: Any, rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Both ranks send all sizes to each other."""
    count, peer = len(SIZES) + len(DTYPES), 1 - rank
    reader = Reader(lambda source, kind, number: sized_parcel(number))
    await transport.start(reader)
    posted = [transport.post(peer, sized_parcel(number)) for number in range(count)]
    await reader.until(lambda: reader.count == count, 60.0)
    await until_free(posted, 60.0)
    await part(transport, reader, [peer])
    return {
        "wrong": reader.wrong,
        "in_order": reader.seen == {(peer, ParcelClass.DISPATCH): list(range(count))},
        "errors": [str(one.error) for one in posted if one.error is not None],
    }


async def part(transport: Any, reader: Reader, peers: list[int]) -> None:
    """Close once all peers have what they wait for."""
    for peer in peers:
        transport.send(peer, b"done")
    await reader.until(lambda: sum(m == b"done" for _, m in reader.messages) == len(peers), 40.0)
    await transport.close()


class Mortal(Reader):
    """A reader that notes when peers are lost, or dies at a step of its own."""

    def __init__(self, step: str, folder: Path, rank: int) -> None:
        super().__init__(lambda source, kind, stage: stream_parcel(source, stage - 1000 * source))
        self.lost_s: dict[int, float] = {}
        self._step, self._note = step, folder / f"died-{rank}"

    def at(self, step: str) -> None:
        """Die, if this is the step."""
        if step == self._step:
            self._note.write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)

    def on_parcel(self, arrival: Arrival) -> None:
        self.at("arrived")
        if self._step == "released":
            arrival.release()
            self.at("released")
        super().on_parcel(arrival)

    def on_peer_lost(self, peer: int, error: Exception) -> None:
        self.lost_s[peer] = time.monotonic()
        super().on_peer_lost(peer, error)


async def kill(transport: Any, rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Ranks 0 and 1 are healthy; each other rank dies at its own step. Then those two go on."""
    reader = Mortal(STEPS[rank - 2] if rank > 1 else "", folder, rank)
    await transport.start(reader)
    await all_started(rank, world, folder)
    reader.at("connected")
    posted = []
    for peer in range(world) if rank < 2 else (0, 1):
        if peer != rank and (rank > 1 or peer > 1):
            with contextlib.suppress(PeerLost):
                posted += [transport.post(peer, stream_parcel(rank, n)) for n in range(3)]
    if rank > 1:
        await die(transport, reader)
    victims = set(range(2, world))
    await reader.until(lambda: victims <= set(reader.lost), 40.0)
    await until_free(posted, 10.0)
    peer = 1 - rank
    for number in range(_COUNT):
        transport.post(peer, stream_parcel(rank, number))
    await reader.until(lambda: len(reader.seen.get((peer, ParcelClass.DISPATCH), ())) == _COUNT)
    late_s = {
        STEPS[victim - 2]: reader.lost_s[victim] - float((folder / f"died-{victim}").read_text())
        for victim in victims
    }
    await part(transport, reader, [peer])
    return {
        "wrong": reader.wrong,
        "healthy_lost": [
            p for p in reader.lost if p < 2 and "closed its" not in str(reader.lost[p])
        ],
        "late_s": late_s,
        "arrived": len(reader.seen[peer, ParcelClass.DISPATCH]),
    }


async def all_started(rank: int, world: int, folder: Path) -> None:
    """Wait for the others: one who dies before that ends their start, which is as promised."""
    notes = [folder / f"up-{other}" for other in range(world)]
    notes[rank].touch()
    async with asyncio.timeout(40):
        while not all(note.exists() for note in notes):  # noqa: ASYNC110 - no event tells of it
            await asyncio.sleep(0.01)


async def die(transport: Any, reader: Mortal) -> None:
    """Come to every step; one of them is the last."""
    huge = torch.zeros((1024, 5120), dtype=torch.float32)  # 20 MiB
    for peer in (0, 1, 0, 1):
        parcel = make_parcel(60000, rows=1024, hidden=1)
        parcel.payload = huge
        if reader._step in ("posted", "within a payload"):
            transport.post(peer, parcel)
    reader.at("posted")
    await asyncio.sleep(0)
    reader.at("within a payload")
    await reader.until(lambda: reader.count == 6)  # "arrived" and "released" are over
    closing = asyncio.ensure_future(transport.close())
    await asyncio.sleep(0)
    reader.at("closing")
    await closing
    reader.at("closed")


async def stop(transport: Any, rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Rank 1 is stopped while rank 0 sends it much more than there is room for."""
    reader = Reader(lambda source, kind, stage: stream_parcel(source, stage - 1000 * source))
    if rank == 1:
        reader = Reader()  # the stopped rank gets other parcels
    await transport.start(reader)
    others = [peer for peer in range(3) if peer != rank]
    if rank == 1:
        for peer in others:
            transport.send(peer, f"{os.getpid()}".encode())
        os.kill(os.getpid(), signal.SIGSTOP)
        await reader.until(lambda: reader.count == _BACKLOG, 40.0)
        await part(transport, reader, others)
        return {"in_order": reader.seen == {(0, ParcelClass.DISPATCH): list(range(_BACKLOG))}}
    await reader.until(lambda: reader.messages)
    stopped = int(reader.messages.pop()[1])
    await until_stopped(stopped)
    before = memory_bytes()
    if rank == 0:
        parcel = make_parcel(0, rows=256, hidden=1024)  # 1 MiB
        for number in range(_BACKLOG):
            parcel.stage = number
            transport.post(1, parcel)
    for number in range(_COUNT):
        transport.post(2 - rank, stream_parcel(rank, number))
    await reader.until(lambda: reader.count == _COUNT)
    grown = memory_bytes() - before
    transport.send(2 - rank, b"go on")
    if rank == 2:
        await reader.until(lambda: (0, b"go on") in reader.messages)
        os.kill(stopped, signal.SIGCONT)
    await part(transport, reader, others)
    return {"wrong": reader.wrong, "grown_mib": grown >> 20}


async def until_stopped(pid: int) -> None:
    """Wait until the process does nothing any more."""
    async with asyncio.timeout(20):
        while state_of(pid) != "T":  # noqa: ASYNC110 - no event tells of it
            await asyncio.sleep(0.01)


def state_of(pid: int) -> str:
    """What the process does, as one letter."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def memory_bytes() -> int:
    """Memory of this process that is in use, what it shares included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def kill_start(transport: Any, rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Rank 1 of 3 dies once it has published where it is, while the others wait for it."""
    begin_s = time.monotonic()
    try:
        await transport.start(Reader())
    except (TimeoutError, RankFailed) as error:
        outcome = type(error).__name__
    await transport.close()
    return {"outcome": outcome, "took_s": time.monotonic() - begin_s}


class DeadlyDirectory(FolderDirectory):
    """One whose user dies when it has published."""

    def publish(self, key: str, value: str) -> None:
        super().publish(key, value)
        os.kill(os.getpid(), signal.SIGKILL)


async def share(transport: Any, rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Both ranks write to what they share and tell what they see there; then rank 1 dies."""
    receiver, peer = Recorder(), 1 - rank
    await transport.start(receiver)
    common = transport.common(peer)
    if common is not None:
        common.mine[-1] = 10 + rank
    transport.send(peer, b"written")
    await receiver.until(lambda: receiver.messages)
    seen = None if common is None else [common.theirs[-1]]
    if rank == 1:
        transport.send(peer, json.dumps(seen).encode())
        await receiver.until(lambda: len(receiver.messages) == 2)
        os.kill(os.getpid(), signal.SIGKILL)
    await receiver.until(lambda: len(receiver.messages) == 2)
    transport.send(peer, b"die")
    await receiver.until(lambda: receiver.lost)
    if common is not None and seen is not None:
        common.mine[-1] = 0
        seen.append(common.theirs[-1])
    after = transport.common(peer)
    await transport.close()
    return {
        "seen": seen,
        "seen_by_peer": json.loads(receiver.messages[1][1]),
        "after": None if after is None else "memory",
    }


SCENARIOS = {
    "stream": stream,
    "share": share,
    "sizes": sizes,
    "kill": kill,
    "kill_start": kill_start,
    "stop": stop,
}


async def run_rank(name: str, scenario: str, world: int, folder: Path, rank: int) -> None:
    """Run the scenario as `rank` and write its report, with what is left behind it."""
    before = descriptors()
    dies_early = scenario == "kill_start" and rank == 1
    transport = TRANSPORTS[name](
        TransportContext(
            rank,
            world,
            (DeadlyDirectory if dies_early else FolderDirectory)(folder),
            Limits(),
            torch.device("cpu"),
            TOKEN,
            start_timeout_s=1.5 if scenario == "kill_start" else 40.0,
            peer_timeout_s=20.0,
            common_bytes=COMMON_BYTES,
        )
    )
    report = await SCENARIOS[scenario](transport, rank, world, folder)
    report["live"] = transport.leases.live
    del transport
    report["left"] = await left_behind(before)
    (folder / f"report-{rank}.json").write_text(json.dumps(report))


async def left_behind(before: list[str]) -> list[str]:
    """Tasks, threads and descriptors of this rank beside those before, after a grace period."""
    for _ in range(30):
        gc.collect()
        left = [str(task) for task in asyncio.all_tasks() - {asyncio.current_task()}]
        left += [t.name for t in threading.enumerate() if t is not threading.main_thread()]
        now = descriptors()
        left += now if len(now) > len(before) else []
        if not left:
            break
        await asyncio.sleep(0.05)
    return left


def descriptors() -> list[str]:
    """What every open file descriptor stands for."""
    names = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing itself
            names.append(os.readlink(f"/proc/self/fd/{number}"))
    return names


def main() -> None:
    """Run what standard input asks for, line by line, and answer each when all ranks have ended."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        name, scenario, world, folder = line.split(maxsplit=3)
        for rank in range(int(world)):
            if os.fork() == 0:
                uvloop.run(run_rank(name, scenario, int(world), Path(folder.strip()), rank))
                os._exit(0)
        for _ in range(int(world)):
            os.wait()
        print("done", flush=True)


if __name__ == "__main__":
    main()
