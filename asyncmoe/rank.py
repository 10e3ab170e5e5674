"""One rank: its tables, queues, device and transport wired together, and its control messages."""

from __future__ import annotations

import asyncio
import logging
import resource
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from functools import partial
from traceback import format_exception
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncmoe.agreement import agree, fingerprint
from asyncmoe.assembly import assemble, make_device
from asyncmoe.checkpoint import Checkpoint, open_checkpoint
from asyncmoe.config import Config
from asyncmoe.deadline import Deadline
from asyncmoe.errors import AsyncMoeError, PeerLost, ProtocolError
from asyncmoe.home import Home
from asyncmoe.kvcache import pool_blocks
from asyncmoe.march import Fellows
from asyncmoe.marchassembly import make_marches
from asyncmoe.marches import Marches
from asyncmoe.memory import fitting_memory, table_settings
from asyncmoe.messages import (
    Abort,
    Admit,
    Credit,
    Discard,
    Ended,
    Message,
    Muster,
    Shutdown,
    Stats,
    StatsRequest,
    Unable,
    decode,
    encode,
)
from asyncmoe.model import Cache, Model, ModelSpec
from asyncmoe.peers import MARK
from asyncmoe.placement import Placement, make_placement
from asyncmoe.receptor import Intake
from asyncmoe.registry import scheduler_parameters
from asyncmoe.stage import StageChain
from asyncmoe.stats import RankTimes
from asyncmoe.transport import Arrival, Directory
from asyncmoe.workload.profile import expert_load
from asyncmoe.workload.rerouted import around, routing_writer
from asyncmoe.workload.trace import RoutingWriter
from asyncmoe.world import World

log = logging.getLogger(__name__)

# At an orderly end each rank is told so on its own, and a peer may be gone before this rank hears.
FAREWELL_GRACE_S = 0.5
DISCARD_SLOTS = 16384  # in one message, which has room for more
FRONT_END = 0  # the rank whose process hosts the front end

# The compute thread gives the GIL up around every kernel and must get it back soon, even while the
# loop is busy; CPython's default of 5 ms is longer than most stages.
SWITCH_INTERVAL_S = 1e-4


