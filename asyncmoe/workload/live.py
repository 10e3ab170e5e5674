"""A live engine as the target of a workload."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from functools import partial
from types import TracebackType

from asyncmoe.errors import RequestError, RequestFailed
from asyncmoe.frontend.admission import Overloaded
from asyncmoe.frontend.engine import AsyncEngine
from asyncmoe.metrics.recorder import FAULTS
from asyncmoe.sampling import SamplingParams
from asyncmoe.workload.driver import Listener
from asyncmoe.workload.workload import Workload

log = logging.getLogger(__name__)


class LiveTarget:
    """Runs the requests of a workload on an engine that has started. Use it in `with`.

    Prompts are random ids; answers are greedy and as long as the workload says.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._listener: Listener
        self._requests: dict[int, int] = {}  # by the engine's number
        self._tasks: dict[int, asyncio.Task[str]] = {}  # by request
        self.first_number: int | None = None  # the engine's, of request 0
        self.fault = asyncio.Event()  # a request has failed or was not taken

    def __enter__(self) -> LiveTarget:
        self._engine.on_tokens = self._on_tokens
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._engine.on_tokens = None

    def now_s(self) -> float:
        """See `Target`."""
        return time.monotonic()

    def listen(self, listener: Listener) -> None:
        """See `Target`."""
        self._listener = listener

    def submit(self, request: int, workload: Workload) -> None:
        """See `Target`."""
        task = asyncio.create_task(self._run(request, workload))
        self._tasks[request] = task
        task.add_done_callback(partial(self._over, request))

    def abort(self, request: int) -> None:
        """See `Target`."""
        task = self._tasks.get(request)
        if task is not None:
            task.cancel()

    async def _run(self, request: int, workload: Workload) -> str:
        """One request to its end; returns how it ended."""
        output = int(workload.output_tokens[request % len(workload)])
        params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
        prompt = workload.prompt(request, self._engine.rank.spec.vocab).tolist()
        try:
            number, stream = await self._engine.submit(
                prompt, params, f"workload-{request}", {}, workload.decode_only
            )
            self._requests[number] = request
            if self.first_number is None:
                self.first_number = number - request
            try:
                answer = await stream.take(whole=True)
            finally:
                self._engine.abort(number)  # of one that has ended nothing is left to abort
                del self._requests[number]
        except Overloaded:
            return "overloaded"
        except RequestFailed:
            return "failed"
        except RequestError:
            return "refused"
        assert answer is not None
        reason = answer.finish_reason
        return "aborted" if reason in (None, "abort") else reason

    def _over(self, request: int, task: asyncio.Task[str]) -> None:
        del self._tasks[request]
        if task.cancelled():
            reason = "aborted"
        elif (error := task.exception()) is not None:
            log.error("request %d of the workload: %r", request, error)
            reason = "failed"
        else:
            reason = task.result()
        if reason in FAULTS:
            self.fault.set()
        self._listener.on_end(request, reason)

    def _on_tokens(self, numbers: Sequence[int], now_s: float) -> None:
        requests = self._requests
        ours = [requests[number] for number in numbers if number in requests]
        if ours:
            self._listener.on_tokens(ours, now_s)
