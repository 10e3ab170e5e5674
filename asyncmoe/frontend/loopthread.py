"""An event loop on a thread of its own, for callers that have none."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

import uvloop

T = TypeVar("T")
POLL_S = 0.1  # how often a waiting caller can be interrupted


class Work(Generic[T]):
    """A coroutine that runs on the loop of a `LoopThread`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]) -> None:
        self._loop = loop
        # Not asyncio's own future across threads: that one, once cancelled, counts as done at once.
        self._outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._task: asyncio.Task[T] | None = None
        loop.call_soon_threadsafe(self._begin, coroutine)

    def wait(self, poll: Callable[[], None] | None = None) -> T:
        """Wait for the result, and call `poll` several times a second meanwhile.

        An interrupt (Ctrl-C), or an error of `poll`, cancels the coroutine and is raised once that
        has ended, its cleaning up included; a second interrupt is raised at once.
        """
        try:
            while True:
                done, _ = concurrent.futures.wait([self._outcome], timeout=POLL_S)
                if poll is not None:
                    poll()
                if done:
                    return self._outcome.result()
        except BaseException:
            self._loop.call_soon_threadsafe(self._cancel)
            concurrent.futures.wait([self._outcome])
            raise

    def _begin(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self._task = self._loop.create_task(coroutine)
        self._task.add_done_callback(self._finish)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _finish(self, task: asyncio.Task[T]) -> None:
        if task.cancelled():
            self._outcome.cancel()
            self._outcome.set_running_or_notify_cancel()
        elif (error := task.exception()) is not None:
            self._outcome.set_exception(error)
        else:
            self._outcome.set_result(task.result())


class LoopThread:
    """A uvloop loop on a daemon thread, so that scripts and notebooks need no loop themselves."""

    def __init__(self, name: str) -> None:
        self.loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_current(self) -> bool:
        """Whether the caller is on the loop's own thread."""
        return threading.current_thread() is self._thread

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Work[T]:
        """Run `coroutine` on the loop. Raises `RuntimeError` after `stop`."""
        return Work(self.loop, coroutine)

    def stop(self) -> None:
        """Cancel what runs, wait for its end, and end the loop and its thread. Idempotent.

        Not from the thread itself.
        """
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
            self.loop.run_until_complete(self._end_tasks())
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.run_until_complete(self.loop.shutdown_default_executor())
        finally:
            self.loop.close()

    async def _end_tasks(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
