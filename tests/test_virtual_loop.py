"""The virtual loop: time jumps, order is kept, seeds replay, and the real world is refused."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

from asyncmoe.virtual.loop import Lane, NotVirtual, Standstill, VirtualLoop, current_lane
from asyncmoe.virtual.run import run
from tests.transport_kit import compiled_or_plain  # noqa: F401

T = TypeVar("T")
pytestmark = pytest.mark.usefixtures("compiled_or_plain")


def loop() -> VirtualLoop:
    running = asyncio.get_running_loop()
    assert isinstance(running, VirtualLoop)
    return running


def exactly(main: Coroutine[Any, Any, T], seed: int | None = None) -> T:
    """Run without slack."""
    return run(main, seed, slack_s=0.0)


def test_an_hour_of_sleep_takes_no_time() -> None:
    async def main() -> float:
        await asyncio.sleep(3600)
        return loop().time()

    begin_s = time.perf_counter()
    assert run(main()) == 3600
    assert time.perf_counter() - begin_s < 5


def test_timers_of_one_moment_run_in_the_order_in_which_they_were_set() -> None:
    async def main() -> list[int]:
        seen: list[int] = []
        for number in range(50):
            loop().call_at(1.0, seen.append, number)
        await asyncio.sleep(2)
        return seen

    assert exactly(main()) == exactly(main(), seed=3) == list(range(50))


def test_cancelled_timers_never_run_and_are_swept_out() -> None:
    async def main() -> tuple[list[int], int]:
        seen: list[int] = []
        timers = [loop().call_later(5.0, seen.append, number) for number in range(1000)]
        for timer in timers[1:]:
            timer.cancel()
        left = loop().timers
        await asyncio.sleep(6)
        return seen, left

    seen, left = exactly(main())
    assert seen == [0]
    assert left < 500


def test_timeouts_and_cancellation_work_as_elsewhere() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await asyncio.sleep(1)
        task = asyncio.create_task(asyncio.sleep(100))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return loop().time()

    assert exactly(main()) == 0.5


async def turns(of: int = 3, each: int = 4) -> list[str]:
    """Who runs when, of lanes that each have as many callbacks ready."""
    seen: list[str] = []
    for number in range(of):
        lane = loop().lane(f"{number}")
        for step in range(each):
            loop().call_soon(seen.append, f"{number}{'abcd'[step]}", context=lane.context)
    await asyncio.sleep(1)
    return seen


def test_a_seed_chooses_among_lanes_and_keeps_the_order_within_each() -> None:
    orders = [exactly(turns(), seed) for seed in range(20)]
    assert len({tuple(order) for order in orders}) > 15
    for order in orders:
        for lane in "012":
            assert [name for name in order if name[0] == lane] == [f"{lane}{s}" for s in "abcd"]
    assert exactly(turns(), 7) == orders[7]


def test_without_a_seed_lanes_take_turns() -> None:
    assert exactly(turns(2, 3)) == ["0a", "1a", "0b", "1b", "0c", "1c"]


def test_a_charged_lane_waits_while_others_run() -> None:
    async def main() -> list[tuple[float, str]]:
        seen: list[tuple[float, str]] = []
        one, other = loop().lane("one"), loop().lane("other")

        def work(lane: Lane) -> None:
            seen.append((loop().time(), lane.name))
            lane.charge(1.0)

        for lane in (one, one, one, other):
            loop().call_soon(work, lane, context=lane.context)
        await asyncio.sleep(10)
        return seen

    assert exactly(main()) == [(0.0, "one"), (0.0, "other"), (1.0, "one"), (2.0, "one")]


def test_slack_lets_a_lane_run_early_and_forgives_it_nothing() -> None:
    async def main() -> list[float]:
        seen: list[float] = []
        lane = loop().lane("busy")

        def work() -> None:
            seen.append(loop().time())
            lane.charge(0.001)

        for _ in range(100):
            loop().call_soon(work, context=lane.context)
        await asyncio.sleep(10)
        return [*seen, lane.free_s]

    *seen, free_s = run(main(), slack_s=0.01)
    assert seen[:10] == [0.0] * 10
    assert seen[-1] == pytest.approx(0.099 - 0.01)
    assert free_s == pytest.approx(0.1)


def test_host_time_behind_compute_is_hidden() -> None:
    async def main() -> Lane:
        lane = loop().lane("host")
        loop().call_at(1.0, lane.compute, 0.0, 2.0, context=lane.context)  # from 1 to 3
        loop().call_at(0.5, lane.charge, 1.0, context=lane.context)  # 0.5 of it hidden
        loop().call_at(2.0, lane.charge, 0.5, context=lane.context)  # all
        loop().call_at(2.8, lane.charge, 1.0, context=lane.context)  # 0.2
        await asyncio.sleep(5)
        return lane

    lane = exactly(main())
    assert lane.worked_s == pytest.approx(2.5)
    assert lane.hidden_s == pytest.approx(1.2)


def test_a_dead_lane_runs_nothing_more() -> None:
    async def main() -> list[int]:
        seen: list[int] = []
        lane = loop().lane("dead")
        loop().call_soon(seen.append, 1, context=lane.context)
        loop().call_later(1, seen.append, 2, context=lane.context)
        await asyncio.sleep(0.5)
        lane.kill()
        loop().call_soon(seen.append, 3, context=lane.context)
        await asyncio.sleep(5)
        return seen

    assert exactly(main()) == [1]


def test_tasks_belong_to_the_lane_that_they_were_started_in() -> None:
    async def name() -> str:
        await asyncio.sleep(1)
        lane = current_lane()
        return "none" if lane is None else lane.name

    async def main() -> list[str]:
        lanes = [loop().lane(each) for each in "ab"]
        return await asyncio.gather(
            *(loop().create_task(name(), context=lane.context) for lane in lanes), name()
        )

    assert run(main()) == ["a", "b", "none"]


def test_a_standstill_is_an_error_that_names_who_waits() -> None:
    async def main() -> None:
        asyncio.current_task().set_name("the one that waits")  # type: ignore[union-attr]
        await loop().create_future()

    with pytest.raises(Standstill, match="the one that waits"):
        run(main())


def test_threads_and_sockets_are_refused() -> None:
    async def main() -> None:
        with pytest.raises(NotVirtual, match="run_in_executor"):
            await asyncio.to_thread(print)
        with pytest.raises(NotVirtual, match="add_reader"):
            loop().add_reader(0, print)
        with pytest.raises(NotVirtual, match="create_connection"):
            await asyncio.open_connection("localhost", 1)

    run(main())


def test_an_exception_in_a_callback_goes_to_the_handler_and_the_loop_goes_on() -> None:
    async def main() -> list[Any]:
        faults: list[Any] = []
        loop().set_exception_handler(lambda _, context: faults.append(context["exception"]))
        loop().call_soon([].pop)
        await asyncio.sleep(1)
        return faults

    assert [type(fault) for fault in run(main())] == [IndexError]
