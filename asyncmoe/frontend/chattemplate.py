"""Chat messages to a prompt, with the Jinja template that a checkpoint brings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from asyncmoe.errors import CheckpointError, RequestError

if TYPE_CHECKING:
    import jinja2

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
        # jinja2 takes a while to import, and only chats need it
        from asyncmoe.frontend.templateenv import compile_templates

        return compile_templates(self._sources, self._directory)


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
