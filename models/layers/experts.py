"""The routed experts of one layer that live on this rank, and the weighted sum of their outputs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from asyncmoe.model import ExpertBatch
from asyncmoe.models.layers.linear import (
    TILE_ROWS,
    Activation,
    GatedMlp,
    Linear,
    gated,
    packing_pays,
    product_dtype,
)


class Experts(ABC):
    """Local experts of one layer. Packed 4- and 8-bit weights are one more class of this kind.

    On a CPU an output row is the same, bit for bit, whatever other pairs are in the batch.
    `round_products` rounds weight times output to x's dtype before the sum, as families do that
    cast their router's weights; otherwise the products are float32 like the sum.
    """

    round_products: bool

    def __call__(self, x: Tensor, batch: ExpertBatch) -> Tensor:
        """x [rows, hidden] -> [out_rows, hidden] in x's dtype; see `Model.experts`."""
        outputs = self.outputs(x[batch.row], batch.counts)
        return combine(outputs, batch, round_products=self.round_products).to(x.dtype)

    @abstractmethod
    def outputs(self, x: Tensor, counts: Tensor) -> Tensor:
        """x [pairs, hidden], sorted by expert, `counts` rows of each -> [pairs, hidden]."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes held."""


class SeparateExperts(Experts):
    """Each expert is an MLP of its own; the Python cost grows with the experts present."""

    def __init__(self, experts: Sequence[GatedMlp], *, round_products: bool) -> None:
        self.experts, self.round_products = experts, round_products

    def outputs(self, x: Tensor, counts: Tensor) -> Tensor:
        outputs = torch.empty_like(x)
        start = 0
        for expert, count in zip(self.experts, counts.tolist(), strict=True):
            if count:
                outputs[start : start + count] = expert(x[start : start + count])
                start += count
        return outputs

    @property
    def nbytes(self) -> int:
        return sum(expert.nbytes for expert in self.experts)


class GroupedExperts(Experts):
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

    @property
    def nbytes(self) -> int:
        return self.gate_up.nbytes + self.down.nbytes


def make_experts(
    gate_up: Tensor,
    down: Tensor,
    activation: Activation,
    *,
    round_products: bool,
    pack: bool | None = None,
) -> Experts:
    """Experts from [experts, 2 * width, hidden] and [experts, hidden, width].

    `pack` says whether their weights are packed; None: where that is faster.
    """
    row_bytes = [w.shape[2] * product_dtype(w.dtype, w.device).itemsize for w in (gate_up, down)]
    groupable = all(size % 16 == 0 for size in row_bytes)  # the grouped product asks for that
    if groupable and not (packing_pays(gate_up[:1]) if pack is None else pack):
        return GroupedExperts(gate_up, down, activation, round_products=round_products)
    mlps = [
        GatedMlp(Linear(a, pack=pack), Linear(b, pack=pack), activation)
        for a, b in zip(gate_up, down, strict=True)
    ]
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
