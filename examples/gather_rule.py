"""A scheduling rule that waits a moment for company: docs/study.md says what that is worth.

    asyncmoe compare --virtual --ranks 8 --schedulers defrag_aging,./examples/gather_rule.py:Gather

As the default rule, but a stage that could run is held back for a short time where more rows are
likely to come: an attention stage while rows of its own layer are still with experts, which is
known; an expert stage always, since what other ranks are about to send is not known.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from pydantic import Field

from asyncmoe.scheduler import QueueView
from asyncmoe.schedulers.defrag_aging import DefragAging
from asyncmoe.stage import Kind


class Gather(DefragAging):
    """The choice of `defrag_aging` among the stages that have waited long enough for company."""

    class Parameters(DefragAging.Parameters):
        """As the default rule, and how long a stage's oldest row may be held back."""

        attention_hold_ms: float = Field(3.0, ge=0)
        expert_hold_ms: float = Field(1.0, ge=0)

    work_conserving = False

    def choose(self, view: QueueView) -> int | None:
        runnable = view.runnable.copy()
        for stage in np.flatnonzero(runnable).tolist():
            waited_ms = 1e3 * (view.now_s - view.oldest_s[stage])
            runnable[stage] = waited_ms >= self._hold_ms(stage)
        return super().choose(dataclasses.replace(view, runnable=runnable))

    def _hold_ms(self, stage: int) -> float:
        """How long rows of a stage may be held back now."""
        holds, context = self.parameters, self.context
        assert isinstance(holds, self.Parameters)
        if context.chain.kinds[stage] is Kind.EXPERT:
            return holds.expert_hold_ms
        is_first = context.chain.layer(stage) == 0
        more_to_come = not is_first and context.peers.missing(stage - 1) > 0
        return holds.attention_hold_ms if more_to_come else 0.0
