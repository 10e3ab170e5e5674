"""The dispatcher: what it posts, in which order, and what must wait for credits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from asyncmoe.dispatcher import Dispatcher
from asyncmoe.errors import ConfigError, PeerLost, ProtocolError
from asyncmoe.microqueue import Hold, RowSegment, Taken
from asyncmoe.outbox import Outbox
from asyncmoe.placement import Placement, Role
from asyncmoe.routing import route_to_all
from asyncmoe.stage import StageChain
from asyncmoe.steps import AttentionResult, ExpertStep
from asyncmoe.tokentable import TokenTable
from asyncmoe.transport import Limits, Parcel, ParcelClass, Posted
from tests.test_queues import dispatch_parcel

RANK, WORLD, ROW_BYTES = 0, 3, 8  # rank r has experts 2r and 2r + 1
OWNER = np.repeat(np.arange(WORLD, dtype=np.uint16), 2)[None]
PLACEMENT = Placement((Role.BOTH,) * WORLD, OWNER, np.tile(np.arange(2, dtype=np.uint16), 3)[None])


class Recorder:
    """What a transport was given to post."""

    def __init__(self) -> None:
        self.posted: list[tuple[int, Parcel]] = []
        self.lost: set[int] = set()

    def post(self, peer: int, parcel: Parcel) -> Posted:
        if peer in self.lost:
            raise PeerLost(peer, "gone")
        self.posted.append((peer, parcel))
        return Posted()

    def slots(self, peer: int) -> list[list[int]]:
        """The slots of each parcel for `peer`."""
        return [parcel.slot.tolist() for to, parcel in self.posted if to == peer]


class Bench:
    """A dispatcher, its table, and rows to send."""

    def __init__(self, window: int = 100, per_expert: bool = False, **limits: Any) -> None:
        self.wire = Recorder()
        self.table = TokenTable(64, 2, 2, torch.float32, torch.device("cpu"))
        self.dispatcher = Dispatcher(
            rank=RANK, placement=PLACEMENT, chain=StageChain(1), transport=self.wire,
            limits=Limits(**limits), row_bytes=ROW_BYTES, window_rows=window,
            per_expert=per_expert,
        )  # type: ignore[arg-type]  # fmt: skip

    def send(self, *experts: tuple[int, int]) -> tuple[list[int], Parcel | None]:
        """Dispatch a row with each pair of experts; returns their slots and the local parcel."""
        slots = self.table.allocate(len(experts))
        x = torch.from_numpy(slots).float()[:, None].repeat(1, 2)
        weights = np.ones((len(experts), 2), np.float32)
        result = AttentionResult(x, np.array(experts), weights)
        return slots.tolist(), self.dispatcher.dispatch(1, self.table, slots, result)


def test_rows_go_to_the_ranks_of_their_experts_and_local_ones_stay() -> None:
    bench = Bench()
    slots, local = bench.send((0, 1), (1, 2), (4, 3))
    assert local is not None
    assert local.slot.tolist() == slots[:2]
    assert bench.wire.slots(1) == [slots[1:]]
    assert bench.wire.slots(2) == [slots[2:]]
    assert bench.table.part_count[slots].tolist() == [1, 2, 2]
    for _, parcel in [(RANK, local), *bench.wire.posted]:
        assert parcel.payload[:, 0].tolist() == parcel.slot.tolist()
        assert parcel.kind is ParcelClass.DISPATCH


def test_rows_may_go_to_every_rank_with_experts_and_are_idle_where_they_chose_none() -> None:
    experts, weights = np.array([[0, 1], [5, 2]]), np.array([[3, 4], [5, 6]], np.float32)
    owner = np.array([0, 0, 1, 1, 3, 3], np.uint16)  # rank 2 has none of this layer
    parts, routes = route_to_all(experts, weights, owner)
    assert parts.tolist() == [3, 3]
    assert [route.rank for route in routes] == [0, 1, 3]
    sent = [
        (r.rows.tolist(), r.fanout.tolist(), r.expert.tolist(), r.weight.tolist(), r.part.tolist())
        for r in routes
    ]
    assert sent == [
        ([0, 1], [2, 1], [0, 1, 0], [3, 4, 0], [0, 0, 0]),
        ([0, 1], [1, 1], [2, 2], [0, 6], [1, 1]),
        ([0, 1], [1, 1], [4, 5], [0, 5], [2, 2]),
    ]


def test_a_parcel_is_cut_to_its_credits_and_the_rest_follows_in_order() -> None:
    bench = Bench(window=4)
    slots, _ = bench.send(*[(2, 3)] * 6)
    more, _ = bench.send(*[(2, 3)] * 2)
    assert bench.wire.slots(1) == [slots[:4]]
    assert (bench.dispatcher.outboxes.waiting_rows, bench.dispatcher.outboxes.outstanding_rows) == (
        4,
        4,
    )
    bench.dispatcher.outboxes.credit(1, 3)
    assert bench.wire.slots(1)[1:] == [slots[4:], more[:1]]
    bench.dispatcher.outboxes.credit(1, 1)
    assert bench.wire.slots(1)[3:] == [more[1:]]


def test_a_window_that_is_nearly_used_up_is_not_filled_in_crumbs() -> None:
    outbox = Outbox(window_rows=8, parcel_rows=100)
    outbox.waiting.extend([dispatch_parcel([1] * 7), dispatch_parcel([1] * 5)])
    assert outbox.next().rows == 7  # type: ignore[union-attr]
    assert outbox.next() is None  # one credit, and a quarter of the window is two
    outbox.window.give_back(1)
    assert outbox.next().rows == 2  # type: ignore[union-attr]


def test_no_parcel_is_beyond_the_size_limit_however_small_it_is() -> None:
    bench = Bench(window=5000, parcel_bytes=ROW_BYTES)
    bench.table = TokenTable(3000, 2, 2, torch.float32, torch.device("cpu"))
    slots, _ = bench.send(*[(2, 3)] * 3000)
    assert bench.wire.slots(1) == [[slot] for slot in slots]


def test_a_limit_below_one_row_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="parcel_bytes = 7: a row of this model takes 8 bytes"):
        Bench(parcel_bytes=ROW_BYTES - 1)


def test_waiting_for_one_rank_holds_up_no_other() -> None:
    bench = Bench(window=1)
    slots, _ = bench.send((2, 3), (2, 3), (4, 5))
    assert bench.wire.slots(1) == [slots[:1]]
    assert bench.wire.slots(2) == [slots[2:]]


def test_dead_rows_leave_the_outbox() -> None:
    bench = Bench(window=1)
    slots, _ = bench.send(*[(2, 3)] * 4)
    dead = np.array(slots[1:3], np.uint32)
    bench.dispatcher.outboxes.discard(
        dead, np.array([0, 1], np.uint32)
    )  # the second has another epoch
    assert bench.dispatcher.outboxes.waiting_rows == 2
    bench.dispatcher.outboxes.credit(1, 1)
    bench.dispatcher.outboxes.credit(1, 1)
    assert bench.wire.slots(1) == [[slots[0]], [slots[2]], [slots[3]]]


def test_more_credits_than_are_outstanding_are_the_peers_fault() -> None:
    bench = Bench()
    bench.send((2, 3))
    with pytest.raises(ProtocolError, match="gives back 2 credits"):
        bench.dispatcher.outboxes.credit(1, 2)


def test_rows_for_a_lost_rank_are_dropped_and_the_others_go_out() -> None:
    bench = Bench(window=1)
    bench.send((2, 3), (2, 3))
    bench.dispatcher.outboxes.forget(1)
    bench.wire.lost.add(1)
    slots, _ = bench.send((2, 4))
    assert bench.dispatcher.outboxes.waiting_rows == 0
    assert bench.wire.slots(2) == [slots]


def combine(bench: Bench, *sources: tuple[int, list[int]]) -> list[Parcel]:
    """Run a batch of parcels, given as (source, fan-outs), and send its output."""
    segments = [
        RowSegment(source, dispatch_parcel(fanout, 10 * source), Hold(9, lambda: None), 0.0, 0)
        for source, fanout in sources
    ]
    local, taken = np.zeros(8, np.int64), Taken(segments)
    step = ExpertStep(1, 0, None, taken, taken.rows, local, 1, False)  # type: ignore[arg-type]
    segments.sort(key=lambda segment: segment.source)
    slot = np.concatenate([segment.parcel.slot for segment in segments])
    out = torch.from_numpy(slot.astype(np.float32))[:, None].repeat(1, 2)
    return bench.dispatcher.combine(step, out)


def test_combine_never_waits_though_no_credit_is_left() -> None:
    bench = Bench(window=1)
    bench.send((2, 3), (2, 3))
    assert combine(bench, (1, [1, 1, 1])) == []
    (peer, parcel) = bench.wire.posted[-1]
    assert (peer, parcel.kind, parcel.credits) == (1, ParcelClass.COMBINE, 3)


def test_each_home_gets_its_own_rows_and_credits_in_one_parcel() -> None:
    bench = Bench()
    (local,) = combine(bench, (2, [1, 2]), (0, [1]), (2, [1]), (1, [3]))
    assert local.slot.tolist() == [0]
    sent = dict(bench.wire.posted)
    assert sorted(sent) == [1, 2]
    assert sent[2].slot.tolist() == [20, 21, 20]
    assert (sent[1].credits, sent[2].credits) == (1, 3)
    assert all(p.payload[:, 0].tolist() == p.slot.tolist() for p in sent.values())


def test_a_combine_parcel_beyond_the_limit_is_cut_and_its_credits_come_once() -> None:
    bench = Bench(parcel_rows=2)
    combine(bench, (1, [1] * 5))
    parcels = [parcel for _, parcel in bench.wire.posted]
    assert [p.rows for p in parcels] == [2, 2, 1]
    assert [p.credits for p in parcels] == [0, 0, 5]
    assert np.concatenate([p.slot for p in parcels]).tolist() == [10, 11, 12, 13, 14]
