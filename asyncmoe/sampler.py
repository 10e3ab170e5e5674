"""Choosing the next tokens of one head batch, on the compute thread, all rows at once.

Operations and their order are vLLM's: logit bias, ban of end tokens before `min_tokens`, penalties,
then for rows that are not greedy temperature, min-p, top-k, top-p and a draw. The draw inverts the
cumulative distribution in order of token ids at one uniform number, which is a hash of the
request's seed and step; every sum is taken within a row and in a fixed order. So a request's tokens
do not depend on which rows it shares a batch with, nor on the rank.

Rows that ask for nothing cost one argmax. Nothing is sorted but the candidates of a top-p row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BAD_LOGITS: Final = "no token can be chosen: the logits are not finite, or every token is excluded"
LOWEST_LOGPROB: Final = -9999.0  # what -inf becomes, since JSON cannot say it

_CHUNK_FLOATS: Final = 1 << 18  # probabilities made at a time: 1 MiB stays in a core's cache
_BLOCK: Final = 256  # tokens summed together before the running sum over blocks
_U64 = np.uint64

Int64s = NDArray[np.int64]
Float32s = NDArray[np.float32]
Float64s = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Edits:
    """Changes to the logits of `rows` [e]; every `*_row` column indexes `rows`."""

    rows: Int64s
    bias_row: Int64s  # [b]
    bias_token: Int64s  # [b]
    bias: Float32s  # [b], added
    banned_row: Int64s  # [m]
    banned_token: Int64s  # [m], excluded
    seen_row: Int64s  # [s]
    seen_token: Int64s  # [s], tokens of prompt or output, each once per row
    seen_count: Float32s  # [s], how often in the output; 0 for tokens of the prompt alone
    repetition: Float32s  # [e]
    presence: Float32s  # [e]
    frequency: Float32s  # [e]


@dataclass(frozen=True, slots=True)
class Draws:
    """The rows that are sampled rather than greedy, and how. Columns of equal length."""

    rows: Int64s
    temperature: Float32s
    top_k: Int64s  # 0: all
    top_p: Float64s
    min_p: Float64s
    seed: NDArray[np.uint64]
    step: Int64s  # tokens of the output so far

    @property
    def filtered(self) -> bool:
        """Whether some row keeps less than the whole vocabulary."""
        return bool(self.top_k.any() or self.min_p.any() or self.top_p.min() < 1)


@dataclass(frozen=True, slots=True)
class SamplerBatch:
    """What is asked of each of `size` rows; rows that no column names are plain greedy."""

    size: int
    draws: Draws | None = None
    edits: Edits | None = None
    logprob_rows: Int64s | None = None  # rows that report logprobs
    logprob_top: Int64s | None = None  # how many alternatives each of them reports


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Logprobs of `rows` [l] under the model's own distribution, before any change to it."""

    rows: Int64s
    chosen: Float32s  # [l]
    top_ids: Int64s  # [l, n], likeliest first
    top: Float32s  # [l, n]
    counts: Int64s  # [l], how many of the n each row asked for

    def as_lists(self, size: int) -> list[list[Any] | None]:
        """For each of the batch's `size` rows None or [logprob, [top ids], [top logprobs]]."""
        lists: list[list[Any] | None] = [None] * size
        columns = (self.rows, self.chosen, self.top_ids, self.top, self.counts)
        for row, chosen, ids, top, n in zip(*(c.tolist() for c in columns), strict=True):
            lists[row] = [chosen, ids[:n], top[:n]]
        return lists


@dataclass(frozen=True, slots=True)
class Sampled:
    """The outcome of one head batch."""

    tokens: Int64s  # [rows]; 0 where `bad`
    bad: NDArray[np.bool_]  # [rows]: see BAD_LOGITS; the request must end with an error
    logprobs: Logprobs | None


