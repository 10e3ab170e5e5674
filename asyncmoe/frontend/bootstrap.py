"""How ranks find each other before they are connected: a directory over torch's TCPStore.

A store that we host listens on `cluster.bind_host` only. (Left alone, TCPStore listens on every
interface, and anybody who reaches it may read and write it.)
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import orjson
from torch.distributed import (  # type: ignore[attr-defined]  # public, not marked for export
    DistError,
    PrefixStore,
    Store,
    TCPStore,
)

from asyncmoe.config import ClusterConfig, Config, is_loopback
from asyncmoe.errors import ConfigError, RankFailed
from asyncmoe.frontend.world import Rendezvous
from asyncmoe.world import World

T = TypeVar("T")
FAILURE_KEY = "failure"
POLL_S = 0.01
BACKLOG = 1024


@dataclass(slots=True)
class StoreServer:
    """A TCPStore that this process hosts; it lives as long as the object."""

    store: TCPStore
    port: int


def host_store(bind_host: str, port: int, timeout_s: float) -> StoreServer:
    """Start a TCPStore that listens on `bind_host` alone; port 0 takes a free one.

    Raises `ConfigError` if the address cannot be bound, for example since the port is in use.
    """
    try:
        family = socket.getaddrinfo(bind_host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((bind_host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {bind_host} port {port} for the ranks to meet: {error.strerror}"
        ) from None
    port = int(listener.getsockname()[1])
    store = TCPStore(
        bind_host,
        port,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # the store owns and closes it
    )
    return StoreServer(store, port)


def connect_store(rendezvous: Rendezvous, timeout_s: float) -> Store:
    """A connection to the store, narrowed to this run. Blocks until the store is up.

    Raises `TimeoutError` naming the address.
    """
    deadline_s = time.monotonic() + timeout_s
    address = (rendezvous.host, rendezvous.port)
    while True:  # torch's own attempts fill the terminal with stack traces, so knock first
        try:
            socket.create_connection(address, timeout=max(0.1, timeout_s)).close()
            break
        except OSError as error:
            if time.monotonic() >= deadline_s:
                raise TimeoutError(
                    f"no rank or agent answers at {address[0]} port {address[1]} after "
                    f"{timeout_s:g} s ({error}); is rank 0 running, and MASTER_ADDR right?"
                ) from None
            time.sleep(0.05)
    store = TCPStore(
        *address, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
    )
    return PrefixStore(rendezvous.prefix, store)


class StoreDirectory:
    """What ranks publish while they start: addresses, and the first failure.

    One thread makes all calls of the store, so that a slow or dead store never blocks the loop.
    Keys and values are small text. `close` must be called.
    """

    def __init__(self, store: Store, world: World, server: StoreServer | None = None) -> None:
        """Announce this rank. `server` is the store when this process hosts it."""
        self.world = world
        self._store, self._server = store, server
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="directory")
        self._closed = False
        self.publish(f"joined/{world.rank}", "")

    def publish(self, key: str, value: str) -> None:
        """Make `value` visible to all ranks."""
        # A lost store is noticed by the next lookup, which has somebody to tell.
        self._thread.submit(self._store.set, key, value)

    async def lookup(self, key: str, timeout_s: float) -> str:
        """Wait for `key`. Raises `RankFailed` with a rank's own error as soon as one has failed,
        and `TimeoutError` naming the ranks that have not joined."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            failure, value = await self._call(lambda: (self._read(FAILURE_KEY), self._read(key)))
            if failure is not None:
                raise _as_error(failure)
            if value is not None:
                return value
            if time.monotonic() >= deadline_s:
                raise TimeoutError(await self._call(lambda: self._diagnosis(key, timeout_s)))
            await asyncio.sleep(POLL_S)

    async def failure(self) -> RankFailed | None:
        """The failure that was published first, if any."""
        failure = await self._call(lambda: self._read(FAILURE_KEY))
        return None if failure is None else _as_error(failure)

    async def fail(self, rank: int, message: str) -> RankFailed:
        """Tell all ranks that `rank` failed. The first failure told stays, and is returned."""
        text = orjson.dumps([rank, message]).decode()
        stays = await self._call(lambda: self._store.compare_set(FAILURE_KEY, "", text))
        return _as_error(stays.decode())

    async def close(self, linger_s: float = 2.0) -> None:
        """Leave. If there was a failure, a host stays for up to `linger_s` until all others, who
        have to read it, have left. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            await self._call(lambda: self._store.set(f"left/{self.world.rank}", ""))
            if self._server is not None and await self.failure() is not None:
                await self._others_left(linger_s)
        except RankFailed:
            pass  # the host of the store is gone, so there is nobody left to tell
        self._thread.shutdown(wait=False)
        self._server = None

    async def _others_left(self, timeout_s: float) -> None:
        left = [f"left/{rank}" for rank in range(self.world.size)]
        deadline_s = time.monotonic() + timeout_s
        while not await self._call(lambda: self._store.check(left)):
            if time.monotonic() >= deadline_s:
                return
            await asyncio.sleep(POLL_S)

    async def _call(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except DistError as error:
            reason = str(error).partition("\n")[0]
            raise RankFailed(0, f"the store where the ranks meet is gone ({reason})") from None

    def _read(self, key: str) -> str | None:
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _diagnosis(self, key: str, timeout_s: float) -> str:
        missing = [r for r in range(self.world.size) if not self._store.check([f"joined/{r}"])]
        who = (
            f"these ranks have not joined: {', '.join(map(str, missing))}"
            if missing
            else "all ranks have joined, but none has published it"
        )
        return f"rank {self.world.rank} waited {timeout_s:g} s for {key!r}; {who}"


def make_token() -> str:
    """A new cluster token."""
    return secrets.token_urlsafe(32)


async def agree_on_token(
    cluster: ClusterConfig, directory: StoreDirectory, timeout_s: float
) -> str:
    """The token that all ranks use: the configured one, or one that rank 0 makes up.

    A token is made up only if all sockets are on loopback, since whoever can reach the store can
    read it there (the config refuses other hosts without a token).
    """
    if cluster.token:
        return cluster.token
    if not is_loopback(cluster.bind_host):
        raise ConfigError(f"cluster.token must be set when bind_host is {cluster.bind_host!r}")
    if directory.world.rank == 0:
        directory.publish("token", make_token())
    return await directory.lookup("token", timeout_s)


def with_token(config: Config, token: str) -> Config:
    """`config` with the cluster token filled in."""
    cluster = config.cluster.model_copy(update={"token": token})
    return config.model_copy(update={"cluster": cluster})


def _as_error(failure: str) -> RankFailed:
    rank, message = orjson.loads(failure)
    return RankFailed(int(rank), str(message))
