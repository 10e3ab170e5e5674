"""What every transport promises, checked with several ranks in one loop and between processes."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import torch

from asyncmoe.errors import ParcelTooLarge, PeerLost, ProtocolError
from asyncmoe.transport import Limits, ParcelClass
from asyncmoe.wire import DTYPES
from tests.transport_kit import (
    TRANSPORTS,
    Cluster,
    assert_same,
    make_parcel,
    until_free,
)

DISPATCH, COMBINE = ParcelClass.DISPATCH, ParcelClass.COMBINE


@pytest.fixture(params=sorted(TRANSPORTS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def three(name: str) -> AsyncIterator[Cluster]:
    """Three connected ranks; after the test nothing of them is left."""
    cluster = Cluster(name, 3)
    await cluster.start()
    yield cluster
    for receiver in cluster.receivers:
        receiver.release_all()
    await cluster.close()
    assert cluster.live_leases() == 0


async def test_parcels_and_messages_of_a_peer_arrive_in_order_each_once(three: Cluster) -> None:
    count = 200
    for number in range(count):
        three.ranks[0].post(2, make_parcel(number))
        three.ranks[0].post(2, make_parcel(number, kind=COMBINE))
        three.ranks[0].send(2, str(number).encode())
        three.ranks[1].post(2, make_parcel(number))
    receiver = three.receivers[2]
    await receiver.until(lambda: len(receiver.arrivals) + len(receiver.messages) == 4 * count)
    assert receiver.stages(0) == receiver.stages(1) == list(range(count))
    assert receiver.stages(0, COMBINE) == list(range(count))
    assert receiver.messages == [(0, str(number).encode()) for number in range(count)]


@pytest.mark.parametrize("kind", [DISPATCH, COMBINE])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
async def test_every_dtype_and_column_arrives_unchanged(
    three: Cluster, dtype: torch.dtype, kind: ParcelClass
) -> None:
    sent = make_parcel(7, rows=33, hidden=5, dtype=dtype, kind=kind)
    three.ranks[1].post(0, sent)
    await three.receivers[0].until(lambda: three.receivers[0].arrivals)
    assert three.receivers[0].arrivals[0].source == 1
    assert_same(three.receivers[0].arrivals[0].parcel, sent)


@pytest.mark.parametrize(
    ("rows", "hidden"), [(0, 0), (0, 64), (3, 0), (1, 1), (32, 2880), (1024, 4096)]
)
async def test_payloads_of_any_size_arrive_whole(three: Cluster, rows: int, hidden: int) -> None:
    sent = [make_parcel(n, rows, hidden, torch.float32) for n in range(2)]
    posted = [three.ranks[0].post(1, parcel) for parcel in sent]
    await three.receivers[1].until(lambda: len(three.receivers[1].arrivals) == 2)
    for arrival, parcel in zip(three.receivers[1].arrivals, sent, strict=True):
        assert_same(arrival.parcel, parcel)
    three.receivers[1].release_all()
    await until_free(posted)
    assert all(one.error is None for one in posted)


async def test_a_burst_from_all_to_all_arrives_complete(three: Cluster) -> None:
    for number in range(30):
        for source in range(3):
            for target in {0, 1, 2} - {source}:
                three.ranks[source].post(target, make_parcel(number, rows=64, hidden=512))
    for receiver in three.receivers:
        await receiver.until(lambda receiver=receiver: len(receiver.arrivals) == 60)
    for target, receiver in enumerate(three.receivers):
        for source in {0, 1, 2} - {target}:
            assert receiver.stages(source) == list(range(30))


@pytest.mark.parametrize("rows", [64, 8192])  # 8192 rows are 16 MiB, more than goes out at once
async def test_a_source_that_is_free_may_be_rewritten_without_changing_the_arrival(
    three: Cluster, rows: int
) -> None:
    parcel, as_sent = make_parcel(1, rows, 512), make_parcel(1, rows, 512)
    posted = three.ranks[0].post(1, parcel)
    posted.when_free(lambda _: parcel.payload.fill_(-1))
    for column in (parcel.slot, parcel.epoch, parcel.part, parcel.expert):
        column.fill(0)  # columns are the sender's again at once
    await three.receivers[1].until(lambda: three.receivers[1].arrivals)
    assert_same(three.receivers[1].arrivals[0].parcel, as_sent)
    three.receivers[1].release_all()
    await until_free([posted])


async def test_arrivals_that_are_held_keep_their_payload_while_more_arrive(three: Cluster) -> None:
    sent = [make_parcel(number, 16, 256) for number in range(40)]
    for parcel in sent:
        three.ranks[0].post(1, parcel)
    await three.receivers[1].until(lambda: len(three.receivers[1].arrivals) == 40)
    assert three.ranks[1].leases.held == 40
    for arrival, parcel in zip(three.receivers[1].arrivals, sent, strict=True):
        assert_same(arrival.parcel, parcel)


async def test_columns_outlive_the_release_of_their_payload(three: Cluster) -> None:
    three.ranks[0].post(1, make_parcel(1))
    await three.receivers[1].until(lambda: three.receivers[1].arrivals)
    parcel = three.receivers[1].arrivals[0].parcel
    three.receivers[1].release_all()
    three.ranks[0].post(1, make_parcel(2))
    await three.receivers[1].until(lambda: three.receivers[1].arrivals)
    np.testing.assert_array_equal(parcel.slot, make_parcel(1).slot)


async def test_a_second_release_is_refused(three: Cluster) -> None:
    three.ranks[0].post(1, make_parcel(1))
    await three.receivers[1].until(lambda: three.receivers[1].arrivals)
    arrival = three.receivers[1].arrivals.pop()
    arrival.release()
    with pytest.raises(RuntimeError, match="FREE, not HELD"):
        arrival.release()


async def test_a_receiver_that_never_releases_holds_up_nobody_else(three: Cluster) -> None:
    for number in range(50):
        parcel = make_parcel(number, 16, 1024)
        three.ranks[0].post(1, parcel)
        three.ranks[0].post(2, parcel)
        three.ranks[2].post(1, make_parcel(number))
    await three.receivers[2].until(lambda: len(three.receivers[2].arrivals) == 50)
    three.receivers[2].release_all()
    await three.receivers[1].until(lambda: len(three.receivers[1].arrivals) == 100)
    assert three.ranks[1].leases.held == 100


@pytest.mark.parametrize("way", ["close", "abort"])
async def test_a_rank_that_leaves_is_lost_once_and_the_others_go_on(
    three: Cluster, way: str
) -> None:
    if way == "close":
        await three.close(2)
    else:
        three.ranks[2].abort()
    for rank in (0, 1):
        receiver = three.receivers[rank]
        await receiver.until(lambda receiver=receiver: receiver.lost)
        with pytest.raises(PeerLost, match="rank 2 is lost"):
            three.ranks[rank].post(2, make_parcel(0))
        with pytest.raises(PeerLost, match="rank 2 is lost"):
            three.ranks[rank].send(2, b"")
    three.ranks[0].post(1, make_parcel(5))
    await three.receivers[1].until(lambda: three.receivers[1].arrivals)
    assert three.receivers[1].stages(0) == [5]
    assert [[peer for peer, _ in r.lost] for r in three.receivers] == [[2], [2], []]


async def test_parcels_under_way_to_a_lost_peer_fail_with_peer_lost(three: Cluster) -> None:
    big = make_parcel(0, rows=4096, hidden=2048)  # 32 MiB: more than the kernel takes at once
    posted = [three.ranks[0].post(1, big) for _ in range(3)]
    three.ranks[1].abort()
    await until_free(posted)
    assert isinstance(posted[-1].error, PeerLost)
    await three.receivers[0].until(lambda: three.receivers[0].lost)


async def test_what_was_posted_before_close_still_arrives(three: Cluster) -> None:
    for number in range(20):
        three.ranks[0].post(1, make_parcel(number, 256, 1024))
    three.ranks[0].send(1, b"last")
    await three.close(0)
    receiver = three.receivers[1]
    await receiver.until(lambda: receiver.lost)
    assert receiver.stages(0) == list(range(20))
    assert receiver.messages == [(0, b"last")]


async def test_a_receiver_that_refuses_a_parcel_loses_its_sender_alone(three: Cluster) -> None:
    def refuse(arrival: Any) -> None:
        raise ProtocolError("credits that were never given")

    three.receivers[1]._on_arrival = refuse
    three.ranks[0].post(1, make_parcel(0))
    await three.receivers[1].until(lambda: three.receivers[1].lost)
    await three.receivers[0].until(lambda: three.receivers[0].lost)
    assert "never given" in str(three.receivers[1].lost[0][1])
    assert three.ranks[1].leases.live == 0
    three.ranks[2].send(1, b"still here")
    await three.receivers[1].until(lambda: three.receivers[1].messages)


async def test_a_fault_in_the_receiver_is_reported_and_the_next_parcel_arrives(
    three: Cluster,
) -> None:
    faults: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))

    def fail_first(arrival: Any) -> None:
        if arrival.parcel.stage == 0:
            arrival.release()
            raise KeyError("a bug")

    three.receivers[1]._on_arrival = fail_first
    three.ranks[0].post(1, make_parcel(0))
    three.ranks[0].post(1, make_parcel(1))
    await three.receivers[1].until(lambda: three.receivers[1].arrivals)
    assert three.receivers[1].stages(0) == [1]
    assert isinstance(faults[0]["exception"], KeyError)
    faults.clear()  # its traceback keeps the parcel, and so the memory that it lies in


async def test_a_parcel_beyond_the_limits_is_refused_where_it_is_posted(name: str) -> None:
    cluster = Cluster(name, 2, limits=Limits(parcel_bytes=1024, parcel_rows=8, message_bytes=64))
    await cluster.start()
    with pytest.raises(ParcelTooLarge, match=r"1028 bytes; limits.parcel_bytes is 1024"):
        cluster.ranks[0].post(1, make_parcel(0, rows=1, hidden=257))
    with pytest.raises(ProtocolError, match="rows is 9"):
        cluster.ranks[0].post(1, make_parcel(0, rows=9, hidden=1))
    with pytest.raises(ProtocolError, match="message_bytes = 64"):
        cluster.ranks[0].send(1, bytes(65))
    cluster.ranks[0].post(1, make_parcel(3, rows=8, hidden=32))  # nothing of these was numbered
    await cluster.receivers[1].until(lambda: cluster.receivers[1].arrivals)
    cluster.receivers[1].release_all()
    await cluster.close()


async def test_a_frame_beyond_the_receivers_limits_costs_the_connection(name: str) -> None:
    cluster = Cluster(name, 2)
    cluster.ranks[1] = TRANSPORTS[name](cluster.context(1, 2, limits=Limits(hidden=16)))
    await cluster.start()
    cluster.ranks[0].post(1, make_parcel(0, hidden=8))
    await cluster.receivers[1].until(lambda: cluster.receivers[1].lost)
    await cluster.receivers[0].until(lambda: cluster.receivers[0].lost)
    assert "hidden is 8; allowed: limits.hidden = 16" in str(cluster.receivers[1].lost[0][1])
    assert cluster.receivers[1].arrivals == []
    await cluster.close()
    assert cluster.live_leases() == 0


async def test_only_ranks_that_are_connected_can_be_posted_to(three: Cluster) -> None:
    for peer in (0, 3, -1):
        with pytest.raises(ValueError, match="no connection"):
            three.ranks[0].post(peer, make_parcel(0))


async def test_close_may_be_called_twice_and_before_start(name: str) -> None:
    cluster = Cluster(name, 2)
    await cluster.close()
    cluster = Cluster(name, 2)
    await cluster.start()
    await cluster.close()
    await cluster.close()
    with pytest.raises(PeerLost, match="closed its transport"):
        cluster.ranks[0].send(1, b"")


async def test_one_rank_alone_has_nothing_to_start(name: str) -> None:
    cluster = Cluster(name, 1)
    await cluster.start()
    await cluster.close()
    assert cluster.receivers[0].lost == []


async def test_a_missing_rank_ends_the_start_with_a_timeout(name: str) -> None:
    cluster = Cluster(name, 3, start_timeout_s=0.3)
    outcome = await asyncio.gather(
        *(cluster.ranks[r].start(cluster.receivers[r]) for r in (0, 1)), return_exceptions=True
    )
    assert [type(error) for error in outcome] == [TimeoutError, TimeoutError]
    await cluster.close()


async def test_a_clean_close_leaves_nothing_behind(name: str) -> None:
    async def run() -> None:
        cluster = Cluster(name, 3)
        await cluster.start()
        for number in range(10):
            cluster.ranks[0].post(1, make_parcel(number, 64, 512))
            cluster.ranks[1].post(2, make_parcel(number))
        await cluster.receivers[1].until(lambda: len(cluster.receivers[1].arrivals) == 10)
        await cluster.receivers[2].until(lambda: len(cluster.receivers[2].arrivals) == 10)
        for receiver in cluster.receivers:
            receiver.release_all()
        await cluster.close()
        assert cluster.live_leases() == 0
        assert all(receiver.lost == [] for receiver in cluster.receivers)

    await run()
    gc.collect()
    descriptors, tasks = _descriptors(), len(asyncio.all_tasks())
    for _ in range(3):
        await run()
    gc.collect()
    assert (_descriptors(), len(asyncio.all_tasks())) == (descriptors, tasks)


def _descriptors() -> list[str]:
    return sorted(entry for entry in os.listdir("/proc/self/fd"))
