"""The engine as a Python object: requests in, streams of tokens out. It lives beside rank 0."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, cast

from asyncmoe.checkpoint import open_checkpoint
from asyncmoe.config import Config
from asyncmoe.errors import PeerLost, ProtocolError, RequestError, RequestFailed
from asyncmoe.frontend.admission import Admission, Booking, Overloaded, Unavailable
from asyncmoe.frontend.generation import Generation
from asyncmoe.frontend.output import FinishReason, Transcript
from asyncmoe.frontend.prompts import Prompt, encode_prompts
from asyncmoe.frontend.startup import start_ranks
from asyncmoe.frontend.stream import RequestStream
from asyncmoe.frontend.textstream import TextStream
from asyncmoe.frontend.tokenizer import Tokenizer
from asyncmoe.messages import (
    Abort,
    Admit,
    Ended,
    Message,
    Shutdown,
    Stats,
    StatsRequest,
    TokensOut,
    Unable,
)
from asyncmoe.model import ModelSpec
from asyncmoe.placement import Placement, Role
from asyncmoe.sampling import SamplingParams

log = logging.getLogger(__name__)


class FrontEndRank(Protocol):
    """What the engine needs of rank 0 (`asyncmoe.rank.Rank`)."""

    spec: ModelSpec
    placement: Placement
    kv_blocks_of: dict[int, int]  # KV blocks of each home rank
    on_front_end: Callable[[int, Message], None]
    on_rank_lost: Callable[[int, Exception], None]

    def send(self, rank: int, message: Message) -> None:
        """Send to any rank, rank 0 included. Raises `PeerLost`."""

    def carriers(self) -> dict[int, str]:
        """See `Transport`."""

    async def close(self) -> None:
        """Stop rank 0."""


class OtherRanks(Protocol):
    """What the engine needs of all ranks but rank 0 (`startup.Ranks`)."""

    async def close(self) -> None:
        """Wait for them to end, and kill what does not."""


class AsyncEngine:
    """Runs requests over all ranks; one instance per process, bound to the loop it started on.

    Promises:
    - a request that is refused raises `RequestError` from its first read, before it costs a slot;
    - a reader that is slow, gone or cancelled holds up nobody else;
    - after `close()` every open request has ended (`finish_reason` "abort"), and no rank, task or
      socket of this engine is left.
    """

    def __init__(
        self,
        config: Config,
        rank: FrontEndRank,
        tokenizer: Tokenizer | None,
        others: OtherRanks | None = None,
        sampling_defaults: Mapping[str, float | int] | None = None,
    ) -> None:
        """For ranks that run already; `AsyncEngine.start` is the usual way. Call on the loop.

        `sampling_defaults` are the checkpoint's own wishes; the HTTP server follows them.
        """
        self.sampling_defaults = sampling_defaults or {}
        self.config, self.rank, self.tokenizer = config, rank, tokenizer
        self.loop = asyncio.get_running_loop()
        self.lost: dict[int, str] = {}  # ranks that are gone, and why
        self.unable: dict[int, str] = {}  # home ranks that are there but run no requests, and why
        self.tokens_out = 0  # tokens of all requests so far
        # Told of each step: numbers of the requests that got a token, and `time.monotonic()`.
        self.on_tokens: Callable[[Sequence[int], float], None] | None = None
        self._others = others
        self._numbers = itertools.count(1)
        self._unnamed = itertools.count(1)
        self._streams: dict[int, RequestStream] = {}
        self._bookings: dict[int, Booking] = {}
        self._reports: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._closed: asyncio.Task[None] | None = None
        self._admission = Admission(
            context=rank.spec.context,
            vocab=rank.spec.vocab,
            block_tokens=config.kv.block_tokens,
            kv_blocks_of=rank.kv_blocks_of,
            requests_per_home=config.engine.max_requests + config.engine.queue_requests,
            default_max_tokens=config.engine.default_max_tokens,
        )
        rank.on_front_end = self._on_message
        rank.on_rank_lost = self._on_rank_lost

    @classmethod
    async def start(cls, config: Config) -> AsyncEngine:
        """Start or meet all ranks of `config`, load the model, and return when all is ready.

        Raises `ConfigError`, `CheckpointError`, `RankFailed` with the failed rank's own error, or
        `TimeoutError`; then nothing is left running.
        """
        checkpoint = open_checkpoint(config.model)  # reads no weights
        tokenizer = await asyncio.to_thread(Tokenizer.load, checkpoint.directory)
        ranks = await start_ranks(config)
        return cls(ranks.config, ranks.front, tokenizer, ranks, dict(checkpoint.sampling_defaults))

    # ---- requests

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        chat_options: Mapping[str, Any] | None = None,
    ) -> Generation:
        """Run one request: text, token ids, or chat messages that the chat template renders.

        `chat_options` are switches of the template (`Tokenizer.render_chat`).

        Returns an async iterator of `RequestOutput`; see `Generation` for when it aborts. Its
        first read raises `RequestError` if the request is refused, and `RuntimeError` on another
        event loop than the engine's.
        """
        return Generation(
            self,
            prompt,
            SamplingParams() if params is None else params,
            request_id or f"request-{next(self._unnamed)}",
            chat_options or {},
        )

    async def tokenize(
        self, prompts: Sequence[Prompt], chat_options: Mapping[str, Any] | None = None
    ) -> list[Sequence[int]]:
        """The ids of each prompt, which `generate` takes as well: for several answers to one.

        The loop goes on meanwhile, and text that is too long by far is refused before. Raises
        `RequestError`, or `Unavailable` if no request can run.
        """
        self._check_able()
        room = self._admission.room_tokens
        return await encode_prompts(self.tokenizer, prompts, room, chat_options or {})

    async def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str,
        chat_options: Mapping[str, Any],
        dummy_kv: bool = False,
    ) -> tuple[int, RequestStream]:
        """Tokenise, check and admit, for `Generation`. Returns the request's number and stream.

        `dummy_kv`: see `Admit`.
        """
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params are {params!r:.80}; allowed: SamplingParams", "params")
        arrival_s = time.monotonic()
        (ids,) = await self.tokenize([prompt], chat_options)
        if params.stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer; the checkpoint has none", "stop")
        self._check_able()
        vocab, context = self.rank.spec.vocab, self.rank.spec.context
        params.check_against(vocab, context)
        max_tokens = self._admission.check(ids, params)
        # More than all tokens keep all, and the number must fit a message.
        top_k = min(params.top_k, vocab)
        if (params.max_tokens, params.top_k) != (max_tokens, top_k):
            params = replace(params, max_tokens=max_tokens, top_k=top_k)
        text = None if self.tokenizer is None else TextStream(self.tokenizer, params)
        transcript = Transcript(
            request_id, list(ids), arrival_s, pieces=None if text is None else []
        )
        stream = RequestStream(transcript, text, params)
        booking, number = self._admission.book(len(ids) + max_tokens), next(self._numbers)
        self._streams[number], self._bookings[number] = stream, booking
        try:
            ids = transcript.prompt_token_ids
            self._admit(booking.rank, Admit(number, ids, params.to_wire(), dummy_kv))
        except BaseException:
            self._forget(number)
            raise
        return number, stream

    def abort(self, number: int) -> None:
        """End a running request with finish_reason "abort" and free what it holds. Idempotent."""
        stream = self._streams.get(number)
        if stream is not None:
            stream.end("abort")
            self._stop_at_home(number)

    def _admit(self, rank: int, message: Admit) -> None:
        try:
            self.rank.send(rank, message)
        except PeerLost as error:
            raise RequestFailed(str(error)) from error
        except ProtocolError as error:
            raise RequestError(
                f"the request makes too long a message (transport.message_bytes): {error}"
            ) from error

    def _check_open(self) -> None:
        if asyncio.get_running_loop() is not self.loop:
            raise RuntimeError("an AsyncEngine can be used only on the event loop it started on")
        if self._closed is not None:
            raise Unavailable("the engine is closed")

    def _check_able(self) -> None:
        """Raise `Unavailable` if no request can run."""
        self._check_open()
        for rank, reason in self.lost.items():
            if rank == 0 or self.rank.placement.roles[rank] is not Role.ATTENTION:
                raise Unavailable(f"no request can run: {reason}")
        if not self._admission.account():
            reasons = "; ".join([*self.lost.values(), *self.unable.values()])
            raise Unavailable(f"no home rank is left to run requests: {reasons}")

    def _stop_at_home(self, number: int) -> None:
        """Tell the home rank; the account is settled when it answers that the request ended."""
        booking = self._bookings.get(number)
        if booking is None:
            return
        try:
            self.rank.send(booking.rank, Abort(number))
        except PeerLost:
            self._forget(number)

    def _forget(self, number: int) -> None:
        self._streams.pop(number, None)
        booking = self._bookings.pop(number, None)
        if booking is not None:
            self._admission.release(booking)

    # ---- what the ranks say

    def _on_message(self, source: int, message: Message) -> None:
        match message:
            case TokensOut():
                self._on_tokens(message)
            case Ended():
                self._on_ended(message)
            case Unable():
                self._on_unable(source, message.reason)
            case Stats():
                report = self._reports.pop(source, None)
                if report is not None and not report.done():
                    report.set_result(message.values)
            case _:
                log.warning("front end: unexpected %s of rank %d", type(message).__name__, source)

    def _on_tokens(self, message: TokensOut) -> None:
        """One step of one home rank: a constant amount of work per token in it."""
        now_s = time.monotonic()  # uvloop's own clock counts whole milliseconds
        self.tokens_out += len(message.tokens)
        if self.on_tokens is not None:
            self.on_tokens(message.request_ids, now_s)
        for number, token, finish, stop_token, logprobs in zip(
            message.request_ids,
            message.tokens,
            message.finish,
            message.stop_token,
            message.logprobs,
            strict=True,
        ):
            stream = self._streams.get(number)
            if stream is None:
                continue
            running = not stream.ended
            stream.push(token, cast("FinishReason | None", finish), stop_token, logprobs, now_s)
            if finish is not None:
                self._forget(number)
            elif running and stream.ended:
                # Later, since a home in this process is in the middle of its step.
                self.loop.call_soon(self._stop_at_home, number)

    def _on_ended(self, message: Ended) -> None:
        stream = self._streams.get(message.request_id)
        if stream is not None:
            if message.reason == "aborted":
                stream.end("abort")
            elif message.reason == "refused":
                stream.fail(RequestError(message.message, message.parameter))
            elif message.reason == "overloaded":
                stream.fail(Overloaded(message.message))
            else:
                stream.fail(RequestFailed(message.message))
        self._forget(message.request_id)

    def _on_unable(self, rank: int, reason: str) -> None:
        """Send no more requests there. Those that it has it ends itself."""
        log.warning("rank %d can run no requests: %s", rank, reason)
        self.unable.setdefault(rank, reason)
        self._admission.lose(rank)

    def _on_rank_lost(self, rank: int, error: Exception) -> None:
        """Fail what is homed there; requests with parts there are failed by their home ranks.

        With rank 0, which is this process, all is lost.
        """
        if rank in self.lost or self._closed is not None:
            return
        named = isinstance(error, PeerLost)
        self.unable.pop(rank, None)
        reason = self.lost[rank] = str(error) if named else f"rank {rank} is lost: {error}"
        self._admission.lose(rank)
        for number in [n for n, each in self._bookings.items() if rank in (0, each.rank)]:
            self._streams[number].fail(RequestFailed(reason))
            self._forget(number)
        report = self._reports.pop(rank, None)
        if report is not None and not report.done():
            report.set_exception(error)

    # ---- the whole

    @property
    def transport_name(self) -> str:
        """The transport that the ranks use, and in brackets what it chose for rank 0's pairs."""
        name = self.config.transport.name or "inproc"
        chosen = sorted(set(self.rank.carriers().values()))
        return f"{name} ({', '.join(chosen)})" if chosen else name

    @property
    def running(self) -> int:
        """Requests that have been admitted and have not ended."""
        return len(self._streams)

    @property
    def room_tokens(self) -> int:
        """Tokens of the longest request that can run, prompt and answer together."""
        return self._admission.room_tokens

    @property
    def request_window(self) -> int:
        """Requests that keep every home rank busy; more at a time only wait."""
        limits = self.config.engine
        waiting = min(limits.max_requests, limits.queue_requests // 2)
        return (limits.max_requests + waiting) * max(1, len(self._admission.account()))

    async def stats(self, timeout_s: float = 5.0) -> dict[int, dict[str, Any]]:
        """The counters of every rank by rank; a rank that is lost or silent is left out.

        Raises `Unavailable` once the engine is closed.
        """
        self._check_open()
        waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        for rank in range(self.rank.placement.world):
            if rank in self.lost:
                continue
            if rank in self._reports:
                waiting[rank] = self._reports[rank]
                continue
            waiting[rank] = self._reports[rank] = self.loop.create_future()
            try:
                self.rank.send(rank, StatsRequest())
            except PeerLost as error:
                self._reports.pop(rank).set_exception(error)
        if waiting:
            await asyncio.wait(waiting.values(), timeout=timeout_s)
        for rank, report in waiting.items():
            if self._reports.get(rank) is report:
                del self._reports[rank]
        return {
            rank: report.result()
            for rank, report in sorted(waiting.items())
            if report.done() and report.exception() is None
        }

    async def close(self, reason: str = "the engine is closed") -> None:
        """End open requests (finish_reason "abort"), stop all ranks, wait for them. Idempotent."""
        if self._closed is None:
            self._closed = asyncio.create_task(self._close(reason))
        await asyncio.shield(self._closed)

    async def _close(self, reason: str) -> None:
        for stream in self._streams.values():
            stream.end("abort")
        for number in list(self._streams):
            self._forget(number)
        for rank in range(1, self.rank.placement.world):
            if rank not in self.lost:
                try:
                    self.rank.send(rank, Shutdown(reason))
                except PeerLost as error:
                    log.debug("rank %d was gone before its shutdown: %s", rank, error)
        # The others close while rank 0 does: one that hangs must not hold up what it waits for.
        await asyncio.gather(
            self.rank.close(), *([] if self._others is None else [self._others.close()])
        )
