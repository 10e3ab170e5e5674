"""A virtual cluster: real ranks, each in a lane of one virtual loop, and their front ends.

Several **groups** are several clusters of expert-parallel ranks side by side, replicas of one
model: a request goes to the group with the least to do.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from asyncmoe.checkpoint import Checkpoint
from asyncmoe.config import Config
from asyncmoe.deadline import Deadline
from asyncmoe.directory import MemoryDirectory
from asyncmoe.errors import ConfigError
from asyncmoe.rank import Rank
from asyncmoe.virtual.costs import Costs
from asyncmoe.virtual.frontend import VirtualFrontEnd
from asyncmoe.virtual.loop import Lane, VirtualLoop
from asyncmoe.world import World

if TYPE_CHECKING:
    from asyncmoe.workload.driver import Listener
    from asyncmoe.workload.workload import Workload

_TRANSPORTS = ("model", "impaired:model")
_SETTLE_S = 0.001  # between two looks at whether a cluster is idle

CostsOf = Callable[[int], Costs | None]


@dataclass(slots=True)
class VirtualRank:
    """One rank, and its place on the loop."""

    rank: Rank
    lane: Lane


class VirtualGroup:
    """Ranks that form one cluster. `rank` in arguments is their number in the group."""

    def __init__(self, ranks: list[VirtualRank], front_end: VirtualFrontEnd) -> None:
        self.ranks, self.front_end = ranks, front_end
        self.failures: dict[int, BaseException] = {}  # ranks that ended by a fault of their own
        for number, each in enumerate(ranks):
            each.rank.stopped.add_done_callback(partial(self._note_end, number))

    @property
    def alive(self) -> list[Rank]:
        """The ranks that have not crashed."""
        return [each.rank for each in self.ranks if not each.lane.dead]

    def crash(self, rank: int) -> None:
        """The rank's process dies: it runs nothing more, and its peers lose their connections.

        Rank 0 hosts the front end, so that nothing would be left to watch.
        """
        if rank == 0:
            raise ValueError("rank 0 hosts the front end and does not crash alone")
        each = self.ranks[rank]
        each.lane.kill()
        each.rank.transport.abort()

    def stall(self, rank: int, seconds: float) -> None:
        """The rank's host does something else for a while; what is with its device goes on."""
        self.ranks[rank].lane.charge(seconds)

    def cut(self, rank: int, other: int) -> None:
        """The connection between two ranks breaks."""
        self.ranks[rank].rank.transport.cut(other, "its link was cut")

    def held(self) -> list[str]:
        """What ranks that are alive hold of requests, in words; empty when all has come home."""
        found = [line for rank in self.alive for line in _held(rank)]
        if self.front_end.running:
            found.append(f"front end: {self.front_end.running} requests")
        return found

    async def close(self) -> None:
        """End all ranks."""
        loop = asyncio.get_running_loop()
        await asyncio.gather(
            *(
                # A dead lane runs nothing, so what is left of its rank is put away from here.
                loop.create_task(each.rank.close(), context=None if lane.dead else lane.context)
                for each in self.ranks
                for lane in [each.lane]
            )
        )

    def _note_end(self, rank: int, end: asyncio.Future[None]) -> None:
        error = None if end.cancelled() else end.exception()
        if error is not None:
            self.failures[rank] = error
            if rank and not self.ranks[rank].lane.dead:
                self.crash(rank)  # its process would end


