"""A UCX worker that the rank's own loop drives.

ucxx has progress threads, and modes that run on a loop; of these only a thread with Python futures
leaves an idle core alone. This is none of them: UCX says on a descriptor when there is something to
do, the loop wakes up for that, works until there is nothing left, and arms the descriptor again. So
an idle rank does nothing, also while receives are posted, a transfer passes no thread on its way,
and nothing writes to a buffer while Python code runs. Completion comes by ucxx's Python futures,
whose cost does not grow with what is under way.

Whatever is posted stays known here, with its buffer, until UCX has completed it. The library is
imported without a trace in the environment.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from asyncmoe.wire import payload_memory


def _imported() -> tuple[Any, Any, Any, Any]:
    """ucxx sets variables of UCX when it is imported, which other users and children would see."""
    before = {name: value for name, value in os.environ.items() if name.startswith("UCX")}
    # UCX would warn on the standard output, where others expect results.
    os.environ.setdefault("UCX_LOG_FILE", "stderr")
    try:
        from ucxx import libucxx
        from ucxx._lib.arr import Array
        from ucxx.types import Tag, TagMask
    finally:
        for name in [name for name in os.environ if name.startswith("UCX")]:
            del os.environ[name]
        os.environ.update(before)
    return libucxx, Array, Tag, TagMask


_ucx, _Array, _Tag, _TagMask = _imported()
UcxError: type[Exception] = _ucx.UCXError
_FEATURES = (_ucx.Feature.TAG, _ucx.Feature.WAKEUP)
# Within a machine or a process, or for memory that others then carry.
_SILENT = {"self", "sysv", "posix", "cma", "knem", "xpmem", "cuda_copy", "cuda_ipc", "gdr_copy"}

_TURN_S = 1e-3  # after which others on the loop are let in
_LOOK_S = 0.1  # a look in case that UCX did not wake us, while something is under way
_CLOSE_NS = 1_000_000_000
_LAST_LOOKS = 100  # in which what is complete is noticed, and what was refused is told

Done = Callable[[Exception | None], None]


class Worker:
    """One UCX context and worker. Everything is called on the loop that made it."""

    def __init__(self, config: Mapping[str, str]) -> None:
        """`config`: options of UCX, without their prefix. Raises `UcxError`."""
        self._loop = asyncio.get_running_loop()
        self._context = _ucx.UCXContext(dict(config), _FEATURES)
        self._worker = _ucx.UCXWorker(
            self._context, enable_delayed_submission=False, enable_python_future=True
        )
        self._worker.init_blocking_progress_mode()
        self.address: bytes = self._worker.address.tobytes()
        self._descriptor: int = self._worker.epoll_file_descriptor
        # With each the request and its buffer: ucxx cancels a request whose object is dropped, and
        # holds no buffer.
        self._under_way: dict[asyncio.Future[None], tuple[Any, Any, Done]] = {}
        self._soon: asyncio.Handle | None = None  # the next turn
        self._look: asyncio.TimerHandle | None = None
        self._own: Any = None  # an endpoint to this worker itself
        self._loop.add_reader(self._descriptor, self._turn)
        self.wake()

    def connect(self, address: bytes, on_dead: Callable[[], None] | None = None) -> Any:
        """An endpoint to the worker with that address. Raises `UcxError`.

        `on_dead` is called on the loop, once, when the peer is gone or `end` was called. Without it
        nobody notices: only the way from a worker to itself knows no failure.
        """
        peer = _ucx.UCXAddress.create_from_buffer(address)
        guarded = on_dead is not None
        endpoint = _ucx.UCXEndpoint.create_from_worker_address(self._worker, peer, guarded)
        if guarded:
            endpoint.set_close_callback(self._loop.call_soon, (on_dead,))
        return endpoint

    def check_reach(self) -> None:
        """Raise `UcxError` unless this worker could reach one whose loss is to be noticed."""
        self.end(self.connect(self.address, _nobody))

    def send(self, endpoint: Any, memory: Any, tag: int, done: Done) -> None:
        """Post a send; `done` is called on the loop, once. Raises `UcxError`."""
        self._worker.populate_python_futures_pool()
        self._follow(endpoint.tag_send(_Array(memory), _Tag(tag)), memory, done)

    def receive(self, endpoint: Any, memory: Any, tag: int, done: Done) -> Any:
        """Post a receive, likewise; returns the request. It cannot be taken back, see `drain`, and
        ends with an error when `endpoint` does, from whose peer the message is to come."""
        self._worker.populate_python_futures_pool()
        request = endpoint.tag_recv(_Array(memory), _Tag(tag))
        self._follow(request, memory, done)
        return request

    def end(self, endpoint: Any) -> None:
        """Close an endpoint at once. What is under way to it ends, soon, with an error. If there
        is something, ucxx keeps it for ever, and the worker with it: so drain first."""
        endpoint.close_blocking(_CLOSE_NS, 1)
        endpoint.remove_close_callback()
        self.wake()

    def drain(self, tag: int) -> None:
        """Let an abandoned receive match an empty message of our own, so that no other can. If it
        has matched one before, ours is to be refused."""
        if self._own is None:
            self._own = self.connect(self.address)
        self.send(self._own, bytearray(), tag, _ignore)

    def refuse(self, tag: int, mask: int) -> None:
        """Take messages that no receive has matched, of these tags, into no buffer at all: UCX ends
        them as truncated, and their senders' sends as well."""
        self._refuse(self._worker, tag, mask)

    def wake(self) -> None:
        """Let UCX act on what was posted, soon."""
        if self._soon is None and self._worker is not None:
            self._soon = self._loop.call_soon(self._turn)

    def close(self) -> None:
        """Cancel what is under way, and end. Afterwards nothing touches any buffer. Idempotent."""
        worker, self._worker = self._worker, None
        if worker is None:
            return
        self._loop.remove_reader(self._descriptor)
        for handle in (self._soon, self._look):
            if handle is not None:
                handle.cancel()
        for _ in range(_LAST_LOOKS):
            worker.progress_once()
            self._refuse(worker, 0, 0)
        if self._own is not None:
            self._own.close_blocking(_CLOSE_NS, 1)
        while worker.cancel_inflight_requests(_CLOSE_NS, 1):
            worker.progress_once()
        # ucxx takes late messages whole when a worker goes, and waits for senders that are gone.
        self._refuse(worker, 0, 0)
        worker.run_request_notifier()
        worker.wait_request_notifier(period_ns=1)  # without it ucxx warns, on standard output
        worker.stop_request_notifier_thread()
        worker.clear_python_futures_pool()
        self._own = self._context = None

    def _refuse(self, worker: Any, tag: int, mask: int) -> None:
        nothing = _Array(bytearray())
        while (message := worker.tag_probe(_Tag(tag), _TagMask(mask), remove=True)).matched:
            worker.populate_python_futures_pool()
            self._follow(worker.tag_recv_with_handle(nothing, message), nothing, _ignore)

    @property
    def closed(self) -> bool:
        """Whether nothing can be under way any more."""
        return self._worker is None

    def _follow(self, request: Any, memory: Any, done: Done) -> None:
        future: asyncio.Future[None] = request.future
        self._under_way[future] = request, memory, done
        future.add_done_callback(self._ended)
        self.wake()

    def _ended(self, future: asyncio.Future[None]) -> None:
        _, _, done = self._under_way.pop(future)
        error = future.exception()
        done(error if error is None or isinstance(error, Exception) else UcxError(str(error)))

    def _turn(self) -> None:
        """Work until there is nothing left to do, or for a moment."""
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        worker = self._worker
        if worker is None:
            return
        deadline_s = time.perf_counter() + _TURN_S
        armed = False
        while not armed and time.perf_counter() < deadline_s:
            if not worker.progress_once():
                armed = worker.arm()
        worker.run_request_notifier()
        if not armed:
            self.wake()
        elif self._under_way and self._look is None:
            self._look = self._loop.call_later(_LOOK_S, self._look_again)

    def _look_again(self) -> None:
        self._look = None
        self._turn()


def memory_of(tensor: torch.Tensor) -> Any:
    """The bytes of a contiguous tensor as ucxx takes them: a view of host memory, or a tensor."""
    return payload_memory(tensor) if tensor.is_cpu else tensor.view(torch.uint8).flatten()


def reporting_transports() -> list[str]:
    """UCX's names of the transports of this machine that carry messages and report a lost peer."""
    context = _ucx.UCXContext({"TLS": "all"}, _FEATURES)
    return sorted(set(re.findall(r"-- +(\w+)/", context.info)) - _SILENT)


def _nobody() -> None:
    """For an endpoint that is closed at once."""


def _ignore(error: Exception | None) -> None:
    """For transfers that nobody waits for."""
