"""Micro-queues and routing: rows keep their order and their columns, however they are cut."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncmoe.microqueue import (
    ChunkQueue,
    ChunkSegment,
    Hold,
    Queues,
    RowQueue,
    RowSegment,
    make_queues,
)
from asyncmoe.routing import route
from asyncmoe.stage import StageChain
from asyncmoe.transport import Parcel, ParcelClass


def dispatch_parcel(fanout: list[int], first_slot: int = 0) -> Parcel:
    """Rows with these numbers of experts; expert and part of each pair say where it belongs."""
    rows, pairs = len(fanout), sum(fanout)
    return Parcel(
        ParcelClass.DISPATCH,
        1,
        np.arange(first_slot, first_slot + rows, dtype=np.uint32),
        np.full(rows, 7, np.uint32),
        np.arange(pairs, dtype=np.uint8),
        torch.arange(first_slot, first_slot + rows).float()[:, None].repeat(1, 2),
        np.array(fanout, np.uint8),
        np.repeat(np.arange(rows, dtype=np.uint16), fanout),
        np.ones(pairs, np.float32),
    )


@given(
    st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=5), min_size=1, max_size=6),
    st.integers(1, 7),
)
def test_rows_leave_in_order_with_their_own_pairs(parcels: list[list[int]], most: int) -> None:
    queue, released = RowQueue(), []
    for number, fanout in enumerate(parcels):
        hold = Hold(len(fanout), lambda number=number: released.append(number))
        queue.put(RowSegment(0, dispatch_parcel(fanout, 100 * number), hold, 0.0, 0))
    slots, fanouts = [], []
    while queue.rows:
        taken = queue.take(most)
        assert 1 <= sum(segment.parcel.rows for segment in taken) <= most
        for segment in taken:
            parcel = segment.parcel
            slots += parcel.slot.tolist()
            fanouts += parcel.fanout.tolist()
            assert parcel.payload[:, 0].tolist() == parcel.slot.tolist()
            assert (np.repeat(parcel.slot % 100, parcel.fanout) == parcel.expert).all()
            segment.hold.read(parcel.rows)
    assert slots == [100 * n + i for n, fanout in enumerate(parcels) for i in range(len(fanout))]
    assert fanouts == [count for fanout in parcels for count in fanout]
    assert released == list(range(len(parcels)))


def test_discarded_rows_are_gone_and_their_lease_is_returned_once() -> None:
    queue, released = RowQueue(), []
    hold = Hold(3, lambda: released.append(True))
    queue.put(RowSegment(2, dispatch_parcel([1, 2, 1]), hold, 0.0, 0))
    assert queue.discard(1, np.array([1], np.uint32), np.array([7], np.uint32)) == 0
    assert queue.discard(2, np.array([1], np.uint32), np.array([6], np.uint32)) == 0
    assert queue.discard(2, np.array([1], np.uint32), np.array([7], np.uint32)) == 1
    (segment,) = queue.take(10)
    assert segment.parcel.slot.tolist() == [0, 2]
    assert segment.parcel.expert.tolist() == [0, 2]
    assert not released
    segment.hold.read(2)
    assert released == [True]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 12))
def test_chunks_leave_whole_and_in_order(rows: list[int], most: int) -> None:
    queue = ChunkQueue()
    queue.put(ChunkSegment(np.arange(len(rows)), np.array(rows), sum(rows), 0.0, 0))
    order = []
    while queue.rows:
        chunks = queue.take(most)
        assert sum(rows[c] for c in chunks) <= most or len(chunks) == 1
        order += chunks.tolist()
    assert order == list(range(len(rows)))


@pytest.mark.parametrize("make", [Queues, make_queues])
def test_depth_and_age_columns_follow_the_queues(make: Callable[[StageChain], Queues]) -> None:
    queues = make(StageChain(2))
    queues.put_chunks(0, np.array([3]), np.array([5]), now_s=1.5)
    queues.decision = 4
    queues.put_chunks(0, np.array([4]), np.array([2]), now_s=2.5)
    queues.put_parcel(0, dispatch_parcel([1, 1]), None, 3.0)
    assert queues.rows.tolist() == [7, 2, 0, 0, 0]
    assert (queues.oldest_s[0], queues.oldest_decision[0]) == (1.5, 0)
    assert queues.take_chunks(0, 5).tolist() == [3]
    assert (queues.oldest_s[0], queues.oldest_decision[0]) == (2.5, 4)
    queues.remove_chunks(0, np.array([4]))
    assert queues.rows.tolist() == [0, 2, 0, 0, 0]


@given(st.integers(1, 12), st.integers(1, 4), st.integers(1, 5), st.booleans(), st.randoms())
def test_routes_carry_every_pair_once_and_number_the_parts(
    rows: int, top_k: int, world: int, per_expert: bool, random: object
) -> None:
    rng = np.random.default_rng(random.randrange(2**32))  # type: ignore[attr-defined]
    experts = np.array([rng.permutation(8)[:top_k] for _ in range(rows)], np.int64)
    weights = rng.random((rows, top_k), np.float32)
    owner = rng.integers(0, world, 8).astype(np.uint16)
    parts, routes = route(experts, weights, owner, world, per_expert)
    seen: dict[int, dict[int, tuple[int, float]]] = {row: {} for row in range(rows)}
    for to in routes:
        for row, expert, weight, part in zip(
            np.repeat(to.rows, to.fanout), to.expert, to.weight, to.part, strict=True
        ):
            assert owner[expert] == to.rank
            seen[int(row)][int(expert)] = int(part), float(weight)
    for row in range(rows):
        assert {e: w for e, (_, w) in seen[row].items()} == dict(
            zip(experts[row].tolist(), weights[row].tolist(), strict=True)
        )
        numbers = [seen[row][int(e)][0] for e in experts[row]]
        ranks = owner[experts[row]]
        expected = list(range(top_k)) if per_expert else [
            sorted(set(ranks.tolist())).index(r) for r in ranks.tolist()
        ]  # fmt: skip
        assert numbers == expected
        assert parts[row] == max(numbers) + 1
