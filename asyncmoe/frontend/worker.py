"""The life of a rank that has no front end: join, run until told to stop, and say what failed."""

from __future__ import annotations

import asyncio
import logging
import signal

import uvloop
from torch.distributed import Store  # type: ignore[attr-defined]  # not marked for export

from asyncmoe.config import Config
from asyncmoe.deadline import Deadline
from asyncmoe.errors import AsyncMoeError, PeerLost, RankFailed
from asyncmoe.frontend.bootstrap import (
    StoreDirectory,
    agree_on_token,
    connect_store,
    with_token,
)
from asyncmoe.frontend.world import Rendezvous, fit_to_world
from asyncmoe.rank import run_rank
from asyncmoe.world import World

log = logging.getLogger(__name__)


def worker_status(config: Config, world: World, rendezvous: Rendezvous) -> int:
    """Be the rank that torchrun or the like made this process, to its end; the exit status.

    Raises `ConfigError` if the config does not fit the world.
    """
    failure = run_worker(fit_to_world(config, world), world, rendezvous)
    if failure is not None:
        log.error("%s", failure)
    return 0 if failure is None else 1


def run_worker(config: Config, world: World, rendezvous: Rendezvous) -> RankFailed | None:
    """Run the rank until the front end or a signal ends it.

    SIGTERM ends it at once. SIGINT, which a terminal sends to every process, first leaves rank 0
    `cluster.shutdown_timeout_s` to end things in order. Returns the failure that ended it, which
    may be another rank's.
    """
    deadline = Deadline(config.cluster.start_timeout_s)
    try:
        store = connect_store(rendezvous, deadline.left_s)
    except TimeoutError as error:
        return RankFailed(world.rank, str(error))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(config, world, store, deadline))


async def _run(config: Config, world: World, store: Store, deadline: Deadline) -> RankFailed | None:
    directory = StoreDirectory(store, world)
    work = asyncio.create_task(_join_and_run(config, world, directory, deadline))
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, work.cancel)
    grace_s = config.cluster.shutdown_timeout_s
    loop.add_signal_handler(signal.SIGINT, lambda: loop.call_later(grace_s, work.cancel))
    await asyncio.wait([work])
    try:
        if work.cancelled() or (error := work.exception()) is None:
            return None
        return await _tell(error, world, directory)
    finally:
        await directory.close()


async def _join_and_run(
    config: Config, world: World, directory: StoreDirectory, deadline: Deadline
) -> None:
    token = await agree_on_token(config.cluster, directory, deadline.left_s)
    await run_rank(with_token(config, token), world, directory, deadline)


async def _tell(error: BaseException, world: World, directory: StoreDirectory) -> RankFailed:
    """Publish why this rank ends, unless another rank's failure is the reason."""
    if isinstance(error, RankFailed):
        return error
    if isinstance(error, PeerLost):
        mine = RankFailed(error.peer, error.reason)
    else:
        mine = RankFailed(world.rank, describe(error))
        log.debug("rank %d failed", world.rank, exc_info=error)
    try:
        return await directory.fail(mine.rank, mine.message)
    except RankFailed:  # the store is gone: nobody is left to tell
        return mine


def describe(error: BaseException) -> str:
    """The error as one message; an error that is not ours also names its type."""
    if isinstance(error, AsyncMoeError | TimeoutError) and str(error):
        return str(error)
    return f"{type(error).__name__}: {error}"
