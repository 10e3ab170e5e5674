"""Which tensors the compiled kernels take: those on a CPU, in a dtype that they know."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from asyncmoe import native

DTYPES = (torch.float32, torch.bfloat16)


def kernels_for(weight: Tensor) -> Any:
    """The compiled module, for what computes on tensors like this one; None: torch does that."""
    if weight.device.type != "cpu" or weight.dtype not in DTYPES:
        return None
    return native.kernels
