"""Where configuration values come from, and what a wrong one is told."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from asyncmoe import configexplain, configfile, configflags
from asyncmoe.config import Config
from asyncmoe.errors import ConfigError, UnknownName


def from_flags(*argv: str, environ: dict[str, str] | None = None) -> Config:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    configflags.add_arguments(parser)
    return configflags.from_args(parser.parse_args(configflags.fold_subkeys(argv)), environ or {})


def toml(tmp_path: Path, text: str) -> str:
    path = tmp_path / "config.toml"
    path.write_text(text)
    return str(path)


def test_flags_win_over_environment_over_file_over_defaults(tmp_path: Path) -> None:
    file = toml(tmp_path, "[kv]\nblocks = 1\nblock_tokens = 1\nmemory_gib = 1.5")
    environ = {"ASYNCMOE_KV__BLOCKS": "2", "ASYNCMOE_KV__BLOCK_TOKENS": "2"}

    kv = from_flags("--config", file, "--kv.blocks", "3", environ=environ).kv

    assert (kv.blocks, kv.block_tokens, kv.memory_gib) == (3, 2, 1.5)
    assert configfile.load(environ={}).kv.block_tokens == 16


def test_short_flags_set_the_keys_that_people_expect() -> None:
    config = from_flags("--model", "dir", "--ranks", "4", "--scheduler", "mtfs", "--port", "0")

    assert config.model.name == "dir"
    assert config.cluster.ranks == 4
    assert config.scheduler.name == "mtfs"
    assert config.server.port == 0


def test_every_short_flag_names_a_key() -> None:
    assert set(configflags.ALIASES.values()) <= set(configfile.keys())


@pytest.mark.parametrize("text", ["attention,expert", ' ["attention", "expert"]'])
def test_a_list_is_comma_separated_or_json(text: str) -> None:
    assert from_flags("--placement.roles", text).placement.roles == ["attention", "expert"]


def test_an_optional_key_can_be_set_back_to_none() -> None:
    config = from_flags("--kv.blocks", "none", environ={"ASYNCMOE_KV__BLOCKS": "4"})

    assert config.kv.blocks is None


def test_entries_of_a_table_add_up_over_the_sources(tmp_path: Path) -> None:
    file = toml(tmp_path, "[scheduler.parameters]\ndecay = 0.5\npatience = 1")
    environ = {"ASYNCMOE_SCHEDULER__PARAMETERS__HISTORY": "2"}

    config = from_flags(
        "--config", file, "--scheduler.parameters.patience", "8",
        "--scheduler.parameters", "look_ahead=3", "--scheduler.parameters.note=a,b",
        environ=environ,
    )  # fmt: skip

    assert config.scheduler.parameters == {
        "decay": 0.5, "patience": 8, "history": 2, "look_ahead": 3, "note": "a,b",
    }  # fmt: skip


def test_arguments_of_a_python_caller_keep_their_types() -> None:
    config = configfile.load(
        environ={},
        overrides={"kv.blocks": 8, "scheduler.parameters.decay": 0.25, "log.level": None},
    )

    assert config.kv.blocks == 8
    assert config.scheduler.parameters == {"decay": 0.25}
    assert config.log.level == "info"


def test_wrong_value_names_key_value_origin_and_what_is_allowed() -> None:
    with pytest.raises(ConfigError) as caught:
        configfile.load(environ={"ASYNCMOE_MODEL__DTYPE": "fp32"})

    for part in ("model.dtype", "'fp32'", "ASYNCMOE_MODEL__DTYPE", "'bfloat16'"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("kv.blocks", "0"),
        ("kv.memory_gib", "nan"),
        ("kv.memory_gib", "inf"),
        ("server.port", "65536"),
        ("model.strict", "perhaps"),
        ("scheduler.parameters", "8"),
        ("placement.experts_per_rank", "[1,"),
        ("engine.slots", "99999999999999"),
        ("engine.max_requests", "100000000000"),
        ("engine.prefill_chunk", "100000000000"),
        ("transport.window_rows", "100000000000"),
        ("transport.parcel_bytes", "100000000000000"),
    ],
)
def test_value_out_of_range_or_shape_is_refused(path: str, text: str) -> None:
    with pytest.raises(ConfigError, match=path.replace(".", r"\.")):
        from_flags(f"--{path}", text)


def test_unknown_key_names_the_nearest_and_the_file(tmp_path: Path) -> None:
    file = toml(tmp_path, "[kv]\nblock = 3")

    with pytest.raises(UnknownName, match=r"config\.toml.*Did you mean 'kv\.blocks'"):
        configfile.load(file, {})


def test_unknown_section_names_the_nearest() -> None:
    with pytest.raises(UnknownName, match="Did you mean 'scheduler'"):
        configfile.load(environ={"ASYNCMOE_SCHEDULLER__NAME": "mtfs"})


@pytest.mark.parametrize("text", ["kv = 3", "[kv", "blocks = 3"])
def test_file_of_the_wrong_form_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="config"):
        configfile.load(toml(tmp_path, text), {})


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[cluster]\nranks = true", r"cluster\.ranks = True from file .*integer"),
        ('[cluster]\nranks = "2"', r"cluster\.ranks = '2' from file .*integer"),
        ("[placement]\nexperts_per_rank = [1, true]", r"placement\.experts_per_rank = "),
        ("[cluster]\ntoken = 7", r"cluster\.token = \(not shown\)"),
    ],
)
def test_a_value_of_another_type_in_a_file_is_refused(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        configfile.load(toml(tmp_path, text), {})


def test_whole_numbers_of_a_file_serve_where_numbers_are_wanted(tmp_path: Path) -> None:
    assert configfile.load(toml(tmp_path, "[kv]\nmemory_gib = 2"), {}).kv.memory_gib == 2.0


def test_file_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        configfile.load("nowhere.toml", {})


def test_reachable_address_without_a_token_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cluster\.token must be set"):
        configfile.load(environ={"ASYNCMOE_CLUSTER__BIND_HOST": "0.0.0.0"})


def test_token_is_never_shown_and_has_no_flag() -> None:
    config = configfile.load(environ={"ASYNCMOE_CLUSTER__TOKEN": "hush"})

    assert "hush" not in repr(config)
    with pytest.raises(ConfigError, match="not shown") as caught:
        configfile.load(environ={}, overrides={"cluster.token": ["hush"]})
    assert "hush" not in str(caught.value)
    with pytest.raises(SystemExit):
        from_flags("--cluster.token", "hush")


def test_minimum_rows_above_maximum_are_refused() -> None:
    with pytest.raises(ConfigError, match="expert_min_rows is 9, above"):
        from_flags("--batch.expert_min_rows", "9", "--batch.expert_max_rows", "8")


def test_explanation_has_every_key_with_environment_and_meaning() -> None:
    text = configexplain.explain()

    for path, key in configfile.keys().items():
        assert f"  {path}  (" in text
        assert key.environment in text
        assert key.field.description
    assert "integer, at least 1, at most 1024" in text


def test_explanation_has_the_parameters_of_each_scheduler() -> None:
    explained = {each["scheduler"]: each for each in configexplain.explain_schedulers()}

    names = {each["name"] for each in explained["defrag_aging"]["parameters"]}
    assert "patience" in names
    assert explained["mtfs"]["parameters"] == []


def test_the_switches_of_the_compiled_parts_are_no_keys() -> None:
    environ = {"ASYNCMOE_COMPILED": "0", "ASYNCMOE_BUILD_JOBS": "2"}
    assert configfile.load(environ=environ) == configfile.load(environ={})
    with pytest.raises(ConfigError, match="ASYNCMOE_COMPILED is 'maybe'; allowed: 0, 1"):
        configfile.load(environ={"ASYNCMOE_COMPILED": "maybe"})
