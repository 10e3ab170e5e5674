"""The default between several ranks: shared memory within a machine, a network between machines.

Ranks publish which machine they are on (`reach.machine`: kernel and network namespace, so that
containers that cannot reach each other's unix sockets count as two). Each pair on one machine then
meets over `shm`. Whether that worked is found out by doing it, and each side tells the other: only
if both could, the pair uses it, else both go to the network transport with a warning. All other
pairs use the network transport from the start. Nothing is handed over before all pairs are up.

Each pair within a machine has a `ShmTransport` of its own, so that one that fails takes no other
with it; the pairs of the network share one transport.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Any

from asyncmoe import registry
from asyncmoe.deadline import Deadline
from asyncmoe.errors import AsyncMoeError, ConfigError, UnknownName
from asyncmoe.lease import make_pool
from asyncmoe.linked import LinkedTransport
from asyncmoe.mesh import first_of
from asyncmoe.reach import machine
from asyncmoe.transport import (
    Common,
    Directory,
    Parcel,
    Posted,
    Receiver,
    Transport,
    TransportContext,
)
from asyncmoe.transports.shm import ShmTransport, geometry_of

_LOG = logging.getLogger(__name__)
_NETWORK = "tcp"
_OPTIONS = ("network", "shm")
_MEETING_S = 15.0  # for a pair to meet over shared memory, once both ranks are there
_MET = "met"  # what a side publishes that could; otherwise why it could not
_OWN_END = "the two ranks use another transport"


class AutoTransport(Transport):
    """See the module. Options: `network`, the transport between machines (default tcp), `shm`, a
    table of options of the transport within one; all others are those of the network transport."""

    device_types = ("cpu", "cuda")

    def __init__(self, context: TransportContext) -> None:
        super().__init__(context)
        self._network_kind = _network_kind(context)
        self._shm_options = context.options.get("shm", {})
        if not isinstance(self._shm_options, dict):
            raise ConfigError(
                f"transport.options.shm is {self._shm_options!r}; allowed: a table of options"
            )
        self._shared_memory = context.device.type == "cpu"
        if self._shared_memory:
            geometry_of(replace(context, options=self._shm_options))  # whether they can be
            _known(self._shm_options, ShmTransport.option_names, "transport shm")
        self.leases = make_pool()  # of all pairs
        self._routes: dict[int, LinkedTransport] = {}

    async def start(self, receiver: Receiver) -> None:
        """See `Transport`."""
        try:
            await self._start(receiver)
        except BaseException:
            self.abort()
            raise

    async def _start(self, receiver: Receiver) -> None:
        context, deadline = self.context, Deadline(self.context.start_timeout_s)
        context.directory.publish(f"auto/{context.rank}", self._place())
        await self._meet_all(receiver, deadline)
        near = list(self._routes.values())
        far = frozenset(context.others) - self._routes.keys()
        if far:
            await self._start_network(far, receiver, deadline)
        for inner in near:
            inner.open()
        _LOG.info("rank %d uses %s", context.rank, _told(self.carriers()))

    async def _meet_all(self, receiver: Receiver, deadline: Deadline) -> None:
        """Find out what each pair uses, all at the same time. Raises as `Transport.start`."""
        missing = set(self.context.others)

        async def meet(peer: int) -> None:
            await self._meet(peer, receiver, deadline)
            missing.discard(peer)

        try:
            async with asyncio.TaskGroup() as group:
                for peer in self.context.others:
                    group.create_task(meet(peer))
        except BaseExceptionGroup as error:
            first = first_of(error)
            if not isinstance(first, TimeoutError):
                raise first from None
            raise TimeoutError(
                f"rank {self.context.rank} has no connection to ranks {sorted(missing)} "
                f"in the {deadline.timeout_s:.3g} s that were left of cluster.start_timeout_s"
            ) from None

    async def _start_network(
        self, peers: frozenset[int], receiver: Receiver, deadline: Deadline
    ) -> None:
        """Connect to all that shared memory does not reach."""
        network = self._network_kind(
            replace(
                self.context,
                peers=peers,
                options=_network_options(self.context),
                start_timeout_s=deadline.left_s,
            )
        )
        if self._shared_memory:
            network.leases = self.leases
        else:  # its leases are of the device's memory
            self.leases = network.leases
        self._routes |= dict.fromkeys(peers, network)
        await network.start(receiver)

    def post(self, peer: int, parcel: Parcel) -> Posted:
        """See `Transport`."""
        return self._route(peer).post(peer, parcel)

    def send(self, peer: int, message: bytes) -> None:
        """See `Transport`."""
        self._route(peer).send(peer, message)

    async def close(self) -> None:
        """See `Transport`. If cancelled, disconnects at once."""
        await asyncio.gather(*(inner.close() for inner in self._inner()))

    def cut(self, peer: int, reason: str) -> None:
        """See `Transport`."""
        self._route(peer).cut(peer, reason)

    def abort(self) -> None:
        """Disconnect from all peers at once, as a crash would."""
        for inner in self._inner():
            inner.abort()

    def carriers(self) -> dict[int, str]:
        """See `Transport`."""
        return {peer: self._routes[peer].name for peer in sorted(self._routes)}

    def common(self, peer: int) -> Common | None:
        """See `Transport`."""
        return self._route(peer).common(peer)

    def _inner(self) -> list[LinkedTransport]:
        return list({id(inner): inner for inner in self._routes.values()}.values())

    def _route(self, peer: int) -> LinkedTransport:
        inner = self._routes.get(peer)
        if inner is None:
            raise ValueError(f"rank {self.context.rank} has no connection to rank {peer}")
        return inner

    def _place(self) -> str:
        """Equal on two ranks exactly if they should try shared memory."""
        return machine() if self._shared_memory else f"rank {self.context.rank}"

    async def _meet(self, peer: int, receiver: Receiver, deadline: Deadline) -> None:
        """Connect to `peer` over shared memory if both can. Raises as `Directory.lookup`."""
        context = self.context
        try:
            place = await context.directory.lookup(f"auto/{peer}", deadline.left_s)
        except TimeoutError:
            raise TimeoutError(
                f"no connection to ranks [{peer}]: nothing was heard of it in the "
                f"{context.start_timeout_s:.3g} s that were left of cluster.start_timeout_s"
            ) from None
        if place != self._place():
            return
        low, high = sorted((context.rank, peer))
        directory = _Corner(context.directory, f"auto/{low}-{high}/")
        shm = ShmTransport(
            replace(
                context,
                directory=directory,
                peers=frozenset({peer}),
                options=self._shm_options,
                start_timeout_s=min(_MEETING_S, deadline.left_s / 2),
            )
        )
        shm.leases = self.leases
        try:
            why = await self._try(shm, peer, receiver, directory, deadline)
        except BaseException:
            shm.abort()
            raise
        if why is None:
            self._routes[peer] = shm
            return
        shm.abort()
        _LOG.warning(
            "rank %d uses %s and not shm to rank %d, though they are on one machine: %s",
            context.rank,
            self._network_kind.name,
            peer,
            why,
        )

    async def _try(
        self,
        shm: ShmTransport,
        peer: int,
        receiver: Receiver,
        directory: Directory,
        deadline: Deadline,
    ) -> str | None:
        """Meet, and agree with the peer on whether that worked; why not, if not."""
        rank = self.context.rank
        theirs = asyncio.create_task(directory.lookup(f"outcome/{peer}", deadline.left_s))
        mine = asyncio.create_task(_outcome(shm, receiver))
        try:
            await asyncio.wait((theirs, mine), return_when=asyncio.FIRST_COMPLETED)
            if not mine.done() and theirs.result() == _MET:
                await asyncio.wait((mine,))
            outcome = mine.result() if mine.done() else _OWN_END
            directory.publish(f"outcome/{rank}", outcome)
            others = await theirs
        finally:
            for task in (theirs, mine):
                task.cancel()
            await asyncio.gather(theirs, mine, return_exceptions=True)
        if outcome == others == _MET:
            return None
        return f"rank {peer} says: {others}" if outcome in (_MET, _OWN_END) else outcome


class _Corner(Directory):
    """A directory's part that two ranks have for themselves."""

    def __init__(self, directory: Directory, prefix: str) -> None:
        self._directory, self._prefix = directory, prefix

    def publish(self, key: str, value: str) -> None:
        self._directory.publish(self._prefix + key, value)

    async def lookup(self, key: str, timeout_s: float) -> str:
        return await self._directory.lookup(self._prefix + key, timeout_s)


