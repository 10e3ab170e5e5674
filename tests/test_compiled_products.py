"""Products and experts of the compiled kernels, on every instruction set here, against torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncmoe import native
from asyncmoe.model import ExpertBatch, pair_batch
from asyncmoe.models.layers.experts import CompiledExperts, Experts, make_experts
from asyncmoe.models.layers.linear import ACTIVATIONS, Linear, gated
from asyncmoe.models.layers.weights import quantised

if native.kernels is None:
    pytest.skip(f"no compiled kernels: {native.absent['kernels']}", allow_module_level=True)

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3}
# columns and inputs: whole panels and pairs; neither; several blocks of an int8 row
SHAPES = [(32, 64), (43, 37), (16, 300)]


@pytest.fixture(params=native.kernels.isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every instruction set that works here, one after the other."""
    best = native.kernels.isa()
    native.kernels.use_isa(request.param)
    yield request.param
    native.kernels.use_isa(best)


@pytest.fixture
def three_threads() -> Iterator[None]:
    native.kernels.set_threads(3)
    yield
    native.kernels.set_threads(1)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(got: Tensor, wanted: Tensor, tolerance: float) -> bool:
    return bool((got.double() - wanted).norm() <= tolerance * wanted.norm())


def choice(rows: int, experts: int, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Router output and the local index of each expert, which is a shuffled one."""
    generator = torch.Generator().manual_seed(rows)
    order = [torch.randperm(experts, generator=generator)[:top_k] for _ in range(rows)]
    chosen = torch.stack(order) if rows else torch.empty((0, top_k), dtype=torch.int64)
    return chosen, normal(rows, top_k, seed=4).abs(), torch.randperm(experts, generator=generator)


# -- linear layers -------------------------------------------------------------------------------


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out", "inputs"), SHAPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 16, 17, 32, 100])
def test_a_product_is_that_of_float64(dtype: torch.dtype, out: int, inputs: int, rows: int) -> None:
    weight, bias = normal(out, inputs, seed=1, dtype=dtype), normal(out, seed=2, dtype=dtype)
    x = normal(rows, inputs, seed=3, dtype=dtype)
    wanted = x.double() @ weight.double().T + bias.double()

    got = Linear(weight, bias)(x)

    assert got.dtype == dtype
    assert close(got, wanted, TOLERANCE[dtype])
    assert close(Linear(weight)(x), wanted - bias.double(), TOLERANCE[dtype])


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out", "inputs"), SHAPES)
def test_a_quantised_product_is_that_of_its_whole_numbers(
    dtype: torch.dtype, out: int, inputs: int
) -> None:
    weight, x = normal(out, inputs, seed=1, dtype=dtype), normal(9, inputs, seed=3, dtype=dtype)
    x[4, 5] = 100.0  # an outlier costs the rest of its block some bits
    whole, scale = quantised(weight)
    wanted = x.double() @ (whole.double() * scale.double()[:, None]).T

    got = Linear(weight, quantize=True, out_dtype=torch.float32)(x)

    assert close(got, wanted, max(TOLERANCE[dtype], 2e-4))


def test_quantised_weights_are_within_half_a_step_and_zeros_stay_zeros() -> None:
    weight = normal(5000, 7)
    weight[3] = 0.0
    whole, scale = quantised(weight)
    assert whole.dtype == torch.int8
    assert ((whole * scale[:, None] - weight).abs() <= scale[:, None] * 0.5001).all()
    assert (whole.abs().amax(1)[scale > 0] == 127).all()
    assert not whole[3].any()
    assert scale[3] == 0


@pytest.mark.usefixtures("isa", "three_threads")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quantize", [False, True])
def test_a_row_is_the_same_bit_for_bit_among_any_rows(dtype: torch.dtype, quantize: bool) -> None:
    layer = Linear(normal(200, 150, seed=1, dtype=dtype), quantize=quantize)
    x = normal(203, 150, seed=2, dtype=dtype)

    def run(rows: Tensor) -> Tensor:
        return gated(layer(rows), ACTIVATIONS["silu"])

    alone = torch.cat([run(row[None]) for row in x])
    for first, rows in enumerate((2, 3, 4, 5, 6, 7, 11, 16, 17, 31, 32, 33, 190)):
        assert torch.equal(run(x[first : first + rows]), alone[first : first + rows])


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1e-20, 1e10])
def test_a_row_is_the_same_alone_though_its_numbers_hardly_fit(
    dtype: torch.dtype, scale: float
) -> None:
    weight = (normal(43, 150, seed=1) * 1e-19).to(dtype)
    layer = Linear(weight, out_dtype=torch.float32)
    x = (normal(32, 150, seed=2) * (3 * normal(32, 150, seed=3)).exp() * scale).to(dtype)
    assert torch.equal(layer(x), torch.cat([layer(row[None]) for row in x]))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quantize", [False, True])
def test_a_row_that_is_not_finite_harms_no_other_row(dtype: torch.dtype, quantize: bool) -> None:
    layer = Linear(normal(20, 33, seed=1, dtype=dtype), quantize=quantize)
    x = normal(6, 33, seed=2, dtype=dtype)
    clean = layer(x)
    x[2, 7], x[4, 1] = torch.nan, torch.inf
    got = layer(x)
    assert not got[2].isfinite().any()
    assert not got[4].isfinite().any()
    rest = [0, 1, 3, 5]
    assert torch.equal(got[rest], clean[rest])


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_column_that_is_not_finite_harms_no_other_column(dtype: torch.dtype) -> None:
    weight, x = normal(70, 37, seed=1, dtype=dtype), normal(20, 37, seed=2, dtype=dtype)
    clean = Linear(weight)(x)
    weight[[16, 33]] = torch.nan
    got = Linear(weight)(x)
    assert got[:, [16, 33]].isnan().all()
    rest = [column for column in range(70) if column not in (16, 33)]
    assert torch.equal(got[:, rest], clean[:, rest])


def test_rows_may_be_a_slice_of_wider_ones_or_of_another_dtype() -> None:
    layer, wide = Linear(normal(20, 32, dtype=torch.bfloat16)), normal(5, 80).bfloat16()
    rows = wide[:, 16:48]
    wanted = layer(rows.contiguous())
    assert torch.equal(layer(rows), wanted)
    assert torch.equal(layer(rows.float()), wanted)
    assert torch.equal(layer(rows.t().contiguous().t()), wanted)
    assert layer(rows[:0]).shape == (0, 20)


def test_rows_that_do_not_fit_the_weight_are_refused() -> None:
    with pytest.raises(ValueError, match="rows of 31 elements; the weight takes 32"):
        Linear(normal(20, 32))(normal(2, 31))


def test_float32_results_of_a_bfloat16_weight_are_rounded_to_bfloat16() -> None:
    weight, x = normal(40, 64, dtype=torch.bfloat16), normal(3, 64, dtype=torch.bfloat16)
    wide = Linear(weight, out_dtype=torch.float32)(x)
    assert wide.dtype == torch.float32
    assert torch.equal(wide, Linear(weight)(x).float())


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_activations_are_those_of_torch(
    dtype: torch.dtype, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.cat((normal(40, 26, seed=1) * 4, torch.full((1, 26), 90.0), -torch.ones(1, 26) * 90))
    x = x.to(dtype)
    got = gated(x, ACTIVATIONS[name])
    monkeypatch.setattr(native, "kernels", None)
    wanted = gated(x, ACTIVATIONS[name])
    torch.testing.assert_close(got, wanted, atol=2e-6, rtol=1.6e-2 if x.itemsize == 2 else 2e-6)


# -- experts -------------------------------------------------------------------------------------


def two_ways(
    monkeypatch: pytest.MonkeyPatch, *args: Any, **options: Any
) -> tuple[Experts, Experts]:
    """The same experts, compiled and by torch."""
    compiled = make_experts(*args, **options)
    assert isinstance(compiled, CompiledExperts)
    with monkeypatch.context() as patch:
        patch.setattr(native, "kernels", None)
        return compiled, make_experts(*args, **options)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("round_products", [False, True])
@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.parametrize(("hidden", "width", "rows"), [(64, 32, 1), (64, 32, 40), (37, 21, 9)])
def test_experts_are_those_of_torch(
    dtype: torch.dtype, round_products: bool, quantize: bool, hidden: int, width: int, rows: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    gate_up = normal(6, 2 * width, hidden, seed=1, dtype=dtype) / 8
    down = normal(6, hidden, width, seed=2, dtype=dtype) / 8
    x = normal(rows, hidden, seed=3, dtype=dtype)
    compiled, torchs = two_ways(
        monkeypatch, gate_up, down, ACTIVATIONS["silu"],
        round_products=round_products, quantize=quantize,
    )  # fmt: skip
    chosen, weights, local = choice(rows, 6, 3)

    got = compiled.routed(x, chosen, weights, local)

    assert got.dtype == dtype
    wanted = torchs.routed(x, chosen, weights, local)
    assert close(got, wanted.double(), 5e-4 if dtype == torch.float32 else 1.5e-2)
    assert torch.equal(got, compiled(x, pair_batch(chosen, weights, local)))


@pytest.mark.usefixtures("three_threads")
def test_an_expert_row_is_the_same_bit_for_bit_among_any_rows() -> None:
    experts = make_experts(
        normal(8, 96, 64, seed=1), normal(8, 64, 48, seed=2), ACTIVATIONS["silu"],
        round_products=True,
    )  # fmt: skip
    x = normal(150, 64, seed=3)
    chosen, weights, local = choice(150, 8, 2)

    together = experts.routed(x, chosen, weights, local)

    for row in range(0, 150, 7):
        only = slice(row, row + 1)
        alone = experts.routed(x[only], chosen[only], weights[only], local)
        assert torch.equal(alone, together[only])


def test_output_rows_without_pairs_are_zero_and_rows_may_lack_parts() -> None:
    experts = make_experts(
        torch.ones(2, 2, 1), torch.ones(2, 1, 1), ACTIVATIONS["relu"], round_products=False
    )
    batch = ExpertBatch(
        row=torch.tensor([0, 1]),
        weight=torch.tensor([10.0, torch.nan]),
        counts=torch.tensor([0, 2]),
        gather=torch.tensor([[-1, -1], [0, -1], [0, 1]]),
    )
    got = experts(torch.tensor([[3.0], [2.0]]), batch)
    assert got[:2].flatten().tolist() == [0.0, 90.0]
    assert got[2].isnan()
    empty = choice(0, 2, 2)
    assert experts.routed(torch.empty(0, 1), *empty).shape == (0, 1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"row": torch.tensor([0, 2])}, "row is out of range"),
        ({"counts": torch.tensor([1, 2])}, "do not add up"),
        ({"counts": torch.tensor([3, -1])}, "do not add up"),
        ({"gather": torch.tensor([[0], [2]])}, "pair is out of range"),
        ({"counts": torch.tensor([2])}, "not an expert batch"),
        ({"weight": torch.ones(1)}, "not an expert batch"),
    ],
)
def test_an_expert_batch_that_points_outside_is_refused(change: dict[str, Any], words: str) -> None:
    experts = make_experts(
        normal(2, 8, 5), normal(2, 5, 4), ACTIVATIONS["silu"], round_products=False
    )
    columns = {
        "row": torch.tensor([0, 1]),
        "weight": torch.ones(2),
        "counts": torch.tensor([1, 1]),
        "gather": torch.tensor([[0], [1]]),
    }
    with pytest.raises(ValueError, match=words):
        experts(normal(2, 5), ExpertBatch(**columns | change))


@pytest.mark.parametrize("expert", [-1, 2, 3])
def test_a_choice_of_an_expert_that_is_not_here_is_refused(expert: int) -> None:
    experts = make_experts(
        normal(2, 8, 5), normal(2, 5, 4), ACTIVATIONS["silu"], round_products=False
    )
    local = torch.tensor([1, 0, -1])
    with pytest.raises(ValueError, match="an expert is not on this rank"):
        experts.routed(normal(1, 5), torch.tensor([[0, expert]]), torch.ones(1, 2), local)


# -- the choice of the instruction set -----------------------------------------------------------


def test_the_best_instruction_set_is_taken_and_unknown_ones_are_refused() -> None:
    assert native.kernels.isas()[0] == "plain"
    assert native.kernels.isa() == native.kernels.isas()[-1]
    with pytest.raises(ValueError, match="mmx is not an instruction set that works here"):
        native.kernels.use_isa("mmx")
