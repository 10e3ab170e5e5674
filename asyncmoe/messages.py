"""Control messages between the front end (on rank 0) and the ranks, as orjson with a `type` tag.

A rank sends one `TokensOut` per head step, with columns, so that streaming costs one message per
step and not one per request.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Annotated, Any, TypeVar, get_args

import orjson
from pydantic import AfterValidator, FailFast, Field, TypeAdapter

from asyncmoe.errors import ProtocolError

# Values are checked when a message is decoded: what comes out of `decode` fits numpy's integers.
# Lists are checked up to their first wrong value, since a list of wrong ones is no small thing.
T = TypeVar("T")
U32 = Annotated[int, Field(ge=0, lt=2**32)]
Id = Annotated[int, Field(ge=0, lt=2**63)]  # of a request
Listed = Annotated[list[T], FailFast()]


def _checked_logprobs(entry: list[Any]) -> list[Any]:
    _LOGPROBS.validate_python(entry)
    if len(entry[1]) != len(entry[2]):
        raise ValueError("as many top ids as logprobs")
    return entry


# (of the token, top ids, theirs); JSON has null for a number that is not finite
_LOGPROBS: TypeAdapter[Any] = TypeAdapter(tuple[float | None, Listed[U32], Listed[float | None]])
Finish = Annotated[str, Field(pattern="^(stop|length)$")]
Logprobs = Annotated[list[Any], AfterValidator(_checked_logprobs)]


@dataclass(slots=True)
class Admit:
    """Front end -> home rank: run this request."""

    request_id: Id
    prompt: Listed[U32]
    sampling: dict[str, Any]  # the fields of SamplingParams that the home rank needs
    # The prompt's KV is not computed: whatever lies there stands for it. For experiments on decode.
    dummy_kv: bool = False


@dataclass(slots=True)
class Abort:
    """Front end -> home rank: the client is gone or a stop string was found."""

    request_id: Id


@dataclass(slots=True)
class Discard:
    """Home rank -> expert ranks: rows of these slots up to these epochs are dead. Best effort."""

    slots: Listed[U32]
    epochs: Listed[U32]


@dataclass(slots=True)
class Credit:
    """Expert rank -> home rank: rows given back without a combine row (they were discarded)."""

    rows: U32


@dataclass(slots=True)
class TokensOut:
    """Home rank -> front end: what one head step sampled. Columns of equal length.

    `finish[i]` is None while request i goes on, else "stop" or "length"; `stop_token[i]` says that
    the token is the one that ended it (EOS or a stop id). `logprobs[i]` is None or
    [logprob of the token, [top ids], [top logprobs]].
    """

    request_ids: Listed[Id]
    tokens: Listed[U32]
    finish: Listed[Finish | None]
    stop_token: Listed[bool]
    logprobs: Listed[Logprobs | None]


@dataclass(slots=True)
class Ended:
    """Home rank -> front end: the request ended without (more) tokens.

    `reason` is "refused" (it can never fit), "overloaded" (too many wait; it may be tried again),
    "failed" (say why) or "aborted".
    """

    request_id: Id
    reason: str
    message: str
    parameter: str | None = None


@dataclass(slots=True)
class Unable:
    """Home rank -> front end: no request can run here any more, for example since a link is lost.

    Requests that run or wait there are ended one by one, by `TokensOut` or `Ended`.
    """

    reason: str


@dataclass(slots=True)
class StatsRequest:
    """Front end -> rank: report."""


@dataclass(slots=True)
class Stats:
    """Rank -> front end: counters and gauges by name (see docs/architecture.md)."""

    values: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Muster:
    """Between a rank and the one that leads marches: see asyncmoe/marches.py."""

    word: Annotated[str, Field(pattern="^(able|unable|call|ready|cancel|go)$")]
    number: Annotated[int, Field(ge=0, lt=2**40)] = 0  # of the march: enough for 30 years
    rows: U32 = 0  # of the rank, which is able


@dataclass(slots=True)
class Shutdown:
    """Front end -> rank: end running requests and stop."""

    reason: str


Message = (
    Admit
    | Abort
    | Discard
    | Credit
    | TokensOut
    | Ended
    | Unable
    | StatsRequest
    | Stats
    | Muster
    | Shutdown
)


def _equal_columns(message: TokensOut) -> TokensOut:
    lengths = {len(getattr(message, column.name)) for column in fields(TokensOut)}
    if len(lengths) != 1:
        raise ValueError(f"columns of {sorted(lengths)} entries")
    return message


_ADAPTERS: dict[str, TypeAdapter[Any]] = {t.__name__: TypeAdapter(t) for t in get_args(Message)}
_ADAPTERS["TokensOut"] = TypeAdapter(Annotated[TokensOut, AfterValidator(_equal_columns)])


def encode(message: Message) -> bytes:
    """The message as bytes."""
    return orjson.dumps([type(message).__name__, message])


def decode(data: bytes) -> Message:
    """The inverse of `encode`. Raises `ProtocolError` for anything else."""
    try:
        name, values = orjson.loads(data)
        message: Message = _ADAPTERS[name].validate_python(values)
    except (ValueError, KeyError, TypeError) as error:
        raise ProtocolError(
            f"control message not understood: {data[:80]!r} ({error!s:.300})"
        ) from error
    return message
