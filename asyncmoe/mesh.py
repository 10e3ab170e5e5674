"""Authenticated links from one rank to all others: how transports with a control channel start.

Every rank listens, publishes where, and then all pairs connect at the same time: a rank dials the
lower ranks and admits the higher ones. Strangers cost a small, bounded record each and are dropped.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

from asyncmoe import handshake
from asyncmoe.errors import ProtocolError, RankFailed
from asyncmoe.link import Link
from asyncmoe.reach import Reach
from asyncmoe.transport import TransportContext

_LOG = logging.getLogger(__name__)
_HANDSHAKE_TIMEOUT_S = 10.0
_SPARE_HANDSHAKES = 64  # beyond one per rank; with more at once the oldest is dropped
_PAUSE_S = 0.05  # for which nobody is admitted when this process or machine is out of descriptors
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

Connected = Callable[
    [Link, int, Any], None
]  # (link, generation of the connection, what `meet` gave)
Meet = Callable[[socket.socket, int], Awaitable[Any]]  # (socket, peer) -> what it gave us


@dataclass(frozen=True, slots=True)
class Meeting:
    """How the ranks of one transport come together."""

    name: str  # ranks are published under `name`/rank
    reach: Reach
    meet: Meet  # what the two sides do on the socket between the handshake and the link
    on_connected: Connected  # called once for each peer, as it comes up


async def connect_all(context: TransportContext, meeting: Meeting) -> None:
    """Connect to all other ranks.

    Raises `TimeoutError` naming the ranks that are missing after `start_timeout_s`, `RankFailed`;
    links that are up are the caller's.
    """
    missing = set(context.others)

    def connected(link: Link, generation: int, met: Any) -> None:
        missing.discard(link.peer)
        meeting.on_connected(link, generation, met)

    mine = replace(meeting, on_connected=connected)
    listener = await meeting.reach.listen()
    try:
        context.directory.publish(f"{meeting.name}/{context.rank}", meeting.reach.address(listener))
        async with asyncio.timeout(context.start_timeout_s), asyncio.TaskGroup() as group:
            group.create_task(_admit_higher(context, mine, listener))
            for peer in context.others:
                if peer < context.rank:
                    group.create_task(_dial(context, mine, peer))
    except (TimeoutError, BaseExceptionGroup) as error:
        first = first_of(error)
        if not isinstance(first, TimeoutError):
            raise first from None
        raise TimeoutError(
            f"rank {context.rank} has no connection to ranks {sorted(missing)} "
            f"in the {context.start_timeout_s:.3g} s that were left of cluster.start_timeout_s"
        ) from None
    finally:
        listener.close()


def first_of(error: BaseException) -> BaseException:
    """What went wrong first, out of the groups that task groups make."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _dial(context: TransportContext, meeting: Meeting, peer: int) -> None:
    address = await context.directory.lookup(f"{meeting.name}/{peer}", context.start_timeout_s)
    sock: socket.socket | None = None
    try:
        sock = await meeting.reach.dial(address)
        generation = await handshake.dial(sock, context.rank, peer, context.world, context.token)
        met = await meeting.meet(sock, peer)
    except BaseException as error:
        if sock is not None:
            sock.close()
        if isinstance(error, OSError | ProtocolError):
            raise RankFailed(peer, f"no connection to {address}: {error}") from error
        raise
    meeting.on_connected(_link(context, sock, peer), generation, met)


async def _hear_of_failure(context: TransportContext, name: str) -> None:
    """Raise `RankFailed` if a rank fails before it dials, as any lookup does."""
    for peer in _higher(context):  # one by one, to ask no more than needed
        await context.directory.lookup(f"{name}/{peer}", context.start_timeout_s)


async def _admit_higher(
    context: TransportContext, meeting: Meeting, listener: socket.socket
) -> None:
    """Admit ranks until all higher ones are here; whoever else dials is dropped.

    Strangers who say nothing hold a bounded number of descriptors, and never end the start-up.
    """
    loop = asyncio.get_running_loop()
    waiting = set(_higher(context))
    complete = asyncio.Event()
    handshakes: dict[asyncio.Task[None], None] = {}  # the oldest first

    async def admit(sock: socket.socket) -> None:
        try:
            async with asyncio.timeout(_HANDSHAKE_TIMEOUT_S):
                peer, generation = await handshake.admit(
                    sock, context.rank, context.world, context.token
                )
                met = await meeting.meet(sock, peer)
            if peer not in waiting:
                raise ProtocolError(f"rank {peer} is connected already")
        except BaseException as error:
            sock.close()
            if not isinstance(error, OSError | ProtocolError):  # a TimeoutError is an OSError
                raise
            # As text: a record of the error would keep its frames, and the memory mapped there.
            _LOG.warning("rank %d dropped a connection: %s", context.rank, str(error))
            return
        meeting.on_connected(_link(context, sock, peer), generation, met)
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
        hearing = group.create_task(_hear_of_failure(context, meeting.name))
        await complete.wait()
        for task in (accepting, hearing, *handshakes):
            task.cancel()


def _higher(context: TransportContext) -> list[int]:
    """The ranks that dial this one."""
    return [peer for peer in context.others if peer > context.rank]


def _link(context: TransportContext, sock: socket.socket, peer: int) -> Link:
    return Link(sock, context.rank, peer, context.limits, context.peer_timeout_s)
