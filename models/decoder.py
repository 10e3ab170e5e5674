"""The decoder that the MoE families share: stages of attention and router, experts, and head.

A family says what is special about it in a `Blueprint`. One that needs another kind of layer
(latent attention, recurrent state, shared experts) overrides the method that builds that layer.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional

from asyncmoe.checkpoint import WeightSource
from asyncmoe.march import Fellows, Tally
from asyncmoe.model import Cache, ExpertBatch, LoadPlan, Model, ModelSpec, Routed, RowBatch
from asyncmoe.models.blueprint import Blueprint, ExpertNames
from asyncmoe.models.hfconfig import ConfigReader
from asyncmoe.models.layers.attention import Attention, AttentionSpec, make_mixer
from asyncmoe.models.layers.experts import Experts, make_experts
from asyncmoe.models.layers.homelayer import (
    HomeLayer,
    WholeLayers,
    make_home_layer,
    make_whole_layers,
)
from asyncmoe.models.layers.linear import ACTIVATIONS, GatedMlp, Linear
from asyncmoe.models.layers.norm import RmsNorm
from asyncmoe.models.layers.paged import PagedBatch
from asyncmoe.models.layers.rope import Angles, TableRotary, make_rotary
from asyncmoe.models.layers.router import SoftmaxRouter
from asyncmoe.models.layers.walks import Tongue, Walker, make_tongue
from asyncmoe.walk import Walk


@dataclass(slots=True)
class DecoderLayer:
    """The home rank's part of one decoder layer: its MoE layer has a router, else an MLP."""

    attention_norm: RmsNorm
    attention: Attention
    mlp_norm: RmsNorm
    router: SoftmaxRouter | None
    mlp: GatedMlp | None
    compiled: HomeLayer | None = None  # all but the MLP in one call, where there is a router

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        parts = (self.attention_norm, self.attention, self.mlp_norm, self.router, self.mlp)
        return sum(part.nbytes for part in parts if part is not None)


