"""The metrics of a run, on records made by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from asyncmoe.metrics.recorder import REASONS, Record
from asyncmoe.metrics.summary import MeasureConfig, summarise

# (arrival, how it ended, token times)
Life = tuple[float, str, list[float]]


def record(lives: list[Life], end_s: float, underway: int = 0) -> Record:
    tokens = [(request, at) for request, (_, _, times) in enumerate(lives) for at in times]
    return Record(
        end_s=end_s,
        arrival_s=np.array([life[0] for life in lives]),
        ended_s=np.array([life[2][-1] if life[1] != "running" else math.nan for life in lives]),
        reason=np.array([REASONS.index(life[1]) for life in lives], np.int8),
        prompt_tokens=np.full(len(lives), 10),
        output_tokens=np.array([len(life[2]) for life in lives]),
        underway=np.arange(len(lives)) < underway,
        token_request=np.array([request for request, _ in tokens], np.int64),
        token_s=np.array([at for _, at in tokens]),
    )


def summary(made: Record, **measure: Any) -> dict[str, Any]:
    return summarise(made, MeasureConfig(**measure))


def test_rates_and_latencies_of_a_run() -> None:
    made = record([(0.0, "length", [1.0, 2.0, 4.0]), (1.0, "length", [3.0])], 4.0)
    found = summary(made)
    assert found["tokens_per_s"] == 1.0
    assert found["all"]["ttft_ms"]["mean"] == 1500
    assert found["all"]["itl_ms"]["mean"] == 1500
    assert found["all"]["itl_ms"]["max"] == 2000
    assert found["all"]["completion_ms"]["mean"] == 3000
    assert found["requests"]["arrived"] == 2


def test_an_interval_counts_if_it_ends_behind_the_ramp() -> None:
    made = record([(0.0, "length", [1.0, 2.5, 3.0]), (0.0, "length", [0.5, 1.5])], 4.0)
    found = summary(made, ramp_s=2.0)
    assert found["tokens"] == 2
    assert found["tokens_per_s"] == 1.0
    assert found["all"]["ttft_ms"] is None
    assert found["all"]["itl_ms"]["mean"] == pytest.approx(1000)  # 1.5 and 0.5
    assert found["all"]["completion_ms"]["mean"] == 3000
    assert found["requests"]["completed"] == 1


def test_requests_under_way_have_gaps_but_no_first_token() -> None:
    made = record([(0.0, "length", [1.0, 2.0]), (0.0, "length", [3.0, 4.0])], 4.0, underway=1)
    found = summary(made)
    assert found["all"]["ttft_ms"]["mean"] == 3000
    assert found["all"]["completion_ms"]["mean"] == 4000
    assert found["all"]["itl_ms"]["mean"] == 1000
    assert found["requests"]["arrived"] == 1


def test_the_best_window_is_found_wherever_it_begins() -> None:
    times = [0.1, 5.3, 5.4, 5.6, 6.2, 9.0]
    found = summary(record([(0.0, "running", times)], 10.0), best_window_s=1.0)
    assert found["best_tokens_per_s"] == 4.0
    assert summary(record([(0.0, "running", times)], 10.0))["best_window_s"] == 10.0


def test_goodput_wants_both_targets() -> None:
    quick = (0.0, "length", [0.1, 0.2, 0.3])
    late_start = (0.0, "length", [1.1, 1.2, 1.3])
    slow = (0.0, "length", [0.1, 1.2, 2.2])
    unfinished = (0.0, "running", [0.1, 0.2])
    made = record([quick, late_start, slow, unfinished], 4.0)
    found = summary(made, ttft_target_ms=1000, itl_target_ms=500)["goodput"]
    assert found["requests_per_s"] == 0.25
    assert found["tokens_per_s"] == 0.75
    assert found["share"] == pytest.approx(1 / 3)


def test_a_request_under_way_is_good_by_its_gaps() -> None:
    made = record([(0.0, "length", [3.0, 3.1])], 4.0, underway=1)
    assert summary(made, ttft_target_ms=1000)["goodput"]["share"] == 1.0


def test_the_slowest_are_those_that_take_longest_for_a_token() -> None:
    lives: list[Life] = [(0.0, "length", [0.1 * (i + 1) for i in range(20)]) for _ in range(150)]
    lives[7] = (0.0, "length", [0.5 * (i + 1) for i in range(9)])
    lives[8] = (0.0, "length", [0.2 * (i + 1) for i in range(9)])
    lives.append((9.0, "running", [9.9]))  # has just begun
    found = summary(record(lives, 10.0))
    assert found["slowest"]["itl_ms"]["mean"] == pytest.approx(500)
    assert found["slowest_1_percent"]["requests"] == 2
    assert found["slowest_1_percent"]["itl_ms"]["mean"] == pytest.approx(350)
    assert found["all"]["requests"] == 151


def test_load_is_accepted_unless_it_is_turned_away() -> None:
    made = record([(0.0, "length", [2.0, 4.0]), (1.0, "refused", [1.0])], 4.0)
    found = summary(made)["accepted"]
    assert found["requests_per_s"] == 0.25
    assert found["output_tokens_per_s"] == 0.5
    assert found["mean_in_flight"] == 1.0


def test_the_histogram_holds_every_gap() -> None:
    times = np.cumsum(np.random.default_rng(0).exponential(0.02, 5000)).tolist()
    histogram = summary(record([(0.0, "running", times)], 1e3))["itl_histogram"]
    assert sum(histogram["share"]) == pytest.approx(1.0)
    assert len(histogram["edges_ms"]) == len(histogram["share"]) + 1


def test_a_run_without_tokens_has_a_summary() -> None:
    found = summary(record([], 1.0))
    assert found["tokens_per_s"] == 0
    assert found["all"]["itl_ms"] is None
    assert found["itl_histogram"] is None
