"""Root-mean-square normalisation."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


class RmsNorm:
    """x / rms(x) over the last dimension, computed in float32, then times weight in x's dtype."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight, self.eps = weight, eps
        self.nbytes: int = weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return self.weight * functional.rms_norm(x, self.weight.shape, None, self.eps)
