"""Choosing the next tokens of one head batch, on the compute thread, all rows at once.

Operations and their order are vLLM's: logit bias, ban of end tokens before `min_tokens`, penalties,
then for rows that are not greedy temperature, min-p, top-k, top-p and a draw. The draw inverts the
cumulative distribution in order of token ids at one uniform number, which is a hash of the
request's seed and step; every sum is taken within a row and in a fixed order. So a request's tokens
do not depend on which rows it shares a batch with, nor on the rank.

Rows that ask for nothing cost one argmax. Nothing is sorted but the few candidates for the last
token of a top-p row. The filters are floors under the probability: tokens as likely as the last one
kept are kept too.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BAD_LOGITS: Final = "no token can be chosen: the logits are not finite, or every token is excluded"
LOWEST_LOGPROB: Final = -9999.0  # what -inf becomes, since JSON cannot say it

_CHUNK_FLOATS: Final = 1 << 18  # probabilities made at a time: 1 MiB stays in a core's cache
_BLOCK: Final = 256  # tokens summed together before the running sum over blocks
_FINE_BITS: Final = 19  # of a float32's 23 mantissa bits, not told apart by a bucket of weights
_BUCKETS: Final = (0x3F800000 >> _FINE_BITS) + 1  # for weights from 0 to 1
_GROUP: Final = 64  # tokens whose maximum is taken together in search of the largest
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

    def take(self, which: Int64s) -> Draws:
        """These draws alone."""
        return Draws(
            self.rows[which],
            self.temperature[which],
            self.top_k[which],
            self.top_p[which],
            self.min_p[which],
            self.seed[which],
            self.step[which],
        )


@dataclass(frozen=True, slots=True)
class SamplerBatch:
    """What is asked of each of `size` rows; rows that no column names are plain greedy."""

    size: int
    draws: Draws | None = None
    edits: Edits | None = None
    logprob_rows: Int64s | None = None  # rows that report logprobs
    logprob_top: Int64s | None = None  # how many alternatives each of them reports

    def following(self) -> SamplerBatch:
        """What is asked of the tokens behind these, of rows with a `Course`."""
        if self.draws is None:
            return self
        return replace(self, draws=replace(self.draws, step=self.draws.step + 1))


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


@dataclass(slots=True)
class Course:
    """What lies before rows of which nothing is asked but a token at a time, greedy or drawn."""

    tokens: int  # that all of them may still get
    ends: Int64s  # [rows, n] tokens that end each; -1: none

    @classmethod
    def of_none(cls) -> Course:
        """That of no rows, which never ends."""
        return cls(sys.maxsize, np.zeros((0, 1), np.int64))

    def goes_on(self, sampled: Sampled) -> bool:
        """Whether none of the rows ends by these tokens, their next ones. To be asked of each."""
        self.tokens -= 1
        if self.tokens < 1 or sampled.bad.any():
            return False
        return not (self.ends == sampled.tokens[:, None]).any()


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
    """Put the sampled rows' tokens in place, a chunk of rows at a time."""
    assert batch.draws is not None
    edit_of = np.full(batch.size, -1, np.int64)
    if batch.edits is not None:
        edit_of[batch.edits.rows] = np.arange(len(batch.edits.rows))
    draws = batch.draws.take(np.flatnonzero(~bad[batch.draws.rows]))
    u = uniforms(draws.seed, draws.step)
    limited = (draws.top_k > 0) & (draws.top_k < raw.shape[1])
    best = np.flatnonzero(limited)
    best = best[np.argsort(draws.top_k[best], kind="stable")]  # like with like costs least
    most = max(1, _CHUNK_FLOATS // raw.shape[1])
    for which, draw in ((np.flatnonzero(~limited), _draw_of_all), (best, _draw_of_best)):
        for start in range(0, len(which), most):
            here = which[start : start + most]
            part = draws.take(here)
            chunk = raw[part.rows]
            if edited is not None:
                changed = np.flatnonzero(edit_of[part.rows] >= 0)
                chunk[changed] = edited[edit_of[part.rows[changed]]]
            tokens[part.rows] = draw(chunk, peak[part.rows], part, u[here])


def _draw_of_best(x: Float32s, peak: Float32s, draws: Draws, u: Float64s) -> Int64s:
    """The tokens of `draws` with a top-k from their logits x [rows, vocab]: only the k count."""
    ids, values = best_of(x, draws.top_k)
    p = np.exp((values - peak[:, None]) * (1 / draws.temperature[:, None]))
    mass = (p * (p >= _floors(p, draws)[:, None])).cumsum(1, dtype=np.float64)
    target = u * mass[:, -1]
    chosen: Int64s = ids[np.arange(len(ids)), (mass <= target[:, None]).sum(1)]
    return chosen


def _draw_of_all(x: Float32s, peak: Float32s, draws: Draws, u: Float64s) -> Int64s:
    """The tokens of `draws` without a top-k; x [rows, vocab] are their logits, overwritten."""
    # Relative to the likeliest token, so that no temperature overflows; that one's p is 1.
    x -= peak[:, None]
    x *= 1 / draws.temperature[:, None]
    p = torch.from_numpy(x).exp_().numpy()
    floors = _floors(p, draws)
    if floors.any():
        p *= p >= floors[:, None]
    return _invert(p, u)


def best_of(x: Float32s, k: Int64s) -> tuple[Int64s, Float32s]:
    """Ids, ascending, and values of the k[i] largest of each x[i] and of all equal to their least.

    Both are [rows, width]; rows with fewer are filled up with values of -inf, at any ids.
    """
    rows, vocab = x.shape
    groups = vocab // _GROUP
    coarse = x
    if int(k.max()) * 2 <= groups:
        # The k-th largest of the maxima of groups is a bound that at least k reach, and few more.
        coarse = x[:, : groups * _GROUP].reshape(rows, _GROUP, groups).max(1)
    flat = np.flatnonzero(x >= _kth_largest(coarse, k)[:, None])
    at, found = np.divmod(flat, vocab)
    counts = np.bincount(at, minlength=rows)
    place = _places(counts)
    ids = np.zeros((rows, max(int(counts.max()), int(k.max()))), np.int64)
    values = np.full(ids.shape, -np.inf, np.float32)
    ids[at, place] = found
    values[at, place] = x.ravel()[flat]
    values[values < _kth_largest(values, k)[:, None]] = -np.inf
    return ids, values


def _kth_largest(x: Float32s, k: Int64s) -> Float32s:
    """The k[i]-th largest of each x[i]."""
    largest: Float32s = torch.from_numpy(x).topk(int(k.max()), 1).values.numpy()
    return largest[np.arange(len(x)), k - 1]


def _places(counts: Int64s) -> Int64s:
    """0, 1, … counts[i] - 1 for each i, one after the other."""
    return np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)


