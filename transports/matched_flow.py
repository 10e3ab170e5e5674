"""What goes between two ranks of matched transfers, apart from the transfers: parcels that are
announced, gathered into bursts, and taken.

What `make_sending` and `make_receiving` give is compiled where that is there
(`native/src/columns/matched.cpp`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from asyncmoe import native
from asyncmoe.errors import ProtocolError
from asyncmoe.lease import LeasePool, LeaseState
from asyncmoe.transport import Parcel, ParcelClass, Posted
from asyncmoe.twophase import Inbound, Outbound, Transfer
from asyncmoe.wire import PRELUDE_BYTES

WINDOW_PARCELS, WINDOW_BYTES = 64, 16 << 20  # of one class in one direction, and not yet taken
BURST_BYTES = 768 << 10  # from which on a burst that both sides know is closed
_CLASSES = len(ParcelClass) + 1  # lists are indexed by class, which counts from 1

Sends = tuple[Sequence[torch.Tensor], Sequence[Posted]]  # a burst: payloads, and their source sides


def make_sending(
    outbound: Outbound, notice: bytes | None, on_ready: Callable[[], object]
) -> Sending:
    """As `Sending`, compiled if that is there and `outbound` is."""
    kind: Any = getattr(native.columns, "MatchedSending", None)
    if kind is None or _is_plain(outbound):
        return Sending(outbound, notice, on_ready)
    sending: Sending = kind(outbound, notice, on_ready, WINDOW_PARCELS, WINDOW_BYTES, BURST_BYTES)
    return sending


def make_receiving(
    leases: LeasePool, on_ready: Callable[[], object] | None, on_whole: Callable[[], object]
) -> Receiving:
    """As `Receiving`, compiled if that is there and `leases` are."""
    kind: Any = getattr(native.columns, "MatchedReceiving", None)
    if kind is None or _is_plain(leases):
        return Receiving(on_ready, on_whole)
    receiving: Receiving = kind(on_ready, on_whole, WINDOW_PARCELS, WINDOW_BYTES)
    return receiving


def _is_plain(one: object) -> bool:
    """Whether this is not the compiled twin of what it says it is."""
    return isinstance(one, Outbound | LeasePool)


class Window:
    """How much of a class is announced in one direction and not taken. One parcel always fits."""

    __slots__ = ("_sizes", "nbytes")

    def __init__(self) -> None:
        self._sizes: deque[int] = deque()  # bytes of each parcel, columns included, in order
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._sizes)

    def put(self, nbytes: int) -> bool:
        """Announce one more parcel; False, and nothing done, if it is too much."""
        sizes, total = self._sizes, self.nbytes + nbytes
        if sizes and (total > WINDOW_BYTES or len(sizes) >= WINDOW_PARCELS):
            return False
        sizes.append(nbytes)
        self.nbytes = total
        return True

    def take(self, count: int) -> None:
        """The first `count` parcels were taken."""
        for _ in range(count):
            self.nbytes -= self._sizes.popleft()


class _Outgoing(NamedTuple):
    """A parcel that was not taken."""

    frame: bytes
    payload: torch.Tensor
    posted: Posted
    size: int  # bytes of the payload
    nbytes: int  # those of the columns as well


class Sending:
    """What this rank sends to one peer. `on_ready` is called when there begins to be something to
    `leave`. Where both sides know the bursts, `notice` is the frame that ends each."""

    def __init__(
        self, outbound: Outbound, notice: bytes | None, on_ready: Callable[[], object]
    ) -> None:
        self._outbound, self._notice, self._on_ready = outbound, notice, on_ready
        self._windows = [Window() for _ in range(_CLASSES)]
        self._held: list[deque[_Outgoing]] = [deque() for _ in range(_CLASSES)]  # not announced
        self._out: list[deque[_Outgoing]] = [deque() for _ in range(_CLASSES)]  # announced
        self._frames: list[bytes] = []
        self._bursts: list[Sends] = []
        self._gathered: list[_Outgoing] = []  # behind the last burst
        self._gathered_bytes = 0

    def post(self, parcel: Parcel) -> Posted:
        """See `Transport`."""
        frame, posted = self._outbound.parcel(parcel)
        size, kind = parcel.payload.nbytes, parcel.kind
        nbytes = len(frame) - PRELUDE_BYTES + size
        outgoing = _Outgoing(frame, parcel.payload, posted, size, nbytes)
        if self._held[kind] or not self._windows[kind].put(nbytes):
            self._held[kind].append(outgoing)
        else:
            self._announce(kind, outgoing)
        return posted

    def _announce(self, kind: int, outgoing: _Outgoing) -> None:
        first = not self._frames
        self._frames.append(outgoing.frame)
        if outgoing.size:
            self._gathered.append(outgoing)
            self._gathered_bytes += outgoing.size
            if self._notice is not None and self._gathered_bytes >= BURST_BYTES:
                self._end_burst()
        self._out[kind].append(outgoing)
        if first:
            self._on_ready()

    def _end_burst(self) -> None:
        burst, self._gathered, self._gathered_bytes = self._gathered, [], 0
        if burst:
            self._bursts.append(([each.payload for each in burst], [each.posted for each in burst]))
            if self._notice is not None:
                self._frames.append(self._notice)

    def leave(self) -> tuple[list[bytes], list[Sends]]:
        """The turn is over: the frames that announce what it brought, and the sends to launch."""
        self._end_burst()
        frames, self._frames = self._frames, []
        bursts, self._bursts = self._bursts, []
        return frames, bursts

    def taken(self, kind: int, count: int) -> int:
        """The peer has `count` more parcels: how many of them have payloads. May announce more.
        Raises `ProtocolError` if there are not so many."""
        window, out, payloads = self._windows[kind], self._out[kind], 0
        if count > len(window):
            raise ProtocolError(f"{count} parcels taken; announced: {len(window)}")
        window.take(count)
        for _ in range(count):
            if not out:
                break  # who was told has stopped this
            outgoing = out.popleft()
            payloads += outgoing.size > 0
            self._outbound.sent(outgoing.posted)
        held = self._held[kind]
        while held and window.put(held[0].nbytes):
            self._announce(kind, held.popleft())
        return payloads

    @property
    def idle(self) -> bool:
        """Whether the peer has all that was posted."""
        return not any(self._held) and not any(len(window) for window in self._windows)

    def stop(self) -> None:
        """The peer is gone: forget everything."""
        for outgoing in (*self._held, *self._out):
            outgoing.clear()
        self._frames, self._bursts, self._gathered = [], [], []


class Receiving:
    """What one peer sends to this rank. `on_ready` is called when there begins to be something to
    `take`, `on_whole` when there begins to be something to tell the peer."""

    def __init__(
        self, on_ready: Callable[[], object] | None, on_whole: Callable[[], object]
    ) -> None:
        self._on_ready, self._on_whole = on_ready, on_whole
        self._inbound: Inbound | None = None  # not begun, or stopped
        self._windows = [Window() for _ in range(_CLASSES)]
        self._coming: list[deque[Transfer]] = [deque() for _ in range(_CLASSES)]
        self._early = [0] * _CLASSES  # parcels that are whole, behind one that is not
        self._whole = [0] * _CLASSES  # with all before them, which the peer was not told
        self._waiting: list[Transfer] = []
        self._telling = False

    def begin(self, inbound: Inbound) -> None:
        """Hand over to `inbound`."""
        self._inbound = inbound

    def place(self, transfer: Transfer) -> None:
        """A control frame is here, and nothing allocated. Raises `ProtocolError` beyond the
        window."""
        window = self._windows[transfer.parcel_class]
        nbytes = transfer.column_bytes + transfer.payload_bytes
        if not window.put(nbytes):
            raise ProtocolError(
                f"a parcel of {nbytes} bytes behind {len(window)} with {window.nbytes} bytes that "
                f"were not taken; allowed: {WINDOW_PARCELS} with {WINDOW_BYTES} bytes"
            )

    def announced(self, transfer: Transfer) -> None:
        """Its columns are here as well. Raises `ProtocolError` as the receiver."""
        if self._inbound is None:
            return
        self._coming[transfer.parcel_class].append(transfer)
        if not transfer.payload_bytes:
            self._arrived(transfer)
            return
        self._waiting.append(transfer)
        if len(self._waiting) == 1 and self._on_ready is not None:
            self._on_ready()

    def take(self) -> list[Transfer]:
        """The receives to launch: all that was announced since the last call."""
        taken, self._waiting = self._waiting, []
        return taken

    def arrived(self, transfers: Sequence[Transfer]) -> None:
        """Their payloads are whole. Raises `ProtocolError` as the receiver."""
        for transfer in transfers:
            if self._inbound is not None:  # what came before may have stopped this
                self._arrived(transfer)

    def _arrived(self, transfer: Transfer) -> None:
        assert self._inbound is not None
        self._inbound.arrived(transfer)
        kind = transfer.parcel_class
        coming: Any = self._coming[kind]
        if not coming:
            return  # stopped meanwhile
        if coming[0] is not transfer:
            self._early[kind] += 1
            return
        coming.popleft()
        self._whole[kind] += 1
        while self._early[kind] and coming[0].lease.state is not LeaseState.FILLING:
            coming.popleft()
            self._early[kind] -= 1
            self._whole[kind] += 1
        if not self._telling:
            self._telling = True
            self._on_whole()

    def told(self) -> list[tuple[int, int]]:
        """What the peer is told now: (class, parcels)."""
        told = [(kind, whole) for kind, whole in enumerate(self._whole) if whole]
        for kind, whole in told:
            self._windows[kind].take(whole)
            self._whole[kind] = 0
        self._telling = False
        return told

    def stop(self) -> None:
        """The peer is gone: hand over nothing more."""
        self._inbound = None
        self._waiting.clear()
        for coming in self._coming:
            coming.clear()
