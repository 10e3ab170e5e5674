"""The bound of `defrag_aging` under attack, and that the same attacks starve the other rules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncmoe import registry
from asyncmoe.config import SchedulerConfig
from asyncmoe.scheduler import QueueView, Scheduler, SchedulerContext
from asyncmoe.schedulers.defrag_aging import DefragAging
from asyncmoe.stage import StageChain

FLOOD = 10**7  # rows that an adversary pours on a stage


def make(name: str, layers: int, fanout: float = 1.0, **parameters: object) -> Any:
    context = SchedulerContext(StageChain(layers), fanout)
    return registry.make_scheduler(SchedulerConfig(name=name, parameters=parameters), context)


class Ageless(DefragAging):
    """The rule with the weight of age at nought: what the tests must catch."""

    def executed(self, stage: int, rows: int) -> None:
        super().executed(stage, rows)
        self._age[:] = 0


@dataclass
class Rank:
    """Queues, a rule that picks from them, and how long each stage has been passed over."""

    rule: Scheduler
    batch: int = 10 * FLOOD
    rows: list[int] = field(default_factory=list)
    waited: list[int] = field(default_factory=list)  # decisions at which it was runnable, unserved
    decision: int = 0

    def __post_init__(self) -> None:
        self.rows = [0] * len(self.rule.context.chain)
        self.waited = list(self.rows)

    def view(self, rows: Sequence[int], held_back: frozenset[int] = frozenset()) -> QueueView:
        depths = np.array(rows, np.int64)
        runnable = depths > 0
        runnable[list(held_back)] = False
        zeros = np.zeros(len(rows), np.int64)
        return QueueView(depths, runnable, zeros, zeros.astype(float), self.decision, 0.0)

    def step(self, held_back: frozenset[int] = frozenset()) -> int | None:
        """One decision and its batch."""
        shown = self.view(self.rows, held_back)
        chosen = self.rule.choose(shown)
        if chosen is None:
            return None
        taken = min(self.batch, self.rows[chosen])
        self.rule.executed(chosen, taken)
        self.rows[chosen] -= taken
        self.decision += 1
        for stage, runnable in enumerate(shown.runnable):
            self.waited[stage] = self.waited[stage] + 1 if runnable and stage != chosen else 0
        return chosen


def starve(rank: Rank, victim: int, others: Sequence[int], rows: int = 1, most: int = 500) -> int:
    """Decisions until the last of `rows` rows of `victim` runs, against a greedy adversary.

    It keeps all `others` non-empty, so that they age too, and before each decision floods the
    stage served last if that keeps the victim waiting, or else any other one that does.
    """
    order = list(others)
    rank.rows[victim] = rows
    while rank.rows[victim] and rank.decision < most:
        for other in others:
            rank.rows[other] = max(1, rank.rows[other])
        for other in order:
            flooded = [*rank.rows]
            flooded[other] += FLOOD
            if rank.rule.choose(rank.view(flooded)) != victim:
                rank.rows = flooded
                break
        chosen = rank.step()
        if chosen in order:
            order.remove(chosen)
            order.insert(0, chosen)
    return rank.decision


RANKS = st.sampled_from(("attention", "expert", "both"))
RULES = st.builds(
    make,
    name=st.just("defrag_aging"),
    layers=st.integers(1, 6),
    patience=st.integers(1, 24),
    fanout=st.sampled_from((0.7, 1.0, 3.3)),
    decay=st.sampled_from((0.0, 0.5, 0.8, 1.0)),
    look_ahead=st.integers(0, 5),
    history=st.integers(0, 5),
)


def stages_of(rule: Scheduler, rank: str) -> list[int]:
    """Stages that can be non-empty on a rank of this role."""
    chain = rule.context.chain
    experts = [chain.expert(layer) for layer in range(chain.layers)]
    everything = list(range(len(chain)))
    homes = [stage for stage in everything if stage not in experts]
    return {"attention": homes, "expert": experts, "both": everything}[rank]


@settings(max_examples=60, deadline=None)
@given(rule=RULES, role=RANKS, pick=st.integers(0, 99))
def test_no_greedy_adversary_beats_the_bound(rule: DefragAging, role: str, pick: int) -> None:
    stages = stages_of(rule, role)
    victim = stages[pick % len(stages)]
    others = [stage for stage in stages if stage != victim]
    bound = rule.bound(len(stages))
    assert starve(Rank(rule), victim, others, most=bound + 1) <= bound


Turns = list[tuple[list[tuple[int, int]], frozenset[int]]]  # arrivals, and stages held back
STAGES = st.integers(0, 4)
TURNS: st.SearchStrategy[Turns] = st.lists(
    st.tuples(
        st.lists(st.tuples(STAGES, st.sampled_from((1, 7, FLOOD))), max_size=4),
        st.frozensets(STAGES, max_size=2),
    ),
    max_size=40,
)


def longest_wait(rank: Rank, turns: Turns) -> int:
    """Most decisions that any stage was passed over in a row."""
    longest = 0
    for arrived, held_back in turns:
        for stage, rows in arrived:
            rank.rows[stage] += rows
        rank.step(held_back)
        longest = max(longest, *rank.waited)
    return longest


@settings(max_examples=80, deadline=None)
@given(patience=st.integers(1, 4), batch=st.sampled_from((1, 4, 10 * FLOOD)), turns=TURNS)
def test_no_arrivals_keep_any_stage_beyond_the_bound(
    patience: int, batch: int, turns: Turns
) -> None:
    rule = make("defrag_aging", layers=2, patience=patience)
    assert longest_wait(Rank(rule, batch), turns) < rule.bound()


@pytest.mark.parametrize(("layers", "patience"), [(1, 1), (1, 2), (2, 5), (4, 18), (8, 3)])
def test_the_bound_is_tight(layers: int, patience: int) -> None:
    rule = make("defrag_aging", layers, patience=patience)
    head = rule.context.chain.head
    assert starve(Rank(rule), head, range(head)) == rule.bound() == patience + 2 * layers


@pytest.mark.parametrize("layers", [1, 4, 24])
def test_the_default_bound_is_three_rounds_of_the_chain(layers: int) -> None:
    assert make("defrag_aging", layers).bound() == 3 * (2 * layers + 1) - 1


@pytest.mark.parametrize("layers", [4, 10])
@pytest.mark.parametrize("name", ["mtfs", "flfs", "defrag", "defrag_cyclic"])
def test_the_same_adversary_starves_the_published_rules(name: str, layers: int) -> None:
    head = 2 * layers
    bound = make("defrag_aging", layers).bound()
    assert starve(Rank(make(name, layers)), head, range(head), most=10 * bound) == 10 * bound


@pytest.mark.parametrize("layers", [1, 4, 10])
def test_the_same_adversary_starves_the_rule_without_its_ages(layers: int) -> None:
    whole = make("defrag_aging", layers)
    mutant = Ageless(whole.context, whole.parameters)
    head = 2 * layers
    most = 10 * mutant.bound()
    assert starve(Rank(mutant), head, range(head), most=most) == most


@settings(max_examples=25, deadline=None)
@given(layers=st.integers(1, 3), patience=st.integers(1, 8), n=st.integers(0, 20),
       batch=st.integers(1, 9))  # fmt: skip
def test_a_row_behind_n_others_is_served_within_its_share_of_bounds(
    layers: int, patience: int, n: int, batch: int
) -> None:
    rule = make("defrag_aging", layers, patience=patience)
    head = rule.context.chain.head
    bound = math.ceil((n + 1) / batch) * rule.bound()
    assert starve(Rank(rule, batch), head, range(head), rows=n + 1, most=bound + 1) <= bound
