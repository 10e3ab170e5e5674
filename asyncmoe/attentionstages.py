"""The attention stages of a home rank: how a batch of theirs is taken, and what it leaves behind.

Where the executor's turn is compiled, it does the same with what stands here, without any Python
(`native/src/columns/attention_stages.cpp`), for batches of which all rows go on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncmoe.dispatcher import Dispatcher
from asyncmoe.home import Home
from asyncmoe.microqueue import Queues
from asyncmoe.model import Cache, Model
from asyncmoe.receptor import Receptor
from asyncmoe.rows import gather_rows
from asyncmoe.steps import AttentionResult, AttentionStep


@dataclass(slots=True, kw_only=True)
class AttentionStages:
    """What attention batches of one home need between their queue and their parcels."""

    model: Model
    queues: Queues
    layers: list[int]  # by stage
    cache: Cache
    dispatcher: Dispatcher
    receptor: Receptor
    home: Home
    no_tokens: NDArray[np.int64]  # [0]
    departure: Any  # of a batch that goes on as a whole, compiled; None: that is not there

    def prepare(self, stage: int, max_rows: int) -> AttentionStep:
        """Take a batch off the queue of `stage`, which is not empty, and gather its columns."""
        home, layer = self.home, self.layers[stage]
        rows = gather_rows(home, self.queues.take_chunks(stage, max_rows))
        tokens = rows.gathered.at_slots(home.table.token) if layer == 0 else self.no_tokens
        router = self.dispatcher.router
        return AttentionStep(stage, layer, rows, tokens, self.model, home.table, self.cache, router)

    def finish(self, step: AttentionStep, result: AttentionResult) -> None:
        """Send the rows of `step` to their experts, and move its chunks on."""
        home, rows, routed = self.home, step.rows, result.routed
        if (
            self.departure is not None
            and routed is not None
            and not home.prunes_behind(step)
            and self.departure.leave(
                rows.gathered, rows.chunks, step.stage + 1, routed.parts, routed.parcels
            )
        ):
            return
        slots, result = home.leave_attention(step, result)
        if len(slots):
            local = self.dispatcher.dispatch(step.stage + 1, home.table, slots, result)
            if local is not None:
                self.receptor.put_local(local)
        home.pump()
