"""The contract of a scheduler: it sees depths, ages and the stage chain, and names a stage."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from asyncmoe.stage import StageChain


class SchedulerParameters(BaseModel):
    """Base of a scheduler's parameters: the keys of `[scheduler.parameters]`, typed and checked."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True, slots=True)
class SchedulerContext:
    """What a scheduler knows about its rank, once, at the start."""

    chain: StageChain
    fanout: float  # mean expert rows per token on this rank: expert depths / fanout are tokens


@dataclass(slots=True)
class QueueView:
    """The micro-queues at one decision. All arrays have one entry per stage of the chain."""

    rows: NDArray[np.int64]  # ready rows; 0 where a stage has none
    runnable: NDArray[np.bool_]  # non-empty and let through by the batch policy
    oldest_decision: NDArray[np.int64]  # decision number when the stage's oldest row joined
    oldest_s: NDArray[np.float64]  # loop time when the stage's oldest row joined
    decision: int  # number of this decision, counting from 0; grows by one per executed batch
    now_s: float


class Scheduler(ABC):
    """Chooses the next stage of one rank.

    Promises, for every implementation:
    - `choose` returns a stage whose `view.runnable` is true, or None to wait, and None whenever
      nothing is runnable;
    - it keeps no reference to the view's arrays and does not write to them;
    - the same sequence of calls gives the same answers: no clock, no randomness of its own, so
      that the virtual world replays exactly;
    - its cost does not grow with the rows that are queued.
    """

    Parameters: type[SchedulerParameters] = SchedulerParameters
    # Whether `choose` never waits while a stage is runnable: then the executor need not ask it
    # about a batch that is alone on its rank.
    work_conserving: ClassVar[bool] = False

    def __init__(self, context: SchedulerContext, parameters: SchedulerParameters) -> None:
        self.context = context
        self.parameters = parameters

    @abstractmethod
    def choose(self, view: QueueView) -> int | None:
        """Return the index of the stage to run next, or None to wait for more rows.

        After None it is asked again when rows or results have arrived and, while nothing runs,
        about once a millisecond.
        """

    def executed(self, stage: int, rows: int) -> None:  # noqa: B027 - a hook that few need
        """Take note that a batch of `rows` rows of `stage` has been handed to the device.

        Without a `choose` since the last call, the batch was all that was queued on this rank: only
        for a `work_conserving` rule, and as if it had been asked.
        """
