"""The recorder of a run: every token's time, and when each request came and ended.

It costs one list entry per batch of tokens while the run goes on; everything else is made of the
arrays afterwards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asyncmoe.workload.workload import Workload

REASONS = ("running", "length", "stop", "aborted", "failed", "refused", "overloaded")
DONE = (REASONS.index("length"), REASONS.index("stop"))
FAULTS = ("failed", "refused", "overloaded")  # a run with such ends compares with nothing
_BLOCK = 1 << 14  # batches that are kept as they came before they become arrays


@dataclass(frozen=True, slots=True)
class Record:
    """What happened, as arrays. Times are seconds from the start of the run."""

    end_s: float  # of the run
    arrival_s: NDArray[np.float64]  # [requests] when each was submitted
    ended_s: NDArray[np.float64]  # [requests]; nan while it runs
    reason: NDArray[np.int8]  # [requests] of `REASONS`
    prompt_tokens: NDArray[np.int64]  # [requests]
    output_tokens: NDArray[np.int64]  # [requests] asked for
    underway: NDArray[np.bool_]  # [requests] began before the run
    token_request: NDArray[np.int64]  # [tokens], by request and time
    token_s: NDArray[np.float64]  # [tokens]

    @property
    def requests(self) -> int:
        """Requests that were submitted."""
        return len(self.arrival_s)


class Recorder:
    """Notes one run. All calls are made on the loop; times are by the target's clock."""

    def __init__(self) -> None:
        self._workload: Workload | None = None
        self._begin_s = 0.0
        self._end_s: float | None = None
        self._arrival_s: list[float] = []
        self._ended: list[tuple[int, float, int]] = []
        self._batches: list[tuple[Sequence[int], float]] = []
        self._blocks: list[tuple[NDArray[np.int64], NDArray[np.float64]]] = []
        self.token_count = 0
        self.ended_count = 0

    def begin(self, workload: Workload, now_s: float) -> None:
        """The run begins."""
        self._workload, self._begin_s = workload, now_s

    def submitted(self, request: int, now_s: float) -> None:
        """Requests are numbered from 0 on in the order in which they are submitted."""
        assert request == len(self._arrival_s)
        self._arrival_s.append(now_s)

    def tokens(self, requests: Sequence[int], now_s: float) -> None:
        """A token for each of these; the sequence is kept, so that it must not change."""
        if self._end_s is None:
            self.token_count += len(requests)
            self._batches.append((requests, now_s))
            if len(self._batches) == _BLOCK:
                self._pack()

    def ended(self, request: int, now_s: float, reason: str) -> None:
        """The request is over."""
        self.ended_count += 1
        self._ended.append((request, now_s, REASONS.index(reason)))

    def finish(self, now_s: float) -> None:
        """The run is over: what comes from now on is not part of it. The first call counts."""
        if self._end_s is None:
            self._end_s = now_s

    @property
    def running_count(self) -> int:
        """Requests that have come and not ended."""
        return len(self._arrival_s) - self.ended_count

    def faults(self) -> dict[str, int]:
        """How many requests ended badly, by how."""
        ends = Counter(REASONS[reason] for _, _, reason in self._ended)
        return {reason: ends[reason] for reason in FAULTS if ends[reason]}

    def record(self) -> Record:
        """Everything so far."""
        assert self._workload is not None
        self._pack()
        workload, count = self._workload, len(self._arrival_s)
        end_s = self._begin_s if self._end_s is None else self._end_s
        arrays = self._blocks or [(np.zeros(0, np.int64), np.zeros(0))]
        token_request, token_s = (np.concatenate(column) for column in zip(*arrays, strict=True))
        order = token_request.argsort(kind="stable")  # within a request by time, as they came
        ended_s, reason = np.full(count, np.nan), np.zeros(count, np.int8)
        if self._ended:
            at, times_s, reasons = zip(*self._ended, strict=True)
            ended_s[list(at)], reason[list(at)] = times_s, reasons
        which = np.arange(count) % max(1, len(workload))
        return Record(
            end_s - self._begin_s,
            np.array(self._arrival_s) - self._begin_s,
            ended_s - self._begin_s,
            reason,
            workload.prompt_tokens[which],
            workload.output_tokens[which],
            np.arange(count) < workload.underway,
            token_request[order],
            token_s[order] - self._begin_s,
        )

    def _pack(self) -> None:
        if not self._batches:
            return
        lengths = [len(requests) for requests, _ in self._batches]
        requests = np.concatenate([np.asarray(each, np.int64) for each, _ in self._batches])
        times_s = np.repeat([now_s for _, now_s in self._batches], lengths)
        self._blocks.append((requests, times_s))
        self._batches.clear()
