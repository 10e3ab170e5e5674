"""The routed experts of one layer that live on this rank, and the weighted sum of their outputs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from asyncmoe.model import ExpertBatch, pair_batch
from asyncmoe.models.layers.linear import Activation, GatedMlp, Linear, gated
from asyncmoe.models.layers.products import (
    TILE_ROWS,
    kernel_rows,
    packing_pays,
    product_dtype,
)
from asyncmoe.models.layers.weights import PackedWeights
from asyncmoe.native.kinds import kernels_for


class Experts(ABC):
    """Local experts of one layer.

    On a CPU an output row is the same, bit for bit, whatever other pairs are in the batch.
    `round_products` rounds weight times output to x's dtype before the sum, as families do that
    cast their router's weights; otherwise the products are float32 like the sum.
    """

    round_products: bool
    nbytes: int

    @abstractmethod
    def __call__(self, x: Tensor, batch: ExpertBatch) -> Tensor:
        """x [rows, hidden] -> [out_rows, hidden] in x's dtype; see `Model.experts`."""

    def routed(self, x: Tensor, experts: Tensor, weights: Tensor, local: Tensor) -> Tensor:
        """x [rows, hidden] -> [rows, hidden]; see `Model.local_experts`."""
        return self(x, pair_batch(experts, weights, local))


class CompiledExperts(Experts):
    """By the compiled kernels: all experts of a batch, and their sums, in one call."""

    def __init__(
        self,
        kernels: Any,
        gate_up: Tensor,  # [experts, 2 * width, hidden]
        down: Tensor,  # [experts, hidden, width]
        activation: Activation,
        *,
        round_products: bool,
        quantize: bool,
    ) -> None:
        count, hidden, width = down.shape
        self.kernels = kernels
        self.round_products = round_products
        self._dtype, self._count, self._hidden = down.dtype, count, hidden
        stored = torch.int8 if quantize else down.dtype
        self._gate_up = PackedWeights(kernels, stored, width, hidden, count=count, parts=2)
        self._down = PackedWeights(kernels, stored, hidden, width, count=count)
        for expert in range(count):
            self._gate_up.set(expert, torch.split(gate_up[expert], width))
            self._down.set(expert, [down[expert]])
        self.nbytes = self._gate_up.nbytes + self._down.nbytes
        self.kernel = kernels.Experts(
            storage=self._down.storage,
            gate_up=self._gate_up.data.data_ptr(),
            gate_up_scales=self._gate_up.scales_ptr,
            down=self._down.data.data_ptr(),
            down_scales=self._down.scales_ptr,
            experts=count,
            hidden=hidden,
            width=width,
            activation=activation.name,
            bf16=down.dtype is torch.bfloat16,
            round_products=round_products,
        )

    def __call__(self, x: Tensor, batch: ExpertBatch) -> Tensor:
        x = self._rows(x)
        out_rows, gather_width = batch.gather.shape
        pairs = len(batch.row)
        row, counts = batch.row.contiguous(), batch.counts.contiguous()
        weight, gather = batch.weight.contiguous(), batch.gather.contiguous()
        good = row.dtype is counts.dtype is gather.dtype is torch.int64
        good &= weight.dtype is torch.float32 and len(weight) == pairs
        if not good or len(counts) != self._count:
            raise ValueError(f"not an expert batch for {self._count} experts")
        out = torch.empty((out_rows, self._hidden), dtype=self._dtype)
        self.kernel(
            x.data_ptr(), len(x), x.stride(0), pairs, row.data_ptr(), weight.data_ptr(),
            counts.data_ptr(), gather.data_ptr(), out_rows, gather_width, out.data_ptr(),
        )  # fmt: skip
        return out

    def routed(self, x: Tensor, experts: Tensor, weights: Tensor, local: Tensor) -> Tensor:
        x = self._rows(x)
        rows, top_k = experts.shape
        experts, weights, local = experts.contiguous(), weights.contiguous(), local.contiguous()
        good = experts.dtype is local.dtype is torch.int64 and weights.dtype is torch.float32
        if not good or weights.shape != experts.shape or len(x) != rows:
            raise ValueError("not a router's choice for these rows")
        out = torch.empty((rows, self._hidden), dtype=self._dtype)
        self.kernel.routed(
            x.data_ptr(), rows, x.stride(0), experts.data_ptr(), weights.data_ptr(), top_k,
            local.data_ptr(), len(local), out.data_ptr(),
        )  # fmt: skip
        return out

    def _rows(self, x: Tensor) -> Tensor:
        if x.shape[1] != self._hidden:
            raise ValueError(f"rows of {x.shape[1]} elements; the experts take {self._hidden}")
        return kernel_rows(x, self._dtype)


