"""The engine against `transformers` on the same checkpoint: equal greedy tokens, whatever runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncmoe import native
from tests.checkpoints import FAMILIES, VOCAB, make_checkpoint, reference_greedy
from tests.cluster import cluster

NEW_TOKENS = 6
PROMPTS = [[(11 * i + 17 * j) % (VOCAB - 3) + 3 for j in range(1 + 2 * i)] for i in range(32)]
# (ranks, transport, scheduler, combine): every value of each, and every rank count on both
# transports, without the whole product
SETTINGS = [
    (1, "inproc", "defrag_aging", "per_rank"),
    (1, "inproc", "mtfs", "per_expert"),
    (2, "inproc", "flfs", "per_rank"),
    (2, "tcp", "defrag_aging", "per_expert"),
    (2, "shm", "defrag_aging", "per_rank"),
    (3, "tcp", "defrag", "per_rank"),
    (3, "shm", "flfs", "per_expert"),
    (3, "inproc", "mtfs", "per_expert"),
    (1, "inproc", "lockstep", "per_rank"),
    (2, "tcp", "lockstep", "per_expert"),
    (2, "shm", "two_batch", "per_rank"),
    (3, "inproc", "two_batch", "per_expert"),
    (4, "tcp", "defrag_cyclic", "per_rank"),
    (4, "inproc", "defrag_aging", "per_expert"),
]


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random checkpoint of one family."""
    return make_checkpoint(tmp_path_factory.mktemp("parity") / request.param, request.param)


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[list[int]]:
    """What `transformers` answers to PROMPTS."""
    return reference_greedy(checkpoint, PROMPTS, NEW_TOKENS)


async def answers(
    prompts: list[list[int]], one_by_one: bool, ranks: int, **sections: dict[str, Any]
) -> list[list[int]]:
    """Greedy tokens after each prompt, all at once or one request at a time."""
    async with cluster(ranks, **sections) as engine:
        ids = []
        for prompt in prompts:
            ids.append(engine.submit(prompt, max_tokens=NEW_TOKENS))
            if one_by_one:
                await engine.ended(ids[-1])
        await engine.ended(*ids)
        await engine.settled()
        return [engine.tokens[i] for i in ids]


def config(path: Path, transport: str, scheduler: str, combine: str) -> dict[str, dict[str, Any]]:
    """Small chunks, so that prompts go through the layers in several."""
    return {
        "model": {"name": str(path)},
        "transport": {"name": transport},
        "scheduler": {"name": scheduler},
        "engine": {"combine": combine, "prefill_chunk": 24, "max_requests": 48, "slots": 256},
        "kv": {"memory_gib": 0.05},
    }


@pytest.mark.parametrize(("ranks", "transport", "scheduler", "combine"), SETTINGS)
async def test_a_batch_of_32_gives_the_tokens_of_transformers(
    checkpoint: Path,
    expected: list[list[int]],
    ranks: int,
    transport: str,
    scheduler: str,
    combine: str,
) -> None:
    sections = config(checkpoint, transport, scheduler, combine)
    assert await answers(PROMPTS, False, ranks, **sections) == expected


@pytest.mark.parametrize("ranks", [1, 2])
async def test_requests_one_by_one_give_the_same_tokens(
    checkpoint: Path, expected: list[list[int]], ranks: int
) -> None:
    some = slice(0, 32, 7)
    sections = config(checkpoint, "inproc", "defrag_aging", "per_rank")
    assert await answers(PROMPTS[some], True, ranks, **sections) == expected[some]


@pytest.mark.parametrize("ranks", [1, 3])
async def test_without_compiled_kernels_the_tokens_are_the_same(
    checkpoint: Path, expected: list[list[int]], ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "kernels", None)
    some = slice(0, 32, 5)
    sections = config(checkpoint, "inproc", "defrag_aging", "per_rank")
    assert await answers(PROMPTS[some], False, ranks, **sections) == expected[some]


@pytest.mark.parametrize("ranks", [1, 3])
async def test_dense_layers_before_between_and_after_the_moe_layers(
    tmp_path: Path, ranks: int
) -> None:
    path = make_checkpoint(
        tmp_path, "qwen3_moe", num_hidden_layers=5, mlp_only_layers=[0, 2, 4], sliding_window=16,
        use_sliding_window=True, max_window_layers=0,
    )  # fmt: skip
    prompts = PROMPTS[:12]
    sections = config(path, "inproc", "defrag_aging", "per_rank")
    assert await answers(prompts, False, ranks, **sections) == reference_greedy(
        path, prompts, NEW_TOKENS
    )
