"""What the families read from config.json, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from asyncmoe import registry
from asyncmoe.errors import ConfigError, UnknownName
from asyncmoe.model import ModelSpec

BASE: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}


def read(family: str = "qwen3_moe", dtype: torch.dtype | None = None, **changes: Any) -> ModelSpec:
    return registry.find("models", family).read_spec(BASE | changes, dtype)


def test_the_spec_says_the_shape_of_the_model() -> None:
    spec = read(mlp_only_layers=[0, 3], eos_token_id=[5, 6], bos_token_id=1, torch_dtype="bfloat16")
    assert (spec.hidden, spec.vocab, spec.context, spec.decoder_layers) == (64, 100, 128, 4)
    assert (spec.moe_layers, spec.experts, spec.top_k) == ((1, 2), 8, 2)
    assert (spec.eos_ids, spec.bos_id, spec.dtype) == ((5, 6), 1, torch.bfloat16)
    assert spec.caches[3].per_token["v"].shape == (2, 16)
    assert spec.caches[3].window is None


def test_a_chosen_dtype_wins_over_that_of_the_config() -> None:
    assert read(dtype=torch.float32, torch_dtype="bfloat16").dtype == torch.float32
    assert read(torch_dtype="bfloat16").caches[0].per_token["k"].dtype == torch.bfloat16


def test_the_number_of_experts_has_two_names() -> None:
    assert read("mixtral", num_experts=None, num_local_experts=6).experts == 6
    assert read("qwen3_moe", num_experts=None, num_local_experts=6).experts == 6


def test_a_sliding_window_counts_where_the_family_uses_it() -> None:
    assert read("mixtral", sliding_window=32).caches[0].window == 32
    assert read("qwen3_moe", sliding_window=32).caches[0].window is None
    windowed = read("qwen3_moe", sliding_window=32, use_sliding_window=True)
    assert all(cache.window == 32 for cache in windowed.caches)


@pytest.mark.parametrize(
    ("family", "key", "value", "allowed"),
    [
        ("qwen3_moe", "hidden_size", None, "an integer of at least 1"),
        ("qwen3_moe", "hidden_size", "64", "an integer of at least 1"),
        ("qwen3_moe", "num_hidden_layers", 0, "an integer of at least 1"),
        ("qwen3_moe", "num_hidden_layers", True, "an integer of at least 1"),
        ("qwen3_moe", "num_key_value_heads", 3, "a divisor of num_attention_heads = 4"),
        ("qwen3_moe", "num_attention_heads", 6, "a divisor of hidden_size = 64"),
        ("qwen3_moe", "head_dim", 15, "an even number"),
        ("qwen3_moe", "num_experts_per_tok", 9, "at most the number of experts, 8"),
        ("qwen3_moe", "norm_topk_prob", 1, "true or false"),
        ("qwen3_moe", "mlp_only_layers", [4], "a list of layers from 0 to 3"),
        ("qwen3_moe", "decoder_sparse_step", 0, "an integer of at least 1"),
        ("qwen3_moe", "rms_norm_eps", float("nan"), "a finite number above 0"),
        ("qwen3_moe", "hidden_act", "tanh", "gelu, gelu_pytorch_tanh, relu, silu"),
        ("qwen3_moe", "torch_dtype", "float16", "bfloat16, float32"),
        ("qwen3_moe", "eos_token_id", "2", "a token id or a list of token ids"),
        ("qwen3_moe", "quantization_config", {"quant_method": "fp8"}, "absent"),
        ("qwen3_moe", "partial_rotary_factor", 0.5, "1.0"),
        ("qwen3_moe", "rope_parameters", {"rope_type": "longrope"}, "default, dynamic, linear"),
        ("qwen3_moe", "rope_scaling", {"type": "linear"}, "a number above 0"),
        ("qwen3_moe", "rope_scaling", [2], "an object"),
        ("qwen3_moe", "rope_theta", -1.0, "a finite number above 0"),
        ("qwen3_moe", "layer_types", ["full_attention"] * 3, "a list of 4"),
        ("mixtral", "layer_types", ["sliding_attention"] * 4, "full_attention"),
        ("mixtral", "attention_bias", True, "absent or False"),
        ("mixtral", "norm_topk_prob", False, "absent or True"),
        ("mixtral", "sliding_window", 0, "an integer of at least 1"),
        ("olmoe", "sliding_window", 8, "absent"),
        ("olmoe", "head_dim", 32, "absent or 16"),
        ("olmoe", "clip_qkv", -3, "a finite number above 0"),
    ],
)
def test_a_value_that_is_not_supported_is_named_with_what_is_allowed(
    family: str, key: str, value: Any, allowed: str
) -> None:
    with pytest.raises(ConfigError) as error:
        read(family, **{key: value})
    message = str(error.value)
    assert key in message
    assert value is not None or "is missing" in message
    assert f"allowed: {allowed}" in message


def test_a_misspelt_rope_key_names_the_nearest() -> None:
    with pytest.raises(UnknownName, match=r"'beta_slwo'.*Did you mean 'beta_slow'"):
        read(rope_scaling={"rope_type": "yarn", "factor": 2.0, "beta_slwo": 1})


def test_a_model_without_moe_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match="leave no MoE layer"):
        read(decoder_sparse_step=5)
