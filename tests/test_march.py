"""Ranks that march have the tokens of the way through the queues, and march only where they may."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncmoe import native
from asyncmoe.executor import Executor
from asyncmoe.march import march_bytes
from asyncmoe.messages import Abort, Muster
from asyncmoe.model import Model
from asyncmoe.models.decoder import Decoder
from asyncmoe.sampler import BAD_LOGITS
from tests.checkpoints import FAMILIES, VOCAB, make_checkpoint
from tests.cluster import Cluster, cluster

pytestmark = pytest.mark.skipif(
    native.kernels is None or native.columns is None, reason="nothing is compiled"
)

PROMPTS = [[(11 * i + 17 * j) % (VOCAB - 3) + 3 for j in range(1 + 3 * i)] for i in range(6)]
MOST = (60, 41, 60, 25, 33, 60)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    at = tmp_path_factory.mktemp("march")
    return {family: make_checkpoint(at / family, family) for family in FAMILIES}


@pytest.fixture
def checkpoint(checkpoints: dict[str, Path]) -> Path:
    return checkpoints["qwen3_moe"]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Of each rank in each march: its rows, and steps of them."""
    seen: list[tuple[int, int]] = []
    inner = Decoder.march

    def march(self: Decoder, walk: Any, *others: Any) -> Any:
        before = walk.batch.positions.clone()
        end = inner(self, walk, *others)
        seen.append((len(before), int((walk.batch.positions - before)[:1].sum())))
        return end

    monkeypatch.setattr(Decoder, "march", march)
    return seen


def config(path: Path, transport: str = "inproc", **changes: Any) -> dict[str, dict[str, Any]]:
    """Small blocks, so that rows come to new ones. `changes`: by key with its section."""
    sections: dict[str, dict[str, Any]] = {
        "model": {"name": str(path)},
        "transport": {"name": transport},
        "engine": {"max_requests": 8, "slots": 128, "prefill_chunk": 24},
        "kv": {"blocks": 96, "block_tokens": 8},
    }
    for key, value in changes.items():
        section, name = key.split("__")
        sections.setdefault(section, {})[name] = value
    return sections


async def answers(engine: Cluster, *which: int, **asked: Any) -> list[list[int]]:
    """Of these PROMPTS, all at once."""
    ids = [engine.submit(PROMPTS[i], max_tokens=MOST[i], **asked) for i in which]
    await engine.ended(*ids)
    await engine.settled()
    return [engine.tokens[i] for i in ids]


def marched(engine: Cluster) -> list[int | None]:
    return [rank.stats().get("marches") for rank in engine.ranks]


async def both(ranks: int, *which: int, **sections: Any) -> None:
    """The same tokens with marches and without, one request at a time and all at once."""
    everything = which or range(len(PROMPTS))
    async with cluster(ranks, **sections) as engine:
        found = [await answers(engine, *everything), *[await answers(engine, i) for i in which]]
        counts = marched(engine)
    assert None not in counts
    assert min(count or 0 for count in counts) > 0
    assert len(set(counts)) == 1
    sections["engine"] = sections["engine"] | {"marches": False}
    async with cluster(ranks, **sections) as engine:
        alone = [await answers(engine, *everything), *[await answers(engine, i) for i in which]]
        assert marched(engine) == [None] * ranks
    assert found == alone


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
async def test_a_march_has_the_tokens_of_the_queues(
    checkpoints: dict[str, Path], family: str, dtype: str, steps: list[tuple[int, int]]
) -> None:
    await both(2, **config(checkpoints[family], model__dtype=dtype))
    assert sum(count for _, count in steps) > 60


@pytest.mark.parametrize(
    ("ranks", "transport", "changes"),
    [
        (2, "shm", {}),
        (2, "auto", {"model__dtype": "bfloat16"}),
        (3, "inproc", {"placement__experts_per_rank": [3, 12, 1]}),
        (3, "shm", {"scheduler__name": "mtfs"}),
        (4, "inproc", {"model__quantize": "int8"}),
        (2, "inproc", {"metrics__probe_period_s": 0.01}),
    ],
)
async def test_it_has_so_whatever_the_ranks(
    checkpoint: Path, ranks: int, transport: str, changes: dict[str, Any]
) -> None:
    await both(ranks, **config(checkpoint, transport, **changes))


