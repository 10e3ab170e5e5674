"""The results of an experiment: what the commands write as JSON and the report shows."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson
from pydantic import TypeAdapter, ValidationError

from asyncmoe.errors import ConfigError

FILE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a workload."""

    name: str  # unique, for example "defrag at 100/s"
    series: str  # what it is compared as: runs of one series make one line
    settings: dict[str, Any]  # what tells it from the other runs
    metrics: dict[str, Any]  # `metrics.summary.summarise`
    cluster: dict[str, Any]  # `metrics.cluster.cluster_figures`


@dataclass(frozen=True, slots=True)
class Published:
    """A published figure and ours."""

    what: str
    published: float
    ours: float | None
    unit: str
    source: str
    note: str = ""  # where ours differs: why


@dataclass(frozen=True, slots=True)
class Results:
    """Everything that a report needs."""

    title: str
    world: str  # "live" or "virtual"
    command: str  # that makes it again
    config: dict[str, Any]
    workload: dict[str, Any]
    measure: dict[str, Any]
    runs: list[Run]
    published: list[Published] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)  # why there are no more runs, by name

    def to_json(self) -> bytes:
        """One line. The same results give the same bytes."""
        return orjson.dumps(asdict(self), option=orjson.OPT_SERIALIZE_NUMPY)


def read_results(path: Path) -> Results:
    """What a command wrote. Raises `ConfigError` for a file that is something else."""
    try:
        if path.stat().st_size > FILE_BYTES:
            raise ConfigError(f"{path} is longer than {FILE_BYTES} bytes")
        results: Results = TypeAdapter(Results).validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{path} holds no results: {where}: {first['msg']}") from None
    return results
