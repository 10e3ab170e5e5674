"""The three families against `transformers` on the same random checkpoint, stage by stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from asyncmoe import native
from asyncmoe.checkpoint import open_checkpoint
from asyncmoe.config import ModelConfig
from asyncmoe.model import LoadPlan
from asyncmoe.models.decoder import Decoder
from tests.checkpoints import (
    FAMILIES,
    VOCAB,
    cached_checkpoint,
    edit_json,
    make_checkpoint,
    reference_greedy,
    reference_logits,
)
from tests.stagerunner import Request, StageRunner, make_runner

FLOAT32, BFLOAT16 = 1e-4, 2e-2  # relative tolerances of the logits

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
        "original_max_position_embeddings": 16}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip
SWITCHES: list[tuple[str, dict[str, Any]]] = [
    ("mixtral", {}),
    ("mixtral", {"sliding_window": 7}),
    ("mixtral", {"head_dim": 32, "tie_word_embeddings": True}),
    ("mixtral", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}}),
    ("mixtral", {"num_key_value_heads": 1, "hidden_act": "gelu"}),
    ("olmoe", {}),
    ("olmoe", {"norm_topk_prob": True, "clip_qkv": 0.4}),
    ("olmoe", {"attention_bias": True, "num_key_value_heads": 4}),
    ("olmoe", {"rope_parameters": LLAMA3}),
    ("qwen3_moe", {}),
    ("qwen3_moe", {"norm_topk_prob": False, "num_experts_per_tok": 2}),
    ("qwen3_moe", {"mlp_only_layers": [0, 3], "attention_bias": True}),
    ("qwen3_moe", {"decoder_sparse_step": 2, "tie_word_embeddings": True}),
    ("qwen3_moe", {"num_hidden_layers": 5, "mlp_only_layers": [1, 2, 4]}),
    ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}),
    ("qwen3_moe", {"sliding_window": 5, "head_dim": 24}),
    ("qwen3_moe", {"rope_parameters": YARN}),
]


def sequences(*lengths: int, seed: int = 3) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in lengths]


@pytest.fixture(params=["compiled", "torch"])
def stages(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models that are loaded in this test run on kernels, or on torch alone."""
    if request.param == "torch":
        monkeypatch.setattr(native, "kernels", None)
    elif native.kernels is None:
        pytest.skip("the kernels are not built")


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.usefixtures("stages")
@pytest.mark.parametrize(("family", "switches"), SWITCHES, ids=str)
def test_chunks_and_decode_steps_in_one_batch_give_the_logits_of_one_pass(
    family: str, switches: dict[str, Any]
) -> None:
    path = cached_checkpoint(family, **switches)
    ids = sequences(23, 9, 40)

    logits = make_runner(path).play(ids, chunks=[5, 9, 16], prompts=[12, 4, 36])

    for own, tokens in zip(logits, ids, strict=True):
        assert relative(own, reference_logits(path, tokens)) < FLOAT32


@pytest.mark.usefixtures("stages")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("top_k", [4, 16])
def test_bfloat16_logits_are_those_of_transformers(family: str, top_k: int, tmp_path: Any) -> None:
    path = make_checkpoint(
        tmp_path, family, dtype=torch.bfloat16, initializer_range=0.05, num_experts_per_tok=top_k
    )
    ids = sequences(24, 17)

    logits = make_runner(path).play(ids, chunks=[12, 17], prompts=[12, 17])

    for own, tokens in zip(logits, ids, strict=True):
        theirs = reference_logits(path, tokens, torch.bfloat16)
        error = (own - theirs).norm(dim=-1) / theirs.norm(dim=-1)
        # A near tie in a router may fall the other way in bfloat16 and change one token for good.
        assert error.median() < BFLOAT16
        assert top_k == 4 or error.max() < BFLOAT16


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_over_three_plans_sum_to_the_whole(family: str) -> None:
    path = cached_checkpoint(family)
    cpu = torch.device("cpu")
    split = [(0, 3, 15), (1, 2, 4, 5, 6, 7, 8), (9, 10, 11, 12, 13, 14)]
    plans = [LoadPlan(i == 0, (experts,) * 4) for i, experts in enumerate(split)]
    models = [open_checkpoint(ModelConfig(name=str(path))).load(plan, cpu) for plan in plans]
    ids = sequences(19)

    (logits,) = StageRunner(models[0], list(zip(models, plans, strict=True))).play(ids, [8], [16])

    assert relative(logits, reference_logits(path, ids[0])) < FLOAT32


