"""The contract of a transport: parcels and control messages between ranks, point to point."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from asyncmoe.errors import ConfigError


class ParcelClass(IntEnum):
    """Which way a parcel goes. Dispatch needs credits, combine never does."""

    DISPATCH = 1  # home rank -> expert rank
    COMBINE = 2  # expert rank -> home rank


@dataclass(slots=True)
class Parcel:
    """One message between ranks: index columns and a payload of rows, all for one expert stage.

    A dispatch row carries a list of (expert, weight, part): `fanout[i]` entries of the pair
    columns belong to row i, in order. With `combine = "per_rank"` all pairs of a row share one
    part, with `"per_expert"` each has its own. A combine row is one part of one slot, so its pair
    columns are empty but for `part`, which has one entry per row, and `fanout` is empty.
    """

    kind: ParcelClass
    stage: int  # the expert stage that the rows go to (dispatch) or come from (combine)
    slot: NDArray[np.uint32]  # [rows] row of the home rank's token table
    epoch: NDArray[np.uint32]  # [rows] generation of the slot
    part: NDArray[np.uint8]  # dispatch: [pairs]; combine: [rows]
    payload: torch.Tensor  # [rows, hidden], contiguous
    fanout: NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8))  # [rows]
    expert: NDArray[np.uint16] = field(default_factory=lambda: np.empty(0, np.uint16))  # [pairs]
    weight: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))  # [pairs]
    credits: int = 0  # combine: rows of the home's window that this parcel gives back

    @property
    def rows(self) -> int:
        """Number of payload rows."""
        return len(self.slot)

    def columns(self) -> tuple[NDArray[Any], ...]:
        """Slot, epoch, part, fan-out, expert, weight."""
        return self.slot, self.epoch, self.part, self.fanout, self.expert, self.weight

    def piece(self, first: int, last: int) -> Parcel:
        """Rows `first:last` as views; the last piece gives all the credits back."""
        rows = pairs = slice(first, last)
        if self.kind is ParcelClass.DISPATCH:
            ends = np.cumsum(self.fanout, dtype=np.int64)
            begin = int(ends[first - 1]) if first else 0
            pairs = slice(begin, int(ends[last - 1]) if last else 0)
        return Parcel(
            self.kind,
            self.stage,
            self.slot[rows],
            self.epoch[rows],
            self.part[pairs],
            self.payload[rows],
            self.fanout[rows],
            self.expert[pairs],
            self.weight[pairs],
            self.credits if last == self.rows else 0,
        )

    def select(self, rows: NDArray[np.int64]) -> Parcel:
        """These rows of a dispatch parcel, in ascending order, as copies."""
        keep = np.zeros(self.rows, np.bool_)
        keep[rows] = True
        pairs = np.repeat(keep, self.fanout)
        return Parcel(
            self.kind,
            self.stage,
            self.slot[rows],
            self.epoch[rows],
            self.part[pairs],
            self.payload.index_select(0, torch.from_numpy(rows)),
            self.fanout[rows],
            self.expert[pairs],
            self.weight[pairs],
        )


@dataclass(slots=True)
class Arrival:
    """A parcel whose payload is visible to the compute device.

    `payload` lies in leased memory, which may be read-only or another rank's: never write to it,
    and call `release` exactly once, after the last read. A transport may take no more parcels of
    this class and peer while too many of its arrivals are held; others do not wait for them.
    """

    source: int
    parcel: Parcel
    release: Callable[[], None]


class Posted:
    """The source side of one posted parcel."""

    __slots__ = ("_callback", "error", "source_free")

    def __init__(self) -> None:
        self.source_free = False  # the payload's memory may be written again
        self.error: Exception | None = None  # set together with `source_free` if the peer was lost
        self._callback: Callable[[Posted], None] | None = None

    def when_free(self, callback: Callable[[Posted], None]) -> None:
        """Call `callback` on the loop once the source is free; at once if it is already."""
        if self.source_free:
            callback(self)
        else:
            self._callback = callback

    def complete(self, error: Exception | None = None) -> None:
        """For transports: the source is free, or was given up with `error`. Idempotent."""
        if self.source_free:
            return
        self.source_free, self.error = True, error
        if self._callback is not None:
            self._callback(self)
            self._callback = None


class Receiver(Protocol):
    """Where a transport hands over what arrives. All calls are made on the loop; none may block."""

    def on_parcel(self, arrival: Arrival) -> None:
        """A parcel from `arrival.source` is readable.

        Raises `ProtocolError` if its content is not acceptable: the transport then takes the lease
        back and drops the connection, as for any malformed frame.
        """

    def on_message(self, source: int, message: bytes) -> None:
        """A control message arrived, in order among the messages of that source.

        Raises `ProtocolError` likewise.
        """

    def on_peer_lost(self, peer: int, error: Exception) -> None:
        """The peer is gone; called once. Nothing of it arrives afterwards."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a rank accepts from its peers; all are checked before anything is allocated."""

    parcel_bytes: int = 64 << 20  # payload of one parcel
    parcel_rows: int = 65536
    message_bytes: int = 16 << 20  # one control message
    stages: int = 65535  # length of the stage chain
    experts: int = 65536  # experts of a layer
    hidden: int | None = None  # columns of a payload row, when fixed


