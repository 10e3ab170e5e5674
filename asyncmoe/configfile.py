"""Loading the configuration: defaults < TOML file < environment < flags or arguments.

Every value keeps its origin, so that an error can say where the value came from. The keys are
those of the tree in `config.py`, written `section.key`; nothing here names one of them.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from asyncmoe import native
from asyncmoe.config import Config, Section
from asyncmoe.errors import ConfigError, UnknownName

ENVIRONMENT_PREFIX = "ASYNCMOE_"
# Of the compiled parts: whether they are used, and how they are built.
NOT_KEYS = frozenset({native.SWITCH, "ASYNCMOE_BUILD_JOBS"})
_STRICT = ConfigDict(strict=True)
FILE_BYTES = 1 << 20  # no configuration is longer; a wrong path is not read into memory


@dataclass(frozen=True, slots=True)
class Key:
    """One leaf of the tree."""

    section: str
    name: str
    field: FieldInfo

    @property
    def path(self) -> str:
        """The key as files and flags write it: `kv.blocks`."""
        return f"{self.section}.{self.name}"

    @property
    def environment(self) -> str:
        """The environment variable that sets it: `ASYNCMOE_KV__BLOCKS`."""
        return f"{ENVIRONMENT_PREFIX}{self.section}__{self.name}".upper()

    @property
    def container(self) -> type | None:
        """`list` or `dict` for a key that holds one, otherwise None."""
        origins = [get_origin(option) for option in self._options()]
        return next((kind for kind in (list, dict) if kind in origins), None)

    @property
    def optional(self) -> bool:
        """Whether the value may be None."""
        return NoneType in self._options()

    @property
    def secret(self) -> bool:
        """Whether the value must not be shown."""
        return self.field.repr is False

    def _options(self) -> tuple[Any, ...]:
        annotation = self.field.annotation
        if get_origin(annotation) in (list, dict):
            return (annotation,)
        return get_args(annotation) or (annotation,)


@dataclass(frozen=True, slots=True)
class Setting:
    """One value from one source; with `subkey`, one entry of a key that holds a dict."""

    key: Key
    value: Any
    origin: str
    subkey: str | None = None


def sections() -> dict[str, type[Section]]:
    """The sections of the tree by name, in order."""
    found = {name: field.annotation for name, field in Config.model_fields.items()}
    return {name: kind for name, kind in found.items() if isinstance(kind, type)}


def keys() -> dict[str, Key]:
    """Every key of the tree by path, in order."""
    every = (
        Key(section, name, field)
        for section, kind in sections().items()
        for name, field in kind.model_fields.items()
    )
    return {key.path: key for key in every}


def find_key(path: str, origin: str) -> tuple[Key, str | None]:
    """The key that `path` names, and the sub-key behind it (`scheduler.parameters.patience`).

    Raises `UnknownName` with the nearest section or key.
    """
    section, _, rest = path.partition(".")
    if section not in sections():
        raise UnknownName(f"config section (in {origin})", section, sections())
    name, _, subkey = rest.partition(".")
    key = keys().get(f"{section}.{name}")
    if key is None or (subkey and key.container is not dict):
        known = [each for each in keys() if each.startswith(f"{section}.")]
        raise UnknownName(f"config key (in {origin})", path, known)
    return key, subkey or None


def load(
    file: str | Path | None = None,
    environ: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
    flags: Iterable[Setting] = (),
) -> Config:
    """The configuration from all sources; later parameters win over earlier ones.

    `environ` None takes the process's own. `overrides` are typed values by key path, as a Python
    caller gives them (None leaves the key as it is). Raises `ConfigError` naming the key, its
    value, where it came from and what is allowed.
    """
    return resolve(file, environ, overrides, flags)[0]


def resolve(
    file: str | Path | None = None,
    environ: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
    flags: Iterable[Setting] = (),
) -> tuple[Config, dict[str, str]]:
    """Like `load`, and also the origin of every key that is not at its default, by path."""
    values: dict[str, dict[str, Any]] = {}
    origins: dict[str, str] = {}
    for setting in (
        *(_file_settings(Path(file)) if file is not None else ()),
        *_environment_settings(os.environ if environ is None else environ),
        *_override_settings(overrides or {}),
        *flags,
    ):
        _apply(setting, values, origins)
    try:
        return Config.model_validate(values), origins
    except ValidationError as error:
        raise ConfigError("; ".join(_explained(e, origins) for e in error.errors())) from None


def text_settings(path: str, text: str, origin: str) -> Iterator[Setting]:
    """What `text`, from a flag or the environment, sets.

    A list is JSON or comma-separated. A dict is a JSON object or comma-separated `name=value`, and
    adds to what earlier sources set. A sub-key's value is JSON, or else plain text.
    """
    key, subkey = find_key(path, origin)
    if subkey is not None:
        yield Setting(key, json_or_text(text), origin, subkey)
    elif text.strip().lower() in ("none", "null") and key.optional:
        yield Setting(key, None, origin)
    elif key.container is None:
        yield Setting(key, text, origin)
    elif key.container is dict:
        for name, value in _pairs(key, text, origin):
            yield Setting(key, value, origin, name)
    elif text.lstrip().startswith("["):
        yield Setting(key, _json(key, text, origin), origin)
    else:
        yield Setting(key, [part.strip() for part in text.split(",") if part.strip()], origin)


def json_or_text(text: str) -> Any:
    """The value that `text` is in JSON; the text itself when it is not JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return text.strip()


