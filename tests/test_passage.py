"""Batches that are alone on their rank pass several stages at once, with the same tokens."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncmoe.checkpoint import Checkpoint, DummySource
from asyncmoe.model import Cache, ExpertBatch, LoadPlan, Routed, RowBatch, pair_batch
from asyncmoe.stage import Kind
from tests import toymodel
from tests.cluster import Cluster, cluster
from tests.stagerunner import expert_batch
from tests.test_engine_toy import PROMPTS, SMALL, sections

SPEC = toymodel.spec()
CHAIN_STAGES = 2 * len(SPEC.moe_layers) + 1


class Gated(toymodel.ToyModel):
    """A toy whose second attention stage waits for the test, once."""

    gate: threading.Event
    reached: threading.Event

    def attention(self, layer: int, x: Tensor, batch: RowBatch, cache: Cache) -> Routed:
        if layer == 1:
            self.reached.set()
            assert self.gate.wait(10)
        return super().attention(layer, x, batch, cache)


def gated() -> Checkpoint:
    Gated.gate, Gated.reached = threading.Event(), threading.Event()
    return Checkpoint(Path(), {}, Gated, SPEC, DummySource(), {})


def passages(engine: Cluster) -> list[list[int]]:
    """Records from now on the stages that rank 0's pieces of device work pass, to H at most."""
    seen: list[list[int]] = []
    engine.ranks[0].executor.watch()
    stages: Any = engine.ranks[0].executor._stages
    inner, went_on = stages.finish, stages.went_on

    def record(step: Any, result: Any) -> None:
        seen.append([stage for stage, _ in getattr(result, "stages", [(step.stage, 0.0)])])
        inner(step, result)

    def record_onward(step: Any, passed: Any) -> None:
        seen.append([stage for stage, _ in passed.stages])
        went_on(step, passed)

    stages.finish, stages.went_on = record, record_onward
    return seen


async def test_decode_steps_of_a_lone_batch_pass_all_stages_at_once() -> None:
    async with cluster(1, toymodel.checkpoint(), **SMALL) as engine:
        seen = passages(engine)
        request = engine.submit([3, 5], max_tokens=5)
        await engine.ended(request)
        assert engine.tokens[request] == toymodel.reference([3, 5], 5, SPEC)
        # Of the prompt only the last row goes behind the last attention stage.
        last = CHAIN_STAGES - 3
        assert seen[:4] == [list(range(last)), [last], [last + 1], [last + 2]]
        assert seen[4:] == [list(range(CHAIN_STAGES))] * 4
        times = engine.ranks[0].times.kinds
        assert times[Kind.ATTENTION].batches == times[Kind.EXPERT].batches == 5 * 3
        assert times[Kind.HEAD].batches == 5
        assert engine.ranks[0].queues.decision == 5 * CHAIN_STAGES
        await engine.settled()


@pytest.mark.parametrize(
    "change",
    [
        {"engine": {"combine": "per_expert"}},
        {"batch": {"head_min_rows": 2, "head_linger_ms": 1.0, "expert_max_rows": 1}},
    ],
)
async def test_batches_that_would_be_split_or_have_to_wait_keep_to_the_queues(
    change: dict[str, Any],
) -> None:
    async with cluster(1, toymodel.checkpoint(), **sections(**change)) as engine:
        seen = passages(engine)
        ids = [engine.submit(prompt, max_tokens=4) for prompt in PROMPTS[:2]]
        await engine.ended(*ids)
        for request, prompt in zip(ids, PROMPTS, strict=False):
            assert engine.tokens[request] == toymodel.reference(prompt, 4, SPEC)
        assert max(map(len, seen)) <= (1 if "engine" in change else CHAIN_STAGES - 1)


async def test_a_new_request_ends_a_passage_at_the_next_attention_stage() -> None:
    async with cluster(1, gated(), **SMALL) as engine:
        seen = passages(engine)
        first = engine.submit([3], max_tokens=4)
        await engine.until_true(Gated.reached.is_set)
        second = engine.submit([7, 8, 9], max_tokens=4)
        Gated.gate.set()
        await engine.ended(first, second)
        assert seen[0] == [0, 1, 2, 3]
        assert engine.tokens[first] == toymodel.reference([3], 4, SPEC)
        assert engine.tokens[second] == toymodel.reference([7, 8, 9], 4, SPEC)
        await engine.settled()


async def test_cancelling_ends_a_passage_and_gives_everything_back() -> None:
    async with cluster(1, gated(), **SMALL) as engine:
        seen = passages(engine)
        doomed = engine.submit([3, 4], max_tokens=50)
        kept = engine.submit([7], max_tokens=4)
        await engine.until_true(Gated.reached.is_set)
        engine.abort(doomed)
        Gated.gate.set()
        await engine.ended(doomed, kept)
        assert seen[0] == [0, 1, 2, 3]
        assert engine.tokens[kept] == toymodel.reference([7], 4, SPEC)
        await engine.settled()


async def test_a_failure_in_a_passage_ends_its_requests_alone() -> None:
    class Failing(toymodel.ToyModel):
        def experts(self, layer: int, x: Tensor, batch: ExpertBatch) -> Tensor:
            if layer == 2:
                raise RuntimeError("broken expert")
            return super().experts(layer, x, batch)

    failing = Checkpoint(Path(), {}, Failing, SPEC, DummySource(), {})
    async with cluster(1, failing, **sections(engine={"prefill_chunk": 1})) as engine:
        request = engine.submit([3], max_tokens=4)
        await engine.ended(request)
        assert engine.end[request] == "failed"
        assert "broken expert" in engine.message[request]
        await engine.settled()


def test_pairs_of_a_router_are_the_expert_batch_of_all_of_them() -> None:
    generator = torch.Generator().manual_seed(3)
    experts = torch.stack([torch.randperm(6, generator=generator)[:3] for _ in range(5)])
    weights = torch.rand(5, 3, generator=generator)
    order = (4, 0, 5, 1, 3, 2)  # local expert i is global expert order[i]
    local = torch.empty(6, dtype=torch.int64)
    local[torch.tensor(order)] = torch.arange(6)
    made, expected = pair_batch(experts, weights, local), expert_batch(experts, weights, order)
    model = toymodel.ToyModel(SPEC, LoadPlan(True, (order,)))
    x = torch.arange(5 * toymodel.HIDDEN, dtype=torch.float32).view(5, -1)
    assert torch.equal(made.counts, expected.counts)
    assert torch.equal(model.experts(0, x, made), model.experts(0, x, expected))
