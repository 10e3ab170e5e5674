"""The `cpu` device keeps the promises of `Device`."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch

from asyncmoe import native
from asyncmoe.cores import core_share
from asyncmoe.devices import cpu
from asyncmoe.devices.cpu import CpuDevice
from asyncmoe.world import World


@pytest.fixture
async def device() -> AsyncIterator[CpuDevice]:
    """A device with one thread."""
    device = CpuDevice(1)
    yield device
    await device.close()


async def test_work_runs_one_at_a_time_in_the_order_submitted(device: CpuDevice) -> None:
    log: list[str] = []

    def work(name: str) -> str:
        log.append(f"{name} begins")
        time.sleep(0.005)
        log.append(f"{name} ends")
        return name

    results = await asyncio.gather(*(device.run(lambda n=n: work(n)) for n in "abc"))
    assert results == ["a", "b", "c"]
    assert log == [f"{n} {what}" for n in "abc" for what in ("begins", "ends")]


async def test_the_loop_goes_on_while_work_runs(device: CpuDevice) -> None:
    may_end = threading.Event()
    running = device.run(may_end.wait)
    await asyncio.sleep(0.01)
    assert not running.done()
    may_end.set()
    assert await running is True


async def test_work_runs_beside_the_loop_with_its_own_torch_threads(device: CpuDevice) -> None:
    name, threads, recording = await device.run(
        lambda: (
            threading.current_thread().name, torch.get_num_threads(), torch.is_grad_enabled()
        )
    )  # fmt: skip
    assert (name, threads, recording) == ("compute", 1, False)


class Panic(BaseException):
    """As an extension module raises that has no other way out."""


@pytest.mark.parametrize(
    ("raised", "seen"), [(ValueError, ValueError), (Panic, Panic), (StopIteration, RuntimeError)]
)
async def test_an_exception_is_the_futures_and_later_work_still_runs(
    device: CpuDevice, raised: type[BaseException], seen: type[BaseException]
) -> None:
    def work() -> None:
        raise raised("no")

    failing, later = device.run(work), device.run(lambda: 7)
    with pytest.raises(seen, match="no"):
        await failing
    assert await later == 7


async def test_cancelling_the_future_does_not_stop_the_work(device: CpuDevice) -> None:
    done: list[int] = []
    future = device.run(lambda: done.append(1))
    future.cancel()
    await device.run(lambda: None)
    assert done == [1]


async def test_close_finishes_what_is_queued_and_may_be_repeated() -> None:
    device, done = CpuDevice(1), list[int]()

    def work(number: int) -> None:
        time.sleep(0.002)
        done.append(number)

    futures = [device.run(lambda n=n: work(n)) for n in range(5)]
    await asyncio.gather(device.close(), device.close())
    await device.close()
    assert done == list(range(5))
    await asyncio.gather(*futures)
    assert all(thread.name != "compute" for thread in threading.enumerate())


async def test_close_waits_for_endless_work_only_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "CLOSE_TIMEOUT_S", 0.1)
    device, may_end = CpuDevice(1), threading.Event()
    device.run(may_end.wait)
    begin_s = time.monotonic()

    await device.close()

    assert 0.05 < time.monotonic() - begin_s < 1.0
    may_end.set()


def test_work_that_outlives_the_loop_ends_without_a_word(capfd: pytest.CaptureFixture[str]) -> None:
    may_end, device = threading.Event(), list[CpuDevice]()

    async def leave() -> None:
        device.append(CpuDevice(1))
        device[0].run(may_end.wait)

    asyncio.run(leave())
    may_end.set()
    asyncio.run(device[0].close())

    assert capfd.readouterr().err == ""


async def test_busy_time_is_the_time_in_work(device: CpuDevice) -> None:
    await device.run(lambda: time.sleep(0.02))
    await asyncio.sleep(0.02)
    assert 0.015 < device.busy_s() < 5.0


async def test_a_result_is_kept_by_nobody_but_its_reader(device: CpuDevice) -> None:
    class Result:
        pass

    result: Any = await device.run(Result)
    gone = weakref.ref(result)
    del result
    await device.run(lambda: None)  # the thread has let go of the work before
    gc.collect()
    assert gone() is None


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system cannot pin threads")
async def test_the_compute_thread_stays_on_its_cores() -> None:
    some = frozenset(sorted(os.sched_getaffinity(0))[:1])
    device = CpuDevice(1, some)
    try:
        assert await device.run(lambda: os.sched_getaffinity(0)) == some
        assert os.sched_getaffinity(0) >= some  # the loop's thread is free
    finally:
        await device.close()


def test_ranks_of_a_machine_share_its_cores_if_there_are_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3, 5, 7}, raising=False)
    assert core_share(World(4, 8, 0, 2), 2) == {2, 3}
    assert core_share(World(5, 8, 1, 2), 2) == {5, 7}
    assert core_share(World(5, 8, 1, 2), 1) == {3}
    assert core_share(World(0, 3, 0, 3), 2) is None  # too few cores
    assert core_share(World(0, 1, 0, 1), 4) is None  # alone


async def test_an_error_of_who_is_told_costs_nobody_else_an_outcome(device: CpuDevice) -> None:
    loop, errors, told = asyncio.get_running_loop(), list[BaseException](), list[int]()
    loop.set_exception_handler(lambda _, context: errors.append(context["exception"]))

    def tell(result: int, error: BaseException | None, compute_s: float) -> None:
        told.append(result)
        if result == 1:
            raise LookupError("told one")

    for number in range(4):
        device.submit(lambda n=number: n, tell)
    await device.run(lambda: None)
    assert told == [0, 1, 2, 3]
    assert [str(error) for error in errors] == ["told one"]


async def test_it_works_where_the_system_has_no_eventfd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "eventfd", raising=False)
    device = CpuDevice(1)
    try:
        assert [await device.run(lambda n=n: n) for n in range(50)] == list(range(50))
    finally:
        await device.close()


def test_a_device_goes_with_the_loop_that_submits() -> None:
    device = asyncio.run(_run_on(None))
    asyncio.run(_run_on(device))
    asyncio.run(device.close())


async def _run_on(device: CpuDevice | None) -> CpuDevice:
    device = CpuDevice(1) if device is None else device
    assert await device.run(lambda: 3) == 3
    return device


def test_it_refuses_work_of_a_second_loop_and_behind_close() -> None:
    async def main() -> None:
        device = await _run_on(None)
        if native.columns is not None:
            with pytest.raises(RuntimeError, match="one event loop at a time"):
                await asyncio.to_thread(asyncio.run, _run_on(device))
        await device.close()
        with pytest.raises(RuntimeError, match="closed"):
            device.submit(lambda: None, lambda *_: None)

    asyncio.run(main())


def test_a_process_ends_well_while_the_thread_works() -> None:
    program = (
        "import asyncio, time\n"
        "from asyncmoe.devices.cpu import CpuDevice\n"
        "def work():\n"
        "    while True: time.sleep(0.001)\n"
        "async def main():\n"
        "    CpuDevice(1).submit(work, print)\n"
        "    await asyncio.sleep(0.05)\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")
