"""One run in the virtual world: the cluster of a setting under its workload."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from asyncmoe.config import Config, MetricsConfig
from asyncmoe.errors import AsyncMoeError, ConfigError
from asyncmoe.experiment.grid import Layout, Setting, layout, virtual_config
from asyncmoe.experiment.protocol import Reports, protocol_figures, steps_of
from asyncmoe.experiment.steady import steady_tokens_per_s
from asyncmoe.experiment.usable import check_usable
from asyncmoe.metrics.account import KINDS
from asyncmoe.metrics.cluster import cluster_figures
from asyncmoe.metrics.recorder import FAULTS, Record, Recorder
from asyncmoe.metrics.summary import summarise
from asyncmoe.virtual import costs
from asyncmoe.virtual.cluster import VirtualCluster, virtual_cluster
from asyncmoe.virtual.costs import CostModel, KindCost
from asyncmoe.virtual.ghost import ghost_checkpoint
from asyncmoe.virtual.meter import Meter
from asyncmoe.virtual.run import run
from asyncmoe.virtual.shapes import Hardware, ModelShape
from asyncmoe.workload.driver import Listener, drive
from asyncmoe.workload.routing import RoutingSource, make_routing
from asyncmoe.workload.workload import make_workload

Tell = Callable[[float], None]  # how far a run is, 0 to 1
_TELLS = 50  # in a run
_SAMPLES = 400  # of a probe
_PROBED_RANKS = 64  # more ranks are not sampled: the samples would be more than the run


def run_virtual(setting: Setting, tell: Tell) -> dict[str, Any]:
    """Run it and return its metrics, JSON-ready. Raises `ConfigError` for what cannot be."""
    return run(_run(setting, tell), setting.experiment.seed)


async def _run(setting: Setting, tell: Tell) -> dict[str, Any]:
    place, model, recorder = layout(setting), cost_model(setting), Recorder()
    config = _probed(virtual_config(setting), setting, place)
    workload = make_workload(setting.workload_config())
    shape, seed = setting.model.made(), setting.experiment.seed
    routing = routing_source(shape, setting.workload.routing, seed)
    checkpoint = ghost_checkpoint(shape, routing, setting.model.context)
    async with virtual_cluster(config, checkpoint, lambda _: model, place.groups) as cluster:
        before: Reports = {}
        target = _Abandoned(cluster)

        def note() -> None:
            if not target.failed.is_set():  # else ranks may have stopped
                before.update(_reports(cluster, model))

        _set_timers(setting, tell, note)
        gc.freeze()
        meter = Meter(cluster) if setting.experiment.run_costs else None
        real_s, cpu_s = time.perf_counter(), time.process_time()
        await drive(target, workload, recorder, target.failed)
        if target.failed.is_set():
            raise AsyncMoeError(_why(cluster, target.fault))
        spent_s = time.perf_counter() - real_s, time.process_time() - cpu_s
        bill = None if meter is None else meter.bill()
        after = _reports(cluster, model)
    metrics = _metrics(setting, place, recorder.record(), before or after, after)
    check_usable(metrics, metrics["cluster"], setting.window.ramp_s)
    cost = _cost(after, *spent_s)
    if bill is not None:
        cost |= {"stage_us": bill.per_stage_us, "parcel_us": bill.per_parcel_us}
        metrics["cost"] = cost
    return {"metrics": metrics, "cost": cost}


def routing_source(shape: ModelShape, text: str, seed: int) -> RoutingSource:
    """What chooses the experts of a model of that shape. Raises `ConfigError`."""
    made = make_routing(text, shape.moe_layers, shape.experts, shape.top_k, seed)
    if made is None:
        raise ConfigError(f"workload.routing is {text!r}: a simulated model has no router")
    return made


def _set_timers(setting: Setting, tell: Tell, on_ramp: Callable[[], None]) -> None:
    """Call at the end of the ramp, and tell now and then how far the run is."""
    loop, window = asyncio.get_running_loop(), setting.window
    begin_s, end_s = loop.time(), window.ramp_s + window.measure_s
    loop.call_at(begin_s + window.ramp_s, on_ramp)
    for number in range(1, _TELLS + 1):
        loop.call_at(begin_s + end_s * number / _TELLS, tell, number / _TELLS)


def _metrics(
    setting: Setting, place: Layout, record: Record, before: Reports, after: Reports
) -> dict[str, Any]:
    """Everything that is measured, by name."""
    layers, nic_bytes_per_s = setting.model.made().moe_layers, place.hardware.nic_bytes_per_s
    metrics = summarise(record, setting.measure)
    metrics["steady_tokens_per_s"] = steady_tokens_per_s(record, setting.window.ramp_s)
    metrics["cluster"] = cluster_figures(before, after, layers, nic_bytes_per_s)
    _set_hidden(metrics["cluster"], before, after)
    metrics["protocol"] = protocol_figures(before, after)
    return metrics


def _probed(config: Config, setting: Setting, place: Layout) -> Config:
    if place.groups * place.ranks > _PROBED_RANKS:
        return config
    period_s = (setting.window.ramp_s + setting.window.measure_s) / _SAMPLES
    return config.model_copy(update={"metrics": MetricsConfig(probe_period_s=period_s)})


def _why(cluster: VirtualCluster, fault: str) -> str:
    """What ended a run: the error of a rank, if one has stopped, or how a request ended."""
    for each in (each for group in cluster.groups for each in group.ranks):
        stopped = each.rank.stopped
        if stopped.done() and (error := stopped.exception()) is not None:
            return f"rank {each.rank.rank}: {error}"
    return f"a request ended as {fault!r}; the log on standard error may say why"


class _Abandoned:
    """A cluster as a `Target`, whose requests are given up without a word to the ranks.

    They are put away right behind, so that a parcel to every rank about every request would only
    cost time, and more of it than the run.
    """

    def __init__(self, cluster: VirtualCluster) -> None:
        self.now_s, self.submit = cluster.now_s, cluster.submit
        self._cluster = cluster
        self._listener: Listener
        self._is_over = False
        self.failed = asyncio.Event()  # a request ended so that the run is worth nothing
        self.fault = ""  # how it ended

    def listen(self, listener: Listener) -> None:
        """See `Target`."""
        self._listener = listener
        self._cluster.listen(self)

    def abort(self, request: int) -> None:
        """See `Target`; the first one is the end of the run."""
        self._is_over = True
        self._listener.on_end(request, "aborted")

    def on_tokens(self, requests: Sequence[int], now_s: float) -> None:
        """See `Listener`."""
        if not self._is_over:
            self._listener.on_tokens(requests, now_s)

    def on_end(self, request: int, reason: str) -> None:
        """See `Listener`."""
        if not self._is_over:
            if reason in FAULTS:
                self.fault = reason
                self.failed.set()
            self._listener.on_end(request, reason)


def cost_model(setting: Setting) -> CostModel:
    """What a rank takes: from a profile, or from stated figures of the hardware."""
    experiment, system = setting.experiment, setting.system
    if experiment.costs is not None:
        return costs.load(Path(experiment.costs).expanduser())
    shape, hardware = setting.model.made(), setting.cluster.made()
    made = costs.derived(shape, _together(hardware, system.tensor), experiment.host.made())
    if system.tensor > 1:
        made = _with_all_reduce(made, shape, hardware, setting)
    return made


def _together(hardware: Hardware, tensor: int) -> Hardware:
    """Devices that share each layer's weights, as one."""
    return replace(
        hardware,
        flop_per_s=hardware.flop_per_s * tensor,
        memory_bytes_per_s=hardware.memory_bytes_per_s * tensor,
    )


