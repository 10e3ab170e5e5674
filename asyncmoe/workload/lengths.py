"""How long prompts and answers are: from public request sets, from a file, or fixed."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncmoe.errors import ConfigError
from asyncmoe.workload.table import read_table

_DATA = Path(__file__).with_name("lengths.json")
_GRID = np.linspace(0.0, 1.0, 2001)
_TAIL = 0.05  # below and above this share a tenth's own percentiles end
ALLOWED = "sharegpt, gsm8k, fixed:PROMPT,OUTPUT or file:PATH"

Pairs = tuple[NDArray[np.int64], NDArray[np.int64]]  # prompt and output tokens, [n] each


class Lengths(ABC):
    """A source of (prompt tokens, output tokens)."""

    @abstractmethod
    def draw(self, count: int, rng: np.random.Generator) -> Pairs:
        """`count` pairs, each number at least 1."""


class FixedLengths(Lengths):
    """All requests alike."""

    def __init__(self, prompt: int, output: int) -> None:
        self._pair = prompt, output

    def draw(self, count: int, rng: np.random.Generator) -> Pairs:
        prompt, output = self._pair
        return np.full(count, prompt), np.full(count, output)


class FileLengths(Lengths):
    """The pairs of a file in its order, from the start again when they are used up."""

    def __init__(self, path: Path) -> None:
        """Raises `ConfigError` for a file that is no table of lengths."""
        table = read_table(path)
        self._prompt, self._output = table.prompt_tokens, table.output_tokens

    def draw(self, count: int, rng: np.random.Generator) -> Pairs:
        at = np.arange(count) % len(self._prompt)
        return self._prompt[at], self._output[at]


class MeasuredLengths(Lengths):
    """A public request set, given by percentiles.

    A prompt's length is drawn from the prompts' percentiles, its answer's from those of the tenth
    of the prompts that it belongs to, so that long prompts have the answers that they have in the
    set. A tenth's five percentiles say nothing of its ends: there it has the shape of all answers.
    What comes of that is stretched, tenth by tenth alike, so that all answers together have
    exactly the percentiles that were measured.
    """

    def __init__(self, data: dict[str, Any]) -> None:
        """`data`: one entry of lengths.json."""
        share = np.array(data["percentiles"], np.float64) / 100
        self._share, self._prompt = share, np.array(data["prompt_tokens"], np.float64)
        self._output = np.array(data["output_tokens"], np.float64)
        self._longest: int | None = data["longest"]
        tenths = data["tenths"]
        self._ends = np.cumsum([tenth["share"] for tenth in tenths])
        inner = np.array(data["tenth_percentiles"], np.float64) / 100
        self._tenths = np.stack([self._quantiles(inner, t["output_tokens"]) for t in tenths])
        self._stretch = self._mixture_share()

    def draw(self, count: int, rng: np.random.Generator) -> Pairs:
        prompt, output = self._draw(count, rng)
        while self._longest is not None:
            over = np.flatnonzero(prompt + output > self._longest)
            if not len(over):
                break
            prompt[over], output[over] = self._draw(len(over), rng)
        return prompt, output

    def _draw(self, count: int, rng: np.random.Generator) -> Pairs:
        place, inside = rng.random(count), rng.random(count)
        tenth = np.minimum(np.searchsorted(self._ends, place, "right"), len(self._ends) - 1)
        at = inside * (len(_GRID) - 1)
        low = at.astype(np.int64)
        table = self._tenths
        rough = table[tenth, low] + (at - low) * (table[tenth, low + 1] - table[tenth, low])
        values, shares = self._stretch
        output = np.interp(np.interp(rough, values, shares), self._share, self._output)
        prompt = np.interp(place, self._share, self._prompt)
        return _whole(prompt), _whole(output)

    def _quantiles(self, inner: NDArray[np.float64], values: list[float]) -> NDArray[np.float64]:
        """[grid] answers of a tenth: its own percentiles, and the ends in the shape of all."""
        own = np.interp(_GRID, inner, values)
        whole = np.interp(_GRID, self._share, self._output)
        below, above = np.interp((_TAIL, 1 - _TAIL), self._share, self._output)
        low, high = _GRID < _TAIL, _GRID > 1 - _TAIL
        own[low] = values[0] * whole[low] / below
        own[high] = values[-1] * whole[high] / above
        return own

    def _mixture_share(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Lengths, and the share of rough answers up to each: tenths weighted by their size."""
        weights = np.diff(self._ends, prepend=0.0)
        values = np.unique(self._tenths)
        below = [
            weight * np.interp(values, np.maximum.accumulate(tenth + 1e-9 * _GRID), _GRID)
            for weight, tenth in zip(weights, self._tenths, strict=True)
        ]
        return values, np.sum(below, axis=0)


def make_lengths(text: str) -> Lengths:
    """The lengths that `text` names. Raises `ConfigError` naming it and what is allowed."""
    name, _, argument = text.partition(":")
    if name in ("sharegpt", "gsm8k") and not argument:
        return MeasuredLengths(_measured()[name])
    if name == "file" and argument:
        return FileLengths(Path(argument).expanduser())
    if name == "fixed":
        parts = argument.split(",")
        if len(parts) == 2 and all(part.strip().isdecimal() for part in parts):
            prompt, output = (int(part) for part in parts)
            if prompt > 0 and output > 0:
                return FixedLengths(prompt, output)
    raise ConfigError(f"workload.lengths is {text!r}; allowed: {ALLOWED}")


@cache
def _measured() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(_DATA.read_text("utf-8"))
    return data


def _whole(values: NDArray[np.float64]) -> NDArray[np.int64]:
    return np.maximum(1, np.rint(values)).astype(np.int64)
