"""Root-mean-square normalisation."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


class RmsNorm:
    """x / rms(x) * weight over the last dimension, computed in float32, result in x's dtype."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight, self.eps = weight, eps

    def __call__(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.weight.nbytes
