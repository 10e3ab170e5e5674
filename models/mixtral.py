"""Mixtral: router weights always sum to one and stay float32; experts are called w1, w3, w2."""

from __future__ import annotations

from asyncmoe.models.blueprint import Blueprint, ExpertNames, read_common, read_window
from asyncmoe.models.decoder import Decoder
from asyncmoe.models.hfconfig import ConfigReader


class Mixtral(Decoder):
    """Checkpoints with model_type `mixtral`."""

    architecture = "mixtral"

    @classmethod
    def blueprint(cls, config: ConfigReader) -> Blueprint:
        common = read_common(config, rope_theta=1_000_000.0, eps=1e-5)
        config.only("attention_bias", False)
        config.only("norm_topk_prob", True)
        width = config.integer("intermediate_size")
        return Blueprint(
            **vars(common),
            moe_layers=tuple(range(common.layers)),
            expert_width=width,
            dense_width=width,
            renormalise=True,
            cast_weights=False,
            window=read_window(config, common.layers),
            names=ExpertNames("block_sparse_moe", "w1", "w3", "w2"),
        )
