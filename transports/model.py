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
from collections import deque
from typing import Any, ClassVar

import torch

from asyncmoe.directory import MemoryDirectory
from asyncmoe.errors import FAREWELL, ConfigError, PeerLost, ProtocolError, RankFailed, UnknownName
from asyncmoe.lease import LeasePool
from asyncmoe.packed import PackedParcel
from asyncmoe.transport import (
    Arrival,
    Parcel,
    ParcelClass,
    Posted,
    Receiver,
    Transport,
    TransportContext,
)
from asyncmoe.transports.model_network import Network, Way
from asyncmoe.virtual.loop import VirtualLoop, current_lane
from asyncmoe.wire import (
    PRELUDE_BYTES,
    decode_parcel,
    decode_prelude,
    encode_message,
    encode_parcel,
)

_MESSAGE = 0  # the class of what is no parcel; `ParcelClass` has the others
_MEETING = "model/meeting"


class Loans(LeasePool):
    """The payloads of one rank's arrivals, which lie where their senders have them: they are lent
    and read, and never filled. A count stands for them, since there are many."""

    def __init__(self) -> None:
        super().__init__()
        self.lent = 0

    @property
    def live(self) -> int:
        """See `LeasePool`."""
        return super().live + self.lent

    @property
    def held(self) -> int:
        """See `LeasePool`."""
        return super().held + self.lent


class _Loan:
    """One of them."""

    __slots__ = ("_link", "_loans", "_posted")

    def __init__(self, loans: Loans, link: _Link, posted: Posted) -> None:
        self._loans, self._posted = loans, posted
        self._link: _Link | None = link
        loans.lent += 1

    def release(self) -> None:
        """The last read is over. Raises `RuntimeError` when it was already."""
        link = self._link
        if link is None:
            raise RuntimeError("the loan is FREE, not HELD: it cannot become FREE")
        self._link = None
        self._loans.lent -= 1
        link.unsent.pop(self._posted, None)
        self._posted.complete()

    @property
    def held(self) -> bool:
        """Whether it has not been released."""
        return self._link is not None