async def test_numbers_of_marches_go_beyond_32_bits(checkpoint: Path) -> None:
    async with cluster(2, **config(checkpoint)) as engine:
        few = await answers(engine, 0, 2)
        leader: Any = engine.ranks[0]._marches
        assert not leader._leader._called
        leader._leader._number = 2**32 - 2
        assert [await answers(engine, 0, 2) for _ in range(3)] == [few] * 3
        assert leader._number > 2**32
        assert len(set(marched(engine))) == 1


async def test_ranks_without_requests_march_along(
    checkpoint: Path, steps: list[tuple[int, int]]
) -> None:
    await both(3, 0, 2, **config(checkpoint))
    assert {rows for rows, _ in steps} == {0, 1}


async def test_a_march_counts_what_each_rank_computes_for_all(checkpoint: Path) -> None:
    async def spent(marches: bool) -> list[dict[str, Any]]:
        async with cluster(2, **config(checkpoint, engine__marches=marches)) as engine:
            await answers(engine, 0, 2, home=0)
            found = [rank.stats() for rank in engine.ranks]
            request = engine.submit(PROMPTS[4], home=0, max_tokens=400)
            await engine.until(lambda: len(engine.tokens[request]) > 50)
            meanwhile = [rank.stats() for rank in engine.ranks]  # of ranks that march
            await engine.ended(request)
            assert all(
                now["expert_rows"] > was["expert_rows"]
                for now, was in zip(meanwhile, found, strict=True)
            )
            return found

    together, apart = await spent(True), await spent(False)
    for here, there in zip(together, apart, strict=True):
        for name in ("attention_rows", "expert_rows"):
            assert here[name] == there[name]
        assert here["expert_batches"] <= there["expert_batches"]
        assert 0 < here["expert_compute_s"] < here["busy_s"]
        assert here["head_compute_s"] > 0
        assert here["march_wait_s"] > 0
        assert there["march_wait_s"] == 0


async def test_a_request_that_ends_by_a_token_ends_there(checkpoint: Path) -> None:
    async with cluster(2, **config(checkpoint, engine__marches=False)) as engine:
        expected = await answers(engine, 0, 2)
    at = next(i for i in range(20, 60) if expected[0][i] not in expected[0][:i])
    async with cluster(2, **config(checkpoint)) as engine:
        stopped = engine.submit(PROMPTS[0], max_tokens=60, stop_token_ids=[expected[0][at]])
        other = engine.submit(PROMPTS[2], max_tokens=60)
        await engine.ended(stopped, other)
        assert engine.end[stopped] == "stop"
        assert [engine.tokens[stopped], engine.tokens[other]] == [
            expected[0][: at + 1],
            expected[1],
        ]
        assert min(count or 0 for count in marched(engine)) > 1
        await engine.settled()


async def test_a_row_without_usable_logits_ends_a_march_and_fails_alone(
    checkpoint: Path, steps: list[tuple[int, int]]
) -> None:
    async with cluster(2, **config(checkpoint)) as engine:
        told = await answers(engine, *range(len(PROMPTS)))
        poison, bad, good = next(
            (token, i, j)
            for i, j in itertools.permutations(range(len(PROMPTS)), 2)
            for at, token in enumerate(told[i][:-2])
            if at > 8 and token not in [*told[i][:at], *told[j], *PROMPTS[i], *PROMPTS[j]]
        )
        for rank in engine.ranks:
            model: Any = rank.model
            with torch.inference_mode():
                model._embedding[poison] = torch.nan
        steps.clear()
        doomed = engine.submit(PROMPTS[bad], home=0, max_tokens=MOST[bad])
        kept = engine.submit(PROMPTS[good], home=1, max_tokens=MOST[good])
        await engine.ended(doomed, kept)
        assert engine.message[doomed] == BAD_LOGITS
        assert engine.tokens[kept] == told[good]
        assert sum(count for _, count in steps) > 8
        await engine.settled()


