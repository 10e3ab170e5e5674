"""The batch policy: how many rows of a stage run at once, and when a stage may run at all.

It stands beside the scheduler: the policy says which stages may run, the scheduler which of them
does. A stage may run once it has its kind's minimum of rows, or once its oldest row has lingered.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from asyncmoe import native
from asyncmoe.config import BatchConfig
from asyncmoe.stage import Kind, StageChain


class BatchPolicy:
    """The policy of one rank, as arrays over its stage chain."""

    max_rows: NDArray[np.int64]  # [stages]: most rows of a batch
    min_rows: NDArray[np.int64]  # [stages]: rows for which the stage waits
    linger_s: NDArray[np.float64]  # [stages]: longest such wait of a row

    def __init__(self, config: BatchConfig, chain: StageChain, changes: bool = False) -> None:
        """`changes`: somebody sets minima and lingers while it is in use."""
        self._kinds = chain.kinds
        self._limits = {kind: _limits(config, kind) for kind in Kind}
        limits = [self._limits[kind] for kind in self._kinds]
        self.min_rows = np.array([least for least, _, _ in limits], np.int64)
        self.max_rows = np.array([most for _, most, _ in limits], np.int64)
        self.linger_s = np.array([linger_ms for _, _, linger_ms in limits], np.float64) / 1000
        self._waits = changes or bool((self.min_rows > 1).any())

    def reach(self, stage: int, rows: int) -> int:
        """The last stage from `stage` on up to which `rows` rows are always one batch, at once."""
        kinds, head = self._kinds, len(self._kinds) - 1
        for reached in (stage, stage + 1):  # attention and expert stages take turns
            if reached < head and not self._fits(kinds[reached], rows):
                return reached - 1
        return head if self._fits(kinds[head], rows) else head - 1

    def _fits(self, kind: Kind, rows: int) -> bool:
        least, most, _ = self._limits[kind]
        return least <= rows <= most

    def look(
        self, rows: NDArray[np.int64], oldest_s: NDArray[np.float64], now_s: float
    ) -> tuple[NDArray[np.bool_], int, int, float | None]:
        """`runnable`, how many stages may run, the first of them, and `next_runnable_s`.

        The first is -1 and the time None where there is none.
        """
        if native.columns is not None:
            seen: tuple[NDArray[np.bool_], int, int, float | None] = native.columns.look(
                rows, oldest_s, self.min_rows, self.linger_s, now_s
            )
            return seen
        runnable = self.runnable(rows, oldest_s, now_s)
        count = int(np.count_nonzero(runnable))
        first = int(runnable.argmax()) if count else -1
        return runnable, count, first, self.next_runnable_s(rows, oldest_s)

    def runnable(
        self, rows: NDArray[np.int64], oldest_s: NDArray[np.float64], now_s: float
    ) -> NDArray[np.bool_]:
        """[stages]: whether the stage may run, as `QueueView.runnable` wants it.

        `oldest_s` is the loop time when each stage's oldest row joined; any value where rows is 0.
        """
        enough = rows >= self.min_rows
        if not self._waits:
            return enough
        return enough | ((rows > 0) & (oldest_s + self.linger_s <= now_s))

    def next_runnable_s(
        self, rows: NDArray[np.int64], oldest_s: NDArray[np.float64]
    ) -> float | None:
        """Loop time at which the first stage below its minimum has lingered; None without one.

        It is the very time from which `runnable` lets that stage through, so a timer set to it
        never fires to no avail on a clock that keeps its word. It may lie in the past.
        """
        if not self._waits:
            return None
        lingering = (rows > 0) & (rows < self.min_rows)
        if not lingering.any():
            return None
        return float((oldest_s + self.linger_s)[lingering].min())


def _limits(config: BatchConfig, kind: Kind) -> tuple[int, int, float]:
    """Minimum rows, maximum rows and linger in ms of this kind."""
    name = kind.name.lower()
    least, most, linger_ms = (
        getattr(config, f"{name}_{key}") for key in ("min_rows", "max_rows", "linger_ms")
    )
    return least, most, linger_ms
