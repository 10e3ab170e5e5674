"""What a home rank does with requests: order, limits, turns, cancellation in every phase."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from asyncmoe.config import EngineConfig
from asyncmoe.home import Home
from asyncmoe.kvcache import BlockPool
from asyncmoe.messages import Admit, Ended, Message
from asyncmoe.microqueue import make_queues
from asyncmoe.sampling import SamplingParams
from asyncmoe.samplingtable import SamplingTable
from asyncmoe.stage import StageChain
from asyncmoe.tokentable import TokenTable
from asyncmoe.transport import Parcel, ParcelClass
from tests import toymodel
from tests.cluster import Cluster, cluster
from tests.test_engine_toy import PROMPTS, SMALL, sections

CHAIN = StageChain(2)


class Desk:
    """A home without a device: the test is its host, and takes chunks off its queues."""

    def __init__(self, blocks: int = 16, context: int = 64, **engine: Any) -> None:
        settings = {"prefill_chunk": 4, "max_requests": 2, "slots": 32, **engine}
        config = EngineConfig.model_validate(settings)
        self.said: list[Ended] = []
        self.running: list[Callable[[], None]] | None = None  # callbacks, while a batch "runs"
        self.queues = make_queues(CHAIN)
        self.table = TokenTable(config.slots, 2, 1, torch.float32, torch.device("cpu"))
        self.pool = BlockPool(blocks, 4, config.max_requests, context)
        self.home = Home(
            config=config, context=context, vocab=10, chain=CHAIN, table=self.table,
            pool=self.pool, sampling=SamplingTable(config.max_requests, 10, ()),
            queues=self.queues, prune=True, host=self,
        )  # fmt: skip

    def now_s(self) -> float:
        return 0.0

    def emit(self, message: Message) -> None:
        assert isinstance(message, Ended)
        self.said.append(message)

    def discard(self, slots: np.ndarray, epochs: np.ndarray) -> None:
        pass

    def wipe(self, blocks: np.ndarray) -> None:
        pass

    def after_running(self, callback: Callable[[], None]) -> None:
        if self.running is None:
            callback()
        else:
            self.running.append(callback)

    def soon(self, callback: Callable[[], None]) -> None:
        callback()

    @property
    def computing(self) -> bool:
        return self.running is not None

    def batch_ends(self) -> None:
        callbacks, self.running = self.running or [], None
        for callback in callbacks:
            callback()

    def admit(self, request_id: int, tokens: int, **sampling: Any) -> None:
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": 1, **sampling})
        self.home.admit(Admit(request_id, [1] * tokens, params.to_wire()))

    @property
    def queued(self) -> list[tuple[int, int]]:
        """(request, rows) of the chunks at A0, which are taken off."""
        if not self.queues.rows[0]:
            return []
        chunks = self.queues.take_chunks(0, 10**6).tolist()
        return [(self.home.request_of(c), int(self.home.chunks.rows[c])) for c in chunks]

    def leave(self, request_id: int) -> None:
        """The request's first chunk is through the layers."""
        self.home._close_chunk(self.home._by_id[request_id].chunks[0])
        self.home.pump()


def test_requests_are_admitted_in_order_though_a_later_one_would_fit() -> None:
    desk = Desk(blocks=4, max_requests=3)
    desk.admit(1, tokens=8)
    desk.admit(2, tokens=12)  # 3 blocks, and 2 are free
    desk.admit(3, tokens=4)
    assert {request for request, _ in desk.queued} == {1}
    assert (desk.home.running, desk.home.waiting) == (1, 2)
    desk.home.end(1, "aborted")
    assert {request for request, _ in desk.queued} == {2, 3}


def test_cancelling_a_waiting_request_lets_the_ones_behind_it_in() -> None:
    desk = Desk(blocks=4, max_requests=3)
    desk.admit(1, tokens=8)
    desk.admit(2, tokens=12)
    desk.admit(3, tokens=4)
    desk.home.end(2, "aborted")
    assert [ended.request_id for ended in desk.said] == [2]
    assert {request for request, _ in desk.queued} == {1, 3}


@pytest.mark.parametrize(
    ("tokens", "sampling", "said"),
    [
        (0, {}, "the prompt is empty"),
        (64, {}, "the prompt has 64 tokens; the context is 64 tokens"),
        (60, {"max_tokens": 4}, "60 prompt tokens and 4 new ones need 16 KV blocks of 4 tokens; "
         "the pool has 8"),
    ],
)  # fmt: skip
def test_a_request_that_can_never_run_is_refused_with_the_numbers(
    tokens: int, sampling: dict[str, Any], said: str
) -> None:
    desk = Desk(blocks=8)
    desk.admit(1, tokens, **sampling)
    assert [(e.reason, e.parameter) for e in desk.said] == [("refused", "prompt")]
    assert said in desk.said[0].message
    assert (desk.home.running, desk.home.waiting) == (0, 0)


