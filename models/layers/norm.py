"""Root-mean-square normalisation, alone or of a sum with the residual."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from asyncmoe.native.kinds import kernels_for


class RmsNorm:
    """x / rms(x) over the last dimension, computed in float32, then times weight in x's dtype.

    The weight may have dimensions of x before the last: one weight per head.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight, self.eps = weight.contiguous(), eps
        self.nbytes: int = weight.nbytes
        self._kernels: Any = kernels_for(weight) if weight.dim() == 1 else None
        self._dtype, self._width = weight.dtype, weight.shape[-1]
        self._bf16, self._address = weight.dtype is torch.bfloat16, self.weight.data_ptr()

    def __call__(self, x: Tensor) -> Tensor:
        if not self._compiled(x):
            return self.weight * functional.rms_norm(x, x.shape[-1:], None, self.eps)
        out = torch.empty_like(x)
        self._kernels.norm(
            self._bf16, x.data_ptr(), 0, 0, self._address, out.data_ptr(),
            x.numel() // self._width, self._width, self.eps,
        )  # fmt: skip
        return out

    def of_sum(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """x + y, and its norm; y is given up and may be overwritten."""
        if not (self._compiled(x) and self._compiled(y) and x.shape == y.shape):
            x = x + y
            return x, self(x)
        out, at = torch.empty_like(x), y.data_ptr()
        self._kernels.norm(
            self._bf16, x.data_ptr(), at, at, self._address, out.data_ptr(),
            x.numel() // self._width, self._width, self.eps,
        )  # fmt: skip
        return y, out

    def _compiled(self, x: Tensor) -> bool:
        return (
            self._kernels is not None
            and x.dtype is self._dtype
            and x.is_contiguous()
            and x.shape[-1] == self._width
        )
