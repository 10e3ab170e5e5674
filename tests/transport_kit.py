"""What the transport tests share: parcels that can be recognised, and clusters in one loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from asyncmoe import native
from asyncmoe.directory import MemoryDirectory
from asyncmoe.transport import Arrival, Limits, Parcel, ParcelClass, TransportContext
from asyncmoe.transports.auto import AutoTransport
from asyncmoe.transports.gloo import GlooTransport
from asyncmoe.transports.impaired import ImpairedTransport
from asyncmoe.transports.inproc import InprocTransport
from asyncmoe.transports.model import ModelTransport
from asyncmoe.transports.nixl import NixlTransport
from asyncmoe.transports.shm import ShmTransport
from asyncmoe.transports.tcp import TcpTransport
from asyncmoe.transports.ucx import UcxTransport

TRANSPORTS: dict[str, type[Any]] = {
    "auto": AutoTransport,
    "gloo": GlooTransport,
    "impaired:tcp": ImpairedTransport.around(TcpTransport),
    "inproc": InprocTransport,
    "model": ModelTransport,
    "nixl": NixlTransport,
    "shm": ShmTransport,
    "tcp": TcpTransport,
    "ucx": UcxTransport,
}
BETWEEN_PROCESSES = ["auto", "gloo", "impaired:tcp", "nixl", "shm", "tcp", "ucx"]
TOKEN = b"a token for tests"
# What makes a transport with slots have the fewest there can be: one for each peer and class.
ONE_SLOT: dict[str, dict[str, Any]] = {
    "nixl": {
        "options": {"slots": 1, "slot_bytes": 1 << 20},
        "limits": Limits(parcel_bytes=1 << 20),
    },
    "shm": {"options": {"slots": 1, "slot_bytes": 1 << 20}, "limits": Limits(parcel_bytes=1 << 20)},
}


@pytest.fixture(params=["compiled", "plain"])
def compiled_or_plain(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test twice: with the compiled parts, and with their plain twins."""
    if request.param == "plain":
        monkeypatch.setattr(native, "columns", None)
    elif native.columns is None:
        pytest.skip("not built")


def make_parcel(
    number: int,
    rows: int = 4,
    hidden: int = 8,
    dtype: torch.dtype = torch.float32,
    kind: ParcelClass = ParcelClass.DISPATCH,
    top_k: int = 2,
) -> Parcel:
    """A parcel in which everything follows from `number`, its stage."""
    random = np.random.default_rng(number)
    payload = torch.from_numpy(random.integers(0, 100, (rows, hidden))).to(dtype)
    slot = random.integers(0, 2**32, rows, dtype=np.uint32)
    epoch = random.integers(0, 2**32, rows, dtype=np.uint32)
    if kind is ParcelClass.COMBINE:
        part = random.integers(0, 256, rows, dtype=np.uint8)
        return Parcel(kind, number, slot, epoch, part, payload, credits=rows)
    pairs = rows * top_k
    return Parcel(
        kind,
        number,
        slot,
        epoch,
        random.integers(0, 256, pairs, dtype=np.uint8),
        payload,
        np.full(rows, top_k, np.uint8),
        random.integers(0, 256, pairs, dtype=np.uint16),
        random.random(pairs, dtype=np.float32),
    )


def assert_same(got: Parcel, sent: Parcel) -> None:
    """Both parcels are equal in every field, dtypes included."""
    assert (got.kind, got.stage, got.credits) == (sent.kind, sent.stage, sent.credits)
    for name in ("slot", "epoch", "part", "fanout", "expert", "weight"):
        mine, theirs = getattr(got, name), getattr(sent, name)
        assert mine.dtype == theirs.dtype, name
        np.testing.assert_array_equal(mine, theirs, err_msg=name)
    assert got.payload.dtype == sent.payload.dtype
    assert got.payload.shape == sent.payload.shape
    assert torch.equal(got.payload, sent.payload)


