"""Decoder layers in one compiled call against the same kernels one by one, bit for bit."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncmoe import native
from asyncmoe.checkpoint import open_checkpoint
from asyncmoe.config import ModelConfig
from asyncmoe.model import LoadPlan, Model, Routed, RowBatch
from asyncmoe.models.decoder import Decoder
from asyncmoe.models.layers.weights import weight_memory
from tests.checkpoints import FAMILIES, cached_checkpoint, make_checkpoint
from tests.stagerunner import Request, StageRunner

pytestmark = pytest.mark.skipif(native.kernels is None, reason="the kernels are not built")
LOCAL = torch.arange(16)


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    """Kernels use as many."""
    native.kernels.set_threads(2)
    yield
    native.kernels.set_threads(1)


def load(path: Any, **options: Any) -> Any:
    plan = LoadPlan(True, (tuple(range(16)),) * 4)
    return open_checkpoint(ModelConfig(name=str(path), **options)).load(plan, torch.device("cpu"))


def case(model: Model) -> tuple[StageRunner, RowBatch, Tensor]:
    """Two decode steps and a chunk of five, in a cache of random contents: rows [7, hidden]."""
    runner = StageRunner(model, [])
    random = torch.Generator().manual_seed(1)
    for layer in runner.cache:
        for tensor in layer.values():
            tensor.copy_(torch.randn(tensor.shape, generator=random))
    batch = runner._batch([(Request(0, 19), [1]), (Request(1, 6), [2]), (Request(2, 3), [3] * 5)])
    x = torch.randn((7, model.spec.hidden), generator=random).to(model.spec.dtype)
    return runner, batch, x


def caches(runner: StageRunner) -> list[Tensor]:
    return [tensor.clone() for layer in runner.cache for tensor in layer.values()]


def parts_of(routed: Routed) -> list[Tensor]:
    return [routed.residual, routed.hidden, routed.experts, routed.weights]


@pytest.mark.parametrize("quantize", ["none", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_a_layer_in_one_call_gives_what_its_parts_give(
    family: str, dtype: torch.dtype, quantize: str, tmp_path: Any
) -> None:
    model = load(make_checkpoint(tmp_path, family, dtype=dtype), quantize=quantize)
    runner, batch, x = case(model)
    whole = parts_of(model.attention(1, x, batch, runner.cache)) + caches(runner)
    runner, batch, x = case(model)
    assert model._layers[1].compiled is not None

    model._layers[1].compiled = None
    parts = parts_of(model.attention(1, x, batch, runner.cache)) + caches(runner)

    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


@pytest.mark.parametrize("layers", [range(4), range(1, 3), range(2, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_layers_in_one_call_give_what_their_stages_give(
    family: str, dtype: torch.dtype, layers: range, tmp_path: Any
) -> None:
    model = load(make_checkpoint(tmp_path, family, dtype=dtype))
    assert model._whole is not None
    results = []
    for kind in (Decoder, Model):
        runner, batch, x = case(model)
        before = x.clone()
        out, seconds = kind.through(
            model, layers, x, batch, runner.cache, [LOCAL] * 4, lambda: False
        )
        assert len(seconds) == 2 * len(layers)
        assert min(seconds) >= 0
        assert torch.equal(x, before)
        results.append([out, *caches(runner)])

    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("kind", [Decoder, Model])
@torch.inference_mode()
def test_layers_end_before_the_first_that_something_else_is_wanted_at(kind: type[Model]) -> None:
    model = load(cached_checkpoint("qwen3_moe"))
    runner, batch, x = case(model)
    two, _ = kind.through(model, range(2), x, batch, runner.cache, [LOCAL] * 4, lambda: False)
    runner, batch, x = case(model)
    answers = iter([False, True])

    out, seconds = kind.through(
        model, range(4), x, batch, runner.cache, [LOCAL] * 4, lambda: next(answers)
    )

    assert len(seconds) == 4
    assert torch.equal(out, two)


@torch.inference_mode()
def test_what_does_not_fit_the_layers_is_refused() -> None:
    model = load(cached_checkpoint("qwen3_moe"))
    runner, batch, x = case(model)

    def through(x: Tensor, local: Tensor) -> None:
        model.through(range(4), x, batch, runner.cache, [local] * 4, lambda: False)

    with pytest.raises(ValueError, match="does not fit"):
        through(x[:6], LOCAL)
    with pytest.raises(ValueError, match="does not fit"):
        model.attention(0, x.double(), batch, runner.cache)
    with pytest.raises(ValueError, match="int64"):
        through(x, LOCAL.int())
    with pytest.raises(ValueError, match="not on this rank"):
        through(x, LOCAL - 16)
    batch.cache_index[3] = 1 << 40
    with pytest.raises(IndexError, match="cache_index"):
        through(x, LOCAL)


@torch.inference_mode()
def test_an_error_of_who_is_asked_ends_the_call() -> None:
    model = load(cached_checkpoint("qwen3_moe"))
    runner, batch, x = case(model)

    def wanted() -> bool:
        raise RuntimeError("the loop is gone")

    with pytest.raises(RuntimeError, match="the loop is gone"):
        model.through(range(4), x, batch, runner.cache, [LOCAL] * 4, wanted)


def test_a_family_with_stages_of_its_own_runs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    path = cached_checkpoint("qwen3_moe")
    family = type(load(path))

    def attention(self: Decoder, *args: Any) -> Routed:
        return Decoder.attention(self, *args)

    monkeypatch.setattr(family, "attention", attention, raising=False)

    assert load(path)._whole is None


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="no such pages here")
def test_memory_of_large_weights_begins_on_a_large_page() -> None:
    memory = weight_memory((5 << 20) + 7)

    assert memory.shape == ((5 << 20) + 7,)
    assert memory.data_ptr() % (2 << 20) == 0
    assert not memory.any()
    memory[-1] = 3
    assert memory.clone()[-1] == 3