def sample(logits: Tensor, batch: SamplerBatch) -> Sampled:
    """Choose a token for each row of `logits`, float32 [batch.size, vocab] in host memory.

    Reads `logits` only. A row that holds NaN or +inf, or whose tokens are all excluded, is marked
    in `bad` and changes no other row.
    """
    raw = logits.numpy()
    tokens, peak = _likeliest(raw)
    bad = ~np.isfinite(peak)
    edited = None
    if batch.edits is not None:
        edited = _edit(raw, batch.edits)
        rows = batch.edits.rows
        tokens[rows], peak[rows] = _likeliest(edited)
        bad[rows] |= ~np.isfinite(peak[rows])
    if batch.draws is not None:
        _draw_into(tokens, raw, peak, bad, batch, edited)
    tokens[bad] = 0
    return Sampled(tokens, bad, _logprobs(logits, tokens, batch))


def uniforms(seed: NDArray[np.uint64], step: Int64s) -> Float64s:
    """The number in [0, 1) of each (seed, step): element `step` of the splitmix64 stream that
    starts at the hash of `seed`."""
    start = _splitmix(seed)
    bits = _splitmix(start + step.astype(_U64) * _U64(0x9E3779B97F4A7C15))
    return (bits >> _U64(11)).astype(np.float64) * 2.0**-53


def _splitmix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = x + _U64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> _U64(27))) * _U64(0x94D049BB133111EB)
    return x ^ (x >> _U64(31))


def _likeliest(logits: Float32s) -> tuple[Int64s, Float32s]:
    """Token and logit of each row's maximum; a NaN counts as the maximum."""
    tokens = logits.argmax(1)
    return tokens, logits[np.arange(len(tokens)), tokens]


def _edit(raw: Float32s, edits: Edits) -> Float32s:
    """The changed logits of `edits.rows`: a copy, [e, vocab]."""
    x = raw[edits.rows]
    x[edits.bias_row, edits.bias_token] += edits.bias
    x[edits.banned_row, edits.banned_token] = -np.inf
    at = edits.seen_row
    seen = x[at, edits.seen_token]
    repetition = edits.repetition[at]
    seen = np.where(seen > 0, seen / repetition, seen * repetition)
    seen -= edits.frequency[at] * edits.seen_count
    seen -= edits.presence[at] * (edits.seen_count > 0)
    x[at, edits.seen_token] = seen
    return x


