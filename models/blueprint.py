"""What a decoder of attention and gated MoE layers is made of, read from a config by its family."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from asyncmoe.errors import ConfigError
from asyncmoe.model import CacheSpec, ModelSpec, TensorSpec
from asyncmoe.models.hfconfig import ConfigReader
from asyncmoe.models.layers.linear import ACTIVATIONS
from asyncmoe.models.layers.rope import RopeSpec, read_rope

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ExpertNames:
    """Where a family's checkpoints keep the MoE block of a layer, and the matrices of an expert."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


@dataclass(frozen=True)
class CommonShape:
    """The values that all families read in the same way."""

    hidden: int
    vocab: int
    context: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rope: RopeSpec
    activation: str
    experts: int
    top_k: int
    tied: bool  # LM head and embedding are one matrix


@dataclass(frozen=True)
class Blueprint(CommonShape):
    """All that tells one decoder from another. Sizes are in elements, layers are decoder layers."""

    moe_layers: tuple[int, ...]
    expert_width: int
    dense_width: int  # of the feed-forward of layers that are not MoE layers
    renormalise: bool  # the router's k weights sum to one
    cast_weights: bool  # the router's weights pass through the model's dtype
    attention_bias: bool = False  # of all four projections
    head_norm: bool = False  # RMS norm of each head of q and k
    vector_norm: bool = False  # RMS norm of q and of k as a whole
    clip: float | None = None  # bound of q, k and v
    window: int | None = None  # of all layers
    names: ExpertNames = ExpertNames()

    def spec(self, architecture: str, config: ConfigReader, dtype: torch.dtype) -> ModelSpec:
        """The contract's view of it."""
        kv = TensorSpec((self.kv_heads, self.head_dim), dtype)
        bos = config.token_ids("bos_token_id")
        return ModelSpec(
            architecture=architecture,
            hidden=self.hidden,
            vocab=self.vocab,
            context=self.context,
            decoder_layers=self.layers,
            moe_layers=self.moe_layers,
            experts=self.experts,
            top_k=self.top_k,
            dtype=dtype,
            caches=(CacheSpec({"k": kv, "v": kv}, window=self.window),) * self.layers,
            eos_ids=config.token_ids("eos_token_id"),
            bos_id=bos[0] if bos else None,
        )

    @cached_property
    def parameters(self) -> dict[str, Shape]:
        """Name and shape of every parameter of the whole model, whichever rank holds it."""
        return dict(self._parameters())

    def _parameters(self) -> Iterator[tuple[str, Shape]]:
        yield "model.embed_tokens.weight", (self.vocab, self.hidden)
        yield "model.norm.weight", (self.hidden,)
        if not self.tied:
            yield "lm_head.weight", (self.vocab, self.hidden)
        moe = set(self.moe_layers)
        for layer in range(self.layers):
            at = f"model.layers.{layer}"
            yield f"{at}.input_layernorm.weight", (self.hidden,)
            yield f"{at}.post_attention_layernorm.weight", (self.hidden,)
            yield from self._attention_parameters(f"{at}.self_attn")
            if layer in moe:
                block = f"{at}.{self.names.block}"
                yield f"{block}.gate.weight", (self.experts, self.hidden)
                for expert in range(self.experts):
                    yield from self._mlp_parameters(
                        f"{block}.experts.{expert}", self.names, self.expert_width
                    )
            else:
                yield from self._mlp_parameters(f"{at}.mlp", ExpertNames(), self.dense_width)

    def _attention_parameters(self, at: str) -> Iterator[tuple[str, Shape]]:
        query, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        for name, rows in (("q", query), ("k", kv), ("v", kv), ("o", self.hidden)):
            yield f"{at}.{name}_proj.weight", (rows, query if name == "o" else self.hidden)
            if self.attention_bias:
                yield f"{at}.{name}_proj.bias", (rows,)
        if self.head_norm or self.vector_norm:
            yield f"{at}.q_norm.weight", (self.head_dim if self.head_norm else query,)
            yield f"{at}.k_norm.weight", (self.head_dim if self.head_norm else kv,)

    def _mlp_parameters(
        self, at: str, names: ExpertNames, width: int
    ) -> Iterator[tuple[str, Shape]]:
        yield f"{at}.{names.gate}.weight", (width, self.hidden)
        yield f"{at}.{names.up}.weight", (width, self.hidden)
        yield f"{at}.{names.down}.weight", (self.hidden, width)


def read_common(
    config: ConfigReader, *, rope_theta: float = 10_000.0, eps: float = 1e-6
) -> CommonShape:
    """Read them; the arguments are the family's defaults. Raises `ConfigError`."""
    config.only("quantization_config")
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise config.fail("num_key_value_heads", f"a divisor of num_attention_heads = {heads}")
    if hidden % heads and not config.has("head_dim"):
        raise config.fail("num_attention_heads", f"a divisor of hidden_size = {hidden}")
    head_dim = config.integer("head_dim", default=hidden // heads)
    if head_dim % 2:
        raise config.fail("head_dim", "an even number")
    experts = config.integer("num_experts", "num_local_experts")
    top_k = config.integer("num_experts_per_tok")
    if top_k > experts:
        raise config.fail("num_experts_per_tok", f"at most the number of experts, {experts}")
    rope = read_rope(config, head_dim, rope_theta, partial=False)
    longest = config.integer("max_position_embeddings")
    return CommonShape(
        hidden=hidden,
        vocab=config.integer("vocab_size"),
        context=int(longest * rope.factor) if rope.kind == "dynamic" else longest,
        layers=config.integer("num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        eps=config.number("rms_norm_eps", eps),
        rope=rope,
        activation=config.choice("hidden_act", ACTIVATIONS, "silu"),
        experts=experts,
        top_k=top_k,
        tied=config.flag("tie_word_embeddings", False),
    )


def read_window(config: ConfigReader, layers: int, *, used: bool = True) -> int | None:
    """`sliding_window` of all layers; None if there is none or it is not `used`.

    These families apply a window to all layers or to none, so that `layer_types` must agree, and
    `max_window_layers`, which their configs carry along, has no effect in `transformers` either.
    """
    window = None
    if used and config.has("sliding_window"):
        window = config.integer("sliding_window")
    kind = "full_attention" if window is None else "sliding_attention"
    config.layer_types(layers, kind)
    return window


def require_moe_layers(moe_layers: tuple[int, ...]) -> tuple[int, ...]:
    """The layers, if there are any: a model without MoE layers has no stages to place."""
    if not moe_layers:
        raise ConfigError(
            "config.json: decoder_sparse_step and mlp_only_layers leave no MoE layer; "
            "allowed: at least one"
        )
    return moe_layers
