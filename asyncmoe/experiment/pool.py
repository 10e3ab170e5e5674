"""Runs the settings of an experiment, each in a process of its own, as many at once as wanted."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from typing import Any

import orjson
from tqdm import tqdm

from asyncmoe.errors import AsyncMoeError
from asyncmoe.experiment.grid import Setting
from asyncmoe.experiment.worker import encode

_LINE_BYTES = 1 << 28  # of a report
_END_S = 10.0  # for a process that is asked to end


class RunFailed(AsyncMoeError):
    """A run has no result; the message says which one and why."""


async def run_all(settings: Sequence[Setting], jobs: int) -> list[dict[str, Any]]:
    """The result of each setting, in their order; a bar on standard error shows how far all are.

    Raises `RunFailed` for the first that fails; the others are ended.
    """
    turns = asyncio.Semaphore(jobs)
    with tqdm(
        total=len(settings),
        file=sys.stderr,
        disable=None,  # off where standard error is no terminal
        bar_format="{desc}{percentage:3.0f}% |{bar}| {elapsed} elapsed, {remaining} left",
    ) as bar:

        async def one(setting: Setting) -> dict[str, Any]:
            async with turns:
                bar.set_description(setting.label)
                return await _run(setting, bar)

        tasks = [asyncio.create_task(one(setting)) for setting in settings]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _run(setting: Setting, bar: Any) -> dict[str, Any]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "asyncmoe.experiment.worker",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=_LINE_BYTES,
        env={**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
        start_new_session=True,  # a ^C at the terminal is for the command to pass on
    )
    assert process.stdin is not None
    assert process.stdout is not None
    shown, last = 0.0, b""
    try:
        process.stdin.write(encode(setting))
        process.stdin.close()
        async for line in process.stdout:
            last = line
            if line.startswith(b'{"progress"'):
                progress = orjson.loads(line)["progress"]
                bar.update(progress - shown)
                shown = progress
        await process.wait()
    finally:
        await _end(process)
    bar.update(1 - shown)
    return _result(setting, last, process.returncode)


def _result(setting: Setting, last: bytes, status: int | None) -> dict[str, Any]:
    report: dict[str, Any] = orjson.loads(last) if last else {}
    if "result" in report:
        found: dict[str, Any] = report["result"]
        return found
    why = report.get("error") or f"its process ended with status {status}"
    raise RunFailed(f"the run of {setting.label} failed: {why}")


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        await asyncio.wait_for(process.wait(), _END_S)
    except TimeoutError:
        process.kill()
        await process.wait()
