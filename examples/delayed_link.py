"""One late link of four live ranks: who waits for it, under each scheduling rule.

The directed link from rank 0 to rank 1 takes 50 ms longer (`impaired:tcp`). Requests at home on
rank 0 send rows over it, and those of rank 1 get sums back over it; those of ranks 2 and 3 do not
use it. Each home's tokens per second are measured without and with the delay, for a rule without a
barrier and for `lockstep`, which has one in every layer.

    python examples/delayed_link.py --json

Prints one JSON object: by rule, every home's tokens per second without and with the delay, and what
the homes that do not use the link keep.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import Any

import uvloop

from asyncmoe.cli.numberflags import number, whole
from asyncmoe.config import Config
from asyncmoe.configfile import load
from asyncmoe.frontend.engine import AsyncEngine
from asyncmoe.metrics.recorder import Recorder
from asyncmoe.workload.driver import drive
from asyncmoe.workload.live import LiveTarget
from asyncmoe.workload.workload import Workload, WorkloadConfig, make_workload

RANKS = 4
LINK = (0, 1)


def main() -> None:
    """Measure every rule, print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--schedulers", default="defrag_aging,lockstep")
    parser.add_argument("--delay-ms", type=number(0, 60_000), default=50.0)
    parser.add_argument("--in-flight", type=whole(1, 1024), default=8, help="requests of each home")
    parser.add_argument(
        "--ramp", type=number(0, 600), default=1.0, help="seconds that do not count"
    )
    parser.add_argument(
        "--seconds", type=number(0.1, 3600), default=4.0, help="of each measurement"
    )
    parser.add_argument("--json", action="store_true", help="the result on one line")
    asked = parser.parse_args()
    rules = asked.schedulers.split(",")
    result = {"delay_ms": asked.delay_ms, "rules": {rule: measure(rule, asked) for rule in rules}}
    print(json.dumps(result, indent=None if asked.json else 2))


def measure(rule: str, asked: argparse.Namespace) -> dict[str, Any]:
    """Without and with the delay."""
    plain, delayed = (
        uvloop.run(tokens_per_s(rule, delay_ms, asked)) for delay_ms in (0.0, asked.delay_ms)
    )
    others = [home for home in range(RANKS) if home not in LINK]
    return {
        "tokens_per_s": plain,
        "delayed_tokens_per_s": delayed,
        "others_kept": sum(delayed[h] for h in others) / sum(plain[h] for h in others),
        "users_kept": sum(delayed[h] for h in LINK) / sum(plain[h] for h in LINK),
    }


async def tokens_per_s(rule: str, delay_ms: float, asked: argparse.Namespace) -> list[float]:
    """Of every home."""
    engine = await AsyncEngine.start(configuration(rule, delay_ms, asked.model))
    try:
        with LiveTarget(engine) as target:
            stop = asyncio.Event()
            running = asyncio.create_task(
                drive(target, workload(asked.in_flight * RANKS), Recorder(), stop)
            )
            await asyncio.sleep(asked.ramp)
            before = await engine.stats()
            await asyncio.sleep(asked.seconds)
            after = await engine.stats()
            stop.set()
            await running
    finally:
        await engine.close()
    return [
        (after[rank]["head_rows"] - before[rank]["head_rows"])
        / (after[rank]["loop_s"] - before[rank]["loop_s"])
        for rank in range(RANKS)
    ]


def configuration(rule: str, delay_ms: float, model: str) -> Config:
    """Four ranks over tcp, one link of which may be late."""
    links = {"{}-{}".format(*LINK): {"latency_ms": delay_ms}} if delay_ms else {}
    return load(
        overrides={
            "model.name": model,
            "cluster.ranks": RANKS,
            "device.threads": 1,
            "transport.name": "impaired:tcp",
            "transport.options": {"links": links},
            "scheduler.name": rule,
            "log.level": "warning",
        }
    )


def workload(in_flight: int) -> Workload:
    """As many requests as that at any time, all alike, so that a home gets one where one ended."""
    return make_workload(
        WorkloadConfig(lengths="fixed:8,96", arrivals=f"closed:{in_flight}", duration_s=3600.0)
    )


if __name__ == "__main__":
    main()
