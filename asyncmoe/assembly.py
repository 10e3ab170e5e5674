"""How a rank is put together: its tables, queues, transport and executor, from config and model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from asyncmoe.company import Company, make_company, patience
from asyncmoe.config import DeviceConfig, MetricsConfig
from asyncmoe.cores import core_share
from asyncmoe.deadline import Deadline
from asyncmoe.device import Device
from asyncmoe.dispatcher import Dispatcher
from asyncmoe.errors import ConfigError
from asyncmoe.executor import Executor
from asyncmoe.home import Home
from asyncmoe.kvcache import BlockPool, cache_tensors
from asyncmoe.march import march_bytes
from asyncmoe.marchassembly import march_rows
from asyncmoe.metrics.probe import Probe
from asyncmoe.microqueue import Queues, make_queues
from asyncmoe.model import Cache
from asyncmoe.peers import RankPeers
from asyncmoe.placement import Role
from asyncmoe.policy import BatchPolicy
from asyncmoe.receptor import Receptor
from asyncmoe.registry import find, make_scheduler, scheduler_parameters
from asyncmoe.samplingtable import SamplingTable
from asyncmoe.scheduler import Scheduler, SchedulerContext
from asyncmoe.stages import RankStages
from asyncmoe.tokentable import TokenTable
from asyncmoe.transport import Limits, Transport, TransportContext
from asyncmoe.world import World

if TYPE_CHECKING:
    from asyncmoe.rank import Rank


@dataclass(frozen=True, slots=True)
class Parts:
    """What a rank consists of, wired together and not yet connected to others."""

    queues: Queues
    transport: Transport
    dispatcher: Dispatcher
    home: Home | None  # None on a rank that holds experts only
    cache: Cache
    receptor: Receptor
    scheduler: Scheduler
    executor: Executor
    probe: Probe | None


def make_device(config: DeviceConfig, place: World) -> Device:
    """The device of the rank at `place`. Raises `UnknownName`, `MissingDependency`."""
    threads = config.threads or 1
    cores = core_share(place, threads) if config.pin else None
    made: Device = find("devices", config.name)(threads, cores)
    return made


def assemble(rank: Rank, blocks: int, deadline: Deadline) -> Parts:
    """Build the parts of `rank`, whose model is loaded.

    Args:
        blocks: of the KV pool.
        deadline: by which the transport has to be connected.
    """
    config, spec, chain, placement = rank.config, rank.spec, rank.chain, rank.placement
    per_expert = config.engine.combine == "per_expert"
    to_all = scheduler_parameters(config.scheduler).to_all
    if to_all and per_expert:
        raise ConfigError(
            f"engine.combine is per_expert, but the exchange of {config.scheduler.name} gives one "
            "partial sum per rank with experts; allowed is per_rank"
        )
    queues = make_queues(chain)
    limits = _limits(rank)
    transport = _make_transport(rank, limits, deadline)
    dispatcher = Dispatcher(
        rank=rank.rank,
        placement=placement,
        chain=chain,
        transport=transport,
        limits=limits,
        row_bytes=spec.row_bytes,
        window_rows=config.transport.window_rows,
        per_expert=per_expert,
        to_all=to_all,
    )
    home, cache = _make_home(rank, queues, blocks, per_expert, to_all)
    local = np.where(placement.owner == rank.rank, placement.local.astype(np.int64), -1)
    receptor = Receptor(
        rank=rank.rank,
        world=rank.world,
        chain=chain,
        local=local,
        dtype=spec.dtype,
        queues=queues,
        dispatcher=dispatcher,
        home=home,
        now_s=asyncio.get_running_loop().time,
        window_rows=config.transport.window_rows,
        times=rank.times,
        copies=find("schedulers", config.scheduler.name).synchronous,
    )
    stages = RankStages(
        model=rank.model,
        chain=chain,
        queues=queues,
        local=local,
        per_expert=per_expert,
        home=home,
        cache=cache,
        dispatcher=dispatcher,
        receptor=receptor,
        fatal=rank.stop,
    )
    # A dispatch row stands for all pairs of its token on this rank, so rows are tokens already.
    peers = RankPeers(rank.rank, placement, dispatcher, receptor, home, transport.send)
    scheduler = make_scheduler(config.scheduler, SchedulerContext(chain, 1.0, peers))
    policy, company = _make_policy(rank, scheduler, queues, home)
    # In the virtual world the CPU time of this machine is nobody's.
    clock = None if rank.device.virtual else time.thread_time
    probe = _make_probe(config.metrics, queues, dispatcher, home, clock)
    watched = stages if probe is None else probe.watched(stages)
    executor = Executor(
        queues,
        scheduler,
        policy,
        rank.device,
        watched,
        rank.times,
        config.device.depth,
        experts=stages.experts if probe is None else None,
        attention=stages.attention if probe is None else None,
        company=company,
    )
    if probe is not None:
        probe.computing = lambda: executor.computing
    receptor.bell = executor.bell
    return Parts(queues, transport, dispatcher, home, cache, receptor, scheduler, executor, probe)


def _make_policy(
    rank: Rank, scheduler: Scheduler, queues: Queues, home: Home | None
) -> tuple[BatchPolicy, Company | None]:
    batch = rank.config.batch
    times = patience(batch, live_ranks=1 if rank.device.virtual else rank.world)
    one_chain = scheduler.work_conserving and not scheduler.synchronous and rank.chain.tracks == 1
    if not (times and one_chain):
        return BatchPolicy(batch, rank.chain), None
    policy = BatchPolicy(batch, rank.chain, changes=True)
    decode_chunk, chunk_stage = np.zeros(0, np.int64), np.zeros(0, np.int32)
    if home is not None:
        decode_chunk, chunk_stage = home.decode_chunk, home.chunks.stage
    share = rank.spec.top_k / max(1, rank.spec.experts)
    return policy, make_company(queues, policy, times, share, decode_chunk, chunk_stage)


def _make_probe(
    config: MetricsConfig,
    queues: Queues,
    dispatcher: Dispatcher,
    home: Home | None,
    clock: Callable[[], float] | None,
) -> Probe | None:
    """Not yet started."""

    def gauges() -> list[float]:
        own = [0, 0, 0, 0] if home is None else home.occupancy()
        boxes = dispatcher.outboxes
        return [*own, boxes.waiting_rows, boxes.outstanding_rows]

    if config.probe_period_s is None:
        return None
    return Probe(queues, gauges, config.probe_period_s, clock)


def _limits(rank: Rank) -> Limits:
    config, spec = rank.config, rank.spec
    return Limits(
        parcel_bytes=config.transport.parcel_bytes,
        # a combine parcel may give back the credits of a whole window
        parcel_rows=max(Limits().parcel_rows, config.transport.window_rows),
        message_bytes=config.transport.message_bytes,
        stages=len(rank.chain),
        experts=max(1, spec.experts),
        hidden=spec.hidden,
    )


def _make_transport(rank: Rank, limits: Limits, deadline: Deadline) -> Transport:
    config, spec = rank.config, rank.spec
    name = config.transport.name or ("inproc" if rank.world == 1 else "auto")
    rows = march_rows(rank)
    made: Transport = find("transports", name)(
        TransportContext(
            rank=rank.rank,
            world=rank.world,
            directory=rank.directory,
            limits=limits,
            device=rank.device.torch_device,
            token=config.cluster.token.encode(),
            bind_host=config.cluster.bind_host,
            start_timeout_s=deadline.left_s,
            peer_timeout_s=config.cluster.peer_timeout_s,
            options=config.transport.options,
            common_bytes=march_bytes(rows, spec.row_bytes, spec.top_k) if rows else 0,
        )
    )
    return made


def _make_home(
    rank: Rank, queues: Queues, blocks: int, per_expert: bool, to_all: bool
) -> tuple[Home | None, Cache]:
    if rank.placement.roles[rank.rank] is Role.EXPERT:
        return None, ()
    config, spec, device = rank.config, rank.spec, rank.device.torch_device
    requests = config.engine.max_requests
    expert_ranks = len(np.unique(rank.placement.owner)) or 1
    parts = expert_ranks if to_all else min(spec.top_k, expert_ranks)
    if per_expert:
        parts = spec.top_k
    # A chunk is never split, so it must fit every batch that it may be part of.
    rows = min(config.engine.prefill_chunk, config.batch.attention_max_rows)
    if rank.model.has_finish:
        rows = min(rows, config.batch.head_max_rows)
    home = Home(
        config=config.engine.model_copy(update={"prefill_chunk": rows}),
        context=spec.context,
        vocab=spec.vocab,
        chain=rank.chain,
        table=TokenTable(config.engine.slots, max(1, parts), spec.hidden, spec.dtype, device),
        pool=BlockPool(blocks, config.kv.block_tokens, requests, spec.context),
        sampling=SamplingTable(requests, spec.vocab, spec.eos_ids),
        queues=queues,
        prune=not rank.model.has_finish,
        host=rank,
    )
    return home, cache_tensors(spec, blocks, config.kv.block_tokens, requests, device)
