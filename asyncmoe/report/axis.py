"""Axes of a chart: where values lie, and round numbers to mark."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

_STEPS = (1, 2, 2.5, 5, 10)


@dataclass(frozen=True, slots=True)
class Axis:
    """From `low` to `high`, linear or logarithmic."""

    label: str
    low: float
    high: float
    log: bool = False

    def place(self, value: float) -> float:
        """0 at `low`, 1 at `high`."""
        if self.log:
            value = max(value, self.low)
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Some three to seven round values."""
        if self.log:
            return self._log_ticks()
        step = _round_up((self.high - self.low) / 5)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [number * step for number in range(first, last + 1)]

    def _log_ticks(self) -> list[float]:
        decades = math.log10(self.high / self.low)
        factors: tuple[float, ...] = (1,) if decades > 3 else (1, 3) if decades > 1.2 else (1, 2, 5)
        if decades < 0.5:
            factors = (1, 1.5, 2, 3, 4, 5, 7)
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        every = [factor * 10.0**power for power in powers for factor in factors]
        return [tick for tick in every if self.low * 0.999 <= tick <= self.high * 1.001]


def linear(label: str, values: Iterable[float]) -> Axis:
    """From 0 to a little beyond the largest value."""
    high = max(values, default=0.0)
    return Axis(label, 0.0, high * 1.06 if high > 0 else 1.0)


def logarithmic(label: str, values: Iterable[float]) -> Axis:
    """Around all values above 0."""
    above = [value for value in values if value > 0] or [1.0]
    low, high = min(above) / 1.15, max(above) * 1.15
    return Axis(label, low, high, log=True)


def short(value: float) -> str:
    """A number in few characters: 15k, 36M, 1024, 0.02, 5e-4."""
    if value == 0:
        return "0"
    if abs(value) < 1e-3:
        power = math.floor(math.log10(abs(value)))
        return f"{value / 10.0**power:.3g}e{power}"
    if 1000 <= abs(value) < 10000:
        return f"{value:.4g}"
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.3g}"


def _round_up(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in _STEPS if factor * power >= step * 0.999)
