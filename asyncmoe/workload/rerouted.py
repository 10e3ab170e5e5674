"""A model whose router is overruled, or listened to, for experiments."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from asyncmoe.checkpoint import WeightSource
from asyncmoe.config import ModelConfig
from asyncmoe.model import Cache, ExpertBatch, LoadPlan, Model, ModelSpec, Routed, RowBatch
from asyncmoe.workload.routing import RoutingSource, make_routing
from asyncmoe.workload.trace import RoutingWriter, part_path


class ModelAround(Model):
    """Does what another model does. Subclasses change a stage of it."""

    def __init__(self, model: Model) -> None:
        self._model, self.spec = model, model.spec

    @classmethod
    def read_spec(cls, config: Mapping[str, Any], dtype: torch.dtype | None) -> NoReturn:
        raise NotImplementedError("it is made around a model that is loaded")

    @classmethod
    def load(
        cls,
        config: Mapping[str, Any],
        spec: ModelSpec,
        source: WeightSource,
        plan: LoadPlan,
        device: torch.device,
    ) -> NoReturn:
        raise NotImplementedError("it is made around a model that is loaded")

    def embed(self, token_ids: Tensor) -> Tensor:
        return self._model.embed(token_ids)

    def attention(self, layer: int, x: Tensor, batch: RowBatch, cache: Cache) -> Routed:
        return self._model.attention(layer, x, batch, cache)

    def experts(self, layer: int, x: Tensor, batch: ExpertBatch) -> Tensor:
        return self._model.experts(layer, x, batch)

    def local_experts(
        self, layer: int, x: Tensor, experts: Tensor, weights: Tensor, local: Tensor
    ) -> Tensor:
        return self._model.local_experts(layer, x, experts, weights, local)

    def finish(self, x: Tensor, batch: RowBatch, cache: Cache) -> Tensor:
        return self._model.finish(x, batch, cache)

    @property
    def has_finish(self) -> bool:
        return self._model.has_finish

    def logits(self, x: Tensor) -> Tensor:
        return self._model.logits(x)

    def weight_bytes(self) -> int:
        return self._model.weight_bytes()


class ReroutedModel(ModelAround):
    """Its rows go where a source sends them; its router's work is done all the same."""

    def __init__(self, model: Model, source: RoutingSource) -> None:
        super().__init__(model)
        self._source = source

    def attention(self, layer: int, x: Tensor, batch: RowBatch, cache: Cache) -> Routed:
        routed = self._model.attention(layer, x, batch, cache)
        experts, weights = self._source.choose(
            layer, batch.row_requests().numpy(), batch.positions.numpy()
        )
        device = routed.experts.device
        # A copy of the weights: sources may hand out one table again and again.
        return Routed(
            routed.residual,
            routed.hidden,
            torch.from_numpy(experts).to(device),
            torch.from_numpy(weights.copy()).to(device),
        )


class RecordedModel(ModelAround):
    """Writes down where its rows go. The compute thread waits for the file once in many rows."""

    def __init__(self, model: Model, writer: RoutingWriter) -> None:
        super().__init__(model)
        self._writer = writer

    def attention(self, layer: int, x: Tensor, batch: RowBatch, cache: Cache) -> Routed:
        routed = self._model.attention(layer, x, batch, cache)
        self._writer.add(
            layer,
            batch.row_requests().numpy(),
            batch.positions.numpy(),
            routed.experts.cpu().numpy(),
            routed.weights.cpu().numpy(),
        )
        return routed


def routing_writer(config: ModelConfig, spec: ModelSpec, rank: int) -> RoutingWriter | None:
    """What `model.record_routing` asks for; to be closed when the model computes no more.

    Raises as `RoutingWriter` does.
    """
    if config.record_routing is None:
        return None
    path = part_path(Path(config.record_routing).expanduser(), rank)
    return RoutingWriter(path, len(spec.moe_layers), spec.experts, spec.top_k)


def around(model: Model, config: ModelConfig, writer: RoutingWriter | None) -> Model:
    """`model` with what the config asks for. Raises as `make_routing` does."""
    spec = model.spec
    source = make_routing(
        config.routing, len(spec.moe_layers), spec.experts, spec.top_k, config.seed
    )
    if source is not None:
        model = ReroutedModel(model, source)
    return model if writer is None else RecordedModel(model, writer)