def _floors(p: Float32s, draws: Draws) -> Float32s:
    """What each row of weights p [rows, width] must reach to be kept by min-p and top-p."""
    floors = draws.min_p.astype(np.float32)
    rows = np.flatnonzero(draws.top_p < 1)
    if len(rows):
        floors[rows] = _nucleus_floors(p[rows], floors[rows], draws.top_p[rows])
    return floors


def _nucleus_floors(p: Float32s, floors: Float32s, top_p: Float64s) -> Float32s:
    """The least of the smallest set of each row that has `top_p` of what its floor keeps of p.

    As a floor it keeps all tokens that are as likely as the last one of the set. No weight is above
    1. Sums run from left to right, so that the zeros that fill up a row do not change them.
    """
    rows = np.arange(len(p))
    kept = p * (p >= floors[:, None]) if floors.any() else p
    # The bits of positive floats are in the order of their values: the leading ones are buckets.
    bits = kept.view(np.int32) >> _FINE_BITS
    keys = (bits + (rows * _BUCKETS)[:, None]).ravel()
    mass = np.bincount(keys, kept.ravel(), len(p) * _BUCKETS).reshape(len(p), _BUCKETS)
    below = mass.cumsum(1)
    spare = below[:, -1] - top_p * below[:, -1]
    bucket = np.minimum((below <= spare[:, None]).sum(1), bits.max(1))
    inside = np.flatnonzero(bits == bucket[:, None])
    counts = np.bincount(inside // p.shape[1], minlength=len(p))
    width = int(counts.max())
    candidates = np.zeros((len(p), width), np.float32)
    candidates[np.repeat(rows, counts), _places(counts)] = kept.ravel()[inside]
    candidates.sort(1)
    dropped = candidates.cumsum(1, dtype=np.float64)
    dropped += (below[rows, bucket] - mass[rows, bucket])[:, None]
    first = (dropped <= spare[:, None]).sum(1).clip(width - counts, width - 1)
    least: Float32s = candidates[rows, first]
    return least


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
    asking = logits[torch.from_numpy(rows)]
    total = asking.logsumexp(1).numpy()[:, None]
    raw = asking.numpy()
    at, most = np.arange(len(rows)), min(int(counts.max()), raw.shape[1])
    top_ids = np.zeros((len(rows), most), np.int64)
    if most:
        ids, values = best_of(raw, np.full(len(rows), most))
        order = np.argsort(-values, axis=1, kind="stable")[:, :most]
        top_ids = np.take_along_axis(ids, order, 1)
    with np.errstate(invalid="ignore"):  # rows of infinities, which are bad and report nothing
        chosen = raw[at, tokens[rows]] - total[:, 0]
        top = raw[at[:, None], top_ids] - total
    return Logprobs(
        rows, np.maximum(chosen, LOWEST_LOGPROB), top_ids, np.maximum(top, LOWEST_LOGPROB), counts
    )
