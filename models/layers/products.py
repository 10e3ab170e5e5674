"""x W^T + b with the weight laid out once, at load, in the form that is multiplied fastest.

The compiled kernels take every weight whose dtype they know (`weights.py`). The rest of this text
is about their twin in torch.

oneDNN can reorder a weight for products with few rows ("packed"). With AVX512 that pays for every
weight; with AVX2 for all but small ones. A CPU without bfloat16 instructions takes four to six
times longer for a bfloat16 product than for a float32 one, so that weights are widened to float32
there: products of bfloat16 numbers are exact in float32, so that nothing is lost but memory.

All choices follow from the CPU and the shapes alone, so that equal ranks round alike; and a row is
rounded the same way whatever rows are multiplied with it. Packed products have that property, but
for long ones of bfloat16 on a CPU with AMX, whose sums oneDNN cuts according to the number of rows.
BLAS takes other kernels for few rows, and for the last rows of a product that is no multiple of
some height, so that plain products are padded to a multiple of `TILE_ROWS`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from asyncmoe.models.layers.weights import PANEL, PackedWeights, quantised
from asyncmoe.native.kinds import kernels_for

LARGE_WEIGHT = 1 << 17  # elements; from here on packed products are faster than padded ones
TILE_ROWS = 16  # with AVX512; 4 would do for AVX2


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


class Product(ABC):
    """x [rows, in] -> x W^T + b [rows, out], rounded to the weight's dtype, in `out_dtype`."""

    packed: bool  # the weight's rows cannot be read any more
    kernel: Any = None  # the compiled layer, where it is one
    nbytes: int

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """One product."""


class CompiledProduct(Product):
    """By the compiled kernels."""

    packed = True

    def __init__(
        self,
        kernels: Any,
        weight: Tensor,
        bias: Tensor | None,
        out_dtype: torch.dtype,
        *,
        quantize: bool,
    ) -> None:
        self._dtype, self._out_dtype = weight.dtype, out_dtype
        self._out, self._in = weight.shape
        self._weights = PackedWeights(
            kernels, torch.int8 if quantize else weight.dtype, self._out, self._in
        )
        self._weights.set(0, [weight])
        self._bias = None
        if bias is not None:
            self._bias = functional.pad(bias.float(), (0, -self._out % PANEL))
        self.nbytes = self._weights.nbytes + (0 if self._bias is None else self._bias.nbytes)
        self.kernel = kernels.Linear(
            storage=self._weights.storage,
            weight=self._weights.data.data_ptr(),
            scales=self._weights.scales_ptr,
            bias=0 if self._bias is None else self._bias.data_ptr(),
            columns=self._out,
            inputs=self._in,
            bf16_in=weight.dtype is torch.bfloat16,
            bf16_out=out_dtype is torch.bfloat16,
            round=weight.dtype is torch.bfloat16,
        )

    def __call__(self, x: Tensor) -> Tensor:
        rows, inputs = x.shape
        if inputs != self._in:
            raise ValueError(f"rows of {inputs} elements; the weight takes {self._in}")
        x = kernel_rows(x, self._dtype)
        y = torch.empty((rows, self._out), dtype=self._out_dtype)
        self.kernel(x.data_ptr(), rows, x.stride(0), y.data_ptr())
        return y


def kernel_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x [rows, n] as kernels take it: in memory, in `dtype`, each row's elements beside each other.

    Raises `ValueError` for a tensor on another device.
    """
    if not x.is_cpu:
        raise ValueError(f"rows on {x.device}; the weight is on the CPU")
    if x.dtype is not dtype:
        x = x.to(dtype)
    return x if x.stride(1) == 1 else x.contiguous()


class TorchProduct(Product):
    """By torch; `pack` says whether the weight is packed, None: where that is faster."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype, *, pack: bool | None
    ) -> None:
        self._rounded, self._out_dtype = weight.dtype, out_dtype
        self._dtype = product_dtype(weight.dtype, weight.device)
        weight = weight.to(self._dtype)
        self._bias = None if bias is None else bias.to(self._dtype)
        self.nbytes = weight.nbytes + (0 if self._bias is None else self._bias.nbytes)
        self.packed = packing_pays(weight) if pack is None else pack
        if self.packed:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        self.weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        if self.packed:
            y: Tensor = torch.ops.mkldnn._linear_pointwise(
                x.to(self._dtype), self.weight, self._bias, "none", [], ""
            )
        else:
            tiles = _whole_tiles(x, self._dtype)
            y = functional.linear(tiles, self.weight, self._bias)[: len(x)]
        return y.to(self._rounded).to(self._out_dtype)


class QuantisedProduct(Product):
    """By torch, with a weight of int8 that is widened at each use: it saves memory, not time."""

    packed = True

    def __init__(self, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> None:
        self._rounded, self._out_dtype = weight.dtype, out_dtype
        self._weight, self._scale = quantised(weight)
        self._bias = None if bias is None else bias.float()
        held = (self._weight, self._scale, self._bias)
        self.nbytes = sum(part.nbytes for part in held if part is not None)

    def __call__(self, x: Tensor) -> Tensor:
        y = functional.linear(_whole_tiles(x, torch.float32), self._weight.float())[: len(x)]
        y = y * self._scale
        if self._bias is not None:
            y = y + self._bias
        return y.to(self._rounded).to(self._out_dtype)


def make_product(
    weight: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    *,
    pack: bool | None,
    quantize: bool,
) -> Product:
    """The fastest product there is for this weight; see `Linear`."""
    kernels = kernels_for(weight) if pack is None else None
    if kernels is not None and out_dtype in (torch.float32, torch.bfloat16):
        return CompiledProduct(kernels, weight, bias, out_dtype, quantize=quantize)
    if quantize:
        return QuantisedProduct(weight, bias, out_dtype)
    return TorchProduct(weight, bias, out_dtype, pack=pack)


def _whole_tiles(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in `dtype`, with rows of zeros below it up to a multiple of `TILE_ROWS`."""
    rows, width = x.shape
    missing = -rows % TILE_ROWS
    if not missing:
        return x.to(dtype)
    padded = x.new_zeros((rows + missing, width), dtype=dtype)
    padded[:rows] = x
    return padded
