"""When requests come: at random, in bursts, as a trace says, all at once, or one for one."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from asyncmoe.errors import ConfigError
from asyncmoe.workload.table import read_arrivals

ALLOWED = "poisson:RATE, bursty:RATE,SIZE, closed:N, trace:PATH or all (rates in requests/s)"
_MOST = 1 << 24  # requests of one run


class Arrivals(ABC):
    """A rule for the times at which requests come."""

    in_flight: int | None = None  # of a closed loop: a new one comes when one ends

    @abstractmethod
    def draw(
        self, count: int | None, duration_s: float | None, rng: np.random.Generator
    ) -> NDArray[np.float64]:
        """Arrival times in seconds from the start, ascending; at most `count`, before `duration_s`.

        At least one of the two is given; rules without an end of their own need it.
        """


class AllAtOnce(Arrivals):
    """Everything at the start."""

    def draw(
        self, count: int | None, duration_s: float | None, rng: np.random.Generator
    ) -> NDArray[np.float64]:
        if count is None:
            raise ConfigError(
                "workload.arrivals is 'all', which needs workload.requests to say how many; or "
                f"arrivals may be another: {ALLOWED}"
            )
        return np.zeros(count)


class ClosedLoop(Arrivals):
    """`in_flight` requests at any time."""

    _KINDS = 4096  # different requests of a run that ends by time; then they come again

    def __init__(self, in_flight: int) -> None:
        self.in_flight = in_flight

    def draw(
        self, count: int | None, duration_s: float | None, rng: np.random.Generator
    ) -> NDArray[np.float64]:
        assert self.in_flight is not None
        return np.zeros(self.in_flight + self._KINDS if count is None else count)


class Bursty(Arrivals):
    """Bursts of `size` requests at random times; with size 1 a Poisson process."""

    def __init__(self, rate: float, size: int = 1) -> None:
        """`rate`: requests per second, all bursts together."""
        self._rate, self._size = rate, size

    def draw(
        self, count: int | None, duration_s: float | None, rng: np.random.Generator
    ) -> NDArray[np.float64]:
        bursts_per_s = self._rate / self._size
        wanted = _MOST if count is None else count
        if duration_s is not None:
            mean = self._rate * duration_s
            # Six deviations more than there will be; what is beyond the time is cut off.
            expected = mean + 6 * self._size * math.sqrt(mean / self._size + 1) + self._size
            wanted = min(wanted, math.ceil(expected))
        if wanted > _MOST:
            raise ConfigError(f"workload: {wanted} requests; allowed are {_MOST}")
        gaps_s = rng.exponential(1 / bursts_per_s, -(-wanted // self._size))
        times_s = np.repeat(np.cumsum(gaps_s), self._size)[:wanted]
        return times_s if duration_s is None else times_s[times_s < duration_s]


class Trace(Arrivals):
    """The times of a file. Its lengths are used with `workload.lengths = "file:PATH"`."""

    def __init__(self, path: Path) -> None:
        """Raises `ConfigError` if the file has no arrivals."""
        self._arrival_s = read_arrivals(path)

    def draw(
        self, count: int | None, duration_s: float | None, rng: np.random.Generator
    ) -> NDArray[np.float64]:
        times_s = self._arrival_s[:count]
        return times_s if duration_s is None else times_s[times_s < duration_s]


def make_arrivals(text: str) -> Arrivals:
    """The rule that `text` names. Raises `ConfigError` naming it and what is allowed."""
    name, _, argument = text.partition(":")
    parts = [part.strip() for part in argument.split(",")]
    try:
        match name, parts:
            case "all", [""]:
                return AllAtOnce()
            case "poisson", [rate]:
                return Bursty(_positive(rate))
            case "bursty", [rate, size] if int(size) > 0:
                return Bursty(_positive(rate), int(size))
            case "closed", [number] if 0 < int(number) <= _MOST:
                return ClosedLoop(int(number))
            case "trace", _ if argument:
                return Trace(Path(argument).expanduser())
    except ValueError:
        pass
    raise ConfigError(f"workload.arrivals is {text!r}; allowed: {ALLOWED}")


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise ValueError(text)
    return value
