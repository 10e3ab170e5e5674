"""Parcels over Gloo, torch's CPU stack: the twin of `nccl` that runs everywhere.

Each pair of ranks has a `ProcessGroupGloo` of its own, made by hand and known to nobody else: the
global group of `torch.distributed` is left to others, several transports may live in one process,
and a pair that is aborted takes no other with it. The two sides exchange Gloo's addresses over the
authenticated socket of their link, and not through a store that others can read. Gloo's own
connections ask for nothing, so each side tells the other a secret over the link and wants to have
it back as the first transfer: whoever else has dialled Gloo's port does not know it. (Nothing is
encrypted, and who can change packets on their way can change payloads: use it where you trust the
network.)

Gloo reports completion only to a thread that waits, and a launch may block while Gloo moves bytes.
So a pair has a thread that launches and a thread that waits for receives; idle ones sleep. Nobody
waits for sends: the peer says when it has them.

Gloo has no abort, but a wait that times out closes the connection at once: that is how a pair is
aborted. It holds the connection's lock, so afterwards nothing is read or written. It also wakes all
who wait, but for transfers of which some bytes have moved. So each burst of payloads is followed by
an empty transfer, which has no such state: what is waited for is that one, and as all transfers of
a pair keep their order, the payloads are there before it. Both sides launch the same bursts.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import secrets
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from torch.distributed import (  # type: ignore[attr-defined]  # public, not marked for export
    ProcessGroupGloo,
    Store,
)

from asyncmoe.errors import ConfigError, RankFailed
from asyncmoe.reach import WILDCARDS
from asyncmoe.transport import Receiver, TransportContext
from asyncmoe.transports.matched import MatchedTransport
from asyncmoe.transports.matched_pair import Operation, Pair, fail, settle

_FOREVER = timedelta(days=365)  # heartbeats on the link find out who is lost
_TAG, _ABORT_TAG = 0, 1
_SECRET_BYTES = 32
_PROOF_TIMEOUT = timedelta(seconds=10)
_NOTHING = torch.empty(0, dtype=torch.uint8)


class GlooTransport(MatchedTransport):
    """See the module. Option: `advertise_host`, an address of this machine that peers reach."""

    name = "gloo"

    def __init__(self, context: TransportContext) -> None:
        super().__init__(context)
        if context.device.type != "cpu":
            raise ConfigError(f"transport gloo moves host memory; device is {context.device}")
        self._device = _Device(context.options.get("advertise_host") or context.bind_host)

    async def start(self, receiver: Receiver) -> None:
        """See `Transport`."""
        await self._check_host()
        await super().start(receiver)

    async def _check_host(self) -> None:
        """Raise `ConfigError` if Gloo could not listen where the settings say."""
        advertised = self.context.options.get("advertise_host")
        host = advertised or self.context.bind_host
        if host in WILDCARDS:
            return
        setting = "transport.options.advertise_host" if advertised else "cluster.bind_host"
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, 0, type=socket.SOCK_STREAM)
            with socket.socket(found[0][0], socket.SOCK_STREAM) as sock:
                sock.bind(found[0][4])
        except OSError as error:
            raise ConfigError(
                f"{setting} is {host!r}; allowed for gloo: an address of this machine ({error})"
            ) from error

    def _make_pair(self, peer: int) -> Pair:
        context = self.context
        return GlooPair(context.rank, peer, self._device, context.start_timeout_s)


class _Device:
    """Gloo's listening socket and the thread that moves its bytes, shared by a rank's pairs."""

    def __init__(self, host: str) -> None:
        self._host, self._lock = host, threading.Lock()
        self._users = 0
        self._device: Any = None

    def __enter__(self) -> Any:
        """Made by the first who uses it; this may look up a name, so not on the loop."""
        with self._lock:
            if self._device is None:
                host = socket.gethostname() if self._host in WILDCARDS else self._host
                self._device = ProcessGroupGloo.create_device(hostname=host)
            self._users += 1
            return self._device

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self._device = None


class _Cards(Store):
    """What Gloo takes for a store: it writes its own address there and reads the other side's."""

    def __init__(self, on_card: Callable[[bytes], None]) -> None:
        super().__init__()
        self._on_card, self._own_key = on_card, ""
        self._own = self._other = b""
        self._changed, self._given_up = threading.Condition(), False

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # torch's own stub
        """For Gloo."""
        self._own_key, self._own = key, value
        self._on_card(value)

    def get(self, key: str) -> bytes:
        """For Gloo. Blocks until the other side's card is here."""
        if key == self._own_key:
            return self._own
        with self._changed:
            self._changed.wait_for(lambda: self._other or self._given_up)
        if self._given_up:
            raise RuntimeError("given up")
        return self._other

    def wait(self, keys: Sequence[str], timeout: timedelta = _FOREVER) -> None:
        """For Gloo."""
        for key in keys:
            self.get(key)

    def put_other(self, card: bytes) -> None:
        """The other side's card, or nothing if there will be none."""
        with self._changed:
            self._other, self._given_up = card, not card
            self._changed.notify_all()


