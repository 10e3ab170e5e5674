"""The sampling state of one home rank's requests: numpy columns indexed by request row.

A batch is built by fancy indexing. Only requests with penalties, a logit bias or an unreached
`min_tokens` are handled one by one, and only they keep counts of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from asyncmoe.sampler import Course, Draws, Edits, Float32s, Int64s, SamplerBatch
from asyncmoe.sampling import SamplingParams

GO_ON: Final = 0
STOP: Final = 1  # an EOS or a stop token
LENGTH: Final = 2  # max_tokens or the context is reached

_DRAWN, _EDITED, _REPORTED = 1, 2, 4  # bits of a row's `_kind`


class SamplingTable:
    """Columns for `max_requests` requests. Rows are free until `set` and after `clear`.

    Promises: `batch` copies, so that a later call changes no batch already built; no call costs
    Python time per row for requests without penalties, logit bias and `min_tokens`.
    """

    def __init__(self, max_requests: int, vocab: int, eos_ids: Sequence[int]) -> None:
        self.vocab = vocab
        self._eos_ids = tuple(eos_ids)
        self._kind = np.zeros(max_requests, np.uint8)
        self._temperature = np.ones(max_requests, np.float32)
        self._top_k = np.zeros(max_requests, np.int64)
        self._top_p = np.ones(max_requests, np.float64)
        self._min_p = np.zeros(max_requests, np.float64)
        self._seed = np.zeros(max_requests, np.uint64)
        self._step = np.zeros(max_requests, np.int64)  # tokens of the output so far
        self._limit = np.zeros(max_requests, np.int64)  # most tokens of the output
        self._min_tokens = np.zeros(max_requests, np.int64)
        self._top_logprobs = np.zeros(max_requests, np.int64)
        # Tokens that end the request, -1 where there are fewer. Widened by the first row that has
        # more than fit; the number of stop ids is bounded by SamplingParams.
        self._ends = np.full((max_requests, max(1, len(self._eos_ids))), -1, np.int64)
        self._edits: dict[int, _RowEdits] = {}
        self._counted = np.zeros(max_requests, np.bool_)  # rows whose `_RowEdits` counts tokens

    def set(
        self, row: int, params: SamplingParams, prompt_ids: Sequence[int] | Int64s, context: int
    ) -> None:
        """Begin a request on a free row; its prompt and output have at most `context` tokens.

        `params` has a seed unless it is greedy, its ids and those of the prompt are below `vocab`.
        """
        self._temperature[row] = params.temperature
        self._top_k[row] = min(params.top_k, self.vocab)
        self._top_p[row] = params.top_p
        self._min_p[row] = params.min_p
        self._seed[row] = (params.seed or 0) % 2**64
        self._step[row] = 0
        room = context - len(prompt_ids)
        self._limit[row] = room if params.max_tokens is None else min(params.max_tokens, room)
        self._min_tokens[row] = params.min_tokens
        self._top_logprobs[row] = params.logprobs or 0
        self._set_ends(row, params)
        edits = _RowEdits(params, prompt_ids)
        if edits.any:
            self._edits[row] = edits
        self._counted[row] = edits.counting
        self._kind[row] = (
            (0 if params.greedy else _DRAWN)
            | (_EDITED if edits.any else 0)
            | (_REPORTED if params.logprobs is not None else 0)
        )

    def append(self, rows: Int64s, tokens: Int64s) -> None:
        """Take note of one more output token of each of `rows`, which are distinct."""
        self._step[rows] += 1
        counted = self._counted[rows]
        if counted.any():
            for row, token in zip(rows[counted].tolist(), tokens[counted].tolist(), strict=True):
                self._edits[row].count(token)

    def finished(self, rows: Int64s, tokens: Int64s) -> NDArray[np.uint8]:
        """GO_ON, STOP or LENGTH for each row whose last token, already appended, is `tokens`.

        `min_tokens` needs no look: until then the sampler excludes the tokens that end a row.
        """
        codes = np.where(self._step[rows] >= self._limit[rows], LENGTH, GO_ON).astype(np.uint8)
        codes[(self._ends[rows] == tokens[:, None]).any(1)] = STOP
        return codes

    def course(self, rows: Int64s) -> Course | None:
        """Of rows whose tokens need no look at this table; None where some need one."""
        if (self._kind[rows] & (_EDITED | _REPORTED)).any():
            return None
        return Course(int((self._limit[rows] - self._step[rows]).min()), self._ends[rows])

    def are_greedy(self, rows: Int64s) -> bool:
        """Whether these rows have a `course` on which each token is the likeliest."""
        return not (self._kind[rows] & (_EDITED | _REPORTED | _DRAWN)).any()

    def clear(self, row: int) -> None:
        """End the request and free its row. Idempotent."""
        self._kind[row] = 0
        self._counted[row] = False
        self._edits.pop(row, None)

    def batch(self, rows: Int64s) -> SamplerBatch:
        """What is asked of the next token of each of `rows`, in their order."""
        kinds = self._kind[rows]
        asked = int(np.bitwise_or.reduce(kinds)) if len(rows) else 0
        reported = np.flatnonzero(kinds & _REPORTED) if asked & _REPORTED else None
        return SamplerBatch(
            size=len(rows),
            draws=self._draws(rows, np.flatnonzero(kinds & _DRAWN)) if asked & _DRAWN else None,
            edits=self._row_edits(rows, np.flatnonzero(kinds & _EDITED))
            if asked & _EDITED
            else None,
            logprob_rows=reported,
            logprob_top=None if reported is None else self._top_logprobs[rows[reported]],
        )

    def _set_ends(self, row: int, params: SamplingParams) -> None:
        ends = [*(() if params.ignore_eos else self._eos_ids), *params.stop_token_ids]
        missing = len(ends) - self._ends.shape[1]
        if missing > 0:
            self._ends = np.pad(self._ends, ((0, 0), (0, missing)), constant_values=-1)
        self._ends[row] = -1
        self._ends[row, : len(ends)] = ends

    def _draws(self, rows: Int64s, positions: Int64s) -> Draws:
        at = rows[positions]
        return Draws(
            positions,
            self._temperature[at],
            self._top_k[at],
            self._top_p[at],
            self._min_p[at],
            self._seed[at],
            self._step[at],
        )

    def _row_edits(self, rows: Int64s, positions: Int64s) -> Edits | None:
        at = rows[positions].tolist()
        edits = [self._edits[row] for row in at]
        held = self._step[at] < self._min_tokens[at]
        banned = [
            ends[ends >= 0] if hold else _NO_IDS
            for ends, hold in zip(self._ends[at], held.tolist(), strict=True)
        ]
        bias_row, bias_token = _columns([e.bias_ids for e in edits])
        banned_row, banned_token = _columns(banned)
        seen_row, seen_token = _columns([e.seen_ids for e in edits])
        if not (len(bias_row) or len(banned_row) or len(seen_row)):
            return None
        return Edits(
            rows=positions,
            bias_row=bias_row,
            bias_token=bias_token,
            bias=np.concatenate([e.bias for e in edits]),
            banned_row=banned_row,
            banned_token=banned_token,
            seen_row=seen_row,
            seen_token=seen_token,
            seen_count=np.concatenate([e.seen_counts for e in edits]),
            repetition=np.array([e.repetition for e in edits], np.float32),
            presence=np.array([e.presence for e in edits], np.float32),
            frequency=np.array([e.frequency for e in edits], np.float32),
        )


_NO_IDS: Final = np.zeros(0, np.int64)


def _columns(ids: Sequence[Int64s]) -> tuple[Int64s, Int64s]:
    """Index of the list and id, for all ids of all lists."""
    lengths = [len(each) for each in ids]
    return np.repeat(np.arange(len(ids)), lengths), np.concatenate(ids)


class _RowEdits:
    """What changes the logits of one request, and its tokens as far as penalties need them."""

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int] | Int64s) -> None:
        self.repetition = params.repetition_penalty
        self.presence = params.presence_penalty
        self.frequency = params.frequency_penalty
        self.counting = (self.repetition, self.presence, self.frequency) != (1.0, 0.0, 0.0)
        self.bias_ids, self.bias = _bias_columns(params.logit_bias)
        self.any = self.counting or bool(params.logit_bias) or params.min_tokens > 0
        prompt = _NO_IDS
        if self.repetition != 1.0:
            prompt = np.unique(np.asarray(prompt_ids, np.int64))
        self._ids = prompt
        self._counts = np.zeros(len(prompt), np.float32)
        self._used = len(prompt)
        self._place = dict(zip(prompt.tolist(), range(len(prompt)), strict=True))

    @property
    def seen_ids(self) -> Int64s:
        """The distinct tokens seen."""
        return self._ids[: self._used]

    @property
    def seen_counts(self) -> Float32s:
        """How often each of them is in the output."""
        return self._counts[: self._used]

    def count(self, token: int) -> None:
        """Take note of an output token."""
        place = self._place.setdefault(token, self._used)
        if place == self._used:
            if place == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros(place + 16, np.int64)])
                self._counts = np.concatenate([self._counts, np.zeros(place + 16, np.float32)])
            self._ids[place] = token
            self._used += 1
        self._counts[place] += 1


def _bias_columns(bias: Mapping[int, float]) -> tuple[Int64s, Float32s]:
    return np.fromiter(bias.keys(), np.int64), np.fromiter(bias.values(), np.float32)