class Decoder(Model):
    """A `Model` made from a `Blueprint`."""

    architecture: ClassVar[str]
    pack_weights: ClassVar[bool | None] = None  # None: where that is faster

    @classmethod
    @abstractmethod
    def blueprint(cls, config: ConfigReader) -> Blueprint:
        """Read the config of this family. Raises `ConfigError`."""

    @classmethod
    def read_spec(cls, config: Mapping[str, Any], dtype: torch.dtype | None) -> ModelSpec:
        reader = ConfigReader(config)
        return cls.blueprint(reader).spec(cls.architecture, reader, reader.dtype(dtype))

    @classmethod
    def load(
        cls,
        config: Mapping[str, Any],
        spec: ModelSpec,
        source: WeightSource,
        plan: LoadPlan,
        device: torch.device,
    ) -> Self:
        blueprint = cls.blueprint(ConfigReader(config))
        optional = ("lm_head.weight",) if blueprint.tied else ()
        source.expect(blueprint.parameters, optional)
        return cls(blueprint, spec, source, plan, device)

    def __init__(
        self,
        blueprint: Blueprint,
        spec: ModelSpec,
        source: WeightSource,
        plan: LoadPlan,
        device: torch.device,
    ) -> None:
        self.spec, self._blueprint = spec, blueprint
        self._source, self._device = source, device
        self._experts = [
            self._build_experts(layer, plan.experts[i]) for i, layer in enumerate(spec.moe_layers)
        ]
        self._layers: list[DecoderLayer] = []
        self._whole: WholeLayers | None = None
        self._tongue: Tongue | None = None
        self._bytes = sum(experts.nbytes for experts in self._experts)
        if plan.attention:
            self._build_home()
        # The source stays with the caller: what was read is all that is kept.
        del self._source

    # -- building ------------------------------------------------------------------------------

    def _read(self, name: str) -> Tensor:
        shape = self._blueprint.parameters[name]
        return self._source.read(name, shape).to(self._device, self.spec.dtype)

    def _linear(self, *names: str) -> Linear:
        """One product for the matrices of `names`, their rows one below the other."""
        weight = torch.cat([self._read(f"{name}.weight") for name in names])
        bias = None
        if f"{names[0]}.bias" in self._blueprint.parameters:
            bias = torch.cat([self._read(f"{name}.bias") for name in names])
        return Linear(weight, bias, pack=self.pack_weights, quantize=self.spec.quantize)

    def _norm(self, name: str) -> RmsNorm:
        return RmsNorm(self._read(f"{name}.weight"), self._blueprint.eps)

    def _mlp(self, at: str, names: ExpertNames) -> GatedMlp:
        gate_up = self._linear(f"{at}.{names.gate}", f"{at}.{names.up}")
        down = self._linear(f"{at}.{names.down}")
        return GatedMlp(gate_up, down, ACTIVATIONS[self._blueprint.activation])

    def _build_experts(self, layer: int, experts: tuple[int, ...]) -> Experts:
        blueprint, names = self._blueprint, self._blueprint.names
        width, hidden = blueprint.expert_width, blueprint.hidden
        dtype, device = self.spec.dtype, self._device
        gate_up = torch.empty((len(experts), 2 * width, hidden), dtype=dtype, device=device)
        down = torch.empty((len(experts), hidden, width), dtype=dtype, device=device)
        for local, expert in enumerate(experts):
            at = f"model.layers.{layer}.{names.block}.experts.{expert}"
            gate_up[local, :width] = self._read(f"{at}.{names.gate}.weight")
            gate_up[local, width:] = self._read(f"{at}.{names.up}.weight")
            down[local] = self._read(f"{at}.{names.down}.weight")
        return make_experts(
            gate_up,
            down,
            ACTIVATIONS[blueprint.activation],
            round_products=blueprint.cast_weights,
            pack=self.pack_weights,
            quantize=self.spec.quantize,
        )

    def _build_home(self) -> None:
        blueprint, dtype = self._blueprint, self.spec.dtype
        embedding = self._read("model.embed_tokens.weight")
        head = embedding if blueprint.tied else self._read("lm_head.weight")
        self._head = Linear(
            head,
            out_dtype=torch.float32,
            pack=self.pack_weights,
            quantize=self.spec.quantize,
        )
        shared = self._head.plain_weight if blueprint.tied else None
        if shared is not None:
            self._embedding = shared
        else:  # rows of a packed weight cannot be read: the embedding is a copy of its own
            self._embedding = embedding
            self._bytes += embedding.nbytes
        self._final_norm = self._norm("model.norm")
        self._rotary = make_rotary(blueprint.rope, self.spec.context, dtype, self._device)
        self._layers = [self._build_layer(layer) for layer in range(blueprint.layers)]
        self._bytes += self._head.nbytes + self._final_norm.nbytes + self._rotary.nbytes
        self._bytes += sum(layer.nbytes for layer in self._layers)
        # A subclass may have stages of its own.
        own = type(self)
        if own.attention is Decoder.attention and own.local_experts is Decoder.local_experts:
            moe_only = len(self._experts) == len(self._layers)
            homes = [layer.compiled for layer in self._layers] if moe_only else []
            self._whole = make_whole_layers(homes, self._experts if moe_only else [])
        spoken = own.embed is Decoder.embed and own.logits is Decoder.logits
        spoken &= own.finish is Decoder.finish
        if self._whole is not None and spoken and isinstance(self._rotary, TableRotary):
            self._tongue = make_tongue(self._embedding, self._final_norm, self._head)

    def _build_layer(self, layer: int) -> DecoderLayer:
        at = f"model.layers.{layer}"
        moe = layer in self.spec.moe_layers
        norm = self._norm(f"{at}.input_layernorm")
        attention = self._build_attention(f"{at}.self_attn")
        mlp_norm = self._norm(f"{at}.post_attention_layernorm")
        if not moe:
            mlp = self._mlp(f"{at}.mlp", ExpertNames())
            return DecoderLayer(norm, attention, mlp_norm, None, mlp)
        router = self._build_router(f"{at}.{self._blueprint.names.block}.gate")
        compiled = make_home_layer(norm, attention, mlp_norm, router)
        return DecoderLayer(norm, attention, mlp_norm, router, None, compiled)

    def _build_attention(self, at: str) -> Attention:
        blueprint = self._blueprint
        head_norm = vector_norm = None
        if blueprint.vector_norm:
            vector_norm = self._norm(f"{at}.q_norm"), self._norm(f"{at}.k_norm")
        if blueprint.head_norm:
            q, k = self._read(f"{at}.q_norm.weight"), self._read(f"{at}.k_norm.weight")
            weights = [q.expand(blueprint.heads, -1), k.expand(blueprint.kv_heads, -1)]
            head_norm = RmsNorm(torch.cat(weights), blueprint.eps)
        spec = AttentionSpec(
            heads=blueprint.heads,
            kv_heads=blueprint.kv_heads,
            head_dim=blueprint.head_dim,
            rotary=self._rotary,
            scale=blueprint.head_dim**-0.5,
            head_norm=head_norm,
            vector_norm=vector_norm,
            clip=blueprint.clip,
            window=blueprint.window,
        )
        return Attention(
            self._linear(f"{at}.q_proj", f"{at}.k_proj", f"{at}.v_proj"),
            self._linear(f"{at}.o_proj"),
            make_mixer(spec, self._embedding),
        )

    def _build_router(self, name: str) -> SoftmaxRouter:
        blueprint = self._blueprint
        return SoftmaxRouter(
            self._read(f"{name}.weight"),
            None,
            blueprint.top_k,
            renormalise=blueprint.renormalise,
            round_to=self.spec.dtype if blueprint.cast_weights else None,
            pack=self.pack_weights,
        )

    # -- stages --------------------------------------------------------------------------------

    def embed(self, token_ids: Tensor) -> Tensor:
        return functional.embedding(token_ids, self._embedding).to(self.spec.dtype)

    def attention(self, layer: int, x: Tensor, batch: RowBatch, cache: Cache) -> Routed:
        moe_layers = self.spec.moe_layers
        first = moe_layers[layer - 1] + 1 if layer else 0
        paged, angles = PagedBatch(batch), self._rotary.angles(batch)
        x = self._dense(range(first, moe_layers[layer]), x, angles, paged, cache)
        last = self._layers[moe_layers[layer]]
        if last.compiled is not None:
            return last.compiled(x, angles, paged, cache[moe_layers[layer]])
        mixed = last.attention(last.attention_norm(x), angles, paged, cache[moe_layers[layer]])
        x, hidden = last.mlp_norm.of_sum(x, mixed)
        assert last.router is not None
        experts, weights = last.router(hidden)
        return Routed(x, hidden, experts, weights)

    def experts(self, layer: int, x: Tensor, batch: ExpertBatch) -> Tensor:
        return self._experts[layer](x, batch)

    def local_experts(
        self, layer: int, x: Tensor, experts: Tensor, weights: Tensor, local: Tensor
    ) -> Tensor:
        return self._experts[layer].routed(x, experts, weights, local)

    def through(
        self,
        layers: range,
        x: Tensor,
        batch: RowBatch,
        cache: Cache,
        local: Sequence[Tensor],
        wanted: Callable[[], bool],
    ) -> tuple[Tensor, Sequence[float]]:
        whole = self._whole
        if whole is None:
            return super().through(layers, x, batch, cache, local, wanted)
        paged, angles = PagedBatch(batch), self._rotary.angles(batch)
        return whole(layers, x, angles, paged, cache, local, wanted)

    @property
    def walks(self) -> bool:
        return self._tongue is not None

    def walk(self, walk: Walk, cache: Cache, local: Sequence[Tensor]) -> tuple[Tensor, int, int]:
        return self._walker(walk).walk(cache, local)

    def march(
        self,
        walk: Walk,
        cache: Cache,
        local: Sequence[Tensor],
        fellows: Fellows,
        number: int,
        tally: Tally,
    ) -> tuple[int, int, bool]:
        return self._walker(walk).march(cache, local, fellows, number, tally)

    def _walker(self, walk: Walk) -> Walker:
        assert self._whole is not None
        assert self._tongue is not None
        return Walker(self._whole, self._tongue, walk, self._rotary.angles(walk.batch))

    def finish(self, x: Tensor, batch: RowBatch, cache: Cache) -> Tensor:
        layers = range(self.spec.moe_layers[-1] + 1, self.spec.decoder_layers)
        if not layers:
            return x
        return self._dense(layers, x, self._rotary.angles(batch), PagedBatch(batch), cache)

    def _dense(
        self, layers: range, x: Tensor, angles: Angles, batch: PagedBatch, cache: Cache
    ) -> Tensor:
        for index in layers:
            layer = self._layers[index]
            mixed = layer.attention(layer.attention_norm(x), angles, batch, cache[index])
            x, hidden = layer.mlp_norm.of_sum(x, mixed)
            assert layer.mlp is not None
            x = x + layer.mlp(hidden)
        return x

    @property
    def has_finish(self) -> bool:
        return self.spec.moe_layers[-1] + 1 < self.spec.decoder_layers

    def logits(self, x: Tensor) -> Tensor:
        return self._head(self._final_norm(x))

    def weight_bytes(self) -> int:
        return self._bytes
