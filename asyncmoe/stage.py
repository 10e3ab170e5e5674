"""The stage chain A0 E0 A1 E1 … A(L-1) E(L-1) H: what is schedulable, numbered along a token's way.

Everywhere in the core a stage is its index on this chain, a plain int, so that depths, ages and
scores of all stages are arrays of length `len(chain)`.

A rule that takes micro-batches through the layers apart from each other has a **track** for each:
the chain once more, behind the first, with queues of its own. Nearly every rule has one track.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property


class Kind(IntEnum):
    """What a stage computes."""

    ATTENTION = 0
    EXPERT = 1
    HEAD = 2


@dataclass(frozen=True)
class StageChain:
    """The chain of a model with `layers` MoE layers; stage indices run from 0 to `2 * layers`, and
    on from there through further tracks."""

    layers: int
    tracks: int = 1

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """Kind of each stage."""
        return ((Kind.ATTENTION, Kind.EXPERT) * self.layers + (Kind.HEAD,)) * self.tracks

    def __len__(self) -> int:
        return self.track_stages * self.tracks

    @property
    def track_stages(self) -> int:
        """Stages of one track."""
        return 2 * self.layers + 1

    @property
    def head(self) -> int:
        """Index of H, the last stage of the first track."""
        return 2 * self.layers

    def attention(self, layer: int) -> int:
        """Index of A(layer); `attention(layers)` is H, where the chain goes on after E(L-1)."""
        return 2 * layer

    def expert(self, layer: int) -> int:
        """Index of E(layer)."""
        return 2 * layer + 1

    def layer(self, stage: int) -> int:
        """MoE layer of the stage; `layers` for H."""
        return stage % self.track_stages // 2

    def track(self, stage: int) -> int:
        """Track of the stage."""
        return stage // self.track_stages

    def name(self, stage: int) -> str:
        """The stage as people write it: A0, E0, …, H; in further tracks A0/1 and so on."""
        kind, track = self.kinds[stage], self.track(stage)
        name = "H" if kind is Kind.HEAD else f"{'AE'[kind]}{self.layer(stage)}"
        return f"{name}/{track}" if track else name
