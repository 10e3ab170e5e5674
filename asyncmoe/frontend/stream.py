"""The mailbox of one request: the loop puts tokens in, one reader takes `RequestOutput`s out.

A reader that is slow costs the engine nothing and holds nobody up: what it has not taken merges
into one item. So a mailbox never holds more than one answer, which admission has bounded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from asyncmoe.frontend.output import FinishReason, RequestOutput, TokenLogprob, Transcript
from asyncmoe.frontend.textstream import TextStream
from asyncmoe.sampling import SamplingParams


class RequestStream:
    """One request as the front end sees it. All calls are made on the loop; one reader."""

    def __init__(
        self, transcript: Transcript, text: TextStream | None, params: SamplingParams
    ) -> None:
        """`text` None leaves all text out. Stop strings in `params` need it."""
        self.transcript = transcript
        self.ended = False  # nothing more will come in
        self._text = text
        self._params = params
        self._decoded = 0  # tokens whose text is made
        self._silent_tokens = 0  # 1 once a stop token has come: it has no text
        self._taken_tokens = 0
        self._taken_pieces = 0
        self._logprobs: list[TokenLogprob] = []
        self._finish: FinishReason | None = None
        self._finish_taken = False
        self._stop_reason: int | str | None = None
        self._error: Exception | None = None
        self._hear_token: Callable[[], None] | None = None
        self._hear_end: Callable[[], None] | None = None

    def push(
        self,
        token: int,
        finish: FinishReason | None,
        stop_token: bool,
        logprobs: list[Any] | None,
        now_s: float,
    ) -> None:
        """Take one token in, as `messages.TokensOut` describes it.

        Stop strings need the text of every token at once; all other text is made when it is read.
        """
        if self.ended:
            return
        self.transcript.token_ids.append(token)
        self.transcript.token_times_s.append(now_s)
        if logprobs is not None:
            chosen, ids, values = logprobs
            top = tuple(zip(ids, values, strict=True))
            self._logprobs.append(TokenLogprob(token, chosen, top))
        if stop_token:
            self._silent_tokens = 1
            self._stop_reason = token if token in self._params.stop_token_ids else None
        if self._params.stop and self._decode():
            self.end("stop")
        elif finish is not None:
            self.end(finish)
        elif self._hear_token is not None:
            self._hear_token()

    def end(self, finish: FinishReason) -> None:
        """The request is over. The first end counts."""
        if not self.ended:
            self._finish, self.ended = finish, True
            self._tell_end()

    def fail(self, error: Exception) -> None:
        """The request has no answer: the reader gets `error`. The first end counts."""
        if not self.ended:
            self._error, self.ended = error, True
            self._tell_end()

    def listen(self, hear: Callable[[], None] | None, *, tokens: bool = True) -> None:
        """`hear` is called whenever there is news; with `tokens` False, only of the end.

        It is called in the middle of a step, so it must be quick, and leave the engine alone.
        """
        self._hear_token, self._hear_end = hear if tokens else None, hear

    def news(self) -> RequestOutput | None:
        """What came since the last item; None if nothing did, or that was the last one.

        Raises the error that the request ended with.
        """
        if self._error is not None:
            raise self._error
        if self._finish_taken or not self.has_news:
            return None
        return self._make_output()

    def plain_news(self) -> tuple[str, list[int]] | None:
        """Text and token ids that came since the last item, as cheaply as can be; None if nothing
        did, or if there is more to it than that, which `news` returns."""
        if self.ended or self._params.logprobs is not None or not self.has_news:
            return None
        self._decode()
        text, ids = self._take_new()
        return text or "", ids

    async def take(self, *, whole: bool) -> RequestOutput | None:
        """Wait for news and return it; None once the last item has been taken.

        `whole` waits for the end of the request instead, and is not woken before. Raises the error
        that the request ended with.
        """
        while not self.ended and (whole or not self.has_news):
            waiter = asyncio.get_running_loop().create_future()
            self.listen(partial(_wake_up, waiter), tokens=not whole)
            try:
                await waiter
            finally:
                self.listen(None)
        return self.news()

    @property
    def has_news(self) -> bool:
        """Whether there are tokens that were not taken, or the end has come."""
        return self.ended or len(self.transcript.token_ids) > self._taken_tokens

    def _tell_end(self) -> None:
        if self._hear_end is not None:
            self._hear_end()

    def _decode(self) -> bool:
        """Make the text of all tokens so far. Returns True if a stop string was completed."""
        pieces, end = self.transcript.pieces, len(self.transcript.token_ids) - self._silent_tokens
        if self._text is None or pieces is None:
            return False
        if end > self._decoded:
            pieces.append(self._text.push(self.transcript.token_ids[self._decoded : end]))
            self._decoded = end
        if self._text.stopped is not None:
            self._stop_reason = self._text.stopped
            return True
        return False

    def _make_output(self) -> RequestOutput:
        transcript = self.transcript
        self._decode()
        if self._finish is not None and self._text is not None and transcript.pieces is not None:
            transcript.pieces.append(self._text.finish())
            if self._text.stopped is not None:  # completed by what was held back until the end
                self._finish, self._stop_reason = "stop", self._text.stopped
        self._finish_taken = self._finish is not None
        delta, new_token_ids = self._take_new()
        logprobs, self._logprobs = self._logprobs, []
        return RequestOutput(
            delta=delta,
            new_token_ids=new_token_ids,
            logprobs=logprobs if self._params.logprobs is not None else None,
            finish_reason=self._finish,
            stop_reason=self._stop_reason,
            transcript=transcript,
            tokens_so_far=self._taken_tokens,
            pieces_so_far=self._taken_pieces,
        )

    def _take_new(self) -> tuple[str | None, list[int]]:
        """Text and ids that were not taken, which they are now."""
        ids, pieces = self.transcript.token_ids, self.transcript.pieces
        first_token, self._taken_tokens = self._taken_tokens, len(ids)
        if pieces is None:
            return None, ids[first_token:]
        first_piece, self._taken_pieces = self._taken_pieces, len(pieces)
        return "".join(pieces[first_piece:]), ids[first_token:]


def _wake_up(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
