"""Memory that two ranks share beside their parcels (`Transport.common`)."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from asyncmoe.transport import Common
from asyncmoe.transports.auto import AutoTransport
from tests.transport_kit import Cluster
from tests.transport_worker import memory_bytes

NBYTES = 100_000
LINE_BYTES = 64


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
        assert common.mine.nbytes == common.theirs.nbytes == NBYTES
        assert not any(common.mine)
        assert common.theirs.readonly
        for half in (common.mine, common.theirs):
            assert np.frombuffer(half, np.uint8).ctypes.data % LINE_BYTES == 0
        common.mine[10 * rank + peer] = 1 + 10 * rank + peer
    for (rank, peer), common in halves.items():
        assert common.theirs[10 * peer + rank] == 1 + 10 * peer + rank
        assert sum(map(bool, common.theirs)) == 1
    await cluster.close()
    for (rank, peer), common in halves.items():
        common.mine[NBYTES - 1] = 7
        assert halves[peer, rank].theirs[NBYTES - 1] == 7


@pytest.mark.parametrize("name", ["inproc", "shm", "auto"])
async def test_a_rank_that_is_lost_shares_nothing_new(name: str) -> None:
    cluster = Cluster(name, 3, common_bytes=NBYTES)
    await cluster.start()
    before = commons(cluster)
    cluster.ranks[2].abort()
    for receiver in cluster.receivers[:2]:
        await receiver.until(lambda receiver=receiver: receiver.lost)
    assert sorted(commons(cluster)) == [(0, 1), (1, 0)]
    before[0, 2].mine[5] = 7
    assert before[2, 0].theirs[5] == 7
    with pytest.raises(ValueError, match="no connection to rank 3"):
        cluster.ranks[0].common(3)
    await cluster.close()
    assert not commons(cluster)


@pytest.mark.parametrize("name", ["inproc", "shm", "auto"])
async def test_memory_that_nobody_touches_costs_nothing(name: str) -> None:
    before = memory_bytes()
    cluster = Cluster(name, 2, common_bytes=1 << 30)
    await cluster.start()
    assert len(commons(cluster)) == 2
    assert memory_bytes() - before < 64 << 20
    await cluster.close()


async def test_ranks_of_two_machines_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AutoTransport, "_place", lambda self: f"host {self.context.rank // 2}")
    cluster = Cluster("auto", 4, common_bytes=NBYTES)
    await cluster.start()
    assert sorted(commons(cluster)) == [(0, 1), (1, 0), (2, 3), (3, 2)]
    await cluster.close()


@pytest.mark.parametrize(
    ("name", "nbytes"), [("inproc", 0), ("shm", 0), ("auto", 0), ("tcp", 64), ("impaired:tcp", 64)]
)
async def test_there_is_none_where_nobody_asks_and_over_a_network(name: str, nbytes: int) -> None:
    cluster = Cluster(name, 2, common_bytes=nbytes)
    await cluster.start()
    assert not commons(cluster)
    await cluster.close()
