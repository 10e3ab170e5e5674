"""The expert stages of a live rank: how a batch of theirs is taken, and how its output goes home.

Where the executor's turn is compiled, it does the same with what stands here, without any Python
(`native/src/columns/expert_stages.cpp`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from asyncmoe.dispatcher import Dispatcher
from asyncmoe.home import Home
from asyncmoe.microqueue import Queues
from asyncmoe.model import Model
from asyncmoe.steps import ExpertStep


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertStages:
    """What expert batches of one rank need between their queue and their parcels."""

    model: Model
    queues: Queues
    layers: list[int]  # by stage
    local: list[NDArray[np.int64]]  # by layer: [experts] local index of each; -1: it is elsewhere
    local_experts: list[int]  # by layer: how many are here
    per_expert: bool
    dispatcher: Dispatcher
    held_rows: NDArray[np.int64]  # [ranks] rows of each home that are here, to be counted down
    home: Home | None  # of this rank

    def prepare(self, stage: int, max_rows: int) -> ExpertStep:
        """Take a batch off the queue of `stage`, which is not empty."""
        layer, taken = self.layers[stage], self.queues.take_rows(stage, max_rows)
        return ExpertStep(
            stage,
            layer,
            self.model,
            taken,
            taken.rows,
            self.local[layer],
            self.local_experts[layer],
            self.per_expert,
        )

    def finish(self, step: ExpertStep, out: torch.Tensor) -> None:
        """Send the output [rows, hidden] of `step` home, and let go of its input."""
        home = self.home
        for parcel in self.dispatcher.combine(step, out):
            assert home is not None  # which sent these rows
            home.take_in(parcel)
        step.taken.read(self.held_rows)
        if home is not None:
            home.let_go()
