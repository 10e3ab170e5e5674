"""The compiled columns say what their plain twins say: about good input, about bad, about any."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncmoe import native
from asyncmoe.chunks import NONE, ChunkTable
from asyncmoe.config import BatchConfig
from asyncmoe.errors import ParcelTooLarge, ProtocolError
from asyncmoe.kvcache import BlockPool
from asyncmoe.microqueue import Hold, RowSegment, Taken
from asyncmoe.packed import PackedParcel, pack
from asyncmoe.policy import BatchPolicy
from asyncmoe.routing import Router
from asyncmoe.rows import RowColumns, gather_rows
from asyncmoe.stage import StageChain
from asyncmoe.tokentable import TokenTable
from asyncmoe.transport import Limits, Parcel, ParcelClass
from asyncmoe.wire import (
    payload_memory,
)

pytestmark = pytest.mark.skipif(native.columns is None, reason="not built")
T = TypeVar("T")
SEEDS = st.integers(0, 2**32 - 1)
CHAIN = StageChain(3)
LIMITS = Limits(parcel_bytes=4096, parcel_rows=64, stages=7, experts=12, hidden=4)


@contextmanager
def plain() -> Iterator[None]:
    """Without the compiled columns."""
    columns, native.columns = native.columns, None
    try:
        yield
    finally:
        native.columns = columns


def outcome(call: Callable[[], Any]) -> Any:
    """What the call returns, or the error that it raises."""
    try:
        return call()
    except (ProtocolError, ParcelTooLarge, ValueError) as error:
        return type(error), str(error)


def both(call: Callable[[], T]) -> tuple[T, T]:
    """Outcome of the compiled path and of the plain one."""
    compiled = outcome(call)
    with plain():
        return compiled, outcome(call)


def dispatch(rng: np.random.Generator, rows: int, experts: int = 12) -> Parcel:
    """Random rows with 1 to 3 experts each; some weights are 0."""
    fanout = rng.integers(1, 4, rows).astype(np.uint8)
    pairs = int(fanout.sum())
    return Parcel(
        ParcelClass.DISPATCH,
        3,
        rng.integers(0, 2**32, rows, np.uint32),
        rng.integers(0, 2**32, rows, np.uint32),
        rng.integers(0, 4, pairs).astype(np.uint8),
        torch.from_numpy(rng.random((rows, 4), np.float32)),
        fanout,
        rng.integers(0, experts, pairs).astype(np.uint16),
        rng.random(pairs, np.float32) * (rng.random(pairs) < 0.8),
    )


@given(SEEDS, st.integers(1, 9), st.integers(1, 5), st.integers(1, 4), st.booleans())
def test_routes_are_the_same(seed: int, rows: int, top_k: int, world: int, each: bool) -> None:
    rng = np.random.default_rng(seed)
    router = Router(CHAIN, rng.integers(0, world, (3, 12)).astype(np.uint16), world, each)
    experts = np.array([rng.permutation(12)[:top_k] for _ in range(rows)], np.int64)
    weights = rng.random((rows, top_k), np.float32)
    slots, epochs = rng.integers(0, 99, rows), rng.integers(0, 9, rows).astype(np.uint32)
    hidden = torch.arange(2.0 * rows).view(rows, 2)
    ours, twin = both(lambda: router(3, slots, epochs, hidden, experts, weights))
    assert ours.parts.tolist() == twin.parts.tolist()
    for (rank, parcel), (other, expected) in zip(ours.parcels, twin.parcels, strict=True):
        assert (rank, parcel.stage, parcel.pairs) == (other, expected.stage, expected.pairs)
        assert bytes(parcel.block) == bytes(expected.block)
        assert parcel.payload.tolist() == expected.payload.tolist()


def test_a_router_with_an_expert_that_nobody_owns_is_refused() -> None:
    router = Router(CHAIN, np.zeros((3, 4), np.uint16), 1, False)
    one = np.zeros(1, np.int64), np.zeros(1, np.uint32), torch.zeros(1, 2)
    with pytest.raises(IndexError, match="no index 4"):
        router(1, *one, np.array([[4]]), np.ones((1, 1), np.float32))
    with pytest.raises(TypeError, match="experts is not a contiguous array"):
        router(1, *one, np.array([[1]], np.int32), np.ones((1, 1), np.float32))


@given(SEEDS, st.lists(st.integers(1, 6), min_size=1, max_size=4), st.booleans())
def test_expert_batches_are_the_same(seed: int, sizes: list[int], each: bool) -> None:
    rng = np.random.default_rng(seed)
    segments = [
        RowSegment(int(rng.integers(0, 3)), dispatch(rng, rows), Hold(rows, int), 0.0, 0)
        for rows in sizes
    ]
    local = rng.permutation(12).astype(np.int64)
    (*ours, our_back), (*twin, twin_back) = both(lambda: Taken(segments).columns(local, 12, each))
    for mine, other in zip(ours, twin, strict=True):
        np.testing.assert_array_equal(mine, other)
    assert our_back == twin_back
    row, weight, _, gather = ours
    assert np.unique(gather[gather >= 0]).tolist() == list(range(len(row)))
    assert (weight > 0).all()


@given(SEEDS, st.integers(0, 12))
def test_combine_rows_of_any_content_are_taken_in_alike(seed: int, rows: int) -> None:
    rng = np.random.default_rng(seed)
    slot, epoch = rng.integers(0, 6, rows).astype(np.uint32), rng.integers(0, 2, rows)
    part, payload = rng.integers(0, 4, rows).astype(np.uint8), rng.random((rows, 2), np.float32)
    wild = rng.random(rows) < 0.1
    slot[wild], part[wild] = 2**32 - 1, 255
    parcel = Parcel(
        ParcelClass.COMBINE, 3, slot, epoch.astype(np.uint32), part, torch.from_numpy(payload)
    )
    start = rng.integers(0, 2**3, 5), rng.integers(1, 4, 5), rng.integers(0, 2, 5)

    def take_in() -> tuple[Any, ...]:
        table = TokenTable(5, 3, 2, torch.float32, torch.device("cpu"))
        table.open[:], table.epoch[:] = start[0], start[2]
        table.stage[:] = np.where(start[1] > 1, 3, 1)
        done = table.arrive(parcel)
        table.settle()
        counts = sorted(done.tolist()), table.dropped_rows
        return *counts, table.open.tolist(), table.parts.tolist()

    ours, twin = both(take_in)
    assert ours == twin


@given(SEEDS, st.lists(st.integers(1, 4), min_size=1, max_size=6))
def test_rows_are_gathered_alike(seed: int, sizes: list[int]) -> None:
    rng = np.random.default_rng(seed)
    table, chunks = TokenTable(32, 2, 1, torch.float32, torch.device("cpu")), ChunkTable(8)
    pool = BlockPool(64, 4, 8, 24)
    opened = []
    for request, size in enumerate(sizes):
        pool.reserve(request, 6)
        slots = table.allocate(size)
        first = int(rng.integers(0, 20))
        table.position[slots] = np.arange(first, first + size)
        table.epoch[slots], table.part_count[slots] = rng.integers(0, 9, (2, size))
        opened.append(chunks.open(request, slots, NONE, samples=True))
    order = rng.permutation(opened).astype(np.int64)
    books = native.columns.Books(table, chunks)
    homes: list[Any] = [
        SimpleNamespace(table=table, chunks=chunks, pool=pool, id_of_row=None, books=each)
        for each in (books, None)
    ]
    ours, twin = (gather_rows(home, order) for home in homes)
    assert (ours.count, ours.gathered.singles) == (twin.count, twin.gathered.singles)
    np.testing.assert_array_equal(ours.chunks, twin.chunks)
    for name in RowColumns._fields:
        mine, other = (getattr(rows.columns, name) for rows in (ours, twin))
        np.testing.assert_array_equal(mine, other, name)
        assert mine.dtype == other.dtype
    tokens = rng.integers(0, 99, 32)
    mine, other = (rows.gathered.at_slots(tokens) for rows in (ours, twin))
    np.testing.assert_array_equal(mine, other)


@given(SEEDS, st.integers(1, 8))
def test_chunks_go_on_alike(seed: int, opened: int) -> None:
    def drive() -> list[Any]:
        rng = np.random.default_rng(seed)
        chunks, ids = ChunkTable(8), []
        for i in range(opened):
            earlier = ids[-1] if i and rng.random() < 0.5 else NONE
            ids.append(chunks.open(i, np.arange(1 + i % 3), earlier, samples=False))
        every = np.array(ids, np.int64)
        left = [sorted(chunks.leave(every[i : i + 1], 2, chunks.rows[every[i : i + 1]]).tolist())
                for i in range(opened)]  # fmt: skip
        rows = rng.permutation(np.repeat(every, chunks.rows[every]))
        ready = chunks.complete(rows)
        chunks.stage[every] = rng.integers(0, 2, opened) * 2
        groups = [
            (stage, some.tolist(), of_each.tolist(), total)
            for stage, some, of_each, total in chunks.by_stage(every)
        ]
        return [left, sorted(ready.tolist()), chunks.missing.tolist(), chunks.parked.tolist(),
                sorted(groups)]  # fmt: skip

    ours, twin = both(drive)
    assert ours == twin


@given(SEEDS)
def test_the_policy_sees_the_same(seed: int) -> None:
    rng = np.random.default_rng(seed)
    config = BatchConfig(attention_min_rows=3, attention_linger_ms=2, expert_min_rows=2)
    policy = BatchPolicy(config, CHAIN)
    rows, oldest_s = rng.integers(0, 5, len(CHAIN)), rng.random(len(CHAIN)) * 0.004
    ours, twin = both(lambda: policy.look(rows, oldest_s, 0.003))
    assert ours[0].tolist() == twin[0].tolist()
    assert ours[1:] == twin[1:]


def test_a_payload_is_seen_where_it_lies_and_kept_alive() -> None:
    payload = torch.arange(6.0).view(3, 2)
    view = payload_memory(payload[1:])
    expected = payload[1:].numpy().tobytes()
    payload[0] = -1.0
    del payload
    assert bytes(view) == expected
    view[:4] = np.float32(7.0).tobytes()
    assert np.frombuffer(view, np.float32)[0] == 7.0


def test_rows_are_never_written_outside_the_table() -> None:
    to, rows = torch.zeros(4, 2), torch.ones(1, 2)
    for wild in (-1, 4, 2**62):
        with pytest.raises(IndexError, match="out of range"):
            native.columns.scatter(to.data_ptr(), 4, np.array([wild]), rows.data_ptr(), 8)
    assert not to.any()


def test_combine_rows_go_where_their_columns_say_and_never_outside_the_table() -> None:
    to, rows = torch.zeros(6, 2), torch.tensor([[1.0, 1.0], [2.0, 2.0]])

    def scatter(slots: list[int], parts: list[int]) -> None:
        block = np.array([*slots, 0, 0], np.uint32).tobytes() + bytes(parts)
        native.columns.scatter_combine(to.data_ptr(), 6, block, 2, 2, rows.data_ptr(), 8)

    for slots, parts in (([0, 3], [0, 0]), ([0, 2], [0, 2]), ([2**32 - 1, 0], [1, 0])):
        with pytest.raises(IndexError, match="out of range"):
            scatter(slots, parts)
    assert not to.any()
    scatter([2, 0], [1, 0])
    assert to[:, 0].tolist() == [2, 0, 0, 0, 0, 1]
    with pytest.raises(ValueError, match="does not fit"):
        native.columns.scatter_combine(to.data_ptr(), 6, bytes(9), 2, 2, rows.data_ptr(), 8)


def test_blocks_that_do_not_fit_their_counts_are_refused() -> None:
    block = bytes(pack(dispatch(np.random.default_rng(0), 2)).block)
    local = np.arange(12)
    for rows, pairs in ((3, 2), (-1, 4), (2, 2**60), (2**61, 2**62)):
        with pytest.raises(ValueError, match="does not fit"):
            native.columns.expert_batch([(0, rows, pairs, block)], local, 12, False)
    table = np.zeros(4, np.uint32), np.zeros(4, np.int32), np.zeros(4, np.uint64)
    with pytest.raises(ValueError, match="does not fit"):
        native.columns.accept(1, block, 1, 2, *table)


def test_a_packed_parcel_reads_like_the_one_it_was_packed_from() -> None:
    parcel = dispatch(np.random.default_rng(1), 5)
    packed = pack(parcel)
    assert isinstance(packed, PackedParcel)
    for ours, expected in zip(packed.columns(), parcel.columns(), strict=True):
        np.testing.assert_array_equal(ours, expected)
    assert pack(packed.piece(1, 3)).block == pack(parcel.piece(1, 3)).block
    with pytest.raises(AttributeError):
        _ = packed.colour  # type: ignore[attr-defined]
