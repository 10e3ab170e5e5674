"""The ghost of a model: its stage chain, its experts' traffic and its sizes, without a number.

Its rows have no columns, its cache takes no memory, its router is a routing source, and each token
is token 0. So the live engine runs as it is, and what costs time in the virtual world is the engine
alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncmoe.checkpoint import Checkpoint, DummySource, WeightSource
from asyncmoe.model import (
    Cache,
    CacheSpec,
    ExpertBatch,
    LoadPlan,
    Model,
    ModelSpec,
    Routed,
    RowBatch,
)
from asyncmoe.virtual.shapes import ModelShape

_VOCAB = 2  # the sampler wants a choice
_DTYPE = torch.bfloat16


class Source(Protocol):
    """Where rows go: see `workload.routing.RoutingSource`."""

    def choose(
        self, layer: int, request_ids: NDArray[np.int64], positions: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Experts and weights of rows, [rows, top_k] each."""


def ghost_checkpoint(shape: ModelShape, source: Source, context: int) -> Checkpoint:
    """What a `Rank` loads to run the ghost of `shape`; `context`: longest sequence in tokens."""
    spec = ModelSpec(
        architecture="ghost",
        hidden=0,
        vocab=_VOCAB,
        context=context,
        decoder_layers=shape.layers,
        moe_layers=tuple(range(shape.dense_layers, shape.layers)),
        experts=shape.experts,
        top_k=shape.top_k,
        dtype=_DTYPE,
        caches=(CacheSpec(),) * shape.layers,
        ghost_row_bytes=shape.row_bytes,
    )
    return Checkpoint(Path(), {}, GhostModel.routed_by(source), spec, DummySource(), {})


class GhostModel(Model):
    """See the module."""

    source: ClassVar[Source]

    @classmethod
    def routed_by(cls, source: Source) -> type[GhostModel]:
        """This class with a source, which all of its instances share."""
        return type(cls.__name__, (cls,), {"source": source})

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self._rows = torch.empty((0, 0), dtype=_DTYPE)
        self._logits = torch.empty((0, _VOCAB))

    @classmethod
    def read_spec(cls, config: Mapping[str, Any], dtype: torch.dtype | None) -> ModelSpec:
        """A ghost has no config: see `ghost_checkpoint`."""
        raise NotImplementedError("a ghost's shape is given to ghost_checkpoint")

    @classmethod
    def load(
        cls,
        config: Mapping[str, Any],
        spec: ModelSpec,
        source: WeightSource,
        plan: LoadPlan,
        device: torch.device,
    ) -> Model:
        """There is nothing to read."""
        return cls(spec)

    def embed(self, token_ids: Tensor) -> Tensor:
        """See `Model`."""
        return self._empty(len(token_ids))

    def attention(self, layer: int, x: Tensor, batch: RowBatch, cache: Cache) -> Routed:
        """See `Model`: the source chooses."""
        assert batch.request_ids is not None
        requests = batch.request_ids.numpy()[batch.request.numpy()]
        positions = batch.positions.numpy()
        if len(requests) < len(positions):
            requests = requests.repeat(np.diff(batch.query_start.numpy()))
        experts, weights = self.source.choose(layer, requests, positions)
        return Routed(x, x, torch.from_numpy(experts), torch.from_numpy(weights))

    def experts(self, layer: int, x: Tensor, batch: ExpertBatch) -> Tensor:
        """See `Model`."""
        return self._empty(len(batch.gather))

    def finish(self, x: Tensor, batch: RowBatch, cache: Cache) -> Tensor:
        """See `Model`."""
        return x

    @property
    def has_finish(self) -> bool:
        """See `Model`."""
        return False

    def logits(self, x: Tensor) -> Tensor:
        """See `Model`: token 0 is the likeliest."""
        if len(x) > len(self._logits):
            self._logits = torch.tensor([[1.0, 0.0]]).repeat(2 * len(x), 1)
        return self._logits[: len(x)]

    def weight_bytes(self) -> int:
        """None are held."""
        return 0

    def _empty(self, rows: int) -> Tensor:
        """[rows, 0]. A view of one tensor, since making one takes longer."""
        if rows > len(self._rows):
            self._rows = torch.empty((2 * rows, 0), dtype=_DTYPE)
        return self._rows[:rows]
