"""From a batch's router output to the rows of each destination rank, without a loop over rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Route:
    """The rows of a batch that go to one rank; pairs are in row order, then router order."""

    rank: int
    rows: NDArray[np.int64]  # [n] rows of the batch, ascending
    fanout: NDArray[np.uint8]  # [n] pairs of each
    expert: NDArray[np.uint16]  # [pairs] global id
    weight: NDArray[np.float32]  # [pairs]
    part: NDArray[np.uint8]  # [pairs]


def route(
    experts: NDArray[np.int64],
    weights: NDArray[np.float32],
    owner: NDArray[np.uint16],
    world: int,
    per_expert: bool,
) -> tuple[NDArray[np.int64], list[Route]]:
    """Group (row, expert) pairs by the rank that owns the expert, and number the parts.

    Args:
        experts, weights: [rows, top_k] from the router.
        owner: [experts] rank of each expert of the layer.
        per_expert: a part per pair, numbered in router order; otherwise a part per visited rank,
            numbered in rank order.

    Returns:
        Parts of each row [rows], and the routes in ascending order of rank.
    """
    rows, top_k = experts.shape
    rank_of_pair = owner[experts].ravel()
    expert_of_pair, weight_of_pair = experts.astype(np.uint16).ravel(), weights.ravel()
    pairs_of_rank = np.bincount(rank_of_pair, minlength=world)
    by_rank = rank_of_pair.argsort(kind="stable")
    ends = pairs_of_rank.cumsum()
    parts = np.zeros(rows, np.int64)  # of each row, at the ranks before the present one
    routes = []
    for rank in pairs_of_rank.nonzero()[0].tolist():
        pairs = by_rank[ends[rank] - pairs_of_rank[rank] : ends[rank]]
        fanout_of_row = np.bincount(pairs // top_k, minlength=rows)
        visiting = fanout_of_row.nonzero()[0]
        fanout = fanout_of_row[visiting]
        part = pairs % top_k if per_expert else parts[visiting].repeat(fanout)
        parts[visiting] += 1
        routes.append(
            Route(
                rank,
                visiting,
                fanout.astype(np.uint8),
                expert_of_pair[pairs],
                weight_of_pair[pairs],
                part.astype(np.uint8),
            )
        )
    return np.full(rows, top_k, np.int64) if per_expert else parts, routes
