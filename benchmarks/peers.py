"""Tokens per second of other engines that run MoE models on a CPU, beside ours, in turn.

Each engine runs in processes of its own, one after the other, on the same checkpoint with the same
prompts and answers; the rates are those of `throughput.py`. An engine that is not given, or that
fails, is reported as such, with what was tried. llama.cpp's `llama-batched-bench` samples nothing,
and its older versions feed the same token everywhere, which hits few experts: both favour it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from checkpoints import ARCHITECTURES, write_checkpoint
from command import count, counts, run_command
from roofline import read_shape
from throughput import asyncmoe_engine, best_rates, rates, synthetic_prompts

from asyncmoe.cores import available_cores

CHILD = Path(__file__).with_name("vllm_child.py")
TAIL_LINES = 8  # of a failed engine's standard error
Rates = dict[str, float]


class NotRun(Exception):
    """An engine gave no rates. The message says what was tried and how that ended."""


def run_asyncmoe(arguments: argparse.Namespace, model: str) -> dict[int, Rates]:
    """Ours, on one rank, by batch."""
    engine = asyncmoe_engine(model, 1, threads=arguments.threads)
    try:
        return {
            batch: best_rates(
                [engine],
                _prompts(model, batch, arguments.prompt),
                arguments.new,
                arguments.repeats,
                limit_s=float("inf"),
            )[0]
            for batch in arguments.batch
        }
    finally:
        engine.close()


def run_vllm(arguments: argparse.Namespace, model: str) -> dict[int, Rates]:
    """vLLM's CPU back end, by batch. Raises `NotRun`."""
    if arguments.vllm_python is None:
        raise NotRun("not tried: --vllm-python names no Python that has vLLM")
    settings = {
        "model": model,
        "batch": arguments.batch,
        "prompt": arguments.prompt,
        "new": arguments.new,
        "repeats": arguments.repeats,
        "prompts": _prompts(model, max(arguments.batch), arguments.prompt),
    }
    command = [arguments.vllm_python, str(CHILD), json.dumps(settings)]
    # Left to itself it keeps a core free for its own Python, which on two cores is half of them.
    cores = f"0-{arguments.threads - 1}"
    variables = ["VLLM_CPU_KVCACHE_SPACE=1", f"VLLM_CPU_OMP_THREADS_BIND={cores}"]
    lines = json_lines(["env", *variables, *command], arguments.timeout_s)
    found = {
        line["batch"]: rates(
            line["all_s"], line["one_s"], line["batch"], arguments.prompt, arguments.new
        )
        for line in lines
        if {"batch", "all_s", "one_s"} <= line.keys()
    }
    return _complete(found, arguments.batch, command[:2])


def run_llama(arguments: argparse.Namespace, model: str) -> dict[int, Rates]:
    """llama.cpp's `llama-batched-bench`, by batch. Raises `NotRun`."""
    if arguments.llama_bench is None or arguments.gguf is None:
        raise NotRun("not tried: it needs both --llama-bench (llama-batched-bench) and --gguf")
    widest, prompt, new = max(arguments.batch), arguments.prompt, arguments.new
    command = [
        arguments.llama_bench,
        *("-m", arguments.gguf),
        *("-c", str(widest * (prompt + new))),
        *("-b", "2048", "-ub", "512", "-ngl", "0"),
        *("-npp", str(prompt), "-ntg", str(new), "-npl", ",".join(map(str, arguments.batch))),
        *("-t", str(arguments.threads), "--output-format", "jsonl"),
    ]
    found: dict[int, Rates] = {}
    for _ in range(arguments.repeats):
        for line in json_lines(command, arguments.timeout_s):
            if {"pl", "pp", "tg", "t_pp", "t_tg"} <= line.keys() and line["t_tg"] > 0:
                _keep_best(found, line["pl"], llama_rates(line))
    return _complete(found, arguments.batch, command)


def llama_rates(line: dict[str, Any]) -> Rates:
    """The three rates from one line of `llama-batched-bench`.

    Its `t_tg` is the time of all `tg` steps after the prompts, whose own `pl` first tokens it does
    not sample; so the run has pl * tg new tokens.
    """
    new_tokens, prompt_tokens = line["pl"] * line["tg"], line["pl"] * line["pp"]
    return {
        "tok_s": new_tokens / (line["t_pp"] + line["t_tg"]),
        "decode_tok_s": new_tokens / line["t_tg"],
        "prefill_tok_s": prompt_tokens / line["t_pp"],
    }


