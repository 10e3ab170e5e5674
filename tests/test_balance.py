"""Experts placed by their load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from asyncmoe.balance import balanced_owner
from asyncmoe.config import PlacementConfig
from asyncmoe.errors import ConfigError
from asyncmoe.placement import make_placement
from asyncmoe.workload.routing import make_routing


def busiest(owner: NDArray[Any], load: NDArray[Any], world: int) -> float:
    """Mean over the layers of the busiest rank's load, by the mean rank's."""
    worst = [
        np.bincount(ranks, of_layer, world).max()
        for ranks, of_layer in zip(owner, load, strict=True)
    ]
    return float(np.mean(worst) * world / load[0].sum())


@pytest.mark.parametrize("name", ["zipf:0.5", "zipf:1", "hot:6,0.3"])
def test_balanced_placement_beats_even_ranges_on_skewed_loads(name: str) -> None:
    source = make_routing(name, 12, 64, 4, seed=1)
    assert source is not None
    load = source.load()
    even = make_placement(PlacementConfig(), 8, 12, 64)
    balanced = make_placement(PlacementConfig(), 8, 12, 64, load)
    least = load.max(1).mean() * 8  # no placement is better than its busiest expert
    assert busiest(balanced.owner, load, 8) < 0.85 * busiest(even.owner, load, 8)
    assert busiest(balanced.owner, load, 8) < 1.25 * max(1.0, least)
    assert all(np.bincount(ranks).tolist() == [8] * 8 for ranks in balanced.owner)


def test_ranks_take_the_experts_that_they_have_room_for() -> None:
    load = np.array([[8.0, 1, 1, 1, 1], [1, 1, 1, 1, 1]])
    owner = balanced_owner(load, [1, 0, 4])
    assert owner[0].tolist() == [0, 2, 2, 2, 2]
    assert np.bincount(owner[1], minlength=3).tolist() == [1, 0, 4]


def test_equal_loads_do_not_pile_up_on_the_first_rank() -> None:
    owner = balanced_owner(np.array([[2.0, 1, 1, 1, 1, 1]] * 6), [2, 2, 2])
    heavy = owner[:, 0]
    assert np.bincount(heavy, minlength=3).tolist() == [2, 2, 2]


def test_a_file_and_a_profile_are_one_too_many(tmp_path: Path) -> None:
    config = PlacementConfig(file=str(tmp_path / "p.json"), profile="routing")
    with pytest.raises(ConfigError, match="both set"):
        make_placement(config, 2, 1, 4)
