"""Where rows go when not the model's router decides: made-up and recorded expert choices.

A source is a function of (seed, request, position, layer) and of nothing else, so that a token has
the same experts in whatever batch it comes, live or virtual.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncmoe.errors import ConfigError
from asyncmoe.workload.draws import Alias, draw_distinct, key_start
from asyncmoe.workload.trace import RoutingTrace, read_routing

MODEL = "model"
ALLOWED = "model, uniform, zipf:S, hot:EXPERTS,SHARE or replay:FILE"
_NUMBER = r"\s*\d*\.?\d+\s*"
_FORMS = re.compile(rf"model|uniform|zipf:{_NUMBER}|hot:\s*\d+\s*,{_NUMBER}|replay:.+")

Choice = tuple[NDArray[np.int64], NDArray[np.float32]]  # experts and weights, [rows, top_k] each


class RoutingSource(ABC):
    """Expert choices of every row of a model."""

    layers: int  # MoE layers
    experts: int  # of each
    top_k: int

    @abstractmethod
    def choose(
        self, layer: int, request_ids: NDArray[np.int64], positions: NDArray[np.int64]
    ) -> Choice:
        """The experts of rows [rows] in MoE layer `layer`: distinct ones for each row."""

    def load(self, tokens: int = 8192) -> NDArray[np.float64]:
        """[layers, experts] share of the rows that each expert gets, from a sample of `tokens`."""
        requests = np.arange(tokens)
        return np.stack(
            [
                np.bincount(
                    self.choose(layer, requests, requests)[0].ravel(), minlength=self.experts
                )
                for layer in range(self.layers)
            ]
        ) / (tokens * self.top_k)


class SkewedRouting(RoutingSource):
    """Experts by popularity, each layer's in an order of its own. All chosen weigh the same."""

    def __init__(self, popularity: NDArray[Any], layers: int, top_k: int, seed: int) -> None:
        """`popularity`: [experts] by rank, above 0."""
        self.layers, self.experts, self.top_k = layers, len(popularity), top_k
        self._starts = [key_start(seed, layer) for layer in range(layers)]
        orders = [
            np.random.default_rng((seed, layer)).permutation(self.experts)
            for layer in range(layers)
        ]
        self._alias = [Alias(popularity[order]) for order in orders]
        self._weights = np.empty((0, top_k), np.float32)

    def choose(
        self, layer: int, request_ids: NDArray[np.int64], positions: NDArray[np.int64]
    ) -> Choice:
        rows = len(request_ids)
        if rows > len(self._weights):  # all alike, so that one table serves every batch
            self._weights = np.full((2 * rows, self.top_k), 1 / self.top_k, np.float32)
        alias, start = self._alias[layer], self._starts[layer]
        drawn = draw_distinct(alias, start, request_ids, positions, self.top_k)
        return drawn, self._weights[:rows]


class ReplayedRouting(RoutingSource):
    """A recorded run's choices. Requests and positions beyond those recorded start over."""

    def __init__(self, trace: RoutingTrace) -> None:
        self._trace = trace
        self.layers, self.experts = trace.layers, trace.experts
        self.top_k = trace.top_k

    def choose(
        self, layer: int, request_ids: NDArray[np.int64], positions: NDArray[np.int64]
    ) -> Choice:
        trace = self._trace
        request = request_ids % len(trace.tokens)
        token = trace.first[request] + positions % trace.tokens[request]
        return trace.chosen[layer, token].astype(np.int64), trace.weights[layer, token]

    def load(self, tokens: int = 0) -> NDArray[np.float64]:
        """Of all that was recorded."""
        trace = self._trace
        before = trace.tokens.cumsum() - trace.tokens  # tokens of earlier requests
        recorded = (trace.first - before).repeat(trace.tokens) + np.arange(trace.tokens.sum())
        counts = [
            np.bincount(trace.chosen[layer, recorded].ravel(), minlength=self.experts)
            for layer in range(self.layers)
        ]
        return np.stack(counts) / (len(recorded) * self.top_k)


def check_routing(text: str) -> None:
    """Raise `ConfigError` if `text` has none of the forms; the model is not asked if it fits."""
    if not _FORMS.fullmatch(text):
        raise ConfigError(f"model.routing is {text!r}; allowed: {ALLOWED}")


def make_routing(
    text: str, layers: int, experts: int, top_k: int, seed: int = 0
) -> RoutingSource | None:
    """The source that `text` names, for a model of this shape; None for the model's own router.

    Raises `ConfigError` naming the text and what is allowed, or what of a recording does not fit.
    """
    name, _, argument = text.partition(":")
    parts = [part.strip() for part in argument.split(",")]
    try:
        match name, parts:
            case "model", [""]:
                return None
            case "uniform", [""]:
                return SkewedRouting(np.ones(experts), layers, top_k, seed)
            case "zipf", [power] if 0 <= float(power) <= 8:
                popularity = np.arange(1, experts + 1) ** -float(power)
                return SkewedRouting(popularity, layers, top_k, seed)
            case "hot", [number, share] if 0 < int(number) < experts and 0 < float(share) < 1:
                hot, part = int(number), float(share)
                cold = np.full(experts - hot, (1 - part) / (experts - hot))
                popularity = np.concatenate([np.full(hot, part / hot), cold])
                return SkewedRouting(popularity, layers, top_k, seed)
            case "replay", _ if argument:
                return _replayed(Path(argument).expanduser(), layers, experts, top_k)
    except ValueError:
        pass
    raise ConfigError(
        f"model.routing is {text!r}; allowed: {ALLOWED}, with S from 0 to 8, fewer hot experts "
        f"than the {experts} that there are, and a SHARE between 0 and 1"
    )


def _replayed(path: Path, layers: int, experts: int, top_k: int) -> ReplayedRouting:
    trace = read_routing(path)
    for what, found, wanted in (
        ("layers", trace.layers, layers),
        ("experts", trace.experts, experts),
        ("experts of a row", trace.top_k, top_k),
    ):
        if found != wanted:
            raise ConfigError(f"{path} has {found} {what}; the model has {wanted}")
    return ReplayedRouting(trace)