@pytest.mark.usefixtures("stages")
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_generate(family: str) -> None:
    path = cached_checkpoint(family)
    prompts = sequences(5, 18, 11)
    runner = make_runner(path)
    requests = [Request(row) for row in range(3)]
    answers: list[list[int]] = [[] for _ in prompts]

    for _ in range(12):
        segments = [
            (request, answer[-1:] or prompt)
            for request, answer, prompt in zip(requests, answers, prompts, strict=True)
        ]
        for answer, logits in zip(answers, runner.step(segments), strict=True):
            answer.append(int(logits[-1].argmax()))

    assert answers == reference_greedy(path, prompts, 12)


@pytest.mark.parametrize("pack", [False, True])
def test_packed_and_plain_weights_give_the_same_tokens(
    pack: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Decoder, "pack_weights", pack)
    path = cached_checkpoint("qwen3_moe", mlp_only_layers=[0, 3], attention_bias=True)
    ids = sequences(21)

    (logits,) = make_runner(path).play(ids, [8], [16])

    assert relative(logits, reference_logits(path, ids[0])) < FLOAT32


@pytest.mark.usefixtures("stages")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pack", [None, False, True])
def test_logits_alone_are_those_in_a_batch_of_32_bit_for_bit(
    dtype: torch.dtype, pack: bool | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setattr(Decoder, "pack_weights", pack)
    path = make_checkpoint(tmp_path, "qwen3_moe", dtype=dtype, mlp_only_layers=[3])
    lengths = [3 + 7 * i % 100 for i in range(32)]  # decode contexts on both sides of a cut
    prompts = [max(1, length - 1 - i % 5) for i, length in enumerate(lengths)]
    ids = sequences(*lengths)

    together = make_runner(path, requests=32).play(ids, [16] * 32, prompts)

    for i in (0, 1, 2, 9, 13, 14, 27, 31):
        (alone,) = make_runner(path).play([ids[i]], [16], [prompts[i]])
        assert torch.equal(alone, together[i]), f"sequence {i} of {lengths[i]} tokens"


@pytest.mark.usefixtures("stages")
def test_dynamic_rope_beyond_the_trained_positions_follows_the_length(tmp_path: Any) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    path = make_checkpoint(
        tmp_path, "mixtral", rope_parameters=rope, max_position_embeddings=16, head_dim=16
    )
    ids = sequences(28, 10)
    runner = make_runner(path)
    assert runner.home.spec.context == 32

    logits = runner.play(ids, chunks=[28, 10], prompts=[28, 10])

    for own, tokens in zip(logits, ids, strict=True):
        assert relative(own, reference_logits(path, tokens)) < FLOAT32


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_in_the_old_form_means_the_same(family: str, tmp_path: Any) -> None:
    path = make_checkpoint(tmp_path, family)
    ids = sequences(14)
    (new,) = make_runner(path).play(ids, [14], [14])
    old_name = "num_local_experts" if family == "mixtral" else "num_experts"
    new_theta = 1e6 if family == "mixtral" else 1e4
    changes = {"rope_parameters": ..., "rope_theta": new_theta, "rope_scaling": None}
    counts = {"num_local_experts": ..., "num_experts": ..., old_name: 16}

    edit_json(path / "config.json", dtype=..., torch_dtype="float32", **changes, **counts)
    (old,) = make_runner(path).play(ids, [14], [14])

    assert torch.equal(old, new)
