"""Authenticated links from one rank to all others: how transports with a control channel start.

Every rank binds a port, publishes it, and then all pairs connect at the same time: a rank dials the
lower ranks and admits the higher ones. Strangers cost a small, bounded record each and are dropped.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable

from asyncmoe import handshake
from asyncmoe.errors import ConfigError, ProtocolError, RankFailed
from asyncmoe.link import Link
from asyncmoe.transport import TransportContext

_LOG = logging.getLogger(__name__)
_HANDSHAKE_TIMEOUT_S = 10.0
_SPARE_HANDSHAKES = 64  # beyond one per rank; with more at once the oldest is dropped
_PAUSE_S = 0.05  # for which nobody is admitted when this process or machine is out of descriptors
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_WILDCARDS = ("", "0.0.0.0", "::")

Connected = Callable[[Link, int], None]  # (link, generation of the connection)


async def connect_all(
    context: TransportContext, name: str, on_connected: Connected, advertise_host: str | None = None
) -> None:
    """Connect to all other ranks, which find this one under `name`/rank in the directory.

    `on_connected` is called once for each, as it comes up. Raises `TimeoutError` naming the ranks
    that are missing after `start_timeout_s`, `RankFailed`; links that are up are the caller's.
    """
    missing = set(range(context.world)) - {context.rank}

    def connected(link: Link, generation: int) -> None:
        missing.discard(link.peer)
        on_connected(link, generation)

    listener = await _listen(context.bind_host)
    try:
        host = advertise_host or context.bind_host
        if host in _WILDCARDS:
            host = socket.gethostname()
        context.directory.publish(f"{name}/{context.rank}", f"{host}:{listener.getsockname()[1]}")
        async with asyncio.timeout(context.start_timeout_s), asyncio.TaskGroup() as group:
            group.create_task(_admit_higher(context, name, listener, connected))
            for peer in range(context.rank):
                group.create_task(_dial(context, name, peer, connected))
    except (TimeoutError, BaseExceptionGroup) as error:
        first = _first(error)
        if not isinstance(first, TimeoutError):
            raise first from None
        raise TimeoutError(
            f"rank {context.rank} has no connection to ranks {sorted(missing)} "
            f"after {context.start_timeout_s:.3g} s"
        ) from None
    finally:
        listener.close()


def _first(error: BaseException) -> BaseException:
    """What went wrong first, out of the groups that task groups make."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _listen(host: str) -> socket.socket:
    """A listening socket on a free port of `host`. Raises `ConfigError` naming the host."""
    loop = asyncio.get_running_loop()
    try:
        family, kind, proto, _, address = (
            await loop.getaddrinfo(
                host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
        )[0]
        listener = socket.socket(family, kind, proto)
        try:
            listener.setblocking(False)
            listener.bind(address)
            listener.listen(socket.SOMAXCONN)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError(f"cluster.bind_host {host!r} cannot be bound: {error}") from error
    return listener


async def _dial(context: TransportContext, name: str, peer: int, connected: Connected) -> None:
    address = await context.directory.lookup(f"{name}/{peer}", context.start_timeout_s)
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    sock: socket.socket | None = None
    try:
        family, kind, proto, _, where = (
            await loop.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
        )[0]
        sock = socket.socket(family, kind, proto)
        sock.setblocking(False)
        await loop.sock_connect(sock, where)
        generation = await handshake.dial(sock, context.rank, peer, context.world, context.token)
    except BaseException as error:
        if sock is not None:
            sock.close()
        if isinstance(error, OSError | ProtocolError):
            raise RankFailed(peer, f"no connection to {address}: {error}") from error
        raise
    connected(_link(context, sock, peer), generation)


async def _hear_of_failure(context: TransportContext, name: str) -> None:
    """Raise `RankFailed` if a rank fails before it dials, as any lookup does."""
    for peer in range(context.rank + 1, context.world):  # one by one, to ask no more than needed
        await context.directory.lookup(f"{name}/{peer}", context.start_timeout_s)


async def _admit_higher(
    context: TransportContext, name: str, listener: socket.socket, connected: Connected
) -> None:
    """Admit ranks until all higher ones are here; whoever else dials is dropped.

    Strangers who say nothing hold a bounded number of descriptors, and never end the start-up.
    """
    loop = asyncio.get_running_loop()
    waiting = set(range(context.rank + 1, context.world))
    complete = asyncio.Event()
    handshakes: dict[asyncio.Task[None], None] = {}  # the oldest first

    async def admit(sock: socket.socket) -> None:
        try:
            async with asyncio.timeout(_HANDSHAKE_TIMEOUT_S):
                peer, generation = await handshake.admit(
                    sock, context.rank, context.world, context.token
                )
            if peer not in waiting:
                raise ProtocolError(f"rank {peer} is connected already")
        except BaseException as error:
            sock.close()
            if not isinstance(error, OSError | ProtocolError):  # a TimeoutError is an OSError
                raise
            _LOG.warning("rank %d dropped a connection: %s", context.rank, error)
            return
        connected(_link(context, sock, peer), generation)
        waiting.discard(peer)
        if not waiting:
            complete.set()

    def drop_oldest() -> None:
        for task in list(handshakes)[:1]:
            del handshakes[task]
            task.cancel()

    async def accept(group: asyncio.TaskGroup) -> None:
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    raise
                _LOG.warning("rank %d cannot accept a connection: %s", context.rank, error)
                drop_oldest()
                await asyncio.sleep(_PAUSE_S)
                continue
            sock.setblocking(False)
            task = group.create_task(admit(sock))
            handshakes[task] = None
            task.add_done_callback(lambda done: handshakes.pop(done, None))
            if len(handshakes) > context.world + _SPARE_HANDSHAKES:
                drop_oldest()

    if not waiting:
        return
    async with asyncio.TaskGroup() as group:
        accepting = group.create_task(accept(group))
        hearing = group.create_task(_hear_of_failure(context, name))
        await complete.wait()
        for task in (accepting, hearing, *handshakes):
            task.cancel()


def _link(context: TransportContext, sock: socket.socket, peer: int) -> Link:
    return Link(sock, context.rank, peer, context.limits, context.peer_timeout_s)
