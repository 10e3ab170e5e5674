"""Which home rank a request goes to, and which requests are refused before they cost anything.

The front end keeps its own account of every home rank: what it sent there and has not seen end.
It needs no message for that, and it is right at the moment it is asked.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from asyncmoe.errors import RequestError, RequestFailed
from asyncmoe.sampling import SamplingParams

SHARES: Final = 4  # of a KV pool; an answer of no stated length takes one of them at most


class Overloaded(RequestFailed):
    """All home ranks have as many requests as they queue."""


class Unavailable(RequestFailed):
    """No request can run: the engine is closed, or ranks that all requests need are lost."""


@dataclass(slots=True)
class Home:
    """The front end's account of one home rank."""

    rank: int
    pool_blocks: int
    free_blocks: int  # below 0 when requests wait there
    tokens: int = 0  # prompt and answer of all outstanding requests
    requests: int = 0


@dataclass(frozen=True, slots=True)
class Booking:
    """What one request takes of its home rank; give it back exactly once."""

    rank: int
    tokens: int
    blocks: int


class Admission:
    """Checks requests against the model and the KV pools, and spreads them over the home ranks."""

    def __init__(
        self,
        *,
        context: int,
        vocab: int,
        block_tokens: int,
        kv_blocks_of: Mapping[int, int],
        requests_per_home: int,
        default_max_tokens: int | None = None,
    ) -> None:
        """`kv_blocks_of` has every home rank; `requests_per_home` bounds running and waiting.

        `default_max_tokens` is for requests that do not say; None gives them what the context
        allows, but no more than a quarter of the KV pool.
        """
        self.default_max_tokens = default_max_tokens
        self.context, self.vocab, self.block_tokens = context, vocab, block_tokens
        self.requests_per_home = requests_per_home
        self._homes = {rank: Home(rank, n, n) for rank, n in sorted(kv_blocks_of.items())}

    @property
    def pool_tokens(self) -> int:
        """Tokens that the largest KV pool holds."""
        return max((h.pool_blocks for h in self._homes.values()), default=0) * self.block_tokens

    @property
    def room_tokens(self) -> int:
        """Tokens of the longest request that can run, prompt and answer together.

        The last token is only sent out: it never enters the layers, so it takes no KV.
        """
        return min(self.context, self.pool_tokens + 1)

    def check(self, prompt: Sequence[int], params: SamplingParams) -> int:
        """Return the most tokens that the request may produce.

        Raises `RequestError` for an empty prompt, a token id out of range, a prompt that is longer
        than the context or the KV pool, and for more `max_tokens` than either has left.
        """
        if not prompt:
            raise RequestError("prompt is empty; it must have at least one token", "prompt")
        room = self.context, "the model's context"
        pool = self.pool_tokens + 1, f"the KV pool of a home rank ({self.pool_tokens} tokens)"
        for limit, what in (room, pool):
            if len(prompt) >= limit:
                raise RequestError(
                    f"prompt of {len(prompt)} tokens leaves no room for an answer: {what} has room "
                    f"for {limit} tokens, prompt and answer together",
                    "prompt",
                )
            if params.max_tokens is not None and len(prompt) + params.max_tokens > limit:
                raise RequestError(
                    f"prompt of {len(prompt)} tokens and max_tokens {params.max_tokens} make "
                    f"{len(prompt) + params.max_tokens}: {what} has room for {limit} tokens, "
                    "prompt and answer together",
                    "max_tokens",
                )
        # At the end, when their number is known to be bounded.
        if not set(map(type, prompt)) <= {int} or min(prompt) < 0 or max(prompt) >= self.vocab:
            self._refuse_ids(prompt)
        if params.max_tokens is not None:
            return params.max_tokens
        return self._unstated(self.room_tokens - len(prompt), params.min_tokens)

    def _refuse_ids(self, prompt: Sequence[int]) -> None:
        """Raise `RequestError` for the first token that is no id of the vocabulary."""
        for token in prompt:
            if not isinstance(token, int) or not 0 <= token < self.vocab:
                raise RequestError(
                    f"prompt token id {reprlib.repr(token)} is not in the vocabulary: 0 to "
                    f"{self.vocab - 1}",
                    "prompt",
                )

    def _unstated(self, room: int, min_tokens: int) -> int:
        """The longest answer of a request without max_tokens, of those that `room` allows.

        Its KV blocks are reserved while it runs. If each took what the pool has, one would run at
        a time, though few answers get that long.
        """
        share = self.default_max_tokens or max(1, self.pool_tokens // SHARES)
        return min(room, max(share, min_tokens))

    def book(self, tokens: int) -> Booking:
        """Choose the home rank of a request of `tokens` tokens: most free KV blocks, fewest tokens.

        Raises `Unavailable` if no home rank is left, `Overloaded` if all of them are full.
        """
        if not self._homes:
            raise Unavailable("no home rank is left to run requests")
        blocks = -(-(tokens - 1) // self.block_tokens)
        able = [
            h
            for h in self._homes.values()
            if h.requests < self.requests_per_home and h.pool_blocks >= blocks
        ]
        if not able:
            raise Overloaded(
                f"every home rank has its {self.requests_per_home} requests "
                "(engine.max_requests + engine.queue_requests); try again later"
            )
        home = min(able, key=lambda h: (-h.free_blocks, h.tokens, h.rank))
        home.free_blocks -= blocks
        home.tokens += tokens
        home.requests += 1
        return Booking(home.rank, tokens, blocks)

    def release(self, booking: Booking) -> None:
        """The request has ended. A booking of a lost rank is forgotten already."""
        home = self._homes.get(booking.rank)
        if home is None:
            return
        home.free_blocks += booking.blocks
        home.tokens -= booking.tokens
        home.requests -= 1

    def lose(self, rank: int) -> None:
        """The rank is gone: nothing is sent there any more."""
        self._homes.pop(rank, None)

    def account(self) -> dict[int, Home]:
        """The home ranks as this front end sees them, for reports."""
        return dict(self._homes)
