"""What probes see of ranks, and the figures that are made of it."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from asyncmoe.metrics.cluster import cluster_figures
from asyncmoe.metrics.probe import SAMPLES, Samples
from tests import toymodel
from tests.cluster import Cluster, cluster

PERIOD_S = 0.005


def reports(ranks: Cluster) -> dict[int, dict[str, Any]]:
    return {rank.rank: rank.stats() for rank in ranks.ranks}


async def run(ranks: Cluster, requests: int = 6) -> None:
    await ranks.ended(*(ranks.submit([1, 2, 3], max_tokens=8) for _ in range(requests)))


def test_full_samples_become_half_as_many_of_twice_the_period() -> None:
    samples = Samples(2, 0.5)
    for number in range(SAMPLES + 1):
        samples.add(float(number), [number, 1.0])
    assert samples.period_s == 1.0
    assert len(samples.values) == SAMPLES // 2 + 1
    assert samples.values[:2].tolist() == [[0.5, 1.0], [2.5, 1.0]]
    assert samples.times_s[:2].tolist() == [0.5, 2.5]
    assert samples.values[-1].tolist() == [SAMPLES, 1.0]


async def test_a_rank_without_a_probe_has_none_and_reports_none() -> None:
    async with cluster(1, toymodel.checkpoint()) as ranks:
        assert ranks.ranks[0].probe is None
        assert "probe" not in ranks.ranks[0].stats()


async def test_every_batch_is_seen_with_its_rows_and_its_wait() -> None:
    async with cluster(2, toymodel.checkpoint(), metrics={"probe_period_s": PERIOD_S}) as ranks:
        before = reports(ranks)
        await run(ranks)
        after = reports(ranks)
    figures = cluster_figures(before, after, layers=3)
    sizes = figures["batch_sizes"]
    for kind in ("attention", "expert", "head"):
        batches = sum(after[r][f"{kind}_batches"] - before[r][f"{kind}_batches"] for r in (0, 1))
        rows = sum(after[r][f"{kind}_rows"] - before[r][f"{kind}_rows"] for r in (0, 1))
        assert sum(sizes[kind].values()) == batches
        assert sum(int(size) * count for size, count in sizes[kind].items()) == rows
        assert 0 < figures["oldest_wait_ms"][kind]["p50"] <= figures["oldest_wait_ms"][kind]["p99"]
        assert figures["cpu_per_batch"][kind]["us"] > 0
    assert figures["stages"]["names"] == ["A0", "E0", "A1", "E1", "A2", "E2", "H"]
    # Three prompt positions and seven steps of each request, and one row of each token at the end.
    attention = [figures["stages"]["mean_rows"][stage] for stage in (0, 2, 4)]
    assert all(mean is not None for mean in attention)
    assert np.shape(figures["depth"]["rows"])[0] == 7


async def test_links_carry_what_the_dispatchers_sent() -> None:
    async with cluster(2, toymodel.checkpoint()) as ranks:
        before = reports(ranks)
        await run(ranks)
        after = reports(ranks)
    figures = cluster_figures(before, after, layers=3, link_bytes_per_s=1e9)
    links = np.array(figures["links"]["bytes_per_s"])
    seconds = after[0]["loop_s"] - before[0]["loop_s"]
    assert links[0, 0] == 0
    assert links[0, 1] * seconds == pytest.approx(after[0]["sent_bytes"] - before[0]["sent_bytes"])
    assert links[1, 0] > 0
    assert 0 < figures["device_utilisation"] <= 1
    assert "depth" not in figures


async def test_a_backlog_shows_as_depth_and_occupancy() -> None:
    sections: dict[str, Any] = {
        "metrics": {"probe_period_s": PERIOD_S},
        # A stage that waits for rows that do not come: its queue stands until the linger is over.
        "batch": {"head_min_rows": 4, "head_linger_ms": 60.0},
    }
    async with cluster(1, toymodel.checkpoint(), **sections) as ranks:
        before = reports(ranks)
        await run(ranks, requests=2)
        await asyncio.sleep(2 * PERIOD_S)
        after = reports(ranks)
    figures = cluster_figures(before, after, layers=3)
    depth = dict(zip(figures["stages"]["names"], figures["stages"]["mean_depth"], strict=True))
    assert max(depth, key=lambda name: depth[name]) == "H"
    delays = dict(zip(figures["stages"]["names"], figures["stages"]["queue_delay_ms"], strict=True))
    assert 30 < delays["H"] < 90
    assert figures["gauges"]["running_requests"]["mean"] > 1
    assert figures["gauges"]["used_kv_blocks"]["mean"] > 1


async def test_without_cpu_times_the_hidden_share_is_the_least_that_it_can_be() -> None:
    async with cluster(1, toymodel.checkpoint(), metrics={"probe_period_s": PERIOD_S}) as ranks:
        before = reports(ranks)
        await run(ranks)
        after = reports(ranks)
    for report in (before[0], after[0]):
        del report["probe"]["cpu_s"], report["probe"]["hidden_s"]
        report["loop_user_s"] = report["loop_system_s"] = 0.0
    after[0]["loop_user_s"] = 1.0
    after[0]["attention_compute_s"] = after[0]["loop_s"] - before[0]["loop_s"] - 0.25
    after[0]["expert_compute_s"] = after[0]["head_compute_s"] = 0.0
    figures = cluster_figures(before, after, layers=3)
    assert figures["hidden_share"] == pytest.approx(0.75, abs=0.01)
    assert figures["cpu_per_batch"] == {"attention": None, "expert": None, "head": None}