def _pairs(key: Key, text: str, origin: str) -> Iterator[tuple[str, Any]]:
    if text.lstrip().startswith("{"):
        yield from _json(key, text, origin).items()
        return
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = part.partition("=")
        if not equals or not name.strip():
            raise ConfigError(
                f"config key {key.path} from {origin}: {part!r} is not name=value; give "
                "name=value,name=value or a JSON object"
            )
        yield name.strip(), json_or_text(value)


def _json(key: Key, text: str, origin: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(
            f"config key {key.path} from {origin}: {text!r} is not JSON ({error})"
        ) from None


def _file_settings(path: Path) -> Iterator[Setting]:
    try:
        if path.stat().st_size > FILE_BYTES:
            raise ConfigError(f"config file {path} is longer than {FILE_BYTES} bytes")
        table = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"config file {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} is not TOML: {error}") from None
    origin = f"file {path}"
    for section, content in table.items():
        if section in sections() and not isinstance(content, dict):
            raise ConfigError(
                f"config section {section} in {origin} is {content!r}; write it as a table: "
                f"[{section}]"
            )
        for name, value in content.items() if isinstance(content, dict) else ((section, content),):
            key = find_key(f"{section}.{name}", origin)[0]
            _check_type(key, value, origin)
            yield Setting(key, value, origin)


def _check_type(key: Key, value: Any, origin: str) -> None:
    """A file has types of its own: its `"2"` and its `true` are no number 2 and 1."""
    kind: TypeAdapter[Any] = TypeAdapter(key.field.annotation or Any, config=_STRICT)
    try:
        kind.validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(_told(key, (), value, origin, first["msg"])) from None


def _environment_settings(environ: Mapping[str, str]) -> Iterator[Setting]:
    compiled = environ.get(native.SWITCH, "1")
    if compiled not in ("0", "1"):
        raise ConfigError(f"environment variable {native.SWITCH} is {compiled!r}; allowed: 0, 1")
    for variable, text in sorted(environ.items()):
        if variable.startswith(ENVIRONMENT_PREFIX) and variable not in NOT_KEYS:
            path = variable.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", ".")
            yield from text_settings(path, text, f"environment variable {variable}")


def _override_settings(overrides: Mapping[str, Any]) -> Iterator[Setting]:
    for path, value in overrides.items():
        if value is not None:
            key, subkey = find_key(path, "argument")
            yield Setting(key, value, "argument", subkey)


def _apply(setting: Setting, values: dict[str, dict[str, Any]], origins: dict[str, str]) -> None:
    section, path = values.setdefault(setting.key.section, {}), setting.key.path
    if setting.subkey is None:
        section[setting.key.name] = setting.value
        origins[path] = setting.origin
        for below in [each for each in origins if each.startswith(f"{path}.")]:
            del origins[below]
    else:
        before = section.get(setting.key.name)
        section[setting.key.name] = {
            **(before if isinstance(before, dict) else {}),
            setting.subkey: setting.value,
        }
        origins[f"{path}.{setting.subkey}"] = setting.origin


def _explained(error: ErrorDetails, origins: Mapping[str, str]) -> str:
    message = error["msg"].removeprefix("Value error, ")
    if len(error["loc"]) < 2:  # a rule over several keys, which says all by itself
        return message
    section, name, *index = error["loc"]
    path = f"{section}.{name}"
    return _told(keys()[path], index, error["input"], origins.get(path, "default"), message)


def _told(key: Key, index: Sequence[int | str], value: Any, origin: str, message: str) -> str:
    shown = "".join(f"[{each}]" for each in index)
    said = "(not shown)" if key.secret else repr(value)
    allowed = message.replace("Input should be", "should be", 1)
    return f"config key {key.path}{shown} = {said} from {origin}: {allowed}"
