"""The benchmarks' arithmetic, the shape of their results, and what they do when an engine fails."""

from __future__ import annotations

import argparse
import importlib
import json
import stat
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.checkpoints import cached_checkpoint

FOLDER = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a benchmark by name, as `python benchmarks/NAME.py` does; torch stays at a thread."""
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    return load


@pytest.fixture
def quick_machine(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine is measured for real, on work that is too small to be right."""
    machine = bench("machine")
    monkeypatch.setattr(machine, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(machine, "PRODUCT_SIZE", 64)


def printed(
    module: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *flags: str,
) -> Any:
    """What `main` prints with `--json`."""
    monkeypatch.setattr(sys, "argv", [f"{module.__name__}.py", "--json", *flags])
    module.main()
    return json.loads(capsys.readouterr().out)


# ---- roofline


def small_shape(bench: Any, **changes: Any) -> Any:
    values = {
        "hidden": 8,
        "vocab": 100,
        "layers": 3,
        "moe_layers": 2,
        "query": 16,
        "kv": 4,
        "experts": 4,
        "top_k": 2,
        "expert_width": 5,
        "dense_width": 6,
        "window": None,
        "weight_bytes": 2,
        "cache_bytes": 2,
    }
    return bench("roofline").Shape(**values | changes)


def test_a_decode_step_is_what_a_count_by_hand_gives(bench: Any) -> None:
    roofline = bench("roofline")
    work = roofline.decode_step(small_shape(bench), batch=1, context=10)
    # q, o: 8 x 16 each; k, v: 8 x 4 each; three layers; and one dense layer of 3 x 8 x 6
    weights = 3 * (2 * 8 * 16 + 2 * 8 * 4) + 3 * 8 * 6
    cache = 3 * (10 + 1) * 2 * 4 * 2  # keys and values of 10 positions read and of one written
    assert work["attention"].bytes == weights * 2 + cache
    assert work["attention"].ops == 2 * weights + 3 * 4 * 10 * 16
    assert work["router"] == roofline.Work(bytes=2 * 8 * 4 * 2, ops=2 * 2 * 8 * 4)
    assert work["experts"] == roofline.Work(bytes=2 * 2 * 120 * 2, ops=2 * 2 * 2 * 120)
    assert work["head"] == roofline.Work(bytes=800 * 2, ops=2 * 800)


def test_only_experts_that_are_hit_are_read(bench: Any) -> None:
    shape = small_shape(bench)
    # a token leaves an expert out with probability 1/2, two tokens both do with 1/4
    assert [shape.distinct_experts(rows) for rows in (0, 1, 2)] == [0, 2, 3]
    assert shape.distinct_experts(100) == pytest.approx(4)


def test_a_prompt_attends_to_the_half_of_it_and_samples_once(bench: Any) -> None:
    roofline = bench("roofline")
    work = roofline.prefill(small_shape(bench), batch=2, prompt=3)
    assert work["head"].ops == 2 * 2 * 800
    projections = 2 * (3 * 320 + 144) * 6
    assert work["attention"].ops == projections + 3 * 4 * 16 * 2 * (1 + 2 + 3)


def test_a_window_bounds_what_is_read(bench: Any) -> None:
    roofline = bench("roofline")
    far = roofline.decode_step(small_shape(bench, window=4), batch=1, context=1000)
    near = roofline.decode_step(small_shape(bench), batch=1, context=4)
    assert far == near


def test_the_limit_is_the_longer_of_bytes_and_operations(bench: Any) -> None:
    roofline, machine = bench("roofline"), bench("machine")
    here = machine.Machine(1, read_bytes_s=10.0, product_ops_s={"float32": 100.0, "bfloat16": 50.0})
    assert roofline.Work(bytes=20, ops=100).least_s(here) == 2.0
    assert roofline.Work(bytes=20, ops=500).least_s(here) == 5.0


def test_the_shape_is_the_checkpoint_s(bench: Any) -> None:
    shape = bench("roofline").read_shape(str(cached_checkpoint("qwen3_moe")))
    assert (shape.hidden, shape.vocab, shape.experts, shape.top_k) == (64, 384, 16, 4)
    assert (shape.query, shape.kv, shape.expert_width, shape.weight_bytes) == (64, 32, 48, 4)


@pytest.mark.usefixtures("quick_machine")
def test_roofline_prints_the_stages_and_their_sum(
    bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = printed(bench("roofline"), monkeypatch, capsys, "--batch", "1,32")
    assert report["machine"]["read_gb_s"] > 0
    assert set(report["machine"]["gflop_s"]) == {"float32", "bfloat16"}
    one, many = report["results"]
    assert one["total"]["bytes"] == sum(stage["bytes"] for stage in one["stages"].values())
    assert one["distinct_experts"] == pytest.approx(4)
    # the reference checkpoint: about 70 MB of active weights a token
    assert one["total"]["bytes"] == pytest.approx(69.1e6, rel=0.01)
    assert many["bound"] in ("bytes", "operations")


# ---- throughput and serving


@pytest.mark.usefixtures("quick_machine")
def test_throughput_compares_every_batch_at_every_number_of_ranks(
    bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(cached_checkpoint("olmoe"))
    flags = ("--batch", "1,2", "--ranks", "1", "--prompt", "4", "--new", "3", "--repeats", "1")
    report = printed(bench("throughput"), monkeypatch, capsys, "--model", model, *flags)
    assert [(r["batch"], r["ranks"]) for r in report["results"]] == [(1, 1), (2, 1)]
    for result in report["results"]:
        other = result["transformers"]
        assert result["ratio"] == result["decode_tok_s"] / other["decode_tok_s"]
        assert result["prefill_ratio"] == result["prefill_tok_s"] / other["prefill_tok_s"]
        assert result["tok_s_ratio"] == result["tok_s"] / other["tok_s"]
        assert result["roofline_fraction"] > 0


def test_rates_count_the_tokens_after_the_first(bench: Any) -> None:
    found = bench("throughput").rates(all_s=5.0, one_s=1.0, batch=2, prompt=10, new=9)
    assert found == {"tok_s": 18 / 5, "decode_tok_s": 4.0, "prefill_tok_s": 20.0}


def test_engines_take_turns_and_keep_their_best(bench: Any) -> None:
    throughput, order = bench("throughput"), list[tuple[str, int]]()

    def engine(name: str) -> Any:
        return throughput.Engine(name, lambda prompts, new: order.append((name, new)))

    throughput.best_rates([engine("a"), engine("b")], [[1, 2]], 5, repeats=2, limit_s=60)
    turn = [("a", 1), ("b", 1), ("a", 5), ("b", 5)]
    assert order == [("a", 2), ("b", 2), *turn, *turn]
    del order[:]
    throughput.best_rates([engine("a")], [[1, 2]], 5, repeats=9, limit_s=-1)
    assert order == [("a", 2), ("a", 1), ("a", 5)]


def test_serving_puts_both_rates_side_by_side(
    bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--streams", "1,2", "--prompt", "4", "--new", "5", "--repeats", "1")
    model = str(cached_checkpoint("olmoe"))
    report = printed(bench("serving"), monkeypatch, capsys, "--model", model, *flags)
    assert [result["streams"] for result in report["results"]] == [1, 2]
    for result in report["results"]:
        assert result["ratio"] == pytest.approx(result["http_tok_s"] / result["offline_tok_s"])


def response(*events: bytes, status: str = "200 OK", end: bytes = b"0\r\n\r\n") -> bytes:
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(e), e) for e in events)
    return f"HTTP/1.1 {status}\r\nTransfer-Encoding: chunked\r\n\r\n".encode() + chunks + end


TOKENS = b'data: {"choices":[{"token_ids":[1,2,3]}]}\n\n'
DONE = b"data: [DONE]\n\n"


def test_a_stream_s_tokens_are_counted_however_it_is_cut(bench: Any) -> None:
    client = bench("sseclient")
    assert client.count_tokens(response(TOKENS, TOKENS, DONE)) == 6
    assert client.count_tokens(response(TOKENS[:7], TOKENS[7:] + DONE)) == 3


def test_a_client_reads_to_the_end_of_a_stream_or_of_its_hopes(bench: Any) -> None:
    over, whole = bench("sseclient").is_over, response(TOKENS, DONE)
    assert over([whole])
    assert over([whole[:90], whole[90:-3], whole[-3:]])
    assert not over([whole[:-1]])
    assert over([b"HTTP/1.1 503 Service Unavailable\r\n"])


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (response(status="503 Service Unavailable"), "answered"),
        (response(TOKENS), "ended early"),
        (response(TOKENS, DONE, end=b""), "cut off"),
        (response(b'data: {"error":{"message":"no"}}\n\n', DONE), "reported"),
    ],
)
def test_a_stream_that_is_not_whole_is_an_error(bench: Any, answer: bytes, says: str) -> None:
    client = bench("sseclient")
    with pytest.raises(client.BadAnswer, match=says):
        client.count_tokens(answer)