def _keep_best(found: dict[int, Rates], batch: int, new: Rates) -> None:
    old = found.get(batch, new)
    found[batch] = {name: max(rate, old[name]) for name, rate in new.items()}


def json_lines(command: Sequence[str], timeout_s: float) -> list[dict[str, Any]]:
    """The JSON objects among the lines that `command` prints; all else is passed over.

    Raises `NotRun` if it cannot be run, fails, or takes longer than `timeout_s`.
    """
    shown = " ".join(word if len(word) < 80 else f"{word[:60]}…" for word in command)
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except OSError as error:
        raise NotRun(f"cannot be run: {shown}: {error}") from None
    except subprocess.TimeoutExpired:
        raise NotRun(f"took longer than {timeout_s:g} s: {shown}") from None
    if done.returncode:
        tail = "\n".join(done.stderr.splitlines()[-TAIL_LINES:])
        raise NotRun(f"ended with status {done.returncode}: {shown}\n{tail}")
    found = []
    for line in (done.stdout + done.stderr).splitlines():  # logs and results may share either
        if line.startswith("{"):
            try:
                value = json.loads(line)
            except ValueError:
                continue  # a line of the engine's log
            found.append(value)
    return found


def _complete(found: dict[int, Rates], batches: list[int], command: Sequence[str]) -> Any:
    if missing := [batch for batch in batches if batch not in found]:
        raise NotRun(
            f"printed no result for batch {', '.join(map(str, missing))}: {' '.join(command)}"
        )
    return {batch: found[batch] for batch in batches}


def _prompts(model: str, batch: int, prompt: int) -> list[list[int]]:
    return synthetic_prompts(batch, prompt, read_shape(model).vocab)


PEERS: dict[str, Callable[[argparse.Namespace, str], dict[int, Rates]]] = {
    "asyncmoe": run_asyncmoe,
    "vllm": run_vllm,
    "llama.cpp": run_llama,
}


def compare(arguments: argparse.Namespace, model: str) -> dict[str, Any]:
    """What `--json` prints: all engines' rates by batch, or why there are none."""
    found: dict[str, dict[int, Rates]] = {}
    not_run: dict[str, str] = {}
    for name, run in PEERS.items():
        try:
            found[name] = run(arguments, model)
        except NotRun as reason:
            not_run[name] = str(reason)
            print(f"{name}: {reason}", file=sys.stderr)
    results = [
        {
            "batch": batch,
            "engine": name,
            **by_batch[batch],
            "ratio": found["asyncmoe"][batch]["decode_tok_s"] / by_batch[batch]["decode_tok_s"],
        }
        for batch in arguments.batch
        for name, by_batch in found.items()
    ]
    return {"results": results, "not_run": not_run}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    made.add_argument("--model", help="checkpoint directory; default makes one")
    made.add_argument("--architecture", choices=ARCHITECTURES, default="qwen3_moe",
                      help="of the checkpoint that is made")  # fmt: skip
    made.add_argument("--vllm-python", metavar="PATH", help="a Python that has vLLM for CPUs")
    made.add_argument("--llama-bench", metavar="PATH", help="llama.cpp's llama-batched-bench")
    made.add_argument("--gguf", metavar="FILE", help="the same checkpoint, converted for llama.cpp")
    made.add_argument("--batch", type=counts, default=[1, 8, 32])
    made.add_argument("--prompt", type=count, default=64, help="prompt tokens")
    made.add_argument("--new", type=count, default=64, help="new tokens")
    made.add_argument("--threads", type=count, default=available_cores(), help="of each engine")
    made.add_argument("--repeats", type=count, default=3)
    made.add_argument("--timeout-s", type=float, default=1800.0, help="of one engine")
    made.add_argument("--json", action="store_true")
    return made


def main() -> None:
    arguments = parser().parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or str(write_checkpoint(Path(folder), arguments.architecture))
        report = compare(arguments, model)
    if arguments.json:
        print(json.dumps(report))
        return
    print("batch engine       decode tok/s  prefill tok/s  asyncmoe x")
    for r in report["results"]:
        print(
            f"{r['batch']:5} {r['engine']:<12} {r['decode_tok_s']:12.1f} "
            f"{r['prefill_tok_s']:14.0f} {r['ratio']:11.2f}"
        )
    for name, reason in report["not_run"].items():
        print(f"      {name:<12} not run: {reason}")


if __name__ == "__main__":
    run_command(main)
