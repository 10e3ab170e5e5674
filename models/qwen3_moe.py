"""Qwen3-MoE: each head of q and k is normalised, and any layer may be dense."""

from __future__ import annotations

from asyncmoe.models.blueprint import Blueprint, read_common, read_window, require_moe_layers
from asyncmoe.models.decoder import Decoder
from asyncmoe.models.hfconfig import ConfigReader


class Qwen3Moe(Decoder):
    """Checkpoints with model_type `qwen3_moe`."""

    architecture = "qwen3_moe"

    @classmethod
    def blueprint(cls, config: ConfigReader) -> Blueprint:
        common = read_common(config)
        step = config.integer("decoder_sparse_step", default=1)
        dense = config.layer_list("mlp_only_layers", common.layers)
        moe_layers = tuple(
            layer
            for layer in range(common.layers)
            if layer not in dense and (layer + 1) % step == 0
        )
        windowed = config.flag("use_sliding_window", False)
        return Blueprint(
            **vars(common),
            moe_layers=require_moe_layers(moe_layers),
            expert_width=config.integer("moe_intermediate_size"),
            dense_width=config.integer("intermediate_size", default=4 * common.hidden),
            renormalise=config.flag("norm_topk_prob", False),
            cast_weights=True,
            attention_bias=config.flag("attention_bias", False),
            head_norm=True,
            window=read_window(config, common.layers, used=windowed),
        )
