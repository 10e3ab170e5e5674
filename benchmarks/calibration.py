"""How well the virtual world foretells a live run on this machine.

A live run of workload A is profiled: each rank's counters are read every tenth of a second, while
few and many requests are in flight. By least squares they give what a batch and a row of each kind
take of the device, and what a batch and a parcel take of the loop. Ranks of one machine share its
cores; what that costs is measured as it is: one factor on all times makes the virtual run of A as
fast as the live one. Then workload B, with other lengths and more requests, runs in both worlds.

    python benchmarks/calibration.py --ranks 2,4 --json

Prints throughput and mean time between tokens of B, live and virtual, and their ratios (goal: from
0.85 to 1.15). `--profile FILE` keeps the fitted costs for `costs = "FILE"` of an experiment.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from command import counts, run_command
from numpy.typing import NDArray

from asyncmoe import configfile
from asyncmoe.cli.numberflags import number
from asyncmoe.config import Config
from asyncmoe.frontend.engine import AsyncEngine
from asyncmoe.metrics.recorder import Recorder
from asyncmoe.metrics.summary import MeasureConfig, summarise
from asyncmoe.model import ModelSpec
from asyncmoe.virtual import costs
from asyncmoe.virtual.cluster import virtual_cluster
from asyncmoe.virtual.costs import CostModel, KindCost
from asyncmoe.virtual.ghost import ghost_checkpoint
from asyncmoe.virtual.run import run as run_virtually
from asyncmoe.virtual.shapes import ModelShape
from asyncmoe.workload.driver import drive
from asyncmoe.workload.live import LiveTarget
from asyncmoe.workload.routing import make_routing
from asyncmoe.workload.workload import Workload, WorkloadConfig, make_workload

KINDS = ("attention", "expert", "head")
SAMPLE_S = 0.1
IN_FLIGHT_A = (1, 4, 12)  # of each rank; the last one is workload A
ROUNDS = 3  # of the search for the factor

Samples = list[dict[int, dict[str, Any]]]


def workload_a(in_flight: int, seconds: float) -> Workload:
    """What is profiled."""
    return _workload("fixed:16,48", in_flight, seconds)


def workload_b(ranks: int, seconds: float) -> Workload:
    """What is foretold."""
    return _workload("fixed:8,80", 20 * ranks, seconds)


def _workload(lengths: str, in_flight: int, seconds: float) -> Workload:
    return make_workload(
        WorkloadConfig(lengths=lengths, arrivals=f"closed:{in_flight}", duration_s=seconds)
    )


def main() -> None:
    """Profile, fit, foretell, print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="tiny")
    parser.add_argument(
        "--ranks", type=counts, default=[2, 4], help="numbers of ranks (default 2,4)"
    )
    parser.add_argument("--transport", default="shm")
    parser.add_argument("--scheduler", default="defrag_aging")
    parser.add_argument(
        "--seconds", type=number(0.1, 1e6), default=4.0, help="of each run (default 4)"
    )
    parser.add_argument("--profile", type=Path, metavar="FILE", help="write the last fit")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    asked = parser.parse_args()
    found = {}
    for ranks in asked.ranks:
        found[str(ranks)], model = calibrate(ranks, asked)
        if asked.profile is not None:
            asked.profile.write_bytes(costs.dump(model))
    print(json.dumps({"ranks": found}, indent=None if asked.json else 2))


def calibrate(ranks: int, asked: argparse.Namespace) -> tuple[dict[str, Any], CostModel]:
    """The comparison for a number of ranks, and the fitted costs."""
    config = configfile.load(
        overrides={
            "model.name": asked.model,
            "cluster.ranks": ranks,
            "device.threads": 1,
            "transport.name": asked.transport,
            "scheduler.name": asked.scheduler,
            "engine.marches": False,  # which the virtual twin has none of
            "log.level": "warning",
        }
    )
    live_a, live_b, samples, spec = uvloop.run(_live(config, asked.seconds))
    world = Ghost(config, spec)
    fitted = fit(samples)
    factor = 1.0
    for _ in range(ROUNDS):
        model = scaled(fitted, factor)
        foretold = world.run(model, workload_a(IN_FLIGHT_A[-1] * ranks, asked.seconds))
        factor *= live_a["itl_ms"] / foretold["itl_ms"]
    model = scaled(fitted, factor)
    virtual_b = world.run(model, workload_b(ranks, asked.seconds))
    ratios = {name: virtual_b[name] / live_b[name] for name in live_b}
    return {"factor": factor, "live": live_b, "virtual": virtual_b, "ratio": ratios}, model


# ---- live


async def _live(
    config: Config, seconds: float
) -> tuple[dict[str, float], dict[str, float], Samples, ModelSpec]:
    """Figures of A and B, A's samples (a list for each number in flight), and the model."""
    ranks = config.cluster.ranks
    engine = await AsyncEngine.start(config)
    try:
        await _figures_of(engine, workload_a(ranks, 0.5), [])  # warm up
        samples: Samples = []
        for in_flight in IN_FLIGHT_A:
            live_a = await _figures_of(engine, workload_a(in_flight * ranks, seconds), samples)
        live_b = await _figures_of(engine, workload_b(ranks, seconds), [])
        return live_a, live_b, samples, engine.rank.spec
    finally:
        await engine.close()


