"""The start of a rank ends when it is told to, and within one deadline for all of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from asyncmoe.checkpoint import Checkpoint, WeightSource
from asyncmoe.config import Config
from asyncmoe.deadline import Deadline
from asyncmoe.directory import MemoryDirectory
from asyncmoe.errors import CheckpointError, ConfigError
from asyncmoe.model import LoadPlan, ModelSpec
from asyncmoe.rank import Rank
from asyncmoe.world import World
from tests import toymodel

READ_S = 0.02


class Slow(toymodel.ToyModel):
    """A model of `config["tensors"]` parameters that take `READ_S` each."""

    @classmethod
    def load(
        cls,
        config: Mapping[str, Any],
        spec: ModelSpec,
        source: WeightSource,
        plan: LoadPlan,
        device: torch.device,
    ) -> Slow:
        for number in range(config["tensors"]):
            time.sleep(READ_S)
            source.read(f"w{number}", (2, 2))
        return cls(spec, plan)


def slow(load_s: float) -> Checkpoint:
    """A checkpoint that takes about so long to load."""
    config = {"tensors": round(load_s / READ_S)}
    return replace(toymodel.checkpoint(), model_class=Slow, config=config)


def rank_of(
    checkpoint: Checkpoint, start_timeout_s: float, ranks: int = 1, **sections: Any
) -> Rank:
    """Rank 0, whose peers never come."""
    cluster = {"ranks": ranks, "token": "t", "start_timeout_s": start_timeout_s}
    config = Config.model_validate({"cluster": cluster, **sections})
    return Rank(config, World(0, ranks, 0, ranks), MemoryDirectory(), checkpoint)


async def test_a_start_that_is_cancelled_while_weights_load_ends_at_once() -> None:
    checkpoint = slow(load_s=20)
    starting = asyncio.create_task(rank_of(checkpoint, 60).start())
    await asyncio.sleep(0.1)
    begin_s = time.monotonic()

    starting.cancel()
    await asyncio.wait([starting])

    assert starting.cancelled()
    assert time.monotonic() - begin_s < 1.0
    with pytest.raises(CheckpointError, match="given up"):
        checkpoint.source.read("w", (2, 2))


async def test_a_rank_that_is_closed_while_it_loads_ends_at_once() -> None:
    rank = rank_of(slow(load_s=20), 60)
    starting = asyncio.create_task(rank.start())
    await asyncio.sleep(0.1)
    begin_s = time.monotonic()

    await rank.close()

    with pytest.raises(CheckpointError, match="given up"):
        await starting
    assert time.monotonic() - begin_s < 1.0


async def test_tables_that_no_memory_holds_are_refused_by_name() -> None:
    rank = rank_of(slow(load_s=0), 60, kv={"blocks": 1 << 50})

    with pytest.raises(ConfigError, match=r"no memory for the rank's tables .*kv\.blocks = 11258"):
        await rank.start()


async def test_loading_counts_as_start_up_time() -> None:
    begin_s = time.monotonic()

    with pytest.raises(TimeoutError, match=r"not loaded the model after .*start_timeout_s, 0\.3 s"):
        await rank_of(slow(load_s=20), start_timeout_s=0.3).start()

    assert time.monotonic() - begin_s < 1.5


async def test_connecting_has_what_loading_has_left_of_the_time() -> None:
    begin_s = time.monotonic()

    with pytest.raises(TimeoutError, match=r"no connection to ranks \[1\]"):
        await rank_of(slow(load_s=1.0), start_timeout_s=1.6, ranks=2).start()

    assert 1.5 < time.monotonic() - begin_s < 2.3  # 2.6 if each had all of it


async def test_a_start_up_that_began_earlier_ends_as_much_earlier() -> None:
    deadline = Deadline(0.2)
    await asyncio.sleep(0.1)
    begin_s = time.monotonic()

    with pytest.raises(TimeoutError, match=r"0\.2 s"):
        await rank_of(slow(load_s=20), start_timeout_s=60).start(deadline)

    assert time.monotonic() - begin_s < 1.2
