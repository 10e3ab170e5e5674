"""A rank's probe: queue depths over time, sizes of batches, and how long rows waited for them.

It hangs beside the parts of a rank and costs nothing where none is made: a timer samples gauges,
and the stages are wrapped so that it sees each batch when it is taken. Memory is bounded: when the
samples are full, each two become one of twice the period.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncmoe.executor import Stages, Step
from asyncmoe.microqueue import Queues
from asyncmoe.passage import Passage, Passed
from asyncmoe.stage import Kind

SAMPLES = 512
STEPS_PER_OCTAVE = 4  # of the histogram of waits
LEAST_WAIT_S = 1e-6
# From which on a wait is in the next bucket; the last one has no end.
_BUCKETS_S = [LEAST_WAIT_S * 2 ** (number / STEPS_PER_OCTAVE) for number in range(1, 200)]
GAUGES = (
    "running_requests",
    "waiting_requests",
    "used_slots",
    "used_kv_blocks",
    "outbox_rows",
    "outstanding_rows",
)


class Samples:
    """Rows of numbers over time, at a period that grows as they get many."""

    def __init__(self, columns: int, period_s: float) -> None:
        self.period_s = period_s
        self._values = np.zeros((SAMPLES, columns), np.float32)
        self._times_s = np.zeros(SAMPLES)
        self._count = 0

    def add(self, time_s: float, values: Sequence[float] | NDArray[Any]) -> None:
        """One sample."""
        if self._count == SAMPLES:
            half = SAMPLES // 2
            self._values[:half] = self._values.reshape(half, 2, -1).mean(1)
            self._times_s[:half] = self._times_s.reshape(half, 2).mean(1)
            self._count = half
            self.period_s *= 2
        self._values[self._count], self._times_s[self._count] = values, time_s
        self._count += 1

    @property
    def times_s(self) -> NDArray[np.float64]:
        """[samples] loop time of each."""
        return self._times_s[: self._count]

    @property
    def values(self) -> NDArray[np.float32]:
        """[samples, columns]."""
        return self._values[: self._count]


class Probe:
    """Watches one rank from `start` to `close`."""

    def __init__(
        self,
        queues: Queues,
        gauges: Callable[[], Sequence[float]],
        period_s: float,
        clock: Callable[[], float] | None,
    ) -> None:
        """`gauges` gives the numbers of `GAUGES`, now. Call on the rank's loop.

        `clock`: of the CPU time of that loop; None: it is not measured.
        """
        self._queues, self._gauges, self._clock = queues, gauges, clock
        self.computing: Callable[[], bool] = bool  # to be set: whether a batch is with the device
        self._loop = asyncio.get_running_loop()
        self._samples = Samples(len(queues.rows) + len(GAUGES), period_s)
        self._row = np.zeros(len(queues.rows) + len(GAUGES), np.float32)
        self._timer: asyncio.TimerHandle | None = None
        self._sizes: dict[Kind, Counter[int]] = {kind: Counter() for kind in Kind}
        self._waits: dict[Kind, Counter[int]] = {kind: Counter() for kind in Kind}
        stages = len(queues.rows)
        self._taken_rows = [0] * stages
        self._waited_s = [0.0] * stages  # of the oldest row of each batch
        self._longest_s = [0.0] * stages
        self._batches = [0] * stages
        self._cpu_s = dict.fromkeys(Kind, 0.0)  # of the loop, for batches of a kind
        self._hidden_s = dict.fromkeys(Kind, 0.0)  # of that, while another batch computed

    def start(self) -> None:
        """Sample from now on."""
        self._sample()

    def close(self) -> None:
        """Sample no more. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def watched(self, stages: Stages) -> Stages:
        """`stages`, with every batch noted when it is taken."""
        return _Watched(stages, self)

    def take(self, stages: Stages, stage: int, max_rows: int) -> Step:
        """Prepare a batch of `stage` and note it."""
        waited_s = self._loop.time() - float(self._queues.oldest_s[stage])
        clock = self._clock
        if clock is None:
            step = stages.prepare(stage, max_rows)
        else:
            begin_s = clock()
            step = stages.prepare(stage, max_rows)
            self._worked(step.kind, clock() - begin_s)
        kind, rows = step.kind, step.row_count
        self._sizes[kind][rows] += 1
        self._waits[kind][bisect_right(_BUCKETS_S, waited_s)] += 1
        self._taken_rows[stage] += rows
        self._batches[stage] += 1
        self._waited_s[stage] += waited_s
        if waited_s > self._longest_s[stage]:
            self._longest_s[stage] = waited_s
        return step

    def finish(self, kind: Kind, work: Callable[[], None]) -> None:
        """Do the loop's `work` behind a batch, or behind a token of a passage, and note it."""
        clock = self._clock
        if clock is None:
            work()
        else:
            begin_s = clock()
            work()
            self._worked(kind, clock() - begin_s)

    def _worked(self, kind: Kind, cpu_s: float) -> None:
        self._cpu_s[kind] += cpu_s
        if self.computing():
            self._hidden_s[kind] += cpu_s

    def values(self) -> dict[str, Any]:
        """What was seen, as plain numbers; counts and sums are since the start."""
        stages = len(self._queues.rows)
        samples = self._samples
        gauges = samples.values[:, stages:].T
        return {
            "period_s": samples.period_s,
            "time_s": np.round(samples.times_s, 6).tolist(),
            "depth": np.round(samples.values[:, :stages], 2).tolist(),
            "gauges": {
                name: np.round(values, 2).tolist()
                for name, values in zip(GAUGES, gauges, strict=True)
            },
            "sizes": _named(self._sizes),
            "waits": _named(self._waits),
            "taken_rows": list(self._taken_rows),
            "batches": list(self._batches),
            "waited_s": list(self._waited_s),
            "longest_wait_s": list(self._longest_s),
            "cpu_s": {kind.name.lower(): value for kind, value in self._cpu_s.items()},
            "hidden_s": {kind.name.lower(): value for kind, value in self._hidden_s.items()},
        }

    def _sample(self) -> None:
        stages, now_s = len(self._queues.rows), self._loop.time()
        self._row[:stages] = self._queues.rows
        self._row[stages:] = self._gauges()
        self._samples.add(now_s, self._row)
        self._timer = self._loop.call_at(now_s + self._samples.period_s, self._sample)


class _Watched:
    """See `Probe.watched`; implements `Stages`."""

    def __init__(self, stages: Stages, probe: Probe) -> None:
        self._stages, self._probe = stages, probe
        self.passage, self.march = stages.passage, stages.march
        self.failed, self.broken = stages.failed, stages.broken

    def prepare(self, stage: int, max_rows: int) -> Step:
        """See `Stages`."""
        return self._probe.take(self._stages, stage, max_rows)

    def finish(self, step: Step, result: Any) -> None:
        """See `Stages`."""
        self._probe.finish(step.kind, partial(self._stages.finish, step, result))

    def went_on(self, step: Passage, passed: Passed) -> None:
        """See `Stages`."""
        self._probe.finish(step.kind, partial(self._stages.went_on, step, passed))


def _named(counters: dict[Kind, Counter[int]]) -> dict[str, dict[str, int]]:
    """By name of the kind, and with keys as JSON has them."""
    return {
        kind.name.lower(): {str(key): count for key, count in sorted(counter.items())}
        for kind, counter in counters.items()
    }
