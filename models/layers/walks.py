"""Walks and marches of a model whose parts are all compiled: what their kernels are told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncmoe.march import Fellows, Tally
from asyncmoe.model import Cache
from asyncmoe.models.layers.homelayer import WholeLayers
from asyncmoe.models.layers.linear import Linear
from asyncmoe.models.layers.norm import RmsNorm
from asyncmoe.models.layers.paged import PagedBatch
from asyncmoe.models.layers.rope import Angles
from asyncmoe.native.kinds import kernels_for
from asyncmoe.walk import Walk


class Tongue:
    """Embedding, final norm and head, as a walk takes them."""

    def __init__(self, kernels: Any, embedding: Tensor, norm: RmsNorm, head: Linear) -> None:
        """The parts keep the memory that the kernels read."""
        self._parts = embedding, norm, head
        self.dtype, (vocab, self.hidden) = embedding.dtype, embedding.shape
        self.kernel = kernels.Tongue(
            embedding=embedding.data_ptr(),
            vocab=vocab,
            norm=norm.weight.data_ptr(),
            norm_eps=norm.eps,
            head=head.kernel,
        )


def make_tongue(embedding: Tensor, norm: RmsNorm, head: Linear) -> Tongue | None:
    """These parts for compiled walks; None where one runs on torch."""
    kernels = kernels_for(embedding)
    if kernels is None or head.kernel is None or not embedding.is_contiguous():
        return None
    return Tongue(kernels, embedding, norm, head)


class Walker:
    """What takes a walk's rows through these layers."""

    def __init__(self, layers: WholeLayers, tongue: Tongue, walk: Walk, angles: Angles) -> None:
        self._layers, self._tongue, self._walk, self._angles = layers, tongue, walk, angles
        self._batch = PagedBatch(walk.batch)
        rows = self._batch.rows
        self._kernel = layers.kernels.Walk(
            tongue=tongue.kernel,
            rows=self._batch.compiled(layers.kernels),
            positions=rows.positions.data_ptr(),
            cache_index=rows.cache_index.data_ptr(),
            context=rows.context_len.data_ptr(),
            ends=walk.ends.ctypes.data,
            end_width=walk.ends.shape[1],
            turns=len(walk.tokens),
            tokens=walk.tokens.ctypes.data,
            bad=walk.bad.ctypes.data,
            seconds=walk.seconds.ctypes.data,
            seconds_width=walk.seconds.shape[1],
            counts=walk.counts.ctypes.data,
            wanted=walk.herald.wanted_at,
            bell=walk.herald.counter,
        )
        self._x = torch.empty((self._batch.count, tongue.hidden), dtype=tongue.dtype)

    def walk(self, cache: Cache, local: Sequence[Tensor]) -> tuple[Tensor, int, int]:
        """See `Model.walk`."""
        memory = self._memory(cache, local)
        layers, turn = self._kernel(
            self._layers.kernel, memory.ctypes.data, self._x.data_ptr(), self._walk.steps
        )
        return self._x, layers, turn

    def march(
        self, cache: Cache, local: Sequence[Tensor], fellows: Fellows, number: int, tally: Tally
    ) -> tuple[int, int, bool]:
        """See `Model.march`."""
        memory = self._memory(cache, local)
        layers, turn, agreed = self._layers.kernels.march(
            walk=self._kernel,
            layers=self._layers.kernel,
            memory=memory.ctypes.data,
            x=self._x.data_ptr(),
            steps=self._walk.steps,
            number=number,
            rank=fellows.rank,
            halves=fellows.halves,
            half_bytes=fellows.half_bytes,
            rows=fellows.rows,
            owner=fellows.owner.ctypes.data,
            ids=fellows.owner.shape[1],
            broken=fellows.broken.ctypes.data,
            counts=tally.counts.ctypes.data,
            seconds=tally.seconds.ctypes.data,
        )
        return layers, turn, agreed

    def _memory(self, cache: Cache, local: Sequence[Tensor]) -> NDArray[np.int64]:
        layers = range(len(self._layers))
        return self._layers.memory(layers, self._angles, self._batch, cache, local)[1]
