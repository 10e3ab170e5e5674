"""Prompts in all their forms to token ids, at a cost that the model's own limits bound."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from asyncmoe.errors import RequestError
from asyncmoe.frontend.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]  # text, token ids or chat messages

LONG_CHARS: Final = 4096  # from here on text is tokenised off the loop (about 1 ms of work)


async def encode_prompts(
    tokenizer: Tokenizer | None,
    prompts: Sequence[Prompt],
    room_tokens: int,
    chat_options: Mapping[str, Any],
) -> list[Sequence[int]]:
    """The token ids of each prompt, in order; those that are ids already come back as they are.

    Long texts and chats are tokenised on a thread, one after the other, while the loop runs. Text
    with more characters than `room_tokens` of the longest token have bytes is refused before that.

    Raises `RequestError`, also for a text or a chat without a tokenizer.
    """
    for prompt in prompts:
        _check_form(prompt)

    def encode() -> list[Sequence[int]]:
        return [_encode(tokenizer, prompt, room_tokens, chat_options) for prompt in prompts]

    if sum(map(_chars, prompts)) < LONG_CHARS:
        return encode()
    return await asyncio.to_thread(encode)


def list_prompts(prompts: Any) -> list[Prompt]:
    """One prompt or many, text or token ids (lists, arrays, tensors), as a list of prompts.

    Raises `RequestError` for anything else.
    """
    prompts = _plain(prompts)
    if isinstance(prompts, str) or (_is_list(prompts) and prompts and isinstance(prompts[0], int)):
        prompts = [prompts]
    if not _is_list(prompts):
        raise RequestError(
            f"prompts are {type(prompts).__name__}; allowed: text, token ids, or a list of them",
            "prompts",
        )
    return [_checked(_plain(prompt)) for prompt in prompts]


def _plain(value: Any) -> Any:
    """Arrays, tensors and their numbers as Python's own, at any depth that a prompt has."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, list | tuple) and any(hasattr(item, "tolist") for item in value):
        return [_plain(item) for item in value]
    return value


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def _checked(prompt: Any) -> Prompt:
    if isinstance(prompt, str):
        return prompt
    if _is_list(prompt) and all(type(token) is int for token in prompt):
        return cast("Sequence[int]", prompt)
    raise RequestError(f"a prompt is {prompt!r:.80}; allowed: text or token ids", "prompts")


def _check_form(prompt: Any) -> None:
    """Raise `RequestError` for what cannot be a prompt by its looks."""
    known = isinstance(prompt, str) or (
        _is_list(prompt) and (not prompt or isinstance(prompt[0], int | Mapping))
    )
    if not known:
        raise RequestError(
            f"the prompt is {prompt!r:.80}; allowed: text, token ids or chat messages", "prompt"
        )


def _chars(prompt: Prompt) -> int:
    """Characters to be tokenised; a chat's are not known before it is rendered, so many."""
    if isinstance(prompt, str):
        return len(prompt)
    return 0 if _is_ids(prompt) else LONG_CHARS


def _is_ids(prompt: Prompt) -> bool:
    return not isinstance(prompt, str) and (not prompt or isinstance(prompt[0], int))


def _encode(
    tokenizer: Tokenizer | None,
    prompt: Prompt,
    room_tokens: int,
    chat_options: Mapping[str, Any],
) -> Sequence[int]:
    if _is_ids(prompt):
        return cast("Sequence[int]", prompt)
    if tokenizer is None:
        raise RequestError(
            "the checkpoint has no tokenizer files: give the prompt as token ids", "prompt"
        )
    if isinstance(prompt, str):
        _check_length(tokenizer, prompt, room_tokens, "prompt")
        return tokenizer.encode(prompt)
    text = tokenizer.render_chat(cast("Sequence[Mapping[str, Any]]", prompt), **chat_options)
    _check_length(tokenizer, text, room_tokens, "messages")
    # The template writes all special tokens itself.
    return tokenizer.encode(text, add_special_tokens=False)


def _check_length(tokenizer: Tokenizer, text: str, room_tokens: int, parameter: str) -> None:
    """Refuse what could not fit even in the longest tokens: the tokenizer has no limit itself."""
    if len(text) > room_tokens * tokenizer.longest_token_bytes:
        raise RequestError(
            f"prompt of {len(text)} characters is too long: there is room for {room_tokens} "
            f"tokens, prompt and answer together, and none has more than "
            f"{tokenizer.longest_token_bytes} bytes",
            parameter,
        )
