"""Matrix products with weights laid out once, at load, in the form this CPU multiplies fastest.

oneDNN can reorder a weight for products with few rows ("packed"). With AVX512 that pays for every
weight; with AVX2 it doubles the speed of large ones and slows small ones down. A CPU without
bfloat16 instructions takes four to six times longer for a bfloat16 product than for a float32 one,
so that weights are widened to float32 there: products of bfloat16 numbers are exact in float32, so
that nothing is lost but memory. All choices follow from the CPU and the shapes alone, so that equal
ranks round alike.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

LARGE_WEIGHT = 1 << 22  # elements; it does not fit the caches
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
def packing_pays_always() -> bool:
    """Whether packed products are faster at every size on this CPU."""
    return bool(torch.backends.cpu.get_cpu_capability().startswith("AVX512"))


def _packing_pays(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return packing_pays_always() or weight.numel() >= LARGE_WEIGHT


def product_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype in which products of `dtype` are fastest on `device` without losing accuracy."""
    if device.type == "cpu" and dtype == torch.bfloat16 and not _cpu_multiplies_bfloat16():
        return torch.float32
    return dtype


class Linear:
    """x [rows, in] -> x W^T + b [rows, out] in `out_dtype`, which defaults to the weight's own.

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
        self.packed = _packing_pays(weight) if pack is None else pack
        if self.packed:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        self.weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        x = x.to(self.dtype)
        if self.packed:
            y: Tensor = torch.ops.mkldnn._linear_pointwise(
                x, self.weight, self.bias, "none", [], ""
            )
        else:
            y = functional.linear(x, self.weight, self.bias)
        return y.to(self.out_dtype)


class GatedMlp:
    """down(act(gate x) * (up x)) with gate and up in one product: the dense feed-forward block.

    A shared expert is one of these on the home rank, added to `Routed.residual`.
    """

    def __init__(self, gate_up: Linear, down: Linear, activation: Activation) -> None:
        self.gate_up, self.down, self.activation = gate_up, down, activation

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(self.activation(gate) * up)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.gate_up.nbytes + self.down.nbytes
