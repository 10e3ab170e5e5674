"""The modelled network: NICs that ranks of a host share, latencies, cross traffic."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncmoe.errors import ConfigError, UnknownName
from asyncmoe.transports.model_network import Network
from tests.transport_kit import compiled_or_plain  # noqa: F401

pytestmark = pytest.mark.usefixtures("compiled_or_plain")
MEGABYTE = 1 << 20
HOSTS = {"ranks_per_host": 2, "nic_gbit_per_s": 8.0, "latency_us": 100.0}  # 1 GB/s
SECOND_OF_MB = MEGABYTE / 1e9


def arrival_s(
    network: Network, source: int, target: int, nbytes: int = MEGABYTE, now_s: float = 0.0
) -> float:
    """When all of it is there."""
    way = network.way(source, target)
    first_s, last_s, due_s = way.put(now_s, now_s, nbytes)
    return way.enter(first_s, last_s, nbytes) if due_s is None else due_s


def test_a_link_takes_its_latency_and_the_time_of_its_bytes() -> None:
    assert arrival_s(Network(HOSTS, 4), 0, 2) == pytest.approx(1e-4 + SECOND_OF_MB)


def test_ranks_of_a_host_share_its_nic_on_the_way_out() -> None:
    network = Network(HOSTS, 6)
    assert arrival_s(network, 0, 2) == pytest.approx(1e-4 + SECOND_OF_MB)
    assert arrival_s(network, 1, 4) == pytest.approx(1e-4 + 2 * SECOND_OF_MB)


def test_what_reaches_a_host_from_several_queues_for_its_nic() -> None:
    network = Network(HOSTS, 6)
    assert arrival_s(network, 0, 4) == pytest.approx(1e-4 + SECOND_OF_MB)
    assert arrival_s(network, 2, 5) == pytest.approx(1e-4 + 2 * SECOND_OF_MB)


def test_what_comes_first_does_not_wait_for_what_was_put_first() -> None:
    network = Network(HOSTS, 6)
    late = network.way(0, 4).put(0.0, 150e-6, MEGABYTE)  # its host has to work before
    assert late[2] == pytest.approx(250e-6 + SECOND_OF_MB)
    assert arrival_s(network, 2, 4, nbytes=10_000) == pytest.approx(1e-4 + 1e-5)


def test_the_way_within_a_host_is_its_own() -> None:
    network = Network({**HOSTS, "local_gbit_per_s": 80.0, "local_latency_us": 1.0}, 4)
    arrival_s(network, 0, 2)
    assert arrival_s(network, 0, 1) == pytest.approx(1e-6 + SECOND_OF_MB / 10)


def test_links_may_differ_and_jitter_follows_the_seed() -> None:
    slow = Network({**HOSTS, "links": {"*-2": {"latency_us": 5000.0}}}, 4)
    assert arrival_s(slow, 0, 2) == pytest.approx(5e-3 + SECOND_OF_MB)
    assert arrival_s(slow, 0, 3) < 5e-3
    shaken = [arrival_s(Network({**HOSTS, "jitter_us": 50.0, "seed": s}, 4), 0, 2) for s in (1, 2)]
    assert shaken[0] != shaken[1]
    assert all(0 <= t - 1e-4 - SECOND_OF_MB <= 50e-6 for t in shaken)
    assert arrival_s(Network({**HOSTS, "jitter_us": 50.0, "seed": 1}, 4), 0, 2) == shaken[0]


@pytest.mark.parametrize("link", ["0-*", "*-2"])
def test_cross_traffic_takes_its_part_of_a_nic(tmp_path: Path, link: str) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(f"time_s,link,available\n0,{link},0.25\n1,{link},1\n")
    network = Network({**HOSTS, "trace": str(trace)}, 4)
    assert arrival_s(network, 0, 2) == pytest.approx(1e-4 + 4 * SECOND_OF_MB)
    assert arrival_s(network, 0, 2, now_s=2.0) == pytest.approx(2.0 + 1e-4 + SECOND_OF_MB)


def test_wrong_options_are_told_by_name() -> None:
    with pytest.raises(UnknownName, match="latency_us"):
        Network({"latency_ms": 1.0}, 2)
    with pytest.raises(ConfigError, match="rank 7"):
        Network({"links": {"0-7": {}}}, 2)
    with pytest.raises(ConfigError, match="nic_gbit_per_s"):
        Network({"nic_gbit_per_s": -1.0}, 2)