class Directory(Protocol):
    """How ranks find each other before they are connected (TCPStore, or a dict in one process)."""

    def publish(self, key: str, value: str) -> None:
        """Make `value` visible to all ranks."""

    async def lookup(self, key: str, timeout_s: float) -> str:
        """Wait for `key`. Raises `RankFailed` if a rank failed meanwhile, `TimeoutError`."""


@dataclass(frozen=True, slots=True)
class TransportContext:
    """What a transport is made of."""

    rank: int
    world: int
    directory: Directory
    limits: Limits
    device: torch.device
    token: bytes  # shared secret of the cluster; peers must prove it before anything else is read
    bind_host: str = "127.0.0.1"
    start_timeout_s: float = 60.0
    peer_timeout_s: float = 30.0  # a silent peer is lost after this; heartbeats keep it alive
    options: dict[str, Any] = field(default_factory=dict)  # the keys of `[transport.options]`
    peers: frozenset[int] | None = None  # ranks to connect to; None: all others
    common_bytes: int = 0  # of memory, each way, that ranks of one machine share beside parcels

    @property
    def others(self) -> list[int]:
        """The ranks that this one connects to, ascending."""
        everyone = range(self.world) if self.peers is None else self.peers
        return sorted(set(everyone) - {self.rank})


@dataclass(frozen=True, slots=True)
class Common:
    """Memory that this rank shares with a peer, zeroed at first. It lasts as long as these views,
    also after the peer is lost."""

    mine: memoryview  # uint8 [common_bytes], which this rank alone writes
    theirs: memoryview  # likewise, which the peer alone writes; read-only


class Transport(ABC):
    """Moves parcels and control messages between ranks; one instance per rank.

    Promises, for every implementation:
    - parcels from one peer and class arrive in the order posted, each exactly once, and control
      messages from one peer likewise;
    - `post` and `send` never block the loop, and the payload is never copied more than once;
    - a payload is handed out only when the compute device can read it;
    - after a peer is lost, pending and later operations with it fail with `PeerLost` within
      `peer_timeout_s`; all other peers are unaffected;
    - a malformed frame costs its sender the connection and nobody else anything.
    """

    device_types: ClassVar[tuple[str, ...]] = ("cpu",)  # of torch devices whose memory it moves

    def __init__(self, context: TransportContext) -> None:
        self.context = context

    @abstractmethod
    def start(self, receiver: Receiver) -> Awaitable[None]:
        """Connect to all peers; returns when every pair is up.

        Raises `TimeoutError` after `start_timeout_s`, `RankFailed` if a rank failed meanwhile.
        """

    @abstractmethod
    def post(self, peer: int, parcel: Parcel) -> Posted:
        """Queue `parcel` for `peer` (never this rank itself).

        The payload's memory belongs to the transport until `Posted.source_free` is set.
        Raises `PeerLost` if the peer is gone, `ParcelTooLarge` beyond `limits.parcel_bytes`.
        """

    @abstractmethod
    def send(self, peer: int, message: bytes) -> None:
        """Queue a control message for `peer`. Raises `PeerLost` if the peer is gone."""

    @abstractmethod
    async def close(self) -> None:
        """Flush what is queued (bounded by `peer_timeout_s`), then disconnect. Idempotent."""

    def cut(self, peer: int, reason: str) -> None:
        """Lose the connection to `peer` as a broken network would: for experiments and tests.

        Raises `ConfigError` where the transport has no way to.
        """
        raise ConfigError(f"{type(self).__name__} cannot cut the connection to a rank")

    def abort(self) -> None:
        """Disconnect from all peers at once, as a crash would. Raises `ConfigError` likewise."""
        raise ConfigError(f"{type(self).__name__} cannot disconnect without closing")

    def payload_bytes(self, parcel: Parcel) -> int:
        """What the rows of `parcel` take on the wire."""
        return parcel.payload.nbytes

    def carriers(self) -> dict[int, str]:
        """Where a transport chooses for each peer: the name of what moves that peer's parcels."""
        return {}

    def common(self, peer: int) -> Common | None:
        """What this rank shares with `peer`, once started; None where there is no such memory, and
        where the peer is lost already."""
        return None