class VirtualCluster:
    """All groups as one `workload.driver.Target`."""

    def __init__(self, loop: VirtualLoop, groups: list[VirtualGroup]) -> None:
        self.loop, self.groups = loop, groups
        self._group_of: dict[int, VirtualGroup] = {}  # by request, while it runs
        self._listener: Listener | None = None

    @property
    def ranks(self) -> list[Rank]:
        """Those of all groups."""
        return [each.rank for group in self.groups for each in group.ranks]

    def now_s(self) -> float:
        """See `Target`."""
        return self.loop.now_s

    def listen(self, listener: Listener) -> None:
        """See `Target`."""
        for group in self.groups:
            group.front_end.listen(listener)

    def submit(self, request: int, workload: Workload) -> None:
        """See `Target`."""
        group = min(self.groups, key=lambda group: group.front_end.outstanding_tokens)
        self._group_of[request] = group
        group.front_end.submit(request, workload)

    def abort(self, request: int) -> None:
        """See `Target`."""
        self._group_of[request].front_end.abort(request)

    async def settled(self, timeout_s: float = 60.0) -> None:
        """Wait until no rank holds anything of a request. Raises `TimeoutError` naming what is
        still held after `timeout_s` of virtual time."""
        end_s = self.loop.now_s + timeout_s
        while found := [line for group in self.groups for line in group.held()]:
            if self.loop.now_s >= end_s:
                raise TimeoutError("; ".join(found[:10]))
            await asyncio.sleep(_SETTLE_S)

    async def close(self) -> None:
        """End all ranks."""
        await asyncio.gather(*(group.close() for group in self.groups))


@contextlib.asynccontextmanager
async def virtual_cluster(
    config: Config,
    checkpoint: Checkpoint,
    costs_of: CostsOf,
    groups: int = 1,
) -> AsyncIterator[VirtualCluster]:
    """`groups` times `cluster.ranks` ranks on the running virtual loop; they are ended at the exit.

    Args:
        costs_of: what the rank of a number takes for its steps; the same for all groups.

    Raises `ConfigError` for a device or transport that is not of the virtual world, and as
    `Rank.start`.
    """
    loop = asyncio.get_running_loop()
    if not isinstance(loop, VirtualLoop):
        raise ConfigError("a virtual cluster needs a virtual loop; see virtual.run")
    config = as_virtual(config)
    cluster = VirtualCluster(loop, [])
    try:
        for number in range(groups):
            name = f"{number}." if groups > 1 else ""
            group = await _start_group(loop, config, checkpoint, costs_of, name)
            cluster.groups.append(group)
        yield cluster
    finally:
        await cluster.close()


def as_virtual(config: Config) -> Config:
    """`config` with the device and transport of the virtual world where it names none.

    Raises `ConfigError` for one that it names and that is another.
    """
    transport = config.transport.name or "model"
    if transport not in _TRANSPORTS:
        allowed = " or ".join(_TRANSPORTS)
        raise ConfigError(f"transport.name is {transport!r}; in the virtual world it is {allowed}")
    return config.model_copy(
        update={
            "device": config.device.model_copy(update={"name": "model", "pin": False}),
            "transport": config.transport.model_copy(update={"name": transport}),
        }
    )


async def _start_group(
    loop: VirtualLoop, config: Config, checkpoint: Checkpoint, costs_of: CostsOf, name: str
) -> VirtualGroup:
    size = config.cluster.ranks
    directory = MemoryDirectory()
    deadline = Deadline(math.inf)  # it counts in real time, of which a big cluster takes some
    ranks = []
    for number in range(size):
        world = World(number, size, number, size)
        lane = loop.lane(f"{name}{number}", costs_of(number))
        rank = Rank(config, world, directory, checkpoint)
        rank.times.clock = lane.clock
        ranks.append(VirtualRank(rank, lane))
    await asyncio.gather(
        *(loop.create_task(each.rank.start(deadline), context=each.lane.context) for each in ranks)
    )
    return VirtualGroup(ranks, VirtualFrontEnd(ranks[0].rank, loop, ranks[0].lane))


def _held(rank: Rank) -> list[str]:
    stats = rank.stats()
    found = {name: stats[name] for name in ("queued_rows", "outbox_rows", "outstanding_rows")}
    found["loans"] = rank.transport.leases.live  # type: ignore[attr-defined]  # both have them
    if rank.home is not None:
        for name in ("running_requests", "waiting_requests", "chunks"):
            found[name] = stats[name]
        found["slots"] = stats["slots"] - stats["free_slots"]
        found["kv_blocks"] = stats["kv_blocks"] - stats["free_kv_blocks"]
    return [f"rank {rank.rank}: {count} {name}" for name, count in found.items() if count]
