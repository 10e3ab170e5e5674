"""The `model` transport: ranks that share one loop, over links of a modelled network.

Made for the virtual world, where a parcel is a few Python objects and takes the time that
`model_network.py` says; on any other loop it takes that time in earnest. A payload is read where
the sender has it, as with `inproc`. With `row_bytes`, the wire's bytes of a row whatever payloads
hold, a parcel that the engine packed is handed over as it is; all others go through a frame,
encoded and decoded, as between processes. In the virtual world the hosts of both ends are charged
for their part (`virtual/costs.py`).

Faults (stalls, duplicates, reordering, a link that is lost) are those of `impaired:model`.
"""

from __future__ import annotations

import asyncio
import contextvars
from typing import Any, ClassVar

import torch

from asyncmoe.directory import MemoryDirectory
from asyncmoe.errors import FAREWELL, ConfigError, PeerLost, ProtocolError, RankFailed, UnknownName
from asyncmoe.lease import LeasePool
from asyncmoe.transport import Parcel, ParcelClass, Posted, Receiver, Transport, TransportContext
from asyncmoe.transports.model_link import MESSAGE, Link, Port, make_port
from asyncmoe.transports.model_network import Network
from asyncmoe.virtual.loop import current_lane
from asyncmoe.wire import (
    PRELUDE_BYTES,
    decode_parcel,
    decode_prelude,
    encode_message,
    encode_parcel,
)

_MEETING = "model/meeting"


class Loans(LeasePool):
    """The payloads of one rank's arrivals, which lie where their senders have them: they are lent
    and read, and never filled. A count stands for them, since there are many."""

    def __init__(self) -> None:
        super().__init__()
        self.port: Port | None = None  # which counts them

    @property
    def live(self) -> int:
        """See `LeasePool`."""
        return super().live + self._lent

    @property
    def held(self) -> int:
        """See `LeasePool`."""
        return super().held + self._lent

    @property
    def _lent(self) -> int:
        return 0 if self.port is None else self.port.lent


class _Meeting:
    """Where the ranks of a cluster meet, and what they share."""

    def __init__(self, world: int, network: Network) -> None:
        self.network = network
        self.ranks: dict[int, ModelTransport] = {}
        self._missing = world
        self._complete = asyncio.Event()

    async def join(self, transport: ModelTransport) -> None:
        """Wait until all are here."""
        self.ranks[transport.context.rank] = transport
        if len(self.ranks) == self._missing:
            self._complete.set()
        await self._complete.wait()