def _draw_into(
    tokens: Int64s,
    raw: Float32s,
    peak: Float32s,
    bad: NDArray[np.bool_],
    batch: SamplerBatch,
    edited: Float32s | None,
) -> None:
    """Put the sampled rows' tokens in place, chunk by chunk."""
    assert batch.draws is not None
    edit_of = np.full(batch.size, -1, np.int64)
    if batch.edits is not None:
        edit_of[batch.edits.rows] = np.arange(len(batch.edits.rows))
    for draws, u in _chunks(batch.draws, bad, max(1, _CHUNK_FLOATS // raw.shape[1])):
        x = raw[draws.rows]
        if edited is not None:
            changed = np.flatnonzero(edit_of[draws.rows] >= 0)
            x[changed] = edited[edit_of[draws.rows[changed]]]
        # Relative to the likeliest token, so that no temperature overflows; that one's p is 1.
        x -= peak[draws.rows, None]
        x *= 1 / draws.temperature[:, None]
        torch.from_numpy(x).exp_()
        if draws.filtered:
            x *= x >= _floors(x, draws)[:, None]
        tokens[draws.rows] = _invert(x, u)


def _chunks(draws: Draws, bad: NDArray[np.bool_], most: int) -> Iterator[tuple[Draws, Float64s]]:
    """`draws` without the bad rows, at most `most` rows at a time, with their uniform numbers."""
    u = uniforms(draws.seed, draws.step)
    good = np.flatnonzero(~bad[draws.rows])
    for start in range(0, len(good), most):
        take = good[start : start + most]
        part = Draws(
            draws.rows[take],
            draws.temperature[take],
            draws.top_k[take],
            draws.top_p[take],
            draws.min_p[take],
            draws.seed[take],
            draws.step[take],
        )
        yield part, u[take]


def _floors(p: Float32s, draws: Draws) -> Float32s:
    """The least probability, relative to the likeliest token's, that each row keeps: [rows].

    Filters are floors, so tokens as likely as the last one kept are kept too.
    """
    floor = draws.min_p.astype(np.float32)
    limited = np.flatnonzero((draws.top_k > 0) & (draws.top_k < p.shape[1]))
    if len(limited):
        k = draws.top_k[limited]
        best = torch.from_numpy(p[limited]).topk(int(k.max())).values.numpy()
        floor[limited] = np.maximum(floor[limited], best[np.arange(len(k)), k - 1])
    for row in np.flatnonzero(draws.top_p < 1):
        floor[row] = _nucleus_floor(p[row], floor[row], float(draws.top_p[row]))
    return floor


def _nucleus_floor(p: Float32s, floor: np.float32, top_p: float) -> np.float32:
    """The least probability in the smallest set that has `top_p` of what `floor` keeps of p."""
    kept = np.compress(p >= floor, p) if floor > 0 else p
    total = float(kept.sum(dtype=np.float64))
    # Tokens below this have less than 1 - top_p together, so the set is made without them.
    negligible = (1 - top_p) * total / len(kept)
    candidates = np.compress(kept >= negligible, kept)
    candidates.sort()
    candidates = candidates[::-1]
    mass = candidates.cumsum(dtype=np.float64)
    last = int(mass.searchsorted(top_p * total))
    return np.float32(candidates[min(last, len(candidates) - 1)])


def _invert(p: Float32s, u: Float64s) -> Int64s:
    """For each row of weights p [rows, vocab] the token where its cumulative sum exceeds u * total.

    The sum runs over blocks first and then within one, which is faster and more exact than a
    running sum over the vocabulary.
    """
    rows, vocab = p.shape
    blocks, tail = divmod(vocab, _BLOCK)
    sums = np.empty((rows, blocks + (tail > 0)), np.float64)
    sums[:, :blocks] = p[:, : blocks * _BLOCK].reshape(rows, blocks, _BLOCK).sum(2)
    if tail:
        sums[:, blocks] = p[:, blocks * _BLOCK :].sum(1)
    running = sums.cumsum(1)
    target = u * running[:, -1]
    block = (running <= target[:, None]).sum(1)
    at = np.arange(rows)
    rest = target - running[at, block] + sums[at, block]
    token = block[:, None] * _BLOCK + np.arange(_BLOCK)
    inside = p[at[:, None], np.minimum(token, vocab - 1)] * (token < vocab)
    within = inside.cumsum(1, dtype=np.float64)
    # The block's two sums differ by rounding; below its end there is always a token to choose.
    rest = np.clip(rest, 0.0, np.nextafter(within[:, -1], 0.0))
    chosen: Int64s = block * _BLOCK + (within <= rest[:, None]).sum(1)
    return chosen


def _logprobs(logits: Tensor, tokens: Int64s, batch: SamplerBatch) -> Logprobs | None:
    rows, counts = batch.logprob_rows, batch.logprob_top
    if rows is None or counts is None:
        return None
    raw = logits[torch.from_numpy(rows)]
    total = raw.logsumexp(1, keepdim=True)
    chosen = raw.gather(1, torch.from_numpy(tokens[rows])[:, None]) - total
    top = raw.topk(min(int(counts.max()), raw.shape[1]))
    return Logprobs(
        rows,
        chosen[:, 0].clamp_(min=LOWEST_LOGPROB).numpy(),
        top.indices.numpy(),
        (top.values - total).clamp_(min=LOWEST_LOGPROB).numpy(),
        counts,
    )
