"""`asyncmoe config --explain`: every key of the tree with its type, default and meaning."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from asyncmoe import configfile, configflags, registry
from asyncmoe.errors import AsyncMoeError

WIDTH = 100
INTRODUCTION = (
    "Later sources win: the defaults below, a TOML file (--config FILE, with one [table] for each "
    "section), the environment, flags (--section.key). In flags and in the environment a list is "
    "comma-separated or JSON, a table is name=value,name=value or JSON, and one entry of a table "
    "is set as --scheduler.parameters.NAME VALUE or ASYNCMOE_SCHEDULER__PARAMETERS__NAME."
)


def explain() -> str:
    """All keys as text for a terminal."""
    lines = [*textwrap.wrap(INTRODUCTION, WIDTH)]
    section = ""
    for entry in explain_keys():
        if entry["section"] != section:
            section = entry["section"]
            lines += ["", f"[{section}]  {configfile.sections()[section].__doc__}"]
        lines.append(f"  {entry['key']}  ({entry['type']}) default {entry['default_text']}")
        lines += _indented(entry["meaning"])
        lines += _indented(", ".join((entry["environment"], *entry["flags"])))
    for scheduler in explain_schedulers():
        lines += ["", f"[scheduler.parameters] of {scheduler['scheduler']}"]
        if "error" in scheduler:
            lines += _indented(scheduler["error"])
        for entry in scheduler.get("parameters", ()):
            lines.append(f"  {entry['name']}  ({entry['type']}) default {entry['default_text']}")
            lines += _indented(entry["meaning"])
    return "\n".join(lines)


def explain_keys() -> Iterator[dict[str, Any]]:
    """Each key: section, key, type, default, default_text, meaning, environment and flags."""
    for path, key in configfile.keys().items():
        flags = [alias for alias, target in configflags.ALIASES.items() if target == path]
        yield {
            "section": key.section,
            "key": path,
            **_described(key.field),
            "environment": key.environment,
            "flags": [] if key.secret else [f"--{path}", *flags],
        }


def explain_schedulers() -> Iterator[dict[str, Any]]:
    """Each registered scheduler and its parameters, or why it cannot be loaded."""
    for name in registry.names("schedulers"):
        try:
            fields = registry.find("schedulers", name).Parameters.model_fields
        except AsyncMoeError as error:  # somebody's plug-in is broken, not the rest
            yield {"scheduler": name, "error": f"cannot be loaded: {error}"}
            continue
        parameters = [{"name": each, **_described(field)} for each, field in fields.items()]
        yield {"scheduler": name, "parameters": parameters}


def _described(field: FieldInfo) -> dict[str, Any]:
    default = field.get_default(call_default_factory=True, validated_data={})
    if field.is_required():
        default_text = "none, must be set"
    else:
        default_text = "none" if default is None else repr(default)
    return {
        "type": ", ".join((_type_text(field.annotation), *_bounds(field))),
        "default": None if field.is_required() else default,
        "default_text": default_text,
        "meaning": field.description or "",
    }


def _type_text(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return "one of " + ", ".join(str(each) for each in arguments)
    if origin in (Union, UnionType):
        kinds = [_type_text(each) for each in arguments if each is not NoneType]
        return " or ".join(kinds)
    if origin is list:
        return f"list of {_type_text(arguments[0])}"
    if origin is dict:
        return "table"
    plain = {str: "text", int: "integer", float: "number", bool: "true or false"}
    return plain.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _bounds(field: FieldInfo) -> Iterator[str]:
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    for rule in field.metadata:
        for attribute, word in words.items():
            if (bound := getattr(rule, attribute, None)) is not None:
                yield f"{word} {bound}"


def _indented(text: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6, break_on_hyphens=False
    )