class Recorder:
    """A receiver that keeps what arrives, and wakes whoever waits for it."""

    def __init__(self, on_arrival: Callable[[Arrival], None] | None = None) -> None:
        self.arrivals: list[Arrival] = []
        self.messages: list[tuple[int, bytes]] = []
        self.lost: list[tuple[int, Exception]] = []
        self._on_arrival = on_arrival
        self._changed = asyncio.Event()

    def on_parcel(self, arrival: Arrival) -> None:
        if self._on_arrival is not None:
            self._on_arrival(arrival)
        self.arrivals.append(arrival)
        self._changed.set()

    def on_message(self, source: int, message: bytes) -> None:
        self.messages.append((source, message))
        self._changed.set()

    def on_peer_lost(self, peer: int, error: Exception) -> None:
        self.lost.append((peer, error))
        self._changed.set()

    def stages(self, source: int, kind: ParcelClass = ParcelClass.DISPATCH) -> list[int]:
        """Numbers of the parcels of one source and class, in order of arrival."""
        found = [a.parcel for a in self.arrivals if a.source == source]
        return [parcel.stage for parcel in found if parcel.kind is kind]

    def release_all(self) -> None:
        """Read nothing any more."""
        for arrival in self.arrivals:
            arrival.release()
        self.arrivals.clear()

    async def until(self, condition: Callable[[], Any], timeout_s: float = 20.0) -> None:
        """Wait until something that arrives makes `condition` true."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                self._changed.clear()
                await self._changed.wait()


class Reader:
    """A receiver that looks at what arrives, and gives it back a turn of the loop later."""

    def __init__(
        self,
        expected: Callable[[int, ParcelClass, int], Parcel] | None = None,
        hold: ParcelClass | None = None,
    ) -> None:
        """`expected`: the parcel of a source, class and stage. `hold`: a class to keep."""
        self.held: list[Arrival] = []
        self.seen: dict[tuple[int, ParcelClass], list[int]] = {}  # stages, in order of arrival
        self.wrong: list[tuple[int, int]] = []  # (source, stage) of parcels that differ
        self.messages: list[tuple[int, bytes]] = []
        self.lost: dict[int, Exception] = {}
        self._expected, self._hold = expected, hold
        self._changed = asyncio.Event()

    @property
    def count(self) -> int:
        """Parcels that arrived."""
        return sum(map(len, self.seen.values()))

    def on_parcel(self, arrival: Arrival) -> None:
        parcel = arrival.parcel
        self.seen.setdefault((arrival.source, parcel.kind), []).append(parcel.stage)
        if self._expected is not None:
            try:
                assert_same(parcel, self._expected(arrival.source, parcel.kind, parcel.stage))
            except AssertionError:
                self.wrong.append((arrival.source, parcel.stage))
        if parcel.kind is self._hold:
            self.held.append(arrival)
        else:
            asyncio.get_running_loop().call_soon(arrival.release)
        self._changed.set()

    def release_all(self) -> None:
        """Keep nothing any more, from now on."""
        self._hold = None
        for arrival in self.held:
            arrival.release()
        self.held.clear()

    def on_message(self, source: int, message: bytes) -> None:
        self.messages.append((source, message))
        self._changed.set()

    def on_peer_lost(self, peer: int, error: Exception) -> None:
        self.lost[peer] = error
        self._changed.set()

    async def until(self, condition: Callable[[], Any], timeout_s: float = 20.0) -> None:
        """Wait until something that arrives makes `condition` true."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                self._changed.clear()
                await self._changed.wait()


class Cluster:
    """Ranks of one transport in this loop, with a recorder each."""

    def __init__(self, name: str, world: int, **settings: Any) -> None:
        self.directory = MemoryDirectory()
        self.ranks: list[Any] = []
        for rank in range(world):
            self.ranks.append(TRANSPORTS[name](self.context(rank, world, **settings)))
        self.receivers: list[Any] = [Recorder() for _ in range(world)]

    def context(self, rank: int, world: int, **settings: Any) -> TransportContext:
        """The context of one rank of this cluster."""
        defaults: dict[str, Any] = {
            "limits": Limits(),
            "device": torch.device("cpu"),
            "token": TOKEN,
            "start_timeout_s": 20.0,
            "peer_timeout_s": 20.0,
        }
        return TransportContext(rank, world, self.directory, **{**defaults, **settings})

    async def start(self, *ranks: int) -> None:
        """Start all ranks, or these."""
        chosen = ranks or range(len(self.ranks))
        await asyncio.gather(*(self.ranks[r].start(self.receivers[r]) for r in chosen))

    async def close(self, *ranks: int) -> None:
        """Close all ranks, or these."""
        chosen = ranks or range(len(self.ranks))
        await asyncio.gather(*(self.ranks[r].close() for r in chosen))

    def live_leases(self) -> int:
        """Leases of all ranks that are not free."""
        return sum(transport.leases.live for transport in self.ranks)


async def until_free(posted: list[Any], timeout_s: float = 20.0) -> None:
    """Wait until all sources are free."""
    async with asyncio.timeout(timeout_s):
        for one in posted:
            done = asyncio.get_running_loop().create_future()
            one.when_free(done.set_result)
            await done
