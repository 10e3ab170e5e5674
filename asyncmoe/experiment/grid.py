"""The runs of an experiment: one for every combination of its models, clusters, workloads, systems
and impairments, each with the configuration of the engine that follows."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from asyncmoe import configfile
from asyncmoe.config import Config
from asyncmoe.errors import ConfigError
from asyncmoe.experiment.schema import (
    DIMENSIONS,
    ClusterTable,
    Experiment,
    ImpairmentTable,
    ModelTable,
    SystemTable,
    WindowTable,
    WorkloadTable,
)
from asyncmoe.metrics.summary import MeasureConfig
from asyncmoe.virtual.shapes import Hardware, ModelShape
from asyncmoe.workload.workload import WorkloadConfig

_SET_ANYWHERE = {
    "cluster.ranks": "clusters.NAME.hosts and ranks_per_host",
    "scheduler.name": "systems.NAME.scheduler",
}
_SET_IN_VIRTUAL_WORLD = {
    **_SET_ANYWHERE,
    "device.name": "the virtual world, whose devices are models",
    "transport.name": "the virtual world, whose links are models",
    "transport.options": "impairments.NAME.network and links",
}
KV_SHARE = 0.9  # of the memory that weights leave, the part that the KV cache gets
_BIT_PER_S = 8.0
_GIGA = 1e9


@dataclass(frozen=True, slots=True)
class Setting:
    """One run."""

    experiment: Experiment
    names: Mapping[str, str]  # by dimension
    quick: bool

    @property
    def label(self) -> str:
        """The names that tell it from the other runs."""
        several = [d for d, names in self.experiment.dimensions().items() if len(names) > 1]
        return " ".join(self.names[d] for d in several or ["system"])

    @property
    def series(self) -> str:
        """What it is compared as: its system, and its impairment where there are several."""
        several = len(self.experiment.impairments) > 1
        return " ".join(self.names[d] for d in ("system", "impairment") if d == "system" or several)

    @property
    def model(self) -> ModelTable:
        """See `Experiment`, as the next ones."""
        return self.experiment.models[self.names["model"]]

    @property
    def cluster(self) -> ClusterTable:
        return self.experiment.clusters[self.names["cluster"]]

    @property
    def workload(self) -> WorkloadTable:
        return self.experiment.workloads[self.names["workload"]]

    @property
    def system(self) -> SystemTable:
        return self.experiment.systems[self.names["system"]]

    @property
    def impairment(self) -> ImpairmentTable:
        return self.experiment.impairments[self.names["impairment"]]

    @property
    def window(self) -> WindowTable:
        """The one that counts."""
        if self.cluster.window is not None:
            return self.cluster.window
        quick = self.experiment.quick
        return quick if self.quick and quick is not None else self.experiment.window

    @property
    def measure(self) -> MeasureConfig:
        """What is measured."""
        window, targets = self.window, self.experiment.targets
        return MeasureConfig(
            ramp_s=window.ramp_s,
            best_window_s=window.best_s,
            ttft_target_ms=targets.ttft_ms,
            itl_target_ms=targets.itl_ms,
        )

    def workload_config(self) -> WorkloadConfig:
        """The workload, for as long as the run is."""
        values = self.workload.model_dump(exclude={"routing", "per_rank"})
        if self.workload.per_rank is not None:
            values["underway"] = self.workload.per_rank * self.cluster.ranks
            values["arrivals"] = f"closed:{values['underway']}"
        end_s = self.window.ramp_s + self.window.measure_s
        if values["duration_s"] is None:
            values["duration_s"] = end_s
        values["seed"] = (values["seed"] + self.experiment.seed) % 2**32
        return WorkloadConfig(**values)


def settings(experiment: Experiment, quick: bool) -> list[Setting]:
    """All runs, the last dimension changing fastest."""
    dimensions = experiment.dimensions()
    combinations = itertools.product(*(dimensions[name] for name in DIMENSIONS))
    return [
        Setting(experiment, dict(zip(DIMENSIONS, names, strict=True)), quick)
        for names in combinations
    ]


@dataclass(frozen=True, slots=True)
class Layout:
    """How the devices of a cluster make ranks, and ranks groups."""

    groups: int  # clusters of ranks that know nothing of each other
    ranks: int  # of a group
    hardware: Hardware  # of one rank


def layout(setting: Setting) -> Layout:
    """The layout of a virtual run.

    A pipeline of p stages with p micro-batches on their way is, to each of them, a machine of its
    own: it always finds its next stage free. So it is simulated as p groups of one rank, each of
    which has the power of one stage and passes all layers (`tensor` devices together).

    Raises `ConfigError` where the devices do not divide.
    """
    hardware, system = setting.cluster.made(), setting.system
    devices = setting.cluster.ranks
    if hardware.ranks_per_host % system.tensor:
        raise ConfigError(
            f"systems.{setting.names['system']}.tensor is {system.tensor}; allowed: what divides "
            f"the {hardware.ranks_per_host} devices of a host"
        )
    if system.pipeline > 1:
        if system.pipeline * system.tensor != devices:
            raise ConfigError(
                f"systems.{setting.names['system']}: pipeline is {system.pipeline} and tensor "
                f"{system.tensor}; allowed: two whose product is the {devices} devices"
            )
        return Layout(system.pipeline, 1, hardware)
    groups = system.replicas * setting.cluster.groups
    ranks, rest = divmod(devices, groups * system.tensor)
    if rest:
        raise ConfigError(
            f"systems.{setting.names['system']}: replicas is {system.replicas}, tensor "
            f"{system.tensor} and the cluster's groups {setting.cluster.groups}; allowed: three "
            f"whose product divides the {devices} devices"
        )
    return Layout(groups, ranks, hardware)


def virtual_config(setting: Setting) -> Config:
    """The engine's configuration in the virtual world. Raises `ConfigError`."""
    shape, place, system = setting.model.made(), layout(setting), setting.system
    hardware, cluster = place.hardware, setting.cluster
    network: dict[str, Any] = {
        "ranks_per_host": max(1, hardware.ranks_per_host // system.tensor),
        "nic_gbit_per_s": hardware.nic_bytes_per_s * _BIT_PER_S / _GIGA,
        "local_gbit_per_s": hardware.local_bytes_per_s * _BIT_PER_S / _GIGA,
        "latency_us": cluster.latency_us,
        "local_latency_us": cluster.local_latency_us,
        "jitter_us": cluster.jitter_us,
        "seed": setting.experiment.seed,
        **setting.impairment.network,
    }
    options: dict[str, Any] = {"network": network, "row_bytes": shape.row_bytes}
    if system.collective:
        options["dispatch_row_bytes"] = -(-shape.row_bytes // hardware.ranks_per_host)
    links = setting.impairment.links
    overrides: dict[str, Any] = {
        "cluster.ranks": place.ranks,
        "cluster.peer_timeout_s": 3600.0,
        "transport.name": "impaired:model" if links else "model",
        "transport.options": {**options, **links},
        "scheduler.name": system.scheduler,
        "scheduler.parameters": dict(system.parameters),
    }
    overrides |= _free(setting, _SET_IN_VIRTUAL_WORLD)
    config = configfile.load(environ={}, overrides=overrides)
    if config.kv.blocks is None:
        blocks = kv_blocks(shape, place, system.tensor, config.kv.block_tokens)
        config = config.model_copy(update={"kv": config.kv.model_copy(update={"blocks": blocks})})
    return config


def kv_blocks(shape: ModelShape, place: Layout, tensor: int, block_tokens: int) -> int:
    """Blocks of the cache of one rank, in the memory that weights leave. Raises `ConfigError`."""
    moe = shape.moe_layers * shape.experts * shape.expert_weights
    dense = shape.moe_layers * shape.attention_weights + 2 * shape.head_weights
    dense += shape.dense_layers * shape.dense_weights
    stages = place.groups if place.ranks == 1 else 1
    weights = shape.value_bytes * (moe / place.ranks + dense) / stages
    left = place.hardware.memory_bytes * tensor - weights
    layers = shape.layers / stages
    # The stages of a pipeline hold all its micro-batches' cache, each of its own layers.
    tokens = left * KV_SHARE / (layers * shape.kv_bytes) / stages
    blocks = int(tokens // block_tokens)
    if blocks < 1:
        raise ConfigError(
            f"{shape.name} does not fit: {weights / _GIGA:.1f} GB of weights on a rank of "
            f"{place.hardware.memory_bytes * tensor / _GIGA:.1f} GB"
        )
    return blocks


def live_config(setting: Setting) -> Config:
    """The engine's configuration on this machine. Raises `ConfigError`."""
    system, links = setting.system, setting.impairment.links
    overrides: dict[str, Any] = {
        "cluster.ranks": setting.cluster.ranks,
        "scheduler.name": system.scheduler,
        "scheduler.parameters": dict(system.parameters),
        "model.routing": setting.workload.routing,
        "engine.marches": False,  # they would pass by what is studied
        "log.level": "warning",
        **_free(setting, _SET_ANYWHERE),
    }
    if links:
        inner = overrides.get("transport.name", "tcp")
        overrides["transport.name"] = f"impaired:{inner}"
        overrides["transport.options"] = {**overrides.get("transport.options", {}), **links}
    return configfile.load(overrides=overrides)


def _free(setting: Setting, not_free: Mapping[str, str]) -> dict[str, Any]:
    """The engine's settings that the experiment chooses.

    Raises `ConfigError` for one of those that `not_free` names, with where it is set instead.
    """
    found = _flat(setting.experiment.config) | _flat(setting.system.config)
    for key in found.keys() & not_free.keys():
        raise ConfigError(f"config.{key} is {found[key]!r}: it is set by {not_free[key]}")
    return found


def _flat(tables: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Keys of the configuration tree by path."""
    return {f"{section}.{key}": v for section, table in tables.items() for key, v in table.items()}
