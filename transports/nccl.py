"""Parcels from GPU to GPU over NCCL, by NVIDIA's nccl4py.

Each pair of ranks has two communicators of two ranks, one for each direction. So a failed pair is
aborted without the others, and a communicator's launch order is that of its direction's control
frames, on both sides. Each has a stream and a thread, which is the only one that calls NCCL for it,
and it has one burst, launched as one group, under way: a kernel that waits for the other side then
has none of its own stream behind it, which could hold up another stream in the GPU's work queue.

The kernels of all directions must fit the GPU side by side, since each may wait for another rank: a
communicator takes at most `ctas` thread blocks, and `start` refuses more than half of the GPU.

The communicators do not block: calls return, and the thread polls for their end. An event follows
each burst, which the loop polls: in every turn for a moment, then each millisecond. When the peer
is lost, both sides abort; the streams have run dry before the pair is called quiet.

Two ranks cannot share a GPU. Not yet run on a GPU.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from asyncmoe.errors import ConfigError, RankFailed
from asyncmoe.lease import make_pool
from asyncmoe.transport import TransportContext
from asyncmoe.transports.matched import MatchedTransport
from asyncmoe.transports.matched_pair import Operation, Pair, fail, settle
from asyncmoe.transports.nccl_library import Communicator, Library

_SPIN_S = 200e-6  # for which the loop looks at events in each turn after something has changed
_POLL_S = 1e-3
_PAUSE_S = 50e-6  # between two looks at a call that has not ended
_CHECK_S = 0.1  # between two looks for errors of what is under way
_SUCCESS, _IN_PROGRESS = 0, 7  # ncclResult_t


class NcclTransport(MatchedTransport):
    """See the module. Options: `advertise_host` of the links, and `ctas`, the thread blocks of a
    communicator (default 2)."""

    name = "nccl"
    option_names = ("advertise_host", "ctas")
    device_types = ("cuda",)
    library_type: type[Library] = Library

    def __init__(self, context: TransportContext) -> None:
        super().__init__(context)
        self._library = library = self.library_type(context.device)
        self.leases = make_pool(allocate=library.empty)
        self._ctas = context.options.get("ctas", 2)
        if not isinstance(self._ctas, int) or not 1 <= self._ctas <= 32:
            raise ConfigError(f"transport.options.ctas is {self._ctas!r}; allowed: 1 to 32")
        needed = 2 * (context.world - 1) * self._ctas
        if needed > library.thread_blocks // 2:
            raise ConfigError(
                f"{needed} thread blocks for {context.world} ranks are more than half of the GPU's "
                f"{library.thread_blocks}; lower transport.options.ctas, which is {self._ctas}"
            )
        self._poller = _Poller()

    def _make_pair(self, peer: int) -> Pair:
        return NcclPair(self.context.rank, peer, self._library, self._ctas, self._poller)


class NcclPair(Pair):
    """Two communicators: this side is rank 0 of that in which it sends, rank 1 of the other."""

    bursts = 1

    def __init__(self, rank: int, peer: int, library: Library, ctas: int, poller: _Poller) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._library, self._peer, self._lower = library, peer, rank < peer
        self._name = f"asyncmoe-nccl-{rank}-{peer}"
        self._out = _Direction(self, "out", 0, library, ctas, poller)
        self._in = _Direction(self, "in", 1, library, ctas, poller)
        self._aborted = False

    async def introduce(self) -> bytes:
        """See `Pair`. The identity of the communicator in which this side sends."""
        card: bytes = await self._on_thread(self._out.identify)
        return card

    async def connect(self, card: bytes) -> None:
        """See `Pair`."""
        self._in.identity = card
        # In the same order on both sides: that of the lower rank's sends first.
        for direction in (self._out, self._in) if self._lower else (self._in, self._out):
            await self._on_thread(direction.connect)
        self._out.start()
        self._in.start()

    def send(self, burst: Sequence[Operation]) -> None:
        """See `Pair`."""
        self._out.put(burst)

    def receive(self, burst: Sequence[Operation]) -> None:
        """See `Pair`."""
        self._in.put(burst)

    def abort(self) -> None:
        """See `Pair`."""
        if not self._aborted:
            self._aborted = True
            threading.Thread(target=self._close, name=f"{self._name}-end", daemon=True).start()

    def thread(self, target: Callable[[], None], what: str) -> threading.Thread:
        """A thread of this pair."""
        return threading.Thread(target=target, name=f"{self._name}-{what}", daemon=True)

    def broken(self, reason: str) -> None:
        """A direction has failed. On its thread."""
        if not self._aborted:
            self.tell(self.failed, reason)

    def tell(self, call: Callable[..., None], *arguments: object) -> None:
        """Call something on the loop, if there still is one."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call, *arguments)

    def _close(self) -> None:
        for direction in (self._out, self._in):
            direction.stop()
        for direction in (self._out, self._in):
            direction.abort()
        self.tell(settle, self.quiet, None)

    async def _on_thread(self, work: Callable[[], Any]) -> Any:
        """What `work` returns. Raises `RankFailed` with what it raises."""
        future: asyncio.Future[Any] = self._loop.create_future()

        def run() -> None:
            try:
                self._library.enter()
                self.tell(settle, future, work())
            except Exception as error:  # NCCL's and CUDA's have no common base
                self.tell(fail, future, RankFailed(self._peer, f"no nccl connection: {error}"))

        self.thread(run, "open").start()
        return await future


