"""Company: how long a stage waits for rows that are on their way to it.

Where reading weights is most of a batch's work, rows that run as two batches cost nearly twice what
they would as one. So a stage whose rows could run now waits for others that are known to come, but
not for longer than a batch of their own would take (times `patience`): that is the rule of ski
rental, by which at most a constant factor is lost against who knows when they come (Karlin et al.,
"Competitive snoopy caching", 1988). It works through the batch policy, as minimum rows with a
linger, so that rules choose among the stages that do not wait.

Known to come are, at this home's own stages, rows of its decode steps: to A0 all of them, since
the step that they are in ends there, and to a later stage those that stand before it. Nobody tells
an expert stage. But homes that have fallen into step take turns there, so that a home is expected
whose last rows came to one of the layers just before this one, not long ago. If it is behind by
more than half the layers, it is rather this rank's turn to be waited for. Its rows read weights
that those here read anyway for 1 - (1 - k / experts) ^ rows of their k experts, and only so much of
their batch is saved: few rows hardly wait. Nor do very many, of prompts, whose products cost more
than reading the weights.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from asyncmoe import native
from asyncmoe.config import BatchConfig
from asyncmoe.microqueue import Queues, are_plain
from asyncmoe.policy import BatchPolicy
from asyncmoe.stage import Kind

PATIENCE = 2.0  # most waits that pay are over by then (benchmarks/throughput.py --ranks 2)
MANY = 16.0  # rows of each expert on average, to which its weights are no longer what costs
SHORTEST_S = 0.0005  # loops count in milliseconds: a shorter wait would be longer than it is worth
_FORGET = 1.02  # what a batch costs at least is forgotten by so much with each


class Company:
    """Sets minimum rows and linger of the stages that have rows, before each choice."""

    def __init__(
        self,
        queues: Queues,
        max_rows: NDArray[np.int64],
        min_rows: NDArray[np.int64],
        linger_s: NDArray[np.float64],
        patience: float,
        share: float,
        decode_chunk: NDArray[np.int64],
        chunk_stage: NDArray[np.int32],
    ) -> None:
        """See `BatchPolicy` for `max_rows`, `min_rows` and `linger_s`.

        `share`: of the experts, which a row goes to. `decode_chunk`: chunk of each request row of
        this home that decodes, else negative; none where there is no home. `chunk_stage`: of each
        chunk, the stage that it is at or waits for.
        """
        self._queues, self._chain = queues, queues.chain
        self._max_rows, self._min_rows, self._linger_s = max_rows, min_rows, linger_s
        self._patience, self._share = patience, share
        self._decode_chunk, self._chunk_stage = decode_chunk, chunk_stage
        self._least_s = [0.0 for _ in Kind]  # seconds of a batch, of late

    def took(self, kind: Kind, seconds: float) -> None:
        """A batch took so long to compute."""
        least_s = self._least_s[kind] * _FORGET
        self._least_s[kind] = min(seconds, least_s) if least_s else seconds

    def attend(self, now_s: float) -> None:
        """Set what each stage with rows waits for and how long, by what is known at `now_s`, loop
        time."""
        step_s = (
            self._chain.layers * (self._least_s[Kind.ATTENTION] + self._least_s[Kind.EXPERT])
            + self._least_s[Kind.HEAD]
        )
        reach, since_s = max(1, self._chain.layers // 2), now_s - self._patience * step_s
        for stage in np.flatnonzero(self._queues.rows).tolist():
            kind, here = self._chain.kinds[stage], int(self._queues.rows[stage])
            rows, price_s = 1, self._least_s[kind] if stage else step_s
            if kind is not Kind.EXPERT:
                rows = self._coming(stage)
            elif here * self._share < MANY and self._queues.awaits(stage, reach, since_s):
                rows = here + 1
                price_s *= 1 - (1 - self._share) ** here
            wait_s = self._patience * price_s
            if wait_s < SHORTEST_S:
                rows = 1
            self._min_rows[stage] = max(1, min(rows, int(self._max_rows[stage])))
            self._linger_s[stage] = wait_s

    def _coming(self, stage: int) -> int:
        """Rows of decode steps that are at `stage` or on their way to it."""
        chunks = self._decode_chunk[self._decode_chunk >= 0]
        return int((self._chunk_stage[chunks] == stage).sum()) if stage else len(chunks)


def patience(batch: BatchConfig, live_ranks: int) -> float:
    """How many times the cost of a batch stages wait; 0: they do not."""
    if batch.company is not None:
        return batch.company
    return PATIENCE if live_ranks > 1 and not batch.has_minima else 0.0


def make_company(
    queues: Queues,
    policy: BatchPolicy,
    patience: float,
    share: float,
    decode_chunk: NDArray[np.int64],
    chunk_stage: NDArray[np.int32],
) -> Company:
    """As `Company`, compiled if the queues are. `policy` is one that may wait."""
    kind = Company if are_plain(queues) else native.columns.Company
    made: Company = kind(
        queues,
        policy.max_rows,
        policy.min_rows,
        policy.linger_s,
        patience,
        share,
        decode_chunk,
        chunk_stage,
    )
    return made
