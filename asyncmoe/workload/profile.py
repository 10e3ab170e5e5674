"""The load of every expert, from a recorded or made-up routing, for their placement."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from asyncmoe.config import Config
from asyncmoe.errors import ConfigError
from asyncmoe.model import ModelSpec
from asyncmoe.workload.routing import MODEL, make_routing

ROUTING = "routing"  # the profile of `model.routing`


def expert_load(config: Config, spec: ModelSpec) -> NDArray[np.float64] | None:
    """[MoE layers, experts] share of each layer's rows that an expert gets, by `placement.profile`.

    None without a profile. Raises `ConfigError` for a profile that does not fit the model.
    """
    profile = config.placement.profile
    if profile is None:
        return None
    if profile == ROUTING and config.model.routing == MODEL:
        raise ConfigError(
            "placement.profile is 'routing', but model.routing is 'model': what a router will do "
            "is not known beforehand; record it (bench --record-routing FILE)"
        )
    text = config.model.routing if profile == ROUTING else f"replay:{profile}"
    return _load(text, len(spec.moe_layers), spec.experts, spec.top_k, config.model.seed)


@lru_cache(maxsize=4)  # the ranks of one process ask for the same
def _load(text: str, layers: int, experts: int, top_k: int, seed: int) -> NDArray[np.float64]:
    source = make_routing(text, layers, experts, top_k, seed)
    assert source is not None
    load = source.load()
    load.flags.writeable = False
    return load