class _Burst(NamedTuple):
    """A group and what must be over before it begins."""

    operations: Sequence[Operation]
    computed: Any


class _Direction:
    """A communicator, its stream and its thread."""

    def __init__(
        self, pair: NcclPair, name: str, rank: int, library: Library, ctas: int, poller: _Poller
    ) -> None:
        self.identity = b""
        self._pair, self._rank, self._library, self._ctas = pair, rank, library, ctas
        self._poller = poller
        self._queue: SimpleQueue[_Burst | None] = SimpleQueue()
        self._thread = pair.thread(self._run, name)
        self._calling = threading.Lock()  # held while this communicator is called
        self._stopped = False
        self._communicator: Communicator | None = None
        self._stream: Any = None
        self._launched = self._ended = 0  # bursts, as the thread and as the loop count them

    # -- on the loop -----------------------------------------------------------------------------

    def start(self) -> None:
        """Connected: start the thread."""
        self._thread.start()

    def put(self, operations: Sequence[Operation]) -> None:
        """Launch these as one group."""
        self._queue.put(_Burst(operations, self._library.computed()))

    def is_over(self, event: Any, operations: Sequence[Operation]) -> bool:
        """Whether a group need not be looked at again; reports it if it is complete."""
        if self._stopped:
            return True
        try:
            if not event.query():
                return False
        except RuntimeError as error:  # a fault of the device
            self._pair.failed(str(error))
            return True
        self._ended += 1
        for operation in operations:
            operation.done()
        return True

    # -- on threads ------------------------------------------------------------------------------

    def identify(self) -> bytes:
        """Make the identity that both sides of this communicator need."""
        self.identity = self._library.unique_id()
        return self.identity

    def connect(self) -> None:
        """Make the communicator and send one byte through it, which sets up NCCL's own connection.

        Raises whatever goes wrong.
        """
        with self._calling:
            if self._stopped:
                raise RuntimeError("aborted")
            self._stream = self._library.stream()
            self._communicator = self._library.communicator(self._rank, self.identity, self._ctas)
        self._wait_for_call()
        event = self._launch(_Burst([Operation(self._library.empty(1), _nothing)], None))
        while not event.query():
            self._wait_for_call()
            time.sleep(_PAUSE_S)

    def stop(self) -> None:
        """Launch nothing more."""
        self._stopped = True
        self._queue.put(None)

    def abort(self) -> None:
        """After `stop`: end what is under way. Then nothing reads or writes its memory."""
        with self._calling:
            communicator, self._communicator = self._communicator, None
        if communicator is not None:
            self._library.enter()
            communicator.abort()
            self._stream.synchronize()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            self._library.enter()
            while not self._stopped:
                under_way = self._launched != self._ended
                try:
                    burst = self._queue.get(timeout=_CHECK_S if under_way else None)
                except Empty:
                    self._wait_for_call()  # raises what has gone wrong since
                    continue
                if burst is not None:
                    event = self._launch(burst)
                    self._launched += 1
                    self._pair.tell(
                        self._poller.add, partial(self.is_over, event, burst.operations)
                    )
        except Exception as error:  # NCCL's and CUDA's have no common base
            self._pair.broken(str(error))

    def _launch(self, burst: _Burst) -> Any:
        """Launch a group; returns the event behind it."""
        with self._calling:
            communicator = self._live()
            if burst.computed is not None:
                self._stream.wait_event(burst.computed)
            move = communicator.recv if self._rank else communicator.send
            with self._library.group():
                for operation in burst.operations:
                    move(operation.tensor, 1 - self._rank, stream=self._stream.cuda_stream)
        self._wait_for_call()  # else the event could come to stand before the group
        with self._calling:
            self._live()
            return self._stream.record_event()

    def _wait_for_call(self) -> None:
        """Wait until the last call is done. Raises `RuntimeError` if it, or a transfer, failed."""
        while True:
            with self._calling:
                state = int(self._live().get_async_error())
            if state == _SUCCESS:
                return
            if state != _IN_PROGRESS:
                raise RuntimeError(self._library.reason(state))
            time.sleep(_PAUSE_S)

    def _live(self) -> Communicator:
        """The communicator, unless it shall not be called any more: then `RuntimeError`."""
        if self._communicator is None or self._stopped:
            raise RuntimeError("aborted")
        return self._communicator


class _Poller:
    """Looks from the loop at what is under way: often for a moment, then now and then."""

    def __init__(self) -> None:
        self._under_way: list[Callable[[], bool]] = []
        self._spin_until_s = 0.0
        self._scheduled = False

    def add(self, is_over: Callable[[], bool]) -> None:
        """Ask `is_over` until it is true."""
        self._under_way.append(is_over)
        self._spin_until_s = time.monotonic() + _SPIN_S
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        left = [is_over for is_over in self._under_way if not is_over()]
        now_s = time.monotonic()
        if len(left) < len(self._under_way):
            self._spin_until_s = now_s + _SPIN_S
        self._under_way = left
        self._scheduled = bool(left)
        if left and now_s < self._spin_until_s:
            asyncio.get_running_loop().call_soon(self._look)
        elif left:
            asyncio.get_running_loop().call_later(_POLL_S, self._look)


def _nothing() -> None:
    """What a byte without a meaning leads to."""
