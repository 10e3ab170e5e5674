"""Which layers may call the compiled kernels: those on a CPU, in a dtype that kernels know."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from asyncmoe import native

DTYPES = (torch.float32, torch.bfloat16)


def kernels_for(weight: Tensor) -> Any:
    """The compiled module, for layers with weights like this one; None: they run on torch."""
    if weight.device.type != "cpu" or weight.dtype not in DTYPES:
        return None
    return native.kernels
