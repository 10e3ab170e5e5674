"""The client's end of one request: an async iterator that aborts the request when it is left."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from asyncmoe.frontend.output import RequestOutput
from asyncmoe.frontend.prompts import Prompt
from asyncmoe.frontend.stream import RequestStream
from asyncmoe.sampling import SamplingParams

if TYPE_CHECKING:
    from asyncmoe.frontend.engine import AsyncEngine


class Generation:
    """One request. Iterate it for news as it comes, or await `complete()` for the whole answer.

    Breaking out of the iteration, cancelling the task that iterates, `aclose()` and dropping the
    last reference all abort the request on its home rank. One reader at a time.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str,
        chat_options: Mapping[str, Any],
    ) -> None:
        """Nothing happens before `start()`, which the first read calls."""
        self._engine = engine
        self._prompt = prompt
        self._params = params
        self._chat_options = chat_options
        self.request_id = request_id
        self._number: int | None = None  # the engine's number; None before the start
        self._stream: RequestStream | None = None

    async def start(self) -> None:
        """Tokenise, check and admit the request; once. Raises `RequestError`, `RequestFailed`."""
        if self._stream is None:
            self._number, self._stream = await self._engine.submit(
                self._prompt, self._params, self.request_id, self._chat_options
            )

    async def complete(self) -> RequestOutput:
        """Wait for the end and return everything that was not read yet, as one item.

        The waiting task is woken once, so that many long answers cost the loop little.
        Raises `RequestError` if the request is refused, `RequestFailed` if it fails.
        """
        output = await self._read(whole=True)
        if output is None:
            raise RuntimeError(f"request {self.request_id} has been read to its end already")
        return output

    @property
    def stream(self) -> RequestStream:
        """Its mailbox, for who writes many answers at once. Only behind `start()`."""
        assert self._stream is not None
        return self._stream

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> RequestOutput:
        output = await self._read(whole=False)
        if output is None:
            raise StopAsyncIteration
        return output

    async def _read(self, *, whole: bool) -> RequestOutput | None:
        try:
            await self.start()
            assert self._stream is not None
            return await self._stream.take(whole=whole)
        except BaseException:
            self._abort()
            raise

    def _abort(self) -> None:
        if self._number is not None and self._stream is not None and not self._stream.ended:
            self._engine.abort(self._number)

    async def aclose(self) -> None:
        """Abort the request if it is still running. Idempotent."""
        self._abort()

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._abort()

    def __del__(self) -> None:
        # The collector may run on any thread, so the abort is handed to the loop.
        if self._number is not None and self._stream is not None and not self._stream.ended:
            with contextlib.suppress(RuntimeError):  # the loop is closed: so is the engine
                self._engine.loop.call_soon_threadsafe(self._engine.abort, self._number)
