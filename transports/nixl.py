"""Parcels through NIXL: the sender writes into slots of registered memory at the receiver.

Each rank has one agent, and for each peer an arena that only this peer may write to: slots of the
two classes, so that a combine never waits for a dispatch (`nixl_slots.py`, `nixl_memory.py`). A
payload is written from where it lies, in its true length, and its notification carries class and
sequence. Slots that were read for the last time go back by notification.

Control frames and messages go over the authenticated link. A notification can be had only by asking
the library; a frame wakes the receiver's loop, which from then on asks for the notification, so an
idle rank hardly asks (`nixl_courier.py`). Frames are also checked, ordered and lost as on any other
transport; a notification alone moves nothing. A payload is whole when its control frame is here and
its notifications add up to its length, in whatever order they come: the library keeps none between
transfers. Parcels that are posted together are written together, on which a small one's cost
depends most.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import Sequence
from functools import partial
from typing import Any

from asyncmoe.deadline import Deadline
from asyncmoe.errors import ConfigError, ProtocolError
from asyncmoe.lease import Lease
from asyncmoe.link import Link
from asyncmoe.linked import LinkedTransport, Peer
from asyncmoe.reach import Reach
from asyncmoe.transport import ParcelClass, Receiver, TransportContext
from asyncmoe.transports.matched import Gate
from asyncmoe.transports.nixl_agent import Agent, NixlError
from asyncmoe.transports.nixl_courier import Courier
from asyncmoe.transports.nixl_memory import Arena
from asyncmoe.transports.nixl_peer import NixlPeer
from asyncmoe.transports.nixl_reach import NixlReach
from asyncmoe.transports.nixl_wire import RECORD_BYTES, Place, decode_head, encode_place
from asyncmoe.transports.shm import geometry_of, whole_option
from asyncmoe.transports.ucx_config import check_environment

_SPIN_US = 100
_MOST_SPIN_US = 1_000_000


class NixlTransport(LinkedTransport):
    """See the module. Options: `slots` and `slot_bytes` of each class towards each peer; `spin_us`,
    for which the library is asked without pause while something is due; `progress_thread`, whether
    the library drives itself, at 0.4 of a core; `advertise_host` as for tcp."""

    name = "nixl"
    option_names = ("advertise_host", "slots", "slot_bytes", "spin_us", "progress_thread")

    def __init__(self, context: TransportContext) -> None:
        super().__init__(context)
        if context.device.type not in ("cpu", "cuda"):
            raise ConfigError(f"transport nixl does not know the memory of {context.device}")
        self._progress_thread = context.options.get("progress_thread", False)
        if type(self._progress_thread) is not bool:
            raise ConfigError(
                f"transport.options.progress_thread is {self._progress_thread!r}; "
                "allowed: true or false"
            )
        check_environment()
        self._spin_s = whole_option(context, "spin_us", _SPIN_US, _MOST_SPIN_US) * 1e-6
        self._geometry = geometry_of(context)
        self._agent_name = f"asyncmoe-{context.rank:08x}-{secrets.token_hex(8)}"
        self._agent: Agent | None = None
        self._courier: Courier | None = None
        self._arenas: dict[int, tuple[Arena, Any]] = {}  # by peer; with what `withdraw` takes
        self._gate: Gate | None = None

    async def start(self, receiver: Receiver) -> None:
        """See `Transport`. When it returns, NIXL itself has reached all peers, both ways."""
        if self.context.world == 1:
            return
        deadline = Deadline(self.context.start_timeout_s)
        courier = self._courier = Courier(self._spin_s)
        make = partial(Agent, self._agent_name, self.context.bind_host, self._progress_thread)
        try:
            self._agent = await courier.open(make)
            self._gate = Gate(receiver)
            await super().start(self._gate)
            await self._greet(deadline)
        except NixlError as error:
            self.abort()
            raise ConfigError(f"transport nixl cannot start: {error}") from error
        except BaseException:
            self.abort()
            raise

    async def close(self) -> None:
        """See `Transport`. If cancelled, disconnects at once."""
        self._closing = True
        self._shut()
        if self._gate is not None:
            self._gate.close()
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.context.peer_timeout_s):
                    await asyncio.gather(*(_nixl(peer).flush() for peer in self._peers.values()))
            await super().close()
        finally:
            self._end("this rank closed its transport")

    async def _greet(self, deadline: Deadline) -> None:
        """Wait until every peer's greeting has come over NIXL, or the peer is lost."""
        peers = [_nixl(peer) for peer in self._peers.values()]
        for peer in peers:
            peer.greet()
        try:
            async with asyncio.timeout(deadline.left_s):
                for peer in peers:
                    await peer.greeted
        except TimeoutError:
            silent = sorted(peer.rank for peer in peers if not peer.greeted.done())
            raise TimeoutError(
                f"rank {self.context.rank} has a connection to ranks {silent}, but NIXL has none "
                f"after {self.context.start_timeout_s:.3g} s: UCX needs open ports between them"
            ) from None

    def _end(self, reason: str) -> None:
        super()._end(reason)
        if self._courier is not None:
            self._courier.close()
        for arena, _ in self._arenas.values():  # of peers that never came up
            arena.retire()
        self._arenas.clear()

    def _reach(self) -> Reach:
        return NixlReach(self.context.bind_host, self.context.options.get("advertise_host"))

    async def _meet(self, sock: socket.socket, peer: int) -> tuple[Place, Arena, Any]:
        assert self._agent is not None
        if peer in self._arenas:
            raise ProtocolError(f"rank {peer} has met this rank already")
        arena = Arena(len(ParcelClass) * self._geometry.class_bytes, self.context.device)
        self._arenas[peer] = arena, None
        registered, metadata = self._agent.publish(arena.span)
        self._arenas[peer] = arena, registered
        mine = Place(
            arena.span.kind, self._geometry.slots, self._geometry.slot_bytes, arena.span.address,
            self._agent_name, metadata,
        )  # fmt: skip
        loop = asyncio.get_running_loop()
        sending = loop.create_task(loop.sock_sendall(sock, encode_place(mine)))
        try:
            place, name_bytes, metadata_bytes = decode_head(await _read(sock, RECORD_BYTES), mine)
            name = (await _read(sock, name_bytes)).decode("ascii", "replace")
            place = place._replace(name=name, metadata=await _read(sock, metadata_bytes))
            await sending
        finally:
            sending.cancel()
        if name == self._agent_name or name in self._names():
            raise ProtocolError(f"record field name is {name!r}, which is taken")
        self._agent.admit(name, place.metadata, metadata)
        return place, arena, registered

    def _names(self) -> set[str]:
        return {_nixl(peer).agent for peer in self._peers.values()}

    def _make_peer(self, link: Link, generation: int, receiver: Receiver, met: Any) -> Peer:
        assert self._courier is not None
        assert self._agent is not None
        del self._arenas[link.peer]  # the peer's from now on
        return NixlPeer(
            self, link, generation, receiver, self._geometry, self._courier, self._agent, *met
        )

    def _quarantined(self, peer: Peer, leases: Sequence[Lease]) -> None:
        # A late write may come for ever, but these slots never get another owner: see `Arena`.
        for lease in leases:
            lease.quiet()


def _nixl(peer: Peer) -> NixlPeer:
    assert isinstance(peer, NixlPeer)
    return peer


async def _read(sock: socket.socket, nbytes: int) -> bytes:
    """Exactly `nbytes` bytes, and nothing of what follows them."""
    loop, data = asyncio.get_running_loop(), bytearray()
    while len(data) < nbytes:
        piece = await loop.sock_recv(sock, nbytes - len(data))
        if not piece:
            raise ProtocolError("the other side ended the exchange of addresses")
        data += piece
    return bytes(data)
