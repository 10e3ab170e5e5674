"""The Jinja environment that the chat templates of model hubs are written for.

Trimmed blocks, loop controls, `raise_exception`, `strftime_now`, a `tojson` that escapes no HTML,
`{% generation %}`. It is sandboxed, since a template comes with the weights and not from the
operator.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from asyncmoe.errors import RequestError


def compile_templates(sources: Mapping[str, str], directory: Path) -> dict[str, jinja2.Template]:
    """The templates by name. Raises `RequestError` for one that is not valid, naming its line.

    `directory` is where they come from, for that message.
    """
    environment = _environment()
    compiled = {}
    for name, source in sources.items():
        try:
            compiled[name] = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise RequestError(
                f"chat template {name!r} of {directory} is not valid, line "
                f"{error.lineno}: {error.message}",
                "messages",
            ) from error
    return compiled


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant said, for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance's set

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
