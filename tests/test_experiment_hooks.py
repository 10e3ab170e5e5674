"""What experiments need of the engine: cross traffic, spread starts, one batch at a time, turns."""

from __future__ import annotations

import asyncio
from operator import itemgetter
from typing import Any

import numpy as np
import pytest
import torch

from asyncmoe.errors import ConfigError
from asyncmoe.experiment.grid import settings
from asyncmoe.experiment.schema import checked
from asyncmoe.experiment.virtual_run import run_virtual
from asyncmoe.metrics.recorder import Recorder
from asyncmoe.outbox import in_turn
from asyncmoe.packed import PackedParcel
from asyncmoe.transport import ParcelClass
from asyncmoe.transports.model_network import Network, Noise, NoiseOptions
from asyncmoe.virtual.run import run
from asyncmoe.workload.driver import Listener, drive
from asyncmoe.workload.workload import Workload, WorkloadConfig, make_workload
from tests.test_experiment import TOY

NIC = {"nic_gbit_per_s": 8.0}  # 1 GB/s


def test_cross_traffic_takes_its_part_of_every_window_in_the_mean() -> None:
    noise = Noise(NoiseOptions(taken=0.25, deviation=0.05, window_ms=1.0), seed=1)
    end_s = noise.end_of(0.0, 1.5)
    assert end_s == pytest.approx(1.5 / 0.75, rel=0.01)
    assert noise.end_of(0.0, 0.5) < end_s
    # In two pieces it takes as long as in one.
    half_s = noise.end_of(0.0, 0.75)
    assert noise.end_of(half_s, 0.75) == pytest.approx(end_s)


def test_cross_traffic_in_bursts_takes_as_much_in_the_mean_and_more_while_it_lasts() -> None:
    noise = Noise(NoiseOptions(taken=0.25, deviation=0.0, busy=0.5, window_ms=1.0), seed=1)
    assert noise.end_of(0.0, 1.5) == pytest.approx(1.5 / 0.75, rel=0.05)
    window_s = [noise.end_of(1e-3 * n, 1e-4) - 1e-3 * n for n in range(100)]
    assert {round(s, 6) for s in window_s} == {1e-4, 2e-4}  # all of it, or half


def test_cross_traffic_is_of_a_hosts_nic_and_of_the_seed() -> None:
    noise = {"taken": 0.5, "deviation": 0.1}

    def end_s(seed: int, source: int) -> float:
        network = Network({**NIC, "ranks_per_host": 2, "noise": noise, "seed": seed}, 6)
        return network.way(source, 4).put(0.0, 0.0, 10**7)[1]

    assert end_s(1, 0) == end_s(1, 1) != end_s(1, 2)  # 0 and 1 share a host
    assert end_s(1, 0) != end_s(2, 0)
    with pytest.raises(ConfigError, match="nic_gbit_per_s"):
        Network({"noise": noise}, 2)


def test_a_rank_sends_to_the_ranks_behind_it_first() -> None:
    empty = torch.empty((0, 0))
    parcels = [(to, PackedParcel(ParcelClass.DISPATCH, 1, 0, 0, b"", empty)) for to in (0, 1, 3, 6)]
    assert [to for to, _ in in_turn(3, parcels, itemgetter(0))] == [6, 0, 1, 3]
    assert [to for to, _ in in_turn(7, parcels, itemgetter(0))] == [0, 1, 3, 6]
    assert in_turn(0, [], itemgetter(0)) == []


class Silent:
    """A target on which nothing ever comes of a request."""

    def __init__(self) -> None:
        self.submitted_s: list[float] = []

    def now_s(self) -> float:
        return asyncio.get_running_loop().time()

    def listen(self, listener: Listener) -> None:
        self.listener = listener

    def submit(self, request: int, workload: Workload) -> None:
        self.submitted_s.append(self.now_s())

    def abort(self, request: int) -> None:
        self.listener.on_end(request, "aborted")


@pytest.mark.parametrize("arrivals", ["closed:5", "poisson:1"])
def test_requests_underway_come_one_after_the_other_over_the_spread(arrivals: str) -> None:
    config = WorkloadConfig(
        arrivals=arrivals, underway=5, spread_s=0.5, duration_s=0.6, decode_only=True
    )
    target = Silent()
    run(drive(target, make_workload(config), Recorder()))
    assert np.array(target.submitted_s[:5]) == pytest.approx(np.arange(5) / 10, abs=1e-3)


def test_one_batch_at_a_time_hides_nothing_of_the_hosts_work() -> None:
    systems: dict[str, Any] = {
        "two": {"scheduler": "mtfs"},
        "one": {"scheduler": "mtfs", "config": {"device": {"depth": 1}}},
    }
    workload = {**TOY["workload"], "arrivals": "closed:64", "spread_s": 0.005}
    runs = settings(checked({**TOY, "systems": systems, "workload": workload}, "test"), False)
    two, one = (run_virtual(each, lambda _: None)["metrics"] for each in runs)
    assert one["cluster"]["hidden_share"] < two["cluster"]["hidden_share"]
    assert one["steady_tokens_per_s"] < two["steady_tokens_per_s"]


def test_a_cap_of_a_link_is_on_the_bytes_of_the_models_rows() -> None:
    """Whatever stands for them in the virtual world, where payloads are empty."""
    window = {"ramp_s": 0.05, "measure_s": 0.3}

    def metrics(mbit_per_s: float) -> Any:
        links = {"x": {"links": {"mbit_per_s": mbit_per_s}}}
        experiment = checked({**TOY, "window": window, "impairments": links}, "test")
        return run_virtual(settings(experiment, False)[0], lambda _: None)["metrics"]

    wide, narrow = metrics(1e6), metrics(4.0)
    assert narrow["steady_tokens_per_s"] < wide["steady_tokens_per_s"] / 3
    sent = np.array(narrow["cluster"]["links"]["bytes_per_s"])
    assert 0.5 * 4e6 / 8 < sent.max() < 1.1 * 4e6 / 8
