"""From the command to the first token, by phase, and the memory that it takes.

`first_token_s` is the real thing: `asyncmoe generate` from the start of its process to the first
byte of its answer, imports included. The phases are those of a process that does the same step by
step. Memory is the process's peak against the weights that are held and the KV blocks that are in
use; what is left over is the interpreter, its libraries and buffers, to be read as a constant.
Best of the repeats; files are in the page cache after the first.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from checkpoints import write_checkpoint
from command import count, run_command

ALLOWED = 1.15  # of weights and KV; what is above it must fit the constant
PHASES = ("python_s", "import_torch_s", "import_engine_s", "start_s", "token_s")


def first_token_s(model: str) -> float:
    """Seconds until the command line prints the first token."""
    command = [sys.executable, "-m", "asyncmoe", "generate", "--model", model]
    flags = ["--prompt-ids", "5,17,9", "--max-tokens", "1", "--log-level", "warning"]
    begin_s = time.monotonic()
    process = subprocess.Popen(
        [*command, *flags], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    first = process.stdout.read(1)
    seconds = time.monotonic() - begin_s
    process.communicate()
    if not first or process.returncode:
        raise SystemExit(f"asyncmoe generate ended with status {process.returncode}")
    return seconds


def phases(model: str) -> dict[str, float]:
    """Seconds of each phase and bytes of each kind, from a process of its own."""
    command = [sys.executable, __file__, "--child", str(time.monotonic()), "--model", model]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def child(model: str, begin_s: float) -> dict[str, float]:
    """What `phases` reports. `begin_s`: the machine's monotonic clock before this process."""
    marks = [begin_s, time.monotonic()]
    import torch  # noqa: F401 - by far the largest import

    marks.append(time.monotonic())
    import uvloop

    from asyncmoe import configfile
    from asyncmoe.frontend.engine import AsyncEngine
    from asyncmoe.kvcache import token_bytes
    from asyncmoe.sampling import SamplingParams

    marks.append(time.monotonic())
    imports_bytes = peak_bytes()

    async def run() -> dict[str, float]:
        settings = {"model.name": model, "log.level": "warning"}
        engine = await AsyncEngine.start(configfile.load(overrides=settings))
        try:
            marks.append(time.monotonic())
            params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
            async with engine.generate([5, 17, 9], params) as generation:
                await generation.complete()
            marks.append(time.monotonic())
            stats = (await engine.stats())[0]
            return {
                "weight_bytes": stats["weight_bytes"],
                # the request has the only block that was ever written
                "kv_bytes": token_bytes(engine.rank.spec.caches) * engine.config.kv.block_tokens,
                "peak_bytes": peak_bytes(),
            }
        finally:
            await engine.close()

    memory = uvloop.run(run())
    seconds = {name: marks[i + 1] - marks[i] for i, name in enumerate(PHASES)}
    return {**seconds, "imports_bytes": imports_bytes, **memory}


def peak_bytes() -> int:
    """The most memory that this process has held at a time, its parts of files included."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("the kernel does not tell the peak")


def measure(model: str, repeats: int) -> dict[str, float]:
    """All figures."""
    every = [phases(model) for _ in range(repeats)]
    best = {name: min(each[name] for each in every) for name in every[0]}
    allowed = ALLOWED * (best["weight_bytes"] + best["kv_bytes"])
    return {
        "first_token_s": min(first_token_s(model) for _ in range(repeats)),
        **best,
        "constant_bytes": best["peak_bytes"] - allowed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="checkpoint directory; default makes one")
    parser.add_argument("--repeats", type=count, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        print(json.dumps(child(arguments.model, arguments.child)))
        return
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or str(write_checkpoint(Path(folder)))
        found = measure(model, arguments.repeats)
    if arguments.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        if name.endswith("_s"):
            print(f"{name.removesuffix('_s').replace('_', ' '):<16} {value:8.2f} s")
        else:
            print(f"{name.removesuffix('_bytes').replace('_', ' '):<16} {value / 2**20:8.1f} MiB")


if __name__ == "__main__":
    run_command(main)
