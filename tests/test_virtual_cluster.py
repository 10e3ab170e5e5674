"""The live ranks on virtual time: exact tokens, exactly once, nothing left, under faults."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest

from asyncmoe.errors import ConfigError
from asyncmoe.virtual.cluster import virtual_cluster
from asyncmoe.virtual.run import run
from tests import toymodel
from tests.virtual_kit import PROMPTS, Toys, play, sections, toys

BAD_LINKS = {"jitter_ms": 0.5, "reorder": 0.2, "reorder_ms": 2.0, "duplicate": 0.2}
STALLS = {"stall_every_s": 0.01, "stall_s": 0.005}


async def nothing(cluster: Toys, random: Random) -> None:
    """Let it run."""


async def cancels(cluster: Toys, random: Random) -> None:
    """Give some requests up at random moments."""
    for request in random.sample(range(len(PROMPTS)), 3):
        await asyncio.sleep(random.expovariate(1 / 0.004))
        cluster.front_end.abort(request)


async def stalls(cluster: Toys, random: Random) -> None:
    """Hosts that do something else for a while."""
    for _ in range(6):
        await asyncio.sleep(random.expovariate(1 / 0.004))
        cluster.group.stall(random.randrange(3), random.uniform(0, 0.03))


async def crash(cluster: Toys, random: Random) -> None:
    """A rank dies at a random moment."""
    await asyncio.sleep(random.uniform(0, 0.03))
    cluster.group.crash(random.randrange(1, 3))


async def cut(cluster: Toys, random: Random) -> None:
    """A connection breaks at a random moment."""
    await asyncio.sleep(random.uniform(0, 0.03))
    cluster.group.cut(*random.sample(range(3), 2))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("combine", ["per_rank", "per_expert"])
def test_tokens_are_exact_over_ranks_whatever_the_interleaving(ranks: int, combine: str) -> None:
    for seed in range(4):
        play(sections(ranks, engine={"combine": combine}), seed, nothing)


@pytest.mark.parametrize("act", [nothing, cancels, stalls, crash, cut])
def test_everything_ends_once_and_comes_home(act: Any) -> None:
    for seed in range(20):
        try:
            play(sections(3, transport={"window_rows": 1 + seed % 12}), seed, act)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


@pytest.mark.parametrize("links", [BAD_LINKS, STALLS])
def test_everything_ends_once_over_bad_links(links: dict[str, Any]) -> None:
    for seed in range(10):
        transport = {"name": "impaired:model", "options": {**links, "seed": seed}}
        play(sections(3, transport=transport), seed, cancels)


def test_a_slow_reader_holds_up_its_own_requests_alone() -> None:
    async def main() -> dict[int, float]:
        ended: dict[int, float] = {}
        async with toys(sections(2), parcel_in_s=0.0) as cluster:
            loop = asyncio.get_running_loop()
            cluster.begin()
            while len(ended) < len(PROMPTS):
                cluster.group.stall(1, 0.0005)
                await asyncio.sleep(0.001)
                for request in cluster.ends.reasons:
                    ended.setdefault(request, loop.time())
            cluster.check()
            await cluster.cluster.settled()
        return ended

    assert len(run(main(), 0)) == len(PROMPTS)


def test_the_same_seed_replays_event_for_event() -> None:
    first = play(sections(3), 7, cancels)
    assert play(sections(3), 7, cancels) == first
    assert play(sections(3), 8, cancels) != first


def test_a_run_does_not_depend_on_the_order_of_hashes() -> None:
    script = (
        "from tests.test_virtual_cluster import cancels, play, sections;"
        "print(play(sections(3), 7, cancels))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            cwd=Path(__file__).parent.parent,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1


def test_a_lost_expert_rank_ends_all_requests_by_name() -> None:
    async def main() -> None:
        async with toys(sections(3)) as cluster:
            cluster.begin()
            await asyncio.sleep(0.002)
            cluster.group.crash(2)
            await cluster.ended(len(PROMPTS))
            assert all(reasons == ["failed"] for reasons in cluster.ends.reasons.values())
            assert cluster.front_end.lost.keys() == {2}
            await cluster.cluster.settled()

    run(main(), 3)


def test_requests_with_dummy_kv_begin_with_a_decode_step() -> None:
    async def main() -> None:
        async with toys(sections(2)) as cluster:
            for request in range(3):
                cluster.front_end.begin(request, [5] * 30, 2, dummy_kv=True)
            await cluster.ended(3)
            kinds = [each.rank.times.kinds for each in cluster.group.ranks]
            attention = sum(times.rows for kind in kinds for k, times in kind.items() if k == 0)
            assert attention == 3 * 2 * 2  # requests, tokens, layers: no other position
            await cluster.cluster.settled()

    run(main())


def test_a_transport_of_the_real_world_is_refused() -> None:
    async def main() -> None:
        config = sections(2, transport={"name": "tcp"})
        async with virtual_cluster(config, toymodel.checkpoint(), lambda _: None):
            raise AssertionError

    with pytest.raises(ConfigError, match="model or impaired:model"):
        run(main())
