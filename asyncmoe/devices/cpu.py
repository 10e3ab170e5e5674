"""The `cpu` device: one compute thread beside the loop, so that frames move while a stage runs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from asyncmoe import native
from asyncmoe.cores import Cores
from asyncmoe.device import Device, Done, Submit

CLOSE_TIMEOUT_S = 2.0  # well within cluster.shutdown_timeout_s, after which processes are killed
_LOG = logging.getLogger(__name__)
_Item = tuple[Callable[[], Any], Done, asyncio.AbstractEventLoop]


class CpuDevice(Device):
    """Runs work on one thread of its own; torch's intra-op threads work beneath it."""

    def __init__(self, threads: int, cores: Cores | None = None) -> None:
        super().__init__(threads, cores)
        self.torch_device = torch.device("cpu")
        self._busy_s = 0.0
        # SimpleQueue is in C and hands over without a Python-level lock
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="compute", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], Any], done: Done) -> None:
        """Queue `work` for the compute thread."""
        self._queue.put((work, done, asyncio.get_running_loop()))

    def submitter(self) -> Submit:
        """See `Device`. Compiled if that is there."""
        if native.columns is None or type(self).submit is not CpuDevice.submit:
            return self.submit
        made: Submit = native.columns.putting(self._queue.put, asyncio.get_running_loop())
        return made

    def busy_s(self) -> float:
        """Seconds that the thread spent in work."""
        return self._busy_s

    async def close(self) -> None:
        """Let queued work finish, then end the thread.

        Work that takes longer than `CLOSE_TIMEOUT_S` cannot be stopped: it is left to the daemon
        thread, whose results nobody gets.
        """
        if self._thread.is_alive():
            self._queue.put(None)
            await asyncio.to_thread(self._thread.join, CLOSE_TIMEOUT_S)
            if self._thread.is_alive():
                _LOG.warning("the compute thread is still busy after %g s", CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        if self.cores is not None:  # of this thread and of those that kernels start from it
            os.sched_setaffinity(0, self.cores)
        torch.set_num_threads(self.threads)
        if native.kernels is not None:
            native.kernels.set_threads(self.threads)
        with torch.inference_mode():
            while (item := self._queue.get()) is not None:
                work, done, loop = item
                begin_s = time.perf_counter()
                result = None
                failure: BaseException | None = None
                try:
                    result = work()
                except BaseException as error:  # a panic in an extension must not end the thread
                    failure = error
                compute_s = time.perf_counter() - begin_s
                self._busy_s += compute_s
                # A closed loop has left this thread behind, see `close`.
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(done, result, failure, compute_s)
                # nothing of a batch outlives it here
                del item, work, done, loop, result, failure
        if native.kernels is not None:
            native.kernels.set_threads(1)  # ends the others: who joins this thread finds none left
