"""Opening checkpoints, reading only what a rank needs, and the errors of damaged ones."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from asyncmoe.checkpoint import DummySource, SafetensorsSource, find_directory, open_checkpoint
from asyncmoe.config import ModelConfig
from asyncmoe.errors import CheckpointError, ConfigError, UnknownName
from asyncmoe.model import LoadPlan, Model
from tests.checkpoints import cached_checkpoint, edit_json, make_checkpoint
from tests.stagerunner import make_runner, whole_plan

CPU = torch.device("cpu")
INDEX = "model.safetensors.index.json"


@pytest.fixture
def single(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path, "qwen3_moe")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path, "qwen3_moe", shard_size="200KB")


def load(path: Path, plan: LoadPlan | None = None, **options: Any) -> Model:
    checkpoint = open_checkpoint(ModelConfig(name=str(path), **options))
    return checkpoint.load(plan or whole_plan(4, 16), CPU)


def rewrite(path: Path, change: Any) -> None:
    """Apply `change` to the tensors of a checkpoint of one file."""
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


class RecordingSource(SafetensorsSource):
    """Keeps the names that were read."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.names: set[str] = set()

    def read(self, name: str, shape: tuple[int, ...], rows: slice | None = None) -> Tensor:
        self.names.add(name)
        return super().read(name, shape, rows)


def test_shards_and_a_single_file_hold_the_same_model(sharded: Path) -> None:
    assert len(list(sharded.glob("*.safetensors"))) > 3
    ids = [[5, 17, 9, 200]]
    (from_shards,) = make_runner(sharded).play(ids, [4], [4])
    (from_file,) = make_runner(cached_checkpoint("qwen3_moe")).play(ids, [4], [4])
    assert torch.equal(from_shards, from_file)


def test_an_expert_rank_reads_its_experts_and_nothing_else(sharded: Path) -> None:
    checkpoint = open_checkpoint(ModelConfig(name=str(sharded)))
    source = RecordingSource(sharded)
    plan = LoadPlan(False, ((0, 7), (), (3,), ()))

    checkpoint.model_class.load(checkpoint.config, checkpoint.spec, source, plan, CPU)

    assert source.names == {
        f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"
        for layer, expert in ((0, 0), (0, 7), (2, 3))
        for part in ("gate", "up", "down")
    }


def test_an_attention_rank_reads_no_experts(single: Path) -> None:
    checkpoint = open_checkpoint(ModelConfig(name=str(single)))
    source = RecordingSource(single)
    plan = LoadPlan(True, ((),) * 4)

    model = checkpoint.model_class.load(checkpoint.config, checkpoint.spec, source, plan, CPU)

    assert len(source.names) > 30
    assert not any(".experts." in name for name in source.names)
    assert model.weight_bytes() < load(single).weight_bytes()


def test_rows_of_a_parameter_can_be_read_alone(single: Path) -> None:
    with SafetensorsSource(single) as source:
        whole = source.read("lm_head.weight", (384, 64))
        assert torch.equal(source.read("lm_head.weight", (384, 64), slice(5, 9)), whole[5:9])


def test_a_shard_that_is_named_but_missing_is_an_error(sharded: Path) -> None:
    lost = sorted(sharded.glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(CheckpointError, match=rf"{lost.name} is named in .* but missing"):
        open_checkpoint(ModelConfig(name=str(sharded)))


def test_a_shard_without_the_parameter_that_the_index_places_there_is_an_error(
    sharded: Path,
) -> None:
    index = json.loads((sharded / INDEX).read_text())
    other = next(
        f for f in index["weight_map"].values() if f != index["weight_map"]["model.norm.weight"]
    )
    index["weight_map"]["model.norm.weight"] = other
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=rf"{other} does not hold model\.norm\.weight"):
        load(sharded)


@pytest.mark.parametrize("weight_map", [None, {"model.norm.weight": 3}, {"a": "../other"}])
def test_an_index_that_is_not_one_is_an_error(sharded: Path, weight_map: Any) -> None:
    edit_json(sharded / INDEX, weight_map=weight_map)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        open_checkpoint(ModelConfig(name=str(sharded)))


