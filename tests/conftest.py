"""Every test runs on production's event loop, and leaves nothing of its own behind.

After each test that passed: no asyncio task, no thread, no file descriptor and no child process may
be left that was not there before. Things that are on their way out get a short grace period.
"""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
import uvloop

GRACE_S = 3.0
OUR_DAEMONS = (
    "compute",
    "directory",
    "asyncmoe",
)  # daemon threads that a test must end all the same
# Made once a process by the standard library or torch, and kept for its whole life.
KEPT_PROCESSES = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
_PASSED = pytest.StashKey[bool]()


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Async tests run on uvloop, as every rank does."""
    return {"uvloop": uvloop.new_event_loop}


def pytest_sessionstart() -> None:
    """Open what stays open for the life of the process, so that no test is blamed for it."""
    torch.set_num_threads(1)
    # uvloop and torch have a libuv each, whose first loop makes a signal pipe
    uvloop.new_event_loop().close()
    torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Note whether the test passed: a failure's own leaks would only hide its message."""
    report = yield
    if call.when == "call":
        item.stash[_PASSED] = report.passed
    return report


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """No thread, file descriptor or child process outlives its test."""
    before = _threads(), _descriptors(), _children()
    yield
    if not request.node.stash.get(_PASSED, False):
        return
    deadline_s = time.monotonic() + GRACE_S
    while (left := _left(*before)) and time.monotonic() < deadline_s:
        gc.collect()
        time.sleep(0.02)
    assert not left, "left behind: " + "; ".join(left)


@pytest.fixture(autouse=True)
async def no_task_is_left(
    nothing_is_left: None, request: pytest.FixtureRequest
) -> AsyncIterator[None]:
    """No task outlives its test, nor any fixture of the test."""
    before = asyncio.all_tasks()
    yield
    if not request.node.stash.get(_PASSED, False):
        return
    left = asyncio.all_tasks() - before - {asyncio.current_task()}
    if left:
        _, left = await asyncio.wait(left, timeout=GRACE_S)
    assert not left, f"tasks left behind: {left}"


def _left(
    threads: set[threading.Thread], descriptors: dict[int, str], children: dict[int, str]
) -> list[str]:
    """What there is now and was not before, in words."""
    left = [f"thread {thread.name}" for thread in _threads() - threads]
    left += [f"process {p} {name}" for p, name in _children().items() if p not in children]
    now = _descriptors()
    if len(now) > len(descriptors):
        left += [f"descriptor {n} {now[n]}" for n in now if descriptors.get(n) != now[n]]
    return left


def _threads() -> set[threading.Thread]:
    return {
        thread
        for thread in threading.enumerate()
        if not thread.daemon or thread.name.startswith(OUR_DAEMONS)
    }


def _descriptors() -> dict[int, str]:
    """Number and target of every open file descriptor."""
    targets = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            targets[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # the listing itself
    return targets


def _children() -> dict[int, str]:
    """Process id and command of every child, those that nobody has waited for included."""
    children, parent = {}, os.getpid()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(state[1]) != parent:
                continue
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue  # it has just ended
        if not any(kept in command for kept in KEPT_PROCESSES):
            children[int(folder.name)] = command or state[0]
    return children
