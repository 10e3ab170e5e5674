"""The contract of a model: the compute of each stage, and what of a checkpoint a rank must hold."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from asyncmoe.checkpoint import WeightSource
    from asyncmoe.march import Fellows, Tally
    from asyncmoe.walk import Walk


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a layer's cache, without its leading dimension (tokens or requests)."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """What one decoder layer keeps between steps.

    `per_token` tensors are paged: [blocks, block_tokens, *shape]. Multi-head attention has "k" and
    "v" of (kv_heads, head_dim), latent attention one of (rank + rope_dim,). `per_request` tensors
    are [requests, *shape]: recurrent states.
    """

    per_token: Mapping[str, TensorSpec] = field(default_factory=dict)
    per_request: Mapping[str, TensorSpec] = field(default_factory=dict)
    window: int | None = None  # positions further back than this are never read again


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The shape of a model, known from its config alone."""

    architecture: str  # the registered name, e.g. "qwen3_moe"
    hidden: int
    vocab: int
    context: int  # longest sequence, prompt and answer together
    decoder_layers: int
    moe_layers: tuple[int, ...]  # decoder layer of each MoE layer; its length is L of the chain
    experts: int  # routed experts of every MoE layer
    top_k: int
    dtype: torch.dtype
    caches: tuple[CacheSpec, ...]  # one per decoder layer
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    quantize: bool = False  # the weights of products to int8, at load
    ghost_row_bytes: int | None = None  # of a model that only stands for another: that one's rows

    @property
    def row_bytes(self) -> int:
        """Bytes of a row on the wire."""
        if self.ghost_row_bytes is not None:
            return self.ghost_row_bytes
        return self.hidden * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What one rank needs of a checkpoint.

    `experts[l]` are the global ids of MoE layer l's experts that live here, in local order: the
    i-th is local expert i.
    """

    attention: bool  # embedding, attention, routers, shared experts, dense layers, norms, LM head
    experts: tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class RowBatch:
    """The rows of one attention or head batch, in segments (consecutive rows of one request).

    Rows [0, decode_rows) are segments of one row each (decode steps); the rest are prefill chunks.
    A row at position p attends to positions 0 … p of its own request; the K/V of all its earlier
    positions are already in the cache, or are rows of its own segment.
    """

    positions: Tensor  # int64 [rows]
    cache_index: Tensor  # int64 [rows]: block * block_tokens + offset, where the row's K/V go
    decode_rows: int
    query_start: Tensor  # int64 [segments + 1]: rows of segment i are query_start[i] : [i + 1]
    context_len: Tensor  # int64 [segments]: tokens of the request including this segment's rows
    block_table: Tensor  # int64 [segments, max_blocks], block ids; past the context any of its own
    request: Tensor  # int64 [segments]: row of the per-request cache tensors
    block_tokens: int
    # int64 [requests]: id of the request on each row of the per-request tensors
    request_ids: Tensor | None = None

    def row_requests(self) -> Tensor:
        """int64 [rows]: id of each row's request. The batch must have come from a home rank."""
        assert self.request_ids is not None
        return self.request_ids[self.request].repeat_interleave(self.query_start.diff())


@dataclass(slots=True)
class ExpertBatch:
    """The (row, expert) pairs of one expert batch, sorted by local expert."""

    row: Tensor  # int64 [pairs]: row of x
    weight: Tensor  # float32 [pairs]: router weight
    counts: Tensor  # int64 [local experts]: pairs of each, so that pairs of expert e are contiguous
    gather: Tensor  # int64 [out_rows, width]: pairs of each output row in summation order; -1: none


@dataclass(slots=True)
class Routed:
    """What an attention stage gives."""

    residual: Tensor  # [rows, hidden], model dtype: what parts are added to (with shared experts)
    hidden: Tensor  # [rows, hidden], model dtype: normed input of the experts
    experts: Tensor  # int64 [rows, top_k]: global expert ids
    weights: Tensor  # float32 [rows, top_k]


Cache = Sequence[Mapping[str, Tensor]]  # per decoder layer: the tensors of its CacheSpec by name