def test_a_missing_parameter_is_named_by_every_rank(single: Path) -> None:
    rewrite(single, lambda tensors: tensors.pop("model.layers.2.mlp.experts.9.up_proj.weight"))
    nothing = LoadPlan(False, ((),) * 4)
    with pytest.raises(CheckpointError, match=r"missing .*layers\.2\.mlp\.experts\.9\.up_proj"):
        load(single, nothing)


def test_an_unexpected_parameter_is_an_error_unless_allowed(single: Path) -> None:
    rewrite(single, lambda tensors: tensors.update({"model.extra.weight": torch.zeros(3)}))
    with pytest.raises(CheckpointError, match=r"unexpected parameters: model\.extra\.weight"):
        load(single)
    load(single, strict=False)


def test_old_rotary_buffers_and_a_stored_tied_head_are_expected(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "mixtral", tie_word_embeddings=True)
    buffer = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(path, lambda t: t.update({buffer: torch.zeros(8), "lm_head.weight": torch.zeros(1)}))
    load(path)


def test_a_wrong_shape_names_both_shapes(single: Path) -> None:
    rewrite(single, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(63)}))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has shape \[63\]; .* \[64\]"):
        load(single)


def test_a_parameter_that_is_no_float_is_an_error(single: Path) -> None:
    integers = torch.zeros(64, dtype=torch.int8)
    rewrite(single, lambda tensors: tensors.update({"model.norm.weight": integers}))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has dtype I8; allowed: F32"):
        load(single)


@pytest.mark.parametrize(("layers", "kind"), [(6, "missing"), (3, "unexpected")])
def test_layers_that_do_not_match_the_checkpoint_are_counted(
    single: Path, layers: int, kind: str
) -> None:
    edit_json(single / "config.json", num_hidden_layers=layers)
    with pytest.raises(
        CheckpointError, match=rf"{kind} parameters.*asks for {layers} layers, the checkpoint has 4"
    ):
        load(single, LoadPlan(True, ((),) * layers))


def test_a_truncated_file_is_an_error(single: Path) -> None:
    file = single / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a readable"):
        open_checkpoint(ModelConfig(name=str(single)))


def test_a_directory_without_weights_or_config_is_an_error(single: Path) -> None:
    (single / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"has neither model\.safetensors nor"):
        open_checkpoint(ModelConfig(name=str(single)))
    (single / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json is not readable JSON"):
        open_checkpoint(ModelConfig(name=str(single)))
    (single / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        open_checkpoint(ModelConfig(name=str(single)))


def test_an_unknown_architecture_names_the_nearest(single: Path) -> None:
    edit_json(single / "config.json", model_type="qwen3_mow")
    with pytest.raises(UnknownName, match=r"architecture 'qwen3_mow'\. Did you mean 'qwen3_moe'"):
        open_checkpoint(ModelConfig(name=str(single)))


def test_without_a_model_type_the_class_name_says_it(single: Path) -> None:
    edit_json(single / "config.json", model_type=..., architectures=["Qwen3MoeForCausalLM"])
    assert open_checkpoint(ModelConfig(name=str(single))).spec.architecture == "qwen3_moe"


def test_names_that_are_no_model(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="unknown model 'teeny'"):
        find_directory("teeny")
    with pytest.raises(CheckpointError, match="there is no directory"):
        find_directory(str(tmp_path / "nowhere"))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="is a file; allowed: the directory"):
        find_directory(str(tmp_path / "config.json"))


def test_generation_config_gives_eos_ids_and_sampling_defaults(single: Path) -> None:
    (single / "generation_config.json").write_text(
        '{"eos_token_id": [7, 8], "temperature": 0.6, "top_k": 20, "do_sample": true}'
    )
    checkpoint = open_checkpoint(ModelConfig(name=str(single)))
    assert checkpoint.spec.eos_ids == (7, 8)
    assert checkpoint.sampling_defaults == {"temperature": 0.6, "top_k": 20}


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("eos", [384, [2, 10**9], -1])
def test_an_eos_id_that_no_token_has_is_an_error(single: Path, file: str, eos: Any) -> None:
    settings = json.loads((single / "config.json").read_text()) | {"eos_token_id": eos}
    (single / file).write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=rf"{file}: eos_token_id is .*; allowed: .*size, 384"):
        open_checkpoint(ModelConfig(name=str(single)))


