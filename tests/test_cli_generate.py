"""The commands `generate`, `serve` and `demo` as their users see them."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from asyncmoe.cli import main as command_line
from asyncmoe.sampling import SamplingParams
from tests.checkpoints import make_checkpoint
from tests.servedmodel import make_served_checkpoint

COMMAND = [sys.executable, "-m", "asyncmoe.cli.main"]
FLAGS = ["--ranks", "1", "--threads", "1", "--ignore-eos"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_served_checkpoint(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint without tokenizer files."""
    return make_checkpoint(tmp_path_factory.mktemp("bare"), "olmoe")


def generate(model: Path, *flags: str) -> int:
    return command_line.main(["generate", "--model", str(model), *FLAGS, *flags])


def test_json_is_one_object_with_the_answer_and_its_timing(
    served: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate(served, "--prompt", "hi", "--max-tokens", "7", "--json") == 0
    out = capsys.readouterr().out
    result = json.loads(out)
    assert out.count("\n") == 1
    assert isinstance(result["text"], str)
    assert len(result["token_ids"]) == 7
    assert set(result["itl_ms"]) == {"mean", "p50", "p99"}
    assert 0 < result["itl_ms"]["p50"] <= result["itl_ms"]["p99"]
    whole_s = result["ttft_s"] + 6 * result["itl_ms"]["mean"] / 1e3
    assert result["tokens_per_s"] == pytest.approx(7 / whole_s)
    assert (result["ranks"], result["scheduler"], result["transport"]) == (
        1,
        "defrag_aging",
        "inproc",
    )


def test_prompt_ids_work_without_tokenizer_files_and_text_is_null(
    bare: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate(bare, "--prompt-ids", "5,17,9", "--max-tokens", "1", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["text"] is None
    assert len(result["token_ids"]) == 1
    assert result["itl_ms"] == {"mean": None, "p50": None, "p99": None}


def test_without_json_the_text_streams_and_the_summary_is_on_standard_error(
    served: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generate(served, "--prompt", "hi", "--max-tokens", "7", "--json")
    text = json.loads(capsys.readouterr().out)["text"]
    generate(served, "--prompt", "hi", "--max-tokens", "7")
    shown = capsys.readouterr()
    assert shown.out == text + "\n"
    assert re.search(r"7 tokens, [\d.]+ tokens/s", shown.err)


def test_every_sampling_field_has_a_flag(served: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command_line.main(["generate", "--help"])
    offered = capsys.readouterr().out
    for name in SamplingParams.__dataclass_fields__:
        assert f"--{name.replace('_', '-')}" in offered
    plain = ["--prompt", "hi", "--max-tokens", "9", "--json"]
    generate(served, *plain)
    greedy = json.loads(capsys.readouterr().out)
    generate(served, *plain, "--temperature", "2", "--seed", "3", "--logprobs", "2")
    sampled = json.loads(capsys.readouterr().out)
    generate(served, *plain, "--stop", greedy["text"][8:11], "--logit-bias", '{"7": -1}')
    stopped = json.loads(capsys.readouterr().out)
    generate(served, *plain, "--stop-token-ids", f"1,{greedy['token_ids'][4]}")
    cut = json.loads(capsys.readouterr().out)
    assert sampled["token_ids"] != greedy["token_ids"]
    assert [len(each["top"]) for each in sampled["logprobs"]] == [2] * 9
    assert stopped["text"] == greedy["text"][: greedy["text"].index(greedy["text"][8:11])]
    assert cut["token_ids"] == greedy["token_ids"][:5]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--prompt-ids", "5,x"], "prompt-ids is '5,x'"),
        (["--prompt-ids", "5,384"], "384 is not in the vocabulary: 0 to 383"),
        (["--prompt-ids", "5", "--top-p", "2"], "top_p is 2; allowed"),
        (["--prompt-ids", "5", "--temperature", "nan"], "temperature is nan"),
        (["--prompt-ids", "5", "--min-p", "warm"], "min_p is 'warm'"),
        (["--prompt", "hi"], "no tokenizer files"),
        (["--prompt-ids", "5", "--max-tokens", "512"], "room for 512 tokens"),
    ],
)
def test_bad_requests_are_one_line_on_standard_error(
    bare: Path, capsys: pytest.CaptureFixture[str], flags: list[str], says: str
) -> None:
    assert generate(bare, *flags, "--json") == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert says in shown.err
    assert "Traceback" not in shown.err


def test_two_ranks_print_what_one_does(served: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ask = ["--prompt-ids", "5,17,9", "--max-tokens", "12", "--json"]
    generate(served, *ask)
    one = json.loads(capsys.readouterr().out)
    done = subprocess.run(
        [
            *COMMAND,
            "generate",
            "--model",
            str(served),
            *FLAGS,
            *ask,
            "--ranks",
            "2",
            "--scheduler",
            "mtfs",
        ],
        capture_output=True,
        text=True,
        timeout=90,
        check=True,
    )
    two = json.loads(done.stdout)
    assert two["token_ids"] == one["token_ids"]
    assert (two["ranks"], two["scheduler"], two["transport"]) == (2, "mtfs", "auto (shm)")


def test_an_interrupt_ends_generate_with_nothing_left(served: Path) -> None:
    process = subprocess.Popen(
        [
            *COMMAND,
            "generate",
            "--model",
            str(served),
            *FLAGS,
            "--prompt",
            "x",
            "--max-tokens",
            "500",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.read(1)
    began_s = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=5)
    assert time.monotonic() - began_s < 5
    assert process.returncode == 130
    assert b"Traceback" not in errors


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_reader_that_leaves_ends_generate_quietly(served: Path, flags: list[str]) -> None:
    ask = ["--prompt", "x", "--max-tokens", "500", *flags]
    process = subprocess.Popen(
        [*COMMAND, "generate", "--model", str(served), *FLAGS, *ask, "--log.level", "warning"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.close()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGPIPE
    assert errors == b""


@pytest.mark.parametrize("closed", ["<&-", "2>&-"])
def test_closed_standard_streams_do_no_harm(bare: Path, closed: str) -> None:
    command = f"{sys.executable} -m asyncmoe generate --ranks 2 --prompt-ids 5 --max-tokens 2"
    shell = ["bash", "-c", f"{command} --json --model {bare} {closed}"]
    done = subprocess.run(shell, stdout=subprocess.PIPE, timeout=120, check=False)
    assert done.returncode == 0
    assert len(json.loads(done.stdout)["token_ids"]) == 2


def test_serve_on_a_port_in_use_is_one_clear_error(
    served: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert command_line.main(["serve", "--model", str(served), "--port", port]) == 2
    error = capsys.readouterr().err
    assert f"server.port {port}: Address already in use" in error
    assert error.count("\n") == 1


def test_the_demo_shows_an_answer_a_rate_and_where_the_time_went(served: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "demo", "--model", str(served), "--max-tokens", "12", "--threads", "1"],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "2 ranks over auto (shm) and a server at http://127.0.0.1:" in done.stdout
    assert re.search(r"tokens in [\d.]+ s over HTTP: [\d.]+ tokens/s", done.stdout)
    assert re.search(r"rank 0 +rank 1", done.stdout)
    assert done.stdout.endswith("stopped\n")
