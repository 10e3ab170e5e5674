"""The routed experts of one layer that live on this rank, and the weighted sum of their outputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from asyncmoe.model import ExpertBatch
from asyncmoe.models.layers.linear import GatedMlp


class GatedExperts:
    """Gated feed-forward experts, each with its own weights in the form of `Linear`.

    Rows come sorted by expert, so that each expert present multiplies one slice: the Python cost
    grows with the experts, not with the rows. Experts with packed 4- or 8-bit weights are another
    `Linear` inside; a device with a grouped kernel is another class with the same call.
    """

    def __init__(self, experts: Sequence[GatedMlp]) -> None:
        self.experts = experts

    def __call__(self, x: Tensor, batch: ExpertBatch) -> Tensor:
        """x [rows, hidden] -> [out_rows, hidden] in x's dtype; see `Model.experts`."""
        rows = x[batch.row]
        outputs = torch.empty(rows.shape, dtype=torch.float32, device=x.device)
        start = 0
        for expert, count in zip(self.experts, batch.counts.tolist(), strict=True):
            if count:
                outputs[start : start + count] = expert(rows[start : start + count])
                start += count
        return combine(outputs, batch).to(x.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(expert.nbytes for expert in self.experts)


def combine(outputs: Tensor, batch: ExpertBatch) -> Tensor:
    """Weighted float32 sum of expert outputs [pairs, hidden] per output row, in `gather` order."""
    weighted = outputs * batch.weight[:, None]
    gather = batch.gather
    total = torch.zeros((len(gather), outputs.shape[1]), device=outputs.device)
    for column in gather.unbind(1):
        present = (column >= 0)[:, None]
        total += torch.where(present, weighted[column.clamp(min=0)], 0.0)
    return total
