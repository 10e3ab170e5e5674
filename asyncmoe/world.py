"""The place of one process among all ranks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class World:
    """The place of one process among all ranks and among those of its machine."""

    rank: int
    size: int
    local_rank: int
    local_size: int
