"""Leases: one owner at a time, and reuse only after the last read."""

from __future__ import annotations

import pytest
import torch

from asyncmoe.lease import Lease, LeaseState, make_pool
from tests.transport_kit import compiled_or_plain  # noqa: F401 - a fixture for all

pytestmark = pytest.mark.usefixtures("compiled_or_plain")


def address(lease: Lease) -> int:
    """Where the leased memory is."""
    return lease.rows(torch.uint8, 1, 1).data_ptr()


def test_memory_that_is_held_has_no_second_owner() -> None:
    pool = make_pool()
    leases = [pool.obtain(5000) for _ in range(8)]
    for lease in leases:
        lease.arrived()
    assert len({address(lease) for lease in leases}) == 8
    assert (pool.held, pool.filling, pool.live) == (8, 0, 8)


def test_released_memory_is_reused_under_a_new_generation() -> None:
    pool = make_pool()
    first = pool.obtain(5000)
    where = address(first)
    first.arrived()
    first.release()
    second = pool.obtain(8000)  # the same size class
    assert address(second) == where
    assert (second.id, second.generation) == (first.id, first.generation + 1)
    assert pool.idle_bytes == 0


def test_quarantined_memory_is_reused_only_once_it_is_proven_quiet() -> None:
    pool = make_pool()
    failed = pool.obtain(100)
    where = address(failed)
    failed.abandon()
    other = pool.obtain(100)
    assert address(other) != where
    assert (pool.quarantined, pool.live, pool.idle_bytes) == (1, 2, 0)
    failed.quiet()
    assert address(pool.obtain(100)) == where
    assert pool.quarantined == 0


@pytest.mark.parametrize(
    ("before", "call"),
    [
        ([], "release"),
        ([], "quiet"),
        (["arrived"], "arrived"),
        (["arrived"], "abandon"),
        (["arrived", "release"], "release"),
        (["abandon"], "release"),
        (["abandon"], "arrived"),
        (["abandon", "quiet"], "quiet"),
    ],
)
def test_a_lease_only_moves_forward(before: list[str], call: str) -> None:
    pool = make_pool()
    lease = pool.obtain(100)
    for step in before:
        getattr(lease, step)()
    state, live = lease.state, pool.live
    with pytest.raises(RuntimeError, match=f"lease {lease.id} generation 0 is {state.name}"):
        getattr(lease, call)()
    assert (lease.state, pool.live) == (state, live)


def test_idle_memory_is_bounded() -> None:
    pool = make_pool(idle_bytes=3 * 8192)
    leases = [pool.obtain(8192) for _ in range(10)]
    for lease in leases:
        lease.arrived()
        lease.release()
    assert pool.idle_bytes == 3 * 8192
    assert pool.live == 0


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, 184320])
def test_a_lease_is_as_long_as_asked_and_its_buffer_less_than_twice(nbytes: int) -> None:
    sizes: list[int] = []

    def allocate(size: int) -> torch.Tensor:
        sizes.append(size)
        return torch.empty(size, dtype=torch.uint8)

    assert len(make_pool(allocate=allocate).obtain(nbytes).memory) == nbytes
    assert nbytes <= sizes[0] < max(4097, 2 * nbytes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_rows_are_the_leased_bytes(dtype: torch.dtype) -> None:
    lease = make_pool().obtain(6 * dtype.itemsize)
    rows = lease.rows(dtype, 2, 3)
    lease.memory[:] = bytes(len(lease.memory))
    rows[1, 2] = 1
    assert (rows.shape, rows.dtype) == ((2, 3), dtype)
    assert any(lease.memory[5 * dtype.itemsize :])
    assert not any(lease.memory[: 5 * dtype.itemsize])


def test_rows_of_an_empty_payload_keep_their_shape() -> None:
    assert make_pool().obtain(0).rows(torch.bfloat16, 0, 64).shape == (0, 64)


def test_adopted_memory_is_told_when_it_is_free_and_never_reused() -> None:
    pool, freed = make_pool(), []
    memory = torch.arange(16, dtype=torch.uint8)
    lease = pool.adopt(memory, lambda: freed.append(True))
    assert lease.rows(torch.uint8, 4, 4).data_ptr() == memory.data_ptr()
    lease.arrived()
    assert (freed, lease.state) == ([], LeaseState.HELD)
    lease.release()
    assert freed == [True]
    assert (pool.live, pool.idle_bytes) == (0, 0)