async def _outcome(shm: ShmTransport, receiver: Receiver) -> str:
    """Connect, and tell how that ended."""
    try:
        await shm.connect(receiver)
    except (AsyncMoeError, OSError) as error:  # a TimeoutError is an OSError
        return str(error) or type(error).__name__
    return _MET


def _network_kind(context: TransportContext) -> type[LinkedTransport]:
    """The transport between machines. Raises as `registry.find`, and `ConfigError`."""
    name = context.options.get("network", _NETWORK)
    if not isinstance(name, str):
        raise ConfigError(f"transport.options.network is {name!r}; allowed: name of a transport")
    kind = registry.find("transports", name)
    if not issubclass(kind, LinkedTransport):
        raise ConfigError(
            f"transport.options.network is {name!r}; allowed: transports that join machines, "
            f"as {_NETWORK} does"
        )
    _known(_network_options(context), kind.option_names, "transport auto", _OPTIONS)
    return kind


def _network_options(context: TransportContext) -> dict[str, Any]:
    return {name: each for name, each in context.options.items() if name not in _OPTIONS}


def _known(
    options: dict[str, Any], names: tuple[str, ...], what: str, more: tuple[str, ...] = ()
) -> None:
    for option in options:
        if option not in names:
            raise UnknownName(f"option of {what}", option, (*more, *names))


def _told(carriers: dict[int, str]) -> str:
    """Names of transports with the ranks that each reaches: "shm to ranks 1, 2"."""
    ranks: dict[str, list[str]] = {}
    for peer, name in carriers.items():
        ranks.setdefault(name, []).append(str(peer))
    told = (
        f"{name} to rank{'s' if len(each) > 1 else ''} {', '.join(each)}"
        for name, each in sorted(ranks.items())
    )
    return "; ".join(told) or "nothing, as it is alone"