class TorchExperts(Experts):
    """Experts that torch computes, one product after the other, from sorted rows."""

    def __call__(self, x: Tensor, batch: ExpertBatch) -> Tensor:
        outputs = self.outputs(x[batch.row], batch.counts)
        return combine(outputs, batch, round_products=self.round_products).to(x.dtype)

    @abstractmethod
    def outputs(self, x: Tensor, counts: Tensor) -> Tensor:
        """x [pairs, hidden], sorted by expert, `counts` rows of each -> [pairs, hidden]."""


class SeparateExperts(TorchExperts):
    """Each expert is an MLP of its own; the Python cost grows with the experts present."""

    def __init__(self, experts: Sequence[GatedMlp], *, round_products: bool) -> None:
        self.experts, self.round_products = experts, round_products
        self.nbytes = sum(expert.nbytes for expert in experts)

    def outputs(self, x: Tensor, counts: Tensor) -> Tensor:
        outputs = torch.empty_like(x)
        start = 0
        for expert, count in zip(self.experts, counts.tolist(), strict=True):
            if count:
                outputs[start : start + count] = expert(x[start : start + count])
                start += count
        return outputs


class GroupedExperts(TorchExperts):
    """The experts' weights in one tensor, multiplied by a grouped product.

    That product is a plain one per expert, so that each expert's rows are padded like those of a
    plain `Linear`, and for the same reason.
    """

    def __init__(
        self,
        gate_up: Tensor,  # [experts, 2 * width, hidden]
        down: Tensor,  # [experts, hidden, width]
        activation: Activation,
        *,
        round_products: bool,
    ) -> None:
        self.round_products = round_products
        self.dtype = product_dtype(gate_up.dtype, gate_up.device)
        self.gate_up = gate_up.to(self.dtype).transpose(1, 2)
        self.down = down.to(self.dtype).transpose(1, 2)
        self.activation = activation
        self.nbytes = self.gate_up.nbytes + self.down.nbytes

    def outputs(self, x: Tensor, counts: Tensor) -> Tensor:
        padded = (counts + (TILE_ROWS - 1)) // TILE_ROWS * TILE_ROWS
        ends = padded.cumsum(0)
        shift = ends - padded - (counts.cumsum(0) - counts)
        place = torch.arange(len(x), device=x.device) + shift.repeat_interleave(counts)
        rows = x.new_zeros((int(ends[-1]), x.shape[1]), dtype=self.dtype)
        rows[place] = x.to(self.dtype)
        ends = ends.to(torch.int32)
        inner = functional.grouped_mm(rows, self.gate_up, offs=ends).to(x.dtype)
        inner = gated(inner, self.activation).to(self.dtype)
        return functional.grouped_mm(inner, self.down, offs=ends)[place].to(x.dtype)


def make_experts(
    gate_up: Tensor,
    down: Tensor,
    activation: Activation,
    *,
    round_products: bool,
    pack: bool | None = None,
    quantize: bool = False,
) -> Experts:
    """Experts from [experts, 2 * width, hidden] and [experts, hidden, width].

    `pack` and `quantize` are those of `Linear`.
    """
    kernels = kernels_for(down) if pack is None else None
    if kernels is not None:
        return CompiledExperts(
            kernels, gate_up, down, activation, round_products=round_products, quantize=quantize
        )
    row_bytes = [w.shape[2] * product_dtype(w.dtype, w.device).itemsize for w in (gate_up, down)]
    groupable = all(size % 16 == 0 for size in row_bytes)  # the grouped product asks for that
    if groupable and not (quantize or (packing_pays(gate_up[:1]) if pack is None else pack)):
        return GroupedExperts(gate_up, down, activation, round_products=round_products)
    mlps = [
        GatedMlp(
            Linear(a, pack=pack, quantize=quantize), Linear(b, pack=pack, quantize=quantize),
            activation,
        )
        for a, b in zip(gate_up, down, strict=True)
    ]  # fmt: skip
    return SeparateExperts(mlps, round_products=round_products)


def combine(outputs: Tensor, batch: ExpertBatch, *, round_products: bool) -> Tensor:
    """Weighted float32 sum of expert outputs [pairs, hidden] per output row, in `gather` order.

    One bag of pairs per output row, summed from its first pair to its last whatever the other bags
    hold. Missing pairs are left out, not multiplied by zero, which would let a NaN through.
    """
    present = batch.gather >= 0
    pairs = batch.gather[present]
    lengths = present.sum(1)
    starts = lengths.cumsum(0) - lengths
    if round_products:
        outputs = outputs * batch.weight.to(outputs.dtype)[:, None]
        return functional.embedding_bag(pairs, outputs.float(), starts, mode="sum")
    weights = batch.weight[pairs]
    return functional.embedding_bag(
        pairs, outputs.float(), starts, mode="sum", per_sample_weights=weights
    )
