"""The executor between real queues, policies and a real device; the batches are the tests'."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from asyncmoe import native
from asyncmoe.config import BatchConfig
from asyncmoe.devices.cpu import CpuDevice
from asyncmoe.errors import AsyncMoeError
from asyncmoe.executor import DEPTH, Executor
from asyncmoe.microqueue import Queues, make_queues
from asyncmoe.policy import BatchPolicy
from asyncmoe.scheduler import QueueView, Scheduler, SchedulerContext, SchedulerParameters
from asyncmoe.schedulers.flfs import Flfs
from asyncmoe.stage import Kind, StageChain
from asyncmoe.stats import RankTimes
from tests import toymodel
from tests.cluster import cluster
from tests.test_engine_toy import SMALL

CHAIN = StageChain(2)


@dataclass
class Work:
    """A step with compute of the test's own."""

    stage: int
    row_count: int
    compute: Callable[[], Any]

    @property
    def kind(self) -> Kind:
        return CHAIN.kinds[self.stage]

    def __call__(self) -> Any:
        return self.compute()


@dataclass
class Bench:
    """An executor on attention stages, and what it did."""

    queues: Queues
    compute: Callable[[], Any] = lambda: None
    log: list[str] = field(default_factory=list)
    prepared: list[tuple[int, int]] = field(default_factory=list)  # stage, rows
    passages: list[int] = field(default_factory=list)  # last stages of those offered
    executor: Executor = None  # type: ignore[assignment]
    on_finish: Callable[[], None] = lambda: None

    def put(self, stage: int, rows: int = 1, chunks: int = 1) -> None:
        now_s = asyncio.get_running_loop().time()
        self.queues.put_chunks(stage, np.arange(chunks), np.full(chunks, rows), now_s)
        self.executor.notify()

    def prepare(self, stage: int, max_rows: int) -> Any:
        chunks = self.queues.take_chunks(stage, max_rows)
        self.prepared.append((stage, len(chunks)))
        return Work(stage, len(chunks), self.compute)

    def passage(self, step: Any, last: Callable[[], int], herald: Any) -> Any:
        self.passages.append(last())
        return step

    def went_on(self, step: Any, passed: Any) -> None:
        raise AssertionError("there is no passage")

    def finish(self, step: Any, result: Any) -> None:
        self.log.append(f"finished {CHAIN.name(step.stage)}")
        self.on_finish()

    def failed(self, step: Any, error: BaseException) -> None:
        self.log.append(f"{CHAIN.name(step.stage)} failed: {error}")

    def broken(self, error: Exception) -> None:
        self.log.append(f"broken: {error}")

    async def until(self, condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.001)


