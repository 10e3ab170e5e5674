"""The driver of workloads, on a target of timers and on a live engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from asyncmoe.frontend.engine import AsyncEngine
from asyncmoe.metrics.recorder import REASONS, Record, Recorder
from asyncmoe.workload.driver import Listener, drive
from asyncmoe.workload.live import LiveTarget
from asyncmoe.workload.workload import Workload, WorkloadConfig, make_workload
from tests import toymodel
from tests.cluster import cluster

STEP_S = 0.002


class TimerTarget:
    """A token every `STEP_S` for each request; refuses what `refused` names."""

    def __init__(self, refused: Sequence[int] = ()) -> None:
        self._loop, self._refused = asyncio.get_running_loop(), refused
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self.most = 0

    def now_s(self) -> float:
        return self._loop.time()

    def listen(self, listener: Listener) -> None:
        self._listener = listener

    def submit(self, request: int, workload: Workload) -> None:
        if request in self._refused:
            self._listener.on_end(request, "refused")
            return
        self._wait(request, int(workload.output_tokens[request % len(workload)]))
        self.most = max(self.most, len(self._timers))

    def abort(self, request: int) -> None:
        if request in self._timers:
            self._timers.pop(request).cancel()
            self._loop.call_soon(self._listener.on_end, request, "aborted")

    def _wait(self, request: int, left: int) -> None:
        self._timers[request] = self._loop.call_later(STEP_S, self._step, request, left)

    def _step(self, request: int, left: int) -> None:
        self._listener.on_tokens([request], self.now_s())
        if left > 1:
            self._wait(request, left - 1)
        else:
            del self._timers[request]
            self._listener.on_end(request, "length")


def workload(**keys: Any) -> Workload:
    return make_workload(WorkloadConfig.model_validate({"lengths": "fixed:5,4", **keys}))


def ends(record: Record) -> dict[str, int]:
    counts = np.bincount(record.reason, minlength=len(REASONS)).tolist()
    return {reason: count for reason, count in zip(REASONS, counts, strict=True) if count}


async def driven(planned: Workload, target: TimerTarget | None = None) -> Record:
    recorder = Recorder()
    await drive(target or TimerTarget(), planned, recorder)
    return recorder.record()


async def test_requests_of_an_open_loop_come_at_their_times() -> None:
    planned = workload(arrivals="poisson:400", requests=40)
    record = await driven(planned)
    late_s = record.arrival_s - planned.arrival_s
    assert late_s.min() > -0.001
    assert np.median(late_s) < 0.01
    assert ends(record) == {"length": 40}
    assert np.bincount(record.token_request).tolist() == [4] * 40


async def test_a_closed_loop_keeps_its_number_in_flight() -> None:
    target = TimerTarget()
    record = await driven(workload(arrivals="closed:3", requests=8), target)
    assert target.most == 3
    assert ends(record) == {"length": 8}
    assert record.arrival_s[:3].max() < record.ended_s.min()
    assert record.arrival_s[3] >= record.ended_s[:3].min()


async def test_a_closed_loop_starts_over_until_its_time_is_up() -> None:
    planned = workload(arrivals="closed:2", duration_s=0.1)
    record = await driven(planned)
    assert record.end_s == pytest.approx(0.1, abs=0.03)
    assert record.token_s.max() <= record.end_s
    assert set(ends(record)) <= {"length", "aborted"}
    assert ends(record)["length"] > 4


async def test_refused_requests_are_replaced_and_counted() -> None:
    record = await driven(workload(arrivals="closed:2", requests=6), TimerTarget(refused=(0, 1, 4)))
    assert ends(record) == {"length": 3, "refused": 3}


async def test_a_closed_loop_that_is_not_served_asks_again_after_a_while() -> None:
    target = TimerTarget(refused=range(10_000))
    record = await driven(workload(arrivals="closed:2", duration_s=0.35), target)
    assert 4 <= ends(record)["refused"] <= 8


async def test_stop_aborts_what_runs_and_submits_nothing_more() -> None:
    stop, recorder = asyncio.Event(), Recorder()
    asyncio.get_running_loop().call_later(0.02, stop.set)
    planned = workload(lengths="fixed:5,9999", arrivals="bursty:100,2", duration_s=60)
    await drive(TimerTarget(), planned, recorder, stop)
    record = recorder.record()
    assert ends(record) == {"aborted": record.requests}
    assert record.end_s < 5


async def test_a_cancelled_drive_aborts_what_runs() -> None:
    target = TimerTarget()
    driving = asyncio.create_task(
        drive(target, workload(lengths="fixed:5,9999", requests=3), Recorder())
    )
    await asyncio.sleep(0.01)
    driving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await driving
    assert not target._timers


async def test_tokens_are_kept_by_request_and_time_over_many_batches() -> None:
    recorder, planned = Recorder(), workload(requests=3)
    recorder.begin(planned, 10.0)
    for request in range(3):
        recorder.submitted(request, 10.0)
    for step in range(40_000):
        recorder.tokens([2, 0] if step % 2 else [1], 10.0 + step)
    recorder.finish(1e6)
    recorder.tokens([0], 2e6)  # behind the end
    record = recorder.record()
    assert np.bincount(record.token_request).tolist() == [20_000] * 3
    assert (np.diff(record.token_request) >= 0).all()
    assert record.token_s[:2].tolist() == [1.0, 3.0]


async def test_a_live_engine_runs_a_workload() -> None:
    limits = {"max_requests": 2, "queue_requests": 2, "slots": 512}
    async with cluster(1, toymodel.checkpoint(), engine=limits) as ranks:
        engine = AsyncEngine(ranks.ranks[0].config, ranks.ranks[0], None)
        recorder = Recorder()
        with LiveTarget(engine) as target:
            await drive(target, workload(requests=6), recorder)
            record = recorder.record()
            assert ends(record) == {"length": 4, "overloaded": 2}
            assert target.fault.is_set()
            tokens = np.bincount(record.token_request, minlength=6)
            assert sorted(tokens.tolist()) == [0, 0, 4, 4, 4, 4]
            endless = workload(lengths="fixed:5,400", arrivals="closed:2", duration_s=0.05)
            await drive(target, endless, recorder := Recorder())
            assert "aborted" in ends(recorder.record())
            await ranks.settled()


async def test_decode_only_requests_skip_their_prompt() -> None:
    async with cluster(1, toymodel.checkpoint()) as ranks:
        engine, rank = AsyncEngine(ranks.ranks[0].config, ranks.ranks[0], None), ranks.ranks[0]
        rows = []
        for decode_only in (False, True):
            before = rank.stats()["attention_rows"]
            with LiveTarget(engine) as target:
                planned = workload(lengths="fixed:50,4", requests=1, decode_only=decode_only)
                await drive(target, planned, Recorder())
            rows.append(rank.stats()["attention_rows"] - before)
        assert rows == [3 * 53, 3 * 4]  # layers times positions
