"""What can be known to be wrong with runs before the first of them starts."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import torch

from asyncmoe.config import Config
from asyncmoe.directory import MemoryDirectory
from asyncmoe.experiment.grid import Setting, live_config, virtual_config
from asyncmoe.experiment.virtual_run import cost_model, routing_source
from asyncmoe.registry import find, make_scheduler, scheduler_parameters
from asyncmoe.scheduler import SchedulerContext
from asyncmoe.stage import StageChain
from asyncmoe.transport import Limits, TransportContext
from asyncmoe.workload.routing import check_routing

_ON_CPU = ("cpu", "model")


def check(settings: Iterable[Setting]) -> None:
    """Raise what one of the runs would raise at its start: `ConfigError` and its kinds.

    The model of a live run is read by its ranks alone, so that what does not fit it is told later.
    """
    source = cache(routing_source)  # which may read a file
    for setting in settings:
        setting.workload_config()
        live = setting.experiment.world == "live"
        config = live_config(setting) if live else virtual_config(setting)
        _check_transport(config)
        if live:
            scheduler_parameters(config.scheduler)
            check_routing(setting.workload.routing)
        else:
            chain = StageChain(setting.model.made().moe_layers)
            make_scheduler(config.scheduler, SchedulerContext(chain, 1.0))
            source(setting.model.made(), setting.workload.routing, setting.experiment.seed)
            cost_model(setting)


def _check_transport(config: Config) -> None:
    """Its options are checked when it is made; only its start takes anything."""
    if config.transport.name is None:
        return
    kind = find("transports", config.transport.name)
    if config.device.name not in _ON_CPU:
        return  # it may need memory of a kind that is not made here
    kind(
        TransportContext(
            rank=0,
            world=config.cluster.ranks,
            directory=MemoryDirectory(),
            limits=Limits(),
            device=torch.device("cpu"),
            token=b"",
            options=config.transport.options,
        )
    )