class _Link:
    """What one rank sends to another: the way, and by class what is on it, in order."""

    __slots__ = ("back", "error", "last_s", "on_it", "plain", "sender", "taker", "unsent", "way")

    def __init__(self, sender: ModelTransport, taker: ModelTransport, way: Way) -> None:
        self.sender, self.taker, self.way = sender, taker, way
        # Whether a parcel that passes the sender's limits passes the receiver's.
        self.plain = sender.context.limits == taker.context.limits
        self.error: PeerLost | None = None  # why the sender can send nothing any more
        self.last_s = [0.0, 0.0, 0.0]  # when the last one of each class comes out
        self.on_it: tuple[deque[Any], ...] = (deque(), deque(), deque())
        self.unsent: dict[Posted, None] = {}  # parcels whose source is not free
        self.back: _Link  # the other direction


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
        self._parcel_out_s = self._parcel_in_s = self._message_s = 0.0  # of the host
        self.network: Network  # of all ranks, once they have met
        if context.rank == 0:
            self.network = Network(options.get("network", {}), context.world)
        self.leases = Loans()
        self._links: dict[int, _Link] = {}  # to each peer, made when it is first needed
        self._peers: dict[int, ModelTransport] = {}
        self._gone: str | None = None  # why this rank sends nothing any more
        # Where the network's own events belong: to no rank, whose host they would wait for.
        self._outside: contextvars.Context | None = None

    async def start(self, receiver: Receiver) -> None:
        """See `Transport`."""
        self._receiver, self._loop = receiver, asyncio.get_running_loop()
        self._lane = lane = current_lane()
        # What happens here is this rank's, also where others are the cause.
        self._context = contextvars.copy_context() if lane is None else lane.context
        if isinstance(self._loop, VirtualLoop):
            self._outside = self._loop.main.context
        if lane is not None and lane.costs is not None:
            self._parcel_out_s, self._parcel_in_s = lane.costs.parcel_out_s, lane.costs.parcel_in_s
            self._message_s = lane.costs.message_s
        context = self.context
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
        link = self._links.get(peer) or self._link(peer)
        if link.error is not None:
            raise PeerLost(peer, link.error.reason)
        payload, kind = parcel.payload, parcel.kind
        row_bytes = self._row_bytes[kind]
        if type(parcel) is PackedParcel and link.plain and parcel.count <= self._most_rows:
            what: Parcel | bytes = parcel
            nbytes = PRELUDE_BYTES + len(parcel.block) + parcel.count * row_bytes
        else:
            what = encode_parcel(
                parcel, self.context.limits,
                source=self.context.rank, sequence=0, lease=0, generation=0,
            )  # fmt: skip
            nbytes = len(what) + (parcel.rows * row_bytes or payload.nbytes)
        posted = Posted()
        link.unsent[posted] = None
        self._put(link, kind, (what, payload, posted), nbytes, self._parcel_out_s)
        return posted

    def send(self, peer: int, message: bytes) -> None:
        """See `Transport`."""
        link = self._links.get(peer) or self._link(peer)
        if link.error is not None:
            raise PeerLost(peer, link.error.reason)
        encode_message(self.context.rank, 0, len(message), self.context.limits)  # may raise
        self._put(link, _MESSAGE, bytes(message), PRELUDE_BYTES + len(message), self._message_s)

    def _put(self, link: _Link, kind: int, what: Any, nbytes: int, host_s: float) -> None:
        """Put something on a link once the host has worked on it for `host_s`."""
        lane, now_s = self._lane, self._loop.time()
        begin_s = now_s if lane is None else lane.charge(host_s)
        link.on_it[kind].append(what)
        first_s, last_s, due_s = self.network.put(link.way, now_s, begin_s, nbytes)
        if due_s is None:
            self._loop.call_at(first_s, self._enter, link, kind, first_s, last_s, nbytes,
                               context=self._outside)  # fmt: skip
        else:
            self._come_out(link, kind, due_s)

    def _enter(self, link: _Link, kind: int, first_s: float, last_s: float, nbytes: int) -> None:
        """The first byte is at the NIC of the other host."""
        self._come_out(link, kind, self.network.enter(link.way, first_s, last_s, nbytes))

    def _come_out(self, link: _Link, kind: int, due_s: float) -> None:
        """All of it will be there at `due_s`, and not before what went before it."""
        last_s = link.last_s
        if due_s < last_s[kind]:
            due_s = last_s[kind]
        last_s[kind] = due_s
        taker = link.taker
        self._loop.call_at(due_s, taker._take, link, kind, context=taker._context)

    # ---- receiving

    def _take(self, link: _Link, kind: int) -> None:
        """The next one of a class has come out of a link to this rank."""
        on_it = link.on_it[kind]
        if not on_it:
            return  # the link was emptied when it was lost
        what = on_it.popleft()
        if link.back.error is not None:
            return  # the sender is told by `_lose`
        try:
            if kind == _MESSAGE:
                if self._lane is not None:
                    self._lane.charge(self._message_s)
                self._receiver.on_message(link.sender.context.rank, what)
            else:
                if self._lane is not None:
                    self._lane.charge(self._parcel_in_s)
                    self._lane.counts(self._parcel_in_s)
                self._take_parcel(link, *what)
        except ProtocolError as error:
            link.sender._lose(self.context.rank, f"it refused a frame: {error}")
            self._lose(link.sender.context.rank, f"malformed frame: {error}")

    def _take_parcel(
        self, link: _Link, what: Parcel | bytes, payload: torch.Tensor, posted: Posted
    ) -> None:
        if isinstance(what, bytes):
            limits = self.context.limits
            prelude = decode_prelude(memoryview(what)[:PRELUDE_BYTES], limits)
            what = decode_parcel(prelude, memoryview(what)[PRELUDE_BYTES:], payload, limits)
        loan = _Loan(self.leases, link, posted)
        try:
            self._receiver.on_parcel(Arrival(link.sender.context.rank, what, loan.release))
        except ProtocolError:
            if loan.held:
                loan.release()
            raise

    # ---- the end

    async def close(self) -> None:
        """See `Transport`. Arrivals that peers still read stay readable."""
        self._leave(FAREWELL, "this rank closed its transport")
        if self._peers:
            # What was posted before has come out then.
            last_s = max((max(link.last_s) for link in self._links.values()), default=0.0)
            await asyncio.sleep(min(last_s - self._loop.time(), self.context.peer_timeout_s))

    def abort(self) -> None:
        """Leave at once; to the peers it looks as any loss does."""
        self._leave("it aborted its transport", "this rank aborted its transport")

    def cut(self, peer: int, reason: str) -> None:
        """See `Transport`: both sides are told at once."""
        self._link(peer).taker._lose(self.context.rank, reason)
        self._lose(peer, reason)

    def _leave(self, reason: str, own_reason: str) -> None:
        """Send nothing more; each peer is told behind all that was sent before. Idempotent."""
        if self._gone is not None:
            return
        for peer in self._peers:
            link = self._link(peer)
            if link.error is None:
                link.error = PeerLost(peer, own_reason)
                when_s = max(self._loop.time() + link.way.latency_s, *link.last_s)
                taker = link.taker
                self._loop.call_at(when_s, taker._bid_farewell, link, reason,
                                   context=taker._context)  # fmt: skip
        self._gone = own_reason

    def _bid_farewell(self, link: _Link, reason: str) -> None:
        """The sender of a link has left."""
        for kind, on_it in enumerate(link.on_it):
            while on_it:
                self._take(link, kind)
        self._lose(link.sender.context.rank, reason)

    def _lose(self, peer: int, reason: str) -> None:
        error = PeerLost(peer, reason)
        link = self._link(peer)
        unsent, link.unsent = link.unsent, {}
        for posted in unsent:
            posted.complete(error)
        if link.error is None:
            link.error = error
            self._receiver.on_peer_lost(peer, error)

    def _link(self, peer: int) -> _Link:
        """The link to a peer. Raises `ValueError` where there is no such peer."""
        link = self._links.get(peer)
        if link is not None:
            return link
        other = self._peers.get(peer)
        if other is None:
            raise ValueError(f"rank {self.context.rank} has no connection to rank {peer}")
        me = self.context.rank
        there = self._links[peer] = _Link(self, other, self.network.way(me, peer))
        back = other._links[me] = _Link(other, self, self.network.way(peer, me))
        there.back, back.back = back, there
        return there

    def sent_bytes(self) -> dict[int, int]:
        """Bytes put on the link to each peer so far, frames and columns included."""
        return {peer: link.way.sent_bytes for peer, link in self._links.items()}


def _row_bytes(options: dict[str, Any], name: str) -> int:
    """Bytes of a row on the wire; 0: as many as its payload has."""
    value = options.get(name, 0)
    if type(value) is not int or value < 0 or (name in options and not value):
        raise ConfigError(
            f"transport.options.{name} is {value!r}; allowed: bytes of a row, from 1 on"
        )
    return value
