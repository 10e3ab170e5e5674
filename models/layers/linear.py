"""Linear layers and gated MLPs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from asyncmoe.models.layers.products import TorchProduct, make_product
from asyncmoe.native.kinds import kernels_for

SERIAL_ELEMENTS = 1 << 15  # elementwise work up to this size is not shared between threads


class Linear:
    """x [rows, in] -> x W^T + b [rows, out], rounded to the weight's dtype, in `out_dtype`.

    On a CPU each row's result is the same, bit for bit, whatever the other rows and their number.
    `pack` None takes the compiled kernels, if there are any, or the faster way of torch; True and
    False take torch's packed and plain products. `quantize` keeps the weight as int8.
    """

    def __init__(
        self,
        weight: Tensor,  # [out, in]
        bias: Tensor | None = None,
        *,
        out_dtype: torch.dtype | None = None,
        pack: bool | None = None,
        quantize: bool = False,
    ) -> None:
        self._product = make_product(
            weight, bias, out_dtype or weight.dtype, pack=pack, quantize=quantize
        )
        self.nbytes = self._product.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(x)

    @property
    def kernel(self) -> Any:
        """The compiled layer; None: torch multiplies."""
        return self._product.kernel

    @property
    def plain_weight(self) -> Tensor | None:
        """[out, in], if the layer holds it in a form that others can read."""
        product = self._product
        return product.weight if isinstance(product, TorchProduct) and not product.packed else None


@dataclass(frozen=True)
class Activation:
    """The nonlinearity of a gated MLP, by the name that configs and kernels know it by."""

    name: str
    function: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        return self.function(x)


def _gelu_tanh(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


ACTIVATIONS = {
    name: Activation(name, function)
    for name, function in (
        ("silu", functional.silu),
        ("relu", functional.relu),
        ("gelu", functional.gelu),
        ("gelu_pytorch_tanh", _gelu_tanh),
    )
}


def gated(gate_up: Tensor, activation: Activation) -> Tensor:
    """[rows, 2 * width] -> act(gate) * up, [rows, width]."""
    kernels = kernels_for(gate_up)
    if kernels is None:
        return _gated_by_torch(gate_up, activation)
    rows, both = gate_up.shape
    gate_up = gate_up.contiguous()
    out = gate_up.new_empty((rows, both // 2))
    bf16 = gate_up.dtype is torch.bfloat16
    kernels.gated(activation.name, bf16, gate_up.data_ptr(), rows, both // 2, out.data_ptr())
    return out


def _gated_by_torch(gate_up: Tensor, activation: Activation) -> Tensor:
    # The activation takes few rows at a time: torch divides larger work between threads in the
    # middle of rows, and rounds the elements at a division otherwise.
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
