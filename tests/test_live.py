"""Answers that are written as they come: in one pass, and merged while a client is behind."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from asyncmoe.errors import RequestFailed
from asyncmoe.frontend.live import Answer, Live, Round, ServerStopping
from asyncmoe.frontend.openai_api import CompletionChoice
from asyncmoe.frontend.output import Transcript
from asyncmoe.frontend.stream import RequestStream
from asyncmoe.sampling import SamplingParams


class Events:
    """What `EventWriter` is to answers: keeps the token ids of each event, by choice."""

    def __init__(self) -> None:
        self.told: list[tuple[int, list[int]]] = []
        self.entries: list[dict[str, Any]] = []
        self.begun, self.flows = False, False
        self.caught_up = asyncio.Event()
        self.caught_up.set()

    async def open(self) -> None:
        await self.caught_up.wait()
        self.begun = self.flows = True

    def write_json(self, before: bytes, choice: bytes, behind: bytes) -> None:
        assert self.begun
        entry = orjson.loads(before + choice + behind)
        self.entries.append(entry)
        self.told.append((entry["index"], entry["token_ids"]))


class Case:
    """Some streams, and the task that writes them."""

    def __init__(
        self,
        count: int,
        refused: Exception | None = None,
        params: SamplingParams | None = None,
    ) -> None:
        self.events = Events()
        self.streams = [
            RequestStream(Transcript(str(i), [1], 0.0), None, params or SamplingParams())
            for i in range(count)
        ]
        if refused is not None:
            self.streams[0].fail(refused)
        answers = [
            Answer(CompletionChoice(i, None, True), stream, (b"", b""), True)
            for i, stream in enumerate(self.streams)
        ]
        events: Any = self.events
        live = Live(events, answers, Round(asyncio.get_running_loop()))
        self.task = asyncio.create_task(live.run())

    async def push(self, token: int, finish: Any = None) -> list[tuple[int, list[int]]]:
        """One step of all streams; returns what was told of it."""
        before = len(self.events.told)
        for stream in self.streams:
            stream.push(token, finish, False, None, 0.0)
        for _ in range(4):
            await asyncio.sleep(0)
        return self.events.told[before:]


async def test_a_step_is_told_to_all_in_the_next_turn_of_the_loop() -> None:
    case = Case(3)
    assert await case.push(7) == [(0, [7]), (1, [7]), (2, [7])]
    for stream in case.streams:
        stream.push(8, None, False, None, 0.0)
    assert len(case.events.told) == 3  # a step is not held up by what its tokens are written with
    await asyncio.sleep(0)
    assert case.events.told[3:] == [(0, [8]), (1, [8]), (2, [8])]
    assert await case.push(9, "length") == [(0, [9]), (1, [9]), (2, [9])]
    await case.task


async def test_what_comes_while_a_client_is_behind_is_one_event_in_order() -> None:
    case = Case(1)
    await case.push(1)
    case.events.flows = False
    case.events.caught_up.clear()
    assert [await case.push(token) for token in (2, 3, 4)] == [[], [], []]
    case.events.flows = True  # before the task has heard that the client caught up
    assert await case.push(5) == []
    case.events.caught_up.set()
    await case.push(6, "length")
    await case.task
    assert [token for _, tokens in case.events.told for token in tokens] == [1, 2, 3, 4, 5, 6]
    assert len(case.events.told) < 6


@pytest.mark.parametrize("begun", [False, True])
async def test_what_ends_a_request_early_is_raised(begun: bool) -> None:
    failed, stopped = Case(2), Case(2)
    if begun:
        await failed.push(1)
        await stopped.push(1)
    failed.streams[1].fail(RequestFailed("no more"))
    stopped.streams[1].end("abort")
    with pytest.raises(RequestFailed, match="no more"):
        await failed.task
    with pytest.raises(ServerStopping):
        await stopped.task
    assert (failed.events.begun, stopped.events.begun) == (begun, begun)


async def test_what_was_refused_before_anybody_listened_is_raised() -> None:
    with pytest.raises(RequestFailed, match="full"):
        await asyncio.wait_for(Case(2, RequestFailed("full")).task, 5)


async def test_nothing_is_written_behind_the_end() -> None:
    case = Case(2)
    await case.push(1)
    case.streams[1].push(2, None, False, None, 0.0)  # the round writes it in the next turn
    case.task.cancel()
    for stream in case.streams:
        stream.push(3, None, False, None, 0.0)
    with pytest.raises(asyncio.CancelledError):
        await case.task
    told = len(case.events.told)
    assert await case.push(4) == []
    assert len(case.events.told) == told


async def test_tokens_with_logprobs_are_told_with_them() -> None:
    case = Case(1, params=SamplingParams(logprobs=0))
    for token in (1, 2):
        case.streams[0].push(token, None, False, [-0.5, [], []], 0.0)
        for _ in range(4):
            await asyncio.sleep(0)
    assert [entry["logprobs"]["token_logprobs"] for entry in case.events.entries] == [[-0.5]] * 2
    case.task.cancel()


async def test_a_fault_in_writing_reaches_the_task() -> None:
    case = Case(1)
    await case.push(1)
    case.events.begun = False  # trips the assertion of `write_json`
    await case.push(2)
    with pytest.raises(AssertionError):
        await case.task
