"""Walks: decode steps in one compiled call have the tokens of the stages one by one."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncmoe import native
from asyncmoe.herald import Herald
from asyncmoe.model import Model
from asyncmoe.models.decoder import Decoder
from asyncmoe.sampler import BAD_LOGITS
from tests.checkpoints import VOCAB, make_checkpoint
from tests.cluster import Cluster, cluster

pytestmark = pytest.mark.skipif(
    native.kernels is None or native.columns is None, reason="nothing is compiled"
)

PROMPTS = [[(11 * i + 17 * j) % (VOCAB - 3) + 3 for j in range(1 + 3 * i)] for i in range(5)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("walk"), "qwen3_moe")


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Rows and tokens of each walk."""
    seen: list[tuple[int, int]] = []
    inner = Decoder.walk

    def walk(self: Decoder, walk: Any, cache: Any, local: Any) -> Any:
        before = walk.batch.positions.clone()
        end = inner(self, walk, cache, local)
        seen.append((len(before), int((walk.batch.positions - before)[0])))
        return end

    monkeypatch.setattr(Decoder, "walk", walk)
    return seen


def config(path: Path) -> dict[str, dict[str, Any]]:
    """Small blocks, so that rows come to new ones."""
    return {
        "model": {"name": str(path)},
        "engine": {"max_requests": 8, "slots": 128, "prefill_chunk": 24},
        "kv": {"blocks": 64, "block_tokens": 8},
    }


async def answers(engine: Cluster, *max_tokens: int, **asked: Any) -> list[list[int]]:
    """Of PROMPTS, all at once."""
    asking = zip(PROMPTS, max_tokens, strict=False)
    ids = [engine.submit(prompt, max_tokens=most, **asked) for prompt, most in asking]
    await engine.ended(*ids)
    await engine.settled()
    return [engine.tokens[i] for i in ids]


async def test_a_walk_has_the_tokens_of_the_stages_one_by_one(
    checkpoint: Path, walks: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(1, **config(checkpoint)) as engine:
        walked = await answers(engine, 40, 33, 40, 21, 40)
        alone = await answers(engine, 60)
    steps = sum(tokens for _, tokens in walks)
    assert {rows for rows, _ in walks} >= {1, 3}
    monkeypatch.setattr(Decoder, "walks", Model.walks)
    async with cluster(1, **config(checkpoint)) as engine:
        assert walked == await answers(engine, 40, 33, 40, 21, 40)
        assert alone == await answers(engine, 60)
    assert steps > 40
    assert sum(tokens for _, tokens in walks) == steps


async def test_a_walk_counts_the_stages_that_it_passes(
    checkpoint: Path, walks: list[tuple[int, int]]
) -> None:
    async with cluster(1, **config(checkpoint)) as engine:
        await answers(engine, 30)
        values, decisions = engine.ranks[0].times.values(), engine.ranks[0].queues.decision
    assert walks
    assert values["head_batches"] == values["head_rows"] == 30
    assert values["attention_batches"] == values["expert_batches"] == 30 * 4
    assert decisions == 30 * 9
    assert min(values[f"{kind}_compute_s"] for kind in ("attention", "expert", "head")) > 0


async def test_a_walk_ends_with_the_token_that_ends_a_request(
    checkpoint: Path, walks: list[tuple[int, int]]
) -> None:
    async with cluster(1, **config(checkpoint)) as engine:
        (whole,) = await answers(engine, 60)
        stop = next(t for i, t in enumerate(whole) if i > 8 and t not in whole[:i])
        (ended,) = await answers(engine, 60, stop_token_ids=[VOCAB - 1, stop])
        assert ended == whole[: whole.index(stop) + 1]
        assert list(engine.end.values()) == ["length", "stop"]
    assert len(walks) >= 2


async def test_a_loop_that_stands_still_is_led_by_so_many_tokens_and_hears_them_all(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner, begun, leads = Decoder.walk, list[Any](), list[int]()

    def walk(self: Decoder, walk: Any, cache: Any, local: Any) -> Any:
        begun.append(walk)
        return inner(self, walk, cache, local)

    async with cluster(1, **config(checkpoint)) as engine:
        (whole,) = await answers(engine, 60)
        monkeypatch.setattr(Decoder, "walk", walk)
        request = engine.submit(PROMPTS[0], max_tokens=60)
        while request not in engine.end:
            before = len(engine.tokens[request])
            await engine.until(lambda seen=before: len(engine.tokens[request]) > seen)
            time.sleep(0.03)  # noqa: ASYNC251
            leads += [int(each.counts[0] - each.counts[1]) for each in begun[-1:]]
        assert engine.tokens[request] == whole
    assert max(leads) == Herald.LEAD


async def test_a_request_cancelled_in_a_walk_gives_everything_back(
    checkpoint: Path, walks: list[tuple[int, int]]
) -> None:
    async with cluster(1, **config(checkpoint)) as engine:
        (whole,) = await answers(engine, 60)
        doomed, kept = (engine.submit(PROMPTS[0], max_tokens=n) for n in (400, 60))
        await engine.until(lambda: len(engine.tokens[doomed]) >= 20)
        engine.abort(doomed)
        await engine.ended(doomed, kept)
        await engine.settled()
        assert engine.tokens[kept] == whole
        assert engine.end[doomed] == "aborted"
    assert walks


async def test_a_row_without_usable_logits_ends_a_walk_and_fails_alone(
    checkpoint: Path, walks: list[tuple[int, int]]
) -> None:
    async with cluster(1, **config(checkpoint)) as engine:
        told = await answers(engine, *[50] * 5)
        poison, bad, good = next(
            (token, i, j)
            for i, j in itertools.permutations(range(5), 2)
            for at, token in enumerate(told[i][:-2])
            if at > 8 and token not in [*told[i][:at], *told[j], *PROMPTS[i], *PROMPTS[j]]
        )
        model: Any = engine.ranks[0].model
        with torch.inference_mode():
            model._embedding[poison] = torch.nan
        walks.clear()
        doomed, kept = (engine.submit(PROMPTS[i], max_tokens=50) for i in (bad, good))
        await engine.ended(doomed, kept)
        assert engine.message[doomed] == BAD_LOGITS
        assert engine.tokens[doomed] == told[bad][: told[bad].index(poison) + 1]
        assert engine.tokens[kept] == told[good]
        await engine.settled()
    assert walks


@pytest.fixture(params=[] if native.kernels is None else native.kernels.isas())
def isa(request: pytest.FixtureRequest) -> Iterator[None]:
    before = native.kernels.isa()
    native.kernels.use_isa(request.param)
    yield
    native.kernels.use_isa(before)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("count", [1, 31, 97, 384, 2048, 2049, 5000])
def test_the_likeliest_is_that_of_numpy(count: int) -> None:
    generator = np.random.default_rng(count)
    for spread in (0.0, 1.0, 100.0):
        x = np.round(generator.standard_normal(count) * spread).astype(np.float32)
        assert native.kernels.likeliest(x.ctypes.data, count) == x.argmax()
        for bad in (np.nan, np.inf):
            x[generator.integers(count)] = bad
            assert native.kernels.likeliest(x.ctypes.data, count) == -1
        x = np.full(count, -np.inf, np.float32)
        assert native.kernels.likeliest(x.ctypes.data, count) == -1
        x[count // 2] = -3
        assert native.kernels.likeliest(x.ctypes.data, count) == count // 2
