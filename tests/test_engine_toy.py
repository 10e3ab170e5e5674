"""The engine on the integer-exact toy model: tokens are right bit for bit, and nothing is left."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import numpy as np
import pytest

from asyncmoe import native
from asyncmoe.errors import AsyncMoeError
from asyncmoe.registry import names
from tests import toymodel
from tests.cluster import cluster

SMALL: dict[str, dict[str, Any]] = {
    "engine": {"prefill_chunk": 8, "max_requests": 8, "slots": 48},
    "kv": {"blocks": 64, "block_tokens": 4},
    "scheduler": {"name": "defrag_aging"},
}
PROMPTS = [[(3 * i + 7 * j) % 97 for j in range(1 + 5 * i)] for i in range(10)]


def sections(**changes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """SMALL with some keys changed."""
    return {name: {**SMALL.get(name, {}), **changes.get(name, {})} for name in {*SMALL, *changes}}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("combine", ["per_rank", "per_expert"])
@pytest.mark.parametrize("transport", ["inproc", "tcp", "gloo", "shm", "auto"])
async def test_tokens_are_exact_over_ranks_and_parts(
    ranks: int, combine: str, transport: str
) -> None:
    config = sections(engine={"combine": combine}, transport={"name": transport})
    async with cluster(ranks, toymodel.checkpoint(), **config) as engine:
        ids = [engine.submit(prompt, max_tokens=6) for prompt in PROMPTS]
        await engine.ended(*ids)
        for request_id, prompt in zip(ids, PROMPTS, strict=True):
            assert engine.tokens[request_id] == toymodel.reference(prompt, 6, toymodel.spec())
        await engine.settled()


@pytest.mark.parametrize(
    "options", [{}, {"jitter_ms": 2, "reorder": 0.2, "duplicate": 0.2, "mbit_per_s": 100}]
)
async def test_tokens_are_exact_over_bad_links(options: dict[str, Any]) -> None:
    config = sections(transport={"name": "impaired:tcp", "options": options})
    async with cluster(3, toymodel.checkpoint(), **config) as engine:
        ids = [engine.submit(prompt, max_tokens=6) for prompt in PROMPTS]
        await engine.ended(*ids)
        for request_id, prompt in zip(ids, PROMPTS, strict=True):
            assert engine.tokens[request_id] == toymodel.reference(prompt, 6, toymodel.spec())
        await engine.settled()


@pytest.mark.parametrize("combine", ["per_rank", "per_expert"])
async def test_tokens_are_exact_without_the_compiled_columns(
    combine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "columns", None)
    config = sections(engine={"combine": combine}, transport={"name": "tcp"})
    async with cluster(3, toymodel.checkpoint(), **config) as engine:
        ids = [engine.submit(prompt, max_tokens=6) for prompt in PROMPTS]
        await engine.ended(*ids)
        for request_id, prompt in zip(ids, PROMPTS, strict=True):
            assert engine.tokens[request_id] == toymodel.reference(prompt, 6, toymodel.spec())
        await engine.settled()


@pytest.mark.parametrize("scheduler", names("schedulers"))
async def test_tokens_are_exact_under_every_scheduler(scheduler: str) -> None:
    config = sections(scheduler={"name": scheduler}, batch={"attention_max_rows": 8})
    async with cluster(2, toymodel.checkpoint(), **config) as engine:
        ids = [engine.submit(prompt, max_tokens=6) for prompt in PROMPTS]
        await engine.ended(*ids)
        for request_id, prompt in zip(ids, PROMPTS, strict=True):
            assert engine.tokens[request_id] == toymodel.reference(prompt, 6, toymodel.spec())


async def test_one_credit_is_enough() -> None:
    config = sections(transport={"window_rows": 1})
    async with cluster(3, toymodel.checkpoint(), **config) as engine:
        ids = [engine.submit(prompt, max_tokens=4) for prompt in PROMPTS]
        await engine.ended(*ids)
        for request_id, prompt in zip(ids, PROMPTS, strict=True):
            assert engine.tokens[request_id] == toymodel.reference(prompt, 4, toymodel.spec())
        await engine.settled()


async def test_model_that_needs_all_rows_at_the_head_gets_them_in_order() -> None:
    async with cluster(2, toymodel.checkpoint(finishing=True), **SMALL) as engine:
        ids = [engine.submit(prompt, max_tokens=4) for prompt in PROMPTS]
        await engine.ended(*ids)
        for request_id, prompt in zip(ids, PROMPTS, strict=True):
            assert engine.tokens[request_id] == toymodel.reference(prompt, 4, toymodel.spec())
        await engine.settled()


@pytest.mark.parametrize("ranks", [1, 3])
async def test_cancelled_requests_leave_nothing_and_disturb_nobody(ranks: int) -> None:
    async with cluster(ranks, toymodel.checkpoint(), **SMALL) as engine:
        doomed = [engine.submit(prompt, max_tokens=60) for prompt in PROMPTS]
        kept = [engine.submit(prompt, max_tokens=6) for prompt in PROMPTS]
        for request_id in doomed:
            engine.abort(request_id)
            await engine.until(lambda request_id=request_id: request_id in engine.end)
        await engine.ended(*kept)
        assert {engine.end[i] for i in doomed} == {"aborted"}
        for request_id, prompt in zip(kept, PROMPTS, strict=True):
            assert engine.tokens[request_id] == toymodel.reference(prompt, 6, toymodel.spec())
        await engine.settled()


async def test_request_that_can_never_fit_is_refused_with_the_numbers() -> None:
    async with cluster(1, toymodel.checkpoint(), **sections(kv={"blocks": 4})) as engine:
        refused = engine.submit([1] * 20, max_tokens=5)
        beyond = engine.submit([1] * 600, max_tokens=5)
        stranger = engine.submit([1, 97], max_tokens=5)
        fits = engine.submit([1] * 12, max_tokens=5)
        await engine.ended(refused, beyond, stranger, fits)
        assert "need 6 KV blocks of 4 tokens; the pool has 4" in engine.message[refused]
        assert "600 tokens; the context is 512 tokens" in engine.message[beyond]
        assert "token id 97: the vocabulary has ids 0 to 96" in engine.message[stranger]
        assert engine.end[fits] == "length"
        await engine.settled()


async def test_attention_and_expert_roles_work_apart() -> None:
    config = sections(placement={"roles": ["attention", "expert", "both"]})
    async with cluster(3, toymodel.checkpoint(), **config) as engine:
        ids = [engine.submit(prompt, max_tokens=6) for prompt in PROMPTS]
        await engine.ended(*ids)
        for request_id, prompt in zip(ids, PROMPTS, strict=True):
            assert engine.tokens[request_id] == toymodel.reference(prompt, 6, toymodel.spec())
        assert engine.ranks[1].home is None
        await engine.settled()


async def test_requests_fail_by_name_when_a_rank_with_experts_is_lost() -> None:
    async with cluster(3, toymodel.checkpoint(), **SMALL) as engine:
        ids = [engine.submit([1, 2, 3], home=home, max_tokens=100) for home in (0, 1)]
        await engine.until(lambda: all(engine.tokens[i] for i in ids))
        engine.ranks[2].transport.abort()  # type: ignore[attr-defined]
        await engine.ended(*ids)
        assert [engine.end[i] for i in ids] == ["failed", "failed"]
        assert all("rank 2 is lost" in engine.message[i] for i in ids)
        assert set(engine.unable) == {0, 1}


class _Deaf(np.ndarray[Any, Any]):
    """A column that stays as it is."""

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


async def test_fault_while_rows_are_taken_in_ends_the_rank_and_its_requests() -> None:
    apart = {"placement": {"roles": ["expert", "attention"], "experts_per_rank": [6, 0]}}
    async with cluster(2, toymodel.checkpoint(), **SMALL, **apart) as engine:
        broken = engine.ranks[1]
        assert broken.home is not None
        table = broken.home.table
        table.chunk.fill(1 << 30)  # for good: there is no such chunk
        table.chunk = table.chunk.view(_Deaf)
        engine.submit([1, 2, 3], home=1, max_tokens=100)
        with pytest.raises(AsyncMoeError, match="failed on a parcel of rank 0"):
            await asyncio.wait_for(broken.stopped, 10)


@pytest.mark.parametrize("transport", ["inproc", "tcp", "shm"])
async def test_a_rank_that_was_closed_goes_away_with_all_of_its_parts(transport: str) -> None:
    config = {**SMALL, "transport": {"name": transport}}
    async with cluster(2, toymodel.checkpoint(), **config) as engine:
        await engine.ended(engine.submit([1, 2, 3], home=1, max_tokens=4))
        ranks = [weakref.ref(rank) for rank in engine.ranks]
    del engine
    await asyncio.sleep(0)
    gc.collect()
    assert [rank() for rank in ranks] == [None, None]


async def test_caches_are_freed_at_the_end_without_the_garbage_collector() -> None:
    gc.disable()
    try:
        async with cluster(1, toymodel.checkpoint(), **SMALL) as engine:
            (keys,) = {weakref.ref(layer["k"]) for layer in engine.ranks[0]._cache[:1]}
            await engine.ended(engine.submit([1, 2, 3], max_tokens=4))
            assert keys() is not None
        assert keys() is None
    finally:
        gc.enable()


async def test_request_over_its_time_ends_by_name_and_leaves_nothing() -> None:
    config = sections(engine={"request_timeout_s": 0.05})
    async with cluster(2, toymodel.checkpoint(toymodel.spec(context=4096)), **config) as engine:
        slow = engine.submit([1, 2, 3], max_tokens=200)
        await engine.ended(slow)
        assert engine.end[slow] == "failed"
        assert "engine.request_timeout_s = 0.05" in engine.message[slow]
        await engine.settled()


async def test_request_beyond_the_waiting_queue_is_told_to_come_later() -> None:
    config = sections(engine={"queue_requests": 1}, kv={"blocks": 8})
    async with cluster(1, toymodel.checkpoint(), **config) as engine:
        ids = [engine.submit([1, 2, 3], max_tokens=25) for _ in range(3)]
        await engine.ended(*ids)
        assert [engine.end[i] for i in ids] == ["length", "length", "overloaded"]


async def test_not_finite_values_end_their_request_alone_and_leave_the_cache() -> None:
    async with cluster(1, toymodel.checkpoint(poisoned=True), **SMALL) as engine:
        bad = engine.submit([1, toymodel.PoisonedToyModel.POISON, 2], max_tokens=4)
        good = engine.submit([1, 2, 3], max_tokens=4)
        await engine.ended(bad, good)
        assert engine.end[bad] == "failed"
        assert "not finite" in engine.message[bad]
        assert engine.tokens[good] == toymodel.reference([1, 2, 3], 4, toymodel.spec())
        assert not any(layer["k"].isnan().any() for layer in engine.ranks[0]._cache)
        await engine.settled()
