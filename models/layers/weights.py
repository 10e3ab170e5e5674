"""Weights as the compiled products read them: in panels of 16 outputs, quantised if asked for.

Quantised weights are int8 with one float32 scale per output, chosen so that the output's largest
weight becomes 127: weight = scale * int8, to half a step.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

PANEL = 16  # outputs
_STORAGE = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}  # as in packed.h
_LARGE_PAGE = 1 << 21  # bytes
_QUANTISED_ROWS = 4096  # at a time, so that no float32 copy of a large weight is made


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[out, in] -> int8 [out, in] and float32 scales [out]; the scale of a row of zeros is 0."""
    whole = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales, most = [], _QUANTISED_ROWS
    for rows, out in zip(torch.split(weight, most), torch.split(whole, most), strict=True):
        values = rows.float()
        scale = values.abs().amax(1) / 127
        out.copy_((values / scale.clamp_min(torch.finfo(scale.dtype).tiny)[:, None]).round_())
        scales.append(scale)
    return whole, torch.cat(scales)


def weight_memory(nbytes: int) -> Tensor:
    """uint8 [nbytes] of zeros, in large pages where the system has them.

    A decode step reads all of a large weight: with small pages the addresses of thousands of them
    would have to be looked up each time.
    """
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None or nbytes < _LARGE_PAGE:
        return torch.zeros(nbytes, dtype=torch.uint8)
    _give_back()
    memory = mmap.mmap(-1, nbytes + _LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    first = -whole.data_ptr() % _LARGE_PAGE
    with contextlib.suppress(OSError):  # of a kernel without large pages
        # None that is not full: memory in use is what is asked for.
        memory.madvise(advice, first, nbytes // _LARGE_PAGE * _LARGE_PAGE)
    return whole.narrow(0, first, nbytes)


def _give_back() -> None:
    """Give the system what was freed since: none of it becomes part of a memory map, as it would
    of malloc's (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class PackedWeights:
    """The packed weights of `count` layers, one behind the other.

    A layer has `parts` weights of the same shape, [out, in] each, whose panels alternate.
    """

    def __init__(
        self,
        kernels: Any,
        dtype: torch.dtype,
        out: int,
        inputs: int,
        *,
        count: int = 1,
        parts: int = 1,
    ) -> None:
        self.storage, self.out, self.inputs = _STORAGE[dtype], out, inputs
        self._kernels, self._dtype, self._parts = kernels, dtype, parts
        self._panels = -(-out // PANEL)
        layer_bytes = parts * kernels.packed_bytes(self.storage, out, inputs)
        self.data = weight_memory(count * layer_bytes).view(count, layer_bytes)
        self._scales: Tensor | None = None
        if dtype is torch.int8:
            self._scales = torch.zeros((count, self._panels, parts, PANEL))

    def set(self, index: int, weights: Sequence[Tensor]) -> None:
        """Pack the parts of layer `index`; they are quantised if these are weights of int8."""
        for part, weight in enumerate(weights):
            if self._scales is not None:
                weight, scale = quantised(weight)
                scale = functional.pad(scale, (0, self._panels * PANEL - self.out))
                self._scales[index, :, part] = scale.view(self._panels, PANEL)
            if weight.shape != (self.out, self.inputs) or weight.dtype is not self._dtype:
                raise ValueError(f"{weight.dtype} weight of shape {list(weight.shape)}")
            weight = weight.contiguous()
            self._kernels.pack(
                weight.data_ptr(), self.out, self.inputs, self.storage,
                self.data[index].data_ptr(), part, self._parts,
            )  # fmt: skip

    @property
    def scales_ptr(self) -> int:
        """Address of the scales, float32 [count, panels, parts, PANEL]; 0: there are none."""
        return 0 if self._scales is None else self._scales.data_ptr()

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.data.nbytes + (0 if self._scales is None else self._scales.nbytes)