def test_startup_prints_phases_and_memory(
    bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--repeats", "1", "--model", str(cached_checkpoint("olmoe")))
    report = printed(bench("startup"), monkeypatch, capsys, *flags)
    assert report["first_token_s"] > 0
    assert report["import_torch_s"] > 0
    assert report["peak_bytes"] > report["imports_bytes"] > report["weight_bytes"] > 0
    # 16 tokens of 4 layers, keys and values of 2 heads of 16 numbers in float32
    assert report["kv_bytes"] == 16 * 4 * 2 * 2 * 16 * 4


def test_collective_and_ours_give_the_same_tokens_side_by_side(
    bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--batch", "4", "--prompt", "9", "--new", "9", "--repeats", "1", "--transport", "tcp")
    flags += ("--model", str(cached_checkpoint("qwen3_moe")))
    report = printed(bench("collective"), monkeypatch, capsys, *flags)
    (result,) = report["results"]
    assert (result["batch"], report["scheduler"]) == (4, "lockstep")
    assert result["equal_tokens"]
    assert result["ratio"] > 0


# ---- peers


def executable(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


LLAMA_LINE = (
    '{"n_kv_max": 512, "n_batch": 2048, "n_ubatch": 512, "flash_attn": 0, "is_pp_shared": 0, '
    '"n_gpu_layers": 0, "n_threads": 1, "n_threads_batch": 1, "pp": 4, "tg": 3, "pl": %d, '
    '"n_kv": 14, "t_pp": 0.5, "speed_pp": 8.0, "t_tg": 2.0, "speed_tg": 3.0, "t": 2.5, '
    '"speed": 5.6}'
)


def arguments(bench: Any, *flags: str) -> argparse.Namespace:
    common = ["--batch", "1,2", "--prompt", "4", "--new", "3", "--repeats", "1", "--threads", "1"]
    found: argparse.Namespace = bench("peers").parser().parse_args([*common, *flags])
    return found


def test_llama_cpp_s_lines_become_rates(bench: Any, tmp_path: Path) -> None:
    peers, called = bench("peers"), tmp_path / "called"
    lines = "\n".join(f"echo '{LLAMA_LINE % batch}'" for batch in (1, 2))
    tool = executable(tmp_path / "tool", f'echo "$@" > {called}\necho main: loading\n{lines}')
    found = peers.run_llama(arguments(bench, "--llama-bench", tool, "--gguf", "x.gguf"), "model")
    assert found[2] == {"tok_s": 6 / 2.5, "decode_tok_s": 3.0, "prefill_tok_s": 16.0}
    flags = called.read_text()
    assert "-m x.gguf -c 14" in flags
    assert "-npp 4 -ntg 3 -npl 1,2 -t 1 --output-format jsonl" in flags


def test_vllm_s_runs_become_rates_of_the_same_kind(bench: Any, tmp_path: Path) -> None:
    lines = "\n".join(
        f"""echo '{{"batch": {batch}, "all_s": 3.0, "one_s": 1.0}}'""" for batch in (1, 2)
    )
    python = executable(tmp_path / "python", f"echo INFO {{not json\n{lines}")
    model = str(cached_checkpoint("olmoe"))
    found = bench("peers").run_vllm(arguments(bench, "--vllm-python", python), model)
    assert found[2] == bench("throughput").rates(3.0, 1.0, 2, 4, 3)


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("echo broken >&2; exit 3", "status 3(.|\n)*broken"),
        (f"echo '{LLAMA_LINE % 1}'", "no result for batch 2"),
        ("exec sleep 5", "longer than 0.3 s"),
    ],
)
def test_a_peer_that_fails_says_how(bench: Any, tmp_path: Path, script: str, says: str) -> None:
    peers = bench("peers")
    tool = executable(tmp_path / "tool", script)
    flags = ("--llama-bench", tool, "--gguf", "x.gguf", "--timeout-s", "0.3")
    with pytest.raises(peers.NotRun, match=says):
        peers.run_llama(arguments(bench, *flags), "model")


def test_peers_that_are_not_there_are_reported_beside_ours(
    bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--batch", "1", "--prompt", "4", "--new", "3", "--repeats", "1", "--threads", "1")
    model = str(cached_checkpoint("olmoe"))
    report = printed(
        bench("peers"), monkeypatch, capsys, "--model", model, *flags,
        "--vllm-python", "/nowhere/python",
    )  # fmt: skip
    assert [(r["engine"], r["batch"], r["ratio"]) for r in report["results"]] == [
        ("asyncmoe", 1, 1.0)
    ]
    assert report["not_run"]["llama.cpp"].startswith("not tried")
    assert "/nowhere/python" in report["not_run"]["vllm"]
