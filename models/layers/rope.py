"""Rotary position embedding and its variants: what a config says, frequencies, tables, rotation.

The variants are those of `transformers` 5 by the same names: `default`, `linear` (positions divided
by a factor), `dynamic` (NTK-aware, base grows with the sequence), `yarn` (arXiv:2309.00071) and
`llama3` (long wavelengths divided by a factor, with a smooth transition).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from asyncmoe.errors import UnknownName
from asyncmoe.model import RowBatch
from asyncmoe.models.hfconfig import ConfigReader

KINDS = ("default", "linear", "dynamic", "yarn", "llama3")
_KEYS = {
    "rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "attention_factor",
    "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
    "truncate", "low_freq_factor", "high_freq_factor", "finetuned",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding as a config defines it; the fields below `trained` serve some kinds only."""

    kind: str
    theta: float
    dim: int  # rotated dimensions of a head, the first ones
    trained: int  # positions before any stretching
    factor: float = 1.0
    amplitude: float = 1.0  # of cos and sin
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0


def read_rope(config: ConfigReader, head_dim: int, theta: float, partial: bool) -> RopeSpec:
    """Read `rope_parameters`, or the older `rope_theta` with `rope_scaling`.

    `theta` is the architecture's default; `partial` says whether it can rotate part of a head.
    Raises `ConfigError` naming the key.
    """
    rope = config.section(
        "rope_scaling" if config.config.get("rope_scaling") else "rope_parameters"
    )
    kind = rope.choice("rope_type" if rope.has("rope_type") else "type", KINDS, "default")
    for key in rope.config:  # behind the kind: others have keys of their own
        if key not in _KEYS:
            raise UnknownName(f"key of {rope.where}", key, _KEYS)
    most = config.integer("max_position_embeddings")
    holder = rope if rope.has("partial_rotary_factor") else config
    share = holder.number("partial_rotary_factor", 1.0)
    if share > 1 or (share != 1 and not partial):
        raise holder.fail("partial_rotary_factor", "above 0 and at most 1" if partial else "1.0")
    trained = most
    if kind in ("yarn", "llama3"):
        own = config.has("original_max_position_embeddings")
        trained = (config if own else rope).integer(
            "original_max_position_embeddings", default=most
        )
    factor = 1.0
    if kind != "default":
        factor = rope.number("factor", most / trained if kind == "yarn" else None)
    return RopeSpec(
        kind=kind,
        theta=(rope if rope.has("rope_theta") else config).number("rope_theta", theta),
        dim=int(head_dim * share),
        trained=trained,
        factor=factor,
        amplitude=_yarn_amplitude(rope, factor) if kind == "yarn" else 1.0,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.flag("truncate", True),
        low_freq_factor=rope.number("low_freq_factor", None if kind == "llama3" else 1.0),
        high_freq_factor=rope.number("high_freq_factor", None if kind == "llama3" else 4.0),
    )


