"""A command that SIGINT and SIGTERM end in good order."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Coroutine
from typing import Any

import uvloop

log = logging.getLogger(__name__)


def run_until_signal(work: Coroutine[Any, Any, int], *, interrupted: int | None = None) -> int:
    """Run `work` on a uvloop loop and return its exit status.

    The first SIGINT or SIGTERM cancels it; its `finally` blocks do the cleaning up, and further
    signals are ignored meanwhile. The exit status is then `interrupted`, or by default 128 plus
    the signal's number, as shells have it.
    """
    return uvloop.run(_until_signal(work, interrupted))


async def _until_signal(work: Coroutine[Any, Any, int], interrupted: int | None) -> int:
    loop = asyncio.get_running_loop()
    task = loop.create_task(work)
    got: list[int] = []

    def on_signal(number: int) -> None:
        if not got:
            log.info("%s: stopping", signal.Signals(number).name)
            task.cancel()
        got.append(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    try:
        return await task
    except asyncio.CancelledError:
        if not got:
            raise
        return 128 + got[0] if interrupted is None else interrupted
