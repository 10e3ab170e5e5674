"""The front end: streams, admission, aborts, stop strings, and the end of an engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from asyncmoe.errors import PeerLost, ProtocolError, RequestError, RequestFailed
from asyncmoe.frontend.admission import Admission, Overloaded, Unavailable
from asyncmoe.frontend.engine import AsyncEngine
from asyncmoe.frontend.output import Transcript
from asyncmoe.frontend.stream import RequestStream
from asyncmoe.messages import Ended, Message, Unable, decode, encode
from asyncmoe.sampling import SamplingParams
from tests.servedmodel import eventually, make_served_checkpoint, served_config

PROMPT = [5, 17, 9]
CONTEXT = 512


def params(max_tokens: int | None = 8, **fields: object) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens, **fields}
    )


def admission(**changes: object) -> Admission:
    fields = {
        "context": 100,
        "vocab": 50,
        "block_tokens": 4,
        "kv_blocks_of": {0: 30, 1: 30},
        "requests_per_home": 2,
    }
    return Admission(**{**fields, **changes})  # type: ignore[arg-type]


# ---- admission


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "says", "parameter"),
    [
        ([], 1, "empty", "prompt"),
        ([3, 50], 1, "50 is not in the vocabulary: 0 to 49", "prompt"),
        ([3, -1], 1, "-1 is not in the vocabulary", "prompt"),
        ([1] * 100, 1, "prompt of 100 tokens leaves no room.*context has room for 100", "prompt"),
        ([1] * 60, 41, "make 101.*context has room for 100", "max_tokens"),
    ],
)
def test_a_request_that_cannot_be_is_refused_with_the_numbers(
    prompt: list[int], max_tokens: int, says: str, parameter: str
) -> None:
    with pytest.raises(RequestError, match=says) as caught:
        admission().check(prompt, params(max_tokens))
    assert caught.value.parameter == parameter


def test_a_prompt_beyond_every_kv_pool_is_refused_with_the_pools_size() -> None:
    with pytest.raises(RequestError, match=r"prompt of 41 tokens.*KV pool.*\(40 tokens\)"):
        admission(kv_blocks_of={0: 10, 1: 5}).check([1] * 41, params(1))


def test_a_prompt_that_fills_the_pool_may_have_one_token() -> None:
    assert admission(kv_blocks_of={0: 10}).check([1] * 40, params(1)) == 1


def test_no_max_tokens_means_what_the_context_allows_up_to_a_quarter_of_the_pool() -> None:
    assert admission(kv_blocks_of={0: 100}).check([1] * 60, params(None)) == 40
    assert admission(kv_blocks_of={0: 20}).check([1] * 50, params(None)) == 20
    assert admission(kv_blocks_of={0: 20}).check([1] * 75, params(None)) == 6
    assert admission(kv_blocks_of={0: 20}).check([1] * 50, params(None, min_tokens=25)) == 25


def test_the_configured_length_is_for_requests_that_do_not_say() -> None:
    configured = admission(default_max_tokens=12)
    assert configured.check([1] * 60, params(None)) == 12
    assert configured.check([1] * 95, params(None)) == 5
    assert configured.check([1] * 60, params(40)) == 40


def test_requests_go_where_most_kv_blocks_are_free() -> None:
    spread = admission(kv_blocks_of={0: 20, 1: 30}, requests_per_home=9)
    first = spread.book(40)  # 10 blocks: 30 - 10 are left, as many as the other has
    second, third = spread.book(4), spread.book(4)
    assert [first.rank, second.rank, third.rank] == [1, 0, 1]


def test_a_released_request_is_out_of_the_account() -> None:
    spread = admission()
    spread.release(spread.book(40))
    assert all(
        (home.free_blocks, home.tokens, home.requests) == (30, 0, 0)
        for home in spread.account().values()
    )


def test_full_home_ranks_refuse_and_lost_ones_are_left_out() -> None:
    spread = admission()
    spread.lose(1)
    booked = [spread.book(4), spread.book(4)]
    assert {booking.rank for booking in booked} == {0}
    with pytest.raises(Overloaded, match="try again later"):
        spread.book(4)


# ---- the mailbox


def stream(**fields: object) -> RequestStream:
    return RequestStream(Transcript("r", PROMPT, 0.0), None, params(**fields))


async def test_what_a_slow_reader_has_not_taken_merges_into_one_item() -> None:
    mailbox = stream()
    for token in range(1000):
        mailbox.push(token, None, False, None, 0.0)
    first = await mailbox.take(whole=False)
    mailbox.push(1000, "length", False, None, 0.0)
    last = await mailbox.take(whole=False)
    assert first is not None
    assert last is not None
    assert first.new_token_ids == list(range(1000))
    assert last.new_token_ids == [1000]
    assert last.token_ids == list(range(1001))
    assert await mailbox.take(whole=False) is None


async def test_a_reader_of_the_whole_answer_wakes_once() -> None:
    mailbox = stream()
    reader = asyncio.create_task(mailbox.take(whole=True))
    await asyncio.sleep(0)
    hear = mailbox._hear_end
    for token in range(3):
        mailbox.push(token, None, False, None, 0.0)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert mailbox._hear_end is hear is not None
    mailbox.end("abort")
    output = await reader
    assert output is not None
    assert (output.token_ids, output.finish_reason) == ([0, 1, 2], "abort")


async def test_a_stop_token_is_told_and_eos_is_not() -> None:
    ended_by = []
    for token in (7, 2):
        mailbox = stream(stop_token_ids=[7])
        mailbox.push(token, "stop", True, None, 0.0)
        output = await mailbox.take(whole=False)
        assert output is not None
        ended_by.append(output.stop_reason)
    assert ended_by == [7, None]


async def test_the_first_end_counts() -> None:
    mailbox = stream()
    mailbox.fail(RequestFailed("gone"))
    mailbox.end("stop")
    with pytest.raises(RequestFailed, match="gone"):
        await mailbox.take(whole=False)


# ---- the engine, over real ranks


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_served_checkpoint(tmp_path_factory.mktemp("served"))


@pytest.fixture
async def engine(checkpoint: Path) -> AsyncIterator[AsyncEngine]:
    """Two ranks in this process."""
    engine = await AsyncEngine.start(
        served_config(checkpoint, cluster={"ranks": 2}, transport={"name": "inproc"})
    )
    yield engine
    await engine.close()


async def at_rest(engine: AsyncEngine, timeout_s: float = 20.0) -> None:
    """Wait until nothing of any request is left, at the front end and on all ranks."""

    async def idle() -> bool:
        return not engine.running and all(
            report["running_requests"] == 0 and report["free_kv_blocks"] == report["kv_blocks"]
            for report in (await engine.stats()).values()
        )

    await eventually(idle, timeout_s)
    assert all(home.tokens == 0 for home in engine._admission.account().values())


async def test_the_items_of_a_stream_join_to_the_whole_answer(engine: AsyncEngine) -> None:
    whole = await engine.generate(PROMPT, params(20)).complete()
    items = [item async for item in engine.generate(PROMPT, params(20))]
    assert len(items) > 1
    assert "".join(item.delta or "" for item in items) == whole.text == items[-1].text
    assert [token for item in items for token in item.new_token_ids] == whole.token_ids
    assert len(whole.token_ids) == 20
    assert [item.finish_reason for item in items] == [None] * (len(items) - 1) + ["length"]
    await at_rest(engine)


async def test_many_requests_at_once_share_the_home_ranks_and_keep_apart(
    engine: AsyncEngine,
) -> None:
    prompts = [[3 + i, 20 + i] for i in range(6)]
    alone = [await engine.generate(prompt, params(6)).complete() for prompt in prompts]
    together = [engine.generate(prompt, params(6)) for prompt in prompts]
    for generation in together:
        await generation.start()
    homes = [home.requests for home in engine._admission.account().values()]
    outputs = await asyncio.gather(*(generation.complete() for generation in together))
    assert homes == [3, 3]
    assert [out.token_ids for out in outputs] == [out.token_ids for out in alone]


async def test_leaving_the_loop_aborts_the_request(engine: AsyncEngine) -> None:
    async for _ in engine.generate(PROMPT, params(400)):
        break
    await at_rest(engine)


async def test_cancelling_the_reader_aborts_the_request(engine: AsyncEngine) -> None:
    generation = engine.generate(PROMPT, params(400))
    await generation.start()
    reader = asyncio.create_task(generation.complete())
    await asyncio.sleep(0)  # it reads; a few tens of milliseconds are all that the answer takes
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    await at_rest(engine)


async def test_closing_aborts_and_the_reader_is_told(engine: AsyncEngine) -> None:
    async with engine.generate(PROMPT, params(400)) as generation:
        await anext(generation)
    last = [item async for item in generation][-1]
    assert last.finish_reason == "abort"
    await at_rest(engine)


async def test_a_closed_engine_says_so(engine: AsyncEngine) -> None:
    await engine.close()
    with pytest.raises(Unavailable, match="the engine is closed"):
        await engine.stats()
    with pytest.raises(Unavailable, match="the engine is closed"):
        await engine.generate(PROMPT).complete()


async def test_another_event_loop_is_refused(engine: AsyncEngine) -> None:
    async def elsewhere() -> None:
        await engine.generate(PROMPT, params(2)).complete()

    with pytest.raises(RuntimeError, match="only on the event loop it started on"):
        await asyncio.to_thread(asyncio.run, elsewhere())


@pytest.mark.parametrize(
    ("prompt", "told"),
    [
        (None, "the prompt is None"),
        ([1.5], r"the prompt is \[1\.5\]"),
        (b"a", "the prompt is b'a'"),
    ],
)
async def test_what_is_no_prompt_is_refused(engine: AsyncEngine, prompt: Any, told: str) -> None:
    with pytest.raises(RequestError, match=f"{told}; allowed: text, token ids or chat"):
        await engine.generate(prompt, params(2)).complete()


async def test_params_of_another_kind_are_refused(engine: AsyncEngine) -> None:
    wrong: Any = {"temperature": 0}
    with pytest.raises(RequestError, match=r"params are \{'temperature': 0\}; allowed: Sampl"):
        await engine.generate(PROMPT, wrong).complete()


async def test_a_stop_string_ends_the_request_and_is_cut_off(engine: AsyncEngine) -> None:
    free = await engine.generate(PROMPT, params(40)).complete()
    assert free.text is not None
    stop = free.text[10:14]
    at = free.text.index(stop)
    output = await engine.generate(PROMPT, params(400, stop=[stop])).complete()
    assert output.text == free.text[:at]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert len(output.token_ids) < 40
    await at_rest(engine)


async def test_a_stop_token_ends_the_request_without_its_text(engine: AsyncEngine) -> None:
    free = await engine.generate(PROMPT, params(20)).complete()
    stop = free.token_ids[5]
    output = await engine.generate(PROMPT, params(20, stop_token_ids=[stop])).complete()
    assert output.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert output.stop_reason == stop
    assert engine.tokenizer is not None
    assert output.text == engine.tokenizer.decode(output.token_ids[:-1])


async def test_logprobs_come_with_their_tokens(engine: AsyncEngine) -> None:
    items = [item async for item in engine.generate(PROMPT, params(5, logprobs=3))]
    for item in items:
        assert item.logprobs is not None
        assert [each.token_id for each in item.logprobs] == item.new_token_ids
        assert all(len(each.top) == 3 for each in item.logprobs)
        assert all(each.top[0] == (each.token_id, each.logprob) for each in item.logprobs)


async def test_text_messages_and_ids_make_the_same_request(engine: AsyncEngine) -> None:
    assert engine.tokenizer is not None
    rendered = "user:hi;assistant:"
    ids = engine.tokenizer.encode(rendered)
    answers = [
        await engine.generate(prompt, params(5)).complete()
        for prompt in (rendered, ids, [{"role": "user", "content": "hi"}])
    ]
    assert [answer.prompt_token_ids for answer in answers] == [ids] * 3
    assert len({tuple(answer.token_ids) for answer in answers}) == 1


@pytest.mark.parametrize(
    ("prompt", "fields", "says"),
    [
        ([], {}, "prompt is empty"),
        ("", {}, "prompt is empty"),
        ([1, 384], {}, "384 is not in the vocabulary: 0 to 383"),
        ([1] * CONTEXT, {}, f"prompt of {CONTEXT} tokens leaves no room"),
        ([1], {"max_tokens": CONTEXT}, f"make {CONTEXT + 1}"),
        ([1], {"stop_token_ids": [999]}, "stop_token_ids is 999"),
    ],
)
async def test_a_refused_request_costs_nothing(
    engine: AsyncEngine, prompt: str | list[int], fields: dict[str, object], says: str
) -> None:
    with pytest.raises(RequestError, match=says):
        await engine.generate(prompt, params(**fields)).complete()
    assert engine.running == 0


async def test_what_the_home_rank_refuses_or_fails_reaches_the_reader(
    engine: AsyncEngine,
) -> None:
    for reason, error in (
        ("refused", RequestError),
        ("failed", RequestFailed),
        ("overloaded", Overloaded),
    ):
        generation = engine.generate(PROMPT, params(400))
        await generation.start()
        (number,) = engine._streams
        engine._on_message(0, Ended(number, reason, "because", None))
        with pytest.raises(error, match="because"):
            await generation.complete()


async def test_requests_of_a_lost_home_rank_fail_with_its_name_and_others_go_on(
    engine: AsyncEngine,
) -> None:
    kept, lost = engine.generate(PROMPT, params(50)), engine.generate(PROMPT, params(50))
    await kept.start()
    await lost.start()
    engine._on_rank_lost(1, OSError("cable pulled"))
    with pytest.raises(RequestFailed, match="rank 1 is lost: cable pulled"):
        await lost.complete()
    assert len((await kept.complete()).token_ids) == 50
    with pytest.raises(RequestFailed, match="rank 1 is lost"):  # it holds experts
        await engine.generate(PROMPT, params()).start()


@pytest.mark.parametrize(
    ("fault", "raised"),
    [
        (TypeError("Integer exceeds 64-bit range"), TypeError),
        (ProtocolError("too long"), RequestError),
        (PeerLost(1, "cable pulled"), RequestFailed),
    ],
)
async def test_a_request_that_cannot_be_sent_leaves_nothing(
    engine: AsyncEngine,
    monkeypatch: pytest.MonkeyPatch,
    fault: Exception,
    raised: type[Exception],
) -> None:
    def send(rank: int, message: Message) -> None:
        raise fault

    with monkeypatch.context() as patch:
        patch.setattr(engine.rank, "send", send)
        with pytest.raises(raised):
            await engine.generate(PROMPT, params()).start()
    await at_rest(engine)


async def test_a_top_k_beyond_every_message_keeps_all_tokens(engine: AsyncEngine) -> None:
    generations = [engine.generate(PROMPT, params(top_k=2**70)) for _ in range(2)]
    for generation in generations:
        await generation.start()  # one on each home rank
    assert [len((await generation.complete()).token_ids) for generation in generations] == [8, 8]


async def test_a_home_rank_that_is_unable_gets_no_more_requests(engine: AsyncEngine) -> None:
    there = [engine.generate(PROMPT, params(50)) for _ in range(2)]
    for generation in there:
        await generation.start()
    engine._on_message(1, decode(encode(Unable("its link to rank 3 is lost"))))
    later = [await engine.generate(PROMPT, params(4)).complete() for _ in range(3)]
    assert all(len(output.token_ids) == 4 for output in later)
    assert set(engine._admission.account()) == {0}
    assert engine.unable == {1: "its link to rank 3 is lost"}
    assert [len((await generation.complete()).token_ids) for generation in there] == [50, 50]
    engine._on_message(0, Unable("its link to rank 4 is lost"))
    with pytest.raises(Unavailable, match="rank 3 is lost; its link to rank 4 is lost"):
        await engine.generate(PROMPT, params()).start()


async def test_closing_the_engine_ends_open_requests_and_leaves_no_tasks(checkpoint: Path) -> None:
    before = asyncio.all_tasks()
    engine = await AsyncEngine.start(
        served_config(checkpoint, cluster={"ranks": 2}, transport={"name": "inproc"})
    )
    generation = engine.generate(PROMPT, params(400))
    await generation.start()
    await asyncio.gather(engine.close(), engine.close())
    assert (await generation.complete()).finish_reason == "abort"
    with pytest.raises(RequestFailed, match="closed"):
        await engine.generate(PROMPT, params()).start()
    await asyncio.sleep(0.05)
    assert asyncio.all_tasks() == before


async def test_without_a_tokenizer_ids_work_and_text_is_refused(
    engine: AsyncEngine,
) -> None:
    engine.tokenizer = None
    output = await engine.generate(PROMPT, params(4)).complete()
    assert output.text is None
    assert len(output.token_ids) == 4
    with pytest.raises(RequestError, match="no tokenizer files"):
        await engine.generate("text", params()).complete()
    with pytest.raises(RequestError, match="stop strings need a tokenizer"):
        await engine.generate(PROMPT, params(stop=["x"])).complete()


async def test_reports_of_all_ranks_come_by_rank_to_all_who_ask(engine: AsyncEngine) -> None:
    reports = await asyncio.gather(engine.stats(), engine.stats())
    assert [sorted(report) for report in reports] == [[0, 1], [0, 1]]
