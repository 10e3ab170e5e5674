"""The links between ranks of the `model` transport: what is on its way, and what it takes.

On a compiled virtual loop they are compiled too (`native/src/columns/model_link.cpp`), since a run
spends much of its time here; these are the twin, which works on any loop.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from typing import Any, Protocol

import torch

from asyncmoe import native
from asyncmoe.errors import PeerLost, ProtocolError
from asyncmoe.packed import PackedParcel
from asyncmoe.transport import Arrival, Parcel, ParcelClass, Posted, Receiver
from asyncmoe.transports.model_way import Way
from asyncmoe.virtual.loop import Lane, VirtualLoop
from asyncmoe.wire import PRELUDE_BYTES

MESSAGE = 0  # the class of what is no parcel; `ParcelClass` has the others


class Owner(Protocol):
    """What a port asks of its transport."""

    def open(self, peer: int) -> Link:
        """Join a peer. Raises `ValueError` where there is no such peer."""

    def post_framed(self, peer: int, parcel: Parcel) -> Posted:
        """`Transport.post`, for parcels that are not handed over as they are, and for errors."""

    def decoded(self, frame: bytes, payload: torch.Tensor) -> Parcel:
        """The parcel of a frame. Raises `ProtocolError`."""

    def refused(self, peer: int, error: ProtocolError) -> None:
        """What a peer sent is not acceptable."""


class Port:
    """One rank's end of all its links."""

    def __init__(
        self,
        *,
        owner: Owner,
        receiver: Receiver,
        loop: asyncio.AbstractEventLoop,
        lane: Lane | None,
        context: contextvars.Context,
        rank: int,
        most_rows: int,
        dispatch_row_bytes: int,
        row_bytes: int,
        parcel_out_s: float,
        parcel_in_s: float,
        message_s: float,
    ) -> None:
        """What arrives is taken in in `context`. `lane`: whose host is charged; None: nobody's.

        `most_rows`: of a packed parcel that is handed over as it is; a row of it takes
        `dispatch_row_bytes` or `row_bytes` on the wire. The seconds are the host's, see `Costs`.
        """
        self.owner, self.receiver, self.context, self.rank = owner, receiver, context, rank
        self.loop, self.lane = loop, lane
        # Where the network's own events belong: to no rank, whose host they would wait for.
        self.outside = loop.main.context if isinstance(loop, VirtualLoop) else None
        self.parcel_in_s, self.message_s = parcel_in_s, message_s
        self.host_s = (message_s, parcel_out_s, parcel_out_s)  # to send, by class
        self.lent = 0  # arrivals that the rank has not released
        self._most_rows = most_rows
        self._row_bytes = {ParcelClass.DISPATCH: dispatch_row_bytes, ParcelClass.COMBINE: row_bytes}
        self._links: dict[int, Link] = {}

    def link(self, peer: int) -> Link | None:
        """To a peer that was joined."""
        return self._links.get(peer)

    def join(self, other: Port, way: Way, way_back: Way, plain: bool) -> Link:
        """Make the links to and from another port; returns the former.

        `plain`: whether a parcel that passes the limits of one passes those of the other.
        """
        there = self._links[other.rank] = Link(self, other, way, plain)
        back = other._links[self.rank] = Link(other, self, way_back, plain)
        there.back, back.back = back, there
        return there

    def post(self, peer: int, parcel: Parcel) -> Posted:
        """See `Transport`."""
        link = self._links.get(peer) or self.owner.open(peer)
        if (
            link.error is not None
            or type(parcel) is not PackedParcel
            or not link.plain
            or parcel.count > self._most_rows
        ):
            return self.owner.post_framed(peer, parcel)
        kind = parcel.kind
        nbytes = PRELUDE_BYTES + len(parcel.block) + parcel.count * self._row_bytes[kind]
        posted = link.put(kind, parcel, None, nbytes)
        assert posted is not None
        return posted


def make_port(loop: asyncio.AbstractEventLoop, **values: Any) -> Port:
    """As `Port`, compiled where the loop is."""
    if native.columns is not None and isinstance(loop, native.columns.Timeline):
        port: Port = native.columns.Port(loop=loop, take=Link.take, enter=Link.enter, **values)
        return port
    return Port(loop=loop, **values)


