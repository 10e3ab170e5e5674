"""Where a rank's time goes: counters that the loop keeps and `Stats` messages report."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from asyncmoe.stage import Kind


@dataclass(slots=True)
class KindTimes:
    """Sums over the batches of one kind of stage."""

    batches: int = 0
    rows: int = 0
    compute_s: float = 0.0  # on the device
    prepare_s: float = 0.0  # CPU time on the loop: choose, take, gather columns
    finish_s: float = 0.0  # CPU time on the loop: route, post parcels, move chunks on

    def add(self, rows: int, compute_s: float, batches: int = 1) -> None:
        """Batches of `rows` rows in all have been computed."""
        self.batches += batches
        self.rows += rows
        self.compute_s += compute_s


@dataclass(slots=True)
class RankTimes:
    """All of a rank's sums since its start."""

    kinds: dict[Kind, KindTimes] = field(default_factory=lambda: {k: KindTimes() for k in Kind})
    receive_s: float = 0.0  # CPU time on the loop: parcels taken in
    received_parcels: int = 0
    march_wait_s: float = 0.0  # of device work: marches that waited for other ranks
    clock: Callable[[], float] = time.thread_time  # by which CPU time is measured

    def values(self) -> dict[str, Any]:
        """As plain numbers by name."""
        out: dict[str, Any] = {
            "receive_s": self.receive_s,
            "received_parcels": self.received_parcels,
            "march_wait_s": self.march_wait_s,
        }
        for kind, times in self.kinds.items():
            for name in KindTimes.__slots__:
                out[f"{kind.name.lower()}_{name}"] = getattr(times, name)
        return out
