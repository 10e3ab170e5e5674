"""The logic over NCCL, with only the calls of NCCL and CUDA themselves replaced."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import torch

from asyncmoe.directory import MemoryDirectory
from asyncmoe.errors import ConfigError, MissingDependency, PeerLost
from asyncmoe.transport import Limits, ParcelClass, TransportContext
from asyncmoe.transports.nccl import NcclTransport
from asyncmoe.wire import DTYPES
from tests.fakenccl import World, transport_on
from tests.transport_kit import TRANSPORTS, Cluster, assert_same, make_parcel, until_free


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
async def three(world: World, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    """Three connected ranks; after the test nothing is left of them, and NCCL saw no fault."""
    monkeypatch.setitem(TRANSPORTS, "nccl", transport_on(world))
    cluster = Cluster("nccl", 3)
    await cluster.start()
    world.groups.clear()  # those of the warm-up
    yield cluster
    for receiver in cluster.receivers:
        receiver.release_all()
    await cluster.close()
    assert cluster.live_leases() == 0
    assert world.faults == []
    assert all(communicator.aborted for communicator in world.communicators)


async def test_all_ranks_exchange_both_classes_in_order_and_unchanged(three: Cluster) -> None:
    kinds = (ParcelClass.DISPATCH, ParcelClass.COMBINE)
    for number in range(40):
        for source in range(3):
            for target in {0, 1, 2} - {source}:
                dtype = DTYPES[number % len(DTYPES)]
                parcel = make_parcel(number, 16, 32, dtype, kinds[number % 2])
                three.ranks[source].post(target, parcel)
        await asyncio.sleep(0)
    for receiver in three.receivers:
        await receiver.until(lambda receiver=receiver: len(receiver.arrivals) == 80)
        for arrival in receiver.arrivals:
            number = arrival.parcel.stage
            dtype = DTYPES[number % len(DTYPES)]
            assert_same(arrival.parcel, make_parcel(number, 16, 32, dtype, kinds[number % 2]))
        assert receiver.stages(receiver.arrivals[0].source) == list(range(0, 40, 2))


async def test_what_one_turn_posts_leaves_as_one_group(three: Cluster, world: World) -> None:
    for number in range(20):
        three.ranks[0].post(1, make_parcel(number))
    await three.receivers[1].until(lambda: len(three.receivers[1].arrivals) == 20)
    assert 20 in world.groups  # the sender's
    assert sum(world.groups) == 40


async def test_the_next_burst_waits_until_the_one_before_is_over(
    three: Cluster, world: World
) -> None:
    world.holding = True
    for number in range(5):
        three.ranks[0].post(1, make_parcel(number))
        await asyncio.sleep(0.02)
    assert world.groups == [1, 1]  # a send and its receive
    world.holding = False
    world.match()
    await three.receivers[1].until(lambda: len(three.receivers[1].arrivals) == 5)
    assert world.groups[2] == 4


async def test_both_sides_make_the_lower_ranks_communicator_first(
    three: Cluster, world: World
) -> None:
    made: dict[bytes, dict[int, int]] = {}  # by identity and by its end: when
    senders: dict[bytes, int] = {}
    for position, communicator in enumerate(world.communicators):
        made.setdefault(communicator.identity, {})[communicator.owner] = position
        if communicator.rank == 0:
            senders[communicator.identity] = communicator.owner
    owners = [id(transport._library) for transport in three.ranks]
    for low, high in ((0, 1), (0, 2), (1, 2)):
        ends = {owners[low], owners[high]}
        upward, downward = (
            next(times for i, times in made.items() if times.keys() == ends and senders[i] == first)
            for first in (owners[low], owners[high])
        )
        assert all(upward[end] < downward[end] for end in ends)


async def test_only_the_lost_peers_communicators_are_aborted(three: Cluster, world: World) -> None:
    world.holding = True
    posted = [three.ranks[0].post(2, make_parcel(n)) for n in range(3)]
    await asyncio.sleep(0.05)
    assert three.ranks[2].leases.filling == 3
    three.ranks[2].abort()
    await until_free(posted)
    assert all(isinstance(one.error, PeerLost) for one in posted)
    await three.receivers[1].until(lambda: three.receivers[1].lost)
    async with asyncio.timeout(5):
        while sum(c.aborted for c in world.communicators) < 8:  # noqa: ASYNC110 - on threads
            await asyncio.sleep(0.01)
    assert three.ranks[2].leases.live == 0
    world.holding = False
    three.ranks[0].post(1, make_parcel(7))
    await three.receivers[1].until(lambda: three.receivers[1].arrivals)
    assert sum(not communicator.aborted for communicator in world.communicators) == 4


async def test_an_error_of_nccl_itself_loses_the_peer_by_name(three: Cluster, world: World) -> None:
    world.holding = True
    three.ranks[0].post(1, make_parcel(0))
    await asyncio.sleep(0.05)
    world.state = 6
    for receiver in three.receivers[:2]:
        await receiver.until(lambda receiver=receiver: receiver.lost)
    reasons = [str(receiver.lost[0][1]) for receiver in three.receivers[:2]]
    assert any("its nccl connection failed: state 6" in reason for reason in reasons)
    world.state = 0


async def test_nothing_is_polled_while_nothing_is_under_way(three: Cluster) -> None:
    three.ranks[0].post(1, make_parcel(0))
    await three.receivers[1].until(lambda: three.receivers[1].arrivals)
    await asyncio.sleep(0.05)
    assert not any(rank._poller._scheduled for rank in three.ranks)


def context(world: int, **options: object) -> TransportContext:
    directory = MemoryDirectory()
    return TransportContext(
        0, world, directory, Limits(), torch.device("cpu"), b"", options=dict(options)
    )


@pytest.mark.parametrize(
    ("ranks", "ctas", "reason"), [(2, 0, "allowed: 1 to 32"), (18, 2, "68 thread blocks for 18")]
)
def test_kernels_that_do_not_fit_the_gpu_side_by_side_are_refused(
    world: World, ranks: int, ctas: int, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        transport_on(world)(context(ranks, ctas=ctas))


def test_without_the_library_the_error_names_what_to_install() -> None:
    with pytest.raises(MissingDependency, match=r"nccl4py.*pip install 'asyncmoe\[nccl\]'"):
        NcclTransport(context(2))
