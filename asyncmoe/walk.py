"""A walk: decode steps of the same rows one behind the other, in one compiled call.

What a step needs beside its compute is a few numbers of each row, but Python takes for these as
long as for a layer, since the weights that a step reads leave nothing of it in the caches. So the
call makes them itself. All memory is made before it: the loop reads what a step has left while the
next ones, which write elsewhere, are with the device.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from asyncmoe.herald import Herald
from asyncmoe.model import RowBatch
from asyncmoe.rows import Rows
from asyncmoe.sampler import Course, Sampled

Int64s = NDArray[np.int64]


class Walk:
    """See the module. Rows are greedy and have a `Course`; each is a segment."""

    def __init__(
        self,
        rows: Rows,
        tokens: Int64s,
        course: Course,
        layers: int,
        counts: Int64s,
        herald: Herald,
        *,
        follows: bool = True,
    ) -> None:
        """
        Args:
            rows: of the step before the first one, which got `tokens`. The loop is told of it, by
                somebody else, once this is made. Unless the walk `follows` no step: then they are
                the first one's, which begins with `tokens`.
            counts: [2] steps that the loop was told of, and those that it has heard of.
        """
        columns, pool = rows.columns, rows.pool
        count = len(tokens)
        self.batch = RowBatch(
            positions=torch.from_numpy(columns.positions - (not follows)),
            cache_index=torch.from_numpy(columns.cache_index.copy()),
            decode_rows=count,
            query_start=torch.from_numpy(columns.query_start),
            context_len=torch.from_numpy(columns.context.copy()),
            block_table=torch.from_numpy(pool.table[columns.request]),
            request=torch.from_numpy(columns.request),
            block_tokens=pool.block_tokens,
            request_ids=rows.request_ids,
        )
        self.ends, self.steps = np.ascontiguousarray(course.ends), course.tokens
        self._turns = herald.LEAD + 1  # steps that are kept: those unheard of, and the next one
        self.tokens = np.zeros((self._turns, count), np.int64)
        self.tokens[0] = tokens
        self.bad = np.zeros(count, np.bool_)
        self.seconds = np.zeros((self._turns, 2 * layers + 1))  # of the stages, like the tokens
        self.counts, self.herald = counts, herald
        self._before = int(counts[0]) + follows  # of the counts, when the first step begins

    def sampled(self, turn: int) -> Sampled:
        """The tokens of a step, copied. `bad` holds for the last step."""
        return Sampled(self.tokens[turn].copy(), self.bad, None)

    def stages(self, turn: int) -> list[tuple[int, float]]:
        """The stages of a step, all of them, and seconds of compute."""
        return list(enumerate(self.seconds[turn].tolist()))

    def unheard(self) -> int | None:
        """The turn of the step that the loop was told of and is to hear of; None without one."""
        told, heard = self.counts.tolist()
        return (heard + 1 - self._before) % self._turns if told > heard >= self._before else None
