"""Any transport over links that are worse than the real ones: `impaired:tcp`, `impaired:shm`, …

Parcels and messages wait in the sender, for as long as the link would have taken, before the
wrapped transport gets them; so its promises hold, and ours follow from them. A directed link is one
queue for its bandwidth, shared by three lanes: dispatches, combines and messages. Each lane keeps
its order. Only different lanes overtake each other, since the contract allows no more; and a
duplicate crosses the link, takes room there, and is dropped by the receiver, since each parcel
arrives once.

All that is random follows from the seed, by link, and not from the time: both sides know which
parcels are sent twice. An unimpaired link hands everything on at once.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import ClassVar

from asyncmoe.errors import ConfigError, PeerLost, UnknownName
from asyncmoe.lease import LeasePool
from asyncmoe.transport import (
    Arrival,
    Parcel,
    ParcelClass,
    Posted,
    Receiver,
    Transport,
    TransportContext,
)
from asyncmoe.transports.impaired_link import ImpairedLink, Repeats, Source
from asyncmoe.transports.impaired_options import Impairments, own_options
from asyncmoe.transports.tcp import TcpTransport
from asyncmoe.wire import encode_message, encode_parcel


class ImpairedTransport(Transport):
    """See the module; options in `impaired_options.py`, all others are the wrapped transport's."""

    wrapped: ClassVar[type[Transport]] = TcpTransport

    @classmethod
    def around(cls, wrapped: type[Transport]) -> type[ImpairedTransport]:
        """This class over another transport."""
        members = {"wrapped": wrapped, "device_types": wrapped.device_types}
        return type(f"Impaired{wrapped.__name__}", (cls,), members)

    def __init__(self, context: TransportContext) -> None:
        super().__init__(context)
        mine = own_options()
        options = context.options
        self._impairments = Impairments(
            {k: v for k, v in options.items() if k in mine}, context.world
        )
        rest = {name: value for name, value in options.items() if name not in mine}
        theirs = getattr(self.wrapped, "option_names", rest)  # else it checks them itself
        for option in rest:
            if option not in theirs:
                raise UnknownName("option of transport impaired", option, {*mine, *theirs})
        self._inner = self.wrapped(replace(context, options=rest))
        self._links = {peer: self._link(peer) for peer in context.others}
        self._losses: list[asyncio.TimerHandle] = []
        self._closing = False

    @property
    def leases(self) -> LeasePool:
        """The wrapped transport's."""
        leases: LeasePool = self._inner.leases  # type: ignore[attr-defined]  # all of ours have it
        return leases

    async def start(self, receiver: Receiver) -> None:
        """See `Transport`. What is late, or lost after a time, counts from its end."""
        await self._inner.start(_Incoming(self, receiver))
        loop = asyncio.get_running_loop()
        for peer, link in self._links.items():
            link.begin(loop.time())
            after_s = self._loss_s(peer)
            if after_s is not None:
                cut = partial(
                    self._inner.cut, peer, f"transport impaired lost it after {after_s} s"
                )
                self._losses.append(loop.call_later(after_s, cut))

    def post(self, peer: int, parcel: Parcel) -> Posted:
        """See `Transport`."""
        link = self._links.get(peer)
        if link is None:
            return self._inner.post(peer, parcel)  # which knows what is wrong with it
        self._check(link)
        copies = 2 if link.repeats[parcel.kind].draw() else 1
        if copies == 1 and not link.delays:
            return self._inner.post(peer, parcel)
        limits, rank = self.context.limits, self.context.rank
        encode_parcel(parcel, limits, source=rank, sequence=0, lease=0, generation=0)  # may raise
        source, nbytes = Source(copies), self._inner.payload_bytes(parcel)
        own = _with_own_columns(parcel)
        for _ in range(copies):
            transmit = partial(self._transmit, peer, own, source)
            link.put(parcel.kind, nbytes, transmit, source.fail)
        return source.posted

    def send(self, peer: int, message: bytes) -> None:
        """See `Transport`."""
        link = self._links.get(peer)
        if link is None or not link.delays:
            self._inner.send(peer, message)
            return
        self._check(link)
        encode_message(self.context.rank, 0, len(message), self.context.limits)  # may raise
        link.put(None, len(message), partial(self._inner.send, peer, bytes(message)), _forget)

    async def close(self) -> None:
        """See `Transport`: what is late is waited for."""
        self._closing = True
        try:
            async with asyncio.timeout(self.context.peer_timeout_s):
                await asyncio.gather(*(link.flush() for link in self._links.values()))
        except TimeoutError:
            pass
        finally:
            self._give_up("this rank closed its transport")
            await self._inner.close()

    def cut(self, peer: int, reason: str) -> None:
        """See `Transport`."""
        self._inner.cut(peer, reason)

    def abort(self) -> None:
        """See `Transport`."""
        self._give_up("this rank aborted its transport")
        self._inner.abort()

    def carriers(self) -> dict[int, str]:
        """See `Transport`."""
        return self._inner.carriers()

    def _link(self, peer: int) -> ImpairedLink:
        rank, known = self.context.rank, self._impairments
        known.of(peer, rank)  # a trace that cannot be is told by whoever starts first
        if self._loss_s(peer) is not None and self.wrapped.cut is Transport.cut:
            raise ConfigError(f"lose_after_s: {self.wrapped.__name__} cannot lose a rank")
        return ImpairedLink(
            rank, peer, known.of(rank, peer), known.fractions(rank, peer), known.seed
        )

    def _loss_s(self, peer: int) -> float | None:
        """When the connection is to be lost, by the settings of either direction."""
        rank = self.context.rank
        both = (self._impairments.of(rank, peer), self._impairments.of(peer, rank))
        return min((i.lose_after_s for i in both if i.lose_after_s is not None), default=None)

    def _check(self, link: ImpairedLink) -> None:
        if link.error is not None:
            raise PeerLost(link.target, link.error.reason)
        if self._closing:
            raise PeerLost(link.target, "this rank closed its transport")

    def _transmit(self, peer: int, parcel: Parcel, source: Source) -> None:
        self._inner.post(peer, parcel).when_free(source.one_is_free)

    def _give_up(self, reason: str) -> None:
        for timer in self._losses:
            timer.cancel()
        for peer, link in self._links.items():
            link.lose(PeerLost(peer, reason))


