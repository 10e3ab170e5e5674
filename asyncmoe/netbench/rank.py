"""One rank of a benchmark, as a process: `python -m asyncmoe.netbench.rank PLAN FOLDER RANK`.

A sender keeps `depth` parcels in flight, packed as the engine posts them; the receiver acknowledges
each quarter of a depth with one short message, on which the sender posts as many. What a rank
measured is left in the folder as `report-RANK.json`.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch
import uvloop

from asyncmoe import registry
from asyncmoe.errors import AsyncMoeError
from asyncmoe.netbench.plan import Case, FolderDirectory, Plan, group_of
from asyncmoe.netbench.raw import make_raw
from asyncmoe.packed import pack
from asyncmoe.transport import (
    Arrival,
    Limits,
    Parcel,
    ParcelClass,
    Receiver,
    Transport,
    TransportContext,
)

_TOKEN = b"benchmark"
_START_S = 30.0
_RAW_S = 60.0
_ROWS, _TOP_K = 32, 4
_ACK, _BARRIER = b"A", b"B"
_SETTLE_S = 0.3  # before a rank counts as idle
_FEWEST = 8  # parcels of a round, or twice the depth
_MOST_RAW = 200_000  # transfers of a raw stack in one round


class Flow:
    """What one rank sends to another for a while."""

    def __init__(
        self, transport: Transport, target: int, parcel: Parcel, depth: int, seconds: float
    ) -> None:
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.target, self._parcel = target, parcel
        self._post_to, self._depth, self._seconds = transport.post, depth, seconds
        self._group = group_of(depth)
        self._left = -(-max(_FEWEST, 2 * depth) // self._group)  # groups to be sent at the least
        self._posted_s: list[float] = []  # of each group, in the order posted
        self._acknowledged_s: list[float] = []  # likewise
        self._begin_s = 0.0

    def begin(self) -> None:
        """Post the first."""
        self._begin_s = time.perf_counter()
        for _ in range(self._depth // self._group):
            self._post()

    def acknowledged(self) -> None:
        """A group has arrived: post another, or end."""
        now_s = time.perf_counter()
        self._acknowledged_s.append(now_s)
        if self._left > 0 or now_s < self._begin_s + self._seconds:
            self._post()
        elif len(self._acknowledged_s) == len(self._posted_s):
            self.over.set_result(None)

    def _post(self) -> None:
        """One group."""
        self._left -= 1
        post, target, parcel = self._post_to, self.target, self._parcel
        self._posted_s.append(time.perf_counter())
        for _ in range(self._group):
            post(target, parcel)

    def report(self) -> dict[str, Any]:
        """How much in which time, and how long each took to be acknowledged."""
        took_s = np.subtract(self._acknowledged_s, self._posted_s)
        return {
            "count": len(took_s) * self._group,
            "seconds": self._acknowledged_s[-1] - self._begin_s,
            "p50_us": float(np.percentile(took_s, 50)) * 1e6,
            "p99_us": float(np.percentile(took_s, 99)) * 1e6,
        }


class Station(Receiver):
    """A rank's end: acknowledges parcels, and hears what others say."""

    def __init__(self, ranks: int) -> None:
        self.transport: Transport | None = None
        self.flow: Flow | None = None  # what this rank sends
        self.group = 1  # parcels of a source that are acknowledged together
        self.barriers = [0] * ranks  # by who came to them
        self.lost: dict[int, Exception] = {}
        self._taken = [0] * ranks  # and not acknowledged, by source
        self._changed = asyncio.Event()

    def on_parcel(self, arrival: Arrival) -> None:
        """See `Receiver`."""
        arrival.release()
        source = arrival.source
        self._taken[source] += 1
        if self._taken[source] == self.group:
            self._taken[source] = 0
            assert self.transport is not None
            self.transport.send(source, _ACK)

    def on_message(self, source: int, message: bytes) -> None:
        """See `Receiver`."""
        if message == _ACK:
            assert self.flow is not None
            self.flow.acknowledged()
        else:
            self.barriers[source] += 1
            self._changed.set()

    def on_peer_lost(self, peer: int, error: Exception) -> None:
        """See `Receiver`."""
        self.lost[peer] = error
        if self.flow is not None and self.flow.target == peer and not self.flow.over.done():
            self.flow.over.set_exception(error)
        self._changed.set()

    async def change(self, of: Sequence[int]) -> None:
        """Wait until something was said. Raises `PeerLost` if one of these ranks is lost; others
        may be done and gone."""
        for peer in of:
            if peer in self.lost:
                raise self.lost[peer]
        self._changed.clear()
        await self._changed.wait()


