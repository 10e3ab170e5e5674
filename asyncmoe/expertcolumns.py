"""The pairs of an expert batch, sorted by local expert, and the columns of its way back."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from asyncmoe import native
from asyncmoe.packed import Buffer, PackedParcel

# Per home: rank, output rows, input rows, columns of the combine parcel.
WayBack = list[tuple[int, int, int, Buffer]]
# `row` [pairs], `weight` [pairs], `counts` [local experts], `gather` [output rows, width] as in
# `model.ExpertBatch`; the way back.
ExpertColumns = tuple[
    NDArray[np.int64],
    NDArray[np.float32],
    NDArray[np.int64],
    NDArray[np.int64],
    WayBack,
]


def expert_columns(
    parcels: list[tuple[int, PackedParcel]],
    local: NDArray[np.int64],
    local_experts: int,
    per_expert: bool,
) -> ExpertColumns:
    """Sort the pairs of dispatch parcels by local expert, and say which each output row sums.

    A pair of weight 0 adds nothing, so it is left out.

    Args:
        parcels: each with its source, in ascending order, so that each home's output is one slice.
        local: [experts] local index of each expert of the layer.
        local_experts: how many of them are on this rank.
        per_expert: an output row per pair; otherwise one per row.
    """
    if native.columns is not None:
        blocks = [(source, p.count, p.pairs, p.block) for source, p in parcels]
        columns: ExpertColumns = native.columns.expert_batch(
            blocks, local, local_experts, per_expert
        )
        return columns
    slot, epoch, part, fanout, expert, weight = (
        np.concatenate(c) for c in zip(*(p.columns() for _, p in parcels), strict=True)
    )
    rows = len(slot)
    counted = weight.nonzero()[0]
    of_expert = local[expert[counted]]
    order = of_expert.argsort(kind="stable")
    place = np.full(len(expert), -1, np.int64)
    place[counted[order]] = np.arange(len(counted))
    row_of_pair = np.arange(rows).repeat(fanout)
    source = np.repeat([source for source, _ in parcels], [p.count for _, p in parcels])
    home = source
    if per_expert:
        gather = place[:, None]
        slot, epoch, home = slot[row_of_pair], epoch[row_of_pair], source[row_of_pair]
    else:
        begin = fanout.cumsum(dtype=np.int64) - fanout
        gather = np.full((rows, int(fanout.max())), -1, np.int64)
        gather[row_of_pair, np.arange(len(expert)) - begin[row_of_pair]] = place
        part = part[begin]
    back = []
    for rank in np.unique(source).tolist():
        out = home == rank
        block = slot[out].tobytes() + epoch[out].tobytes() + part[out].tobytes()
        back.append((rank, int(out.sum()), int((source == rank).sum()), block))
    counts = np.bincount(of_expert, minlength=local_experts)
    order = counted[order]
    return row_of_pair[order], weight[order], counts, gather, back