class Rank:
    """Everything of one rank but the front end. Lives on the loop on which `start` ran."""

    def __init__(
        self,
        config: Config,
        world: World,
        directory: Directory,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        """`checkpoint`: what to load instead of `config.model`."""
        self.config, self.rank, self.world = config, world.rank, world.size
        self.place, self.directory = world, directory
        self._checkpoint = checkpoint
        self.on_front_end: Callable[[int, Message], None] = _ignore
        self.on_rank_lost: Callable[[int, Exception], None] = _ignore
        self.stopped: asyncio.Future[None]  # done when this rank shall end, or its fatal error
        self.on_parcel: Callable[[Arrival], None]  # see `Receiver`
        self.now_s: Callable[[], float]  # see `Host`
        self._intake: Intake | None = None
        self.spec: ModelSpec
        self.placement: Placement
        self.kv_blocks_of: dict[int, int]
        self.times = RankTimes()
        self._marches: Marches | None = None  # with all other ranks; None: there are none
        self._fellows: Fellows | None = None  # in those
        self._no_experts: Exception | None = None  # the loss of a rank that every request needs
        self._closing = False
        self._cache: Cache = ()
        self._resources = AsyncExitStack()  # closed in reverse order: executor, transport, device

    # ---- start and end

    async def start(self, deadline: Deadline | None = None) -> None:
        """Load what the placement needs, connect to all ranks. Raises what goes wrong there.

        `deadline`: of a start-up that began earlier; by default `cluster.start_timeout_s` from now.
        """
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._loop = asyncio.get_running_loop()
        self.now_s = self._loop.time
        self.stopped = self._loop.create_future()
        try:
            await self._load_and_connect(deadline or Deadline(self.config.cluster.start_timeout_s))
        except BaseException:
            await self.close()
            raise

    async def _load_and_connect(self, deadline: Deadline) -> None:
        config = self.config
        checkpoint = self._checkpoint or open_checkpoint(config.model)
        self.spec = spec = checkpoint.spec
        self.chain = self._make_chain(len(spec.moe_layers))
        self.placement = make_placement(
            config.placement,
            self.world,
            len(spec.moe_layers),
            spec.experts,
            expert_load(config, spec),
        )
        marks = fingerprint(config, spec, checkpoint, self.placement)
        await agree(self.directory, self.rank, self.world, marks, deadline.left_s)
        blocks = pool_blocks(config.kv, spec, config.engine.max_requests)
        self.kv_blocks_of = dict.fromkeys(self.placement.home_ranks, blocks)
        writer = self._make_routing_writer()
        self.device = make_device(config.device, self.place)
        self._resources.push_async_callback(self.device.close)
        self._resources.callback(checkpoint.source.give_up)
        try:
            async with asyncio.timeout(deadline.left_s) as limit:
                self.model: Model = await self.device.run(partial(self._load, checkpoint, writer))
        except TimeoutError:
            if not limit.expired():
                raise  # a disk's, for example
            raise TimeoutError(
                f"rank {self.rank} has not loaded the model after cluster.start_timeout_s, "
                f"{deadline.timeout_s:g} s"
            ) from None
        self._resources.callback(self._drop_tensors)
        self._build(blocks, deadline)
        await self.transport.start(self)
        self._open_marches()
        if self.home is not None and config.engine.request_timeout_s is not None:
            self._expire_requests(self.home, config.engine.request_timeout_s)

    def _open_marches(self) -> None:
        made = make_marches(self)
        if made is not None:
            self._marches, self._fellows = made
            self._marches.open()

    def _end_marches(self) -> None:
        if self._marches is not None and self._fellows is not None:
            self._fellows.break_off()
            self._marches.close()

    def _make_chain(self, layers: int) -> StageChain:
        """With the tracks that the scheduling rule asks for, if there are layers to go through."""
        tracks = scheduler_parameters(self.config.scheduler).tracks
        return StageChain(layers, tracks if layers else 1)

    def _expire_requests(self, home: Home, timeout_s: float) -> None:
        """End requests that are over their time; looks again often enough for it to be kept."""
        if not self._closing:
            home.expire()
            self.executor.notify()
            period_s = min(1.0, timeout_s / 10)
            self._loop.call_later(period_s, self._expire_requests, home, timeout_s)

    def _drop_tensors(self) -> None:
        """Free weights and caches now: rank, home and callbacks refer to each other, so that the
        rank itself waits for the garbage collector."""
        del self.model
        self._cache = ()

    def _make_routing_writer(self) -> RoutingWriter | None:
        """Closed when the device has ended."""
        writer = routing_writer(self.config.model, self.spec, self.rank)
        if writer is not None:
            self._resources.callback(writer.close)
        return writer

    def _load(self, checkpoint: Checkpoint, writer: RoutingWriter | None) -> Model:
        context = f"model.context = {self.spec.context}"
        with checkpoint.source as source, fitting_memory("the model", context):
            model = checkpoint.model_class.load(
                checkpoint.config,
                self.spec,
                source,
                self.placement.load_plan(self.rank),
                self.device.torch_device,
            )
        return around(model, self.config.model, writer)

    def _build(self, blocks: int, deadline: Deadline) -> None:
        settings = table_settings(self.config, self.spec, blocks)
        with fitting_memory("the rank's tables and caches", settings):
            parts = assemble(self, blocks, deadline)
        self._resources.push_async_callback(parts.transport.close)
        self._resources.callback(parts.executor.close)
        self._resources.callback(self._end_marches)
        self.queues, self.transport, self.home = parts.queues, parts.transport, parts.home
        self._dispatcher, self._receptor = parts.dispatcher, parts.receptor
        self._intake = parts.receptor.intake(self._take_parcel, self._fail)
        self.on_parcel = self._take_parcel if self._intake is None else self._intake.take
        self._scheduler, self.executor, self._cache = parts.scheduler, parts.executor, parts.cache
        self.probe = parts.probe
        if self.probe is not None:
            self._resources.callback(self.probe.close)
            self.probe.start()

    async def close(self) -> None:
        """Stop computing, disconnect, end the compute thread. Idempotent."""
        if self._closing:
            return
        self._closing = True
        if self._intake is not None:
            self._intake.is_open = False
        await self._resources.aclose()
        if not self.stopped.done():
            self.stopped.set_result(None)

    # ---- control messages

    def send(self, rank: int, message: Message) -> None:
        """Send to any rank, this one included. Raises `PeerLost`."""
        if rank == self.rank:
            self.deliver(message)
        else:
            self.transport.send(rank, encode(message))

    def deliver(self, message: Message) -> None:
        """A control message of the front end on this rank, for this rank."""
        self._handle(self.rank, message)

    def _handle(self, source: int, message: Message) -> None:
        match message:
            case Admit() | Abort() | StatsRequest() | Shutdown() if source != FRONT_END:
                raise ProtocolError(f"{type(message).__name__} comes from the front end only")
            case Admit() if self._no_experts is not None:
                self.emit(Ended(message.request_id, "failed", str(self._no_experts)))
            case Admit() if self.home is not None:
                self.home.admit(message)
                self.executor.notify()
            case Admit():
                self.emit(
                    Ended(message.request_id, "refused", f"rank {self.rank} is home of nothing")
                )
            case Abort() if self.home is not None:
                self.home.end(message.request_id, "aborted")
                self.executor.notify()  # its memory may have let a waiting request in
            case Discard():
                self._discard(source, message)
            case Credit():
                self._dispatcher.outboxes.credit(source, message.rows)
            case Muster():
                if self._marches is not None:
                    self._marches.hear(source, message)
                    if self.queues.total:  # rows that were kept back have been let go
                        self.executor.notify()
            case StatsRequest():
                self.emit(Stats(self.stats()))
            case Shutdown():
                self.stop(None)
            case _ if self.rank == FRONT_END:
                self.on_front_end(source, message)
            case _:
                raise ProtocolError(f"{type(message).__name__} is not for rank {self.rank}")

    def _discard(self, source: int, message: Discard) -> None:
        slots, epochs = np.array(message.slots, np.uint32), np.array(message.epochs, np.uint32)
        if len(slots) != len(epochs):
            raise ProtocolError(f"Discard of {len(slots)} slots with {len(epochs)} epochs")
        rows = self.queues.discard(source, slots, epochs)
        if rows:
            self._receptor.left(source, rows)
            self.executor.notify()  # others may wait for this rank to be through with them
            self.send(source, Credit(rows))

    def carriers(self) -> dict[int, str]:
        """What moves the parcels of each peer, where the transport chooses."""
        return self.transport.carriers()

    def stats(self) -> dict[str, Any]:
        """Counters and gauges of this rank by name."""
        cpu, outboxes = resource.getrusage(resource.RUSAGE_THREAD), self._dispatcher.outboxes
        self.executor.count()
        out: dict[str, Any] = {
            **self.times.values(),
            "busy_s": self.device.busy_s() - self.times.march_wait_s,
            "loop_s": self._loop.time(),
            "loop_user_s": cpu.ru_utime,
            "loop_system_s": cpu.ru_stime,
            "sent_parcels": outboxes.sent_parcels,
            "sent_bytes": self._dispatcher.sent_bytes,
            "bytes_to": list(outboxes.bytes_to),
            "outbox_rows": outboxes.waiting_rows,
            "outstanding_rows": outboxes.outstanding_rows,
            "decisions": self.queues.decision,
            "queued_rows": int(self.queues.rows.sum()),
            "weight_bytes": self.model.weight_bytes(),
        }
        carriers = self.carriers()
        if carriers:
            out["carriers"] = {str(peer): name for peer, name in carriers.items()}
        if self.home is not None:
            out |= self.home.stats()
        if self._marches is not None:
            out["marches"] = self._marches.count
        if self.probe is not None:
            out["probe"] = self.probe.values()
        return out

    # ---- what the transport calls (transport.Receiver)

    def _take_parcel(self, arrival: Arrival) -> None:
        if self._closing:
            arrival.release()
            return
        try:
            self._receptor.take(arrival)
        except ProtocolError:
            raise  # the peer's fault, which costs it the connection
        except Exception as error:
            self._fail(error, "a parcel", arrival.source)

    def _fail(self, error: Exception, what: str, source: int) -> None:
        """A fault of ours while rows are taken in would leave their requests waiting for ever."""
        # As text: a log record with the traceback would keep the parcel and its memory alive.
        trace = "".join(format_exception(error))
        log.error("rank %d failed on %s of rank %d\n%s", self.rank, what, source, trace)
        self.stop(AsyncMoeError(f"it failed on {what} of rank {source}: {error}"))

    def on_message(self, source: int, message: bytes) -> None:
        """See `Receiver`."""
        if self._closing:
            return
        try:
            if message.startswith(MARK):
                if self._scheduler.heard(source, message[len(MARK) :]):
                    self.executor.notify()
            else:
                self._handle(source, decode(message))
        except ProtocolError:
            raise
        except Exception as error:
            self._fail(error, "a message", source)

    def on_peer_lost(self, peer: int, error: Exception) -> None:
        """See `Receiver`. Requests that cannot go on without the peer end with its name."""
        if isinstance(error, PeerLost) and error.took_leave:
            self._loop.call_later(FAREWELL_GRACE_S, self._lose, peer, error)
        else:
            self._lose(peer, error)

    def _lose(self, peer: int, error: Exception) -> None:
        if self._closing:
            return
        log.error("%s", error)
        self._end_marches()
        self._dispatcher.outboxes.forget(peer)
        self._scheduler.lost(peer)
        self.executor.notify()
        if peer == FRONT_END:
            self.stop(PeerLost(peer, "it hosts the front end"))
        elif self.home is not None and bool((self.placement.owner == peer).any()):
            self._no_experts = error
            self.emit(Unable(str(error)))
            for request_id in self.home.request_ids:
                self.home.end(request_id, "failed", str(error))
        self.on_rank_lost(peer, error)

    # ---- what the home calls (host.Host)

    def emit(self, message: Message) -> None:
        """See `Host`."""
        if self.rank == FRONT_END:
            self.on_front_end(self.rank, message)
            return
        try:
            self.transport.send(FRONT_END, encode(message))
        except PeerLost as error:
            self.stop(error)

    def discard(self, slots: NDArray[np.int64], epochs: NDArray[np.uint32]) -> None:
        """See `Host`."""
        self._dispatcher.outboxes.discard(slots.astype(np.uint32), epochs)
        self.queues.discard(self.rank, slots.astype(np.uint32), epochs)
        for first in range(0, len(slots), DISCARD_SLOTS):
            some = slice(first, first + DISCARD_SLOTS)
            note = encode(Discard(slots[some].tolist(), epochs[some].tolist()))
            for peer in np.unique(self.placement.owner).tolist():
                if peer != self.rank:
                    with suppress(PeerLost):  # nothing of it will come back
                        self.transport.send(peer, note)

    def wipe(self, blocks: NDArray[np.int64]) -> None:
        """See `Host`."""
        index = torch.from_numpy(blocks)
        for layer, spec in zip(self._cache, self.spec.caches, strict=True):
            for name in spec.per_token:
                layer[name].index_fill_(0, index, 0)

    def after_running(self, callback: Callable[[], None]) -> None:
        """See `Host`."""
        self.executor.after_running(callback)

    def soon(self, callback: Callable[[], None]) -> None:
        """See `Host`."""
        self._loop.call_soon(callback)

    @property
    def computing(self) -> bool:
        """See `Host`."""
        return self.executor.computing

    def stop(self, error: Exception | None) -> None:
        """End this rank: because it was told to, or with what went wrong."""
        if self.stopped.done():
            return
        if error is None:
            self.stopped.set_result(None)
        else:
            self.stopped.set_exception(error)
            self.on_rank_lost(self.rank, error)


async def run_rank(
    config: Config, world: World, directory: Directory, deadline: Deadline | None = None
) -> None:
    """Be a rank other than the front end's until it is told to stop. Raises what ends it early.

    `deadline`: as for `Rank.start`.
    """
    rank = Rank(config, world, directory)
    await rank.start(deadline)
    log.info("rank %d of %d is ready", world.rank, world.size)
    try:
        await rank.stopped
    finally:
        await rank.close()


def _ignore(rank: int, what: object) -> None:
    pass
