"""µs of Python per attention step and per expert step, outside the kernels.

Two ranks over TCP, each a process. Rank 0 is the home of all requests and holds half of the
experts, rank 1 holds the other half. Attention batches of exactly N rows are forced by the batch
policy, so every attention step builds one parcel for rank 1 and one for itself, and every expert
step of rank 1 takes one parcel of about N rows.

The figure is user CPU time of the loop's thread, all of it: schedule, gather columns, route, build
and post parcels, receive, the loop itself; time inside system calls (the network stack of this
machine, which copies the payloads) is given apart. An attention step is charged with rank 0's
whole loop but for what its head and expert batches took; an expert step with rank 1's whole loop.

The figure depends on what is in the caches: a loop that waits a few milliseconds for the device
finds its code and data gone, evicted by the kernels and by whoever else uses the machine. So
`cache_factor` is given beside it: how many times as long a fixed piece of Python (135 small calls)
takes on this machine after a pause as long as a step, compared with no pause. And since steps of
more rows take longer, `paced` has both figures where those of all sizes are equally far apart
(attention stages wait as long as is missing to the longest): they differ by the rows alone.

The default model has parcels of the usual width (hidden 512) but next to no compute (`--model DIR`
takes another one). With `--hidden 64` parcels have an eighth of the bytes and as many rows, which
tells what rows cost from what the copies of their payloads leave of the caches.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop
from checkpoints import write_config
from command import count, counts, run_command

from asyncmoe.config import Config
from asyncmoe.frontend.startup import start_ranks
from asyncmoe.messages import Admit, Ended, Message, Shutdown, Stats, StatsRequest, TokensOut
from asyncmoe.rank import Rank
from asyncmoe.sampling import SamplingParams

# The kernel tells user time from system time by samples, 100 to 1000 a second: hundreds must fall
# into a run before the shares hold to a few percent.
WARM_TOKENS, TOKENS = 16, 336


class FrontEnd:
    """Counts tokens and keeps the ranks' reports; nothing that would weigh on the loop."""

    def __init__(self, rank: Rank) -> None:
        self.rank, self.tokens = rank, 0
        self.reports: dict[int, dict[str, Any]] = {}
        self._goal: tuple[int, asyncio.Future[None]] | None = None
        self._reported = asyncio.Event()
        rank.on_front_end = self._note

    def _note(self, source: int, message: Message) -> None:
        if isinstance(message, TokensOut):
            self.tokens += len(message.tokens)
            if self._goal is not None and self.tokens >= self._goal[0]:
                self._reach(None)
            elif any(message.finish):
                self._reach(RuntimeError("requests ended early: the model's context is too short"))
        elif isinstance(message, Ended):
            self._reach(RuntimeError(f"a request ended early: {message.message}"))
        elif isinstance(message, Stats):
            self.reports[source] = message.values
            if len(self.reports) == 2:
                self._reported.set()

    async def until(self, tokens: int) -> None:
        """Wait until `tokens` tokens have come out. Raises `RuntimeError` if a request failed."""
        self._goal = tokens, asyncio.get_running_loop().create_future()
        await self._goal[1]

    def _reach(self, error: Exception | None) -> None:
        if self._goal is None or self._goal[1].done():
            return
        if error is None:
            self._goal[1].set_result(None)
        else:
            self._goal[1].set_exception(error)

    async def report(self) -> dict[int, dict[str, Any]]:
        """The counters of both ranks, now."""
        self.reports = {}
        self._reported.clear()
        for rank in range(2):
            self.rank.send(rank, StatsRequest())
        await self._reported.wait()
        return self.reports


SMALL = {
    "num_hidden_layers": 8,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "moe_intermediate_size": 8,
    "vocab_size": 1024,
}


