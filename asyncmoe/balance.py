"""Placement of experts by their load: the longest-processing-time rule, with room per rank."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_TIE = 1e-9  # of a layer's load: between ranks of equal load, each layer begins with another one


def balanced_owner(load: NDArray[np.float64], counts: Sequence[int]) -> NDArray[np.int64]:
    """[layers, experts]: the rank of each expert, so that ranks have about the same load.

    In each layer the experts are placed from the busiest down, each on the rank with the least
    load of those that have room: rank r takes `counts[r]` experts of each layer.

    Args:
        load: [layers, experts] rows that each expert gets, in any unit.
    """
    layers, experts = load.shape
    assert sum(counts) == experts
    world, each = len(counts), np.arange(layers)
    owner = np.empty((layers, experts), np.int64)
    room = np.tile(np.array(counts), (layers, 1))
    turn = (np.arange(world) - each[:, None]) % world
    rank_load = _TIE * load.sum(1, keepdims=True) * turn
    rank_load[room == 0] = np.inf
    for expert in (-load).argsort(axis=1, kind="stable").T:  # [layers], the busiest ones first
        rank = rank_load.argmin(1)
        owner[each, expert] = rank
        rank_load[each, rank] += load[each, expert]
        room[each, rank] -= 1
        rank_load[each, rank] = np.where(room[each, rank] > 0, rank_load[each, rank], np.inf)
    return owner
