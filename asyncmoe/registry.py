"""Finds implementations of the contracts by name: registered through entry points, or in a file.

The group "schedulers" is the entry-point group `asyncmoe.schedulers`, and likewise "transports",
"models" and "devices". Built-ins register in the project's own metadata exactly as a third party's
package does in its own. `path/to/file.py:Class` names a class in a plain file instead, for every
group. A class that wraps others of its group (it has `around`) is named with the one that it wraps:
`impaired:tcp`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, distributions
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, Literal, overload

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from asyncmoe.config import SchedulerConfig
from asyncmoe.errors import AsyncMoeError, ConfigError, MissingDependency, UnknownName

if TYPE_CHECKING:
    from asyncmoe.device import Device
    from asyncmoe.model import Model
    from asyncmoe.scheduler import Scheduler, SchedulerContext, SchedulerParameters
    from asyncmoe.transport import Transport

# The groups and their contracts. These are strings since a command that needs no model should not
# wait for torch.
_CONTRACTS: Final = {
    "transports": "asyncmoe.transport:Transport",
    "schedulers": "asyncmoe.scheduler:Scheduler",
    "models": "asyncmoe.model:Model",
    "devices": "asyncmoe.device:Device",
}
_PREFIX: Final = "asyncmoe."  # of a group's name in a package's metadata


@overload
def find(group: Literal["transports"], name: str) -> type[Transport]: ...
@overload
def find(group: Literal["schedulers"], name: str) -> type[Scheduler]: ...
@overload
def find(group: Literal["models"], name: str) -> type[Model]: ...
@overload
def find(group: Literal["devices"], name: str) -> type[Device]: ...
@overload
def find(group: str, name: str) -> type[Any]: ...
def find(group: str, name: str) -> type[Any]:
    """The class registered in `group` under `name`, or the one that `path.py:Class` names.

    Raises `UnknownName` (for the group too), `MissingDependency` if the implementation needs a
    library that is not installed, and `ConfigError` for anything else that is wrong with it.
    """
    outer, separator, inner = name.partition(":")
    if separator and outer in _entries(group):
        return _around(group, outer, inner)
    path, separator, class_name = name.rpartition(":")
    if separator and path.endswith(".py"):
        return _from_file(group, Path(path).expanduser().resolve(), class_name)
    if name.endswith(".py"):
        raise ConfigError(f"{name!r} of {group} names a file; allowed: {name}:CLASS")
    return _from_entry_point(group, name)


def names(group: str) -> list[str]:
    """The registered names of `group`, sorted. Nothing is imported. Raises `UnknownName`."""
    return sorted(_entries(group))


def make_scheduler(config: SchedulerConfig, context: SchedulerContext) -> Scheduler:
    """The configured scheduler for one rank.

    Raises as `scheduler_parameters` does, and `ConfigError` for what its making raises.
    """
    kind, parameters = find("schedulers", config.name), scheduler_parameters(config)
    try:
        return kind(context, parameters)
    except AsyncMoeError:
        raise
    except Exception as error:
        raise ConfigError(
            f"scheduler {config.name!r} cannot be made: {type(error).__name__}: {error}"
        ) from error


def scheduler_parameters(config: SchedulerConfig) -> SchedulerParameters:
    """The parameters of the configured scheduler.

    Raises as `find` does, and `ConfigError` naming the parameter, its value and what is allowed.
    """
    kind = find("schedulers", config.name)
    where = f"scheduler.parameters of {config.name!r}"
    try:
        return kind.Parameters.model_validate(config.parameters)
    except ValidationError as error:
        fields = kind.Parameters.model_fields
        for each in error.errors():
            if each["type"] == "extra_forbidden" and len(each["loc"]) == 1:
                raise UnknownName(f"key in {where}", str(each["loc"][0]), fields) from None
        raise ConfigError("; ".join(_explained(where, fields, e) for e in error.errors())) from None


def _explained(where: str, fields: Mapping[str, FieldInfo], error: ErrorDetails) -> str:
    """One pydantic error as key, value, and what is allowed."""
    message = error["msg"].removeprefix("Value error, ")
    if not error["loc"]:  # a rule over several keys, which says all by itself
        return f"{where}: {message}"
    key = ".".join(map(str, error["loc"]))
    field = fields[str(error["loc"][0])]
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    bounds = [
        f"{sign} {getattr(rule, name)}"
        for rule in field.metadata
        for name, sign in signs.items()
        if hasattr(rule, name)
    ]
    allowed = f"; allowed is {' and '.join(bounds)}" if bounds else ""
    return f"{where}: {key} is {error['input']!r}: {message}{allowed}"


@cache
def _all_entries() -> dict[str, dict[str, list[EntryPoint]]]:
    """Entry points by group and name. Reading them all takes long, so it is done once."""
    found: dict[str, dict[str, list[EntryPoint]]] = {group: {} for group in _CONTRACTS}
    seen: set[str] = set()
    for distribution in distributions():
        ours = [e for e in distribution.entry_points if e.group.startswith(_PREFIX)]
        if not ours or distribution.name in seen:  # the first on sys.path hides later ones
            continue
        seen.add(distribution.name)
        for entry in ours:
            group = found.setdefault(entry.group.removeprefix(_PREFIX), {})
            group.setdefault(entry.name, []).append(entry)
    return found


def _entries(group: str) -> dict[str, list[EntryPoint]]:
    groups = _all_entries()
    if group not in groups:
        raise UnknownName("registry group", group, groups)
    return groups[group]


@cache
def _around(group: str, outer: str, inner: str) -> type[Any]:
    """The class `outer`, made to wrap the class `inner`, as in "impaired:tcp"."""
    kind = _from_entry_point(group, outer)
    if not hasattr(kind, "around"):
        raise ConfigError(f"{_noun(group)} {outer!r} wraps no other, so {outer}:{inner} is none")
    return _checked(group, kind.around(find(group, inner)), f"{_noun(group)} {outer}:{inner}")


@cache
def _from_entry_point(group: str, name: str) -> type[Any]:
    candidates = _entries(group).get(name)
    if candidates is None:
        raise UnknownName(_noun(group), name, names(group))
    if len({entry.value for entry in candidates}) > 1:
        values = ", ".join(sorted(entry.value for entry in candidates))
        raise ConfigError(f"{_noun(group)} {name!r} is registered more than once: {values}")
    entry = candidates[0]
    what = f"{_noun(group)} {name!r} ({entry.value})"
    try:
        loaded = entry.load()
    except ModuleNotFoundError as error:
        library = (error.name or str(error)).partition(".")[0]
        if library == entry.module.partition(".")[0]:
            raise ConfigError(f"{what} cannot be imported: {error}") from error
        package, extra = _extra_of(entry)
        raise MissingDependency(f"{_noun(group)} {name!r}", library, extra, package) from error
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{what} cannot be imported: {error}") from error
    return _checked(group, loaded, what)


def _extra_of(entry: EntryPoint) -> tuple[str, str | None]:
    """Distribution and extra that bring what `entry` needs: its declared one, or its namesake."""
    if entry.dist is None:
        return "asyncmoe", None
    namesakes = [e for e in entry.dist.metadata.get_all("Provides-Extra", []) if e == entry.name]
    return entry.dist.name, next(iter([*entry.extras, *namesakes]), None)


def _from_file(group: str, path: Path, class_name: str) -> type[Any]:
    _entries(group)  # the group must exist for a file too
    module = _file_module(path)
    what = f"{_noun(group)} class in {path}"
    if not hasattr(module, class_name):
        own = [
            name
            for name, value in inspect.getmembers(module, inspect.isclass)
            if value.__module__ == module.__name__ and issubclass(value, _contract(group))
        ]
        raise UnknownName(what, class_name, own)
    return _checked(group, getattr(module, class_name), f"{what}, {class_name!r},")


@cache
def _file_module(path: Path) -> ModuleType:
    """The file as a module, loaded once however many of its classes are asked for."""
    if not path.is_file():
        raise ConfigError(f"there is no file {path}")
    module_name = f"asyncmoe_file_{path.stem}_{hashlib.sha256(bytes(path)).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # dataclasses and pydantic resolve annotations through sys.modules while the class is made
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[module_name]
        if isinstance(error, AsyncMoeError) or not isinstance(error, Exception):
            raise
        raise ConfigError(f"{path} cannot be loaded: {type(error).__name__}: {error}") from error
    return module


def _checked(group: str, loaded: object, what: str) -> type[Any]:
    """`loaded` if it implements the group's contract."""
    contract = _contract(group)
    if not (inspect.isclass(loaded) and issubclass(loaded, contract)):
        raise ConfigError(f"{what} is not a subclass of {contract.__module__}.{contract.__name__}")
    if inspect.isabstract(loaded):
        missing = ", ".join(sorted(getattr(loaded, "__abstractmethods__", ())))
        raise ConfigError(f"{what} lacks what {contract.__name__} wants of it: {missing}")
    return loaded


def _contract(group: str) -> type[Any]:
    """The base class of a group's implementations; `object` for a group that others made."""
    contract = _CONTRACTS.get(group)
    return object if contract is None else pkgutil.resolve_name(contract)


def _noun(group: str) -> str:
    """What a member of the group is called in messages: "transport", "scheduler", …"""
    return group.removesuffix("s")
