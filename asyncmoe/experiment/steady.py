"""The throughput of a short window, evenly counted.

Where many requests go through the layers together, tokens come in waves, and a window of a few
waves has one more or one less. So a token counts with the part of its making, from the one before
it (or the request's arrival) to itself, that lies in the window.
"""

from __future__ import annotations

import numpy as np

from asyncmoe.metrics.recorder import REASONS, Record

_GIVEN_UP = [REASONS.index(reason) for reason in ("running", "aborted")]


def steady_tokens_per_s(record: Record, begin_s: float) -> float:
    """Tokens per second from `begin_s` to the end of the record.

    A token that is still being made at the end is taken to need as long as the one before it, or
    longer if it has taken longer already.
    """
    end_s, request = record.end_s, record.token_request
    if end_s <= begin_s:
        return 0.0
    is_first = np.ones(len(request), np.bool_)
    is_first[1:] = request[1:] != request[:-1]
    since_s = np.roll(record.token_s, 1)
    since_s[is_first] = record.arrival_s[request[is_first]]
    making_s = np.maximum(record.token_s - since_s, 1e-9)
    inside_s = np.minimum(record.token_s, end_s) - np.maximum(since_s, begin_s)
    made = float((inside_s.clip(0) / making_s).sum())

    last = np.flatnonzero(np.append(is_first[1:], True)) if len(request) else np.zeros(0, np.int64)
    open_ended = np.isin(record.reason[request[last]], _GIVEN_UP)
    last = last[open_ended]
    tail_s = end_s - record.token_s[last]
    whole_s = np.maximum(np.maximum(tail_s, making_s[last]), 1e-9)
    made += float((np.minimum(tail_s, end_s - begin_s).clip(0) / whole_s).sum())
    return made / (end_s - begin_s)
