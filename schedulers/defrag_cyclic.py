"""Defragging in the form of the paper's artifact: the look-ahead wraps around the chain.

It differs from `defrag` (arXiv 2505.08944, as published) in two points: the stage after H is A0,
since a sequence that goes on starts there again, and H(s) is the mean depth of s at the last
decisions and not what was drained from it. The artifact keeps a separate ring for attention and
for expert layers; here, where one rank may hold both, it is the one chain.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from asyncmoe.scheduler import QueueView, Scheduler, SchedulerContext
from asyncmoe.schedulers.defrag import LookAhead, LookAheadParameters, best, rows_per_token


class DefragCyclic(Scheduler):
    """The runnable stage of the highest S; among equals the earliest on the chain.

    H is the mean over the last `history` decisions that led to a batch, the current one not
    included, or over those that there were.
    """

    work_conserving = True

    class Parameters(LookAheadParameters):
        """As every look-ahead rule."""

    def __init__(self, context: SchedulerContext, parameters: LookAheadParameters) -> None:
        super().__init__(context, parameters)
        stages = len(context.chain)
        self._rows_per_token = rows_per_token(context)
        self._look_ahead = LookAhead(
            context.chain, parameters.look_ahead, parameters.decay, wrap=True
        )
        self._history = parameters.history
        self._latest = np.zeros(stages, np.int64)  # depths in rows when `choose` was last asked
        self._asked = False  # since the last batch
        self._past = np.zeros((self._history, stages), np.int64)  # ring of depths at decisions
        self._past_sum = np.zeros(stages, np.int64)
        self._mean_tokens = np.zeros(stages)  # H
        self._decisions = 0

    def scores(self, view: QueueView) -> NDArray[np.float64]:
        """[stages]: S of every stage, in tokens; meaningful where the stage is not empty."""
        depth = view.rows / self._rows_per_token
        np.add(depth, self._mean_tokens, out=self._look_ahead.values)
        return depth + self._look_ahead()

    def choose(self, view: QueueView) -> int | None:
        self._latest[:] = view.rows
        self._asked = True
        return best(self.scores(view), view.runnable)

    def executed(self, stage: int, rows: int) -> None:
        if self._history == 0:
            return
        if not self._asked:
            self._latest[:] = 0
            self._latest[stage] = rows
        self._asked = False
        oldest = self._past[self._decisions % self._history]
        self._past_sum += self._latest - oldest
        oldest[:] = self._latest
        self._decisions += 1
        seen = min(self._decisions, self._history)
        self._mean_tokens = self._past_sum / (seen * self._rows_per_token)