async def _figures_of(
    engine: AsyncEngine, workload: Workload, samples: Samples
) -> dict[str, float]:
    """Run it, and append what every rank's counters gained in each interval."""
    recorder = Recorder()
    with LiveTarget(engine) as target:
        running = asyncio.create_task(drive(target, workload, recorder))
        before = await engine.stats()
        while not running.done():
            await asyncio.sleep(SAMPLE_S)
            after = await engine.stats()
            samples.append({rank: _gained(before[rank], after[rank]) for rank in after})
            before = after
        await running
    return _figures(recorder)


def _gained(before: dict[str, Any], after: dict[str, Any]) -> dict[str, float]:
    return {
        k: v - before[k] for k, v in after.items() if isinstance(v, int | float) and k in before
    }


def _figures(recorder: Recorder) -> dict[str, float]:
    """Of the run without its first quarter."""
    record = recorder.record()
    metrics = summarise(record, MeasureConfig(ramp_s=record.end_s / 4))
    return {"tokens_per_s": metrics["tokens_per_s"], "itl_ms": metrics["all"]["itl_ms"]["mean"]}


# ---- the fit


def fit(samples: Samples) -> CostModel:
    """Costs of batches, rows and parcels, by least squares over all ranks and intervals."""
    table = [each for sample in samples for each in sample.values() if each["sent_parcels"]]

    def column(name: str) -> NDArray[np.float64]:
        return np.array([each[name] for each in table], np.float64)

    kinds = {}
    for kind in KINDS:
        batches, rows = column(f"{kind}_batches"), column(f"{kind}_rows")
        fixed_s, row_s = least_squares([batches, rows], column(f"{kind}_compute_s"))
        (before_s,) = least_squares([batches], column(f"{kind}_prepare_s"))
        (after_s,) = least_squares([batches], column(f"{kind}_finish_s"))
        kinds[kind] = KindCost(fixed_s=fixed_s, row_s=row_s, before_s=before_s, after_s=after_s)
    (in_s,) = least_squares([column("received_parcels")], column("receive_s"))
    other_s = column("loop_user_s") + column("loop_system_s") - column("receive_s")
    for kind in KINDS:
        other_s -= column(f"{kind}_prepare_s") + column(f"{kind}_finish_s")
    parcels = column("received_parcels") + column("sent_parcels")
    (beside_s,) = least_squares([parcels], other_s)  # the transport's part, at both ends
    return CostModel(
        attention=kinds["attention"],
        expert=kinds["expert"],
        head=kinds["head"],
        parcel_in_s=in_s + beside_s,
        parcel_out_s=beside_s,
    )


def least_squares(
    columns: list[NDArray[np.float64]], target: NDArray[np.float64]
) -> tuple[float, ...]:
    """Coefficients from 0 on: what comes out below 0 is left out and the rest fitted again."""
    kept = list(range(len(columns)))
    while kept:
        found = np.linalg.lstsq(np.stack([columns[i] for i in kept], 1), target, rcond=None)[0]
        if (found >= 0).all():
            break
        kept = [i for i, value in zip(kept, found, strict=True) if value > 0]
    result = np.zeros(len(columns))
    result[kept] = found if kept else 0.0
    return tuple(result.tolist())


def scaled(model: CostModel, factor: float) -> CostModel:
    """All times of `model` multiplied."""

    def kind(cost: KindCost) -> KindCost:
        return KindCost(**{f.name: factor * getattr(cost, f.name) for f in fields(cost)})

    return replace(
        model,
        attention=kind(model.attention),
        expert=kind(model.expert),
        head=kind(model.head),
        parcel_in_s=factor * model.parcel_in_s,
        parcel_out_s=factor * model.parcel_out_s,
    )


# ---- virtual


class Ghost:
    """The virtual twin of a live cluster."""

    def __init__(self, config: Config, spec: ModelSpec) -> None:
        values = config.model_dump(exclude_defaults=True)
        values.pop("transport")
        flat = {f"{section}.{k}": v for section, keys in values.items() for k, v in keys.items()}
        flat |= {"kv.blocks": 100_000, "transport.name": "model"}
        flat["transport.options"] = {"row_bytes": spec.row_bytes}
        flat.pop("model.name", None)
        self.config = configfile.load(environ={}, overrides=flat)
        self.spec = spec

    def run(self, model: CostModel, workload: Workload) -> dict[str, float]:
        """The figures of a virtual run."""
        return run_virtually(self._run(model, workload), 0)

    async def _run(self, model: CostModel, workload: Workload) -> dict[str, float]:
        spec = self.spec
        shape = ModelShape(
            "live", spec.decoder_layers, spec.hidden, spec.experts, spec.top_k, 1, 1, 1, 1,
            spec.vocab, dense_layers=spec.decoder_layers - len(spec.moe_layers),
        )  # fmt: skip
        source = make_routing("uniform", shape.moe_layers, shape.experts, shape.top_k)
        assert source is not None
        checkpoint = ghost_checkpoint(shape, source, spec.context)
        recorder = Recorder()
        async with virtual_cluster(self.config, checkpoint, lambda _: model) as cluster:
            await drive(cluster, workload, recorder)
        return _figures(recorder)


if __name__ == "__main__":
    run_command(main)
