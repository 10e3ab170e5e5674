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

from asyncmoe import native
from asyncmoe.steps import ExpertStep
from asyncmoe.virtual.cluster import VirtualCluster

_OF_PARCELS = frozenset({"Link.take", "Link.enter", "Arrivals._settle_if_idle"})


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


class PlainStopwatch:
    """How a run's time divides among its callbacks; compiled where the loop is
    (`native/src/columns/stopwatch.cpp`)."""

    def __init__(self, names: frozenset[str]) -> None:
        """`names`: qualified ones, of the callbacks whose time counts."""
        self._names, self._clock = names, time.perf_counter
        self._counted_s = 0.0
        self._within_s = 0.0  # that counts, within the present event
        self._counts = False
        self._begin_s = self._last_s = self._clock()

    def __call__(self, now_s: float, lane: str, callback: Callable[..., Any]) -> None:
        """A callback begins, so the one before it is over."""
        self._close()
        self._counts = getattr(callback, "__qualname__", "") in self._names

    def within(self, seconds: float) -> None:
        """So much of the present event counts, if it is none of these."""
        self._within_s += seconds

    def share(self) -> float:
        """The part of the time so far that counts."""
        self._close()
        return self._counted_s / (self._last_s - self._begin_s)

    def _close(self) -> None:
        now_s = self._clock()
        self._counted_s += now_s - self._last_s if self._counts else self._within_s
        self._last_s, self._within_s = now_s, 0.0


class Meter:
    """Measures a cluster from the moment that it is made; costs a few percent itself."""

    def __init__(self, cluster: VirtualCluster) -> None:
        """It takes the loop's `on_event`."""
        self._cluster = cluster
        self._stages, self._parcels = self._counts()
        self._events = cluster.loop.events
        kind = PlainStopwatch if native.columns is None else native.columns.Stopwatch
        self._watch: PlainStopwatch = kind(_OF_PARCELS)
        self._cpu_s = time.process_time()
        cluster.loop.on_event = self._watch
        within = self._watch.within
        for rank in cluster.ranks:
            dispatcher: Any = rank._dispatcher
            rank.executor.watch()
            stages: Any = rank.executor._stages
            inner = getattr(stages, "_stages", stages)  # of a probe
            inner.attention.departure = None  # which would not call `dispatch`
            dispatcher.router = _Timed(dispatcher.router, within)
            dispatcher.dispatch = _Timed(dispatcher.dispatch, within)
            stages.finish = _Timed(stages.finish, within, ExpertStep)

    def bill(self) -> Bill:
        """What it has cost so far."""
        share = self._watch.share()
        stages, parcels = self._counts()
        whole_s = time.process_time() - self._cpu_s
        return Bill(
            stages - self._stages,
            parcels - self._parcels,
            self._cluster.loop.events - self._events,
            whole_s * (1 - share),
            whole_s * share,
        )

    def _counts(self) -> tuple[int, int]:
        ranks = self._cluster.ranks
        stages = sum(times.batches for rank in ranks for times in rank.times.kinds.values())
        return stages, sum(rank._dispatcher.outboxes.sent_parcels for rank in ranks)


class _Timed:
    """Something callable, which is otherwise as it was."""

    def __init__(
        self,
        work: Callable[..., Any],
        within: Callable[[float], None],
        only_for: type[Any] = object,
    ) -> None:
        """`only_for`: of the first argument; calls with others are not timed."""
        self._work, self._within, self._only_for = work, within, only_for

    def __call__(self, *args: Any) -> Any:
        if not isinstance(args[0], self._only_for):
            return self._work(*args)
        begin_s = time.perf_counter()
        result = self._work(*args)
        self._within(time.perf_counter() - begin_s)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)
