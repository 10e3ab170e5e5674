"""The model transport on virtual time, compiled and plain: its promises, and what it leaves."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import pytest

from asyncmoe import native
from asyncmoe.errors import PeerLost, ProtocolError
from asyncmoe.packed import pack
from asyncmoe.transport import Arrival
from asyncmoe.virtual.costs import CostModel
from asyncmoe.virtual.loop import VirtualLoop
from asyncmoe.virtual.run import run
from tests import test_transport_conformance as conformance
from tests.test_virtual_cluster import cancels
from tests.transport_kit import (
    Cluster,
    compiled_or_plain,  # noqa: F401
    make_parcel,
)
from tests.virtual_kit import play, sections

Test = Callable[[Cluster], Coroutine[Any, Any, None]]
ROW_BYTES = 64  # on the wire, so that packed parcels are handed over as they are
NETWORK = {"nic_gbit_per_s": 8.0, "latency_us": 300.0}
PROMISES: list[Test] = [
    conformance.test_parcels_and_messages_of_a_peer_arrive_in_order_each_once,
    conformance.test_a_burst_from_all_to_all_arrives_complete,
    conformance.test_arrivals_that_are_held_keep_their_payload_while_more_arrive,
    conformance.test_a_second_release_is_refused,
    conformance.test_a_receiver_that_never_releases_holds_up_nobody_else,
    partial(conformance.test_a_rank_that_leaves_is_lost_once_and_the_others_go_on, way="close"),
    partial(conformance.test_a_rank_that_leaves_is_lost_once_and_the_others_go_on, way="abort"),
    conformance.test_parcels_under_way_to_a_lost_peer_fail_with_peer_lost,
    conformance.test_what_was_posted_before_close_still_arrives,
    conformance.test_a_receiver_that_refuses_a_parcel_loses_its_sender_alone,
    conformance.test_a_fault_in_the_receiver_is_reported_and_the_next_parcel_arrives,
    conformance.test_only_ranks_that_are_connected_can_be_posted_to,
]


def on_three(test: Test, **options: Any) -> None:
    """Run a test on three ranks, and check that they end with nothing."""

    async def main() -> None:
        cluster = Cluster("model", 3, options=options)
        await cluster.start()
        await test(cluster)
        for receiver in cluster.receivers:
            receiver.release_all()
        await cluster.close()
        assert cluster.live_leases() == 0

    run(main())


@pytest.mark.usefixtures("compiled_or_plain")
@pytest.mark.parametrize("test", PROMISES)
def test_links_on_virtual_time_keep_the_promises_of_a_transport(test: Test) -> None:
    on_three(test)
    on_three(test, network=NETWORK)


@pytest.mark.usefixtures("compiled_or_plain")
def test_a_packed_parcel_arrives_as_it_is_and_frees_its_source_when_released() -> None:
    async def main(three: Cluster) -> None:
        sent, seen = pack(make_parcel(1)), []
        posted = three.ranks[0].post(1, sent)
        posted.when_free(seen.append)
        await three.receivers[1].until(lambda: three.receivers[1].arrivals)
        arrival = three.receivers[1].arrivals[0]
        assert arrival.source == 0
        assert arrival.parcel is sent
        assert not posted.source_free
        assert three.ranks[1].leases.held == 1
        arrival.release()
        assert seen == [posted]
        assert posted.source_free
        assert posted.error is None
        with pytest.raises(RuntimeError, match="FREE, not HELD"):
            three.receivers[1].release_all()
        three.receivers[1].arrivals.clear()

    on_three(main, row_bytes=ROW_BYTES)


@pytest.mark.usefixtures("compiled_or_plain")
def test_a_lost_peer_frees_the_sources_of_packed_parcels_in_order() -> None:
    async def main(three: Cluster) -> None:
        seen: list[int] = []
        posted = [three.ranks[0].post(1, pack(make_parcel(number))) for number in range(4)]
        await three.receivers[1].until(lambda: len(three.receivers[1].arrivals) == 4)
        for number, each in enumerate(posted):
            each.when_free(lambda _, number=number: seen.append(number))
        three.receivers[1].arrivals.pop(2).release()
        three.ranks[0].cut(1, "a test")
        assert seen == [2, 0, 1, 3]
        assert [type(each.error) for each in posted] == [PeerLost, PeerLost, type(None), PeerLost]
        assert three.ranks[1].leases.held == 3
        with pytest.raises(PeerLost, match="a test"):
            three.ranks[0].post(1, pack(make_parcel(5)))

    on_three(main, row_bytes=ROW_BYTES)


@pytest.mark.usefixtures("compiled_or_plain")
def test_a_packed_parcel_that_is_refused_costs_its_sender_the_connection() -> None:
    def refuse(arrival: Arrival) -> None:
        raise ProtocolError("no rows were asked for")

    async def main(three: Cluster) -> None:
        three.receivers[1]._on_arrival = refuse
        posted = three.ranks[0].post(1, pack(make_parcel(1)))
        await three.receivers[0].until(lambda: three.receivers[0].lost)
        assert "no rows were asked for" in str(three.receivers[1].lost[0][1])
        assert posted.source_free
        assert three.ranks[1].leases.live == 0

    on_three(main, row_bytes=ROW_BYTES)


@pytest.mark.usefixtures("compiled_or_plain")
def test_hosts_are_charged_for_parcels_and_messages() -> None:
    costs = CostModel(parcel_out_s=1e-3, parcel_in_s=2e-3, message_s=4e-3)

    async def main() -> tuple[float, float]:
        loop, cluster = asyncio.get_running_loop(), Cluster("model", 2)
        assert isinstance(loop, VirtualLoop)
        lanes = [loop.lane(str(rank), costs) for rank in range(2)]
        await asyncio.gather(
            *(loop.create_task(cluster.ranks[r].start(cluster.receivers[r]),
                               context=lanes[r].context) for r in range(2))
        )  # fmt: skip
        cluster.ranks[0].post(1, make_parcel(0))
        cluster.ranks[0].send(1, b"hello")
        await cluster.receivers[1].until(lambda: cluster.receivers[1].messages)
        cluster.receivers[1].release_all()
        await cluster.close()
        return lanes[0].worked_s, lanes[1].worked_s

    assert run(main(), slack_s=0.0) == pytest.approx((5e-3, 6e-3))


@pytest.mark.skipif(native.columns is None, reason="not built")
@pytest.mark.parametrize("row_bytes", [None, ROW_BYTES])
def test_a_run_without_compiled_parts_is_the_same_event_for_event(
    row_bytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = {**NETWORK, "jitter_us": 200.0, "ranks_per_host": 2}
    options = {"network": network, **({"row_bytes": row_bytes} if row_bytes else {})}
    config = sections(4, transport={"options": options})
    compiled = play(config, 7, cancels)
    monkeypatch.setattr(native, "columns", None)
    assert play(config, 7, cancels) == compiled


@pytest.mark.usefixtures("compiled_or_plain")
def test_nothing_of_a_run_outlives_it() -> None:
    class Kept:
        """Something that a callback refers to."""

    async def main() -> None:
        loop, kept = asyncio.get_running_loop(), Kept()
        assert isinstance(loop, VirtualLoop)
        cluster, lane = Cluster("model", 2, options={"network": NETWORK}), loop.lane("rank")
        await cluster.start()
        cluster.receivers[1].kept = kept
        for number in range(3):
            cluster.ranks[0].post(1, make_parcel(number))  # which nobody takes in
        loop.call_later(1e6, print, kept, context=lane.context)
        loop.call_soon(print, kept, cluster, context=lane.context)
        lane.charge(1e6)
        gone.append(weakref.ref(kept))

    gone: list[weakref.ref[Kept]] = []
    run(main())
    gc.collect()
    assert [each() for each in gone] == [None]
