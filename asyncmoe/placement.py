"""Which rank does what: roles, and the owner of every expert of every MoE layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, StrictInt, ValidationError

from asyncmoe.balance import balanced_owner
from asyncmoe.config import PlacementConfig
from asyncmoe.errors import ConfigError
from asyncmoe.model import LoadPlan

MAX_RANKS = 1 << 16  # owners are uint16
FILE_BYTES = 64 << 20  # 61 layers of 256 experts take 60 KB; a wrong path is not read into memory


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


class _PlacementFile(BaseModel):
    """The JSON file that `placement.file` names."""

    model_config = ConfigDict(extra="forbid")

    roles: list[Role] | None = None
    owner: list[list[StrictInt]]  # per MoE layer: the rank of each expert


def make_placement(
    config: PlacementConfig,
    world: int,
    moe_layers: int,
    experts: int,
    load: NDArray[np.float64] | None = None,
) -> Placement:
    """The placement that `config` asks for, of `experts` experts in each of `moe_layers` layers.

    Without a file every rank that may hold experts gets a contiguous range of each layer's, as
    even as possible (256 over 3 ranks: 86, 85, 85) or as `experts_per_rank` says; with the `load`
    of every expert [moe_layers, experts], as many experts as that, chosen so that loads are even.
    Raises `ConfigError` with the numbers when an expert would have no rank, a rank no work, or the
    cluster no home rank.
    """
    if not 1 <= world < MAX_RANKS:
        raise ConfigError(f"a placement over {world} ranks; there must be 1 to {MAX_RANKS - 1}")
    file = _read_file(config) if config.file is not None else None
    roles = _roles(config, file, world)
    if file is not None:
        owner = _owner_from_file(file, config.file, moe_layers, experts)
    else:
        if config.experts_per_rank is not None:
            counts = _checked_counts(config.experts_per_rank, world, experts)
        else:
            counts = _even_counts(roles, experts)
        if load is None:
            row = np.repeat(np.arange(world, dtype=np.int64), counts)
            owner = np.tile(row, (moe_layers, 1))
        else:
            owner = balanced_owner(load, counts)
    _check(roles, owner)
    return Placement(roles, owner.astype(np.uint16), _local_index(owner))


def _roles(config: PlacementConfig, file: _PlacementFile | None, world: int) -> tuple[Role, ...]:
    stated = config.roles
    if config.attention_ranks is not None:
        if stated is not None:
            raise ConfigError("placement.roles and placement.attention_ranks are both set; set one")
        stated = _apart(config.attention_ranks, world)
    if file is not None and file.roles is not None:
        if stated is not None and stated != file.roles:
            raise ConfigError(
                f"placement.roles is {stated}, but {config.file} says "
                f"{[str(role) for role in file.roles]}; set one of them"
            )
        stated = [role.value for role in file.roles]
    if stated is None:
        return (Role.BOTH,) * world
    if len(stated) != world:
        raise ConfigError(
            f"placement.roles names {len(stated)} roles for {world} ranks; it must name one each"
        )
    roles = tuple(Role(role) for role in stated)
    if all(role is Role.EXPERT for role in roles):
        raise ConfigError(
            f"placement.roles gives all {world} ranks the role expert; at least one must be "
            "attention or both, to be the home of requests"
        )
    if all(role is Role.ATTENTION for role in roles):
        raise ConfigError(
            f"placement.roles gives all {world} ranks the role attention; at least one must be "
            "expert or both, to hold the experts"
        )
    return roles


def _apart(attention_ranks: int, world: int) -> list[Literal["attention", "expert", "both"]]:
    """A role for each rank, none of which is both."""
    if attention_ranks >= world:
        raise ConfigError(
            f"placement.attention_ranks is {attention_ranks} of {world} ranks; at least one must "
            "be left for the experts"
        )
    return ["attention" if rank < attention_ranks else "expert" for rank in range(world)]


def _even_counts(roles: Sequence[Role], experts: int) -> list[int]:
    holders = [rank for rank, role in enumerate(roles) if role is not Role.ATTENTION]
    each, more = divmod(experts, len(holders))
    counts = [0] * len(roles)
    for index, rank in enumerate(holders):
        counts[rank] = each + (index < more)
    return counts


def _checked_counts(counts: list[int], world: int, experts: int) -> list[int]:
    if len(counts) != world:
        raise ConfigError(
            f"placement.experts_per_rank has {len(counts)} entries for {world} ranks; it must "
            "have one each"
        )
    if min(counts) < 0 or sum(counts) != experts:
        raise ConfigError(
            f"placement.experts_per_rank {counts} adds up to {sum(counts)}; the model has "
            f"{experts} experts in a layer, and no entry may be negative"
        )
    return counts


def _read_file(config: PlacementConfig) -> _PlacementFile:
    if config.experts_per_rank is not None:
        raise ConfigError("placement.file and placement.experts_per_rank are both set; set one")
    if config.profile is not None:
        raise ConfigError("placement.file and placement.profile are both set; set one")
    path = Path(str(config.file))
    try:
        if path.stat().st_size > FILE_BYTES:
            raise ConfigError(f"placement.file {path} is longer than {FILE_BYTES} bytes")
        return _PlacementFile.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"placement.file {path} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = "".join(f"[{part}]" for part in first["loc"])
        raise ConfigError(f"placement.file {path}{where}: {first['msg']}") from None


def _owner_from_file(
    file: _PlacementFile, path: str | None, moe_layers: int, experts: int
) -> NDArray[np.int64]:
    if len(file.owner) != moe_layers:
        raise ConfigError(
            f"placement.file {path} places {len(file.owner)} layers; the model has {moe_layers} "
            "MoE layers"
        )
    for layer, ranks in enumerate(file.owner):
        if len(ranks) != experts:
            raise ConfigError(
                f"placement.file {path} places {len(ranks)} experts in owner[{layer}]; the model "
                f"has {experts} in a layer"
            )
        for expert, rank in enumerate(ranks):
            if not 0 <= rank < MAX_RANKS:
                raise ConfigError(f"placement.file {path}: owner[{layer}][{expert}] is {rank}")
    return np.array(file.owner, dtype=np.int64).reshape(moe_layers, experts)


def _check(roles: Sequence[Role], owner: NDArray[np.int64]) -> None:
    world = len(roles)
    for layer, expert in np.argwhere(owner >= world)[:1]:
        raise ConfigError(
            f"owner[{layer}][{expert}] of the placement is rank {owner[layer, expert]}; there are "
            f"ranks 0 to {world - 1}"
        )
    held = np.bincount(owner.reshape(-1), minlength=world)
    for rank, role in enumerate(roles):
        if role is Role.ATTENTION and held[rank]:
            raise ConfigError(
                f"the placement puts {held[rank]} experts, all layers together, on rank {rank}, "
                "whose role is attention"
            )
        if role is Role.EXPERT and not held[rank]:
            raise ConfigError(
                f"rank {rank} has the role expert, but the placement gives it none of the "
                f"{owner.shape[1]} experts, so that it has no work; use fewer ranks"
            )


def _local_index(owner: NDArray[np.int64]) -> NDArray[np.uint16]:
    local = np.empty(owner.shape, np.uint16)
    for layer, ranks in enumerate(owner):
        order = ranks.argsort(kind="stable")
        counts = np.bincount(ranks)
        first = counts.cumsum() - counts  # of each rank's experts in `order`
        local[layer, order] = np.arange(len(ranks)) - first[ranks[order]]
    return local
