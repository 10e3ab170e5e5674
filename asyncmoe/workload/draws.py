"""Random draws that are functions of a key: the same for a row in whatever batch it comes.

The numbers are a counter-based hash (the finaliser of splitmix64), so that any subset of rows in
any order gets what it would get alone.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from asyncmoe import native

Keys = NDArray[np.uint64]  # [rows] one per row

_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX_A, _MIX_B = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_REQUEST, _POSITION = np.uint64(0xD1342543DE82EF95), np.uint64(0x2545F4914F6CDD1D)
_32 = np.uint64(32)
_MASK = 2**64 - 1
_LONGER = 4  # the second try draws this many times as many


def key_start(seed: int, layer: int) -> int:
    """What the keys of all rows of a layer have in common."""
    return (seed * 0xA0761D6478BD642F + (layer + 1) * 0xE7037ED1A0B428DB) & _MASK


def draw_distinct(
    alias: Alias,
    start: int,
    request_ids: NDArray[np.int64],
    positions: NDArray[np.int64],
    count: int,
) -> NDArray[np.int64]:
    """[rows, count] distinct values of each row: the first ones of an endless series of draws.

    That is drawing without replacement, by weight. `count` must not exceed the values of weight.
    `start`: see `key_start`.
    """
    if native.columns is None:
        return _distinct(alias, _keys(start, request_ids, positions), count)
    drawn: NDArray[np.int64] = native.columns.draw_distinct(
        start, request_ids, positions, alias.limit, alias.other, alias.weights, count
    )
    return drawn


def _keys(start: int, request_ids: NDArray[np.int64], positions: NDArray[np.int64]) -> Keys:
    keys = request_ids.view(np.uint64) * _REQUEST
    keys += positions.view(np.uint64) * _POSITION
    keys += np.uint64(start)
    return _mixed(keys)


class Alias:
    """Draws from a fixed distribution over n values in constant time (Walker's alias method)."""

    def __init__(self, weights: NDArray[np.float64]) -> None:
        """`weights`: [n], at least 0, not all 0."""
        count = len(weights)
        self.weights = weights / weights.sum()
        share = self.weights * count
        other = np.arange(count)
        small = [i for i in range(count) if share[i] < 1]
        large = [i for i in range(count) if share[i] >= 1]
        limit = np.ones(count)
        while small and large:
            low, high = small.pop(), large[-1]
            limit[low], other[low] = share[low], high
            share[high] -= 1 - share[low]
            if share[high] < 1:
                small.append(large.pop())
        self._count = np.uint64(count)
        self.limit = np.minimum(limit * 2.0**32, 2.0**32 - 1).astype(np.uint32)
        self.limit[limit >= 1] = 0xFFFFFFFF  # what is at its own value stays there, bar 2**-32
        self.other = other

    def __call__(self, keys: Keys, count: int) -> NDArray[np.int64]:
        """[rows, count] values. The first ones are those of a call for fewer."""
        words = -(-count // 2)
        steps = np.arange(1, words + 1, dtype=np.uint64) * _STEP
        bits = _mixed(keys[:, None] + steps).view(np.uint32)[:, :count]
        scaled = bits * self._count
        place = (scaled >> _32).astype(np.int64)
        rest = scaled.astype(np.uint32)  # the lower half
        return np.where(rest <= self.limit[place], place, self.other[place])


def _distinct(alias: Alias, keys: Keys, count: int) -> NDArray[np.int64]:
    """The plain twin of `draw_distinct` in native/src/columns."""
    drawn = alias(keys, count)
    ordered = np.sort(drawn, axis=1)
    again = np.flatnonzero((ordered[:, 1:] == ordered[:, :-1]).any(1))
    if len(again):
        drawn[again] = _from_longer_series(alias, keys[again], count)
    return drawn


def _from_longer_series(alias: Alias, keys: Keys, count: int) -> NDArray[np.int64]:
    series = alias(keys, _LONGER * count)
    order = series.argsort(axis=1, kind="stable")
    ordered = np.take_along_axis(series, order, 1)
    first = np.ones(series.shape, np.bool_)
    np.put_along_axis(first, order[:, 1:], ordered[:, 1:] != ordered[:, :-1], 1)
    found = first.sum(1)
    # First occurrences to the front, in their order.
    chosen = np.take_along_axis(series, (~first).argsort(axis=1, kind="stable"), 1)[:, :count]
    short = np.flatnonzero(found < count)
    if len(short):
        chosen[short] = _completed(alias, keys[short], chosen[short], found[short])
    return chosen


def _completed(
    alias: Alias, keys: Keys, chosen: NDArray[np.int64], found: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Draw what rows still lack from the weights of what they do not have.

    That has the distribution of going on until something new comes, however long that takes.
    """
    rows, count = chosen.shape
    left = np.broadcast_to(alias.weights, (rows, len(alias.weights))).copy()
    for column in range(count):
        lacking = np.flatnonzero(found <= column)
        if len(lacking):
            step = np.uint64((_LONGER * count + column + 1) * int(_STEP) & _MASK)
            share = (_mixed(keys[lacking] + step) >> np.uint64(11)) * 2.0**-53
            sums = left[lacking].cumsum(1)
            target = share * sums[:, -1]
            chosen[lacking, column] = (sums > target[:, None]).argmax(1)
        np.put_along_axis(left, chosen[:, column : column + 1], 0.0, 1)
    return chosen


def _mixed(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's finaliser; works in the memory of `bits`."""
    bits ^= bits >> np.uint64(30)
    bits *= _MIX_A
    bits ^= bits >> np.uint64(27)
    bits *= _MIX_B
    bits ^= bits >> np.uint64(31)
    return bits