class Model(ABC):
    """The stages of one architecture on one rank. All methods run on the device's compute thread.

    Stage A(l) covers the decoder layers after MoE layer l-1 up to and including MoE layer l's
    attention and router: dense layers run inside it. Dense layers after the last MoE layer run in
    `finish`. Nothing here keeps state between calls but weights; caches are passed in.
    """

    spec: ModelSpec

    @classmethod
    @abstractmethod
    def read_spec(cls, config: Mapping[str, Any], dtype: torch.dtype | None) -> ModelSpec:
        """Read config.json, old or new form. `dtype` None takes the config's own.

        Raises `ConfigError` naming the key, its value and what is allowed.
        """

    @classmethod
    @abstractmethod
    def load(
        cls,
        config: Mapping[str, Any],
        spec: ModelSpec,
        source: WeightSource,
        plan: LoadPlan,
        device: torch.device,
    ) -> Model:
        """Build the model from what `plan` asks of `source`; nothing else is read.

        Raises `CheckpointError` for a missing parameter or a wrong shape.
        """

    @abstractmethod
    def embed(self, token_ids: Tensor) -> Tensor:
        """int64 [rows] -> [rows, hidden]."""

    @abstractmethod
    def attention(self, layer: int, x: Tensor, batch: RowBatch, cache: Cache) -> Routed:
        """Stage A(layer) on the merged residual x [rows, hidden]; writes this batch's K/V."""

    @abstractmethod
    def experts(self, layer: int, x: Tensor, batch: ExpertBatch) -> Tensor:
        """Stage E(layer): x [rows, hidden] -> [out_rows, hidden] in the model dtype.

        Output row i is the sum over its pairs in `gather` order, in float32, of weight times
        expert output. The products are float32 too, except in families that cast their router's
        weights to the model dtype: they round each product to it before the sum, as `transformers`
        does.
        """

    def local_experts(
        self, layer: int, x: Tensor, experts: Tensor, weights: Tensor, local: Tensor
    ) -> Tensor:
        """Stage E(layer) for rows whose experts are all here: [rows, hidden] -> [rows, hidden].

        Equal to `experts` on the batch of all pairs, row by row in router order, bit for bit.

        Args:
            experts, weights: [rows, top_k], of `Routed`.
            local: int64 [experts] local index of each expert.
        """
        return self.experts(layer, x, pair_batch(experts, weights, local))

    def through(
        self,
        layers: range,
        x: Tensor,
        batch: RowBatch,
        cache: Cache,
        local: Sequence[Tensor],
        wanted: Callable[[], bool],
    ) -> tuple[Tensor, Sequence[float]]:
        """Stages A and E of consecutive MoE layers whose experts are all here, at least one.

        Equal to `attention` and `local_experts` of one layer after the other, bit for bit.

        Args:
            x: [rows, hidden], the merged residual of the first layer.
            local: per MoE layer, see `local_experts`.
            wanted: is asked before every layer but the first, and ends it there when true.

        Returns:
            The merged residual [rows, hidden] behind the layers passed, and seconds of compute of
            each of their stages, A and E in turn.
        """
        clock = time.perf_counter
        seconds: list[float] = []
        begin_s = clock()
        for layer in layers:
            if seconds and wanted():
                break
            routed = self.attention(layer, x, batch, cache)
            middle_s = clock()
            x = routed.residual + self.local_experts(
                layer, routed.hidden, routed.experts, routed.weights, local[layer]
            )
            end_s = clock()
            seconds += middle_s - begin_s, end_s - middle_s
            begin_s = end_s
        return x, seconds

    @property
    def walks(self) -> bool:
        """Whether it has a `walk` and a `march`."""
        return False

    def walk(self, walk: Walk, cache: Cache, local: Sequence[Tensor]) -> tuple[Tensor, int, int]:
        """Decode steps from embedding to token, equal to the other calls' bit for bit.

        Args:
            local: per MoE layer, all of whose experts are here; see `local_experts`.

        Returns:
            The merged residual [rows, hidden] behind the MoE layers that the last step passed, how
            many these are, and its turn. If they are all, it has its tokens.
        """
        raise NotImplementedError

    def march(
        self,
        walk: Walk,
        cache: Cache,
        local: Sequence[Tensor],
        fellows: Fellows,
        number: int,
        tally: Tally,
    ) -> tuple[int, int, bool]:
        """A walk whose experts are those of several ranks, which walk at the same time.

        Equal to the way through the queues bit for bit, with a part for each rank.

        Args:
            local: see `local_experts`; negative for experts that are not here.
            number: of the march, which is greater than that of any before.
            tally: is kept up to date.

        Returns:
            As `walk`, but for the residual: the layers are all, or none. And whether it ended as
            all ranks agreed.
        """
        raise NotImplementedError

    @abstractmethod
    def finish(self, x: Tensor, batch: RowBatch, cache: Cache) -> Tensor:
        """The dense layers after the last MoE layer: [rows, hidden] -> [rows, hidden]."""

    @property
    @abstractmethod
    def has_finish(self) -> bool:
        """Whether `finish` does anything, that is, whether it needs all rows of a chunk."""

    @abstractmethod
    def logits(self, x: Tensor) -> Tensor:
        """Final norm and LM head: [rows, hidden] -> float32 [rows, vocab]."""

    @abstractmethod
    def weight_bytes(self) -> int:
        """Bytes of weights held here."""


def pair_batch(experts: Tensor, weights: Tensor, local: Tensor) -> ExpertBatch:
    """All pairs of a router's choice [rows, top_k]; arguments as in `Model.local_experts`."""
    top_k = experts.shape[1]
    of_expert = local[experts].flatten()
    order = of_expert.argsort(stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    return ExpertBatch(
        row=order // top_k,
        weight=weights.flatten()[order],
        counts=of_expert.bincount(minlength=int((local >= 0).sum())),
        gather=place.view(-1, top_k),
    )