def _yarn_amplitude(rope: ConfigReader, factor: float) -> float:
    if rope.has("attention_factor"):
        return rope.number("attention_factor")

    def grown(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    over, under = rope.config.get("mscale"), rope.config.get("mscale_all_dim")
    if over and under:
        return grown(rope.number("mscale")) / grown(rope.number("mscale_all_dim"))
    return grown(1.0)


def inverse_frequencies(spec: RopeSpec) -> Tensor:
    """float32 [dim / 2]: radians per position; for `dynamic` those within the trained positions."""
    exponents = torch.arange(0, spec.dim, 2, dtype=torch.float32) / spec.dim
    plain = 1.0 / (spec.theta**exponents)
    if spec.kind == "linear":
        return plain / spec.factor
    if spec.kind == "yarn":
        return _yarn(spec, plain)
    if spec.kind == "llama3":
        return _llama3(spec, plain)
    return plain


def _yarn(spec: RopeSpec, plain: Tensor) -> Tensor:
    """Dimensions that turn often keep their frequency, those that turn rarely are stretched."""

    def dimension(turns: float) -> float:
        ratio = spec.trained / (turns * 2 * math.pi)
        return spec.dim * math.log(ratio) / (2 * math.log(spec.theta))

    low, high = dimension(spec.beta_fast), dimension(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dim - 1)
    width = high - low if high != low else 0.001
    stretched = ((torch.arange(spec.dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return plain / spec.factor * stretched + plain * (1 - stretched)


def _llama3(spec: RopeSpec, plain: Tensor) -> Tensor:
    """Wavelengths beyond the trained context are stretched, short ones kept, between them mixed."""
    turns = spec.trained * plain / (2 * math.pi)
    span = spec.high_freq_factor - spec.low_freq_factor
    kept = ((turns - spec.low_freq_factor) / span).clamp(0, 1)
    return (1 - kept) * plain / spec.factor + kept * plain


class Angles:
    """What the rows of a batch are rotated by, the same in all layers of a stage.

    Angles are cosines, and sines with the first half of them negated: [2, dim]. Row i's are
    `table[row[i]]`, or `table[i]` where `row` is None.
    """

    def __init__(self, table: Tensor, row: Tensor | None = None) -> None:
        self.table, self.row = table, row

    @cached_property
    def of_rows(self) -> Tensor:
        """[rows, 2, dim]"""
        return self.table if self.row is None else self.table[self.row]


class Rotary(ABC):
    """Rotates queries and keys by their position."""

    def __init__(self, spec: RopeSpec) -> None:
        self.spec = spec

    @abstractmethod
    def angles(self, batch: RowBatch) -> Angles:
        """The angles of the batch's rows."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes held."""

    def rotate(self, x: Tensor, angles: Angles) -> Tensor:
        """x [rows, heads, head_dim] with the first `dim` of each head rotated."""
        cos, sin = angles.of_rows[:, 0, None], angles.of_rows[:, 1, None]
        dim = self.spec.dim
        turning = x[..., :dim]
        turned = (turning * cos).add_(turning.roll(dim // 2, -1).mul_(sin))
        return turned if dim == x.shape[-1] else torch.cat((turned, x[..., dim:]), -1)


class TableRotary(Rotary):
    """The same frequencies for all requests: one table of all positions, [context, 2, dim]."""

    def __init__(
        self, spec: RopeSpec, context: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(spec)
        positions = torch.arange(context, dtype=torch.float32)
        self.table = _turned(positions[:, None] * inverse_frequencies(spec), spec).to(device, dtype)

    def angles(self, batch: RowBatch) -> Angles:
        return Angles(self.table, batch.positions)

    @property
    def nbytes(self) -> int:
        return self.table.nbytes


class DynamicRotary(Rotary):
    """The base grows once a request is longer than the trained positions.

    As in `transformers`, a row is rotated for the length that its request has in this batch, and
    keys stay as they were when they were written.
    """

    def __init__(self, spec: RopeSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(spec)
        self.dtype = dtype
        self.exponents = torch.arange(0, spec.dim, 2, dtype=torch.float32, device=device) / spec.dim

    def angles(self, batch: RowBatch) -> Angles:
        spec = self.spec
        length = batch.context_len.clamp(min=spec.trained).to(torch.float32)
        growth = spec.factor * length / spec.trained - (spec.factor - 1)
        base = spec.theta * growth ** (spec.dim / (spec.dim - 2))  # [segments]
        frequencies = 1.0 / base[:, None] ** self.exponents
        per_row = frequencies.repeat_interleave(batch.query_start.diff(), 0)
        return Angles(_turned(batch.positions[:, None] * per_row, spec).to(self.dtype))

    @property
    def nbytes(self) -> int:
        return self.exponents.nbytes


def _turned(phase: Tensor, spec: RopeSpec) -> Tensor:
    """Phases [rows, dim / 2] as the [rows, 2, dim] that `rotate` multiplies with."""
    cos, sin = phase.cos() * spec.amplitude, phase.sin() * spec.amplitude
    return torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1)


def make_rotary(spec: RopeSpec, context: int, dtype: torch.dtype, device: torch.device) -> Rotary:
    """The rotary embedding of `spec` for sequences of up to `context` tokens."""
    if spec.kind == "dynamic":
        return DynamicRotary(spec, dtype, device)
    return TableRotary(spec, context, dtype, device)
