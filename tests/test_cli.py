"""The command line: what it prints, where, and how it ends."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest

from asyncmoe import log
from asyncmoe.cli.main import COMMANDS, main

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def own_logging() -> Iterator[None]:
    """Undo what a command sets up in this process."""
    logger = logging.getLogger(log.ROOT)
    before = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.level, logger.propagate = before


def test_help_names_every_command(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])

    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert set(COMMANDS) <= set(shown.split())


def test_explaining_the_configuration_needs_no_torch() -> None:
    program = (
        "import sys; from asyncmoe.cli.main import main; main(['config', '--explain']);"
        "sys.exit('torch' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)

    assert ended.returncode == 0, ended.stderr
    assert "kv.block_tokens" in ended.stdout
    assert ended.stderr == ""


def test_explanation_as_json_has_keys_and_schedulers(capsys: Capture) -> None:
    assert main(["config", "--explain", "--json"]) == 0

    explained = json.loads(capsys.readouterr().out)
    keys = {each["key"]: each for each in explained["keys"]}
    assert keys["kv.blocks"]["environment"] == "ASYNCMOE_KV__BLOCKS"
    assert keys["kv.block_tokens"]["default"] == 16
    assert "defrag_aging" in [each["scheduler"] for each in explained["schedulers"]]


def test_config_shows_values_and_where_they_come_from(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYNCMOE_CLUSTER__TOKEN", "hush")

    assert main(["config", "--json", "--ranks", "3", "--scheduler.parameters.patience", "8"]) == 0

    out = capsys.readouterr().out
    shown = json.loads(out)
    assert shown["cluster.ranks"] == {"value": 3, "from": "flag --cluster.ranks"}
    assert shown["scheduler.parameters"]["value"] == {"patience": 8}
    assert shown["kv.blocks"]["from"] == "default"
    assert "hush" not in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["config", "--kv.block", "3"], "Did you mean '--kv.blocks'"),
        (["config", "--rank", "3"], "Did you mean '--ranks'"),
        (["config", "--kv.blocks", "three"], "config key kv.blocks = 'three'"),
        (["config", "--config", "nowhere.toml"], "nowhere.toml"),
    ],
)
def test_wrong_command_line_is_one_line_and_status_2(
    capsys: Capture, argv: list[str], message: str
) -> None:
    assert main(argv) == 2

    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_flag_without_its_value_is_refused(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["config", "--scheduler.parameters.patience"])

    assert ended.value.code == 2
    assert "expected one argument" in capsys.readouterr().err


@pytest.mark.usefixtures("own_logging")
def test_unknown_scheduler_is_refused_with_the_nearest(capsys: Capture) -> None:
    assert main(["generate", "--prompt", "x", "--ranks", "2", "--scheduler", "defrag_agin"]) == 2

    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Did you mean 'defrag_aging'" in captured.err
    assert "Traceback" not in captured.err


@pytest.mark.usefixtures("own_logging")
def test_traceback_is_shown_at_log_level_debug(capsys: Capture) -> None:
    main(["generate", "--prompt", "x", "--transport", "tpc", "--log-level", "debug"])

    assert "Traceback" in capsys.readouterr().err


@pytest.mark.usefixtures("own_logging")
def test_log_lines_go_to_standard_error_with_the_rank(capsys: Capture) -> None:
    log.setup("info", rank=3)

    logging.getLogger("asyncmoe.anything").info("here")
    logging.getLogger("asyncmoe.anything").debug("not here")

    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("[rank 3] ")
    assert captured.err.endswith("here\n")
    assert captured.err.count("\n") == 1


def test_doctor_tries_every_device_and_transport(capsys: Capture) -> None:
    assert main(["doctor", "--json"]) == 0

    report = json.loads(capsys.readouterr().out)
    works = {each["name"] for each in report["transports"] if each["status"] == "works"}
    assert {"inproc", "tcp"} <= works
    assert report["devices"][0] == {
        "name": "cpu",
        "status": "works",
        "detail": "computed in float32 and bfloat16 on cpu",
    }
    assert report["packages"]["torch"]
    assert report["extras"]["ucx"]["install"] == "pip install 'asyncmoe[ucx]'"
    assert report["cores"] >= 1
