"""One run of a setting on this machine's ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from asyncmoe.cli.untilsignal import run_until_signal
from asyncmoe.errors import AsyncMoeError
from asyncmoe.experiment.figures import DEFAULT_METRIC
from asyncmoe.experiment.grid import Setting, live_config
from asyncmoe.experiment.usable import check_usable
from asyncmoe.metrics.recorder import Recorder
from asyncmoe.workload.liverun import run_live as measure_live

Tell = Callable[[float], None]  # how far a run is, 0 to 1
_TELL_S = 0.5


def run_live(setting: Setting, tell: Tell) -> dict[str, Any]:
    """Run it and return its metrics, JSON-ready. Raises `ConfigError` for what cannot be."""
    found: list[dict[str, Any]] = []
    run_until_signal(_run(setting, tell, found))
    if not found:
        raise AsyncMoeError("the run was ended by a signal")
    return found[0]


async def _run(setting: Setting, tell: Tell, found: list[dict[str, Any]]) -> int:
    telling: list[asyncio.Task[None]] = []
    recorders: list[Recorder] = []
    end_s = setting.window.ramp_s + setting.window.measure_s

    async def keep_telling() -> None:
        loop = asyncio.get_running_loop()
        begin_s = loop.time()
        while True:
            await asyncio.sleep(_TELL_S)
            tell(min(1.0, (loop.time() - begin_s) / end_s))

    def started(recorder: Recorder) -> None:
        recorders.append(recorder)
        telling.append(asyncio.create_task(keep_telling()))

    try:
        run = await measure_live(
            live_config(setting),
            setting.workload_config(),
            setting.measure,
            name=setting.label,
            series=setting.series,
            settings=dict(setting.names),
            started=started,
            until_fault=True,
        )
    finally:
        for task in telling:
            task.cancel()
    if faults := recorders[0].faults():
        ended = ", ".join(f"{count} {reason}" for reason, count in faults.items())
        raise AsyncMoeError(f"requests ended badly: {ended}; the log on standard error may say why")
    check_usable(run.metrics, run.cluster, setting.window.ramp_s)
    metrics = {**run.metrics, "cluster": run.cluster}
    metrics[DEFAULT_METRIC] = run.metrics["tokens_per_s"]  # live windows are long enough
    found.append({"metrics": metrics, "cost": {}})
    return 0
