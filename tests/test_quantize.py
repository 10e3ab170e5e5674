"""`model.quantize = int8`: what it saves, and how far the logits move, on both paths."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from asyncmoe import native
from asyncmoe.checkpoint import open_checkpoint
from asyncmoe.config import ModelConfig
from asyncmoe.model import LoadPlan, Model
from tests.checkpoints import FAMILIES, VOCAB, make_checkpoint
from tests.stagerunner import StageRunner

IDS = torch.randint(0, VOCAB, (24,), generator=torch.Generator().manual_seed(5)).tolist()


def load(path: Path, **settings: str) -> tuple[Model, LoadPlan]:
    checkpoint = open_checkpoint(ModelConfig(name=str(path), **settings))
    spec = checkpoint.spec
    plan = LoadPlan(True, (tuple(range(spec.experts)),) * len(spec.moe_layers))
    return checkpoint.load(plan, torch.device("cpu")), plan


def logits(model: Model, plan: LoadPlan) -> Tensor:
    (rows,) = StageRunner(model, [(model, plan)]).play([IDS], chunks=[12], prompts=[20])
    return rows


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("compiled", [True, False])
def test_logits_of_int8_weights_are_near_those_of_the_checkpoint(
    family: str, compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr(native, "kernels", None)
    # Every expert for every token: none can fall on the other side of a near tie.
    path = make_checkpoint(tmp_path, family, initializer_range=0.05, num_experts_per_tok=16)
    whole = logits(*load(path))

    error = (logits(*load(path, quantize="int8")) - whole).norm(dim=-1) / whole.norm(dim=-1)

    assert error.max() < 0.03
    assert error.min() > 1e-4  # they are quantised


def test_both_paths_quantise_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_checkpoint(tmp_path, "qwen3_moe", mlp_only_layers=[1], tie_word_embeddings=True)
    one = logits(*load(path, quantize="int8"))
    monkeypatch.setattr(native, "kernels", None)
    other = logits(*load(path, quantize="int8"))
    assert ((one - other).norm(dim=-1) / other.norm(dim=-1)).median() < 1e-3


def test_int8_takes_a_quarter_of_the_memory_of_float32_but_for_the_embedding(
    tmp_path: Path,
) -> None:
    path = make_checkpoint(tmp_path, "mixtral", dtype=torch.float32)
    model, _ = load(path)
    embedding = 4 * VOCAB * model.spec.hidden
    small, _ = load(path, quantize="int8")
    assert small.weight_bytes() - embedding < 0.32 * (model.weight_bytes() - embedding)
