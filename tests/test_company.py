"""Stages that wait for rows on their way: what is expected, for how long, and what that is for."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from asyncmoe import native
from asyncmoe.company import PATIENCE, SHORTEST_S, Company, make_company, patience
from asyncmoe.config import BatchConfig
from asyncmoe.microqueue import make_queues
from asyncmoe.policy import BatchPolicy
from asyncmoe.stage import Kind, StageChain
from asyncmoe.virtual.run import run
from tests.test_executor import twin  # noqa: F401 - a fixture
from tests.test_queues import dispatch_parcel
from tests.test_virtual_cluster import cancels, crash, cut, nothing, stalls
from tests.virtual_kit import play, sections, toys

CHAIN = StageChain(4)
COSTS = {"least_s": 0.001, "most_s": 0.003}
A0, A1, H = CHAIN.attention(0), CHAIN.attention(1), CHAIN.head


class Bench:
    """A company over queues, with what it is told of."""

    def __init__(self, patience: float = 2.0, **batch: Any) -> None:
        self.queues = make_queues(CHAIN)
        self.policy = BatchPolicy(BatchConfig(**batch), CHAIN, changes=True)
        self.decode_chunk = np.full(6, -1, np.int64)
        self.chunk_stage = np.zeros(12, np.int32)
        self.company: Company = make_company(
            self.queues, self.policy, patience, 0.5, self.decode_chunk, self.chunk_stage
        )
        for kind, seconds in ((Kind.ATTENTION, 1.0), (Kind.EXPERT, 2.0), (Kind.HEAD, 4.0)):
            self.company.took(kind, seconds)

    def decodes(self, *stages: int) -> None:
        """Requests that decode, at these stages or on their way to them."""
        self.decode_chunk[: len(stages)] = np.arange(len(stages)) + 3
        self.chunk_stage[3 : 3 + len(stages)] = stages

    def put(self, stage: int, count: int, now_s: float = 0.0) -> None:
        self.queues.put_chunks(stage, np.arange(count), np.ones(count, np.int64), now_s)

    def send(self, source: int, layer: int, rows: int, now_s: float) -> None:
        parcel = replace(dispatch_parcel([1] * rows), stage=CHAIN.expert(layer))
        self.queues.put_parcel(source, parcel, None, now_s)

    def take(self, layer: int) -> None:
        self.queues.take_rows(CHAIN.expert(layer), 100)

    def waits(self, stage: int, now_s: float = 0.0) -> tuple[int, float]:
        self.company.attend(now_s)
        return int(self.policy.min_rows[stage]), float(self.policy.linger_s[stage])


def test_an_attention_stage_waits_for_the_decode_steps_that_stand_before_it() -> None:
    b = Bench()
    b.decodes(A1, A1, A1, CHAIN.attention(2), A0)
    b.put(A1, 2)
    assert b.waits(A1) == (3, 2 * 1.0)
    b.put(H, 1)
    b.decodes(H, H, A1)
    assert b.waits(H) == (2, 2 * 4.0)


def test_the_first_stage_waits_for_all_decode_steps_as_long_as_a_step_takes() -> None:
    b = Bench()
    b.decodes(A0, A1, H, CHAIN.attention(3))
    b.put(A0, 1)
    assert b.waits(A0) == (4, 2 * (4 * (1.0 + 2.0) + 4.0))


def test_rows_of_prompts_are_not_waited_for() -> None:
    b = Bench()
    b.put(A0, 1)
    b.put(A1, 1)
    assert (b.waits(A0)[0], b.waits(A1)[0]) == (1, 1)


def test_no_more_rows_are_waited_for_than_a_batch_takes() -> None:
    b = Bench(attention_max_rows=2, expert_max_rows=3)
    b.decodes(A1, A1, A1)
    b.put(A1, 1)
    assert b.waits(A1)[0] == 2
    b.send(1, 0, 1, 0.0)
    b.send(0, 1, 3, 0.0)
    assert b.waits(CHAIN.expert(1))[0] == 3


def test_an_expert_stage_waits_for_a_home_that_is_just_behind() -> None:
    b = Bench()
    b.send(1, 0, 5, 1.0)
    b.take(0)
    b.send(0, 1, 4, 2.0)
    assert b.waits(CHAIN.expert(1), 2.5) == (5, 2 * 2.0 * (1 - 0.5**4))
    b.send(1, 1, 2, 3.0)  # here it is
    assert b.waits(CHAIN.expert(1), 3.0)[0] == 1


@pytest.mark.parametrize(
    ("latest", "layer", "expected"),
    [(0, 1, True), (0, 2, True), (0, 3, False), (3, 0, True), (2, 0, True), (1, 0, False)],
)
def test_an_expert_stage_waits_for_no_home_that_is_ahead(
    latest: int, layer: int, expected: bool
) -> None:
    b = Bench()
    b.send(1, latest, 1, 0.0)
    b.take(latest)
    b.send(0, layer, 1, 1.0)
    assert (b.waits(CHAIN.expert(layer), 1.0)[0] > 1) is expected


def test_a_home_that_has_been_silent_for_long_is_not_waited_for() -> None:
    b = Bench()
    b.send(1, 0, 1, 0.0)
    b.take(0)
    b.send(0, 1, 1, 32.0)
    step_s = 4 * (1.0 + 2.0) + 4.0
    assert b.waits(CHAIN.expert(1), 2 * step_s)[0] == 2
    assert b.waits(CHAIN.expert(1), 2 * step_s + 0.1)[0] == 1


def test_rows_that_use_every_expert_often_wait_for_nobody() -> None:
    b = Bench()  # half of the experts for each row
    b.send(1, 0, 1, 0.0)
    b.take(0)
    b.send(0, 1, 31, 0.0)
    assert b.waits(CHAIN.expert(1))[0] == 32
    b.send(0, 1, 1, 0.0)
    assert b.waits(CHAIN.expert(1))[0] == 1


def test_a_wait_that_the_clock_does_not_see_is_none() -> None:
    b = Bench()
    b.decodes(A1, A1)
    b.put(A1, 1)
    b.company.took(Kind.ATTENTION, SHORTEST_S / 2)
    assert b.waits(A1) == (2, SHORTEST_S)
    b.company.took(Kind.ATTENTION, SHORTEST_S / 2.1)
    assert b.waits(A1)[0] == 1


def test_the_price_is_that_of_a_small_batch_and_follows_it_up() -> None:
    b = Bench()
    b.put(A1, 1)
    b.company.took(Kind.ATTENTION, 100.0)  # a long prompt
    assert b.waits(A1)[1] == pytest.approx(2 * 1.02)
    for _ in range(400):
        b.company.took(Kind.ATTENTION, 3.0)
    assert b.waits(A1)[1] == 2 * 3.0
    b.company.took(Kind.ATTENTION, 0.5)
    assert b.waits(A1)[1] == 2 * 0.5


@pytest.mark.parametrize("seed", range(20))
def test_both_twins_see_the_same(seed: int) -> None:
    def drive() -> list[Any]:
        rng, seen = Random(seed), []
        b = Bench(patience=rng.choice([0.5, 2.0]), attention_max_rows=rng.randrange(1, 6))
        for now_s in range(30):
            b.decodes(*(2 * rng.randrange(5) for _ in range(rng.randrange(7))))
            b.send(rng.randrange(4), rng.randrange(4), rng.randrange(1, 4), float(now_s))
            b.put(2 * rng.randrange(5), rng.randrange(1, 4), float(now_s))
            if rng.random() < 0.4:
                b.take(rng.randrange(4))
            b.company.took(rng.choice(list(Kind)), rng.random())
            b.company.attend(float(now_s))
            seen += [b.policy.min_rows.tolist(), b.policy.linger_s.tolist()]
        return seen

    ours = drive()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "columns", None)
        assert drive() == ours


@pytest.mark.parametrize("act", [nothing, cancels, stalls, crash, cut])
def test_everything_ends_once_and_both_twins_do_the_same(act: Any) -> None:
    config = sections(3, batch={"company": 2.0}, transport={"window_rows": 9})
    for seed in range(5):
        ours = play(config, seed, act, **COSTS)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(native, "columns", None)
            assert play(config, seed, act, **COSTS) == ours


def test_ranks_that_wait_run_fewer_batches_for_the_same_tokens() -> None:
    async def batches(company: float) -> tuple[int, dict[int, list[int]]]:
        config = sections(
            2,
            batch={"company": company, "expert_max_rows": 64},
            engine={"max_requests": 4, "slots": 64},
            kv={"blocks": 200},
            transport={"options": {"network": {"latency_us": 100.0}}},
        )
        async with toys(config, 3, **COSTS) as cluster:
            cluster.front_end.tokens = {}
            for request in range(8):
                cluster.front_end.begin(request, [1 + request], 40)
            await cluster.ended(8)
            counts = [each.rank.times.kinds[Kind.EXPERT].batches for each in cluster.group.ranks]
            return sum(counts), cluster.tokens

    (many, tokens), (few, same) = (run(batches(company), 3) for company in (0.0, 2.0))
    assert tokens == same
    assert few < 0.85 * many


def test_who_waits() -> None:
    assert patience(BatchConfig(), live_ranks=2) == PATIENCE
    assert patience(BatchConfig(), live_ranks=1) == 0
    assert patience(BatchConfig(company=3.5), live_ranks=1) == 3.5
    assert patience(BatchConfig(company=0), live_ranks=2) == 0
    assert patience(BatchConfig(head_min_rows=2), live_ranks=2) == 0


def test_stages_do_not_wait_for_both() -> None:
    with pytest.raises(ValidationError, match=r"batch\.company is 2, but a batch\.\*_min_rows"):
        BatchConfig(company=2, expert_min_rows=4)
    with pytest.raises(ValidationError, match="greater than or equal to 0"):
        BatchConfig(company=-1)
