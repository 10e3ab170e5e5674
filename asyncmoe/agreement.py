"""All ranks must run the same model with the same settings; they find out before they load it.

What a rank computes for another, and what it reserves for it, follows from settings that no frame
carries. With different ones nothing fails: the text is silently wrong, or requests wait for ever.
So each rank publishes a fingerprint in the directory, and each compares its own with rank 0's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import fields
from importlib.metadata import version

import orjson

from asyncmoe.checkpoint import Checkpoint
from asyncmoe.config import Config, SchedulerConfig
from asyncmoe.errors import ConfigError, ProtocolError
from asyncmoe.model import ModelSpec
from asyncmoe.placement import Placement
from asyncmoe.registry import scheduler_parameters
from asyncmoe.transport import Directory

_SECTIONS = ("engine", "kv")  # the front end reckons with rank 0's values for every home
_KEYS = {
    "model": ("routing",),
    "transport": ("window_rows", "parcel_bytes", "message_bytes"),
    "cluster": ("peer_timeout_s",),
}
_SORTED = orjson.OPT_SORT_KEYS
_SHOWN_CHARS = 60  # of a value; a longer one is told by its digest


def fingerprint(
    config: Config, spec: ModelSpec, checkpoint: Checkpoint, placement: Placement
) -> dict[str, str]:
    """What must be equal on all ranks, by the name that a user knows it by; short printable text.

    Paths, threads, addresses and batch sizes may differ. The scheduling rule may not: a result
    names one, and ranks under a synchronous rule wait for each other. Raises `CheckpointError` if
    a weight file cannot be read.
    """
    found = {
        "the version of asyncmoe": version("asyncmoe"),
        "model.name's config.json": _digest(orjson.dumps(dict(checkpoint.config), option=_SORTED)),
        "model.name's weights": checkpoint.source.identity(),
        "transport.name": config.transport.name or "auto",  # rank 0 has filled it in
        "placement.roles": _short(",".join(placement.roles)),
        "placement (owner of each expert)": _digest(placement.owner.tobytes()),
    }
    found |= _rule(config.scheduler)
    for item in fields(spec):
        found[f"the model's {item.name}"] = _short(str(getattr(spec, item.name)))
    for section in _SECTIONS:
        for key, value in getattr(config, section).model_dump().items():
            found[f"{section}.{key}"] = _short(str(value))
    for section, keys in _KEYS.items():
        for key in keys:
            found[f"{section}.{key}"] = _short(str(getattr(getattr(config, section), key)))
    return found


def _rule(config: SchedulerConfig) -> dict[str, str]:
    found = {"scheduler.name": _short(config.name)}
    for key, value in scheduler_parameters(config).model_dump().items():
        found[f"scheduler.parameters.{key}"] = _short(str(value))
    return found


async def agree(
    directory: Directory, rank: int, world: int, marks: Mapping[str, str], timeout_s: float
) -> None:
    """Publish `marks`, this rank's fingerprint, and compare it with that of rank 0.

    Rank 0 itself does not wait: a rank that differs fails, and so the start-up of all.

    Raises `ConfigError` naming what differs and both values, and what `Directory.lookup` does.
    """
    if world == 1:
        return
    directory.publish(f"config/{rank}", orjson.dumps(dict(marks)).decode())
    if rank == 0:
        return
    theirs = _read(await directory.lookup("config/0", timeout_s))
    differing = [key for key in (*marks, *theirs) if marks.get(key) != theirs.get(key)]
    if differing:
        key = differing[0]
        raise ConfigError(
            f"{key} is {marks.get(key)} on rank {rank} and {theirs.get(key)} on rank 0; "
            "all ranks must have the same"
        )


def _read(text: str) -> dict[str, str]:
    try:
        marks = orjson.loads(text)
    except ValueError as error:
        raise ProtocolError(f"the directory's config/0 is not understood: {error}") from error
    if not isinstance(marks, dict):
        raise ProtocolError(f"the directory's config/0 is a {type(marks).__name__}, not a map")
    return marks


def _short(value: str) -> str:
    return value if len(value) <= _SHOWN_CHARS else _digest(value.encode())


def _digest(data: bytes) -> str:
    return f"digest {hashlib.blake2b(data, digest_size=8).hexdigest()}"
