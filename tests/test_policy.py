"""The batch policy: maxima, minima and linger over the chain."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncmoe.config import BatchConfig
from asyncmoe.policy import BatchPolicy
from asyncmoe.stage import Kind, StageChain

CHAIN = StageChain(2)
UNEQUAL = BatchConfig(
    attention_min_rows=3, expert_min_rows=8, head_min_rows=1, attention_max_rows=64,
    expert_max_rows=256, head_max_rows=16, attention_linger_ms=2.0, expert_linger_ms=5.0,
)  # fmt: skip


def columns(rows: list[int], oldest_s: list[float]) -> tuple[np.ndarray, np.ndarray]:
    return np.array(rows, np.int64), np.array(oldest_s)


def test_each_kind_has_its_own_limits() -> None:
    policy = BatchPolicy(UNEQUAL, CHAIN)
    assert policy.max_rows.tolist() == [64, 256, 64, 256, 16]
    assert policy.min_rows.tolist() == [3, 8, 3, 8, 1]


def test_by_default_every_stage_with_rows_may_run_at_once() -> None:
    policy = BatchPolicy(BatchConfig(), CHAIN)
    rows, oldest_s = columns([0, 1, 7, 0, 1], [0.0, 9.0, 9.0, 0.0, 9.0])
    assert policy.runnable(rows, oldest_s, 9.0).tolist() == [False, True, True, False, True]
    assert policy.next_runnable_s(rows, oldest_s) is None


@settings(max_examples=80)
@given(
    rows=st.lists(st.integers(0, 9), min_size=5, max_size=5),
    oldest_s=st.lists(st.floats(0, 0.01), min_size=5, max_size=5),
    now_s=st.floats(0, 0.01),
)
def test_a_stage_may_run_with_its_minimum_or_after_its_linger(
    rows: list[int], oldest_s: list[float], now_s: float
) -> None:
    policy = BatchPolicy(UNEQUAL, CHAIN)
    least = {Kind.ATTENTION: 3, Kind.EXPERT: 8, Kind.HEAD: 1}
    linger_s = {Kind.ATTENTION: 0.002, Kind.EXPERT: 0.005, Kind.HEAD: 0.002}
    expected = [
        rows[s] >= least[CHAIN.kinds[s]]
        or (rows[s] > 0 and oldest_s[s] + linger_s[CHAIN.kinds[s]] <= now_s)
        for s in range(5)
    ]
    assert policy.runnable(*columns(rows, oldest_s), now_s).tolist() == expected


@settings(max_examples=80)
@given(
    rows=st.lists(st.integers(0, 9), min_size=5, max_size=5),
    oldest_s=st.lists(st.floats(0, 1e6), min_size=5, max_size=5),
)
def test_a_timer_at_the_given_time_lets_one_more_stage_run_and_none_before(
    rows: list[int], oldest_s: list[float]
) -> None:
    policy = BatchPolicy(UNEQUAL, CHAIN)
    depths, oldest = columns(rows, oldest_s)
    enough = depths >= policy.min_rows
    when_s = policy.next_runnable_s(depths, oldest)
    if when_s is None:
        assert not ((depths > 0) & ~enough).any()
        return
    just_before = np.nextafter(when_s, -np.inf)
    assert policy.runnable(depths, oldest, when_s).sum() > enough.sum()
    assert policy.runnable(depths, oldest, just_before).tolist() == enough.tolist()


def test_the_age_of_an_empty_stage_means_nothing() -> None:
    policy = BatchPolicy(UNEQUAL, CHAIN)
    rows, oldest_s = columns([1, 0, 0, 0, 0], [5.0, 0.0, float("nan"), float("-inf"), 0.0])
    assert not policy.runnable(rows, oldest_s, 5.0).any()
    assert policy.next_runnable_s(rows, oldest_s) == 5.002
