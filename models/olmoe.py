"""OLMoE: q and k are normalised as whole vectors, and q, k, v may be clipped."""

from __future__ import annotations

from asyncmoe.models.blueprint import Blueprint, read_common
from asyncmoe.models.decoder import Decoder
from asyncmoe.models.hfconfig import ConfigReader


class Olmoe(Decoder):
    """Checkpoints with model_type `olmoe`."""

    architecture = "olmoe"

    @classmethod
    def blueprint(cls, config: ConfigReader) -> Blueprint:
        common = read_common(config, eps=1e-5)
        config.only("head_dim", common.hidden // common.heads)
        config.only("sliding_window")
        width = config.integer("intermediate_size")
        return Blueprint(
            **vars(common),
            moe_layers=tuple(range(common.layers)),
            expert_width=width,
            dense_width=width,
            renormalise=config.flag("norm_topk_prob", False),
            cast_weights=True,
            attention_bias=config.flag("attention_bias", False),
            vector_norm=True,
            clip=config.number("clip_qkv") if config.has("clip_qkv") else None,
        )