class _Gathered:
    """What one turn of the loop brings for the thread that launches."""

    __slots__ = ("bursts", "taken")

    def __init__(self) -> None:
        self.bursts: list[tuple[bool, Sequence[Operation]]] = []  # whether they are sends
        self.taken = 0  # sends whose handles may be dropped, before those


class _Received(NamedTuple):
    """A burst of receives, the handles that keep them going, and the one to wait for."""

    burst: Sequence[Operation]
    payloads: list[Any]
    behind: Any


class GlooPair(Pair):
    """A process group of two, a thread that launches, and one that waits."""

    bursts = None

    def __init__(self, rank: int, peer: int, device: _Device, timeout_s: float) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._name, self._peer = f"asyncmoe-gloo-{rank}-{peer}", peer
        self._rank = int(rank > peer)  # in the group
        self._device, self._timeout_s = device, timeout_s
        self._card: asyncio.Future[bytes] = self._loop.create_future()
        self._connected: asyncio.Future[None] = self._loop.create_future()
        self._cards = _Cards(lambda card: self._tell(settle, self._card, card))
        self._secret, self._peer_secret = secrets.token_bytes(_SECRET_BYTES), b""
        self._group: Any = None  # a ProcessGroupGloo, of which torch's stubs show next to nothing
        self._opener = self._thread("open", self._open)
        self._aborted = False
        self._gathered = _Gathered()  # in this turn of the loop
        self._scheduled = False
        self._to_launch: SimpleQueue[_Gathered | None] = SimpleQueue()
        self._to_await: SimpleQueue[_Received | None] = SimpleQueue()
        self._sends: deque[Any] = deque()  # Gloo drops a send whose handle is dropped
        self._arrived: deque[Sequence[Operation]] = deque()
        self._launcher = self._thread("launch", self._launch)
        self._waiter = self._thread("wait", self._await)

    def _thread(self, name: str, target: Callable[[], None]) -> threading.Thread:
        return threading.Thread(target=target, name=f"{self._name}-{name}", daemon=True)

    async def introduce(self) -> bytes:
        """See `Pair`."""
        self._opener.start()
        return self._secret + await self._card

    async def connect(self, card: bytes) -> None:
        """See `Pair`."""
        self._peer_secret = card[:_SECRET_BYTES]
        self._cards.put_other(card[_SECRET_BYTES:])
        await self._connected

    def send(self, burst: Sequence[Operation]) -> None:
        """See `Pair`."""
        self._gathered.bursts.append((True, burst))
        self._schedule()

    def receive(self, burst: Sequence[Operation]) -> None:
        """See `Pair`."""
        self._gathered.bursts.append((False, burst))
        self._schedule()

    def taken(self, count: int) -> None:
        """See `Pair`. Handles are dropped where they were made: that takes long."""
        self._gathered.taken += count
        self._schedule()

    def _schedule(self) -> None:
        """Wake the thread once a turn of the loop: it takes the interpreter from the loop."""
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._pass_on)

    def _pass_on(self) -> None:
        self._scheduled = False
        gathered, self._gathered = self._gathered, _Gathered()
        self._to_launch.put(gathered)

    def abort(self) -> None:
        """See `Pair`."""
        if not self._aborted:
            self._aborted = True
            self._thread("end", self._close).start()

    # -- on threads ------------------------------------------------------------------------------

    # Who is told may end the process, and a thread that then still destroys torch's objects makes
    # that an abort. So they live in functions that have returned before anybody is told.

    def _open(self) -> None:
        failure = None
        try:
            self._make_group()
            self._prove()
        except Exception as error:  # a card that makes no sense ends in any of C++'s
            failure = RankFailed(self._peer, f"no gloo connection: {_reason(error)}")
        if failure is None:
            self._launcher.start()
            self._waiter.start()
            self._tell(settle, self._connected, None)
        else:
            self._tell(fail, self._card, failure)
            self._tell(fail, self._connected, failure)

    def _make_group(self) -> None:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=self._timeout_s)
        options._threads = 0  # these are for collectives
        with self._device as device:
            options._devices = [device]
            self._group = ProcessGroupGloo(self._cards, self._rank, 2, options)

    def _prove(self) -> None:
        """Raise `RuntimeError` unless the other end is the one that the link leads to."""
        other, proof = 1 - self._rank, torch.zeros(_SECRET_BYTES, dtype=torch.uint8)
        theirs = torch.frombuffer(bytearray(self._peer_secret), dtype=torch.uint8)
        sending = self._group.send([theirs], other, _TAG)
        self._group.recv([proof], other, _TAG).wait(_PROOF_TIMEOUT)
        sending.wait(_PROOF_TIMEOUT)
        if not hmac.compare_digest(bytes(proof.tolist()), self._secret):
            raise RuntimeError("the other end of Gloo's connection does not know the secret")

    def _close(self) -> None:
        self._cards.put_other(b"")
        if self._opener.ident is not None:
            self._opener.join()
        if self._group is not None:
            self._disconnect()
            self._to_launch.put(None)
            self._to_await.put(None)
            for thread in (self._launcher, self._waiter):
                if thread.ident is not None:  # else the other end gave no proof
                    thread.join()
            while not self._to_await.empty():  # handles keep Gloo's threads and sockets alive
                self._to_await.get()
            self._sends.clear()
            self._group = None
        self._tell(settle, self.quiet, None)

    def _disconnect(self) -> None:
        nothing = torch.empty(1, dtype=torch.uint8)
        with suppress(RuntimeError):  # as intended
            work = self._group.recv([nothing], 1 - self._rank, _ABORT_TAG)
            work.wait(timedelta(milliseconds=1))

    def _launch(self) -> None:
        with self._fault_told():
            while self._launch_next():
                pass

    def _launch_next(self) -> bool:
        gathered = self._to_launch.get()
        if gathered is None:
            return False
        for _ in range(min(gathered.taken, len(self._sends))):  # who lies harms its own alone
            self._sends.popleft()
        for sends, burst in gathered.bursts:
            if sends:
                self._launch_sends(burst)
            else:
                self._launch_receives(burst)
        return True

    def _launch_sends(self, burst: Sequence[Operation]) -> None:
        send, other = self._group.send, 1 - self._rank
        for tensor, _ in burst:
            self._sends.append([send([tensor], other, _TAG)])
        self._sends[-1].append(send([_NOTHING], other, _TAG))

    def _launch_receives(self, burst: Sequence[Operation]) -> None:
        receive, other = self._group.recv, 1 - self._rank
        payloads = [receive([tensor], other, _TAG) for tensor, _ in burst]
        self._to_await.put(_Received(burst, payloads, receive([_NOTHING], other, _TAG)))

    def _await(self) -> None:
        with self._fault_told():
            while self._await_next():
                pass

    def _await_next(self) -> bool:
        received = self._to_await.get()
        if received is None:
            return False
        received.behind.wait(_FOREVER)
        self._arrived.append(received.burst)
        if len(self._arrived) == 1:  # else the loop has not come to the one before
            self._tell(self._deliver)
        return True

    @contextmanager
    def _fault_told(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if not self._aborted:
                self._tell(self.failed, _reason(error))

    def _deliver(self) -> None:
        """On the loop."""
        while self._arrived:
            for operation in self._arrived.popleft():
                operation.done()

    def _tell(self, call: Callable[..., None], *arguments: object) -> None:
        """Call something on the loop, if there still is one."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call, *arguments)


def _reason(error: Exception) -> str:
    """The first sentence of Gloo's message, without the place in its source."""
    return re.sub(r"^\[\S+\] ", "", str(error)).partition(". ")[0]
