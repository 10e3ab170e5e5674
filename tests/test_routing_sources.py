"""Made-up and recorded expert choices."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncmoe import native
from asyncmoe.config import Config
from asyncmoe.errors import ConfigError, MissingDependency
from asyncmoe.workload.draws import Alias, draw_distinct, key_start
from asyncmoe.workload.profile import expert_load
from asyncmoe.workload.routing import RoutingSource, make_routing
from asyncmoe.workload.trace import RoutingWriter, join_parts, part_path, read_routing
from tests import toymodel
from tests.cluster import cluster

NAMES = ("uniform", "zipf:1.5", "hot:2,0.95")


def source(name: str, layers: int = 3, experts: int = 16, top_k: int = 4) -> RoutingSource:
    made = make_routing(name, layers, experts, top_k, seed=5)
    assert made is not None
    return made


@pytest.mark.parametrize("name", NAMES)
def test_a_row_has_the_same_experts_in_any_batch(name: str) -> None:
    requests, positions = np.divmod(np.arange(600), 20)
    whole, weights = source(name).choose(1, requests, positions)
    order = np.random.default_rng(0).permutation(600)[:37]
    part, _ = source(name).choose(1, requests[order], positions[order])
    assert (part == whole[order]).all()
    assert weights.dtype == np.float32
    assert weights.sum(1) == pytest.approx(np.ones(600))


@pytest.mark.parametrize("name", NAMES)
def test_the_experts_of_a_row_are_distinct(name: str) -> None:
    rows = np.arange(20_000)
    chosen, _ = source(name).choose(2, rows, rows)
    assert (np.diff(np.sort(chosen, axis=1), axis=1) > 0).all()
    assert chosen.min() >= 0
    assert chosen.max() < 16


def test_choices_depend_on_seed_layer_request_and_position() -> None:
    rows, none = np.arange(50), np.zeros(50, np.int64)
    first = source("uniform").choose(0, rows, none)[0]
    other_seed = make_routing("uniform", 3, 16, 4, seed=6)
    assert other_seed is not None
    for other in (
        other_seed.choose(0, rows, none)[0],
        source("uniform").choose(1, rows, none)[0],
        source("uniform").choose(0, rows, none + 1)[0],
        source("uniform").choose(0, rows + 50, none)[0],
    ):
        assert (first != other).any(1).mean() > 0.9


def test_draws_are_those_without_replacement() -> None:
    weights = np.arange(1, 9.0) ** -1.5
    rows = np.arange(200_000)
    drawn = draw_distinct(Alias(weights), key_start(1, 0), rows, rows, 4)
    share = np.bincount(drawn.ravel(), minlength=8) / len(rows)
    # Gumbel's trick: an independent way to the same distribution.
    noise = np.random.default_rng(0).gumbel(size=(200_000, 8)) + np.log(weights)
    expected = np.bincount(np.argsort(-noise, 1)[:, :4].ravel(), minlength=8) / len(rows)
    assert share == pytest.approx(expected, abs=0.006)


@pytest.mark.skipif(native.columns is None, reason="not built")
@pytest.mark.parametrize("name", NAMES)
def test_compiled_draws_are_the_plain_ones(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.arange(5000)
    compiled = source(name).choose(2, rows, 7 * rows)[0]
    monkeypatch.setattr(native, "columns", None)
    assert (source(name).choose(2, rows, 7 * rows)[0] == compiled).all()


def test_hot_experts_take_their_share_and_each_layer_has_its_own() -> None:
    hot = source("hot:2,0.5", experts=32, top_k=1)
    load = hot.load(20_000)
    assert np.sort(load, axis=1)[:, -2:].sum(1) == pytest.approx([0.5] * 3, abs=0.02)
    assert len({tuple(np.sort(np.argsort(layer)[-2:])) for layer in load}) > 1


@pytest.mark.parametrize(
    "name", ["zipf", "zipf:9", "hot:16,0.5", "hot:2,1", "replay", "random", ""]
)
def test_a_source_that_is_none_is_refused_with_what_is_allowed(name: str) -> None:
    with pytest.raises(ConfigError, match=r"model\.routing is .*; allowed: model, uniform"):
        make_routing(name, 3, 16, 4)


def write(path: Path, rows: Any, top_k: int = 2, layers: int = 2, experts: int = 8) -> None:
    writer = RoutingWriter(path, layers, experts, top_k)
    for layer, request, position in rows:
        chosen = np.array([[(request + layer) % experts, (position + 4) % experts]])
        weights = np.array([[0.75, 0.25]], np.float32)
        writer.add(layer, np.array([request]), np.array([position]), chosen, weights)
    writer.close()


def test_ranks_parts_become_one_recording_without_the_warm_up(tmp_path: Path) -> None:
    path = tmp_path / "r.parquet"
    write(part_path(path, 0), [(layer, r, 0) for layer in (0, 1) for r in (1, 7)])
    write(part_path(path, 1), [(layer, 8, p) for p in (1, 0) for layer in (0, 1)])
    assert join_parts(path, 2, lambda requests: requests - 7) == 6
    assert list(tmp_path.iterdir()) == [path]
    trace = read_routing(path)
    assert trace.tokens.tolist() == [1, 2]
    replay = make_routing(f"replay:{path}", 2, 8, 2)
    assert replay is not None
    chosen, weights = replay.choose(1, np.array([0, 1, 1, 3]), np.array([0, 0, 1, 3]))
    # Requests and positions beyond those recorded start over.
    assert chosen.tolist() == [[0, 4], [1, 4], [1, 5], [1, 5]]
    assert weights.tolist() == [[0.75, 0.25]] * 4
    assert replay.load()[0].tolist() == pytest.approx([2 / 6, 0, 0, 0, 2 / 6, 1 / 6, 0, 1 / 6])


def test_a_position_that_lacks_a_layer_ends_its_request(tmp_path: Path) -> None:
    write(tmp_path / "r", [(0, 0, 0), (1, 0, 0), (0, 0, 1), (0, 0, 2), (1, 0, 2)])
    assert read_routing(tmp_path / "r").tokens.tolist() == [1]


def test_without_pyarrow_the_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingDependency, match=r"pyarrow.*asyncmoe\[research\]"):
        RoutingWriter(tmp_path / "r", 1, 2, 1)


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    write(part_path(tmp_path / "r", 0), [(0, 0, 0), (1, 0, 0)])
    with pytest.raises(ConfigError, match=r"r\.rank1"):
        join_parts(tmp_path / "r", 2, lambda requests: requests)


def test_a_recording_of_another_model_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "r", [(0, 0, 0), (1, 0, 0)])
    with pytest.raises(ConfigError, match="has 8 experts; the model has 16"):
        make_routing(f"replay:{tmp_path / 'r'}", 2, 16, 2)
    (tmp_path / "junk").write_bytes(b"junk")
    with pytest.raises(ConfigError, match="is no routing recording"):
        read_routing(tmp_path / "junk")


async def tokens_of(**model: Any) -> list[list[int]]:
    async with cluster(2, toymodel.checkpoint(), model=model) as ranks:
        ids = [ranks.submit(list(range(4 + i)), max_tokens=5) for i in range(3)]
        await ranks.ended(*ids)
        return [ranks.tokens[i] for i in ids]


async def test_a_replayed_run_goes_the_recorded_ways(tmp_path: Path) -> None:
    path, again = tmp_path / "r", tmp_path / "again"
    tokens = await tokens_of(record_routing=str(path))
    assert join_parts(path, 2, lambda requests: requests) == 3 * (4 + 5 + 6 + 3 * 4)
    assert await tokens_of(routing=f"replay:{path}", record_routing=str(again)) == tokens
    join_parts(again, 2, lambda requests: requests)
    first, second = read_routing(path), read_routing(again)
    assert (first.chosen == second.chosen).all()
    assert (first.weights == second.weights).all()


async def test_a_source_overrules_the_router_on_every_rank(tmp_path: Path) -> None:
    path = tmp_path / "r"
    assert await tokens_of(routing="zipf:1", record_routing=str(path)) != await tokens_of()
    join_parts(path, 2, lambda requests: requests)
    trace, zipf = read_routing(path), make_routing("zipf:1", 3, 6, 2)
    assert zipf is not None
    requests = np.arange(3).repeat(trace.tokens)
    positions = np.concatenate([np.arange(count) for count in trace.tokens])
    for layer in range(3):
        assert (zipf.choose(layer, requests, positions)[0] == trace.chosen[layer]).all()


def test_a_profile_is_of_what_is_routed(tmp_path: Path) -> None:
    toy = toymodel.spec(layers=2, experts=8, top_k=2)

    def load(**model: str) -> Any:
        sections = {"model": model, "placement": {"profile": "routing"}}
        return expert_load(Config.model_validate(sections), toy)

    assert load(routing="zipf:2").max() > 0.3
    with pytest.raises(ConfigError, match="record it"):
        load()
    assert expert_load(Config(), toy) is None
