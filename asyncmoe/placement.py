"""Which rank does what: roles, and the owner of every expert of every MoE layer."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from asyncmoe.model import LoadPlan


class Role(StrEnum):
    """What a rank runs."""

    ATTENTION = "attention"
    EXPERT = "expert"
    BOTH = "both"


@dataclass(frozen=True)
class Placement:
    """The placement of one cluster; equal on all ranks."""

    roles: tuple[Role, ...]  # one per rank
    owner: NDArray[np.uint16]  # [MoE layers, experts]: rank that holds the expert
    local: NDArray[np.uint16]  # [MoE layers, experts]: its index among that rank's experts

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.roles)

    @property
    def home_ranks(self) -> tuple[int, ...]:
        """Ranks that can be the home of a request."""
        return tuple(r for r, role in enumerate(self.roles) if role is not Role.EXPERT)

    def local_experts(self, rank: int, layer: int) -> tuple[int, ...]:
        """Global ids of the layer's experts on `rank`, in local order."""
        return tuple(int(e) for e in np.flatnonzero(self.owner[layer] == rank))

    def load_plan(self, rank: int) -> LoadPlan:
        """What `rank` needs of the checkpoint."""
        layers = self.owner.shape[0]
        return LoadPlan(
            attention=self.roles[rank] is not Role.EXPERT,
            experts=tuple(self.local_experts(rank, layer) for layer in range(layers)),
        )
