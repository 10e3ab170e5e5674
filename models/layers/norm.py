"""Root-mean-square normalisation."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


class RmsNorm:
    """x / rms(x) over the last dimension, computed in float32, then times weight in x's dtype.

    The weight may have dimensions of x before the last: one weight per head.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight, self.eps = weight, eps
        self.nbytes: int = weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return self.weight * functional.rms_norm(x, x.shape[-1:], None, self.eps)
