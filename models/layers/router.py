"""Top-k routing by softmax: which experts a row visits, and with what weights."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncmoe.models.layers.linear import Linear


class SoftmaxRouter:
    """Softmax over all experts in float32, then the k largest.

    `renormalise` makes the k weights sum to one; `round_to` is the dtype that they pass through on
    their way (a family that casts its weights to the model's dtype loses bits there, and so do we).
    Other rules (sigmoid with a choice-only bias, softmax after the choice) are other classes with
    the same call.
    """

    def __init__(
        self, gate: Linear, top_k: int, *, renormalise: bool, round_to: torch.dtype | None
    ) -> None:
        self.gate, self.top_k = gate, top_k
        self.renormalise, self.round_to = renormalise, round_to

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [rows, hidden] -> (experts int64 [rows, k], weights float32 [rows, k])."""
        weights, experts = self.gate(x).float().softmax(-1).topk(self.top_k, -1)
        if self.renormalise:
            weights = weights / weights.sum(-1, keepdim=True)
        if self.round_to is not None:
            weights = weights.to(self.round_to).float()
        return experts, weights

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.gate.nbytes
