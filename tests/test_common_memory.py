"""Memory that two ranks share beside their parcels (`Transport.common`)."""

from __future__ import annotations

import asyncio
import itertools
import logging

import numpy as np
import pytest

from asyncmoe.errors import RankFailed
from asyncmoe.transport import Common, ParcelClass
from asyncmoe.transports.auto import AutoTransport
from asyncmoe.transports.impaired import ImpairedTransport
from asyncmoe.transports.shm import ShmTransport
from tests.transport_kit import TRANSPORTS, Cluster, make_parcel

NBYTES = 100_000
PAGE_BYTES = 4096


def commons(cluster: Cluster) -> dict[tuple[int, int], Common]:
    """By rank and peer."""
    pairs = itertools.permutations(range(len(cluster.ranks)), 2)
    found = {(rank, peer): cluster.ranks[rank].common(peer) for rank, peer in pairs}
    return {pair: common for pair, common in found.items() if common is not None}


@pytest.mark.parametrize("name", ["inproc", "shm", "auto"])
async def test_each_side_reads_what_the_other_writes_also_after_the_end(name: str) -> None:
    cluster = Cluster(name, 3, common_bytes=NBYTES)
    await cluster.start()
    halves = commons(cluster)
    assert len(halves) == 6
    for (rank, peer), common in halves.items():
        for half in (common.mine, common.theirs):
            assert (half.nbytes, half.format) == (NBYTES, "B")
            assert np.frombuffer(half, np.uint8).ctypes.data % PAGE_BYTES == 0
        assert not any(common.mine)
        assert common.theirs.readonly
        common.mine[10 * rank + peer] = 1 + 10 * rank + peer
    for (rank, peer), common in halves.items():
        assert common.theirs[10 * peer + rank] == 1 + 10 * peer + rank
        assert sum(map(bool, common.theirs)) == 1
    await cluster.close()
    for (rank, peer), common in halves.items():
        common.mine[NBYTES - 1] = 7
        assert halves[peer, rank].theirs[NBYTES - 1] == 7


async def test_ranks_of_two_machines_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AutoTransport, "_place", lambda self: f"host {self.context.rank // 2}")
    cluster = Cluster("auto", 4, common_bytes=NBYTES)
    await cluster.start()
    assert sorted(commons(cluster)) == [(0, 1), (1, 0), (2, 3), (3, 2)]
    await cluster.close()


@pytest.mark.parametrize(
    ("name", "nbytes"),
    [
        ("inproc", 0),
        ("shm", 0),
        ("auto", 0),
        ("tcp", NBYTES),
        ("model", NBYTES),
        ("impaired:shm", NBYTES),
    ],
)
async def test_there_is_none_where_nobody_asks_and_over_a_network(
    name: str, nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TRANSPORTS, "impaired:shm", ImpairedTransport.around(ShmTransport))
    cluster = Cluster(name, 2, common_bytes=nbytes)
    await cluster.start()
    assert not commons(cluster)
    await cluster.close()


@pytest.mark.parametrize("name", ["inproc", "shm", "auto"])
async def test_memory_shared_with_a_rank_that_is_lost_stays_and_is_no_more_to_be_had(
    name: str,
) -> None:
    cluster = Cluster(name, 3, common_bytes=NBYTES)
    await cluster.start()
    ours, theirs = cluster.ranks[0].common(2), cluster.ranks[2].common(0)
    cluster.ranks[2].abort()
    for receiver in cluster.receivers[:2]:
        await receiver.until(lambda receiver=receiver: receiver.lost)
    assert sorted(commons(cluster)) == [(0, 1), (1, 0)]
    ours.mine[5], theirs.mine[6] = 1, 2
    assert (theirs.theirs[5], ours.theirs[6]) == (1, 2)
    await cluster.close()


@pytest.mark.parametrize("name", ["inproc", "shm", "auto"])
async def test_parcels_leave_it_alone(name: str) -> None:
    cluster = Cluster(name, 2, common_bytes=NBYTES)
    await cluster.start()
    common = commons(cluster)[0, 1]
    common.mine[:] = bytes(range(250)) * (NBYTES // 250)
    largest = make_parcel(0, 4096, 4096, kind=ParcelClass.COMBINE)  # fills the slots before it
    cluster.ranks[0].post(1, largest)
    await cluster.receivers[1].until(lambda: cluster.receivers[1].arrivals)
    assert common.mine == commons(cluster)[1, 0].theirs == bytes(range(250)) * (NBYTES // 250)
    cluster.receivers[1].release_all()
    await cluster.close()


def of_two_sizes(name: str) -> Cluster:
    """Two ranks that do not agree on how much to share."""
    cluster = Cluster(name, 2, common_bytes=NBYTES)
    cluster.ranks[1] = TRANSPORTS[name](cluster.context(1, 2, common_bytes=NBYTES + 1))
    return cluster


async def test_ranks_that_do_not_agree_on_its_size_are_told_so() -> None:
    says = f"common_bytes is {NBYTES}; allowed: {NBYTES + 1}, as the configuration of this rank"
    cluster = of_two_sizes("shm")
    other = asyncio.create_task(cluster.start(0))
    with pytest.raises(RankFailed, match=says):
        await cluster.start(1)
    other.cancel()
    await asyncio.wait([other])


async def test_ranks_that_do_not_agree_on_its_size_have_none_over_auto(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("asyncmoe"), "propagate", True)
    cluster = of_two_sizes("auto")
    await cluster.start()
    assert not commons(cluster)
    assert [rank.carriers() for rank in cluster.ranks] == [{1: "tcp"}, {0: "tcp"}]
    assert "segment field common_bytes is" in caplog.text
    await cluster.close()