def test_a_number_in_use_and_a_full_queue_are_refused() -> None:
    desk = Desk(max_requests=1, queue_requests=1)
    for request_id in (1, 2, 1, 3):
        desk.admit(request_id, tokens=4)
    assert "request id 1 is in use" in desk.said[0].message
    assert "1 requests wait already" in desk.said[1].message
    assert (desk.home.running, desk.home.waiting) == (1, 1)


def test_a_prompt_enters_in_chunks_and_only_so_many_at_once() -> None:
    desk = Desk()
    desk.admit(1, tokens=22)
    assert desk.queued == [(1, 4)]  # the later ones wait behind it
    assert (desk.home.chunks.in_use, desk.home.free_slots) == (4, 32 - 1 - 16)
    desk.leave(1)
    desk.leave(1)
    assert desk.home.chunks.in_use == 4
    assert desk.home._by_id[1].injected == 22


def test_prompts_take_turns_when_slots_are_scarce() -> None:
    desk = Desk(slots=6)  # room for one chunk
    desk.admit(1, tokens=20)
    desk.admit(2, tokens=3)
    order = desk.queued
    while len(order) < 4:
        desk.leave(order[-1][0])
        order += desk.queued
    assert order == [(1, 4), (1, 4), (2, 3), (1, 4)]


def test_prefill_never_takes_the_slot_of_a_request_to_come() -> None:
    desk = Desk(slots=8, max_requests=4)
    desk.admit(1, tokens=40)
    assert desk.home.free_slots == 3
    for request_id in (2, 3, 4):
        desk.admit(request_id, tokens=1)
    assert (desk.home.running, desk.home.free_slots) == (4, 0)


def test_a_cancelled_requests_slot_goes_to_the_next_request_and_to_no_chunk() -> None:
    desk = Desk(slots=6)
    desk.admit(1, tokens=4)
    desk.admit(2, tokens=5)
    desk.running = []
    desk.home.end(1, "aborted")  # while a batch runs: its row is not free yet
    desk.home.pump()
    desk.admit(3, tokens=4)
    assert desk.home.waiting == 1
    desk.batch_ends()
    assert desk.home.waiting == 0


def test_kv_blocks_are_free_only_when_the_running_batches_have_ended() -> None:
    desk = Desk(blocks=4)
    desk.admit(1, tokens=16)
    desk.running = []
    desk.home.end(1, "aborted")
    desk.admit(2, tokens=4)
    assert (desk.pool.free_blocks, desk.home.waiting) == (0, 1)
    desk.batch_ends()
    assert (desk.pool.free_blocks, desk.home.waiting) == (3, 0)


def arrive(desk: Desk, freed: list[int], number: int) -> None:
    """The first of two parts of slot `number` arrives, in memory that is lent."""
    slots = np.array([number])
    desk.table.expect(slots, 1, np.array([2]))
    one = slots.astype(np.uint32), np.zeros(1, np.uint32), np.zeros(1, np.uint8), torch.ones(1, 1)
    desk.home.take_in(Parcel(ParcelClass.COMBINE, 1, *one), lambda: freed.append(number))


def test_memory_of_arrived_rows_goes_back_though_nothing_runs_that_needs_them() -> None:
    desk, freed = Desk(), list[int]()
    arrive(desk, freed, 0)
    assert freed == [0]
    desk.running = []  # from here on a batch is with the device: it may copy them
    arrive(desk, freed, 1)
    desk.home.let_go()
    assert freed == [0]
    arrive(desk, freed, 2)
    desk.home.let_go()  # a second batch has ended, and none has copied them
    assert freed == [0, 1, 2]


def test_rows_whose_memory_nobody_waits_for_are_left_to_the_compute_thread() -> None:
    desk, freed = Desk(), list[int]()
    slots = np.array([3])
    desk.table.expect(slots, 1, np.array([2]))
    one = slots.astype(np.uint32), np.zeros(1, np.uint32), np.zeros(1, np.uint8), torch.ones(1, 1)
    desk.home.take_in(Parcel(ParcelClass.COMBINE, 1, *one))
    desk.home.let_go()
    assert len(desk.table.arrived) == 1
    arrive(desk, freed, 0)  # somebody waits for these, and they stand behind the others
    assert freed == [0]
    assert not desk.table.arrived


def test_ending_a_request_twice_or_one_that_never_was_changes_nothing() -> None:
    desk = Desk()
    desk.admit(1, tokens=4)
    for request_id in (1, 1, 7):
        desk.home.end(request_id, "aborted")
    assert [ended.request_id for ended in desk.said] == [1]
    assert (desk.home.free_slots, desk.pool.free_blocks, desk.home.running) == (32, 16, 0)


