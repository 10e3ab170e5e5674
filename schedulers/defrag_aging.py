"""Defragging with a bounded wait: the published score, plus age.

Let S be the score of `defrag`, T the parameter `patience`, and m the number of stages that can be
non-empty on this rank. At each decision, among the runnable stages,

    q(s)   = S(s) / max S                    at most 1
    age(s) = decisions since s became runnable or was last served, whichever is later
    P(s)   = (T - 1/2) q(s) + age(s)

and the stage of the highest P runs, of equals the earliest on the chain. A stage that has waited T
decisions longer than another goes first, whatever their scores. (A decision is one executed batch.
While s stays runnable its oldest row cannot leave unserved, so age(s) is what that row has waited
since the stage could run or was last served.)

Bound: a runnable stage is served within T + m - 1 decisions, the first one at which it is runnable
included, whatever arrives and wherever it arrives.

Proof. Count decisions from i = 0, the first one at which s is runnable (since it was last served,
if it was). While s is not served, age(s) = i at decision i.
1. If t is served instead of s at decision i, then age(t) >= i - T + 1. Otherwise age(t) <= i - T,
   ages being integers, and P(t) <= (T - 1/2) + (i - T) = i - 1/2 < i <= P(s). This holds in
   floating point too, and however ties are broken: integers and halves are exact, q(t) <= 1 after
   rounding, and rounding is monotone.
2. A stage t served at decision k has at most age i - k - 1 at a later decision i, so by 1 it is
   served again before s only if i - k - 1 >= i - T + 1, that is, if k <= T - 2. Emptying and
   filling again only makes it younger.
3. Hence each of the m - 1 other stages is served instead of s at most once among the decisions
   i = T - 1, T, T + 1, …; s is passed over at most T - 1 times before them and m - 1 times among
   them, and the next decision serves it: decision number T + m - 1.

The bound is tight for m >= 2: an adversary that keeps all other stages non-empty, floods one of
them for T decisions and then each of the rest in turn, makes s wait exactly that long. (The tests
contain it.)

In rows: a row behind n others of its stage, where a batch takes B rows or all that there are, is
served within ceil((n + 1) / B) (T + m - 1) decisions: each batch of its stage takes the oldest B.
Where the batch policy has minima above 1 the count starts at most its linger after the row joined,
since its stage stays runnable from then on. A stage whose rows are cancelled until it is no longer
runnable starts anew.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from asyncmoe.scheduler import QueueView, SchedulerContext
from asyncmoe.schedulers.defrag import Defrag, LookAheadParameters

_NO_STAGES: NDArray[np.intp] = np.empty(0, np.intp)
_NO_AGES = np.empty(0)


class DefragAging(Defrag):
    """The runnable stage of the highest score plus age; no stage waits longer than `bound`."""

    class Parameters(LookAheadParameters):
        """As every look-ahead rule, and the weight of age."""

        patience: int | None = Field(
            None,
            ge=1,
            le=1 << 40,
            description="Decisions T of age that outweigh any score; default two per stage",
        )

    def __init__(self, context: SchedulerContext, parameters: Parameters) -> None:
        super().__init__(context, parameters)
        stages = len(context.chain)
        self.patience = 2 * stages if parameters.patience is None else parameters.patience
        self._weight = np.array(self.patience - 0.5)  # numpy converts a Python number each time
        # float64 holds every age exactly, and adds to the scores without a conversion
        self._age = np.zeros(stages)
        self._aged = False  # whether any is above 0
        # the stages that `choose` was last offered, and their ages then
        self._offered, self._offered_age = _NO_STAGES, _NO_AGES

    def bound(self, stages: int | None = None) -> int:
        """Most decisions from a stage's being runnable to its service, both ends included.

        `stages` is the number that can be non-empty on this rank; by default all of the chain.
        """
        return self.patience + (len(self.context.chain) if stages is None else stages) - 1

    def choose(self, view: QueueView) -> int | None:
        stages = view.runnable.nonzero()[0]
        if not len(stages):
            return None
        age = self._age[stages]
        self._offered, self._offered_age = stages, age
        scores = self.scores(view)[stages]
        # S / max S first: the proof needs a quotient that is at most 1 after rounding
        priority = scores / scores[scores.argmax()] * self._weight + age
        return int(stages[priority.argmax()])

    def executed(self, stage: int, rows: int) -> None:
        self._recent.append((stage, rows))  # as `Defrag` does
        if self._offered is _NO_STAGES and not self._aged:
            return
        # a stage that was not runnable, or that ran, starts anew
        if self._aged:
            self._age = np.zeros(len(self._age))
        self._aged = self._offered.tolist() not in ([], [stage])
        if self._aged:
            self._age[self._offered] = self._offered_age + 1.0
            self._age[stage] = 0.0
        self._offered, self._offered_age = _NO_STAGES, _NO_AGES
