"""Matrix products with weights laid out once, at load, in the form this CPU multiplies fastest.

oneDNN can reorder a weight for products with few rows ("packed"). With AVX512 that pays for every
weight; with AVX2 for all but small ones. A CPU without bfloat16 instructions takes four to six
times longer for a bfloat16 product than for a float32 one, so that weights are widened to float32
there: products of bfloat16 numbers are exact in float32, so that nothing is lost but memory.

All choices follow from the CPU and the shapes alone, so that equal ranks round alike; and a row is
rounded the same way whatever rows are multiplied with it. Packed products have that property. BLAS
takes other kernels for the last rows of a product that is no multiple of `TILE_ROWS` high, so that
plain products are padded to one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

LARGE_WEIGHT = 1 << 17  # elements; from here on packed products are faster than padded ones
TILE_ROWS = 4
SERIAL_ELEMENTS = 1 << 15  # elementwise work up to this size is not shared between threads
Activation = Callable[[Tensor], Tensor]
ACTIVATIONS: dict[str, Activation] = {
    "silu": functional.silu,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


@cache
def _cpu_multiplies_bfloat16() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@cache
def _packing_pays_always() -> bool:
    return bool(torch.backends.cpu.get_cpu_capability().startswith("AVX512"))


def packing_pays(weight: Tensor) -> bool:
    """Whether products with `weight` are faster packed, on this CPU."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return _packing_pays_always() or weight.numel() >= LARGE_WEIGHT


def product_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype in which products of `dtype` are fastest on `device` without losing accuracy."""
    if device.type == "cpu" and dtype == torch.bfloat16 and not _cpu_multiplies_bfloat16():
        return torch.float32
    return dtype


class Linear:
    """x [rows, in] -> x W^T + b [rows, out] in `out_dtype`, which defaults to the weight's own.

    On a CPU each row's result is the same, bit for bit, whatever the other rows and their number.
    `pack` says whether the weight is packed; None: where that is faster. A weight that is read
    elsewhere too must not be.
    """

    def __init__(
        self,
        weight: Tensor,  # [out, in]
        bias: Tensor | None = None,
        *,
        out_dtype: torch.dtype | None = None,
        pack: bool | None = None,
    ) -> None:
        self.out_dtype = weight.dtype if out_dtype is None else out_dtype
        self.dtype = product_dtype(weight.dtype, weight.device)
        weight = weight.to(self.dtype)
        self.bias = None if bias is None else bias.to(self.dtype)
        self.nbytes: int = weight.nbytes + (0 if self.bias is None else self.bias.nbytes)
        self.packed = packing_pays(weight) if pack is None else pack
        if self.packed:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        self.weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        if self.packed:
            y: Tensor = torch.ops.mkldnn._linear_pointwise(
                x.to(self.dtype), self.weight, self.bias, "none", [], ""
            )
        else:
            y = functional.linear(_whole_tiles(x, self.dtype), self.weight, self.bias)[: len(x)]
        return y.to(self.out_dtype)


def _whole_tiles(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in `dtype`, with rows of zeros below it up to a multiple of `TILE_ROWS`."""
    rows, width = x.shape
    missing = -rows % TILE_ROWS
    if not missing:
        return x.to(dtype)
    padded = x.new_zeros((rows + missing, width), dtype=dtype)
    padded[:rows] = x
    return padded


def gated(gate_up: Tensor, activation: Activation) -> Tensor:
    """[rows, 2 * width] -> act(gate) * up, [rows, width].

    The activation takes few rows at a time: torch divides larger work between threads in the middle
    of rows, and rounds the elements at a division otherwise.
    """
    gate, up = gate_up.chunk(2, -1)
    most = max(1, SERIAL_ELEMENTS // gate.shape[1])
    if len(gate) <= most:
        return activation(gate) * up
    return torch.cat([activation(rows) for rows in torch.split(gate, most)]) * up


class GatedMlp:
    """down(act(gate x) * (up x)) with gate and up in one product: the dense feed-forward block.

    A shared expert is one of these on the home rank, added to `Routed.residual`.
    """

    def __init__(self, gate_up: Linear, down: Linear, activation: Activation) -> None:
        self.gate_up, self.down, self.activation = gate_up, down, activation

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(gated(self.gate_up(x), self.activation))

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.gate_up.nbytes + self.down.nbytes
