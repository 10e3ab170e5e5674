"""What a run achieved, as users and papers define it, from its record.

One rule says what counts: an interval counts if the moment that ends it lies in the window. The
window begins after the ramp and ends with the run. So a time to the first token counts when the
first token came in the window, a gap when its later token did, a request's completion when its
last token did. Requests that were under way when the run began have neither a time to the first
token nor one to completion. Warm-up runs are runs of their own and are not recorded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from asyncmoe.config import Section
from asyncmoe.metrics.recorder import DONE, REASONS, Record

SLOWEST_SHARE = 0.01
LEAST_INTERVALS = 8  # of a request that is called slow before it has completed
BINS = 48  # of the histogram of gaps
TIME_BINS = 200  # of rates over time


class MeasureConfig(Section):
    """What of a run is measured."""

    ramp_s: float = Field(0.0, ge=0, description="The start that does not count")
    best_window_s: float = Field(60.0, gt=0, description="Length of the best window")
    ttft_target_ms: float = Field(
        2000.0, gt=0, description="Longest time to the first token that is good"
    )
    itl_target_ms: float = Field(
        200.0, gt=0, description="Longest mean time between tokens of a request that is good"
    )


@dataclass(frozen=True, slots=True)
class _Intervals:
    """What counts. Requests are those of the record."""

    begin_s: float
    end_s: float
    token_s: NDArray[np.float64]  # [tokens] in the window, ascending
    ttft_s: NDArray[np.float64]  # [requests]; nan where it does not count, as the next
    completion_s: NDArray[np.float64]
    gap_s: NDArray[np.float64]  # [gaps]
    gap_request: NDArray[np.int64]  # [gaps]
    tokens_of: NDArray[np.int64]  # [requests] tokens in the window

    @property
    def seconds(self) -> float:
        return max(self.end_s - self.begin_s, 1e-9)

    @property
    def mean_gap_s(self) -> NDArray[np.float64]:
        """[requests]; nan without a gap."""
        requests = len(self.ttft_s)
        count = np.bincount(self.gap_request, minlength=requests)
        total = np.bincount(self.gap_request, self.gap_s, requests)
        mean_s: NDArray[np.float64] = np.full(requests, np.nan)
        return np.divide(total, count, out=mean_s, where=count > 0)


def summarise(record: Record, measure: MeasureConfig) -> dict[str, Any]:
    """Every figure by name, JSON-ready; None for what there was nothing of. Times are in ms."""
    counted = _intervals(record, measure.ramp_s)
    best, best_s = _best_rate(counted, measure.best_window_s)
    return {
        "window": {"begin_s": counted.begin_s, "end_s": counted.end_s},
        "tokens": len(counted.token_s),
        "tokens_per_s": len(counted.token_s) / counted.seconds,
        "best_tokens_per_s": best,
        "best_window_s": best_s,
        "requests": _ends(record, counted),
        "accepted": _accepted(record, counted),
        "goodput": _goodput(record, counted, measure),
        "all": _latencies(counted, np.ones(record.requests, np.bool_)),
        **_slowest(counted),
        "itl_histogram": _histogram(counted.gap_s),
        "over_time": _over_time(record),
    }


def spread(seconds: NDArray[np.float64]) -> dict[str, float] | None:
    """Mean, percentiles and maximum in ms; None of nothing."""
    if not len(seconds):
        return None
    values = 1e3 * np.percentile(seconds, (50, 90, 99, 100))
    p50, p90, p99, largest = (float(value) for value in values)
    mean = 1e3 * float(seconds.mean())
    return {"mean": mean, "p50": p50, "p90": p90, "p99": p99, "max": largest}


def _intervals(record: Record, ramp_s: float) -> _Intervals:
    begin_s, end_s = min(ramp_s, record.end_s), record.end_s
    request, token_s = record.token_request, record.token_s
    inside = (token_s >= begin_s) & (token_s <= end_s)
    is_first = np.ones(len(request), np.bool_)
    is_first[1:] = request[1:] != request[:-1]
    later = np.flatnonzero(~is_first)
    later = later[inside[later]]
    first = np.flatnonzero(is_first)
    last = np.append(first[1:], len(request))[: len(first)] - 1
    ttft_s, completion_s = (np.full(record.requests, np.nan) for _ in range(2))
    arrived = ~record.underway[request[first]]
    counts = first[arrived & inside[first]]
    ttft_s[request[counts]] = token_s[counts] - record.arrival_s[request[counts]]
    ended = np.isin(record.reason[request[last]], DONE)
    counts = last[arrived & inside[last] & ended]
    completion_s[request[counts]] = token_s[counts] - record.arrival_s[request[counts]]
    return _Intervals(
        begin_s,
        end_s,
        np.sort(token_s[inside]),
        ttft_s,
        completion_s,
        token_s[later] - token_s[later - 1],
        request[later],
        np.bincount(request[inside], minlength=record.requests),
    )


def _best_rate(counted: _Intervals, window_s: float) -> tuple[float, float]:
    """Tokens per second in the best window of that length (or the whole, if shorter), and it."""
    window_s = min(window_s, counted.seconds)
    times = counted.token_s
    upto = times.searchsorted(times + window_s, "right")
    most = int((upto - np.arange(len(times))).max(initial=0))
    return most / window_s, window_s


def _ends(record: Record, counted: _Intervals) -> dict[str, int]:
    """Requests that came in the window, and how those ended that ended in it."""
    came = (record.arrival_s >= counted.begin_s) & ~record.underway
    ended = (record.ended_s >= counted.begin_s) & (record.ended_s < counted.end_s)
    ends = np.bincount(record.reason[ended], minlength=len(REASONS))
    named = dict(zip(REASONS, ends.tolist(), strict=True))
    return {
        "arrived": int(came.sum()),
        "completed": named["length"] + named["stop"],
        **{reason: named[reason] for reason in ("aborted", "failed", "refused", "overloaded")},
    }


def _accepted(record: Record, counted: _Intervals) -> dict[str, float]:
    """The load that came in the window and was taken in."""
    turned_away = np.isin(record.reason, [REASONS.index(r) for r in ("refused", "overloaded")])
    taken = (record.arrival_s >= counted.begin_s) & ~record.underway & ~turned_away
    tokens = record.prompt_tokens[taken].sum(), record.output_tokens[taken].sum()
    ended_s = np.where(np.isnan(record.ended_s), record.end_s, record.ended_s)
    inside = np.minimum(ended_s, counted.end_s) - np.maximum(record.arrival_s, counted.begin_s)
    return {
        "requests_per_s": float(taken.sum()) / counted.seconds,
        "prompt_tokens_per_s": float(tokens[0]) / counted.seconds,
        "output_tokens_per_s": float(tokens[1]) / counted.seconds,
        "mean_in_flight": float(inside[~turned_away].clip(0).sum()) / counted.seconds,
    }


def _goodput(record: Record, counted: _Intervals, measure: MeasureConfig) -> dict[str, float]:
    """Requests that completed in the window and kept both targets, the first token and the mean of
    their gaps; those that were under way when the run began are judged by their gaps alone."""
    every, request = np.arange(record.requests), record.token_request
    first = request.searchsorted(every)
    count = np.bincount(request, minlength=record.requests)
    token_s = np.append(record.token_s, np.nan)
    first_s = np.where(count > 0, token_s[first], np.nan)
    last_s = np.where(count > 0, token_s[first + count - 1], np.nan)
    done = np.isin(record.reason, DONE) & (last_s >= counted.begin_s) & (last_s <= counted.end_s)
    mean_ms = 1e3 * (last_s - first_s) / np.maximum(count - 1, 1)
    good = done & (mean_ms <= measure.itl_target_ms)
    ttft_ms = 1e3 * (first_s - record.arrival_s)
    good &= record.underway | (ttft_ms <= measure.ttft_target_ms)
    return {
        "ttft_target_ms": measure.ttft_target_ms,
        "itl_target_ms": measure.itl_target_ms,
        "requests_per_s": float(good.sum()) / counted.seconds,
        "tokens_per_s": float(count[good].sum()) / counted.seconds,
        "share": float(good.sum()) / max(1, int(done.sum())),
    }


def _latencies(counted: _Intervals, these: NDArray[np.bool_]) -> dict[str, Any]:
    """Of `these` requests [requests]."""
    ttft_s, completion_s = counted.ttft_s[these], counted.completion_s[these]
    tokens = counted.tokens_of[these]
    return {
        "requests": int((tokens > 0).sum()),
        "tokens_per_s": float(tokens.sum()) / counted.seconds,
        "ttft_ms": spread(ttft_s[~np.isnan(ttft_s)]),
        "itl_ms": spread(counted.gap_s[these[counted.gap_request]]),
        "request_itl_ms": spread(_known(counted.mean_gap_s[these])),
        "completion_ms": spread(completion_s[~np.isnan(completion_s)]),
    }


def _slowest(counted: _Intervals) -> dict[str, Any]:
    """The slowest hundredth of the requests and the slowest one, by their mean time per token.

    That is the mean of all their intervals that count, the time to the first token among them.
    Requests with few such intervals are left out, if they have not completed.
    """
    gaps = np.bincount(counted.gap_request, minlength=len(counted.ttft_s))
    total_s = np.bincount(counted.gap_request, counted.gap_s, len(gaps)).astype(np.float64)
    first = ~np.isnan(counted.ttft_s)
    total_s = total_s + np.where(first, counted.ttft_s, 0.0)
    intervals = gaps + first
    # One that has just begun is not slow for its first token alone, unless all are like that.
    whole = (intervals >= LEAST_INTERVALS) | ~np.isnan(counted.completion_s)
    known = np.flatnonzero(whole if whole.any() else intervals)
    order = known[np.argsort(total_s[known] / intervals[known], kind="stable")[::-1]]
    found = {}
    number = int(np.ceil(SLOWEST_SHARE * len(order)))
    for name, slowest in (("slowest_1_percent", order[:number]), ("slowest", order[:1])):
        these = np.zeros(len(gaps), np.bool_)
        these[slowest] = True
        found[name] = _latencies(counted, these)
    return found


def _histogram(seconds: NDArray[np.float64]) -> dict[str, list[float]] | None:
    """Shares of the gaps in bins of equal ratio; what is beyond 0.1 % and 99.9 % is at the ends."""
    if not len(seconds):
        return None
    ms = np.maximum(1e3 * seconds, 1e-3)
    low, high = np.percentile(ms, (0.1, 99.9))
    edges = np.geomspace(low / 1.05, high * 1.05, BINS + 1)
    counts = np.histogram(ms.clip(edges[0], edges[-1]), edges)[0]
    return {"edges_ms": edges.tolist(), "share": (counts / len(ms)).tolist()}


def _over_time(record: Record) -> dict[str, Any]:
    """Tokens per second and requests in flight over the whole run, ramp included."""
    edges = np.linspace(0, max(record.end_s, 1e-9), TIME_BINS + 1)
    bin_s = float(edges[1])
    middle = edges[:-1] + bin_s / 2
    ended_s = np.sort(record.ended_s[~np.isnan(record.ended_s)])
    came = np.sort(record.arrival_s).searchsorted(middle, "right")
    return {
        "bin_s": bin_s,
        "tokens_per_s": (np.histogram(record.token_s, edges)[0] / bin_s).tolist(),
        "in_flight": (came - ended_s.searchsorted(middle, "right")).tolist(),
    }


def _known(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return values[~np.isnan(values)]
