"""What a compiled turn of the executor leaves out, and that nobody can tell."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from asyncmoe import native
from asyncmoe.devices.cpu import CpuDevice
from asyncmoe.scheduler import QueueView, Scheduler, SchedulerContext, SchedulerParameters
from asyncmoe.steps import AttentionStep, ExpertStep
from tests import toymodel
from tests.cluster import cluster
from tests.test_engine_toy import SMALL
from tests.test_executor import bench, twin  # noqa: F401 - a fixture


class Diary(Scheduler):
    """Takes note of all that it hears."""

    work_conserving = True
    heard: list[object]

    def __init__(self, context: SchedulerContext, parameters: SchedulerParameters) -> None:
        super().__init__(context, parameters)
        type(self).heard = []

    def choose(self, view: QueueView) -> int | None:
        self.heard.append("choose")
        return int(view.runnable.argmax())

    def executed(self, stage: int, rows: int) -> None:
        self.heard.append((stage, rows))


async def test_a_rule_hears_of_all_batches_in_order_before_it_chooses() -> None:
    async with bench(Diary) as b:
        for rows in (1, 2, 3):  # no choice: it is not asked
            b.put(2, chunks=rows)
            await b.until(lambda rows=rows: len(b.log) == rows)  # type: ignore[misc]
        b.put(4)
        b.put(2)
        await b.until(lambda: len(b.log) == 5)
        b.put(0)
        b.put(4)
        await b.until(lambda: len(b.log) == 7)
    told = [(2, 1), (2, 2), (2, 3), "choose", (2, 1)]
    assert Diary.heard[: len(told)] == told
    assert Diary.heard.count("choose") >= 2
    assert Diary.heard[Diary.heard.index((0, 1)) - 1] == "choose"
    assert (4, 1) in Diary.heard[5 : Diary.heard.index((0, 1))]


async def test_a_rule_is_not_left_without_news_for_ever() -> None:
    async with bench(Diary) as b:
        for count in range(1, 70):
            b.put(2)
            await b.until(lambda count=count: len(b.log) == count)  # type: ignore[misc]
        assert len(Diary.heard) >= 64


@pytest.fixture
def compiled(twin: None) -> None:  # noqa: F811
    if native.columns is None:
        pytest.skip("of the compiled turn")


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("watched", [False, True])
async def test_expert_batches_pass_python_by_unless_somebody_watches(
    watched: bool,
) -> None:
    async with cluster(2, toymodel.checkpoint(), **SMALL) as engine:
        if watched:
            engine.ranks[0].executor.watch()
        calls = engine.stage_calls(0, "finish")
        await engine.ended(engine.submit([1, 2, 3], home=1, max_tokens=5))
        assert any(isinstance(step, ExpertStep) for step, _ in calls) is watched


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("watched", [False, True])
async def test_attention_batches_that_go_on_as_a_whole_pass_python_by_unless_somebody_watches(
    watched: bool,
) -> None:
    async with cluster(2, toymodel.checkpoint(), **SMALL) as engine:
        if watched:
            engine.ranks[1].executor.watch()
        calls = engine.stage_calls(1, "finish")
        await engine.ended(engine.submit([1, 2, 3], home=1, max_tokens=5))
        last = engine.ranks[1].chain.layers - 1  # where all but the last row of the prompt end
        whole = [
            step
            for step, _ in calls
            if isinstance(step, AttentionStep) and (step.layer < last or step.row_count == 1)
        ]
        assert bool(whole) is watched


@pytest.mark.usefixtures("compiled")
async def test_what_a_batch_leaves_is_freed_on_the_compute_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    where: list[str] = []

    def note(_: AttentionStep) -> None:
        where.append(threading.current_thread().name)

    monkeypatch.setattr(AttentionStep, "__del__", note, raising=False)
    async with cluster(2, toymodel.checkpoint(), **SMALL) as engine:
        await engine.ended(engine.submit([1, 2, 3], home=1, max_tokens=8))
    assert where.count("compute") > len(where) // 2 > 4


async def test_work_of_a_submitter_is_heard_of_on_its_loop() -> None:
    device, loop = CpuDevice(1), asyncio.get_running_loop()
    heard: asyncio.Future[list[Any]] = loop.create_future()
    device.submitter()(lambda: 3, lambda *end: heard.set_result([*end, asyncio.get_running_loop()]))
    result, error, compute_s, where = await heard
    await device.close()
    assert (result, error, where) == (3, None, loop)
    assert 0 <= compute_s < 5
