"""Chat messages to a prompt, with the Jinja template that a checkpoint brings.

The environment is the one that templates on model hubs are written for: trimmed blocks, loop
controls, `raise_exception`, `strftime_now`, a `tojson` that escapes no HTML, `{% generation %}`.
It is sandboxed, since a template comes with the weights and not from the operator.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from asyncmoe.errors import CheckpointError, RequestError

TEMPLATE_FILE: Final = "chat_template.jinja"
NAMED_TEMPLATES: Final = "additional_chat_templates"


class ChatTemplates:
    """The templates of one checkpoint by name, usually one, "default"."""

    def __init__(
        self, directory: Path, sources: Mapping[str, str], variables: Mapping[str, str]
    ) -> None:
        """`variables` are given to every template: bos_token, eos_token and so on."""
        self._directory = directory
        self._sources = sources
        self._variables = variables

    @classmethod
    def load(
        cls, directory: Path, config: Mapping[str, Any], variables: Mapping[str, str]
    ) -> ChatTemplates:
        """From the checkpoint's template files or else from `config`, its tokenizer_config.json.

        Raises `CheckpointError` for a template that is no text.
        """
        sources: dict[str, str] = {}
        single = directory / TEMPLATE_FILE
        if single.is_file():
            sources["default"] = single.read_text("utf-8")
        for named in sorted((directory / NAMED_TEMPLATES).glob("*.jinja")):
            sources[named.stem] = named.read_text("utf-8")
        if not sources and config.get("chat_template") is not None:
            sources = _from_config(directory, config["chat_template"])
        return cls(directory, sources, variables)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt for `messages`; `variables` are the template's own switches.

        Raises `RequestError` if the checkpoint has no template, if a message is malformed and if
        the template refuses the messages.
        """
        template = self._choose(bool(tools))
        checked = _check_messages(messages)
        try:
            return template.render(
                {
                    **self._variables,
                    "documents": None,
                    **variables,
                    "messages": checked,
                    "tools": list(tools) if tools else None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except Exception as error:  # a template is code of others: it may raise anything
            raise RequestError(
                f"the chat template refuses the messages: {error}", "messages"
            ) from error

    def _choose(self, with_tools: bool) -> jinja2.Template:
        compiled = self._compiled
        if with_tools and "tool_use" in compiled:
            return compiled["tool_use"]
        if "default" not in compiled:
            raise RequestError(
                f"the checkpoint has no chat template: neither {self._directory / TEMPLATE_FILE} "
                "nor chat_template in its tokenizer_config.json; send a prompt instead",
                "messages",
            )
        return compiled["default"]

    @cached_property
    def _compiled(self) -> dict[str, jinja2.Template]:
        environment = _environment()
        compiled = {}
        for name, source in self._sources.items():
            try:
                compiled[name] = environment.from_string(source)
            except jinja2.TemplateSyntaxError as error:
                raise RequestError(
                    f"chat template {name!r} of {self._directory} is not valid, line "
                    f"{error.lineno}: {error.message}",
                    "messages",
                ) from error
        return compiled


def _from_config(directory: Path, value: object) -> dict[str, str]:
    """The chat_template of tokenizer_config.json: one, or a list of named ones."""
    entries = value if isinstance(value, list) else [{"name": "default", "template": value}]
    sources = {}
    for entry in entries:
        match entry:
            case {"name": str(name), "template": str(template)}:
                sources[name] = template
            case _:
                raise CheckpointError(
                    f"chat_template in {directory / 'tokenizer_config.json'} holds {entry!r:.80}; "
                    "allowed: a template, or a list of {name, template}"
                )
    return sources


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if not messages:
        raise RequestError("messages is empty; it must have at least one message", "messages")
    return [_check_message(index, message) for index, message in enumerate(messages)]


def _check_message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """A copy with its role checked and a list of text parts joined, as text templates expect."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(
            f"messages[{index}] is {message!r:.80}; allowed: an object with a role", "messages"
        )
    copy = dict(message)
    content = copy.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        copy["content"] = "\n".join(_part_text(index, part) for part in content)
    elif content is not None and not isinstance(content, str):
        raise RequestError(
            f"messages[{index}].content is {content!r:.80}; allowed: text or text parts", "messages"
        )
    return copy


def _part_text(index: int, part: object) -> str:
    match part:
        case {"type": "text", "text": str(text)}:
            return text
        case _:
            raise RequestError(
                f"messages[{index}].content holds {part!r:.80}; allowed: text parts only, "
                'as {"type": "text", "text": ...}',
                "messages",
            )


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