def _with_all_reduce(
    made: CostModel, shape: ModelShape, hardware: Hardware, setting: Setting
) -> CostModel:
    """Every attention and expert step ends with the sum of the rows over the devices, and in a
    pipeline a step in as many as it has stages hands its rows on."""
    system, share = setting.system, 2 * (setting.system.tensor - 1) / setting.system.tensor
    row_s = share * shape.row_bytes / hardware.local_bytes_per_s
    fixed_s = 2 * 1e-6 * setting.cluster.local_latency_us
    hops = (system.pipeline - 1) / shape.moe_layers
    hop_row_s = hops * shape.row_bytes / hardware.nic_bytes_per_s
    hop_s = hops * 1e-6 * setting.cluster.latency_us

    def summed(kind: KindCost, more_s: float = 0.0, more_row_s: float = 0.0) -> KindCost:
        return replace(kind, fixed_s=kind.fixed_s + fixed_s + more_s, wire_row_s=row_s + more_row_s)

    first = made.first_layer
    return replace(
        made,
        attention=summed(made.attention),
        first_layer=None if first is None else summed(first),
        expert=summed(made.expert, hop_s, hop_row_s),
    )


def _reports(cluster: VirtualCluster, model: CostModel) -> Reports:
    """The counters of every rank, with the CPU time that the model says instead of this machine's.

    Ranks are numbered through all groups, and so are the columns of `bytes_to`.
    """
    every = [each for group in cluster.groups for each in group.ranks]
    size, found = len(cluster.groups[0].ranks), {}
    for number, each in enumerate(every):
        report, first = each.rank.stats(), number // size * size
        sent = [0] * len(every)
        sent[first : first + size] = report["bytes_to"]
        report |= _host_times(report, model)
        report |= {
            "bytes_to": sent,
            "loop_user_s": each.lane.worked_s,
            "loop_system_s": 0.0,
            "hidden_s": each.lane.hidden_s,
        }
        for measured in ("cpu_s", "hidden_s"):
            report.get("probe", {}).pop(measured, None)
        found[number] = report
    return found


def _host_times(report: dict[str, Any], model: CostModel) -> dict[str, float]:
    """CPU seconds of a rank's loop since its start, by what they went into."""
    times: dict[str, float] = {}
    for name in KINDS:
        cost: KindCost = getattr(model, name)
        times[f"{name}_prepare_s"] = report[f"{name}_batches"] * cost.before_s
        times[f"{name}_finish_s"] = report[f"{name}_batches"] * cost.after_s
    times["receive_s"] = report["received_parcels"] * model.parcel_in_s
    return times


def _set_hidden(cluster: dict[str, Any], before: Reports, after: Reports) -> None:
    """The share of the hosts' work that passed while their devices computed, as it was charged."""
    for rank, figures in cluster["ranks"].items():
        worked_s, hidden_s = (
            after[int(rank)][name] - before[int(rank)][name] for name in ("loop_user_s", "hidden_s")
        )
        figures["hidden_share"] = hidden_s / worked_s if worked_s > 0 else 1.0
    shares = [figures["hidden_share"] for figures in cluster["ranks"].values()]
    cluster["hidden_share"] = sum(shares) / len(shares)


def _cost(reports: Reports, real_s: float, cpu_s: float) -> dict[str, float]:
    """What the simulation itself took."""
    return {
        "real_s": real_s,
        "cpu_s": cpu_s,
        "virtual_s": max(report["loop_s"] for report in reports.values()),
        "steps": sum(steps_of(report) for report in reports.values()),
        "parcels": sum(report["sent_parcels"] for report in reports.values()),
    }
