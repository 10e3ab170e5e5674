"""How a rank is put together: its tables, queues, transport and executor, from config and model."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from asyncmoe.config import DeviceConfig
from asyncmoe.cores import core_share
from asyncmoe.deadline import Deadline
from asyncmoe.device import Device
from asyncmoe.dispatcher import Dispatcher
from asyncmoe.executor import Executor
from asyncmoe.home import Home
from asyncmoe.kvcache import BlockPool, cache_tensors
from asyncmoe.microqueue import Queues
from asyncmoe.model import Cache
from asyncmoe.placement import Role
from asyncmoe.policy import BatchPolicy
from asyncmoe.receptor import Receptor
from asyncmoe.registry import find, make_scheduler
from asyncmoe.samplingtable import SamplingTable
from asyncmoe.scheduler import SchedulerContext
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
    executor: Executor


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
    queues = Queues(chain)
    limits = _limits(rank)
    transport = _make_transport(rank, limits, deadline)
    dispatcher = Dispatcher(
        rank=rank.rank,
        placement=placement,
        chain=chain,
        transport=transport,
        limits=limits,
        row_bytes=spec.hidden * spec.dtype.itemsize,
        window_rows=config.transport.window_rows,
        per_expert=per_expert,
    )
    home, cache = _make_home(rank, queues, blocks, per_expert)
    local = np.where(placement.owner == rank.rank, placement.local.astype(np.int64), -1)
    receptor = Receptor(
        rank=rank.rank,
        chain=chain,
        local=local,
        dtype=spec.dtype,
        queues=queues,
        dispatcher=dispatcher,
        home=home,
        now_s=asyncio.get_running_loop().time,
        window_rows=config.transport.window_rows,
        times=rank.times,
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
    scheduler = make_scheduler(config.scheduler, SchedulerContext(chain, fanout=1.0))
    policy = BatchPolicy(config.batch, chain)
    executor = Executor(queues, scheduler, policy, rank.device, stages, rank.times)
    receptor.notify = executor.notify
    return Parts(queues, transport, dispatcher, home, cache, receptor, executor)


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
    config = rank.config
    name = config.transport.name or ("inproc" if rank.world == 1 else "auto")
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
        )
    )
    return made


def _make_home(
    rank: Rank, queues: Queues, blocks: int, per_expert: bool
) -> tuple[Home | None, Cache]:
    if rank.placement.roles[rank.rank] is Role.EXPERT:
        return None, ()
    config, spec, device = rank.config, rank.spec, rank.device.torch_device
    requests = config.engine.max_requests
    expert_ranks = len(np.unique(rank.placement.owner)) or 1
    parts = spec.top_k if per_expert else min(spec.top_k, expert_ranks)
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
