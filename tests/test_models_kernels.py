"""The compiled attention stage against its twin in torch, for every instruction set there is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncmoe import native
from asyncmoe.model import RowBatch
from asyncmoe.models.layers.attention import AttentionSpec, CompiledMixer, TorchMixer, make_mixer
from asyncmoe.models.layers.norm import RmsNorm
from asyncmoe.models.layers.paged import PagedBatch
from asyncmoe.models.layers.rope import RopeSpec, make_rotary
from asyncmoe.models.layers.router import SoftmaxRouter

kernels = native.kernels
pytestmark = pytest.mark.skipif(kernels is None, reason="the kernels are not built")
CPU = torch.device("cpu")
BLOCK, CONTEXT = 4, 256
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=[] if kernels is None else kernels.isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Kernels use this instruction set."""
    before = kernels.isa()
    kernels.use_isa(request.param)
    yield request.param
    kernels.use_isa(before)


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Kernels use so many threads."""
    kernels.set_threads(request.param)
    yield request.param
    kernels.set_threads(1)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(got: Tensor, wanted: Tensor) -> None:
    error = float((got.float() - wanted.float()).abs().max() / wanted.float().abs().max())
    assert error < (1e-5 if got.dtype == torch.float32 else 2e-2)


def make_spec(dtype: torch.dtype, heads: int, kv_heads: int, dim: int, **more: Any) -> Any:
    rotated = more.pop("rotated", dim)
    rope = RopeSpec(more.pop("kind", "default"), 100.0, rotated, trained=40, factor=2.0)
    rotary = make_rotary(rope, CONTEXT, dtype, CPU)
    return AttentionSpec(heads, kv_heads, dim, rotary, scale=dim**-0.5, **more)


def make_case(
    spec: AttentionSpec, dtype: torch.dtype, contexts: list[int], chunks: list[int]
) -> tuple[RowBatch, Tensor, dict[str, Tensor]]:
    """Requests of these lengths, of which the last `chunks` tokens are rows: batch, qkv, cache."""
    needed = [-(-context // BLOCK) for context in contexts]
    blocks = torch.randperm(sum(needed) + 2, generator=torch.Generator().manual_seed(1))
    table = torch.zeros((len(contexts), max(needed)), dtype=torch.int64)
    for i, (own, n) in enumerate(zip(blocks.split([*needed, 2]), needed, strict=False)):
        table[i, :n] = own
    positions = [torch.arange(c - n, c) for c, n in zip(contexts, chunks, strict=True)]
    index = [table[i, p // BLOCK] * BLOCK + p % BLOCK for i, p in enumerate(positions)]
    batch = RowBatch(
        positions=torch.cat(positions),
        cache_index=torch.cat(index),
        decode_rows=sum(n == 1 for n in chunks),
        query_start=torch.tensor([0, *chunks]).cumsum(0),
        context_len=torch.tensor(contexts),
        block_table=table,
        request=torch.arange(len(contexts)),
        block_tokens=BLOCK,
    )
    width = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
    qkv = [normal(n, width, seed=i, dtype=dtype) for i, n in enumerate(chunks)]
    shape = len(blocks), BLOCK, spec.kv_heads, spec.head_dim
    cache = {name: normal(*shape, seed=7, dtype=dtype) for name in "kv"}
    return batch, torch.cat(qkv), cache


def mix(mixer: Any, batch: RowBatch, qkv: Tensor, cache: dict[str, Tensor]) -> Tensor:
    angles = mixer.spec.rotary.angles(batch)
    mixed: Tensor = mixer(qkv.clone(), angles, PagedBatch(batch), cache)
    return mixed


def norms(dtype: torch.dtype, *widths: int) -> list[RmsNorm]:
    return [RmsNorm(normal(width, seed=width, dtype=dtype), 1e-6) for width in widths]


def head_norm(dtype: torch.dtype, heads: int, dim: int) -> RmsNorm:
    return RmsNorm(normal(heads, dim, seed=3, dtype=dtype), 1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "switches"),
    [
        (8, 2, 64, {"head_norm": True}),
        (4, 4, 32, {"vector_norm": True, "clip": 0.7}),
        (7, 1, 24, {"window": 5}),
        (6, 2, 80, {"sinks": True, "window": 70}),
        (3, 3, 8, {"rotated": 4, "kind": "dynamic"}),
        (12, 2, 16, {"sinks": True, "clip": 1.1}),
    ],
    ids=str,
)
def test_a_compiled_mixer_is_one_of_torch(
    isa: str, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, switches: dict[str, Any]
) -> None:
    more = dict(switches)
    if more.pop("head_norm", False):
        more["head_norm"] = head_norm(dtype, heads + kv_heads, dim)
    if more.pop("vector_norm", False):
        more["vector_norm"] = tuple(norms(dtype, heads * dim, kv_heads * dim))
    if more.pop("sinks", False):
        more["sinks"] = normal(heads, seed=4) * 3
    spec = make_spec(dtype, heads, kv_heads, dim, **more)
    batch, qkv, cache = make_case(
        spec, dtype, [1, 2, 131, 150, 64, 2, 90, 33], [1, 1, 1, 1, 1, 2, 30, 33]
    )
    ours, theirs = ({k: v.clone() for k, v in cache.items()} for _ in range(2))

    got = mix(CompiledMixer(spec, dtype, kernels), batch, qkv, ours)

    close(got, mix(TorchMixer(spec), batch, qkv, theirs))
    for name in cache:
        torch.testing.assert_close(ours[name], theirs[name])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "window"), [(8, None), (4, 40)])
def test_a_segment_is_mixed_alone_as_among_others_bit_for_bit(
    isa: str, threads: int, dtype: torch.dtype, heads: int, window: int | None
) -> None:
    spec = make_spec(dtype, heads, 2, 32, window=window)
    mixer = CompiledMixer(spec, dtype, kernels)
    contexts, chunks = [1, 200, 17, 130, 129, 50, 101], [1, 1, 1, 1, 1, 50, 37]
    batch, qkv, cache = make_case(spec, dtype, contexts, chunks)

    together = mix(mixer, batch, qkv, cache).split(chunks)

    starts = batch.query_start.tolist()
    for i, n in enumerate(chunks):
        rows = slice(starts[i], starts[i + 1])
        alone = RowBatch(
            positions=batch.positions[rows],
            cache_index=batch.cache_index[rows],
            decode_rows=int(n == 1),
            query_start=torch.tensor([0, n]),
            context_len=batch.context_len[i : i + 1],
            block_table=batch.block_table[i : i + 1],
            request=batch.request[i : i + 1],
            block_tokens=BLOCK,
        )
        assert torch.equal(mix(mixer, alone, qkv[rows], cache), together[i])


def test_a_nan_stays_in_the_request_that_has_it(isa: str) -> None:
    dtype = torch.bfloat16
    spec = make_spec(dtype, 8, 2, 32)
    batch, qkv, cache = make_case(spec, dtype, [30, 30, 20, 20], [1, 1, 20, 20])
    cache["k"][batch.block_table[0, 1]] = torch.nan
    cache["v"][batch.block_table[1, 1]] = torch.nan

    mixed = mix(CompiledMixer(spec, dtype, kernels), batch, qkv, cache)

    assert mixed[:2].isnan().all()
    assert mixed[2:].isfinite().all()


def test_tokens_behind_the_context_are_not_read(isa: str) -> None:
    dtype = torch.float32
    spec = make_spec(dtype, 2, 1, 16)
    batch, qkv, cache = make_case(spec, dtype, [5, 6], [1, 6])
    mixer = CompiledMixer(spec, dtype, kernels)
    wanted = mix(mixer, batch, qkv, cache)

    written = set(batch.cache_index.tolist())
    first = [int(batch.block_table[0, p // BLOCK]) * BLOCK + p % BLOCK for p in range(4)]
    for name in cache:
        rows = cache[name].flatten(0, 1)
        unused = [i for i in range(len(rows)) if i not in {*written, *first}]
        rows[unused] = torch.nan

    assert torch.equal(mix(mixer, batch, qkv, cache), wanted)


def test_rows_outside_the_cache_or_the_rotary_table_are_refused() -> None:
    dtype = torch.float32
    spec = make_spec(dtype, 2, 1, 16)
    batch, qkv, cache = make_case(spec, dtype, [9, 6], [1, 2])
    mixer = make_mixer(spec, cache["k"])
    for column, value in (("cache_index", 10**6), ("block_table", -1), ("positions", CONTEXT)):
        right = getattr(batch, column)
        setattr(batch, column, right.clone().fill_(value))
        with pytest.raises(IndexError):
            mix(mixer, batch, qkv, cache)
        setattr(batch, column, right)
    with pytest.raises(ValueError, match="do not fit"):
        mix(mixer, batch, qkv[:, :-1], cache)
    with pytest.raises(ValueError, match="do not fit"):
        mix(mixer, batch, qkv, {name: t[..., :8] for name, t in cache.items()})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [8, 37, 520])
def test_a_compiled_norm_of_a_sum_is_the_one_of_torch(
    isa: str, threads: int, dtype: torch.dtype, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = (normal(70, width, seed=seed, dtype=dtype) for seed in (1, 2))
    weight = normal(width, seed=3, dtype=dtype)
    compiled = RmsNorm(weight, 1e-5)
    monkeypatch.setattr(native, "kernels", None)
    plain = RmsNorm(weight, 1e-5)

    residual, normed = compiled.of_sum(x, y.clone())

    assert torch.equal(residual, x + y)
    torch.testing.assert_close(normed, plain(x + y), rtol=2**-7 if normed.itemsize == 2 else 1e-5,
                               atol=1e-6)  # fmt: skip
    assert torch.equal(normed, compiled(residual))
    assert torch.equal(compiled(residual[3:4]), normed[3:4])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("experts", "top_k"), [(8, 8), (32, 4), (60, 3), (130, 2)])
@pytest.mark.parametrize("renormalise", [False, True])
def test_a_compiled_router_chooses_as_torch_does_ties_included(
    isa: str,
    threads: int,
    dtype: torch.dtype,
    experts: int,
    top_k: int,
    renormalise: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight = (
        normal(experts, 48, seed=1).mul(2).round().to(dtype)
    )  # exact logits, many of them equal
    bias = normal(experts, seed=2).round().to(dtype)
    x = normal(300, 48, seed=3).round().to(dtype)
    options: Any = {"renormalise": renormalise, "round_to": dtype}
    compiled = SoftmaxRouter(weight, bias, top_k, **options)
    monkeypatch.setattr(native, "kernels", None)
    plain = SoftmaxRouter(weight, bias, top_k, **options)

    chosen, weights = compiled(x)

    wanted, shares = plain(x)
    assert torch.equal(chosen, wanted)
    torch.testing.assert_close(weights, shares, rtol=1e-5 if dtype == torch.float32 else 2**-7,
                               atol=1e-9)  # fmt: skip
    assert torch.equal(compiled(x[7:8])[1], weights[7:8])
