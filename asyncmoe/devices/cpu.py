"""The `cpu` device: one compute thread beside the loop, so that frames move while a stage runs."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable
from typing import Any

import torch

from asyncmoe import native
from asyncmoe.cores import Cores
from asyncmoe.device import Device, Done, Submit
from asyncmoe.devices.handover import make_handover

CLOSE_TIMEOUT_S = 2.0  # well within cluster.shutdown_timeout_s, after which processes are killed
_LOG = logging.getLogger(__name__)


class CpuDevice(Device):
    """Runs work on one thread of its own; torch's intra-op threads work beneath it."""

    def __init__(self, threads: int, cores: Cores | None = None) -> None:
        super().__init__(threads, cores)
        self.torch_device = torch.device("cpu")
        self._hands = make_handover()
        self._thread = threading.Thread(target=self._run, name="compute", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], Any], done: Done) -> None:
        """Queue `work` for the compute thread."""
        self._hands.submitter()(work, done)

    def submitter(self) -> Submit:
        """See `Device`."""
        return self._hands.submitter() if type(self).submit is CpuDevice.submit else self.submit

    def busy_s(self) -> float:
        """Seconds that the thread spent in work."""
        return self._hands.busy_s

    async def close(self) -> None:
        """Let queued work finish, then end the thread.

        Work that takes longer than `CLOSE_TIMEOUT_S` cannot be stopped: it is left to the daemon
        thread, whose results nobody gets.
        """
        if self._thread.is_alive():
            self._hands.end()
            await asyncio.to_thread(self._thread.join, CLOSE_TIMEOUT_S)
            if self._thread.is_alive():
                _LOG.warning("the compute thread is still busy after %g s", CLOSE_TIMEOUT_S)
        self._hands.close()

    def _run(self) -> None:
        if self.cores is not None:  # of this thread and of those that kernels start from it
            os.sched_setaffinity(0, self.cores)
        torch.set_num_threads(self.threads)
        if native.kernels is not None:
            native.kernels.set_threads(self.threads)
        with torch.inference_mode():
            self._hands.serve()
        if native.kernels is not None:
            native.kernels.set_threads(1)  # ends the others: who joins this thread finds none left
