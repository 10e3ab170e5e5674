"""The transport that chooses for each pair: by machine, and by what works."""

from __future__ import annotations

import logging

import pytest
import torch

from asyncmoe.errors import ConfigError, PeerLost, UnknownName
from asyncmoe.transport import Receiver
from asyncmoe.transports.auto import AutoTransport
from asyncmoe.transports.shm import ShmTransport
from tests.transport_kit import Cluster, make_parcel


async def all_to_all(cluster: Cluster) -> list[list[int]]:
    """Each rank posts a parcel to each other; the sources that each rank heard of."""
    world = range(len(cluster.ranks))
    for source in world:
        for target in set(world) - {source}:
            cluster.ranks[source].post(target, make_parcel(source))
            cluster.ranks[source].send(target, b"hello")
    others = len(world) - 1
    for receiver in cluster.receivers:
        await receiver.until(lambda r=receiver: len(r.arrivals) == len(r.messages) == others)
    heard = [sorted(a.source for a in receiver.arrivals) for receiver in cluster.receivers]
    for receiver in cluster.receivers:
        receiver.release_all()
    return heard


async def test_ranks_of_one_machine_use_shm_and_of_two_the_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(AutoTransport, "_place", lambda self: f"host {self.context.rank // 2}")
    cluster = Cluster("auto", 4, options={"shm": {"slots": 1024}})
    await cluster.start()
    assert await all_to_all(cluster) == [[1, 2, 3], [0, 2, 3], [0, 1, 3], [0, 1, 2]]
    assert cluster.ranks[0].carriers() == {1: "shm", 2: "tcp", 3: "tcp"}
    assert cluster.ranks[3].carriers() == {0: "tcp", 1: "tcp", 2: "shm"}
    assert cluster.live_leases() == 0
    await cluster.close()


@pytest.mark.parametrize("failing", [0, 1])
async def test_a_pair_that_cannot_share_memory_uses_the_network_on_both_sides_with_a_warning(
    failing: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    connect = ShmTransport.connect

    async def no_memory(self: ShmTransport, receiver: Receiver) -> None:
        if self.context.rank == failing and self.context.others == [1 - failing]:
            raise OSError("no memory to share")
        await connect(self, receiver)

    monkeypatch.setattr(ShmTransport, "connect", no_memory)
    monkeypatch.setattr(logging.getLogger("asyncmoe"), "propagate", True)
    cluster = Cluster("auto", 3)
    await cluster.start()
    assert await all_to_all(cluster) == [[1, 2], [0, 2], [0, 1]]
    assert [rank.carriers() for rank in cluster.ranks] == [
        {1: "tcp", 2: "shm"},
        {0: "tcp", 2: "shm"},
        {0: "shm", 1: "shm"},
    ]
    warned = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warned) == 2
    assert all("no memory to share" in text for text in warned)
    assert [receiver.lost for receiver in cluster.receivers] == [[], [], []]
    await cluster.close()


async def test_a_connection_that_is_cut_is_lost_on_both_sides_and_no_other_is() -> None:
    cluster = Cluster("auto", 3)
    await cluster.start()
    cluster.ranks[0].cut(1, "an experiment")
    for rank, peer in ((0, 1), (1, 0)):
        receiver = cluster.receivers[rank]
        await receiver.until(lambda receiver=receiver: receiver.lost)
        assert [lost for lost, _ in receiver.lost] == [peer]
    with pytest.raises(PeerLost, match="an experiment"):
        cluster.ranks[0].post(1, make_parcel(0))
    cluster.ranks[0].post(2, make_parcel(3))
    await cluster.receivers[2].until(lambda: cluster.receivers[2].arrivals)
    cluster.receivers[2].release_all()
    await cluster.close()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"network": "tpc"}, "unknown transport 'tpc'. Did you mean 'tcp'"),
        ({"network": "inproc"}, "transports that join machines"),
        ({"network": 3}, "allowed: name of a transport"),
        ({"shm": {"slot_byte": 4096}}, "Did you mean 'slot_bytes'"),
        ({"shm": {"slot_bytes": 5}}, "multiples of 4096"),
        ({"shm": 7}, "allowed: a table"),
        ({"netwrk": "tcp"}, "Did you mean 'network'"),
    ],
)
def test_options_that_cannot_be_are_refused_before_anything_starts(
    options: dict[str, object], says: str
) -> None:
    with pytest.raises((ConfigError, UnknownName), match=says):
        Cluster("auto", 2, options=options)


async def test_memory_of_a_gpu_is_never_put_into_shared_memory() -> None:
    cluster = Cluster("auto", 2)
    context = cluster.context(0, 2, device=torch.device("cuda"))
    assert AutoTransport(context)._place() != AutoTransport(cluster.context(0, 2))._place()
