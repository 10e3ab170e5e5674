"""The synchronous rules on virtual time: under faults, by seed, nobody hangs, tokens are exact."""

from __future__ import annotations

from typing import Any

import pytest

from tests.test_lockstep import RULES, rule
from tests.test_virtual_cluster import BAD_LINKS, cancels, crash, cut, nothing, stalls
from tests.virtual_kit import play, sections

SEEDS = 3


@pytest.mark.parametrize("act", [nothing, cancels, stalls, crash, cut])
@pytest.mark.parametrize(("name", "parameters"), RULES)
def test_no_barrier_is_for_ever(name: str, parameters: dict[str, Any], act: Any) -> None:
    for seed in range(SEEDS):
        config = sections(
            3, scheduler=rule(name, **parameters), transport={"window_rows": 1 + seed % 12}
        )
        try:
            play(config, seed, act)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


@pytest.mark.parametrize("act", [nothing, cancels, crash])
@pytest.mark.parametrize("attention_ranks", [1, 2])
def test_no_barrier_is_for_ever_with_roles_apart(attention_ranks: int, act: Any) -> None:
    for seed in range(SEEDS):
        placement = {"attention_ranks": attention_ranks}
        config = sections(3, scheduler=rule("two_batch"), placement=placement)
        try:
            play(config, seed, act)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


def test_the_same_seed_replays_event_for_event() -> None:
    config = sections(3, scheduler=rule("two_batch"))
    assert play(config, 7, cancels) == play(config, 7, cancels)


@pytest.mark.parametrize(("name", "parameters"), RULES)
def test_no_barrier_is_for_ever_over_bad_links(name: str, parameters: dict[str, Any]) -> None:
    for seed in range(SEEDS):
        transport = {"name": "impaired:model", "options": {**BAD_LINKS, "seed": seed}}
        play(sections(3, scheduler=rule(name, **parameters), transport=transport), seed, cancels)