class _Loan:
    """The receiver's side of a parcel, whose payload lies where its sender has it."""

    __slots__ = ("_link", "_posted")

    def __init__(self, link: Link, posted: Posted) -> None:
        self._link: Link | None = link
        self._posted = posted
        link.taker.lent += 1

    def release(self) -> None:
        """The last read is over. Raises `RuntimeError` when it was already."""
        link = self._link
        if link is None:
            raise RuntimeError("the loan is FREE, not HELD: it cannot become FREE")
        self._link = None
        link.taker.lent -= 1
        link.unsent.pop(self._posted, None)
        self._posted.complete()

    @property
    def held(self) -> bool:
        """Whether it has not been released."""
        return self._link is not None


class Link:
    """What one rank sends to another: the way, and by class what is on it, in order."""

    __slots__ = (
        "_last_s", "_on_it", "back", "error", "plain", "sender", "taker", "unsent", "way",
    )  # fmt: skip

    def __init__(self, sender: Port, taker: Port, way: Way, plain: bool) -> None:
        self.sender, self.taker, self.way, self.plain = sender, taker, way, plain
        self.error: PeerLost | None = None  # why the sender can send nothing any more
        self._last_s = [0.0, 0.0, 0.0]  # when the last one of each class comes out
        self._on_it: tuple[deque[Any], ...] = (deque(), deque(), deque())
        self.unsent: dict[Posted, None] = {}  # parcels whose source is not free
        self.back: Link  # the other direction

    @property
    def last_s(self) -> float:
        """When all that is on it has come out, if what is not at the other NIC yet is quick."""
        return max(self._last_s)

    def put(
        self, kind: int, what: Parcel | bytes, payload: torch.Tensor | None, nbytes: int
    ) -> Posted | None:
        """Put something on the link once the host has worked on it: a message (None comes back), a
        packed parcel, or the frame and the payload of another."""
        sender, posted = self.sender, None
        if kind != MESSAGE:
            posted = Posted()
            self.unsent[posted] = None
        now_s = sender.loop.time()
        begin_s = now_s if sender.lane is None else sender.lane.charge(sender.host_s[kind])
        self._on_it[kind].append((what, payload, posted))
        first_s, last_s, due_s = self.way.put(now_s, begin_s, nbytes)
        if due_s is None:
            sender.loop.call_at(first_s, self.enter, kind, first_s, last_s, nbytes,
                                context=sender.outside)  # fmt: skip
        else:
            self._come_out(kind, due_s)
        return posted

    def enter(self, kind: int, first_s: float, last_s: float, nbytes: int) -> None:
        """The first byte is at the NIC of the other host."""
        self._come_out(kind, self.way.enter(first_s, last_s, nbytes))

    def _come_out(self, kind: int, due_s: float) -> None:
        """All of it will be there at `due_s`, and not before what went before it."""
        self._last_s[kind] = due_s = max(due_s, self._last_s[kind])
        self.taker.loop.call_at(due_s, self.take, kind, context=self.taker.context)

    def take(self, kind: int) -> None:
        """The next one of a class has come out."""
        on_it = self._on_it[kind]
        if not on_it:
            return  # the link was emptied when it was lost
        what, payload, posted = on_it.popleft()
        if self.back.error is not None:
            return  # the sender is told by `fail`
        taker, source = self.taker, self.sender.rank
        try:
            if kind == MESSAGE:
                if taker.lane is not None:
                    taker.lane.charge(taker.message_s)
                taker.receiver.on_message(source, what)
            else:
                if taker.lane is not None:
                    taker.lane.charge(taker.parcel_in_s)
                    taker.lane.counts(taker.parcel_in_s)
                parcel = what if payload is None else taker.owner.decoded(what, payload)
                self._take_parcel(parcel, posted)
        except ProtocolError as error:
            taker.owner.refused(source, error)

    def _take_parcel(self, parcel: Parcel, posted: Posted) -> None:
        loan = _Loan(self, posted)
        try:
            self.taker.receiver.on_parcel(Arrival(self.sender.rank, parcel, loan.release))
        except ProtocolError:
            if loan.held:
                loan.release()
            raise

    def deliver(self) -> None:
        """Take in at once all that is on it."""
        for kind, on_it in enumerate(self._on_it):
            while on_it:
                self.take(kind)

    def fail(self, error: Exception) -> None:
        """Give up the sources that are not free."""
        unsent, self.unsent = self.unsent, {}
        for posted in unsent:
            posted.complete(error)
