"""Matrix products with weights laid out once, at load, in the form this CPU multiplies fastest.

oneDNN can reorder a weight for products with few rows (`packed`), in float32 everywhere and in
bfloat16 where the CPU has instructions for it. Where it has none, a bfloat16 product is several
times slower than a float32 one, so that weights are widened to float32 once instead: products of
bfloat16 numbers are exact in float32, so nothing is lost but memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

Activation = Callable[[Tensor], Tensor]
ACTIVATIONS: dict[str, Activation] = {
    "silu": functional.silu,
    "swish": functional.silu,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


@cache
def _cpu_multiplies_bfloat16() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@cache
def _can_pack() -> bool:
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def product_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype in which products of `dtype` are fastest on `device` without losing accuracy."""
    if device.type == "cpu" and dtype == torch.bfloat16 and not _cpu_multiplies_bfloat16():
        return torch.float32
    return dtype


class Linear:
    """x [rows, in] -> x W^T + b [rows, out] in `out_dtype`, which defaults to the weight's own.

    `pack` False keeps the weight as it is, for a weight that is read elsewhere too.
    """

    def __init__(
        self,
        weight: Tensor,  # [out, in]
        bias: Tensor | None = None,
        *,
        out_dtype: torch.dtype | None = None,
        pack: bool = True,
    ) -> None:
        self.out_dtype = weight.dtype if out_dtype is None else out_dtype
        self.dtype = product_dtype(weight.dtype, weight.device)
        weight = weight.to(self.dtype)
        self.bias = None if bias is None else bias.to(self.dtype)
        self.nbytes: int = weight.nbytes + (0 if self.bias is None else self.bias.nbytes)
        self.packed = pack and weight.device.type == "cpu" and _can_pack()
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
