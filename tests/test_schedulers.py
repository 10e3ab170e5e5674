"""The scheduling rules against their definitions, written out as loops."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncmoe import registry
from asyncmoe.config import SchedulerConfig
from asyncmoe.errors import ConfigError
from asyncmoe.scheduler import QueueView, Scheduler, SchedulerContext
from asyncmoe.stage import Kind, StageChain

NAMES = ("mtfs", "flfs", "defrag", "defrag_cyclic", "defrag_aging")
LOOKING_AHEAD = ("defrag", "defrag_cyclic", "defrag_aging")
Steps = list[tuple[list[int], list[bool]]]  # rows and whether the policy lets them through


def make(name: str, layers: int = 2, fanout: float = 1.0, **parameters: object) -> Scheduler:
    context = SchedulerContext(StageChain(layers), fanout)
    return registry.make_scheduler(SchedulerConfig(name=name, parameters=parameters), context)


def view(rows: list[int], runnable: list[bool] | None = None, decision: int = 0) -> QueueView:
    depths = np.array(rows, np.int64)
    mask = depths > 0 if runnable is None else (depths > 0) & np.array(runnable)
    return QueueView(
        rows=depths,
        runnable=mask,
        oldest_decision=np.zeros(len(rows), np.int64),
        oldest_s=np.zeros(len(rows)),
        decision=decision,
        now_s=0.0,
    )


def steps(stages: int) -> st.SearchStrategy[Steps]:
    rows = st.lists(st.sampled_from((0, 0, 1, 2, 3, 8, 500)), min_size=stages, max_size=stages)
    passed = st.lists(st.booleans(), min_size=stages, max_size=stages)
    return st.lists(st.tuples(rows, passed), min_size=1, max_size=8)


# Halves and powers of two only, so that sums are exact and both sides must agree to the bit.
DECAYS = st.sampled_from((0.0, 0.25, 0.5, 1.0))
FANOUTS = st.sampled_from((0.5, 1.0, 2.0, 4.0))


class Reference:
    """The defragging rules as their definitions read; `cyclic` is the artifact's form."""

    def __init__(
        self,
        chain: StageChain,
        fanout: float,
        cyclic: bool,
        decay: float,
        look_ahead: int,
        history: int,
    ) -> None:
        self.chain, self.fanout, self.cyclic = chain, fanout, cyclic
        self.decay, self.look_ahead, self.history = decay, look_ahead, history
        self.drained: list[tuple[int, int]] = []  # (stage, rows) of each batch
        self.depths: list[list[int]] = []  # rows at each decision

    def tokens(self, stage: int, rows: float) -> float:
        return rows / self.fanout if self.chain.kinds[stage] is Kind.EXPERT else rows

    def past(self, stage: int) -> float:
        if self.history == 0:
            return 0.0
        if not self.cyclic:
            recent = self.drained[-self.history :]
            return self.tokens(stage, sum(rows for each, rows in recent if each == stage))
        recent_depths = [rows[stage] for rows in self.depths[-self.history :]]
        if not recent_depths:
            return 0.0
        return self.tokens(stage, sum(recent_depths)) / len(recent_depths)

    def score(self, rows: list[int], stage: int) -> float:
        stages = len(self.chain)
        total = self.tokens(stage, rows[stage])
        for j in range(1, min(self.look_ahead, stages - 1) + 1):
            ahead = stage + j
            if self.cyclic:
                ahead %= stages
            if ahead < stages:
                depth = self.tokens(ahead, rows[ahead])
                total += self.decay**j * (depth + self.past(ahead))
        return total

    def choose(self, shown: QueueView) -> int | None:
        best, best_score = None, -1.0
        for stage in range(len(self.chain)):
            score = self.score(shown.rows.tolist(), stage)
            if shown.runnable[stage] and score > best_score:
                best, best_score = stage, score
        return best

    def executed(self, shown: QueueView, stage: int, rows: int) -> None:
        self.drained.append((stage, rows))
        self.depths.append(shown.rows.tolist())


