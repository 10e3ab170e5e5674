"""Runs the settings of an experiment, each in a process of its own, as many at once as wanted."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import orjson
from tqdm import tqdm

from asyncmoe.experiment.grid import Setting
from asyncmoe.experiment.worker import encode

_LINE_BYTES = 1 << 28  # of a report
_END_S = 10.0  # for a process that is asked to end


Result = dict[str, Any]  # `{"metrics", "cost"}`, or `{"error"}`: why there are none


async def run_all(
    settings: Sequence[Setting], jobs: int, results: list[Result], check: Callable[[int], None]
) -> None:
    """Run each setting and put what came of it where it stands in `results`, as soon as it is
    there. A bar on standard error shows how far all are.

    Args:
        results: [settings] what counts for a run that does not end, if this is cancelled.
        check: called with the number of each run that has metrics; what it raises ends the others.
    """
    turns = asyncio.Semaphore(jobs)
    with tqdm(
        total=len(settings),
        file=sys.stderr,
        disable=None,  # off where standard error is no terminal
        bar_format="{desc}{percentage:3.0f}% |{bar}| {elapsed} elapsed, {remaining} left",
    ) as bar:

        async def one(number: int, setting: Setting) -> None:
            async with turns:
                bar.set_description(setting.label)
                results[number] = await _run(setting, bar)
            if "error" in results[number]:
                why = results[number]["error"]
                bar.write(f"the run of {setting.label} failed: {why}", file=sys.stderr)
            else:
                check(number)

        tasks = [asyncio.create_task(one(*each)) for each in enumerate(settings)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _run(setting: Setting, bar: Any) -> Result:
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
    return _result(last, process.returncode)


def _result(last: bytes, status: int | None) -> Result:
    report: Result = orjson.loads(last) if last else {}
    if "metrics" in report or "error" in report:
        return report
    return {"error": f"its process ended with status {status}"}


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        await asyncio.wait_for(process.wait(), _END_S)
    except TimeoutError:
        process.kill()
        await process.wait()
