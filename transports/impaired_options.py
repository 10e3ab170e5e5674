"""What can be wrong with links, as options: typed, checked, and the same for all ranks.

`links` names links as "0-1" (from rank 0 to rank 1), with "*" for any rank; the last that fits
wins, over what stands at the top for all links. A trace is a CSV file with the header
`time_s,link,available`: from that time on, the link has that fraction of `mbit_per_s`, 0 to 1.
"""

from __future__ import annotations

import csv
import re
from bisect import bisect_right
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from asyncmoe.errors import ConfigError, UnknownName

_LINK = re.compile(r"(\d+|\*)-(\d+|\*)")
_HEADER = ["time_s", "link", "available"]
_MOST_S = 3600.0
_Model = TypeVar("_Model", bound=BaseModel)


class Impairment(BaseModel):
    """What is wrong with one directed link; nothing by default."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    latency_ms: float = Field(0.0, ge=0, le=1000 * _MOST_S)
    jitter_ms: float = Field(0.0, ge=0, le=1000 * _MOST_S)  # at most; evenly distributed
    mbit_per_s: float | None = Field(None, gt=0)  # None: no cap
    stall_every_s: float | None = Field(None, gt=0)  # mean time between stalls, which is random
    stall_s: float = Field(0.0, ge=0, le=_MOST_S)  # how long each is
    duplicate: float = Field(0.0, ge=0, le=1)  # probability for a parcel
    reorder: float = Field(0.0, ge=0, le=1)  # probability that others may overtake
    reorder_ms: float = Field(5.0, gt=0, le=1000 * _MOST_S)  # how long it waits for them
    lose_after_s: float | None = Field(None, ge=0)  # from the start on; ends both directions

    @model_validator(mode="after")
    def _stalls_have_both(self) -> Self:
        if (self.stall_every_s is None) != (self.stall_s == 0):
            raise ValueError("stall_every_s and stall_s go together")
        return self

    @property
    def delays(self) -> bool:
        """Whether anything is ever late."""
        return bool(
            self.latency_ms
            or self.jitter_ms
            or self.mbit_per_s
            or self.stall_every_s
            or self.reorder
        )


class Options(Impairment):
    """All options of `impaired` itself."""

    seed: int = Field(0, ge=0)
    trace: str | None = None  # path of a file
    links: dict[str, dict[str, Any]] = Field(default_factory=dict)


class Impairments:
    """The impairment of every link, and the fraction of its bandwidth over time."""

    def __init__(self, options: dict[str, Any], world: int) -> None:
        """Raises `ConfigError` naming the option. `world`: ranks that there are."""
        self._options = checked(Options, options, "transport.options")
        self.seed = self._options.seed
        defaults = self._options.model_dump(include=set(Impairment.model_fields))
        self._links: list[tuple[str, Impairment]] = []
        for link, values in self._options.links.items():
            check_link(link, f"key of transport.options.links {link!r}", world)
            where = f"transport.options.links.{link}"
            self._links.append((link, checked(Impairment, {**defaults, **values}, where)))
        self._all = Impairment(**defaults)
        trace = self._options.trace
        self._trace = [] if trace is None else read_trace(Path(trace), world)

    def of(self, source: int, target: int) -> Impairment:
        """What is wrong from `source` to `target`. Raises `ConfigError` if a trace names the link
        and it has no bandwidth."""
        found = self._all
        for link, impairment in self._links:
            if fits(link, source, target):
                found = impairment
        if found.mbit_per_s is None and self.fractions(source, target).moments:
            raise ConfigError(
                f"transport.options.trace has link {source}-{target}, whose mbit_per_s is not set"
            )
        return found

    def fractions(self, source: int, target: int) -> Fractions:
        """The available fraction over time."""
        fitting = [(t, part) for t, link, part in self._trace if fits(link, source, target)]
        return Fractions(fitting)


class Fractions:
    """A fraction that changes at moments: 1 before the first."""

    def __init__(self, steps: list[tuple[float, float]]) -> None:
        self.moments = [moment_s for moment_s, _ in steps]
        self._parts = [1.0, *(part for _, part in steps)]

    def end_of(self, begin_s: float, work_s: float) -> float:
        """When something ends that begins at `begin_s` and takes `work_s` of the whole bandwidth.

        Infinite if it never does.
        """
        step = bisect_right(self.moments, begin_s)
        now_s = begin_s
        while step < len(self.moments):
            part = self._parts[step]
            done_s = (self.moments[step] - now_s) * part
            if done_s >= work_s:
                return now_s + work_s / part if part else now_s
            work_s -= done_s
            now_s = self.moments[step]
            step += 1
        part = self._parts[-1]
        return now_s + work_s / part if part else float("inf")


def own_options() -> set[str]:
    """Names of the options that are not the wrapped transport's."""
    return set(Options.model_fields)


