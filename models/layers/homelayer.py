"""A decoder layer up to its router, or several layers with their experts, in one compiled call.

The kernels and their order are those of the layers' parts, so that results are theirs, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncmoe.model import Routed
from asyncmoe.models.layers.attention import Attention, CompiledMixer
from asyncmoe.models.layers.experts import CompiledExperts, Experts
from asyncmoe.models.layers.norm import RmsNorm
from asyncmoe.models.layers.paged import PagedBatch
from asyncmoe.models.layers.rope import Angles
from asyncmoe.models.layers.router import SoftmaxRouter
from asyncmoe.native.kinds import kernels_for


class HomeLayer:
    """Norm, attention, norm of the sum with the residual, and router."""

    def __init__(
        self,
        kernels: Any,
        norm: RmsNorm,
        attention: Attention,
        router_norm: RmsNorm,
        router: SoftmaxRouter,
        mixer: CompiledMixer,
    ) -> None:
        """The parts keep the memory that the kernels read."""
        self.mixer, self._top_k = mixer, router.top_k
        self._dtype, self._hidden = norm.weight.dtype, norm.weight.shape[0]
        self._kernels, self._parts = kernels, (norm, attention, router_norm, router)
        self.kernel = kernels.HomeLayer(
            norm=norm.weight.data_ptr(),
            norm_eps=norm.eps,
            qkv=attention.qkv.kernel,
            attention=mixer.kernel,
            out=attention.out.kernel,
            router_norm=router_norm.weight.data_ptr(),
            router_norm_eps=router_norm.eps,
            router=router.kernel,
        )

    def __call__(
        self, x: Tensor, angles: Angles, batch: PagedBatch, cache: Mapping[str, Tensor]
    ) -> Routed:
        """x [rows, hidden]; writes the rows' K and V to the cache."""
        rows, x = batch.count, self.rows(x, batch)
        angle, store = self.mixer.memory(angles, batch, cache)
        residual, hidden = torch.empty_like(x), torch.empty_like(x)
        # numpy makes small arrays in half the time
        experts = torch.from_numpy(np.empty((rows, self._top_k), np.int64))
        weights = torch.from_numpy(np.empty((rows, self._top_k), np.float32))
        self.kernel(
            batch.compiled(self._kernels), x.data_ptr(), angle, *store,
            residual.data_ptr(), hidden.data_ptr(), experts.data_ptr(), weights.data_ptr(),
        )  # fmt: skip
        return Routed(residual, hidden, experts, weights)

    def rows(self, x: Tensor, batch: PagedBatch) -> Tensor:
        """x as the kernel reads it. Raises `ValueError` if it does not fit layer and batch."""
        if x.dtype is not self._dtype or x.shape != (batch.count, self._hidden):
            raise ValueError(f"{x.dtype} {tuple(x.shape)} does not fit the layer and the batch")
        return x.contiguous()


class WholeLayers:
    """Decoder layers, each with all that a home rank has of it and the experts that live here."""

    def __init__(self, kernels: Any, layers: Sequence[tuple[HomeLayer, CompiledExperts]]) -> None:
        self.kernels, self._parts = kernels, layers
        self.kernel = kernels.Layers()
        for home, experts in layers:
            self.kernel.add(home.kernel, experts.kernel)

    def __call__(
        self,
        layers: range,
        x: Tensor,
        angles: Angles,
        batch: PagedBatch,
        cache: Sequence[Mapping[str, Tensor]],
        local: Sequence[Tensor],
        wanted: Callable[[], bool],
    ) -> tuple[Tensor, list[float]]:
        """See `Model.through`."""
        x = self._parts[layers.start][0].rows(x, batch)
        angle, memory = self.memory(layers, angles, batch, cache, local)
        out, seconds = torch.empty_like(x), np.empty((len(layers), 2))
        passed = self.kernel(
            batch.compiled(self.kernels), x.data_ptr(), angle, layers.start, len(layers),
            memory.ctypes.data, wanted, out.data_ptr(), seconds.ctypes.data,
        )  # fmt: skip
        return out, seconds[:passed].ravel().tolist()

    def memory(
        self,
        layers: range,
        angles: Angles,
        batch: PagedBatch,
        cache: Sequence[Mapping[str, Tensor]],
        local: Sequence[Tensor],
    ) -> tuple[int, NDArray[np.int64]]:
        """What the kernel is told of the batch's angles, and for each layer of all else."""
        angle, memory = 0, []
        for layer in layers:
            ids = local[layer]
            if ids.dtype is not torch.int64 or not ids.is_contiguous():
                raise ValueError("local indices of experts are int64, beside each other")
            angle, store = self._parts[layer][0].mixer.memory(angles, batch, cache[layer])
            memory.append((*store, ids.data_ptr(), ids.shape[0]))
        return angle, np.array(memory, np.int64)

    def __len__(self) -> int:
        return len(self._parts)


def make_whole_layers(
    homes: Sequence[HomeLayer | None], experts: Sequence[Experts]
) -> WholeLayers | None:
    """All layers of a model; None where one of them has parts that run on torch."""
    layers = [
        (home, of_layer)
        for home, of_layer in zip(homes, experts, strict=True)
        if home is not None and isinstance(of_layer, CompiledExperts)
    ]
    if not layers or len(layers) < len(homes):
        return None
    return WholeLayers(layers[0][1].kernels, layers)


def make_home_layer(
    norm: RmsNorm, attention: Attention, router_norm: RmsNorm, router: SoftmaxRouter
) -> HomeLayer | None:
    """The layer of these parts in one call; None where one is of another kind or runs on torch."""
    if type(attention) is not Attention or type(router) is not SoftmaxRouter:
        return None
    kernels, mixer = kernels_for(norm.weight), attention.mixer
    products = attention.qkv.kernel, attention.out.kernel, router.kernel
    if kernels is None or type(mixer) is not CompiledMixer or None in products:
        return None
    return HomeLayer(kernels, norm, attention, router_norm, router, mixer)
