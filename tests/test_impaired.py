"""Links that are late, narrow, jammed or lost, over which every promise of a transport holds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from asyncmoe import registry
from asyncmoe.errors import ConfigError, ParcelTooLarge, PeerLost
from asyncmoe.transport import Limits, ParcelClass
from asyncmoe.transports.impaired import ImpairedTransport
from asyncmoe.transports.impaired_options import Fractions, Impairments
from asyncmoe.transports.shm import ShmTransport
from tests.transport_kit import Cluster, assert_same, make_parcel, until_free

DISPATCH, COMBINE = ParcelClass
Starting = Callable[..., Awaitable[Cluster]]


@pytest.fixture
async def impaired() -> AsyncIterator[Starting]:
    """Starts ranks of `impaired:tcp` with some options; nothing of them is left afterwards."""
    clusters: list[Cluster] = []

    async def start(world: int = 2, limits: Limits | None = None, **options: Any) -> Cluster:
        cluster = Cluster("impaired:tcp", world, options=options, limits=limits or Limits())
        clusters.append(cluster)
        await cluster.start()
        return cluster

    yield start
    for cluster in clusters:
        for receiver in cluster.receivers:
            receiver.release_all()
        await cluster.close()
        assert cluster.live_leases() == 0


def now_s() -> float:
    return asyncio.get_running_loop().time()


async def test_a_parcel_arrives_late_and_as_it_was_when_it_was_posted(impaired: Starting) -> None:
    cluster = await impaired(latency_ms=80)
    parcel, as_sent, begin_s = make_parcel(1), make_parcel(1), now_s()
    posted = cluster.ranks[0].post(1, parcel)
    for column in (parcel.slot, parcel.epoch, parcel.part, parcel.expert, parcel.weight):
        column.fill(0)
    receiver = cluster.receivers[1]
    await receiver.until(lambda: receiver.arrivals)
    assert now_s() - begin_s >= 0.08
    assert_same(receiver.arrivals[0].parcel, as_sent)
    await until_free([posted])
    assert posted.error is None


async def test_lanes_overtake_each_other_and_keep_their_own_order(impaired: Starting) -> None:
    cluster = await impaired(jitter_ms=4, reorder=0.2, reorder_ms=10, seed=3)
    count = 60
    for number in range(count):
        cluster.ranks[0].post(1, make_parcel(number))
        cluster.ranks[0].post(1, make_parcel(number, kind=COMBINE))
        cluster.ranks[0].send(1, str(number).encode())
    receiver = cluster.receivers[1]
    await receiver.until(lambda: len(receiver.arrivals) + len(receiver.messages) == 3 * count)
    assert receiver.stages(0) == receiver.stages(0, COMBINE) == list(range(count))
    assert receiver.messages == [(0, str(number).encode()) for number in range(count)]
    kinds = [arrival.parcel.kind for arrival in receiver.arrivals]
    assert kinds != [DISPATCH, COMBINE] * count


@pytest.mark.parametrize("more", [{}, {"jitter_ms": 2}])
async def test_duplicates_cross_the_link_and_arrive_once(
    impaired: Starting, more: dict[str, float]
) -> None:
    cluster = await impaired(duplicate=0.5, seed=5, **more)
    count = 100
    posted = [
        cluster.ranks[0].post(1, make_parcel(number, kind=kind))
        for number in range(count)
        for kind in ParcelClass
    ]
    receiver = cluster.receivers[1]
    await receiver.until(lambda: len(receiver.arrivals) == 2 * count)
    await until_free(posted)
    cluster.ranks[0].send(1, b"the end")
    await receiver.until(lambda: receiver.messages)
    assert receiver.stages(0) == receiver.stages(0, COMBINE) == list(range(count))
    crossed = cluster.ranks[0]._inner._peers[1].outbound._sequence
    assert 1.2 * count < crossed[DISPATCH] < 1.8 * count


async def test_a_cap_holds_for_one_direction_and_is_shared_by_its_lanes(
    impaired: Starting,
) -> None:
    cluster = await impaired(links={"0-1": {"mbit_per_s": 8.0}})
    begin_s = now_s()
    for kind in ParcelClass:  # 128 KiB each: 0.26 s together at 1 MB/s
        cluster.ranks[0].post(1, make_parcel(0, 256, 128, kind=kind))
        cluster.ranks[1].post(0, make_parcel(0, 256, 128, kind=kind))
    ends_s = []
    for receiver in cluster.receivers:
        await receiver.until(lambda receiver=receiver: len(receiver.arrivals) == 2)
        ends_s.append(now_s() - begin_s)
    assert ends_s[1] >= 0.26
    assert ends_s[0] < ends_s[1]


async def test_a_stalled_link_lets_nothing_out_and_then_everything(impaired: Starting) -> None:
    begin_s = now_s()
    cluster = await impaired(stall_every_s=1e-6, stall_s=0.1)  # at once, and again and again
    await asyncio.sleep(0.01)  # the loop's clock counts milliseconds: let the stall begin before
    cluster.ranks[0].post(1, make_parcel(0))
    receiver = cluster.receivers[1]
    await receiver.until(lambda: receiver.arrivals)
    assert now_s() - begin_s >= 0.1


async def test_a_trace_says_when_a_link_is_down(impaired: Starting, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("time_s,link,available\n0,0-1,0\n0.3,0-1,0.5\n")
    cluster = await impaired(3, trace=str(trace), mbit_per_s=1000)
    begin_s = now_s()
    for target in (1, 2):
        cluster.ranks[0].post(target, make_parcel(0))
    ends_s = []
    for receiver in cluster.receivers[2:0:-1]:
        await receiver.until(lambda receiver=receiver: receiver.arrivals)
        ends_s.append(now_s() - begin_s)
    assert ends_s[1] > 0.2
    assert ends_s[0] < ends_s[1]


async def test_a_rank_is_lost_when_its_time_has_come_and_only_on_that_link(
    impaired: Starting,
) -> None:
    cluster = await impaired(3, links={"0-1": {"lose_after_s": 0.1, "latency_ms": 5000}})
    waiting = cluster.ranks[0].post(1, make_parcel(0))
    for rank, peer in ((0, 1), (1, 0)):
        receiver = cluster.receivers[rank]
        await receiver.until(lambda receiver=receiver: receiver.lost)
        assert [lost for lost, _ in receiver.lost] == [peer]
    assert isinstance(waiting.error, PeerLost)
    with pytest.raises(PeerLost):
        cluster.ranks[0].post(1, make_parcel(1))
    cluster.ranks[0].post(2, make_parcel(2))
    await cluster.receivers[2].until(lambda: cluster.receivers[2].arrivals)


async def test_close_waits_for_what_is_late(impaired: Starting) -> None:
    cluster = await impaired(latency_ms=100)
    for number in range(3):
        cluster.ranks[0].post(1, make_parcel(number))
    cluster.ranks[0].send(1, b"last")
    await cluster.close(0)
    receiver = cluster.receivers[1]
    await receiver.until(lambda: receiver.lost)
    assert (receiver.stages(0), receiver.messages) == ([0, 1, 2], [(0, b"last")])
    with pytest.raises(PeerLost):
        cluster.ranks[0].post(1, make_parcel(9))


async def test_what_cannot_be_sent_is_refused_at_once_on_a_late_link_too(
    impaired: Starting,
) -> None:
    cluster = await impaired(latency_ms=1, limits=Limits(parcel_bytes=1024))
    with pytest.raises(ParcelTooLarge):
        cluster.ranks[0].post(1, make_parcel(0, 64, 64))
    with pytest.raises(ValueError, match="no connection to rank 7"):
        cluster.ranks[0].post(7, make_parcel(0))


def test_work_takes_longer_while_less_of_a_link_is_available() -> None:
    fractions = Fractions([(1.0, 0.5), (3.0, 0.0), (4.0, 0.25)])
    assert fractions.end_of(0.0, 1.0) == 1.0
    assert fractions.end_of(0.5, 1.0) == 2.0
    assert fractions.end_of(2.0, 1.0) == 6.0
    assert fractions.end_of(9.0, 1.0) == 13.0
    assert Fractions([(1.0, 0.0)]).end_of(0.5, 1.0) == float("inf")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"latency": 3}, "Did you mean"),
        ({"latency_ms": "3"}, "transport.options.latency_ms is '3'"),
        ({"duplicate": 1.5}, "duplicate is 1.5"),
        ({"stall_s": 1}, "go together"),
        ({"links": {"0-1": {"latncy_ms": 3}}}, "Did you mean 'latency_ms'"),
        ({"links": {"0>1": {}}}, "is not a link"),
        ({"trace": "/nowhere.csv"}, "cannot be read"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Cluster("impaired:tcp", 2, options=options)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("time,link,available\n", "line 1"),
        ("time_s,link,available\n0,0-1\n", "line 2"),
        ("time_s,link,available\n0,0-1,1\n1,0-1,1.5\n", "line 3"),
        ("time_s,link,available\n0,zero,1\n", "is not a link"),
        ("time_s,link,available\n0,0-1,1\n", "mbit_per_s is not set"),
    ],
)
def test_a_trace_that_is_wrong_is_refused_with_its_line(
    text: str, says: str, tmp_path: Path
) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        Impairments({"trace": str(path)}, 2).of(0, 1)


def test_the_registry_wraps_what_is_named_behind_the_colon() -> None:
    over_shm = registry.find("transports", "impaired:shm")
    assert issubclass(over_shm, ImpairedTransport)
    assert over_shm.wrapped is ShmTransport
    assert registry.find("transports", "impaired:shm") is over_shm
    with pytest.raises(ConfigError, match="Did you mean 'tcp'"):
        registry.find("transports", "impaired:tpc")
    with pytest.raises(ConfigError, match="wraps no other"):
        registry.find("transports", "tcp:shm")


def test_a_link_of_a_rank_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="names rank 9; there are 2 ranks"):
        Impairments({"links": {"0-9": {"latency_ms": 5}}}, 2)
