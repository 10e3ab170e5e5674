"""From a batch's router output to the rows of each destination rank, without a loop over rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from asyncmoe import native
from asyncmoe.packed import PackedParcel, pack
from asyncmoe.stage import StageChain
from asyncmoe.transport import Parcel, ParcelClass


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
) -> tuple[NDArray[np.uint8], list[Route]]:
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
    parts = np.zeros(rows, np.uint8)  # of each row, at the ranks before the present one
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
    return np.full(rows, top_k, np.uint8) if per_expert else parts, routes


def route_to_all(
    experts: NDArray[np.int64], weights: NDArray[np.float32], owner: NDArray[np.uint16]
) -> tuple[NDArray[np.uint8], list[Route]]:
    """As `route`, but every row visits every rank with experts of the layer, in rank order.

    At a rank that it did not choose it has one pair of weight 0, with the rank's first expert: its
    place in the batch, and no compute (`expertcolumns.expert_columns`).
    """
    rows = len(experts)
    ranks, first = np.unique(owner, return_index=True)
    rank_of_pair, routes = owner[experts], []
    for part, (rank, expert) in enumerate(zip(ranks.tolist(), first.tolist(), strict=True)):
        here = rank_of_pair == rank
        fanout = here.sum(1)
        idle = fanout == 0
        here[idle, 0] = True
        fanout[idle] = 1
        routes.append(
            Route(
                rank,
                np.arange(rows),
                fanout.astype(np.uint8),
                np.where(idle[:, None], expert, experts)[here].astype(np.uint16),
                np.where(idle[:, None], np.float32(0), weights)[here],
                np.full(int(fanout.sum()), part, np.uint8),
            )
        )
    return np.full(rows, len(ranks), np.uint8), routes


@dataclass(frozen=True, slots=True)
class Routed:
    """Where the rows of an attention batch go."""

    parts: NDArray[np.uint8]  # [rows] parts of each that will come back
    parcels: list[tuple[int, PackedParcel]]  # to which rank, ascending


@dataclass(frozen=True, slots=True, eq=False)
class Router:
    """Makes dispatch parcels of what the model's router chose. Works on any thread."""

    chain: StageChain
    owner: NDArray[np.uint16]  # [MoE layers, experts] rank of each expert
    world: int
    per_expert: bool
    to_all: bool = False  # each row goes to every rank with experts of its layer

    def __call__(
        self,
        stage: int,
        slots: NDArray[np.int64],
        epochs: NDArray[np.uint32],
        hidden: torch.Tensor,
        experts: NDArray[np.int64],
        weights: NDArray[np.float32],
    ) -> Routed:
        """Route rows to expert stage `stage`: those of `slots`, with these `epochs`.

        `hidden` is [rows, hidden].
        """
        owner = self.owner[self.chain.layer(stage)]
        if self.to_all:
            parts, routes = route_to_all(experts, weights, owner)
            return Routed(
                parts, [(r.rank, _parcel(stage, slots, epochs, hidden, r)) for r in routes]
            )
        if native.columns is None:
            parts, routes = route(experts, weights, owner, self.world, self.per_expert)
            return Routed(
                parts, [(r.rank, _parcel(stage, slots, epochs, hidden, r)) for r in routes]
            )
        return Routed(
            *native.columns.route(
                experts, weights, owner, self.world, self.per_expert, slots, epochs, stage, hidden
            )
        )


def _parcel(
    stage: int,
    slots: NDArray[np.int64],
    epochs: NDArray[np.uint32],
    hidden: torch.Tensor,
    to: Route,
) -> PackedParcel:
    """The parcel of a route."""
    all_rows = len(to.rows) == len(slots)
    return pack(
        Parcel(
            ParcelClass.DISPATCH,
            stage,
            slots[to.rows].astype(np.uint32),
            epochs[to.rows],
            to.part,
            hidden if all_rows else hidden.index_select(0, torch.from_numpy(to.rows)),
            to.fanout,
            to.expert,
            to.weight,
        )
    )
