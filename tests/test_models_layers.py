"""The parts of decoders, each against a few lines of plain arithmetic or `transformers`."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from asyncmoe.errors import ConfigError
from asyncmoe.model import ExpertBatch, RowBatch
from asyncmoe.models.hfconfig import ConfigReader
from asyncmoe.models.layers.experts import combine, make_experts
from asyncmoe.models.layers.linear import ACTIVATIONS, Linear, gated
from asyncmoe.models.layers.norm import RmsNorm
from asyncmoe.models.layers.paged import PagedBatch, paged_attention
from asyncmoe.models.layers.rope import inverse_frequencies, make_rotary, read_rope
from asyncmoe.models.layers.router import SoftmaxRouter

CPU = torch.device("cpu")
HEADS, KV_HEADS, DIM, BLOCK = 6, 2, 16, 4


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# -- paged attention -----------------------------------------------------------------------------


def paged_case(contexts: list[int], chunks: list[int]) -> tuple[RowBatch, list[Tensor], Tensor]:
    """Requests with all K/V in a scrambled cache: the batch, K and V per request, cache [2, …]."""
    needed = [-(-context // BLOCK) for context in contexts]
    order = torch.randperm(sum(needed) + 3, generator=torch.Generator().manual_seed(1)).tolist()
    cache = torch.full((2, sum(needed) + 3, BLOCK, KV_HEADS, DIM), 7.0)
    table = torch.zeros((len(contexts), max(needed)), dtype=torch.int64)
    states = []
    for i, context in enumerate(contexts):
        blocks = [order.pop() for _ in range(needed[i])]
        table[i, : len(blocks)] = torch.tensor(blocks)
        states.append(normal(2, context, KV_HEADS, DIM, seed=i))
        for position in range(context):
            block, offset = divmod(position, BLOCK)
            cache[:, blocks[block], offset] = states[-1][:, position]
    positions = torch.cat([torch.arange(c - n, c) for c, n in zip(contexts, chunks, strict=True)])
    rows = RowBatch(
        positions=positions,
        cache_index=torch.zeros_like(positions),
        decode_rows=sum(n == 1 for n in chunks),
        query_start=torch.tensor([0, *chunks]).cumsum(0),
        context_len=torch.tensor(contexts),
        block_table=table,
        request=torch.arange(len(contexts)),
        block_tokens=BLOCK,
    )
    return rows, states, cache


def plain_attention(
    query: Tensor, state: Tensor, window: int | None, sinks: Tensor | None
) -> Tensor:
    """One request: query [rows, heads, dim] are its last positions, state [2, tokens, …]."""
    keys, values = state.repeat_interleave(HEADS // KV_HEADS, 2)
    rows, tokens = len(query), len(keys)
    scores = torch.einsum("qhd,khd->hqk", query, keys) * 0.3
    at = torch.arange(tokens - rows, tokens)[:, None]
    seen = torch.arange(tokens)
    hidden = (seen > at) | (seen <= at - (window or tokens))
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(-1, rows, 1)), -1)
    weights = scores.softmax(-1)[..., :tokens]
    return torch.einsum("hqk,khd->qhd", weights, values)


@pytest.mark.parametrize("window", [None, 1, 5, 12])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize(
    ("contexts", "chunks"),
    [
        ([9, 9, 10, 11], [1, 1, 1, 1]),  # nearly the same length: not cut into spans
        ([1, 70, 3, 33], [1, 1, 1, 1]),  # cut
        ([5], [5]),
        ([2, 61, 17, 17, 30], [1, 1, 17, 6, 13]),
    ],
    ids=str,
)
def test_paged_attention_is_attention(
    contexts: list[int], chunks: list[int], window: int | None, with_sinks: bool
) -> None:
    rows, states, cache = paged_case(contexts, chunks)
    query = normal(sum(chunks), HEADS, DIM, seed=99)
    fresh = torch.cat([s[:, -n:] for s, n in zip(states, chunks, strict=True)], 1)
    sinks = normal(HEADS, seed=5) if with_sinks else None

    got = paged_attention(
        query, fresh[0], fresh[1], cache[0], cache[1], PagedBatch(rows),
        scale=0.3, window=window, sinks=sinks,
    )  # fmt: skip

    wanted = [
        plain_attention(q, state, window, sinks)
        for q, state in zip(query.split(chunks), states, strict=True)
    ]
    torch.testing.assert_close(got, torch.cat(wanted), atol=1e-5, rtol=1e-5)


# -- rotary embedding ----------------------------------------------------------------------------

ROPES: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64,
     "beta_fast": 16, "beta_slow": 2, "mscale": 0.7, "mscale_all_dim": 1.2, "truncate": False},
    {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.3},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 128},
]  # fmt: skip


@pytest.mark.parametrize("rope", ROPES, ids=str)
@pytest.mark.parametrize("partial", [1.0, 0.5])
def test_rope_variants_have_the_frequencies_of_transformers(
    rope: dict[str, Any], partial: float
) -> None:
    parameters = {"rope_theta": 5000.0, "partial_rotary_factor": partial} | rope
    parameters.setdefault("original_max_position_embeddings", 512)
    config = SimpleNamespace(
        rope_parameters=parameters,
        max_position_embeddings=512,
        head_dim=32,
        hidden_size=64,
        num_attention_heads=2,
        standardize_rope_params=lambda: None,
    )
    wanted, amplitude = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, CPU)

    new = {"rope_parameters": parameters, "max_position_embeddings": 512}
    old = {
        "rope_theta": 5000.0,
        "partial_rotary_factor": partial,
        "rope_scaling": {("type" if k == "rope_type" else k): v for k, v in rope.items()},
        "max_position_embeddings": 512,
    }
    for form in (new, old):
        spec = read_rope(ConfigReader(form), 32, 10_000.0, partial=True)
        assert spec.dim == int(32 * partial)
        assert spec.amplitude == pytest.approx(amplitude)
        torch.testing.assert_close(inverse_frequencies(spec), wanted, rtol=1e-6, atol=0)


def test_partial_rotation_leaves_the_rest_of_the_head_alone() -> None:
    config = {"max_position_embeddings": 64, "partial_rotary_factor": 0.5, "rope_theta": 100.0}
    rotary = make_rotary(
        read_rope(ConfigReader(config), DIM, 1e4, partial=True), 64, torch.float32, CPU
    )
    rows, _, _ = paged_case([9, 30], [1, 4])
    x = normal(5, HEADS, DIM)

    turned = rotary.rotate(x, rotary.angles(rows))

    first, second = x[..., :4], x[..., 4:8]
    phase = rows.positions[:, None, None] / 100.0 ** (torch.arange(4) / 4)
    expected = torch.cat(
        (first * phase.cos() - second * phase.sin(), second * phase.cos() + first * phase.sin()), -1
    )
    torch.testing.assert_close(turned[..., :8], expected)
    assert torch.equal(turned[..., 8:], x[..., 8:])


def test_an_architecture_that_rotates_whole_heads_refuses_to_rotate_half() -> None:
    config = ConfigReader({"max_position_embeddings": 64, "partial_rotary_factor": 0.5})
    with pytest.raises(ConfigError, match=r"partial_rotary_factor is 0\.5; allowed: 1\.0"):
        read_rope(config, DIM, 1e4, partial=False)


# -- experts, router, linear, norm ---------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [24, 25])  # 25: rows that the grouped product cannot take
@pytest.mark.parametrize("pack", [None, False, True])
def test_experts_are_a_weighted_sum_of_gated_mlps(
    dtype: torch.dtype, width: int, pack: bool | None
) -> None:
    gate_up = (normal(5, 2 * width, 32, seed=1) / 4).to(dtype)
    down = (normal(5, 32, width, seed=2) / 4).to(dtype)
    x = normal(3, 32, seed=3).to(dtype)
    # expert 1: row 2; expert 3: rows 0 and 2; expert 4: row 0
    batch = ExpertBatch(
        row=torch.tensor([2, 0, 2, 0]),
        weight=torch.tensor([0.25, 0.5, 0.75, 2.0]),
        counts=torch.tensor([0, 1, 0, 2, 1]),
        gather=torch.tensor([[3, 1], [-1, -1], [0, 2]]),
    )

    experts = make_experts(gate_up, down, ACTIVATIONS["silu"], round_products=False, pack=pack)

    def mlp(row: int, expert: int) -> Tensor:
        gate, up = (gate_up[expert].double() @ x[row].double()).chunk(2)
        return down[expert].double() @ (torch.nn.functional.silu(gate) * up)

    wanted = torch.stack(
        [2.0 * mlp(0, 4) + 0.5 * mlp(0, 3), 0 * x[1].double(), 0.25 * mlp(2, 1) + 0.75 * mlp(2, 3)]
    )
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    got = experts(x, batch)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), wanted, atol=tolerance, rtol=tolerance)


def test_parts_are_summed_in_gather_order_in_float32() -> None:
    outputs = torch.tensor([[1.0], [1e8], [-1e8]])
    batch = ExpertBatch(
        row=torch.tensor([0, 0, 0]),
        weight=torch.ones(3),
        counts=torch.tensor([3]),
        gather=torch.tensor([[0, 1, 2], [1, 2, 0], [-1, 0, -1]]),
    )
    for round_products in (False, True):
        total = combine(outputs, batch, round_products=round_products)
        assert total.flatten().tolist() == [0.0, 1.0, 1.0]


def test_a_nan_row_does_not_spread_to_rows_that_lack_a_part() -> None:
    outputs = torch.tensor([[torch.nan], [3.0]])
    batch = ExpertBatch(
        row=torch.tensor([0, 1]),
        weight=torch.ones(2),
        counts=torch.tensor([2]),
        gather=torch.tensor([[0, -1], [1, -1]]),
    )
    total = combine(outputs, batch, round_products=False)
    assert total[0].isnan()
    assert total[1] == 3.0


@pytest.mark.parametrize("renormalise", [False, True])
def test_the_router_takes_the_largest_of_a_softmax(renormalise: bool) -> None:
    gate, x = normal(8, 16, seed=1), normal(5, 16, seed=2)
    router = SoftmaxRouter(gate, None, 3, renormalise=renormalise, round_to=torch.bfloat16)

    experts, weights = router(x)

    shares = (x @ gate.T).softmax(-1)
    assert torch.equal(experts, shares.argsort(-1, descending=True)[:, :3])
    wanted = shares.gather(1, experts)
    wanted = wanted / wanted.sum(-1, keepdim=True) if renormalise else wanted
    assert weights.dtype == torch.float32
    assert torch.equal(weights, weights.bfloat16().float())
    torch.testing.assert_close(weights, wanted, rtol=2**-8, atol=0)


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_a_linear_layer_multiplies_and_adds(pack: bool, rows: int) -> None:
    weight, bias, x = normal(24, 40, seed=1), normal(24, seed=2), normal(rows, 40, seed=3)
    layer = Linear(weight, bias, pack=pack)
    torch.testing.assert_close(layer(x), x @ weight.T + bias, atol=1e-5, rtol=1e-5)
    assert layer.nbytes == 4 * (24 * 40 + 24)


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize("pack", [None, False, True])
def test_a_row_is_the_same_among_any_number_of_rows_and_threads(pack: bool | None) -> None:
    layer, x = Linear(normal(1024, 40, seed=1), pack=pack), normal(300, 40, seed=2)

    def run(rows: Tensor) -> Tensor:
        return gated(layer(rows), ACTIVATIONS["silu"])

    alone = torch.cat([run(row[None]) for row in x])

    for rows in (2, 3, 7, 33, 134, 148, 197, 300):
        assert torch.equal(run(x[:rows]), alone[:rows])


def test_a_norm_divides_by_the_root_of_the_mean_square() -> None:
    x = torch.tensor([[3.0, 4.0]], dtype=torch.bfloat16)
    norm = RmsNorm(torch.tensor([1.0, 2.0], dtype=torch.bfloat16), eps=1e-6)
    wanted = torch.tensor([[3.0, 8.0]]) / 12.5**0.5
    torch.testing.assert_close(norm(x).float(), wanted, rtol=2**-7, atol=0)
