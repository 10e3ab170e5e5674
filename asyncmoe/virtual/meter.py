"""What the virtual world itself costs: CPU time per executed stage and per parcel.

All time of a run is counted once. To parcels goes what there is to do for each of them: routing,
dispatching, what an expert batch sends back and lets go, the network's events, taking them in; to
stages all else. The whole is CPU time; how it is divided goes by a clock that is quicker to read.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from asyncmoe.steps import ExpertStep
from asyncmoe.virtual.cluster import VirtualCluster

_OF_PARCELS = ("ModelTransport._take", "ModelTransport._enter", "Home._settle_if_idle")


@dataclass(frozen=True, slots=True)
class Bill:
    """What a run cost, in seconds of CPU time of this process."""

    stages: int
    parcels: int
    events: int
    stage_s: float  # of all stages
    parcel_s: float  # of all parcels

    @property
    def per_stage_us(self) -> float:
        """Of one stage execution."""
        return 1e6 * self.stage_s / max(1, self.stages)

    @property
    def per_parcel_us(self) -> float:
        """Of one parcel."""
        return 1e6 * self.parcel_s / max(1, self.parcels)


class Meter:
    """Measures a cluster from the moment that it is made; costs a few percent itself."""

    def __init__(self, cluster: VirtualCluster) -> None:
        """It takes the loop's `on_event`."""
        self._cluster, self._clock = cluster, time.perf_counter
        self._stages, self._parcels = self._counts()
        self._events = cluster.loop.events
        self._parcel_s = 0.0
        self._within_s = 0.0  # of parcels, within the present event
        self._of_parcel = False
        self._begin_s = self._last_s = self._clock()
        self._cpu_s = time.process_time()
        cluster.loop.on_event = self._on_event
        for rank in cluster.ranks:
            dispatcher: Any = rank._dispatcher
            stages: Any = rank.executor._stages
            dispatcher.router = _Timed(dispatcher.router, self)
            dispatcher.dispatch = _Timed(dispatcher.dispatch, self)
            stages.finish = _Timed(stages.finish, self, ExpertStep)

    def bill(self) -> Bill:
        """What it has cost so far."""
        self._close_event()
        stages, parcels = self._counts()
        whole_s = time.process_time() - self._cpu_s
        parcel_s = whole_s * self._parcel_s / (self._last_s - self._begin_s)
        return Bill(
            stages - self._stages,
            parcels - self._parcels,
            self._cluster.loop.events - self._events,
            whole_s - parcel_s,
            parcel_s,
        )

    def _counts(self) -> tuple[int, int]:
        ranks = self._cluster.ranks
        stages = sum(times.batches for rank in ranks for times in rank.times.kinds.values())
        return stages, sum(rank._dispatcher.sent_parcels for rank in ranks)

    def _on_event(self, now_s: float, lane: str, callback: Callable[..., Any]) -> None:
        """A callback begins, so the one before it is over."""
        self._close_event()
        self._of_parcel = getattr(callback, "__qualname__", "") in _OF_PARCELS

    def _close_event(self) -> None:
        now_s = self._clock()
        self._parcel_s += now_s - self._last_s if self._of_parcel else self._within_s
        self._last_s, self._within_s = now_s, 0.0

    def within(self, seconds: float) -> None:
        """So much of the present event was for parcels."""
        self._within_s += seconds


class _Timed:
    """Something callable, which is otherwise as it was."""

    def __init__(
        self, work: Callable[..., Any], meter: Meter, only_for: type[Any] = object
    ) -> None:
        """`only_for`: of the first argument; calls with others are not timed."""
        self._work, self._meter, self._only_for = work, meter, only_for

    def __call__(self, *args: Any) -> Any:
        if not isinstance(args[0], self._only_for):
            return self._work(*args)
        begin_s = time.perf_counter()
        result = self._work(*args)
        self._meter.within(time.perf_counter() - begin_s)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)
