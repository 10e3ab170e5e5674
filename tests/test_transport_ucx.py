"""What the conformance suite does not see of `ucx`: late messages, still peers, configuration."""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncmoe import registry
from asyncmoe.directory import MemoryDirectory
from asyncmoe.errors import ConfigError, MissingDependency, PeerLost, ProtocolError
from asyncmoe.transport import Limits, TransportContext
from asyncmoe.transports.ucx import UcxTransport
from asyncmoe.transports.ucx_config import config_of
from asyncmoe.transports.ucx_pair import make_card, read_card, tags
from asyncmoe.transports.ucx_worker import Worker
from tests.transport_kit import TOKEN, Cluster, Recorder, make_parcel, until_free

LOOPBACK = {"TLS": "tcp,self", "NET_DEVICES": "lo", "RNDV_THRESH": "8192"}
CANARY = 0xA5


class Ends:
    """Two workers, an endpoint from the first to the second, and what came to its end."""

    def __init__(self) -> None:
        self.sender, self.receiver = Worker(LOOPBACK), Worker(LOOPBACK)
        self.endpoint = self.sender.connect(self.receiver.address, lambda: None)
        self.back = self.receiver.connect(self.sender.address, lambda: None)
        self.done: dict[str, Exception | None] = {}

    def note(self, name: str) -> Any:
        return lambda error: self.done.__setitem__(name, error)

    async def until(self, *names: str) -> None:
        async with asyncio.timeout(10):
            while not self.done.keys() >= set(names):  # noqa: ASYNC110 - the loop drives UCX
                await asyncio.sleep(0.001)


@pytest.fixture
async def ends() -> AsyncIterator[Ends]:
    pair = Ends()
    yield pair
    while pair.sender._under_way:  # ucxx keeps for ever what is under way when an endpoint ends
        pair.receiver.refuse(0, 0)
        await asyncio.sleep(0.001)
    pair.sender.end(pair.endpoint)
    pair.receiver.end(pair.back)
    pair.endpoint = pair.back = None
    pair.sender.close()
    pair.receiver.close()


def context(**settings: Any) -> TransportContext:
    given_or_default = {"device": torch.device("cpu"), **settings}
    return TransportContext(0, 2, MemoryDirectory(), Limits(), token=TOKEN, **given_or_default)


@pytest.mark.parametrize("size", [0, 1, 4096, 1 << 20], ids=str)
async def test_a_message_that_comes_after_its_receive_was_drained_lands_nowhere(
    ends: Ends, size: int
) -> None:
    memory = bytearray([CANARY]) * size
    ends.receiver.receive(ends.back, memory, 7, ends.note("abandoned"))
    ends.receiver.drain(7)
    await ends.until("abandoned")
    ends.sender.send(ends.endpoint, bytes(size), 7, ends.note("late"))
    other = bytearray(8)
    ends.receiver.receive(ends.back, other, 8, ends.note("next"))
    ends.sender.send(ends.endpoint, b"the next", 8, ends.note("sent"))
    await ends.until("next", "sent")
    assert ends.done["abandoned"] is None
    assert memory == bytearray([CANARY]) * size
    assert other == b"the next"


async def test_a_receive_that_has_begun_when_it_is_drained_goes_on_to_its_end(ends: Ends) -> None:
    memory = bytearray([CANARY]) * (8 << 20)
    ends.receiver.receive(ends.back, memory, 7, ends.note("received"))
    ends.sender.send(ends.endpoint, bytes(8 << 20), 7, ends.note("sent"))
    while memory[0] == CANARY:  # noqa: ASYNC110 - the loop drives UCX
        await asyncio.sleep(0)
    assert memory[-1] == CANARY
    ends.receiver.drain(7)
    await ends.until("sent", "received")
    assert memory == bytes(8 << 20)


async def test_refused_messages_come_to_their_end_at_their_sender(ends: Ends) -> None:
    for size in (0, 100, 1 << 20):
        ends.sender.send(ends.endpoint, bytes(size), 7, ends.note("sent"))
        while "sent" not in ends.done:
            ends.receiver.refuse(7, 2**64 - 1)
            await asyncio.sleep(0.001)
        ends.done.clear()
    ends.done["sent"] = None


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 8, 13, 40])
async def test_a_peer_that_goes_at_any_step_leaves_no_lease_and_no_source_behind(
    turns: int,
) -> None:
    cluster = Cluster("ucx", 2)
    await cluster.start()
    posted = [cluster.ranks[0].post(1, make_parcel(n, 1024, 1024)) for n in range(8)]
    posted += [cluster.ranks[1].post(0, make_parcel(n, 1024, 1024)) for n in range(8)]
    for _ in range(turns):
        await asyncio.sleep(0)
    cluster.ranks[1].abort()
    await cluster.receivers[0].until(lambda: cluster.receivers[0].lost, 5.0)
    await until_free(posted, 5.0)
    assert all(one.error is None or isinstance(one.error, PeerLost) for one in posted)
    for receiver in cluster.receivers:
        receiver.release_all()
    async with asyncio.timeout(5):
        await asyncio.gather(*(pair.quiet for rank in cluster.ranks for pair in rank._pairs))
    assert cluster.live_leases() == 0
    await cluster.close()


