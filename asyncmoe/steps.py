"""Steps: one batch of one stage, with its columns and its compute for the device. A step is a
callable without arguments that runs on the compute thread. What it reads of the home's tables is
gathered on the loop, which may change them meanwhile (`rows.py`); an expert batch's columns are its
own, and are made beside its compute.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from asyncmoe import native
from asyncmoe.expertcolumns import ExpertColumns, WayBack
from asyncmoe.microqueue import Taken
from asyncmoe.model import Cache, ExpertBatch, Model
from asyncmoe.routing import Routed, Router
from asyncmoe.rows import Rows
from asyncmoe.sampler import Sampled, SamplerBatch, sample
from asyncmoe.stage import Kind
from asyncmoe.tokentable import TokenTable


def _merged(
    first: bool, rows: Rows, tokens: NDArray[np.int64], model: Model, table: TokenTable
) -> torch.Tensor:
    """Hidden state [rows, hidden]: embedded at the first stage, merged at later ones."""
    if first:
        return model.embed(torch.from_numpy(tokens))
    columns = rows.columns
    return table.merge(torch.from_numpy(columns.slots), columns.part_count)


@dataclass(slots=True)
class AttentionResult:
    """What the router of an attention batch chose, and the experts' input."""

    hidden: torch.Tensor  # [rows, hidden]
    experts: NDArray[np.int64]  # [rows, top_k]
    weights: NDArray[np.float32]  # [rows, top_k]
    routed: Routed | None = None  # all rows, as parcels; None: still to be routed


@dataclass(slots=True)
class AttentionStep:
    """A(layer) for a batch of rows: merge (or embed, for layer 0), attention, router."""

    stage: int
    layer: int
    rows: Rows
    tokens: NDArray[np.int64]  # [rows] token ids, for layer 0
    model: Model
    table: TokenTable
    cache: Cache
    router: Router | None = None  # routes the rows here, where they are not in the loop's way
    kind = Kind.ATTENTION

    @property
    def row_count(self) -> int:
        """Rows of the batch."""
        return self.rows.count

    def following(self, tokens: NDArray[np.int64]) -> AttentionStep:
        """A0 of the next decode steps of these rows, which got `tokens`."""
        return replace(self, stage=0, layer=0, rows=self.rows.following(), tokens=tokens)

    def entering(self) -> torch.Tensor:
        """The rows' hidden state [rows, hidden]."""
        return _merged(self.layer == 0, self.rows, self.tokens, self.model, self.table)

    def __call__(self) -> AttentionResult:
        columns = self.rows.columns
        out = self.model.attention(self.layer, self.entering(), self.rows.batch, self.cache)
        self.table.keep(columns.slots, out.residual)
        hidden, experts, weights = out.hidden, out.experts.numpy(), out.weights.numpy()
        if self.router is None:
            return AttentionResult(hidden, experts, weights)
        routed = self.router(
            self.stage + 1, columns.slots, columns.epochs, hidden, experts, weights
        )
        return AttentionResult(hidden, experts, weights, routed)


@dataclass(slots=True)
class HeadStep:
    """H for a batch of rows: merge, trailing dense layers, LM head and sampling."""

    stage: int
    rows: Rows
    tokens: NDArray[np.int64]  # [rows] token ids, for a model without MoE layers
    sampled_segments: NDArray[np.int64]  # segments whose last row gets a token
    sampling: SamplerBatch
    model: Model
    table: TokenTable
    cache: Cache
    kind = Kind.HEAD

    @property
    def row_count(self) -> int:
        """Rows of the batch."""
        return self.rows.count

    def __call__(self) -> Sampled | None:
        return self.of(_merged(self.stage == 0, self.rows, self.tokens, self.model, self.table))

    def of(self, x: torch.Tensor) -> Sampled | None:
        """The tokens of rows whose hidden state is x [rows, hidden]."""
        x = self.model.finish(x, self.rows.batch, self.cache)
        if not len(self.sampled_segments):
            return None
        if len(self.sampled_segments) < self.row_count:
            last = self.rows.ends[self.sampled_segments] - 1
            x = x[torch.from_numpy(last)]
        return sample(self.model.logits(x), self.sampling)

    def following(self, rows: Rows) -> HeadStep:
        """H of the next decode steps: `rows` follow these, which have a `Course`."""
        return replace(self, rows=rows, sampling=self.sampling.following())


@dataclass(slots=True)
class ExpertStep:
    """E(layer) for a batch of rows that came from any home ranks."""

    stage: int
    layer: int
    model: Model
    taken: Taken
    row_count: int
    local: NDArray[np.int64]  # [experts] local index of each expert of the layer
    local_experts: int
    per_expert: bool  # an output row per pair; otherwise one per row
    _columns: ExpertColumns | None = None
    _back: WayBack | None = None
    _described: object = None  # the output, as compiled code notes it
    kind = Kind.EXPERT

    @property
    def columns(self) -> ExpertColumns:
        """See `expert_columns`. Made on first use, which the compute thread has: that takes time
        which grows with the rows, and the loop must not."""
        if self._columns is None:
            self._columns = self.taken.columns(self.local, self.local_experts, self.per_expert)
        return self._columns

    @property
    def back(self) -> WayBack:
        """Of `columns`, those of the way home."""
        return self.columns[-1] if self._back is None else self._back

    def __call__(self) -> torch.Tensor:
        payloads = self.taken.payloads
        row, weight, counts, gather, self._back = self.columns
        self._columns = None  # the others end here, and not on the loop
        if not len(row):  # rows that no expert here was chosen for
            return payloads[0].new_zeros((len(gather), payloads[0].shape[1]))
        # Rows without columns are all alike.
        alone = len(payloads) == 1 or not payloads[0].shape[1]
        x = payloads[0] if alone else torch.cat(payloads)
        batch = ExpertBatch(
            row=torch.from_numpy(row),
            weight=torch.from_numpy(weight),
            counts=torch.from_numpy(counts),
            gather=torch.from_numpy(gather),
        )
        out = self.model.experts(self.layer, x, batch)
        if native.columns is not None:
            self._described = native.columns.described(out)
        return out