@pytest.mark.parametrize(
    "text",
    [
        '{"eos_token_id": "2"}', '{"temperature": true}', '{"temperature": -1}',
        '{"repetition_penalty": 0}', '{"top_k": 1.5}', '{"top_p": 2}',
    ],
)  # fmt: skip
def test_a_generation_config_with_a_wrong_value_is_an_error(single: Path, text: str) -> None:
    (single / "generation_config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"generation_config\.json: \w+ is .*; allowed:"):
        open_checkpoint(ModelConfig(name=str(single)))


def test_the_context_can_be_shortened_but_not_stretched(single: Path) -> None:
    assert open_checkpoint(ModelConfig(name=str(single), context=100)).spec.context == 100
    with pytest.raises(ConfigError, match=r"model\.context is 513; the model's own, 512"):
        open_checkpoint(ModelConfig(name=str(single), context=513))


def test_dummy_weights_depend_on_name_shape_and_seed_alone() -> None:
    one, two = DummySource(seed=1, std=0.1), DummySource(seed=1, std=0.1)
    two.read("other.weight", (4, 4))  # what was read before must not matter
    weight = one.read("a.weight", (300, 40))

    assert torch.equal(two.read("a.weight", (300, 40)), weight)
    assert torch.equal(two.read("a.weight", (300, 40), slice(10, 20)), weight[10:20])
    assert not torch.equal(two.read("b.weight", (300, 40)), weight)
    assert not torch.equal(DummySource(seed=2, std=0.1).read("a.weight", (300, 40)), weight)
    assert weight.std().item() == pytest.approx(0.1, rel=0.05)
    assert torch.equal(one.read("model.norm.weight", (4,)), torch.ones(4))


def test_a_source_that_was_given_up_reads_no_more(single: Path) -> None:
    spec = open_checkpoint(ModelConfig(name=str(single))).spec
    for load_format in ("safetensors", "dummy"):
        config = ModelConfig.model_validate({"name": str(single), "load_format": load_format})
        with open_checkpoint(config).source as source:
            shape = (spec.vocab, spec.hidden)
            assert source.read("model.embed_tokens.weight", shape).shape == shape

            source.give_up()

            with pytest.raises(CheckpointError, match="given up"):
                source.read("model.embed_tokens.weight", shape)


def test_dummy_weights_need_a_config_alone(single: Path) -> None:
    (single / "model.safetensors").unlink()
    runner = make_runner(single, model={"load_format": "dummy", "dtype": "bfloat16"})
    (logits,) = runner.play([[5, 17, 9]], [3], [3])
    assert logits.shape == (3, 384)
    assert logits.isfinite().all()
    assert runner.home.spec.dtype == torch.bfloat16


def test_reading_keeps_no_part_of_the_file_in_memory() -> None:
    path = cached_checkpoint("olmoe")
    with SafetensorsSource(path) as source:
        weight = source.read("lm_head.weight", (384, 64))
        assert str(path) not in Path("/proc/self/maps").read_text()
    expected = load_file(path / "model.safetensors")["lm_head.weight"]
    assert torch.equal(weight, expected)


def test_some_rows_are_those_of_the_whole() -> None:
    with SafetensorsSource(cached_checkpoint("olmoe")) as source:
        whole = source.read("lm_head.weight", (384, 64))
        assert torch.equal(source.read("lm_head.weight", (384, 64), slice(5, 9)), whole[5:9])
        assert source.read("lm_head.weight", (384, 64), slice(7, 7)).shape == (0, 64)


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "olmoe")
    with SafetensorsSource(tmp_path) as source:
        os.truncate(tmp_path / "model.safetensors", 20_000)
        with pytest.raises(CheckpointError, match="was cut off while it was read"):
            source.read("lm_head.weight", (384, 64))
