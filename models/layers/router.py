"""Top-k routing by softmax: which experts a row visits, and with what weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from asyncmoe.models.layers.linear import Linear
from asyncmoe.native.kinds import kernels_for

TILE_EXPERTS = 32  # the kernel's gate has as many columns or a multiple


class SoftmaxRouter:
    """Softmax over all experts in float32, then the k largest.

    `renormalise` makes the k weights sum to one; `round_to` is the dtype that they pass through on
    their way (a family that casts its weights to the model's dtype loses bits there, and so do we).
    Other rules (sigmoid with a choice-only bias, softmax after the choice) are other classes with
    the same call. Equal shares fall as in `torch.topk`.
    """

    def __init__(
        self,
        weight: Tensor,  # [experts, hidden]
        bias: Tensor | None,
        top_k: int,
        *,
        renormalise: bool,
        round_to: torch.dtype | None,
        pack: bool | None = None,
    ) -> None:
        self.top_k = top_k
        self.renormalise, self.round_to = renormalise, round_to
        self._dtype, self._hidden = weight.dtype, weight.shape[1]
        self.kernel: Any = None  # None: the router runs on torch
        kernels = kernels_for(weight) if round_to in (None, torch.bfloat16, weight.dtype) else None
        if kernels is None:
            self._gate = Linear(weight, bias, pack=pack)
            self.nbytes: int = self._gate.nbytes
            return
        experts, hidden = weight.shape
        # Transposed and widened, so that a vector of experts is beside a number of the row.
        columns = -(-experts // TILE_EXPERTS) * TILE_EXPERTS
        self._columns = functional.pad(weight.float().t(), (0, columns - experts)).contiguous()
        self._bias = torch.full((columns,), -torch.inf)
        self._bias[:experts] = 0.0 if bias is None else bias
        self.nbytes = self._columns.nbytes + self._bias.nbytes
        self.kernel = kernels.Router(
            bf16=weight.dtype is torch.bfloat16,
            gate=self._columns.data_ptr(),
            bias=self._bias.data_ptr(),
            hidden=hidden,
            columns=columns,
            experts=experts,
            top_k=top_k,
            renormalise=renormalise,
            round=round_to is torch.bfloat16,
        )

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [rows, hidden] -> (experts int64 [rows, k], weights float32 [rows, k])."""
        if self.kernel is None:
            return self._on_torch(x)
        rows, hidden = x.shape
        if x.dtype is not self._dtype or hidden != self._hidden or not x.is_contiguous():
            raise ValueError(f"{x.dtype} {tuple(x.shape)} does not fit the router")
        # numpy makes small arrays in half the time
        experts = torch.from_numpy(np.empty((rows, self.top_k), np.int64))
        weights = torch.from_numpy(np.empty((rows, self.top_k), np.float32))
        self.kernel(x.data_ptr(), rows, experts.data_ptr(), weights.data_ptr())
        return experts, weights

    def _on_torch(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, experts = self._gate(x).float().softmax(-1).topk(self.top_k, -1)
        if self.renormalise:
            weights = weights / weights.sum(-1, keepdim=True)
        if self.round_to is not None:
            weights = weights.to(self.round_to).float()
        return experts, weights
