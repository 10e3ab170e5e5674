"""Starting all ranks of one engine from the process of rank 0, and ending them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from asyncmoe.config import Config
from asyncmoe.directory import MemoryDirectory
from asyncmoe.frontend.launch import Cluster, form_cluster
from asyncmoe.rank import Rank, run_rank
from asyncmoe.world import World


@dataclass(slots=True)
class Ranks:
    """All ranks of an engine. `front` is rank 0, in this process; the engine closes it."""

    cluster: Cluster
    front: Rank
    here: list[asyncio.Task[None]] = field(default_factory=list)  # others in this process

    @property
    def config(self) -> Config:
        """The configuration with ranks, threads and transport filled in."""
        return self.cluster.config

    async def close(self) -> None:
        """Wait for all ranks but rank 0, which have been told to end, and kill what does not."""
        await self._end_here(self.config.cluster.shutdown_timeout_s)
        await self.cluster.close()

    async def start(self) -> None:
        """Start the ranks of this process; returns when all ranks are connected."""
        self.here = [asyncio.create_task(self._be(world)) for world in self.cluster.worlds[1:]]
        try:
            await self.front.start(self.cluster.deadline)
        except BaseException:
            await self._end_here(0.0)
            raise
        self.front.stopped.add_done_callback(_retrieve)

    async def _be(self, world: World) -> None:
        directory = self.cluster.directory
        try:
            await run_rank(self.config, world, directory, self.cluster.deadline)
        except Exception as error:
            if isinstance(directory, MemoryDirectory):
                directory.fail(world.rank, str(error))
            raise

    async def _end_here(self, timeout_s: float) -> None:
        if not self.here:
            return
        _, late = await asyncio.wait(self.here, timeout=timeout_s)
        for task in late:
            task.cancel()
        # Their errors have been reported already, as ranks that were lost or that did not start.
        await asyncio.gather(*self.here, return_exceptions=True)


async def start_ranks(config: Config) -> Ranks:
    """Start or meet all ranks; returns when they are connected and have loaded the model.

    Raises `ConfigError`, `CheckpointError`, `TimeoutError`, or `RankFailed` with the error of the
    rank that failed first; nothing is left running then.
    """
    cluster = await form_cluster(config)
    ranks = Ranks(cluster, Rank(cluster.config, cluster.worlds[0], cluster.directory))
    await cluster.start(ranks.start())
    return ranks


def _retrieve(stopped: asyncio.Future[None]) -> None:
    if not stopped.cancelled():
        stopped.exception()  # told as the loss of rank 0 already