@pytest.mark.parametrize(
    ("transport", "changes"),
    [
        ("tcp", {}),
        ("impaired:inproc", {}),
        ("inproc", {"engine__combine": "per_expert"}),
        ("inproc", {"scheduler__name": "lockstep"}),
        ("inproc", {"scheduler__name": "two_batch"}),
        ("inproc", {"placement__roles": ["both", "expert"]}),
    ],
)
async def test_where_there_is_another_way_to_go_nobody_marches(
    checkpoint: Path, transport: str, changes: dict[str, Any]
) -> None:
    async with cluster(2, **config(checkpoint, transport, **changes)) as engine:
        assert all(await answers(engine, 0, 1))
        assert marched(engine) == [None, None]


async def test_models_that_do_not_walk_do_not_march(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Decoder, "walks", Model.walks)
    async with cluster(2, **config(checkpoint)) as engine:
        assert all(await answers(engine, 0, 1))
        assert marched(engine) == [None, None]


@pytest.mark.parametrize(
    "asked", [{"temperature": 0.7, "seed": 3}, {"logprobs": 2}, {"presence_penalty": 0.5}]
)
async def test_tokens_that_somebody_has_to_decide_about_come_through_the_queues(
    checkpoint: Path, asked: dict[str, Any]
) -> None:
    async with cluster(2, **config(checkpoint, engine__marches=False)) as engine:
        expected = await answers(engine, 0)
    async with cluster(2, **config(checkpoint)) as engine:
        other = engine.submit(PROMPTS[1], max_tokens=200, **asked)
        assert await asyncio.wait_for(first(engine, 0), 60) == expected[0]
        assert marched(engine) == [0, 0]
        engine.abort(other)
        await engine.settled()


async def first(engine: Cluster, which: int) -> list[int]:
    request = engine.submit(PROMPTS[which], max_tokens=MOST[which])
    await engine.ended(request)
    return engine.tokens[request]


async def test_requests_come_and_go_while_others_march(
    checkpoint: Path, steps: list[tuple[int, int]]
) -> None:
    async with cluster(2, **config(checkpoint, engine__marches=False)) as engine:
        expected = await answers(engine, *range(len(PROMPTS)))
    chance = random.Random(5)
    async with cluster(2, **config(checkpoint)) as engine:
        kept: dict[int, int] = {}
        for _ in range(60):
            which = chance.randrange(len(PROMPTS))
            request = engine.submit(PROMPTS[which], max_tokens=MOST[which])
            if chance.random() < 0.3:
                await asyncio.sleep(chance.random() * 0.01)
                engine.abort(request)
            else:
                kept[request] = which
            await asyncio.sleep(chance.random() * 0.02)
        await engine.ended(*kept)
        await engine.settled()
        assert {i: engine.tokens[i] for i in kept} == {
            i: expected[which] for i, which in kept.items()
        }
        for rank in engine.ranks:
            assert rank.stats()["running_requests"] == 0
            assert rank.stats()["free_kv_blocks"] == rank.stats()["kv_blocks"]
    assert sum(count for _, count in steps) > 200