class ModelTransport(Transport):
    """See the module. Ranks find each other in a `MemoryDirectory`, and must share a loop."""

    option_names: ClassVar[frozenset[str]] = frozenset(
        {"network", "row_bytes", "dispatch_row_bytes"}
    )

    def __init__(self, context: TransportContext) -> None:
        super().__init__(context)
        for option in context.options:
            if option not in self.option_names:
                raise UnknownName("option of transport model", option, self.option_names)
        options = context.options
        row_bytes = _row_bytes(options, "row_bytes")
        dispatch = _row_bytes(options, "dispatch_row_bytes") or row_bytes
        self._row_bytes = {ParcelClass.DISPATCH: dispatch, ParcelClass.COMBINE: row_bytes}
        self._most_rows = 0  # of a parcel that needs no frame
        if row_bytes:
            most = context.limits.parcel_bytes // row_bytes
            self._most_rows = min(context.limits.parcel_rows, most)
        self.network: Network  # of all ranks, once they have met
        if context.rank == 0:
            self.network = Network(options.get("network", {}), context.world)
        self.leases = Loans()
        self._port: Port | None = None  # its end of all links, from the start on
        self._peers: dict[int, ModelTransport] = {}
        self._gone: str | None = None  # why this rank sends nothing any more

    async def start(self, receiver: Receiver) -> None:
        """See `Transport`."""
        self._receiver, self._loop = receiver, asyncio.get_running_loop()
        lane = current_lane()
        # What happens here is this rank's, also where others are the cause.
        self._context = contextvars.copy_context() if lane is None else lane.context
        costs, context = None if lane is None else lane.costs, self.context
        self._port = self.leases.port = make_port(
            self._loop,
            owner=self,
            receiver=receiver,
            lane=lane,
            context=self._context,
            rank=context.rank,
            most_rows=self._most_rows,
            dispatch_row_bytes=self._row_bytes[ParcelClass.DISPATCH],
            row_bytes=self._row_bytes[ParcelClass.COMBINE],
            parcel_out_s=0.0 if costs is None else costs.parcel_out_s,
            parcel_in_s=0.0 if costs is None else costs.parcel_in_s,
            message_s=0.0 if costs is None else costs.message_s,
        )
        self.post = self._port.post  # type: ignore[method-assign]  # without a detour
        if context.world == 1:
            return
        directory = context.directory
        if not isinstance(directory, MemoryDirectory):
            raise ConfigError("transport model joins ranks of one process; use tcp between several")
        if context.rank == 0:
            directory.offer(_MEETING, _Meeting(context.world, self.network))
        try:
            async with asyncio.timeout(context.start_timeout_s):
                meeting = await directory.find(_MEETING, context.start_timeout_s)
                assert isinstance(meeting, _Meeting)
                await meeting.join(self)
        except TimeoutError:
            raise TimeoutError(
                f"rank {context.rank} has not met all others after {context.start_timeout_s:g} s"
            ) from None
        for peer in context.others:
            if meeting.ranks[peer]._loop is not self._loop:
                raise RankFailed(peer, "ranks of transport model must share one loop")
        self.network = meeting.network
        self._peers = {peer: meeting.ranks[peer] for peer in context.others}

    # ---- sending

    def post(self, peer: int, parcel: Parcel) -> Posted:
        """See `Transport`."""
        return self.post_framed(peer, parcel)  # which says that nobody is there yet

    def post_framed(self, peer: int, parcel: Parcel) -> Posted:
        """See `Owner`."""
        link = self._sending(peer)
        frame = encode_parcel(
            parcel, self.context.limits,
            source=self.context.rank, sequence=0, lease=0, generation=0,
        )  # fmt: skip
        payload = parcel.payload
        nbytes = len(frame) + self.payload_bytes(parcel)
        posted = link.put(parcel.kind, frame, payload, nbytes)
        assert posted is not None
        return posted

    def payload_bytes(self, parcel: Parcel) -> int:
        """See `Transport`: of the model's rows, whatever the payload holds."""
        return parcel.rows * self._row_bytes[parcel.kind] or parcel.payload.nbytes

    def send(self, peer: int, message: bytes) -> None:
        """See `Transport`."""
        link = self._sending(peer)
        encode_message(self.context.rank, 0, len(message), self.context.limits)  # may raise
        link.put(MESSAGE, bytes(message), None, PRELUDE_BYTES + len(message))

    # ---- receiving

    def decoded(self, frame: bytes, payload: torch.Tensor) -> Parcel:
        """See `Owner`."""
        whole, limits = memoryview(frame), self.context.limits
        prelude = decode_prelude(whole[:PRELUDE_BYTES], limits)
        return decode_parcel(prelude, whole[PRELUDE_BYTES:], payload, limits)

    def refused(self, peer: int, error: ProtocolError) -> None:
        """See `Owner`."""
        self._peers[peer]._lose(self.context.rank, f"it refused a frame: {error}")
        self._lose(peer, f"malformed frame: {error}")

    # ---- the end

    async def close(self) -> None:
        """See `Transport`. Arrivals that peers still read stay readable."""
        self._leave(FAREWELL, "this rank closed its transport")
        if self._peers:
            # What was posted before has come out then.
            last_s = max((link.last_s for link in self._links().values()), default=0.0)
            await asyncio.sleep(min(last_s - self._loop.time(), self.context.peer_timeout_s))

    def abort(self) -> None:
        """Leave at once; to the peers it looks as any loss does."""
        self._leave("it aborted its transport", "this rank aborted its transport")

    def cut(self, peer: int, reason: str) -> None:
        """See `Transport`: both sides are told at once."""
        self.open(peer)  # or it raises
        self._peers[peer]._lose(self.context.rank, reason)
        self._lose(peer, reason)

    def _leave(self, reason: str, own_reason: str) -> None:
        """Send nothing more; each peer is told behind all that was sent before. Idempotent."""
        if self._gone is not None:
            return
        for peer, taker in self._peers.items():
            link = self.open(peer)
            if link.error is None:
                link.error = PeerLost(peer, own_reason)
                when_s = max(self._loop.time() + link.way.latency_s, link.last_s)
                self._loop.call_at(when_s, taker._bid_farewell, link, self.context.rank, reason,
                                   context=taker._context)  # fmt: skip
        self._gone = own_reason

    def _bid_farewell(self, link: Link, peer: int, reason: str) -> None:
        """The sender of a link has left."""
        link.deliver()
        self._lose(peer, reason)

    def _lose(self, peer: int, reason: str) -> None:
        error = PeerLost(peer, reason)
        link = self.open(peer)
        link.fail(error)
        if link.error is None:
            link.error = error
            self._receiver.on_peer_lost(peer, error)

    def _sending(self, peer: int) -> Link:
        """The link to a peer. Raises `PeerLost` if nothing can be sent on it, and as `open`."""
        link = self.open(peer)
        if link.error is not None:
            raise PeerLost(peer, link.error.reason)
        return link

    def open(self, peer: int) -> Link:
        """See `Owner`: the link to a peer, made when it is first needed."""
        other, port = self._peers.get(peer), self._port
        if other is None or port is None or other._port is None:
            raise ValueError(f"rank {self.context.rank} has no connection to rank {peer}")
        link = port.link(peer)
        if link is None:
            me, plain = self.context.rank, self.context.limits == other.context.limits
            ways = self.network.way(me, peer), self.network.way(peer, me)
            link = port.join(other._port, *ways, plain)
        return link

    def _links(self) -> dict[int, Link]:
        """Those that were made."""
        assert self._port is not None
        links = {peer: self._port.link(peer) for peer in self._peers}
        return {peer: link for peer, link in links.items() if link is not None}

    def sent_bytes(self) -> dict[int, int]:
        """Bytes put on the link to each peer so far, frames and columns included."""
        return {peer: link.way.sent_bytes for peer, link in self._links().items()}


def _row_bytes(options: dict[str, Any], name: str) -> int:
    """Bytes of a row on the wire; 0: as many as its payload has."""
    value = options.get(name, 0)
    if type(value) is not int or value < 0 or (name in options and not value):
        raise ConfigError(
            f"transport.options.{name} is {value!r}; allowed: bytes of a row, from 1 on"
        )
    return value