class Bench:
    """One rank that goes through the plan."""

    def __init__(self, plan: Plan, rank: int, folder: Path) -> None:
        """Raises as `registry.find` and the transport do."""
        kind = registry.find("transports", plan.transport)
        on_cpu = "cpu" in kind.device_types
        self._device = torch.device("cpu") if on_cpu else torch.device(kind.device_types[0], rank)
        self._plan, self._rank = plan, rank
        self._directory = FolderDirectory(folder)
        self._others = [each for each in range(plan.ranks) if each != rank]
        self._station = Station(plan.ranks)
        self._passed = 0  # barriers
        context = TransportContext(
            rank,
            plan.ranks,
            self._directory,
            Limits(parcel_bytes=max(Limits().parcel_bytes, *plan.sizes)),
            self._device,
            _TOKEN,
            start_timeout_s=_START_S,
        )
        self._transport = self._station.transport = kind(context)

    async def run(self) -> dict[str, Any]:
        """The rank's report: idle CPU, and for each case what this rank measured."""
        await self._transport.start(self._station)
        try:
            carriers = self._transport.carriers()
            await self._barrier()
            idle_cpu = await self._idle()
            ours = [await self._measure(case) for case in self._plan.cases()]
            await self._barrier()
        finally:
            await self._transport.close()
        raw = await self._measure_raw(carriers.get(1, self._plan.transport), ours)
        return {"idle_cpu": idle_cpu, "ours": ours, "raw_gb_per_s": raw}

    async def _barrier(self) -> None:
        """Wait until all ranks are here."""
        self._passed += 1
        for peer in self._others:
            self._transport.send(peer, _BARRIER)
        while absent := [p for p in self._others if self._station.barriers[p] < self._passed]:
            await self._station.change(absent)

    async def _idle(self) -> float:
        """Cores that this process uses while nothing happens."""
        await asyncio.sleep(_SETTLE_S)
        begin_s, cpu_s = time.monotonic(), time.process_time()
        await asyncio.sleep(self._plan.idle_s)
        used = (time.process_time() - cpu_s) / (time.monotonic() - begin_s)
        await self._barrier()
        return used

    async def _measure(self, case: Case) -> list[dict[str, Any]]:
        """All rounds of a case."""
        target = next((to for source, to in case.flows if source == self._rank), None)
        parcel = None if target is None else _parcel(case.size, self._device)
        self._station.group = group_of(case.depth)
        await self._barrier()
        if parcel is not None and target is not None:
            await self._send(target, parcel, case.depth, 0.0)
        rounds = []
        for _ in range(self._plan.rounds):
            await self._barrier()
            cpu_s, flow = time.process_time(), {}
            if parcel is not None and target is not None:
                flow = await self._send(target, parcel, case.depth, self._plan.seconds)
            await self._barrier()
            rounds.append({**flow, "cpu_s": time.process_time() - cpu_s})
        return rounds

    async def _send(
        self, target: int, parcel: Parcel, depth: int, seconds: float
    ) -> dict[str, Any]:
        """Send for so long. Raises `PeerLost`."""
        flow = self._station.flow = Flow(self._transport, target, parcel, depth, seconds)
        flow.begin()
        await flow.over
        return flow.report()

    async def _measure_raw(
        self, carrier: str, ours: list[list[dict[str, Any]]]
    ) -> list[float | None]:
        """What the stack itself does in each case of rank 0 and 1; nothing for the others."""
        cases = self._plan.cases()
        nothing: list[float | None] = [None] * len(cases)
        raw = make_raw(carrier, self._rank, self._directory) if self._rank < 2 else None
        if raw is None:
            return nothing
        found = nothing
        async with asyncio.timeout(_RAW_S + len(cases) * self._plan.rounds * self._plan.seconds):
            await raw.open(_START_S)
            for case in cases:
                if len(case.flows) > 1 or set(case.flows[0]) != {0, 1}:
                    continue
                count = await self._agree_on_count(case, ours)
                for _ in range(self._plan.rounds):
                    seconds = await raw.run(case.size, case.depth, count)
                    if seconds is not None:
                        rate = case.size * count / seconds / 1e9
                        found[case.number] = max(rate, found[case.number] or 0.0)
            await raw.close()
        return found

    async def _agree_on_count(self, case: Case, ours: list[list[dict[str, Any]]]) -> int:
        """As many transfers as the transport did itself, which took about the time there is."""
        key = f"count/{case.number}"
        if self._rank == case.flows[0][0]:
            count = max(each["count"] for each in ours[case.number])
            self._directory.publish(key, str(min(_MOST_RAW, max(count, 2 * case.depth))))
        return int(await self._directory.lookup(key, _START_S))


def _parcel(size: int, device: torch.device) -> Parcel:
    """A dispatch parcel with a payload of `size` bytes."""
    if size % (2 * _ROWS):
        payload = torch.zeros((1, size), dtype=torch.uint8, device=device)
    else:
        payload = torch.zeros((_ROWS, size // 2 // _ROWS), dtype=torch.bfloat16, device=device)
    rows = len(payload)
    pairs = rows * _TOP_K
    parcel = Parcel(
        kind=ParcelClass.DISPATCH,
        stage=1,
        slot=np.arange(rows, dtype=np.uint32),
        epoch=np.zeros(rows, np.uint32),
        part=np.zeros(pairs, np.uint8),
        payload=payload,
        fanout=np.full(rows, _TOP_K, np.uint8),
        expert=np.zeros(pairs, np.uint16),
        weight=np.ones(pairs, np.float32),
    )
    return pack(parcel)


def main() -> None:
    """Run, and leave a report: what was measured, or the error."""
    plan, folder, rank = Plan.decode(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)

    async def work() -> dict[str, Any]:
        return await Bench(plan, rank, folder).run()

    try:
        report = uvloop.run(work())
    except (AsyncMoeError, OSError) as error:  # a TimeoutError is an OSError
        report = {"error": str(error) or type(error).__name__}
    (folder / f"report-{rank}.json").write_bytes(orjson.dumps(report))


if __name__ == "__main__":
    main()
