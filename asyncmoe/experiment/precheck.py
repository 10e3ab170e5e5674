"""What can be known to be wrong with runs before the first of them starts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache

import torch

from asyncmoe.config import Config
from asyncmoe.directory import MemoryDirectory
from asyncmoe.errors import ConfigError, UnknownName
from asyncmoe.experiment.grid import Setting, live_config, virtual_config
from asyncmoe.experiment.virtual_run import cost_model, routing_source
from asyncmoe.placement import make_placement
from asyncmoe.registry import find, make_scheduler, scheduler_parameters
from asyncmoe.scheduler import SchedulerContext
from asyncmoe.stage import StageChain
from asyncmoe.transport import Limits, TransportContext
from asyncmoe.virtual.shapes import ModelShape
from asyncmoe.workload.routing import RoutingSource, check_routing
from asyncmoe.workload.workload import make_workload

_ON_CPU = ("cpu", "model")


def check(settings: Iterable[Setting]) -> None:
    """Raise what one of the runs would raise at its start: `ConfigError` and its kinds.

    The model of a live run is read by its ranks alone, so that what does not fit it is told later.
    """
    source = cache(routing_source)  # which may read a file
    for setting in settings:
        try:
            _check(setting, source)
        except UnknownName:
            raise
        except ConfigError as error:
            raise ConfigError(f"{setting.label}: {error}") from None


def _check(setting: Setting, source: Callable[[ModelShape, str, int], RoutingSource]) -> None:
    live = setting.experiment.world == "live"
    config = live_config(setting) if live else virtual_config(setting)
    _check_transport(config)
    make_workload(setting.workload_config())
    if live:
        scheduler_parameters(config.scheduler)
        check_routing(setting.workload.routing)
        return
    shape = setting.model.made()
    make_scheduler(config.scheduler, SchedulerContext(StageChain(shape.moe_layers), 1.0))
    routing = source(shape, setting.workload.routing, setting.experiment.seed)
    load = routing.load() if config.placement.profile == "routing" else None
    make_placement(config.placement, config.cluster.ranks, shape.moe_layers, shape.experts, load)
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