# A history of up to two decisions: a mean over three is not exact in binary.
@pytest.mark.parametrize("name", ["defrag", "defrag_cyclic"])
@settings(max_examples=60)
@given(
    taken=steps(7),
    fanout=FANOUTS,
    decay=DECAYS,
    look_ahead=st.integers(0, 7),
    history=st.integers(0, 2),
)
def test_defragging_follows_its_formula_over_a_run(
    name: str, taken: Steps, fanout: float, decay: float, look_ahead: int, history: int
) -> None:
    rule = make(name, 3, fanout, decay=decay, look_ahead=look_ahead, history=history)
    reference = Reference(
        StageChain(3), fanout, name == "defrag_cyclic", decay, look_ahead, history
    )
    for decision, (rows, passed) in enumerate(taken):
        shown = view(rows, passed, decision)
        chosen = rule.choose(shown)
        assert chosen == reference.choose(shown)
        if chosen is not None:
            batch = min(rows[chosen], 5)
            rule.executed(chosen, batch)
            reference.executed(shown, chosen, batch)
    expected = [reference.score(taken[0][0], stage) for stage in range(7)]
    assert rule.scores(view(taken[0][0])).tolist() == expected


@pytest.mark.parametrize("name", ["mtfs", "flfs", "defrag", "defrag_cyclic", "defrag_aging"])
@settings(max_examples=30)
@given(taken=steps(7), lone=st.lists(st.integers(0, 6), max_size=5))
def test_a_lone_batch_counts_as_if_the_scheduler_had_been_asked(
    name: str, taken: Steps, lone: list[int]
) -> None:
    asked, told = make(name, 3), make(name, 3)
    for decision, (rows, passed) in enumerate(taken):
        shown = view(rows, passed, decision)
        chosen = asked.choose(shown)
        assert told.choose(shown) == chosen
        if chosen is None:
            continue
        asked.executed(chosen, rows[chosen])
        told.executed(chosen, rows[chosen])
        for stage in lone:
            alone = [0] * 7
            alone[stage] = 3
            assert asked.choose(view(alone)) == stage
            asked.executed(stage, 3)
            told.executed(stage, 3)


@settings(max_examples=60)
@given(taken=steps(7), fanout=FANOUTS, patience=st.integers(1, 6))
def test_aging_adds_the_age_in_decisions_to_the_relative_score(
    taken: Steps, fanout: float, patience: int
) -> None:
    rule = make("defrag_aging", 3, fanout, patience=patience, decay=0.5, history=2)
    reference = Reference(StageChain(3), fanout, False, 0.5, 4, 2)
    age = dict.fromkeys(range(7), 0)
    for decision, (rows, passed) in enumerate(taken):
        shown = view(rows, passed, decision)
        chosen = rule.choose(shown)
        candidates = np.flatnonzero(shown.runnable).tolist()
        if not candidates:
            assert chosen is None
            continue
        score = {s: reference.score(rows, s) for s in candidates}
        top = max(score.values())
        priority = {s: (patience - 0.5) * (score[s] / top) + age[s] for s in candidates}
        assert chosen == max(candidates, key=lambda s: (priority[s], -s))
        age = {s: age[s] + 1 if s in candidates and s != chosen else 0 for s in range(7)}
        rule.executed(chosen, 1)
        reference.executed(shown, chosen, 1)


@settings(max_examples=40)
@given(taken=steps(5))
def test_mtfs_takes_most_rows_and_flfs_the_first_of_those_that_may_run(taken: Steps) -> None:
    mtfs, flfs = make("mtfs"), make("flfs")
    for rows, passed in taken:
        shown = view(rows, passed)
        allowed = [s for s in range(5) if rows[s] > 0 and passed[s]]
        assert mtfs.choose(shown) == max(allowed, key=lambda s: (rows[s], -s), default=None)
        assert flfs.choose(shown) == min(allowed, default=None)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=20)
