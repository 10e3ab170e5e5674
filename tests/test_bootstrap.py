"""How ranks learn who they are and find each other."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from asyncmoe import configfile
from asyncmoe.config import ClusterConfig
from asyncmoe.errors import ConfigError, RankFailed
from asyncmoe.frontend.bootstrap import (
    StoreDirectory,
    agree_on_token,
    connect_store,
    host_store,
)
from asyncmoe.frontend.launch import form_cluster
from asyncmoe.frontend.world import (
    Rendezvous,
    detect_world,
    fit_to_world,
    world_variables,
)
from asyncmoe.world import World

LAUNCHED = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@asynccontextmanager
async def directories(size: int, joined: int | None = None) -> AsyncIterator[list[StoreDirectory]]:
    """The directories of the first `joined` of `size` ranks; rank 0 hosts the store."""
    server = host_store("127.0.0.1", 0, 5.0)
    meeting = Rendezvous("127.0.0.1", server.port, "test", agent_hosts=False)
    made = [
        StoreDirectory(
            connect_store(meeting, 5.0), World(rank, size, rank, size), None if rank else server
        )
        for rank in range(size if joined is None else joined)
    ]
    del server  # the store ends when its directory lets go of it
    try:
        yield made
    finally:
        for directory in reversed(made):
            await directory.close(linger_s=0.0)


def test_world_is_read_from_the_environment_and_survives_a_round_trip() -> None:
    detected = detect_world({**LAUNCHED, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"})

    assert detected is not None
    world, rendezvous = detected
    assert world == World(rank=1, size=2, local_rank=1, local_size=2)
    assert (rendezvous.host, rendezvous.port) == ("127.0.0.1", 29500)
    assert detect_world(world_variables(world, rendezvous)) == detected


def test_each_restart_of_a_run_meets_under_its_own_prefix() -> None:
    elastic = {**LAUNCHED, "TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    first = detect_world({**elastic, "TORCHELASTIC_RESTART_COUNT": "0"})
    second = detect_world({**elastic, "TORCHELASTIC_RESTART_COUNT": "1"})

    assert first is not None
    assert second is not None
    assert first[1].prefix != second[1].prefix
    assert first[1].agent_hosts


def test_no_launcher_means_no_world() -> None:
    assert detect_world({"WORLD_SIZE": "2"}) is None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"RANK": "2"}, "RANK is '2'; it must be 0 to 1"),
        ({"WORLD_SIZE": "zero"}, "WORLD_SIZE is 'zero'"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT is '70000'"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is not"),
        ({"LOCAL_WORLD_SIZE": "3"}, "LOCAL_WORLD_SIZE is '3'"),
    ],
)
def test_environment_that_does_not_fit_is_refused(changed: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        detect_world({**LAUNCHED, **changed})


def test_number_of_ranks_that_contradicts_the_launcher_is_refused() -> None:
    world = World(0, 2, 0, 2)

    assert fit_to_world(configfile.load(environ={}), world).cluster.ranks == 2
    with pytest.raises(ConfigError, match="ranks is 3, but WORLD_SIZE is 2"):
        fit_to_world(configfile.load(environ={}, overrides={"cluster.ranks": 3}), world)


def test_cores_are_shared_among_the_ranks_of_a_machine() -> None:
    config = configfile.load(environ={})

    assert fit_to_world(config, World(0, 999, 0, 999)).device.threads == 1
    asked = configfile.load(environ={}, overrides={"device.threads": 7})
    assert fit_to_world(asked, World(0, 2, 0, 2)).device.threads == 7


def test_hosted_store_listens_on_loopback_alone() -> None:
    server = host_store("127.0.0.1", 0, 5.0)

    with open("/proc/net/tcp") as table, open("/proc/net/tcp6") as table6:
        rows = [line.split() for line in [*table, *table6]]
    port, listening = f"{server.port:04X}", "0A"
    bound = [row[1] for row in rows if row[3] == listening and row[1].endswith(f":{port}")]
    assert bound == [f"0100007F:{port}"]


def test_port_in_use_is_a_clear_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port}.*in use"):
            host_store("127.0.0.1", port, 5.0)


def test_store_that_is_not_there_is_named_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    with pytest.raises(TimeoutError, match=f"127.0.0.1 port {port}"):
        connect_store(Rendezvous("127.0.0.1", port, "test", agent_hosts=False), 0.2)


async def test_lookup_waits_for_what_another_rank_publishes() -> None:
    async with directories(2) as (zero, one):
        waiting = asyncio.create_task(zero.lookup("address/1", 5.0))
        await asyncio.sleep(0.05)

        one.publish("address/1", "here")

        assert await waiting == "here"


async def test_waiting_does_not_block_the_loop() -> None:
    async with directories(1) as (zero,):
        waiting = asyncio.create_task(zero.lookup("never", 0.5))
        begin_s, turns = time.monotonic(), 0
        while not waiting.done() and time.monotonic() - begin_s < 5:
            await asyncio.sleep(0.001)
            turns += 1

        assert turns > 100
        with pytest.raises(TimeoutError):
            await waiting


async def test_failure_of_a_rank_reaches_all_who_wait_with_its_own_words() -> None:
    async with directories(3) as (zero, one, two):
        waiting = [asyncio.create_task(d.lookup("address/2", 60.0)) for d in (zero, one)]

        await two.fail(2, "no such checkpoint")

        for wait in waiting:
            with pytest.raises(RankFailed, match="rank 2 failed: no such checkpoint"):
                await asyncio.wait_for(wait, 2.0)


async def test_first_failure_stays() -> None:
    async with directories(2) as (zero, one):
        await one.fail(1, "the cause")

        stays = await zero.fail(0, "a consequence")

        assert (stays.rank, stays.message) == (1, "the cause")


async def test_timeout_names_the_ranks_that_have_not_joined() -> None:
    async with directories(4, joined=2) as (zero, _):
        with pytest.raises(TimeoutError, match="not joined: 2, 3"):
            await zero.lookup("address/3", 0.1)


async def test_store_that_goes_away_is_a_failure_of_rank_0() -> None:
    async with directories(2) as (zero, one):
        waiting = asyncio.create_task(one.lookup("never", 60.0))
        await asyncio.sleep(0.05)

        await zero.close(linger_s=0.0)

        with pytest.raises(RankFailed, match="rank 0 failed"):
            await asyncio.wait_for(waiting, 5.0)


async def test_host_stays_until_the_others_have_read_the_failure() -> None:
    async with directories(2) as (zero, one):
        await zero.fail(0, "no such checkpoint")
        closing = asyncio.create_task(zero.close(linger_s=5.0))
        await asyncio.sleep(0.1)

        with pytest.raises(RankFailed, match="no such checkpoint"):
            await one.lookup("anything", 5.0)
        await one.close()

        await asyncio.wait_for(closing, 2.0)


async def test_ranks_on_loopback_agree_on_a_token_of_their_own() -> None:
    async with directories(2) as (zero, one):
        tokens = await asyncio.gather(
            *(agree_on_token(ClusterConfig(), d, 5.0) for d in (one, zero))
        )

        assert tokens[0] == tokens[1]
        assert len(tokens[0]) >= 32


async def test_one_rank_needs_no_store() -> None:
    cluster = await form_cluster(configfile.load(environ={}), {})

    assert cluster.worlds == (World(0, 1, 0, 1),)
    assert cluster.config.transport.name == "inproc"
    assert cluster.config.cluster.token
    await cluster.close()


async def test_inproc_ranks_all_run_in_this_process() -> None:
    config = configfile.load(environ={}, overrides={"cluster.ranks": 3, "transport.name": "inproc"})

    cluster = await form_cluster(config, {})

    assert [world.rank for world in cluster.worlds] == [0, 1, 2]
    assert cluster.ranks is None


async def test_master_address_that_misses_our_store_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environ = {**LAUNCHED, "RANK": "0", "MASTER_ADDR": "127.0.0.2", "MASTER_PORT": str(port)}

    with pytest.raises(ConfigError, match=r"MASTER_ADDR '127\.0\.0\.2' does not lead"):
        await form_cluster(configfile.load(environ={}), environ)


@pytest.mark.parametrize(
    ("key", "name", "near"),
    [("scheduler.name", "defragg", "defrag"), ("transport.name", "tpc", "tcp")],
)
async def test_unknown_name_is_refused_before_any_rank_starts(
    key: str, name: str, near: str
) -> None:
    config = configfile.load(environ={}, overrides={key: name, "cluster.ranks": 2})

    with pytest.raises(ConfigError, match=f"Did you mean '{near}'"):
        await form_cluster(config, {})
