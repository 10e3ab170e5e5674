"""The shapes of OpenAI's completions API: request bodies in, response objects out. No I/O.

Sampling fields are checked by `SamplingParams`, which knows their ranges; what is checked here is
the rest of a body. Fields that nobody knows are ignored, as OpenAI's own server and vLLM do; known
fields that this server cannot honour are refused when they are set.
"""

from __future__ import annotations

import reprlib
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import lru_cache
from http import HTTPStatus
from typing import Any, ClassVar, Literal, Protocol, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from asyncmoe.errors import RequestError
from asyncmoe.frontend.mold import Mold
from asyncmoe.frontend.output import RequestOutput, TokenLogprob
from asyncmoe.frontend.prompts import Prompt
from asyncmoe.frontend.tokenizer import Tokenizer
from asyncmoe.sampling import SamplingParams

CHOICES = 1024  # most answers of one request: prompts times n

_SAMPLING = [f.name for f in fields(SamplingParams) if f.name not in ("logprobs", "max_tokens")]


class StreamOptions(BaseModel):
    """`stream_options` of a body."""

    model_config = ConfigDict(strict=True)

    include_usage: bool = False


class Body(BaseModel):
    """What both kinds of request have in common; the sampling fields pass through unchecked."""

    model_config = ConfigDict(extra="allow", strict=True)
    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "use_beam_search": (None, False),
        "response_format": (None, {"type": "text"}),
        "echo": (None, False),
        "prompt_logprobs": (None,),
        "skip_special_tokens": (None, True),
    }

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=128)
    return_token_ids: bool | None = None

    def prompts(self) -> list[Prompt]:
        """The prompts of the request, each of which gets `n` answers."""
        raise NotImplementedError

    def chat_options(self) -> dict[str, Any]:
        """The switches of the chat template that are set."""
        return {}

    def sampling(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """The sampling fields that are set, over `defaults`. Raises `RequestError` naming a
        field that is not usable."""
        extra = self.model_extra or {}
        for name, harmless in self.UNSUPPORTED.items():
            if extra.get(name) not in harmless:
                raise RequestError(
                    f"{name} is {reprlib.repr(extra[name])}; it is not supported", name
                )
        given = {name: extra[name] for name in _SAMPLING if extra.get(name) is not None}
        return SamplingParams(**{**defaults, **given, **self._lengths(extra)})

    def _lengths(self, extra: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError

    def requests(self, defaults: Mapping[str, Any]) -> tuple[list[Prompt], list[SamplingParams]]:
        """The prompts, and the fields of each of the answers that every prompt gets.

        With a seed, answer j has the seed + j. Raises `RequestError`.
        """
        prompts, params, n = self.prompts(), self.sampling(defaults), self.n or 1
        if len(prompts) * n > CHOICES:
            raise RequestError(
                f"{len(prompts)} prompts times n = {n} is {len(prompts) * n} answers; allowed: "
                f"{CHOICES}",
                "n",
            )
        if params.seed is None:
            return prompts, [params] * n
        return prompts, [replace(params, seed=params.seed + j) for j in range(n)]


class CompletionBody(Body):
    """The body of `POST /v1/completions`."""

    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {
        **Body.UNSUPPORTED,
        "suffix": (None, ""),
        "best_of": (None, 1),
    }

    prompt: Any

    def prompts(self) -> list[Prompt]:
        """A string or one list of ids is one prompt."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        # The set of types is fast to have, even for the longest list that a body can hold.
        kinds = set(map(type, prompt)) if isinstance(prompt, list) else set()
        if kinds == {int}:
            return [prompt]
        if kinds in ({str}, {list}) and len(prompt) > CHOICES:
            raise RequestError(f"{len(prompt)} prompts; allowed: {CHOICES}", "prompt")
        if kinds == {str} or (kinds == {list} and all(set(map(type, p)) == {int} for p in prompt)):
            return list(prompt)
        raise RequestError(
            f"prompt is {reprlib.repr(prompt)}; allowed: a string, a list of strings, a list of "
            "token ids, or a list of lists of token ids, none of the lists empty",
            "prompt",
        )

    def _lengths(self, extra: dict[str, Any]) -> dict[str, Any]:
        names = ("max_tokens", "logprobs")
        return {name: extra[name] for name in names if extra.get(name) is not None}


class ChatBody(Body):
    """The body of `POST /v1/chat/completions`."""

    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {
        **Body.UNSUPPORTED,
        "tools": (None, []),
        "functions": (None, []),
        "audio": (None,),
        "add_generation_prompt": (None, True),
        "continue_final_message": (None, False),
        "chat_template": (None,),
    }

    messages: list[dict[str, Any]] = Field(min_length=1)
    chat_template_kwargs: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)

    def prompts(self) -> list[Prompt]:
        """The one conversation."""
        return [self.messages]

    def chat_options(self) -> dict[str, Any]:
        """The switches of the chat template that are set."""
        options = self.chat_template_kwargs or {}
        if taken := {"messages", "tools"} & set(options):
            raise RequestError(
                f"chat_template_kwargs sets {taken.pop()}; allowed: switches of the template",
                "chat_template_kwargs",
            )
        return options

    def _lengths(self, extra: dict[str, Any]) -> dict[str, Any]:
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs to be true", "top_logprobs")
        longest = extra.get("max_completion_tokens")
        return {
            "max_tokens": extra.get("max_tokens") if longest is None else longest,
            "logprobs": (self.top_logprobs or 0) if self.logprobs else None,
        }


B = TypeVar("B", bound=Body)


def parse(kind: type[B], body: Any) -> B:
    """The body as `kind`. Raises `RequestError` with the field, its value and what is allowed."""
    if not isinstance(body, dict):
        raise RequestError(f"the body is {type(body).__name__}; it must be a JSON object")
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        if first["type"] == "missing":
            raise RequestError(f"{name} is missing", name) from None
        says = first["msg"].replace("Input should be", "should be", 1)
        raise RequestError(f"{name} is {reprlib.repr(first['input'])}: {says}", name) from None


class Choice(Protocol):
    """Makes the `choices` entries of one answer, in the shape of one kind of request."""

    def opening(self) -> dict[str, Any] | None:
        """The first entry of a stream, before any text; None if there is none."""

    def news(self, output: RequestOutput) -> dict[str, Any]:
        """The entry of one item of a stream."""

    def mold(self) -> Mold:
        """`news` for items that are text and token ids only."""

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        """The entry of a whole answer."""


class CompletionChoice:
    """Choices of `/v1/completions`."""

    def __init__(self, index: int, tokenizer: Tokenizer | None, token_ids: bool) -> None:
        self._index, self._tokenizer, self._token_ids = index, tokenizer, token_ids
        self._offset = 0  # characters of the answer before the next token

    def opening(self) -> None:
        """None: a completion's stream starts with text."""

    def news(self, output: RequestOutput) -> dict[str, Any]:
        """The new text of one item."""
        return self._entry(output, output.delta or "", output.new_token_ids)

    def mold(self) -> Mold:
        """See `Choice`."""
        return _mold(CompletionChoice, self._index, self._token_ids)

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        """The whole text."""
        return self._entry(output, output.text or "", output.token_ids)

    def _entry(self, output: RequestOutput, text: str, token_ids: list[int]) -> dict[str, Any]:
        entry = {
            "index": self._index,
            "text": text,
            "logprobs": None if output.logprobs is None else self._logprobs(output.logprobs),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }
        return {**entry, "token_ids": token_ids} if self._token_ids else entry

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        tokens = [token_text(self._tokenizer, each.token_id) for each in logprobs]
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [each.logprob for each in logprobs],
            "top_logprobs": [
                {token_text(self._tokenizer, token): value for token, value in reversed(each.top)}
                for each in logprobs
            ],
            "text_offset": offsets,
        }


class ChatChoice:
    """Choices of `/v1/chat/completions`."""

    def __init__(self, index: int, tokenizer: Tokenizer | None, token_ids: bool) -> None:
        self._index, self._tokenizer, self._token_ids = index, tokenizer, token_ids

    def opening(self) -> dict[str, Any]:
        """The entry that says who speaks."""
        delta = {"role": "assistant", "content": ""}
        return {"index": self._index, "delta": delta, "logprobs": None, "finish_reason": None}

    def news(self, output: RequestOutput) -> dict[str, Any]:
        """The new text of one item."""
        delta = {"content": output.delta} if output.delta else {}
        return self._entry(output, {"delta": delta}, output.new_token_ids)

    def mold(self) -> Mold:
        """See `Choice`."""
        return _mold(ChatChoice, self._index, self._token_ids)

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        """The whole message."""
        message = {"role": "assistant", "content": output.text or "", "refusal": None}
        return self._entry(output, {"message": message}, output.token_ids)

    def _entry(
        self, output: RequestOutput, said: dict[str, Any], token_ids: list[int]
    ) -> dict[str, Any]:
        entry = {
            "index": self._index,
            **said,
            "logprobs": None if output.logprobs is None else self._logprobs(output.logprobs),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }
        return {**entry, "token_ids": token_ids} if self._token_ids else entry

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        return {
            "content": [
                {
                    **self._one(each.token_id, each.logprob),
                    "top_logprobs": [self._one(token, value) for token, value in each.top],
                }
                for each in logprobs
            ],
            "refusal": None,
        }

    def _one(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = token_text(self._tokenizer, token_id)
        tokenizer = self._tokenizer
        raw = text.encode() if tokenizer is None else tokenizer.token_bytes(token_id)
        return {"token": text, "logprob": logprob, "bytes": None if raw is None else list(raw)}


@lru_cache(maxsize=256)
def _mold(kind: type[CompletionChoice] | type[ChatChoice], index: int, token_ids: bool) -> Mold:
    """The same for every request: nothing of one is in it."""
    return Mold(kind(index, None, token_ids).news)


def token_text(tokenizer: Tokenizer | None, token_id: int) -> str:
    """One token as text; its id in words for a checkpoint without a tokenizer."""
    return (
        f"token_id:{token_id}"
        if tokenizer is None
        else tokenizer.decode([token_id], skip_special_tokens=False)
    )


class Envelope:
    """What surrounds the choices in every object of one response."""

    def __init__(self, kind: Literal["text_completion", "chat.completion"], model: str) -> None:
        prefix = "cmpl" if kind == "text_completion" else "chatcmpl"
        self._kind = kind
        self._model = model
        self.id = f"{prefix}-{secrets.token_hex(16)}"
        self._created = int(time.time())

    def whole(self, choices: list[dict[str, Any]], usage: dict[str, int]) -> dict[str, Any]:
        """The one object of a response that is not streamed."""
        return {**self._head(self._kind), "choices": choices, "usage": usage}

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """One object of a stream."""
        kind = "chat.completion.chunk" if self._kind == "chat.completion" else self._kind
        return {**self._head(kind), "choices": choices}

    def chunk_around(self, rest: Mapping[str, Any]) -> tuple[bytes, bytes]:
        """The JSON of a stream's objects with one choice each, before and behind that choice.

        `rest` is what they hold besides.
        """
        whole = orjson.dumps({**self.chunk([]), **rest})
        # Text in a value cannot hold this: its quotes are escaped.
        before, _, behind = whole.partition(b'"choices":[]')
        return before + b'"choices":[', b"]" + behind

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self._created, "model": self._model}


def usage(outputs: Sequence[RequestOutput], n: int) -> dict[str, int]:
    """Tokens of a request's answers; outputs i*n … i*n + n-1 share one prompt."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs[::n])
    answer = sum(output.tokens_so_far for output in outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
    }


def error_body(message: str, status: HTTPStatus, parameter: str | None = None) -> dict[str, Any]:
    """An error in OpenAI's shape."""
    kinds = {
        HTTPStatus.NOT_FOUND: "not_found_error",
        HTTPStatus.SERVICE_UNAVAILABLE: "service_unavailable_error",
        HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    }
    server_fault = status >= HTTPStatus.INTERNAL_SERVER_ERROR
    kind = kinds.get(status, "server_error" if server_fault else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": parameter, "code": status.value}}
