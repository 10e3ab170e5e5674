"""Whether the ranks of an engine march, and what each of them needs for it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from asyncmoe.march import Fellows, Together
from asyncmoe.marches import LEADER, Marches
from asyncmoe.registry import find

if TYPE_CHECKING:
    from asyncmoe.rank import Rank
    from asyncmoe.transport import Common

_LOG = logging.getLogger(__name__)
_MOST_FELLOWS = 255
_MOST_ROWS = 256  # of a rank; more are compute enough for a loop to keep up with


def march_rows(rank: Rank) -> int:
    """The most rows that a rank marches with; 0: there are no marches. The same on all ranks."""
    return 0 if _obstacle(rank) else min(rank.config.engine.max_requests, _MOST_ROWS)


def make_marches(rank: Rank) -> tuple[Marches, Fellows] | None:
    """What `rank`, which is put together and connected, needs to march with all others; None: it
    does not. Rank 0 logs why not."""
    obstacle = _obstacle(rank)
    commons = {} if obstacle else _commons(rank)
    if obstacle is None:
        obstacle = _obstacle_here(rank, commons)
    if obstacle is not None:
        if rank.rank == LEADER and rank.world > 1:
            _LOG.info("ranks do not march: %s", obstacle)
        return None
    home, executor, rows = rank.home, rank.executor, march_rows(rank)
    assert home is not None
    fellows = Fellows(rank.rank, commons, rows, rank.placement.owner)

    def begin(number: int) -> None:
        executor.march(marches.take, Together(fellows, number, marches.over))

    marches = Marches(rank.rank, rank.world, rows, home, rank.send, begin, fellows.leave)
    home.marches = marches
    return marches, fellows


def _obstacle(rank: Rank) -> str | None:
    """Why no rank marches, as far as all of them know; None: nothing is in the way."""
    config, chain = rank.config, rank.chain
    rule = find("schedulers", config.scheduler.name)
    obstacles = {
        "engine.marches is off": not config.engine.marches,
        "there is one rank": rank.world == 1,
        f"there are {rank.world} ranks, at most {_MOST_FELLOWS} march": rank.world > _MOST_FELLOWS,
        "the world is virtual": rank.device.virtual,
        f"scheduler.name = {config.scheduler.name} waits for batches or for other ranks": (
            not rule.work_conserving or rule.synchronous or chain.tracks > 1
        ),
        "the model has no MoE layers": not chain.layers,
        f"engine.combine is {config.engine.combine}": config.engine.combine != "per_rank",
        "placement.roles keeps attention and experts apart": (
            len(rank.placement.home_ranks) < rank.world
        ),
    }
    return next((reason for reason, holds in obstacles.items() if holds), None)


def _obstacle_here(rank: Rank, commons: dict[int, Common]) -> str | None:
    if not rank.model.walks:
        return "not all layers of the model are compiled MoE layers"
    if not rank.executor.may_march:
        return "nothing is compiled that its loop could be woken by"
    without = sorted(set(range(rank.world)) - {rank.rank} - set(commons))
    return f"rank {rank.rank} shares no memory with rank {without[0]}" if without else None


def _commons(rank: Rank) -> dict[int, Common]:
    others = (other for other in range(rank.world) if other != rank.rank)
    found = {other: rank.transport.common(other) for other in others}
    return {other: common for other, common in found.items() if common is not None}
