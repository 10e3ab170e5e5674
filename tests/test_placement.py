"""Placement of experts and roles over ranks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncmoe.config import PlacementConfig
from asyncmoe.errors import ConfigError
from asyncmoe.placement import Placement, Role, make_placement


def held(placement: Placement) -> list[int]:
    return [len(placement.local_experts(rank, 0)) for rank in range(placement.world)]


def place(world: int, experts: int, moe_layers: int = 2, **keys: object) -> Placement:
    return make_placement(PlacementConfig.model_validate(keys), world, moe_layers, experts)


def written(tmp_path: Path, content: object) -> str:
    path = tmp_path / "placement.json"
    path.write_text(json.dumps(content))
    return str(path)


def test_256_experts_over_3_ranks_are_split_as_evenly_as_possible() -> None:
    placement = place(3, 256)

    assert held(placement) == [86, 85, 85]
    assert placement.local_experts(1, 0) == tuple(range(86, 171))
    assert placement.home_ranks == (0, 1, 2)


@given(world=st.integers(1, 9), experts=st.integers(1, 64), data=st.data())
def test_every_expert_has_one_rank_and_local_order_is_dense(
    world: int, experts: int, data: st.DataObject
) -> None:
    cuts = sorted(
        data.draw(st.lists(st.integers(0, experts), min_size=world - 1, max_size=world - 1))
    )
    counts = [b - a for a, b in zip([0, *cuts], [*cuts, experts], strict=True)]

    placement = place(world, experts, experts_per_rank=counts)

    assert held(placement) == counts
    for rank in range(world):
        mine = list(placement.local_experts(rank, 1))
        assert placement.local[1, mine].tolist() == list(range(counts[rank]))


def test_attention_ranks_hold_no_experts_and_expert_ranks_no_requests() -> None:
    placement = place(3, 8, roles=["attention", "expert", "both"])

    assert held(placement) == [0, 4, 4]
    assert placement.home_ranks == (0, 2)
    assert not placement.load_plan(1).attention
    assert placement.load_plan(0).experts == ((), ())


def test_file_places_each_layer_on_its_own(tmp_path: Path) -> None:
    owner = [[0, 1, 0, 1], [1, 1, 1, 0]]
    file = written(tmp_path, {"roles": ["both", "expert"], "owner": owner})

    placement = place(2, 4, file=file)

    assert placement.roles == (Role.BOTH, Role.EXPERT)
    assert np.array_equal(placement.owner, owner)
    assert placement.local.tolist() == [[0, 0, 1, 1], [0, 1, 2, 0]]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"roles": ["both"]}, "names 1 roles for 2 ranks"),
        ({"attention_ranks": 2}, "attention_ranks is 2 of 2 ranks"),
        ({"attention_ranks": 1, "roles": ["both", "both"]}, "are both set"),
        ({"roles": ["expert", "expert"]}, "at least one must be attention or both"),
        ({"roles": ["attention", "attention"]}, "at least one must be expert or both"),
        ({"experts_per_rank": [8]}, "1 entries for 2 ranks"),
        ({"experts_per_rank": [4, 5]}, "adds up to 9; the model has 8"),
        ({"experts_per_rank": [9, -1]}, "no entry may be negative"),
        (
            {"experts_per_rank": [4, 4], "roles": ["attention", "both"]},
            "8 experts, all layers together, on rank 0",
        ),
        ({"experts_per_rank": [8, 0], "roles": ["both", "expert"]}, "rank 1 has .* no work"),
        ({"experts_per_rank": [4, 4], "file": "x"}, "both set"),
        ({"file": "nowhere.json"}, "nowhere.json cannot be read"),
    ],
)
def test_placement_that_does_not_fit_is_refused(keys: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        place(2, 8, **keys)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"owner": [[0, 1]]}, "places 1 layers; the model has 2"),
        ({"owner": [[0, 1], [0]]}, r"places 1 experts in owner\[1\]; the model has 2"),
        ({"owner": [[0, 1], [0, 2]]}, r"owner\[1\]\[1\] of the placement is rank 2"),
        ({"owner": [[0, 1], [0, -1]]}, r"owner\[1\]\[1\] is -1"),
        ({"owner": [[0, 1], [0, 1.5]]}, r"\[owner\]\[1\]\[1\]"),
        ({"owner": [[0, 1], [0, 1]], "roles": ["both"]}, "names 1 roles for 2 ranks"),
        ({"owner": [[0, 1], [0, 1]], "role": []}, "role"),
        ([], "placement.json"),
    ],
)
def test_placement_file_that_does_not_fit_is_refused(
    tmp_path: Path, content: object, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        place(2, 2, file=written(tmp_path, content))


def test_more_expert_ranks_than_experts_leave_one_without_work() -> None:
    with pytest.raises(ConfigError, match=r"rank 3 has the role expert, .* none of the 2 experts"):
        place(4, 2, roles=["both", "both", "both", "expert"])