@pytest.fixture(params=["compiled", "plain"], autouse=True)
def twin(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "plain":
        monkeypatch.setattr(native, "columns", None)
    elif native.columns is None:
        pytest.skip("nothing is compiled")


@contextlib.asynccontextmanager
async def bench(scheduler: type[Scheduler] = Flfs, **batch: Any) -> AsyncIterator[Bench]:
    made, device = Bench(make_queues(CHAIN)), CpuDevice(1)
    rule = scheduler(SchedulerContext(CHAIN, 1.0), SchedulerParameters())
    policy = BatchPolicy(BatchConfig(**batch), CHAIN)
    made.executor = Executor(made.queues, rule, policy, device, made, RankTimes())
    try:
        yield made
    finally:
        made.executor.close()
        await device.close()


async def test_two_batches_are_with_the_device_and_no_more() -> None:
    async with bench(attention_max_rows=1) as b:
        gate = threading.Semaphore(0)
        b.compute = gate.acquire
        b.put(0, chunks=4)
        await asyncio.sleep(0.02)
        assert b.prepared == [(0, 1)] * DEPTH
        gate.release()
        await b.until(lambda: len(b.prepared) == DEPTH + 1)
        assert b.log == ["finished A0"]
        gate.release(3)
        await b.until(lambda: len(b.log) == 4)


async def test_rows_that_are_the_only_ones_wait_for_those_that_run() -> None:
    async with bench() as b:
        gate = threading.Semaphore(0)
        b.compute = gate.acquire
        b.put(2)
        await b.until(lambda: b.prepared == [(2, 1)])
        b.put(4)
        await asyncio.sleep(0.02)
        assert b.prepared == [(2, 1)]  # what runs may yet join those of stage 4
        b.put(0)
        await b.until(lambda: len(b.prepared) == 2)  # now there is a choice
        gate.release(4)
        await b.until(lambda: len(b.log) == 3)


async def test_a_batch_is_offered_a_passage_only_while_nothing_else_is_here() -> None:
    async with bench(head_max_rows=2) as b:
        gate = threading.Semaphore(0)
        b.compute = gate.acquire
        b.put(0, chunks=3)
        await b.until(lambda: len(b.prepared) == 1)
        assert b.passages == [3]  # the head takes fewer rows
        b.put(0)
        b.put(2)
        await b.until(lambda: len(b.prepared) == 2)
        gate.release(4)
        await b.until(lambda: len(b.log) == 3)
        assert b.passages == [3, 4]  # the last of all was alone again


async def test_arrivals_of_one_turn_of_the_loop_are_one_batch() -> None:
    async with bench() as b:
        for _ in range(5):
            b.put(2)
        await b.until(lambda: b.log != [])
        assert b.prepared == [(2, 5)]


async def test_a_stage_below_its_minimum_runs_once_it_has_lingered() -> None:
    async with bench(attention_min_rows=3, attention_linger_ms=40.0) as b:
        begin_s = time.monotonic()
        b.put(0)
        await b.until(lambda: b.log != [])
        assert time.monotonic() - begin_s >= 0.035
        b.put(2)
        b.put(2)
        b.put(2)
        await b.until(lambda: len(b.prepared) == 2, timeout_s=1.0)
        assert b.prepared == [(0, 1), (2, 3)]


async def test_after_running_waits_for_the_last_batch_that_runs_now() -> None:
    async with bench(attention_max_rows=1) as b:
        gate = threading.Semaphore(0)
        b.compute = gate.acquire
        b.executor.after_running(lambda: b.log.append("at once"))
        b.put(0, chunks=3)
        await b.until(lambda: len(b.prepared) == DEPTH)
        b.executor.after_running(lambda: b.log.append("after two"))
        gate.release(3)
        await b.until(lambda: len(b.log) == 5)
        assert b.log == ["at once", "finished A0", "finished A0", "after two", "finished A0"]


async def test_a_failing_batch_is_reported_and_the_next_one_runs() -> None:
    async with bench() as b:
        b.compute = lambda: 1 // 0
        b.put(0)
        await b.until(lambda: b.log != [])
        b.compute = lambda: None
        b.put(2)
        await b.until(lambda: len(b.log) == 2)
        assert b.log == ["A0 failed: integer division or modulo by zero", "finished A1"]


class Shy(Scheduler):
    """Waits the first few times that it is asked."""

    asked = 0

    def choose(self, view: QueueView) -> int | None:
        self.asked += 1
        return int(view.runnable.argmax()) if self.asked > 3 else None


async def test_a_scheduler_that_waits_is_asked_again_though_nothing_happens() -> None:
    async with bench(Shy) as b:
        b.put(0)
        await b.until(lambda: b.log != [], timeout_s=2.0)
        assert b.log == ["finished A0"]


class Wrong(Scheduler):
    """Names a stage without rows."""

    def choose(self, view: QueueView) -> int | None:
        return 2


class Raising(Scheduler):
    """Has a bug."""

    def choose(self, view: QueueView) -> int | None:
        raise KeyError("oops")


@pytest.mark.parametrize(
    ("rule", "said"), [(Wrong, "chose stage 2; runnable are "), (Raising, "oops")]
)
async def test_a_faulty_scheduler_is_reported_instead_of_sleeping(
    rule: type[Scheduler], said: str
) -> None:
    async with bench(rule) as b:
        b.put(0)
        await b.until(lambda: b.log != [], timeout_s=2.0)
        assert b.log[0].startswith("broken: ")
        assert said in b.log[0]


async def test_a_fault_while_a_result_is_taken_in_is_reported() -> None:
    async with bench() as b:
        b.on_finish = lambda: (_ for _ in ()).throw(ValueError("lost the thread"))
        b.put(0)
        await b.until(lambda: len(b.log) == 2)
        assert b.log == ["finished A0", "broken: lost the thread"]


async def test_a_closed_executor_starts_nothing() -> None:
    async with bench(attention_min_rows=2, attention_linger_ms=5.0) as b:
        b.put(0)
        await asyncio.sleep(0)
        b.executor.close()
        b.put(2, chunks=2)
        await asyncio.sleep(0.02)
        assert b.prepared == []


class Superstitious(toymodel.ToyModel):
    """Its attention fails at position 13."""

    def attention(self, layer: int, x: Any, batch: Any, cache: Any) -> Any:
        if (batch.positions == 13).any():
            raise RuntimeError("13 is too much")
        return super().attention(layer, x, batch, cache)


class Idle(toymodel.ToyModel):
    """Its experts fail."""

    def experts(self, layer: int, x: Any, batch: Any) -> Any:
        raise RuntimeError("no expert today")


async def test_a_failing_attention_stage_ends_its_requests_alone() -> None:
    checkpoint = replace(toymodel.checkpoint(), model_class=Superstitious)
    async with cluster(2, checkpoint, **SMALL) as engine:
        early = [engine.submit([1, 2, i], max_tokens=5) for i in range(4)]
        await engine.ended(*early)
        long = engine.submit([1] * 20, max_tokens=5)
        await engine.ended(long)
        later = engine.submit([1, 2, 3], max_tokens=5)
        await engine.ended(later)
        assert (engine.end[long], engine.message[long]) == ("failed", "A0 failed: 13 is too much")
        assert {engine.end[i] for i in (*early, later)} == {"length"}
        await engine.settled()


async def test_a_failing_expert_stage_stops_its_rank_with_the_error() -> None:
    checkpoint = replace(toymodel.checkpoint(), model_class=Idle)
    async with cluster(2, checkpoint, **SMALL) as engine:
        engine.submit([1, 2, 3], home=0, max_tokens=5)
        async with asyncio.timeout(10):
            stopped = [rank.stopped for rank in engine.ranks]
            done, _ = await asyncio.wait(stopped, return_when=asyncio.FIRST_COMPLETED)
        with pytest.raises(AsyncMoeError, match="E0 failed: no expert today"):
            await done.pop()


async def test_what_batches_leave_does_not_pile_up_where_there_is_always_a_choice() -> None:
    class Result:
        alive = most = 0

        def __init__(self) -> None:
            Result.alive += 1
            Result.most = max(Result.most, Result.alive)

        def __del__(self) -> None:
            Result.alive -= 1

    async with bench() as b:
        b.compute = Result

        def refill() -> None:
            for stage in (0, 2, 4):
                if len(b.log) < 60 and b.queues.rows[stage] < 2:
                    b.put(stage, chunks=2)

        b.on_finish = refill
        refill()
        await b.until(lambda: len(b.log) >= 60)
        assert Result.most < 6