def checked(kind: type[_Model], values: dict[str, Any], where: str) -> _Model:
    """`values` as options. Raises `ConfigError` naming the first that is wrong."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        # A wrong name first: what is missing may be what it was meant for.
        first = min(error.errors(), key=lambda each: each["type"] != "extra_forbidden")
        name = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            raise UnknownName(f"key in {where}", name, _keys(kind, name)) from None
        if first["type"] == "missing":
            raise ConfigError(f"{where}.{name} is missing") from None
        told = f"{where}.{name} is {first['input']!r}" if name else where
        raise ConfigError(f"{told}: {first['msg'].removeprefix('Value error, ')}") from None


def _keys(kind: type[BaseModel], name: str) -> list[str]:
    """What may stand in place of the key `name`, with the path to it."""
    *path, _ = name.split(".")
    for part in path:
        options = kind.model_fields[part].annotation
        kind = next(o for o in (options, *getattr(options, "__args__", ())) if isinstance(o, type))
    return [".".join([*path, key]) for key in kind.model_fields]


def check_link(link: str, what: str, world: int) -> None:
    """Raise `ConfigError` if `link` names no links between `world` ranks."""
    if not _LINK.fullmatch(link):
        raise ConfigError(f'{what} is not a link; allowed: "SOURCE-TARGET", a rank or * each')
    source, _, target = link.partition("-")
    if source == target != "*":
        raise ConfigError(f"{what} is from a rank to itself; allowed: two different ones")
    strange = [part for part in (source, target) if part != "*" and int(part) >= world]
    if strange:
        raise ConfigError(f"{what} names rank {strange[0]}; there are {world} ranks")


def fits(link: str, source: int, target: int) -> bool:
    """Whether `link` names the one from `source` to `target`."""
    return all(
        part in ("*", str(rank))
        for part, rank in zip(link.split("-"), (source, target), strict=True)
    )


def read_trace(path: Path, world: int) -> list[tuple[float, str, float]]:
    """(time, link, fraction), sorted by time. Raises `ConfigError` naming the line."""
    try:
        with path.open(newline="") as file:
            rows = list(csv.reader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"transport.options.trace cannot be read: {error}") from error
    if not rows or [cell.strip() for cell in rows[0]] != _HEADER:
        raise ConfigError(f"{path}: line 1 is not {','.join(_HEADER)}")
    steps = []
    for number, row in enumerate(rows[1:], 2):
        try:
            moment, link, part = (cell.strip() for cell in row)
            step = float(moment), link, float(part)
        except ValueError:
            raise ConfigError(f"{path}: line {number} is not {','.join(_HEADER)}") from None
        check_link(link, f"{path}: line {number}: {link!r}", world)
        if not (0 <= step[0] < float("inf") and 0 <= step[2] <= 1):
            raise ConfigError(
                f"{path}: line {number}: allowed: a time from 0 on and a fraction from 0 to 1"
            )
        steps.append(step)
    return sorted(steps, key=lambda step: step[0])