@given(taken=steps(5))
def test_every_rule_is_deterministic_and_leaves_the_view_alone(name: str, taken: Steps) -> None:
    first, second = make(name, fanout=3.0), make(name, fanout=3.0)
    for rows, passed in taken:
        shown, twin = view(rows, passed), view(rows, passed)
        chosen = first.choose(shown)
        assert chosen == second.choose(twin)
        assert shown.rows.tolist() == rows
        assert shown.runnable.tolist() == twin.runnable.tolist()
        shown.rows[:] = 99  # the executor reuses these arrays: no rule may have kept them
        shown.runnable[:] = True
        if chosen is not None:
            first.executed(chosen, 1)
            second.executed(chosen, 1)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_runnable_means_wait_even_with_rows_queued(name: str) -> None:
    rule = make(name)
    assert rule.choose(view([0] * 5)) is None
    assert rule.choose(view([9] * 5, [False] * 5)) is None
    assert rule.choose(view([9] * 5, [False, False, False, False, True])) == 4


@pytest.mark.parametrize("name", NAMES)
def test_equal_stages_run_in_chain_order(name: str) -> None:
    rule = make(name, **({"decay": 0.0} if name in LOOKING_AHEAD else {}))
    assert rule.choose(view([0, 3, 0, 3, 3])) == 1


def test_the_look_ahead_ends_at_the_head_unless_it_is_cyclic() -> None:
    rows = [4, 0, 3, 0, 2]  # seen around the corner, H has A0's four rows right ahead
    assert make("defrag", look_ahead=1, decay=1.0).choose(view(rows)) == 0
    assert make("defrag_cyclic", look_ahead=1, decay=1.0).choose(view(rows)) == 4


def test_rows_that_the_policy_holds_back_still_count_for_the_stage_before_them() -> None:
    rows, passed = [2, 9, 3, 0, 0], [True, False, True, True, True]
    assert make("defrag", decay=0.5, look_ahead=1).choose(view(rows, passed)) == 0


def test_a_window_longer_than_the_chain_counts_no_stage_twice() -> None:
    rule = make("defrag_cyclic", look_ahead=65535, decay=1.0)
    assert rule.scores(view([1, 2, 4, 8, 16])).tolist() == [31.0] * 5


@pytest.mark.parametrize("name", LOOKING_AHEAD)
def test_expert_depths_count_in_tokens(name: str) -> None:
    rows = [0, 8, 3, 0, 0]  # eight expert rows are two tokens at a fan-out of four
    assert make(name, fanout=1.0, decay=0.0).choose(view(rows)) == 1
    assert make(name, fanout=4.0, decay=0.0).choose(view(rows)) == 2


def test_defrag_forgets_what_was_drained_before_its_history() -> None:
    rule = make("defrag", history=2, decay=1.0, look_ahead=1)
    rule.executed(1, 10)
    assert rule.scores(view([1, 0, 0, 0, 0]))[0] == 11
    rule.executed(3, 1)
    rule.executed(3, 1)
    assert rule.scores(view([1, 0, 0, 0, 0]))[0] == 1


def test_choosing_again_without_a_batch_ages_nothing() -> None:
    rule = make("defrag_aging", patience=1, decay=0.0)
    asked = view([1, 0, 9, 0, 0])
    assert [rule.choose(asked) for _ in range(5)] == [2] * 5
    rule.executed(2, 1)
    assert rule.choose(asked) == 0  # half a decision outweighs no score, a whole one any


@pytest.mark.parametrize("fanout", [0.0, -1.0, float("nan"), float("inf")])
def test_a_fan_out_that_is_no_divisor_is_refused(fanout: float) -> None:
    with pytest.raises(ConfigError, match=r"fanout is .*; allowed is above 0"):
        make("defrag", fanout=fanout)