async def measure(model: Path, rows: int, wait_s: float = 0.0) -> dict[str, float]:
    """Decode `rows` requests in step and attribute the loops' CPU time to steps.

    `wait_s`: of an attention stage whose rows are all there; milliseconds count.
    """
    config = Config.model_validate(
        {
            "model": {"name": str(model), "load_format": "dummy", "dtype": "float32"},
            "cluster": {"ranks": 2},
            "transport": {"name": "tcp"},
            "batch": {
                "attention_min_rows": rows + (wait_s > 0),
                "attention_linger_ms": 1e3 * wait_s or 500,
                "head_min_rows": rows,
                "head_linger_ms": 500,
            },
            "engine": {"max_requests": rows, "slots": 2048},
            "log": {"level": "warning"},
        }
    )
    ranks = await start_ranks(config)
    try:
        front = FrontEnd(ranks.front)
        wire = SamplingParams(temperature=0, max_tokens=TOKENS + 8, ignore_eos=True).to_wire()
        for request_id in range(rows):
            ranks.front.send(0, Admit(request_id, [request_id % 1000, 1, 2, 3], wire))
        await front.until(WARM_TOKENS * rows)
        before = await front.report()
        await front.until(TOKENS * rows)
        after = await front.report()
    finally:
        ranks.front.send(1, Shutdown("done"))
        await ranks.front.close()
        await ranks.close()
    home, far = (
        {k: v - before[r][k] for k, v in after[r].items() if isinstance(v, int | float)}
        for r in range(2)
    )
    others_s = sum(
        home[f"{kind}_{part}_s"] for kind in ("expert", "head") for part in ("prepare", "finish")
    )
    pause_s = home["loop_s"] / home["attention_batches"]
    return {
        "attention_us": 1e6 * (home["loop_user_s"] - others_s) / home["attention_batches"],
        "expert_us": 1e6 * far["loop_user_s"] / far["expert_batches"],
        "attention_system_us": 1e6 * home["loop_system_s"] / home["attention_batches"],
        "expert_system_us": 1e6 * far["loop_system_s"] / far["expert_batches"],
        "attention_rows": home["attention_rows"] / home["attention_batches"],
        "expert_rows": far["expert_rows"] / far["expert_batches"],
        "step_ms": 1e3 * pause_s,
        "cache_factor": fixed_work_us(pause_s) / fixed_work_us(0.0),
    }


async def measure_all(model: Path, sizes: Sequence[int], rounds: int) -> dict[str, dict[str, Any]]:
    """Means over rounds of `measure` for each number of rows, and of the same with steps equally
    far apart. Sizes take turns, so that a busy spell does not fall on one of them alone."""
    natural: dict[int, list[dict[str, float]]] = {rows: [] for rows in sizes}
    paced: dict[int, list[dict[str, float]]] = {rows: [] for rows in sizes}
    for _ in range(rounds):
        for rows in sizes:
            natural[rows].append(await measure(model, rows))
        longest_ms = max(runs[-1]["step_ms"] for runs in natural.values())
        for rows in sizes:
            wait_ms = round(longest_ms - natural[rows][-1]["step_ms"])
            same = wait_ms < 1
            paced[rows].append(
                natural[rows][-1] if same else await measure(model, rows, wait_ms / 1e3)
            )
    return {str(rows): {**mean(natural[rows]), "paced": mean(paced[rows])} for rows in sizes}


def mean(runs: list[dict[str, float]]) -> dict[str, float]:
    """Of each figure."""
    return {key: round(sum(run[key] for run in runs) / len(runs), 1) for key in runs[0]}


class _Cell:
    """An object with a method that reads and writes a little of everything."""

    def __init__(self) -> None:
        self.count, self.values, self.names = 1, [1], {"x": 1}

    def turn(self, step: int) -> int:
        before = self.count + step
        self.count = before - step
        return before + self.values[0] + self.names["x"]


def fixed_work_us(pause_s: float, rounds: int = 200) -> float:
    """Mean µs of a fixed piece of Python with pauses between its runs."""
    cells = [_Cell() for _ in range(135)]
    total_s = 0.0
    for _ in range(rounds):
        time.sleep(pause_s)
        begin_s = time.thread_time()
        for cell in cells:
            cell.turn(3)
        total_s += time.thread_time() - begin_s
    return 1e6 * total_s / rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, help="directory with config.json; default: see above")
    parser.add_argument("--rows", type=counts, default=[16, 64, 256])
    parser.add_argument("--hidden", type=count, default=512, help="width of the default model")
    parser.add_argument("--rounds", type=count, default=3)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        narrow = {"hidden_size": arguments.hidden}
        model = arguments.model or write_config(Path(folder), SMALL | narrow)
        results = uvloop.run(measure_all(model, arguments.rows, arguments.rounds))
    if arguments.json:
        print(json.dumps(results))
        return
    for rows, result in results.items():
        print(f"{rows:>4} rows: {result}")


if __name__ == "__main__":
    run_command(main)
