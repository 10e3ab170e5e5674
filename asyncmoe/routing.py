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
    rank = owner[experts]
    if per_expert:
        part = np.broadcast_to(np.arange(top_k, dtype=np.uint8), rank.shape)
        count = np.full(rows, top_k, np.int64)
    else:
        visited = np.zeros((rows, world), np.bool_)
        visited[np.arange(rows)[:, None], rank] = True
        number = np.cumsum(visited, axis=1, dtype=np.int64)
        part = (np.take_along_axis(number, rank.astype(np.int64), axis=1) - 1).astype(np.uint8)
        count = number[:, -1]
    flat_rank = rank.ravel()
    expert, weight, part = experts.astype(np.uint16).ravel(), weights.ravel(), part.ravel()
    pairs_of = np.bincount(flat_rank, minlength=world)
    destinations = np.flatnonzero(pairs_of)
    if len(destinations) == 1:
        everything, fanout = np.arange(rows), np.full(rows, top_k, np.uint8)
        return count, [Route(int(destinations[0]), everything, fanout, expert, weight, part)]
    by_rank = np.argsort(flat_rank, kind="stable")
    ends = np.cumsum(pairs_of)
    routes = []
    for destination in destinations.tolist():
        pairs = by_rank[ends[destination] - pairs_of[destination] : ends[destination]]
        row_of_pair = pairs // top_k
        first = np.flatnonzero(np.diff(row_of_pair, prepend=-1))
        fanout = np.diff(first, append=len(pairs)).astype(np.uint8)
        columns = expert[pairs], weight[pairs], part[pairs]
        routes.append(Route(destination, row_of_pair[first], fanout, *columns))
    return count, routes