def test_a_rank_leaves_a_peer_that_does_not_move_within_bounded_time() -> None:
    # In a process of its own: what is cut off under way, ucxx keeps until its process ends.
    code = (
        "import uvloop; from tests import test_transport_ucx as t; uvloop.run(t.leave_still_peer())"
    )
    root = Path(__file__).parents[1]
    left = subprocess.run(
        [sys.executable, "-c", code], cwd=root, timeout=60, capture_output=True, text=True
    )
    assert left.returncode == 0, left.stderr


async def leave_still_peer() -> None:
    """Rank 0 closes while rank 1 neither takes what was sent nor ends."""
    cluster = Cluster("ucx", 2, peer_timeout_s=0.5)
    await cluster.start()
    worker = cluster.ranks[1]._worker
    asyncio.get_running_loop().remove_reader(worker._descriptor)
    worker.wake = lambda: None  # as a process that is stopped
    posted = [cluster.ranks[0].post(1, make_parcel(n, 1024, 1024)) for n in range(4)]
    await asyncio.sleep(0.02)
    async with asyncio.timeout(3):
        await cluster.ranks[0].close()
        await asyncio.gather(*(pair.quiet for pair in cluster.ranks[0]._pairs))
    await until_free(posted, 1.0)
    assert any(isinstance(one.error, PeerLost) for one in posted)
    del worker.wake
    asyncio.get_running_loop().add_reader(worker._descriptor, worker.wake)
    await cluster.close()
    assert cluster.live_leases() == 0


async def test_ucx_listens_on_loopback_unless_it_is_told_otherwise() -> None:
    transport = UcxTransport(context())
    worker = Worker(await config_of(transport.context))
    hosts = _hosts_of_sockets()
    worker.close()
    assert hosts == {"0100007F"}


def _hosts_of_sockets() -> set[str]:
    """IPv4 addresses that TCP sockets of this process are bound to, as the kernel writes them."""
    folder = Path("/proc/self/fd")
    mine = {os.readlink(folder / name) for name in os.listdir(folder) if (folder / name).exists()}
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    return {row[1].partition(":")[0] for row in rows if f"socket:[{row[9]}]" in mine}


async def test_options_win_over_the_environment_and_that_over_our_defaults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert (await config_of(context()))["NET_DEVICES"] == "lo"
    assert "NET_DEVICES" not in await config_of(context(bind_host="0.0.0.0"))
    monkeypatch.setenv("UCX_TLS", "rc")
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    assert not (await config_of(context())).keys() & {"TLS", "NET_DEVICES"}
    chosen = await config_of(context(options={"tls": "tcp", "net_devices": "l*"}))
    assert (chosen["TLS"], chosen["NET_DEVICES"]) == ("tcp", "l*")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"segment_bytes": 100}, r"segment_bytes is 100; allowed: 4096 to 1048576"),
        ({"tls": 7}, r"transport.options.tls is 7"),
        ({"tls": "no_such_way"}, r"transport.options.tls is 'no_such_way'.*allowed: .*tcp"),
        ({"tls": "cma,self"}, r"transport.options.tls is 'cma,self'.*allowed: .*has tcp"),
        ({"net_devices": "eth77"}, r"options.net_devices is 'eth77'.*allowed: all, .*lo"),
        ({"net_devices": "lo,eth77"}, r"no network device 'eth77'"),
        ({"advertise_host": 7}, r"transport.options.advertise_host is 7"),
    ],
    ids=str,
)
async def test_a_wrong_option_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        await UcxTransport(context(options=options)).start(Recorder())


async def test_a_network_device_that_the_environment_names_and_is_not_there_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "eth77")
    with pytest.raises(ConfigError, match=r"UCX_NET_DEVICES is 'eth77'.*allowed: all, .*lo"):
        await config_of(context())


async def test_a_host_that_no_network_device_has_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1.*net_devices"):
        await config_of(context(bind_host="192.0.2.1"))


def test_importing_ucxx_leaves_the_environment_as_it_was() -> None:
    set_by_ucxx = {"UCX_MEMTYPE_CACHE", "UCX_RNDV_FRAG_MEM_TYPE", "UCX_MAX_RNDV_RAILS"}
    assert not set_by_ucxx & os.environ.keys()


def test_without_ucxx_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ucx", "ucx_pair", "ucx_worker"):
        monkeypatch.delitem(sys.modules, f"asyncmoe.transports.{name}")
    monkeypatch.setitem(sys.modules, "ucxx", None)
    with pytest.raises(MissingDependency, match=r"needs ucxx.*asyncmoe\[ucx\]"):
        registry._from_entry_point.__wrapped__("transports", "ucx")


def test_tags_of_a_direction_differ_from_each_other_and_from_those_of_other_channels() -> None:
    each = [list(itertools.islice(tags(channel), 1000)) for channel in (0, 1, 2**32 - 1)]
    assert len({tag for some in each for tag in some}) == 3000
    assert all(0 <= tag < 2**64 for some in each for tag in some)


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1), st.binary(min_size=1, max_size=64), st.data())
def test_a_card_that_was_changed_is_refused_before_ucx_sees_it(
    channel: int, address: bytes, data: st.DataObject
) -> None:
    card = make_card(channel, address)
    assert read_card(card) == (channel, address)
    place, bit = data.draw(st.integers(0, len(card) - 1)), data.draw(st.integers(0, 7))
    changed = bytearray(card)
    changed[place] ^= 1 << bit
    for wrong in (bytes(changed), card[:place], card + b"\0"):
        with pytest.raises(ProtocolError):
            read_card(wrong)
