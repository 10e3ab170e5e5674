"""Decode steps that go on to their next tokens by themselves, while the loop hears of each."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from asyncmoe import native
from asyncmoe.checkpoint import Checkpoint, DummySource
from asyncmoe.herald import Herald
from asyncmoe.model import Cache, Routed, RowBatch
from asyncmoe.passage import Passage, Passed
from asyncmoe.stage import Kind
from tests import toymodel
from tests.cluster import Cluster, cluster
from tests.test_engine_toy import SMALL, sections

SPEC = toymodel.spec()
CHAIN_STAGES = 2 * len(SPEC.moe_layers) + 1


class Stepped(toymodel.ToyModel):
    """Takes its time for tokens, and stops in the second layer once it made `hold_at` of them."""

    tokens = 0
    hold_at: int | None = None
    fail_at: int | None = None
    token_s = 0.005
    gate: threading.Event
    reached: threading.Event

    def attention(self, layer: int, x: Tensor, batch: RowBatch, cache: Cache) -> Routed:
        here = type(self)
        if layer == 1 and here.tokens == here.fail_at:
            raise RuntimeError("broken layer")
        if layer == 1 and here.tokens == here.hold_at:
            here.reached.set()
            assert here.gate.wait(10)
        return super().attention(layer, x, batch, cache)

    def logits(self, x: Tensor) -> Tensor:
        time.sleep(self.token_s)
        type(self).tokens += 1
        return super().logits(x)


def stepped(hold_at: int | None = None, **others: Any) -> Checkpoint:
    """Its tokens count from 0, once for each batch."""
    kind = type("SteppedAnew", (Stepped,), {"hold_at": hold_at, **others})
    kind.gate, kind.reached = threading.Event(), threading.Event()
    return Checkpoint(Path(), {}, kind, SPEC, DummySource(), {})


def onwards(engine: Cluster) -> list[tuple[Passage, Passed]]:
    """What passages of rank 0 say on their way, from now on."""
    return engine.stage_calls(0, "went_on")


@pytest.fixture(params=["compiled", "plain"])
def twin(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "plain":
        monkeypatch.setattr(native, "columns", None)
    elif native.columns is None:
        pytest.skip("nothing is compiled")


@pytest.mark.usefixtures("twin")
async def test_a_lone_batch_goes_from_token_to_token_without_the_loop() -> None:
    async with cluster(1, stepped(), **SMALL) as engine:
        said = onwards(engine)
        ids = [engine.submit([3], max_tokens=12), engine.submit([5], max_tokens=16)]
        await engine.ended(*ids)
        assert engine.tokens[ids[0]] == toymodel.reference([3], 12, SPEC)
        assert engine.tokens[ids[1]] == toymodel.reference([5], 16, SPEC)
        # Not behind a prompt, nor where a request ends.
        assert 8 <= len(said) <= 13
        assert all(len(each.stages) == CHAIN_STAGES for _, each in said)
        await engine.settled()
        times = engine.ranks[0].times.kinds
        heads, decisions = times[Kind.HEAD].batches, engine.ranks[0].queues.decision
        assert times[Kind.ATTENTION].batches == times[Kind.EXPERT].batches
        assert decisions == times[Kind.ATTENTION].batches * 2 + heads


async def test_drawn_tokens_are_those_of_the_way_through_the_queues() -> None:
    asked: dict[str, Any] = {"temperature": 9.0, "seed": 7, "top_p": 0.9, "max_tokens": 16}
    answers = []
    for combine in ("per_rank", "per_expert"):
        async with cluster(1, stepped(), **sections(engine={"combine": combine})) as engine:
            said = onwards(engine)
            request = engine.submit([3, 4], **asked)
            await engine.ended(request)
            answers.append((engine.tokens[request], len(said) > 0))
    assert answers == [(answers[0][0], True), (answers[0][0], False)]
    assert len(set(answers[0][0])) > 4


async def test_a_stop_token_ends_a_request_and_the_others_go_on() -> None:
    expected = toymodel.reference([3], 20, SPEC)
    stop = next(token for at, token in enumerate(expected) if at > 5 and token not in expected[:at])
    async with cluster(1, stepped(), **SMALL) as engine:
        stopped = engine.submit([3], max_tokens=20, stop_token_ids=[stop])
        other = engine.submit([5], max_tokens=20)
        await engine.ended(stopped, other)
        assert engine.end[stopped] == "stop"
        assert engine.tokens[stopped] == expected[: expected.index(stop) + 1]
        assert engine.tokens[other] == toymodel.reference([5], 20, SPEC)
        await engine.settled()


@pytest.mark.parametrize(
    "asked", [{"logprobs": 2}, {"presence_penalty": 0.5}, {"min_tokens": 3}, {"logit_bias": {5: 1}}]
)
async def test_tokens_that_depend_on_others_come_from_the_loop(asked: dict[str, Any]) -> None:
    async with cluster(1, stepped(), **SMALL) as engine:
        said = onwards(engine)
        await engine.ended(engine.submit([3], max_tokens=5, **asked))
        assert said == []


async def test_a_request_cancelled_on_the_way_gets_no_more_and_gives_everything_back() -> None:
    model = stepped(hold_at=6)
    kind: Any = model.model_class
    async with cluster(1, model, **SMALL) as engine:
        said = onwards(engine)
        doomed, kept = engine.submit([3], max_tokens=50), engine.submit([5], max_tokens=12)
        await engine.until_true(kind.reached.is_set)
        await engine.until(lambda: len(engine.tokens[kept]) == len(engine.tokens[doomed]))
        engine.abort(doomed)
        seen, on_the_way = len(engine.tokens[doomed]), len(said)
        kind.gate.set()
        await engine.ended(doomed, kept)
        assert on_the_way > 0
        assert len(engine.tokens[doomed]) == seen
        assert engine.tokens[kept] == toymodel.reference([5], 12, SPEC)
        await engine.settled()


async def test_a_token_that_is_heard_of_after_its_request_was_cancelled_is_dropped() -> None:
    model = stepped(token_s=0.03)
    kind: Any = model.model_class
    async with cluster(1, model, **SMALL) as engine:
        said = onwards(engine)
        doomed, kept = engine.submit([3], max_tokens=50), engine.submit([5], max_tokens=12)
        await engine.until(lambda: len(said) >= 3)
        await asyncio.sleep(0)
        kind.hold_at = kind.tokens + 1
        assert kind.reached.wait(10)  # the loop stands still: it has not heard of the last token
        seen = len(engine.tokens[doomed])
        engine.abort(doomed)
        kind.gate.set()
        await engine.ended(doomed, kept)
        assert len(engine.tokens[doomed]) == seen
        assert engine.tokens[kept] == toymodel.reference([5], 12, SPEC)
        await engine.settled()


async def test_a_new_request_does_not_wait_for_the_answers_of_others() -> None:
    model = stepped(hold_at=6)
    kind: Any = model.model_class
    async with cluster(1, model, **SMALL) as engine:
        first = engine.submit([3], max_tokens=40)
        await engine.until_true(kind.reached.is_set)
        second = engine.submit([7, 8, 9], max_tokens=4)
        kind.gate.set()
        await engine.ended(second)
        assert first not in engine.end
        await engine.ended(first)
        assert engine.tokens[first] == toymodel.reference([3], 40, SPEC)
        assert engine.tokens[second] == toymodel.reference([7, 8, 9], 4, SPEC)
        await engine.settled()


async def test_a_failure_on_the_way_comes_behind_the_tokens_before_it() -> None:
    async with cluster(1, stepped(fail_at=7), **SMALL) as engine:
        said = onwards(engine)
        request = engine.submit([3], max_tokens=20)
        await engine.ended(request)
        assert said
        assert "broken layer" in engine.message[request]
        assert engine.tokens[request] == toymodel.reference([3], 7, SPEC)
        await engine.settled()


async def test_the_device_is_never_more_than_its_lead_ahead_of_the_loop() -> None:
    model = stepped()
    kind: Any = model.model_class
    async with cluster(1, model, **SMALL) as engine:
        said = onwards(engine)
        request = engine.submit([3], max_tokens=60)
        await engine.until(lambda: len(said) >= 3)
        heard = len(engine.tokens[request])
        time.sleep(0.1)  # noqa: ASYNC251 - the loop stands still
        assert kind.tokens - heard == Herald.LEAD + 1
        await engine.ended(request)
        assert engine.tokens[request] == toymodel.reference([3], 60, SPEC)


async def test_closing_a_rank_stops_what_is_on_its_way() -> None:
    model = stepped()
    kind: Any = model.model_class
    async with cluster(1, model, **SMALL) as engine:
        said = onwards(engine)
        engine.submit([3], max_tokens=200)
        await engine.until(lambda: len(said) >= 3)
    made = kind.tokens
    await asyncio.sleep(0.05)
    assert kind.tokens == made < 100
