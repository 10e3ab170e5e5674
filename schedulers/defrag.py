"""Defragging, as published: run the stage whose rows will meet most company further on.

From "Toward Cost-Efficient Serving of Mixture-of-Experts with Asynchrony" (arXiv 2505.08944). With
Q(s) the tokens that wait at stage s, H(s) the tokens of s that were drained in the last steps, and
s_j the j-th stage after s on the chain, the score of a non-empty stage is

    S(s) = Q(s) + sum over j = 1 … W of d^j [Q(s_j) + H(s_j)]

where stages past the end of the chain count nothing. Rows just before a full queue are moved up so
that both run as one batch. The rule bounds no stage's wait.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from asyncmoe.scheduler import QueueView, Scheduler, SchedulerContext, SchedulerParameters
from asyncmoe.stage import Kind, StageChain


def rows_per_token(context: SchedulerContext) -> NDArray[np.float64]:
    """[stages]: what a depth in rows is divided by to be one in tokens.

    That is the fan-out for expert stages and 1 for the others.
    """
    if not 0 < context.fanout < np.inf:
        raise ValueError(f"SchedulerContext.fanout is {context.fanout}; allowed is above 0, finite")
    chain = context.chain
    kinds = np.array(chain.kinds)
    return np.where(kinds == Kind.EXPERT, context.fanout, 1.0)


def best(scores: NDArray[np.float64], runnable: NDArray[np.bool_]) -> int | None:
    """The runnable stage of the highest score; None if none may run.

    Among equals it is the earliest on the chain.
    """
    stages = runnable.nonzero()[0]  # a few of many, as a rule: cheaper than arrays of the chain
    return int(stages[scores[stages].argmax()]) if len(stages) else None


class LookAhead:
    """The sum over j = 1 … window of decay^j times the value of the j-th stage ahead.

    With `wrap` the chain goes on from H to A0, without it nothing lies beyond H. No stage is
    counted twice, nor ahead of itself: a window past the whole chain is the whole chain.
    """

    def __init__(self, chain: StageChain, window: int, decay: float, wrap: bool) -> None:
        self._stages = len(chain)
        self._window = min(window, self._stages - 1)
        self._wrap = wrap
        # weights[0] is the stage itself, which is not ahead of itself
        self._weights = np.array([0.0] + [decay**j for j in range(1, self._window + 1)])
        self._line = np.zeros(self._stages + self._window)
        self.values = self._line[: self._stages]  # [stages]: set this, then call

    def __call__(self) -> NDArray[np.float64]:
        """The sums over `values`: [stages], a new array."""
        if self._wrap:
            self._line[self._stages :] = self._line[: self._window]
        ahead: NDArray[np.float64] = np.correlate(self._line, self._weights, "valid")
        return ahead


class LookAheadParameters(SchedulerParameters):
    """The parameters of every rule that looks ahead."""

    decay: float = Field(0.8, ge=0, le=1, description="Weight d of the next stage; d^j of the j-th")
    look_ahead: int = Field(4, ge=0, le=65535, description="Stages W that are looked ahead")
    history: int = Field(4, ge=0, le=256, description="Last decisions that H is taken over")


class Defrag(Scheduler):
    """The runnable stage of the highest S; among equals the earliest on the chain.

    H counts the rows drained in the last `history` executed batches, whatever their stage.
    """

    work_conserving = True

    class Parameters(LookAheadParameters):
        """As every look-ahead rule."""

    def __init__(self, context: SchedulerContext, parameters: LookAheadParameters) -> None:
        super().__init__(context, parameters)
        chain = context.chain
        self._rows_per_token = rows_per_token(context)
        self._divisors: list[float] = self._rows_per_token.tolist()
        self._look_ahead = LookAhead(chain, parameters.look_ahead, parameters.decay, wrap=False)
        # (stage, rows) of the last batches
        self._recent: deque[tuple[int, int]] = deque(maxlen=parameters.history)

    def scores(self, view: QueueView) -> NDArray[np.float64]:
        """[stages]: S of every stage, in tokens; meaningful where the stage is not empty."""
        depth = view.rows / self._rows_per_token
        values = self._look_ahead.values
        values[:] = depth
        drained: dict[int, int] = {}
        for stage, rows in self._recent:  # whole numbers until the end: no rounding error builds up
            drained[stage] = drained.get(stage, 0) + rows
        for stage, rows in drained.items():
            values[stage] += rows / self._divisors[stage]
        return depth + self._look_ahead()

    def choose(self, view: QueueView) -> int | None:
        return best(self.scores(view), view.runnable)

    def executed(self, stage: int, rows: int) -> None:
        self._recent.append((stage, rows))
