"""The answers of a streamed response, written as they come.

A step brings a token to each of many streams, and a task for each of them would cost more than what
it has to do. So a stream that has news joins a round, and the round writes the events of all of
them in one pass, once the device has its next work. What takes waiting is left to the response's
one task: its head, a client that is behind, and its end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

import orjson

from asyncmoe.errors import RequestFailed
from asyncmoe.frontend.events import EventWriter
from asyncmoe.frontend.openai_api import Choice
from asyncmoe.frontend.output import RequestOutput
from asyncmoe.frontend.stream import RequestStream


class ServerStopping(RequestFailed):
    """The request was ended by the server's own end."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down")


def raise_if_stopping(output: RequestOutput) -> None:
    """Raise `ServerStopping` for an answer that was aborted: its client is here, so the server
    has ended it."""
    if output.finish_reason == "abort":
        raise ServerStopping


class Round:
    """Calls whoever joins it in one turn of the loop together, in the next turn."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._members: list[Callable[[], None]] = []

    def join(self, member: Callable[[], None]) -> None:
        """`member` is called once for each time; it must not raise."""
        if not self._members:
            self._loop.call_soon(self._go)
        self._members.append(member)

    def _go(self) -> None:
        members, self._members = self._members, []
        for member in members:
            member()


class Answer:
    """One choice of a response: an event for each item of its stream."""

    def __init__(
        self, choice: Choice, stream: RequestStream, around: tuple[bytes, bytes], token_ids: bool
    ) -> None:
        """`around`: the JSON before and behind the choice. `token_ids`: tokens without text are
        told as well."""
        self.stream = stream
        self.told: RequestOutput | None = None  # the last item that was more than text and ids
        self.news: RequestOutput | None = None  # that is read and not told
        self._choice, self._token_ids, self._mold = choice, token_ids, choice.mold()
        self._before, self._behind = around

    @property
    def is_over(self) -> bool:
        """Whether all of it is told."""
        return self.told is not None and self.told.finish_reason is not None

    def look(self) -> None:
        """Read what there is to tell. Raises what the request ended with."""
        if self.news is None:
            self.news = self.stream.news()
            if self.news is not None:
                raise_if_stopping(self.news)

    def tell(self, events: EventWriter) -> None:
        """Write the news, if there is some, to a stream that is open."""
        output = self.news
        if output is None:
            return
        if self.told is None and (opening := self._choice.opening()) is not None:
            events.write_json(self._before, orjson.dumps(opening), self._behind)
        self.told, self.news = output, None
        if output.delta or output.finish_reason or output.logprobs or self._token_ids:
            news = orjson.dumps(self._choice.news(output))
            events.write_json(self._before, news, self._behind)

    def go_on(self, events: EventWriter) -> None:
        """Read and tell what has come, where the stream is open and the answer not at its end."""
        news = None if self.told is None else self.stream.plain_news()
        if news is None:
            self.look()
            self.tell(events)
        elif news[0] or self._token_ids:
            events.write_json(self._before, self._mold.entry(*news), self._behind)


class Live:
    """The answers of one response."""

    def __init__(self, events: EventWriter, answers: Sequence[Answer], round_: Round) -> None:
        self._events, self._answers = events, answers
        self._needed = asyncio.Event()  # there is something that the task has to do
        self._fault: Exception | None = None
        self._over = False
        for answer in answers:
            answer.stream.listen(partial(round_.join, partial(self._hear, answer)))
            if answer.stream.has_news:  # a home in this process may have refused it at once
                self._needed.set()

    async def run(self) -> None:
        """Write all answers to their end. Raises what one of them ended with, or the writing."""
        try:
            while not all(answer.is_over for answer in self._answers):
                await self._needed.wait()
                self._needed.clear()
                await self._write()
        finally:  # nothing is written behind the end, and nobody keeps this alive
            self._over = True
            for answer in self._answers:
                answer.stream.listen(None)

    async def _write(self) -> None:
        if self._fault is not None:
            raise self._fault
        for answer in self._answers:
            answer.look()  # what fails before the head is out gets a status
        await self._events.open()
        for answer in self._answers:
            answer.tell(self._events)

    def _hear(self, answer: Answer) -> None:
        """An answer has news, in a round."""
        if self._over:
            return
        try:
            if answer.news is not None or answer.stream.ended or not self._events.flows:
                self._needed.set()
            else:
                answer.go_on(self._events)
        except Exception as error:
            self._fault = error
            self._needed.set()