# ---- the whole engine


async def check(engine: Cluster, ids: list[int], prompts: list[list[int]], tokens: int) -> None:
    """These requests end with the right tokens."""
    await engine.ended(*ids)
    for request_id, prompt in zip(ids, prompts, strict=True):
        spec = engine.ranks[0].spec
        assert engine.tokens[request_id] == toymodel.reference(prompt, tokens, spec)


@pytest.mark.parametrize("transport", ["inproc", "tcp"])
@pytest.mark.parametrize("finishing", [False, True])
async def test_a_request_can_be_cancelled_at_any_moment(transport: str, finishing: bool) -> None:
    config = sections(
        transport={"name": transport, "window_rows": 4},
        engine={"prefill_chunk": 4, "slots": 20, "max_requests": 3},
    )
    checkpoint = toymodel.checkpoint(finishing=finishing)
    async with cluster(2, checkpoint, **config) as engine:
        kept = []
        for turns in range(48):
            doomed = engine.submit([turns] * 23, max_tokens=9)
            if turns % 8 == 0:
                kept.append(engine.submit(PROMPTS[turns % 5], max_tokens=4))
            for _ in range(turns):
                await asyncio.sleep(0)
            engine.abort(doomed)
        await check(engine, kept, [PROMPTS[turns % 5] for turns in range(0, 48, 8)], 4)
        await engine.settled()


async def test_epochs_wrap_around() -> None:
    async with cluster(2, toymodel.checkpoint(), **SMALL) as engine:
        for rank in engine.ranks:
            assert rank.home is not None
            rank.home.table.epoch[:] = 2**32 - 2
        doomed = [engine.submit(prompt, max_tokens=60) for prompt in PROMPTS]
        kept = [engine.submit(prompt, max_tokens=6) for prompt in PROMPTS]
        await engine.until(lambda: len(engine.tokens) > 3)
        for request_id in doomed:
            engine.abort(request_id)
        await check(engine, kept, PROMPTS, 6)
        await engine.settled()


async def test_a_cancelled_request_whose_rows_are_away_lets_the_next_one_in() -> None:
    # The experts hold rows back, so that the first request is away when it is cancelled, and its
    # rows come back as a credit and not as a combine parcel.
    config = sections(
        engine={"max_requests": 1},
        batch={"expert_min_rows": 1000, "expert_linger_ms": 300.0},
        placement={"roles": ["attention", "expert"]},
        transport={"name": "inproc"},
    )
    async with cluster(2, toymodel.checkpoint(), **config) as engine:
        first, second = engine.submit([1, 2], max_tokens=2), engine.submit([3], max_tokens=1)
        while not engine.ranks[1].queues.rows.any():  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        engine.abort(first)
        await engine.until(lambda: second in engine.end, timeout_s=10)
        assert engine.end == {first: "aborted", second: "length"}
        await engine.settled()


async def test_a_request_after_the_loss_of_an_expert_rank_fails_by_its_name() -> None:
    async with cluster(3, toymodel.checkpoint(), **SMALL) as engine:
        first = engine.submit([1, 2, 3], home=1, max_tokens=100)
        await engine.until(lambda: engine.tokens[first])
        engine.ranks[2].transport.abort()  # type: ignore[attr-defined]
        await engine.ended(first)
        late = engine.submit([1, 2, 3], home=1, max_tokens=5)
        await engine.until(lambda: late in engine.end, timeout_s=10)
        assert engine.end[late] == "failed"
        assert "rank 2 is lost" in engine.message[late]


class Measuring(toymodel.ToyModel):
    """Notes how many rows its attention gets."""

    sizes: list[int]

    def attention(self, layer: int, x: torch.Tensor, batch: Any, cache: Any) -> Any:
        self.sizes.append(len(x))
        return super().attention(layer, x, batch, cache)


async def test_no_attention_batch_is_larger_than_its_maximum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Measuring, "sizes", [], raising=False)
    config = sections(batch={"attention_max_rows": 5})  # below the chunk of 8
    checkpoint = replace(toymodel.checkpoint(), model_class=Measuring)
    async with cluster(1, checkpoint, **config) as engine:
        ids = [engine.submit(prompt, max_tokens=3) for prompt in PROMPTS]
        await check(engine, ids, PROMPTS, 3)
        assert max(Measuring.sizes) == 5


@pytest.mark.parametrize("finishing", [False, True])
async def test_chunks_of_one_position_give_the_same_tokens(finishing: bool) -> None:
    config = sections(engine={"prefill_chunk": 1})
    async with cluster(2, toymodel.checkpoint(finishing=finishing), **config) as engine:
        ids = [engine.submit(prompt, max_tokens=3) for prompt in PROMPTS[:5]]
        await check(engine, ids, PROMPTS[:5], 3)
        await engine.settled()
