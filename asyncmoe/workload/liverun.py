"""One live run of a workload, from the start of the ranks to the figures."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asyncmoe.config import Config
from asyncmoe.errors import AsyncMoeError
from asyncmoe.frontend.engine import AsyncEngine
from asyncmoe.metrics.cluster import cluster_figures
from asyncmoe.metrics.recorder import Recorder
from asyncmoe.metrics.summary import MeasureConfig, summarise
from asyncmoe.report.results import Run
from asyncmoe.workload.driver import drive
from asyncmoe.workload.live import LiveTarget
from asyncmoe.workload.trace import join_parts
from asyncmoe.workload.workload import WorkloadConfig, make_workload

PROBE_PERIOD_S = 0.02
WARM_UP_S = 120.0  # a rule that never runs anything would keep it waiting for ever
WARM_UP = WorkloadConfig(lengths="fixed:16,4", requests=8)  # short enough for any model

Progress = Callable[[Recorder], None]


async def run_live(
    config: Config,
    workload: WorkloadConfig,
    measure: MeasureConfig,
    *,
    name: str,
    series: str,
    settings: dict[str, Any],
    started: Progress | None = None,
    until_fault: bool = False,
) -> Run:
    """Start the ranks, warm them up, run the workload, stop the ranks.

    Requests are cut to what the model and the KV pools have room for. With `model.record_routing`
    the ranks' parts become that file, whose requests are numbered from 0.

    Args:
        name, series, settings: of the `Run`.
        started: called once with the recorder of the run, for a progress display.
        until_fault: end with the first request that fails or is not taken.

    Raises what `AsyncEngine.start` does, `ConfigError` for a workload that cannot be, and
    `AsyncMoeError` if requests that warm up do not end.
    """
    config = _with_probe(config)
    engine = await AsyncEngine.start(config)
    try:
        with LiveTarget(engine) as target:
            await _warm_up(target)
        room = engine.room_tokens
        longest = min(workload.longest or room, room)
        planned = make_workload(workload.model_copy(update={"longest": longest}))
        recorder = Recorder()
        if started is not None:
            started(recorder)
        before = await engine.stats()
        with LiveTarget(engine) as target:
            await drive(target, planned, recorder, target.fault if until_fault else None)
        after = await engine.stats()
    finally:
        await asyncio.shield(engine.close())
    if config.model.record_routing is not None:
        await asyncio.to_thread(
            _join, config.model.record_routing, engine.rank.placement.world, target.first_number
        )
    layers = len(engine.rank.spec.moe_layers)
    return Run(
        name,
        series,
        settings,
        summarise(recorder.record(), measure),
        cluster_figures(before, after, layers, ramp_s=measure.ramp_s),
    )


async def _warm_up(target: LiveTarget) -> None:
    recorder = Recorder()
    try:
        async with asyncio.timeout(WARM_UP_S):
            await drive(target, make_workload(WARM_UP), recorder)
    except TimeoutError:
        raise AsyncMoeError(
            f"the requests that warm up had {recorder.token_count} tokens after {WARM_UP_S:g} s; "
            "they were given up"
        ) from None


def _with_probe(config: Config) -> Config:
    if config.metrics.probe_period_s is not None:
        return config
    metrics = config.metrics.model_copy(update={"probe_period_s": PROBE_PERIOD_S})
    return config.model_copy(update={"metrics": metrics})


def _join(file: str, ranks: int, first_number: int | None) -> None:
    """The ranks' parts of a recording, without the warm-up, whose requests came before."""
    first = first_number or 0
    join_parts(Path(file).expanduser(), ranks, lambda requests: requests - first)