async def test_a_march_whose_requests_leave_before_it_begins_ends_at_once(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner, aborted = Executor.march, set[int]()

    async with cluster(2, **config(checkpoint)) as engine:

        def march(self: Executor, take: Any, together: Any) -> None:
            rank = engine.ranks[request % 2]
            if self is rank.executor and request not in aborted:
                aborted.add(request)
                asyncio.get_running_loop().call_soon(rank._handle, 0, Abort(request))
            inner(self, take, together)

        monkeypatch.setattr(Executor, "march", march)
        for request in range(4):
            assert engine.submit(PROMPTS[2], home=request % 2, max_tokens=60) == request
            await engine.ended(request)
            assert engine.end[request] == "aborted"
            await engine.settled()
            await engine.until_true(lambda: not any(r.executor.computing for r in engine.ranks))


async def test_rows_that_were_kept_back_go_on_when_the_march_is_cancelled(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(2, **config(checkpoint)) as engine:
        leader, rank = engine.ranks[0]._marches, engine.ranks[1]
        assert leader is not None
        monkeypatch.setattr(leader, "_send", lambda to, message: None)  # neither call nor go
        request = engine.submit(PROMPTS[2], home=1, max_tokens=400)
        await engine.until(lambda: len(engine.tokens[request]) > 4)
        marches: Any = rank._marches
        rank._handle(0, Muster("call", 1))
        await engine.until_true(lambda: len(marches._kept) == 1)
        await asyncio.sleep(0.05)  # nothing else wakes the rank
        rank._handle(0, Muster("cancel", 1))
        await asyncio.wait_for(engine.ended(request), 20)
        assert len(engine.tokens[request]) == 400
        assert marched(engine) == [0, 0]


async def test_a_march_that_fails_on_one_rank_is_broken_off_by_all(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = Decoder.march

    def fail(self: Decoder, walk: Any, cache: Any, local: Any, fellows: Any, *others: Any) -> Any:
        if fellows.rank == 1 and others[0] == 1:
            raise RuntimeError("a rank out of step")
        return inner(self, walk, cache, local, fellows, *others)

    monkeypatch.setattr(Decoder, "march", fail)
    async with cluster(2, **config(checkpoint)) as engine:
        doomed = engine.submit(PROMPTS[1], home=1, max_tokens=60)
        other = engine.submit(PROMPTS[2], home=0, max_tokens=30)
        await engine.ended(doomed, other)
        assert engine.end[doomed] == "failed"
        assert "out of step" in engine.message[doomed]
        assert len(engine.tokens[other]) == 30


@pytest.mark.parametrize(
    ("rows", "expert", "says"),
    [
        (2**40, 0, "more rows than its memory has"),
        (9, 0, "more rows than its memory has"),
        (1, 16, "an expert is not on this rank"),
        (1, -1, "an expert is not on this rank"),
        (8, 2**62, "an expert is not on this rank"),
    ],
)
async def test_what_a_rank_finds_in_the_memory_of_another_is_checked(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, rows: int, expert: int, says: str
) -> None:
    inner = Decoder.march

    def march(
        self: Decoder, walk: Any, cache: Any, local: Any, fellows: Any, number: int, tally: Any
    ) -> Any:
        if fellows.rank == 0:
            return inner(self, walk, cache, local, fellows, number, tally)
        half = fellows._commons[0].mine.cast("Q")
        half[2], half[3], half[0] = rows, 0, (number << 24) + 1  # rows, goes on, first note
        choices = (64 + 8 * 256) // 8  # behind 8 rows of hidden 64, float32
        half[choices : choices + 32] = (
            memoryview(np.full(32, expert, np.int64).view(np.uint64)).cast("B").cast("Q")
        )
        half[0] += 1
        theirs = fellows._commons[0].theirs.cast("Q")
        for _ in range(2000):
            if theirs[1] == number:  # it has left
                break
            time.sleep(0.005)
        return 0, 0, False

    monkeypatch.setattr(Decoder, "march", march)
    async with cluster(2, **config(checkpoint)) as engine:
        doomed = engine.submit(PROMPTS[1], home=0, max_tokens=60)
        other = engine.submit(PROMPTS[2], home=1, max_tokens=30)
        await engine.ended(doomed, other)
        assert says in engine.message[doomed]
        assert len(engine.tokens[other]) == 30


def test_memory_for_a_march_holds_its_columns() -> None:
    # a head, hidden states, sums, experts and weights, each from a cache line of its own on
    assert march_bytes(1, 2, 1) == 64 * 5
    assert march_bytes(8, 1024, 4) == 64 + 2 * 8192 + 8 * 4 * 8 + 8 * 4 * 4
    assert march_bytes(256, 8192, 8) == 64 + 2 * 256 * 8192 + 256 * 8 * 12
