"""What a request gives back: one `RequestOutput` per item of its stream.

The outputs of one request share its `Transcript`, so that the cumulated text and token ids cost
nothing until somebody asks for them: an answer of n tokens is never copied n times.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log probability of one chosen token, and of the likeliest ones."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token id, logprob), likeliest first; may be empty


@dataclass(slots=True)
class Transcript:
    """Everything that one request has produced so far."""

    request_id: str
    prompt_token_ids: list[int]
    arrival_s: float  # time.monotonic() when the request came in
    token_ids: list[int] = field(default_factory=list)
    token_times_s: list[float] = field(default_factory=list)  # time.monotonic() of each token
    pieces: list[str] | None = None  # text in pieces; None without a tokenizer

    @property
    def ttft_s(self) -> float | None:
        """Seconds from arrival to the first token; None before it."""
        return self.token_times_s[0] - self.arrival_s if self.token_times_s else None

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between consecutive tokens."""
        times = self.token_times_s
        return [later - earlier for earlier, later in itertools.pairwise(times)]


@dataclass(slots=True)  # not frozen, which makes each one five times as dear
class RequestOutput:
    """News of one request: what came since the item before, and how it ended if it did.

    `finish_reason` is None while the request goes on, "stop" after EOS, a stop token or a stop
    string (then `stop_reason` is the token id or the string; None for EOS), "length" at
    max_tokens or the end of the context, "abort" if it was cancelled or the engine was closed.
    """

    delta: str | None  # new text; None without a tokenizer
    new_token_ids: list[int]
    logprobs: list[TokenLogprob] | None  # of the new tokens; None if not asked for
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    transcript: Transcript = field(repr=False)
    tokens_so_far: int
    pieces_so_far: int

    @property
    def request_id(self) -> str:
        """The name under which the request was submitted."""
        return self.transcript.request_id

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt as it went into the model."""
        return self.transcript.prompt_token_ids

    @property
    def token_ids(self) -> list[int]:
        """All new tokens up to and including this item."""
        return self.transcript.token_ids[: self.tokens_so_far]

    @property
    def text(self) -> str | None:
        """All new text up to and including this item; None without a tokenizer."""
        pieces = self.transcript.pieces
        return None if pieces is None else "".join(pieces[: self.pieces_so_far])
