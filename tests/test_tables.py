"""Token table, chunk table, block pool: what they take in, keep in order and give back."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncmoe import native
from asyncmoe.chunks import NONE, ChunkTable
from asyncmoe.kvcache import BlockPool
from asyncmoe.tokentable import TokenTable
from asyncmoe.transport import Parcel, ParcelClass

STAGE = 3


def table_waiting_for(parts: int) -> tuple[TokenTable, np.ndarray]:
    """A table with one slot that waits for `parts` parts of STAGE."""
    table = TokenTable(4, 3, 2, torch.float32, torch.device("cpu"))
    slots = table.allocate(1)
    table.residual[slots[0]] = torch.tensor([1.0, 2.0])
    table.expect(slots, STAGE, np.array([parts]))
    return table, slots


def arrive(table: TokenTable, slot: int, epoch: int, *parts: int, stage: int = STAGE) -> list[int]:
    """One combine parcel with these parts of one slot; part p holds (p+1, p+1)."""
    n = len(parts)
    return table.accept(
        stage,
        np.full(n, slot, np.uint32),
        np.full(n, epoch, np.uint32),
        np.array(parts, np.uint8),
        torch.tensor([[p + 1.0] * 2 for p in parts]),
    ).tolist()


def test_a_token_is_complete_with_its_last_part_and_merges_in_part_order() -> None:
    table, slots = table_waiting_for(3)
    slot = int(slots[0])
    assert arrive(table, slot, 0, 2) == []
    assert arrive(table, slot, 0, 0, 1) == [slot]
    merged = table.merge(torch.from_numpy(slots), table.part_count[slots])
    assert merged.tolist() == [[7.0, 8.0]]


def test_late_combine_row_dies_on_its_epoch() -> None:
    table, slots = table_waiting_for(1)
    table.release(slots)
    again = table.allocate(1)
    table.expect(again, STAGE, np.array([1]))
    assert again.tolist() == slots.tolist()
    assert arrive(table, int(slots[0]), 0, 0) == []
    assert table.dropped_rows == 1
    assert arrive(table, int(slots[0]), 1, 0) == slots.tolist()


def test_repeated_part_never_completes_a_token() -> None:
    table, slots = table_waiting_for(2)
    assert arrive(table, int(slots[0]), 0, 1, 1) == []
    assert table.dropped_rows == 1
    assert arrive(table, int(slots[0]), 0, 1) == []
    assert table.dropped_rows == 2
    assert arrive(table, int(slots[0]), 0, 0) == slots.tolist()


def test_of_a_part_repeated_in_one_parcel_the_first_row_counts() -> None:
    table, slots = table_waiting_for(1)
    done = table.accept(
        STAGE,
        np.array([slots[0]] * 2, np.uint32),
        np.zeros(2, np.uint32),
        np.zeros(2, np.uint8),
        torch.tensor([[5.0, 5.0], [9.0, 9.0]]),
    )
    assert done.tolist() == slots.tolist()
    assert table.dropped_rows == 1
    assert table.merge(torch.from_numpy(slots), np.array([1], np.uint8)).tolist() == [[6.0, 7.0]]


def test_row_of_an_earlier_layer_or_out_of_range_is_dropped() -> None:
    table, slots = table_waiting_for(1)
    slot = int(slots[0])
    assert arrive(table, slot, 0, 0, stage=STAGE - 2) == []
    assert arrive(table, 4, 0, 0) == []
    assert arrive(table, slot, 0, 200) == []
    assert table.dropped_rows == 3
    assert arrive(table, slot, 0, 0) == [slot]


def test_merge_ignores_what_an_earlier_token_left_in_a_part() -> None:
    table = TokenTable(2, 2, 1, torch.float32, torch.device("cpu"))
    table.parts.fill_(float("nan"))
    slots = table.allocate(2)
    table.expect(slots, STAGE, np.array([1, 2]))
    for slot, parts in zip(slots.tolist(), ([0], [0, 1]), strict=True):
        for part in parts:
            table.accept(
                STAGE, np.array([slot], np.uint32), np.zeros(1, np.uint32),
                np.array([part], np.uint8), torch.ones(1, 1),
            )  # fmt: skip
    merged = table.merge(torch.from_numpy(slots), table.part_count[slots])
    assert merged.tolist() == [[1.0], [2.0]]


def test_a_merge_waits_for_rows_that_another_thread_is_copying() -> None:
    table, slots = table_waiting_for(1)
    copying, go_on, copy = threading.Event(), threading.Event(), table._copy

    def slowly(payload: torch.Tensor, place: np.ndarray) -> None:
        copying.set()
        assert go_on.wait(5)
        copy(payload, place)

    table._copy = slowly  # type: ignore[method-assign]
    assert arrive(table, int(slots[0]), 0, 0) == slots.tolist()
    with ThreadPoolExecutor(2) as pool:
        pool.submit(table.settle)
        assert copying.wait(5)
        merged = pool.submit(table.merge, torch.from_numpy(slots), table.part_count[slots])
        time.sleep(0.02)
        go_on.set()
        assert merged.result(5).tolist() == [[2.0, 3.0]]


def test_arrived_memory_is_let_go_once_it_is_copied_or_at_once_if_no_row_is_taken() -> None:
    table, slots = table_waiting_for(1)
    one = np.zeros(1, np.uint32), np.zeros(1, np.uint8), torch.ones(1, 2)
    freed: list[str] = []
    slot = slots.astype(np.uint32)
    for name in ("taken", "repeated"):
        parcel = Parcel(ParcelClass.COMBINE, STAGE, slot, *one)
        table.arrive(parcel, partial(freed.append, name))
    assert freed == ["repeated"]
    table.let_go()
    assert freed == ["repeated"]
    table.settle()
    table.let_go()
    assert freed == ["repeated", "taken"]


@given(st.lists(st.integers(1, 5), max_size=30))
def test_slots_are_handed_out_once_and_all_come_back(sizes: list[int]) -> None:
    table = TokenTable(16, 1, 1, torch.float32, torch.device("cpu"))
    held: list[np.ndarray] = []
    for size in sizes:
        if size <= table.free_slots:
            held.append(table.allocate(size))
        elif held:
            table.release(held.pop(0))
        taken = [slot for slots in held for slot in slots.tolist()]
        assert len(taken) == len(set(taken)) == 16 - table.free_slots
    for slots in held:
        table.release(slots)
    assert sorted(table.allocate(16).tolist()) == list(range(16))


def test_later_chunk_enters_only_behind_the_earlier_one() -> None:
    chunks = ChunkTable(4)
    first = chunks.open(0, np.array([0, 1]), NONE, samples=False)
    second = chunks.open(0, np.array([2]), first, samples=True)
    assert chunks.may_enter(np.array([first])).tolist() == [first]
    assert chunks.may_enter(np.array([second])).tolist() == []
    released = chunks.leave(np.array([first]), 2, np.array([2]))
    assert released.tolist() == [second]
    chunks.leave(np.array([second]), 2, np.array([1]))
    assert chunks.complete(np.array([second])).tolist() == []  # all its parts, but not its turn
    assert chunks.complete(np.array([first])).tolist() == []  # one of its two rows
    assert chunks.complete(np.array([first])).tolist() == [first]
    assert chunks.leave(np.array([first]), 4, np.array([2])).tolist() == [second]


def test_closing_the_earlier_chunk_lets_the_later_one_in() -> None:
    chunks = ChunkTable(4)
    first = chunks.open(0, np.array([0]), NONE, samples=False)
    second = chunks.open(0, np.array([1]), first, samples=True)
    chunks.may_enter(np.array([second]))
    assert chunks.close(np.array([first])).tolist() == [second]
    assert chunks.in_use == 1


def test_cache_index_follows_the_block_table_of_each_request() -> None:
    pool = BlockPool(blocks=6, block_tokens=4, requests=2, context=16)
    pool.reserve(0, 2)
    pool.reserve(1, 3)
    index = pool.index(np.array([0, 0, 1]), np.array([0, 5, 9]))
    expected = [pool.table[0, 0] * 4, pool.table[0, 1] * 4 + 1, pool.table[1, 2] * 4 + 1]
    assert index.tolist() == expected
    assert len({*pool.table[0, :2].tolist(), *pool.table[1, :3].tolist()}) == 5
    pool.release(0, 2)
    pool.release(1, 3)
    assert pool.free_blocks == 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hidden", [1, 24, 512])
def test_the_compiled_merge_gives_what_torch_gives(
    dtype: torch.dtype, hidden: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if native.kernels is None:
        pytest.skip("no compiled kernels here")
    generator = torch.Generator().manual_seed(3)
    table = TokenTable(40, 3, hidden, dtype, torch.device("cpu"))
    table.residual = torch.randn(40, hidden, generator=generator).to(dtype)
    table.parts = torch.randn(120, hidden, generator=generator).to(dtype)
    slots = torch.randperm(40, generator=generator)[:33]
    counts = np.arange(33, dtype=np.uint8) % 4
    merged = table.merge(slots, counts)
    monkeypatch.setattr(native, "kernels", None)
    assert torch.equal(merged, table.merge(slots, counts))


def test_the_compiled_merge_refuses_slots_and_parts_that_the_table_does_not_have() -> None:
    if native.kernels is None:
        pytest.skip("no compiled kernels here")
    table = TokenTable(4, 2, 8, torch.float32, torch.device("cpu"))
    for slot, parts in ((4, 1), (-1, 1), (0, 3)):
        with pytest.raises(IndexError):
            table.merge(torch.tensor([slot]), np.array([parts], np.uint8))
