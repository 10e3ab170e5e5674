"""Ranks that would not compute the same refuse to start, and say what differs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from asyncmoe import agreement
from asyncmoe.agreement import agree
from asyncmoe.checkpoint import SafetensorsSource, open_checkpoint
from asyncmoe.config import Config
from asyncmoe.directory import MemoryDirectory
from asyncmoe.errors import ConfigError, ProtocolError
from asyncmoe.placement import make_placement
from asyncmoe.rank import Rank
from asyncmoe.world import World
from tests import toymodel

Sections = Mapping[str, Mapping[str, Any]]


def marks_of(ranks: int = 2, **sections: Mapping[str, Any]) -> dict[str, str]:
    config = Config.model_validate(sections)
    checkpoint = open_checkpoint(config.model)
    spec = checkpoint.spec
    placement = make_placement(config.placement, ranks, len(spec.moe_layers), spec.experts)
    return agreement.fingerprint(config, spec, checkpoint, placement)


@pytest.mark.parametrize(
    ("sections", "names"),
    [
        ({"engine": {"combine": "per_expert"}}, "engine.combine"),
        ({"engine": {"slots": 4096}}, "engine.slots"),
        ({"kv": {"blocks": 7}}, "kv.blocks"),
        ({"transport": {"window_rows": 7}}, "transport.window_rows"),
        ({"transport": {"name": "other"}}, "transport.name"),
        ({"placement": {"experts_per_rank": [10, 6]}}, "placement (owner of each expert)"),
        ({"placement": {"roles": ["both", "expert"]}}, "placement.roles"),
        ({"scheduler": {"name": "two_batch"}}, "scheduler.name"),
        ({"scheduler": {"name": "mtfs"}}, "scheduler.name"),
        ({"scheduler": {"parameters": {"patience": 9}}}, "scheduler.parameters.patience"),
        ({"model": {"load_format": "dummy"}}, "model.name's weights"),
        ({"model": {"dtype": "bfloat16"}}, "the model's dtype"),
        ({"model": {"context": 64}}, "the model's context"),
    ],
)
async def test_the_first_rank_that_differs_names_the_key_and_both_values(
    sections: Sections, names: str
) -> None:
    mine = marks_of(model={"dtype": "float32"})
    theirs = marks_of(**{"model": {"dtype": "float32"}, **sections})
    directory = MemoryDirectory()
    await agree(directory, 0, 2, mine, 1.0)

    with pytest.raises(ConfigError) as caught:
        await agree(directory, 1, 2, theirs, 1.0)

    said = f"{names} is {theirs[names]} on rank 1 and {mine[names]} on rank 0"
    assert said in str(caught.value)


async def test_what_is_a_ranks_own_business_may_differ() -> None:
    mine = marks_of()
    theirs = marks_of(
        device={"threads": 3}, log={"level": "debug"}, server={"port": 1},
        transport={"options": {"advertise_host": "here"}}, cluster={"bind_host": "127.0.0.2"},
        batch={"attention_max_rows": 64},
    )  # fmt: skip
    directory = MemoryDirectory()

    await agree(directory, 0, 2, mine, 1.0)
    await agree(directory, 1, 2, theirs, 1.0)


async def test_a_rank_alone_tells_nobody() -> None:
    directory = MemoryDirectory()

    await agree(directory, 0, 1, {"a": "b"}, 1.0)

    with pytest.raises(TimeoutError):
        await directory.lookup("config/0", 0.01)


async def test_something_else_in_the_directory_is_refused() -> None:
    directory = MemoryDirectory()
    for text in ("{", "[1]"):
        directory.publish("config/0", text)
        with pytest.raises(ProtocolError, match="config/0"):
            await agree(directory, 1, 2, {"a": "b"}, 1.0)


def test_checkpoints_of_one_shape_with_other_numbers_differ(tmp_path: Path) -> None:
    sources = []
    for name, fill in (("a", 1.0), ("b", 2.0), ("c", 1.0)):
        (tmp_path / name).mkdir()
        weights = {f"w{i}": torch.full((400, 40), fill) for i in range(2)}
        save_file(weights, tmp_path / name / "model.safetensors")
        sources.append(SafetensorsSource(tmp_path / name))
    base, tuned, copy = (source.identity() for source in sources)
    for source in sources:
        source.close()

    assert base == copy
    assert base != tuned


async def test_ranks_with_different_settings_do_not_start() -> None:
    directory, loaded = MemoryDirectory(), list[int]()

    class NotLoaded(toymodel.ToyModel):
        @classmethod
        def load(cls, *arguments: Any) -> NotLoaded:
            loaded.append(1)
            raise AssertionError("there is nothing to load before the ranks agree")

    checkpoint = replace(toymodel.checkpoint(), model_class=NotLoaded)
    ranks = [
        Rank(
            Config.model_validate({
                "cluster": {"ranks": 2, "token": "t"},
                "transport": {"name": "inproc"},
                "engine": {"combine": combine},
            }),
            World(rank, 2, rank, 2), directory, checkpoint if rank else toymodel.checkpoint(),
        )
        for rank, combine in enumerate(("per_rank", "per_expert"))
    ]  # fmt: skip
    zero = asyncio.create_task(ranks[0].start())
    with pytest.raises(ConfigError, match=r"engine\.combine is per_expert on rank 1 and per_rank"):
        await ranks[1].start()
    zero.cancel()
    await asyncio.wait([zero])

    assert loaded == []