class _Incoming(Receiver):
    """Drops the second of each pair of duplicates, and tells this side's links who is lost."""

    def __init__(self, transport: ImpairedTransport, receiver: Receiver) -> None:
        self._receiver, self._links = receiver, transport._links
        rank, known = transport.context.rank, transport._impairments
        self._repeats = {
            (peer, kind): Repeats(known.of(peer, rank).duplicate, known.seed, peer, rank, kind)
            for peer in transport.context.others
            for kind in ParcelClass
        }
        self._second_due: set[tuple[int, ParcelClass]] = set()

    def on_parcel(self, arrival: Arrival) -> None:
        """See `Receiver`."""
        lane = arrival.source, arrival.parcel.kind
        if lane in self._second_due:
            self._second_due.remove(lane)
            arrival.release()
            return
        if self._repeats[lane].draw():
            self._second_due.add(lane)
        self._receiver.on_parcel(arrival)

    def on_message(self, source: int, message: bytes) -> None:
        """See `Receiver`."""
        self._receiver.on_message(source, message)

    def on_peer_lost(self, peer: int, error: Exception) -> None:
        """See `Receiver`."""
        lost = error if isinstance(error, PeerLost) else PeerLost(peer, str(error))
        self._links[peer].lose(lost)
        self._receiver.on_peer_lost(peer, error)


def _with_own_columns(parcel: Parcel) -> Parcel:
    """The same payload with copies of the columns, which are the caller's again at once."""
    return Parcel(
        parcel.kind,
        parcel.stage,
        parcel.slot.copy(),
        parcel.epoch.copy(),
        parcel.part.copy(),
        parcel.payload,
        parcel.fanout.copy(),
        parcel.expert.copy(),
        parcel.weight.copy(),
        parcel.credits,
    )


def _forget(error: PeerLost) -> None:
    """A message that can not be sent any more."""
