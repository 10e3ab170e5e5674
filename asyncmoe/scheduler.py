"""The contract of a scheduler: it sees depths, ages and the stage chain, and names a stage."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from asyncmoe.errors import ProtocolError
from asyncmoe.stage import StageChain


class SchedulerParameters(BaseModel):
    """Base of a scheduler's parameters: the keys of `[scheduler.parameters]`, typed and checked."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @property
    def tracks(self) -> int:
        """Tracks that the chain shall have, for micro-batches that keep apart."""
        return 1

    @property
    def to_all(self) -> bool:
        """Whether each row goes to every rank with experts, and not only to those it chose."""
        return False


class Peers:
    """The ranks, for a rule that agrees with the others. This one stands for a rank alone.

    Rows are counted from the start on, as arrays with one entry per rank; those are not to be
    written to. Rows of this rank for its own experts are in none of them.
    """

    rank = 0  # this one
    homes: tuple[int, ...] = (0,)  # ranks that can be the home of a request
    experts: tuple[int, ...] = (0,)  # ranks that hold experts

    def tell(self, rank: int, message: bytes) -> None:
        """Send `message` to another rank, whose rule gets it by `heard`.

        It arrives once, in order among such messages, but before or behind any rows. To a rank
        that is lost it goes nowhere.
        """
        raise ValueError(f"there is no rank {rank}")

    def sent(self, stage: int) -> NDArray[np.int64]:
        """Rows of this home that have left for `stage`, an expert stage, on each rank."""
        return np.zeros(1, np.int64)

    def held_back(self, stage: int) -> Mapping[int, int]:
        """Rows of this home for `stage` that wait for credits, by rank; not all will leave, if
        their requests are cancelled."""
        return {}

    def arrived(self, stage: int) -> NDArray[np.int64]:
        """Rows for `stage`, an expert stage of this rank, that have come from each rank."""
        return np.zeros(1, np.int64)

    def missing(self, stage: int) -> int:
        """Rows of this home that still wait for something from expert stage `stage`."""
        return 0


@dataclass(frozen=True, slots=True)
class SchedulerContext:
    """What a scheduler knows about its rank, once, at the start."""

    chain: StageChain
    fanout: float  # mean expert rows per token on this rank: expert depths / fanout are tokens
    peers: Peers = field(default_factory=Peers)


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
    # Whether it takes batches through the layers in step with other ranks. Then all ranks must have
    # the same rule and parameters; it is asked while a batch runs, too, and by events alone, never
    # by the clock; and the hooks from `attend` on are called.
    synchronous: ClassVar[bool] = False

    def __init__(self, context: SchedulerContext, parameters: SchedulerParameters) -> None:
        self.context = context
        self.parameters = parameters

    @abstractmethod
    def choose(self, view: QueueView) -> int | None:
        """Return the index of the stage to run next, or None to wait for more rows.

        After None it is asked again when rows or results have arrived and, while nothing runs,
        about once a millisecond (a `synchronous` rule: when anything has happened).
        """

    def executed(self, stage: int, rows: int) -> None:  # noqa: B027 - a hook that few need
        """Take note that a batch of `rows` rows of `stage` has been handed to the device.

        It may be told late, but in order, and before the next `choose` and `attend`.
        Without a `choose` since the last call, the batch was all that was queued on this rank: only
        for a `work_conserving` rule, and as if it had been asked.
        """

    # ---- for a `synchronous` rule; what happened is told first, `attend` and `choose` follow

    def attend(self, rows: NDArray[np.int64]) -> None:  # noqa: B027
        """Something has happened on this rank; `rows` is that of `QueueView`.

        Comes before each `choose`, and also while no stage is runnable.
        """

    def finished(self, stage: int) -> None:  # noqa: B027
        """A batch of `stage` is through: its rows are on their way, or their requests have ended.

        Batches end in the order in which they were `executed`.
        """

    def heard(self, source: int, message: bytes) -> bool:
        """Another rank's rule has told this one something.

        Returns whether anything can go on because of that; if not, nothing follows. Raises
        `ProtocolError` if it makes no sense, which costs the rank its connection.
        """
        raise ProtocolError(f"{type(self).__name__} listens to no rank")

    def lost(self, rank: int) -> None:  # noqa: B027
        """The rank is gone: it will tell nothing any more."""
