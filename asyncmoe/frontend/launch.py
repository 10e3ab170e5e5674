"""Making one engine of several ranks, from the place of rank 0, which has the front end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from asyncmoe import registry
from asyncmoe.config import Config
from asyncmoe.deadline import Deadline
from asyncmoe.directory import MemoryDirectory
from asyncmoe.errors import ConfigError, PeerLost, RankFailed
from asyncmoe.frontend.bootstrap import (
    StoreDirectory,
    StoreServer,
    agree_on_token,
    connect_store,
    host_store,
    make_token,
    with_token,
)
from asyncmoe.frontend.localranks import LocalRanks
from asyncmoe.frontend.world import ONE_RANK, Rendezvous, detect_world, fit_to_world
from asyncmoe.world import World

log = logging.getLogger(__name__)

T = TypeVar("T")
LOOPBACK = "127.0.0.1"
OWN_STORE_S = 2.0  # how long rank 0 tries to reach the store in its own process
OWN_ERROR_S = 2.0  # how long a lost connection waits for the lost rank's own error


@dataclass(slots=True)
class Cluster:
    """All ranks of an engine as rank 0 sees them. `close` must be called."""

    config: Config  # with ranks, threads, transport name and token filled in
    worlds: tuple[World, ...]  # the ranks that run in this process; rank 0 is the first
    directory: MemoryDirectory | StoreDirectory
    deadline: Deadline  # of the whole start-up
    ranks: LocalRanks | None = None  # the ranks that this process has started

    async def start(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which starts the ranks of this process.

        As soon as another rank fails, `work` is cancelled and that rank's `RankFailed` raised.
        Whatever fails, no other rank is left running. What fails later is logged.
        """
        try:
            if self.ranks is None:
                return await work
            result = await self._first(work, self.ranks.failed)
            self.ranks.failed.add_done_callback(_log_failure)
            return result
        except BaseException as error:
            await self._abandon(error)
            raise

    async def close(self) -> None:
        """Wait for the ranks that were told to end; kill what has not ended in
        `cluster.shutdown_timeout_s`. Idempotent."""
        if self.ranks is not None:
            await self.ranks.close(self.config.cluster.shutdown_timeout_s)
        await self._leave()

    async def _first(self, work: Coroutine[Any, Any, T], failed: asyncio.Future[None]) -> T:
        task = asyncio.ensure_future(work)
        either: set[asyncio.Future[Any]] = {task, failed}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if task.done() and isinstance(task.exception(), PeerLost | RankFailed | TimeoutError):
                # A lost connection is noticed before the process's end, which says why.
                await asyncio.wait([failed], timeout=OWN_ERROR_S)
            if failed.done():
                failed.result()
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait([task])

    async def _abandon(self, error: BaseException) -> None:
        if self.ranks is not None:
            await self.ranks.stop(self.config.cluster.shutdown_timeout_s)
        elif isinstance(self.directory, StoreDirectory) and not isinstance(error, RankFailed):
            with contextlib.suppress(RankFailed):  # the store is gone, and so are the others
                await self.directory.fail(0, str(error) or type(error).__name__)
        await self._leave()

    async def _leave(self) -> None:
        if isinstance(self.directory, StoreDirectory):
            await self.directory.close(linger_s=2.0 if self.ranks is None else 0.0)


async def form_cluster(config: Config, environ: Mapping[str, str] | None = None) -> Cluster:
    """Start, or meet, the other ranks of this process's engine.

    In the environment of torchrun and the like this process is rank 0 and meets the others; else
    it starts `cluster.ranks` - 1 processes on this machine. With the transport `inproc` all ranks
    run in this process. `environ` None takes the process's own. Raises `ConfigError`, and
    `RankFailed` or `TimeoutError` if the others do not come.
    """
    deadline = Deadline(config.cluster.start_timeout_s)
    detected = detect_world(os.environ if environ is None else environ)
    size = detected[0].size if detected else config.cluster.ranks
    config = _checked(config, size)
    if config.transport.name == "inproc":
        if detected and size > 1:
            raise ConfigError(
                f"transport inproc joins ranks of one process, but WORLD_SIZE is {size}; use tcp"
            )
        worlds = tuple(World(rank, size, rank, size) for rank in range(size))
        config = with_token(fit_to_world(config, worlds[0]), config.cluster.token or make_token())
        return Cluster(config, worlds, MemoryDirectory(), deadline)
    if detected:
        return await _meet(config, *detected, deadline)
    if size == 1:
        config = with_token(fit_to_world(config, ONE_RANK), config.cluster.token or make_token())
        return Cluster(config, (ONE_RANK,), MemoryDirectory(), deadline)
    return await _start(config, size, deadline)


async def _start(config: Config, size: int, deadline: Deadline) -> Cluster:
    world = World(0, size, 0, size)
    config = with_token(fit_to_world(config, world), config.cluster.token or make_token())
    # Children are on this machine, so that the store stays on loopback whatever bind_host is.
    server = host_store(LOOPBACK, 0, config.cluster.start_timeout_s)
    rendezvous = Rendezvous(LOOPBACK, server.port, "asyncmoe/none/0", agent_hosts=False)
    directory = await _join(world, rendezvous, server, deadline)
    ranks = LocalRanks(config, rendezvous)
    try:
        await ranks.start()
    except BaseException:
        await directory.close(linger_s=0.0)
        raise
    return Cluster(config, (world,), directory, deadline, ranks)


async def _meet(
    config: Config, world: World, rendezvous: Rendezvous, deadline: Deadline
) -> Cluster:
    if world.rank != 0:
        raise ConfigError(
            f"this process is rank {world.rank} of {world.size}; only rank 0 has a front end"
        )
    config = fit_to_world(config, world)
    if rendezvous.agent_hosts:
        directory = await _join(world, rendezvous, None, deadline)
    else:
        directory = await _host(config, world, rendezvous)
    try:
        token = await agree_on_token(config.cluster, directory, deadline.left_s)
    except BaseException:
        await directory.close(linger_s=0.0)
        raise
    return Cluster(with_token(config, token), (world,), directory, deadline)


async def _host(config: Config, world: World, rendezvous: Rendezvous) -> StoreDirectory:
    bind_host, timeout_s = config.cluster.bind_host, config.cluster.start_timeout_s
    server = host_store(bind_host, rendezvous.port, timeout_s)
    try:
        store = await asyncio.to_thread(connect_store, rendezvous, min(OWN_STORE_S, timeout_s))
    except TimeoutError:
        raise ConfigError(
            f"rank 0 listens on cluster.bind_host {bind_host!r}, where MASTER_ADDR "
            f"{rendezvous.host!r} does not lead; set cluster.bind_host to an address of this "
            "machine that the other ranks reach"
        ) from None
    return StoreDirectory(store, world, server)


async def _join(
    world: World, rendezvous: Rendezvous, server: StoreServer | None, deadline: Deadline
) -> StoreDirectory:
    store = await asyncio.to_thread(connect_store, rendezvous, deadline.left_s)
    return StoreDirectory(store, world, server)


def _checked(config: Config, size: int) -> Config:
    """`config` with the transport's name filled in, and all names known, before a rank starts."""
    name = config.transport.name or ("inproc" if size == 1 else "auto")
    registry.find("transports", name)
    registry.find("schedulers", config.scheduler.name)
    registry.find("devices", config.device.name)
    transport = config.transport.model_copy(update={"name": name})
    return config.model_copy(update={"transport": transport})


def _log_failure(failed: asyncio.Future[None]) -> None:
    if not failed.cancelled():
        log.error("%s", failed.exception())
