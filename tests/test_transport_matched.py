"""Matched transfers, over Gloo: windows, frames that make no sense, receives that are given up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from asyncmoe.errors import ConfigError, RankFailed
from asyncmoe.transport import Limits, ParcelClass
from asyncmoe.transports.gloo import GlooPair
from asyncmoe.transports.matched_flow import (
    BURST_BYTES,
    WINDOW_BYTES,
    WINDOW_PARCELS,
    Window,
)
from asyncmoe.transports.matched_pair import Lane, Operation
from asyncmoe.twophase import Outbound
from asyncmoe.wire import PRELUDE_BYTES, FrameKind, decode_prelude, encode_prelude, encode_taken
from tests.transport_kit import Cluster, assert_same, make_parcel, until_free

LIMITS = Limits()
MIB_ROWS = 512  # rows of 512 float32, which are 1 MiB


@pytest.fixture
async def three() -> AsyncIterator[Cluster]:
    """Three connected ranks; after the test nothing of them is left."""
    cluster = Cluster("gloo", 3)
    await cluster.start()
    yield cluster
    for receiver in cluster.receivers:
        receiver.release_all()
    await cluster.close()
    assert cluster.live_leases() == 0


# -- windows and lanes ---------------------------------------------------------------------------


def test_a_window_is_bounded_by_parcels_and_by_bytes_but_takes_any_one_parcel() -> None:
    window = Window()
    assert window.put(10 * WINDOW_BYTES)
    assert not window.put(1)
    window.take(1)
    assert all(window.put(1) for _ in range(WINDOW_PARCELS))
    assert not window.put(1)
    window.take(WINDOW_PARCELS)
    assert window.put(WINDOW_BYTES - 5)
    assert not window.put(6)
    assert window.put(5)


async def test_a_lane_launches_in_order_and_no_more_than_it_may() -> None:
    launched: list[list[Operation]] = []
    done: list[int] = []
    lane = Lane(lambda burst: launched.append(list(burst)), most=1)
    tensor = torch.empty(1)
    for number in range(3):
        lane.put([Operation(tensor, lambda number=number: done.append(number))])
    assert launched == []  # not open
    lane.open()
    lane.put([Operation(tensor, lambda: done.append(3))])
    assert [len(burst) for burst in launched] == [3]
    for operation in launched[0]:
        operation.done()
    await asyncio.sleep(0)
    assert done == [0, 1, 2]
    assert [len(burst) for burst in launched] == [3, 1]


def test_a_lane_keeps_bursts_that_both_sides_know_as_they_are() -> None:
    launched: list[list[int]] = []
    lane = Lane(lambda burst: launched.append([each.tensor.numel() for each in burst]), most=None)
    lane.put([Operation(torch.empty(number), lambda: None) for number in (1, 2)])
    lane.put([Operation(torch.empty(3), lambda: None)])
    assert launched == []  # not open
    lane.open()
    assert launched == [[1, 2], [3]]
    lane.put([Operation(torch.empty(4), lambda: None)])
    assert launched == [[1, 2], [3], [4]]


async def test_what_a_turn_posts_goes_as_bursts_which_a_notice_ends(three: Cluster) -> None:
    peer = three.ranks[0]._peers[1]
    sizes: list[int] = []
    launch = peer.pair.send
    peer._sends._launch = lambda burst: (sizes.append(len(burst)), launch(burst))
    for number in range(7):
        three.ranks[0].post(1, make_parcel(number, MIB_ROWS, BURST_BYTES >> 12))  # half of one
    await three.receivers[1].until(lambda: len(three.receivers[1].arrivals) == 7)
    assert sizes == [2, 2, 2, 1]


async def test_leases_in_filling_stay_within_the_window_of_each_class(three: Cluster) -> None:
    most = 0

    def look(arrival: Any) -> None:
        nonlocal most
        most = max(most, three.ranks[1].leases.filling)
        arrival.release()

    three.receivers[1]._on_arrival = look
    payload = make_parcel(0, MIB_ROWS, 512).payload
    for number in range(100):
        for kind in ParcelClass:
            parcel = make_parcel(number, MIB_ROWS, 1, kind=kind)
            parcel.payload = payload
            three.ranks[0].post(1, parcel)
    await three.receivers[1].until(lambda: len(three.receivers[1].arrivals) == 200)
    three.receivers[1].arrivals.clear()
    assert 2 < most <= 2 * WINDOW_BYTES >> 20


async def test_a_combine_does_not_wait_for_dispatches_beyond_their_window(three: Cluster) -> None:
    payload = make_parcel(0, MIB_ROWS, 512).payload
    for number in range(60):
        parcel = make_parcel(number, MIB_ROWS, 1)
        parcel.payload = payload
        three.ranks[0].post(1, parcel)
    three.ranks[0].post(1, make_parcel(7, kind=ParcelClass.COMBINE))
    receiver = three.receivers[1]
    await receiver.until(lambda: receiver.stages(0, ParcelClass.COMBINE) == [7])
    assert len(receiver.arrivals) < 30
    await receiver.until(lambda: len(receiver.arrivals) == 61)


# -- frames that make no sense -------------------------------------------------------------------


def frame_of(cluster: Cluster, count: int = 1, **fields: int) -> bytes:
    """Control frames of rank 0 for rank 1, with other fields and checksums that fit them."""
    outbound = Outbound(0, cluster.ranks[0]._peers[1].outbound._generation, LIMITS)
    data = b""
    for number in range(count):
        frame, _ = outbound.parcel(make_parcel(number))
        prelude = decode_prelude(frame[:PRELUDE_BYTES], LIMITS)
        data += encode_prelude(prelude._replace(**fields)) + frame[PRELUDE_BYTES:]
    return data


def empty_frames(cluster: Cluster, count: int) -> bytes:
    """Frames of parcels without rows, behind the first, which is never sent."""
    outbound = Outbound(0, cluster.ranks[0]._peers[1].outbound._generation, LIMITS)
    frames = [outbound.parcel(make_parcel(n, rows=0))[0] for n in range(count + 1)]
    return b"".join(frames[1:])


BAD: dict[str, tuple[Callable[[Cluster], bytes], str]] = {
    "taken": (lambda c: encode_taken(0, ParcelClass.DISPATCH, 1), "1 parcels taken; announced: 0"),
    "taken none": (lambda c: encode_taken(0, ParcelClass.DISPATCH, 0), "rows is 0"),
    "taken class": (lambda c: encode_taken(0, 3, 1), "parcel_class is 3"),
    "generation": (lambda c: frame_of(c, generation=7), "generation"),
    "sequence": (lambda c: frame_of(c, sequence=7), "sequence is 7"),
    "length": (lambda c: frame_of(c, payload_bytes=1), "payload_bytes is 1"),
    "huge": (lambda c: frame_of(c, rows=2**32 - 1), "rows is 4294967295"),
    "window": (lambda c: frame_of(c, WINDOW_PARCELS + 1), "behind 64 with"),
    "window, empty": (
        lambda c: frame_of(c) + empty_frames(c, WINDOW_PARCELS),
        "behind 64 with",
    ),
    "notice": (
        lambda c: encode_prelude(
            decode_prelude(encode_taken(0, 1, 1), LIMITS)._replace(
                kind=FrameKind.NOTICE, parcel_class=0, rows=0
            )
        ),
        "a notice",
    ),
}


@pytest.mark.parametrize("what", sorted(BAD))
async def test_a_frame_that_is_not_allowed_costs_its_sender_the_connection(
    three: Cluster, what: str
) -> None:
    make, reason = BAD[what]
    three.ranks[0]._peers[1].link.send((make(three),))
    await three.receivers[1].until(lambda: three.receivers[1].lost)
    assert reason in str(three.receivers[1].lost[0][1])
    await three.receivers[0].until(lambda: three.receivers[0].lost)
    three.ranks[2].post(1, make_parcel(5))
    await three.receivers[1].until(lambda: three.receivers[1].arrivals)
    assert three.receivers[1].stages(2) == [5]


async def test_columns_that_contradict_their_frame_cost_the_connection(three: Cluster) -> None:
    peer = three.ranks[0]._met[1][0]
    send = peer.link.send

    def spoil(frames: list[bytes]) -> None:
        head = frames[0][:PRELUDE_BYTES]
        send([head + bytes(len(frames[0]) - PRELUDE_BYTES), *frames[1:]])

    peer.link.send = spoil
    three.ranks[0].post(1, make_parcel(1))
    await three.receivers[1].until(lambda: three.receivers[1].lost)
    assert "malformed frame" in str(three.receivers[1].lost[0][1])
    assert three.receivers[1].arrivals == []


async def test_a_side_that_introduces_itself_with_nonsense_ends_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def nonsense(pair: GlooPair) -> bytes:
        card = await introduce(pair)
        return b"nonsense" if pair._rank else card

    introduce = GlooPair.introduce
    monkeypatch.setattr(GlooPair, "introduce", nonsense)
    cluster = Cluster("gloo", 2, start_timeout_s=3.0, peer_timeout_s=3.0)
    outcome = await asyncio.gather(
        *(cluster.ranks[r].start(cluster.receivers[r]) for r in (0, 1)), return_exceptions=True
    )
    assert isinstance(outcome[0], RankFailed)
    # Of the two, who notices first says so; the other may see but the end of the link.
    assert any("no gloo connection" in str(one) for one in outcome)
    if outcome[1] is None:  # it had come further
        await cluster.receivers[1].until(lambda: cluster.receivers[1].lost)
    await cluster.close()
    quiet = [pair.quiet for rank in cluster.ranks for pair in rank._pairs]
    await asyncio.wait(quiet, timeout=15)  # Gloo tries to connect for up to 10 s


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
async def test_a_host_that_is_not_this_machine_is_refused_by_name(host: str) -> None:
    cluster = Cluster("gloo", 2, options={"advertise_host": host})
    with pytest.raises(ConfigError, match=f"advertise_host is '{host}'; allowed"):
        await cluster.ranks[0].start(cluster.receivers[0])


async def test_an_end_of_gloos_connection_that_does_not_know_the_secret_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def guess(pair: GlooPair, card: bytes) -> None:
        await connect(pair, bytes(32) + card[32:] if pair._rank else card)

    connect = GlooPair.connect
    monkeypatch.setattr(GlooPair, "connect", guess)
    cluster = Cluster("gloo", 2, start_timeout_s=3.0, peer_timeout_s=3.0)
    outcome = await asyncio.gather(
        *(cluster.ranks[r].start(cluster.receivers[r]) for r in (0, 1)), return_exceptions=True
    )
    assert "does not know the secret" in str(outcome[0])
    await cluster.close()


# -- what is given up ----------------------------------------------------------------------------


async def until_filling(cluster: Cluster) -> None:
    """Wait until rank 1 has a receive under way."""
    async with asyncio.timeout(20):
        while not cluster.ranks[1].leases.filling:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0)


async def test_a_receive_that_is_given_up_never_writes_to_a_new_owner(three: Cluster) -> None:
    big = make_parcel(0, rows=8192, hidden=1)
    big.payload = torch.full((8192, 1024), 1.0)  # 32 MiB
    posted = three.ranks[0].post(1, big)
    await until_filling(three)
    three.ranks[1]._peers[0].link.lose("this test ends it")  # while rank 0 goes on sending
    assert three.ranks[1].leases.live == 1
    await until_free([posted])
    canary = make_parcel(1, rows=8192, hidden=1)
    canary.payload = torch.full((8192, 1024), 2.0)
    three.ranks[2].post(1, canary)
    await three.receivers[1].until(lambda: three.receivers[1].arrivals)
    await asyncio.sleep(0.1)
    assert_same(three.receivers[1].arrivals[0].parcel, canary)


async def test_sources_and_leases_wait_until_the_library_is_quiet(three: Cluster) -> None:
    peer = three.ranks[1]._met[0][0]
    outbound = Outbound(0, peer.outbound._generation, LIMITS)
    frame, _ = outbound.parcel(make_parcel(0))
    three.ranks[0]._peers[1].link.send((frame,))  # announced, and never sent
    posted = three.ranks[1].post(0, make_parcel(1))
    await until_filling(three)
    three.ranks[1].abort()
    assert not peer.pair.quiet.done()
    assert three.ranks[1].leases.quarantined == 1
    await peer.pair.quiet
    await asyncio.sleep(0)
    assert three.ranks[1].leases.live == 0
    assert posted.source_free


async def test_torchs_own_groups_are_left_to_others(three: Cluster) -> None:
    assert not dist.is_initialized()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        total = torch.ones(3)
        dist.all_reduce(total)
        three.ranks[0].post(1, make_parcel(5))
        await three.receivers[1].until(lambda: three.receivers[1].arrivals)
    finally:
        dist.destroy_process_group()
    three.ranks[1].post(0, make_parcel(6))
    await three.receivers[0].until(lambda: three.receivers[0].arrivals)


async def test_idle_ranks_use_next_to_no_cpu(three: Cluster) -> None:
    three.ranks[0].post(1, make_parcel(0))
    await three.receivers[1].until(lambda: three.receivers[1].arrivals)
    begin_s = time.process_time()
    await asyncio.sleep(1.0)
    assert time.process_time() - begin_s < 0.1  # who spins takes all of it
