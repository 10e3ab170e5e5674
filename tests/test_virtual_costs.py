"""What steps take in the virtual world, and a ghost of a published model that runs by it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from asyncmoe.config import Config
from asyncmoe.errors import ConfigError
from asyncmoe.stage import Kind
from asyncmoe.virtual.cluster import VirtualCluster, virtual_cluster
from asyncmoe.virtual.costs import CostModel, HostCosts, KindCost, derived, dump, load
from asyncmoe.virtual.ghost import ghost_checkpoint
from asyncmoe.virtual.meter import Meter
from asyncmoe.virtual.run import run
from asyncmoe.virtual.shapes import find_hardware, find_model
from tests.virtual_kit import Ends, sections

SHAPE, L40S = find_model("gpt-oss-120b"), find_hardware("l40s")


class InTurn:
    """A routing source: experts one after the other."""

    def choose(
        self, layer: int, request_ids: NDArray[np.int64], positions: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        first = request_ids * 31 + positions * 7 + layer
        experts = (first[:, None] + 37 * np.arange(SHAPE.top_k)) % SHAPE.experts
        return experts, np.full(experts.shape, 1 / SHAPE.top_k, np.float32)


def costs(**host: float) -> CostModel:
    return derived(SHAPE, L40S, HostCosts(**host))


async def ghosts(cluster: VirtualCluster, requests: int, new_tokens: int) -> Ends:
    """Run requests of 100 tokens of context."""
    front_end, ends = cluster.groups[0].front_end, Ends()
    front_end.listen(ends)
    for request in range(requests):
        front_end.begin(request, [0] * 100, new_tokens, dummy_kv=True)
    while len(ends.reasons) < requests:
        ends.changed.clear()
        await ends.changed.wait()
    await cluster.settled()
    return ends


def config(ranks: int) -> Config:
    engine = {"max_requests": 64, "slots": 128}
    options = {"row_bytes": SHAPE.row_bytes}
    network = {"ranks_per_host": 2, "nic_gbit_per_s": 200.0, "latency_us": 10.0}
    return sections(
        ranks,
        engine=engine,
        kv={"blocks": 64, "block_tokens": 256},
        batch={"attention_max_rows": 256, "expert_max_rows": 1024},
        transport={"options": {**options, "network": network}},
    )


def test_costs_follow_from_the_stated_figures() -> None:
    model = costs(attention_s=600e-6, before_share=0.25)
    assert model.expert.expert_s == pytest.approx(3 * 2880 * 2880 * 2 / (864e9 * 0.8))
    assert model.head.fixed_s == pytest.approx(20e-6 + 2880 * 201088 * 2 / (864e9 * 0.8))
    assert model.attention.before_s == pytest.approx(150e-6)
    assert model.attention.after_s == pytest.approx(450e-6)
    # half of the layers look back 128 positions only
    assert model.attention.kv_token_s == pytest.approx(model.attention.windowed_kv_token_s)


def test_dense_layers_cost_time_before_the_first_router() -> None:
    model = derived(find_model("glm-4.5-air"), L40S)
    assert model.first_layer is not None
    assert model.first_layer.fixed_s > 1.5 * model.attention.fixed_s


def test_a_profile_comes_back_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    model = CostModel(attention=KindCost(fixed_s=1e-3, row_s=1e-5), parcel_in_s=2e-6)
    path.write_bytes(dump(model))
    assert load(path) == model
    path.write_text('{"expert": {"fixed_s": -1}}')
    with pytest.raises(ConfigError, match=r"expert.fixed_s is -1"):
        load(path)
    path.write_text('{"experts": {}}')
    with pytest.raises(ConfigError, match="experts"):
        load(path)


def test_one_request_takes_the_time_that_its_stages_do() -> None:
    async def main() -> float:
        async with virtual_cluster(config(1), ghost_checkpoint(SHAPE, InTurn(), 1024), model) as c:
            begin_s = c.loop.now_s
            await ghosts(c, 1, 3)
            return c.loop.now_s - begin_s

    def model(rank: int) -> CostModel:
        return costs()

    step_s = SHAPE.layers * (
        costs().attention.fixed_s + costs().expert.fixed_s + 4 * costs().expert.expert_s
    )
    assert run(main()) == pytest.approx(3 * (step_s + costs().head.fixed_s), rel=0.05)


def test_sixteen_ranks_run_the_ghost_of_a_published_model() -> None:
    async def main() -> tuple[int, float, float, int]:
        checkpoint = ghost_checkpoint(SHAPE, InTurn(), 1024)
        model = costs(attention_s=600e-6, expert_s=200e-6, parcel_in_s=1e-6)
        async with virtual_cluster(config(16), checkpoint, lambda _: model) as cluster:
            meter = Meter(cluster)
            ends = await ghosts(cluster, 32, 1)
            assert list(ends.reasons.values()) == [["length"]] * 32
            times = [rank.times.kinds for rank in cluster.ranks]
            rows = sum(kinds[Kind.ATTENTION].rows for kinds in times)
            attention = [t[Kind.ATTENTION] for t in times]
            host_s = sum(t.prepare_s + t.finish_s for t in attention)
            steps = sum(t.batches for t in attention)
            sent = sum(sum(rank.stats()["bytes_to"]) for rank in cluster.ranks)
            bill = meter.bill()
            assert bill.parcels > bill.stages > 0
            assert bill.stage_s > 0 < bill.parcel_s
            return rows, host_s / steps, sent / SHAPE.row_bytes, bill.parcels

    rows, host_s, sent_rows, parcels = run(main())
    assert rows == 32 * SHAPE.layers
    assert host_s == pytest.approx(600e-6, rel=0.01)
    assert parcels < sent_rows <= 2 * 4 * rows  # each way, to at most as many ranks as experts
