"""What compiled code writes to a NIXL peer by itself, and what it leaves to others."""

from __future__ import annotations

import asyncio
import socket
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asyncmoe import native
from asyncmoe.transport import Limits, Parcel, ParcelClass
from asyncmoe.transports.nixl_reach import NixlReach
from asyncmoe.transports.nixl_sending import BATCH_BYTES, make_sending
from asyncmoe.transports.nixl_wire import Freed, NoteKind, Written, decode_note, encode_note
from asyncmoe.transports.shm_segment import Geometry
from asyncmoe.twophase import make_outbound
from tests.transport_kit import (
    Cluster,
    Recorder,
    compiled_or_plain,  # noqa: F401 - a fixture
    make_parcel,
    until_free,
)

compiled = pytest.mark.skipif(native.columns is None, reason="not built")


class Bindings:
    """In the place of the library's own: answers as told."""

    def __init__(self, state: str) -> None:
        self.state = state
        self.made: list[str] = []
        self.notes: list[bytes] = []
        self.released: list[str] = []

    def createXferReq(self, *what: Any) -> str:  # noqa: N802
        if self.state == "refused":
            raise OSError("no memory")
        self.made.append(f"handle {len(self.made)}")
        return self.made[-1]

    def postXferReq(self, handle: str, note: bytes) -> str:  # noqa: N802
        self.notes.append(note)
        if self.state == "gone":
            raise OSError("disconnected")
        return self.state

    def releaseXferReq(self, handle: str) -> None:  # noqa: N802
        self.released.append(handle)

    def getNotifs(self, notes: dict[str, list[bytes]], backends: list[Any]) -> Any:  # noqa: N802
        return notes


class Fixture:
    """A sender's queues over such a library."""

    def __init__(self, state: str) -> None:
        self.bindings = Bindings(state)
        self.link = SimpleNamespace(error=None, send=lambda frames: self.frames.extend(frames))
        self.frames: list[bytes] = []
        geometry = Geometry(64, 64 << 10)
        outbound = make_outbound(0, 7, Limits())
        self.sending: Any = make_sending(outbound, geometry, 1 << 40, 7, 1, True)
        library = native.columns.NixlLibrary(
            self.bindings, lambda memory, places: places, "DRAM", "WRITE", "DONE", "PROC"
        )
        self.express = library.writer("peer", self.sending, self.link, BATCH_BYTES)

    def write(self, parcel: Parcel) -> None:
        """Post it alone."""
        self.sending.post(parcel)
        assert self.express() == parcel.payload.nbytes

    def give_back(self, generation: int) -> None:
        """The peer has read slot 0."""
        freed = [Freed(int(ParcelClass.DISPATCH), 0, generation)]
        self.sending.on_freed(encode_note(NoteKind.FREED, 7, freed))


@compiled
def test_what_is_done_at_once_needs_nobody_else() -> None:
    fixture = Fixture("DONE")
    parcels = [make_parcel(n) for n in range(3)]
    posted = [fixture.sending.post(parcel) for parcel in parcels]
    assert fixture.express() == sum(parcel.payload.nbytes for parcel in parcels)
    assert len(fixture.frames) == 3
    assert all(each.source_free for each in posted)
    assert fixture.express() is None


@compiled
def test_a_transfer_between_the_same_places_is_not_made_again_but_has_its_own_notification() -> (
    None
):
    fixture, parcel = Fixture("DONE"), make_parcel(0)
    for generation in (1, 2, 3):
        fixture.write(parcel)
        fixture.give_back(generation)
    assert fixture.bindings.made == ["handle 0"]
    notes = [decode_note(note) for note in fixture.bindings.notes]
    assert notes == [(NoteKind.WRITTEN, [Written(1, 128, n)]) for n in range(3)]
    fixture.write(make_parcel(1))  # from elsewhere
    assert fixture.bindings.made == ["handle 0", "handle 1"]


@compiled
def test_what_fails_when_it_is_posted_again_is_not_kept() -> None:
    fixture, parcel = Fixture("DONE"), make_parcel(0)
    fixture.write(parcel)
    fixture.give_back(1)
    fixture.bindings.state = "ERR"
    fixture.sending.post(parcel)
    _, begun = fixture.express()
    assert begun == ("handle 0", "ERR")
    del fixture.express
    assert fixture.bindings.released == []  # that is its caller's


@compiled
def test_transfers_that_are_kept_are_bounded_and_end_with_who_keeps_them() -> None:
    fixture, parcels = Fixture("DONE"), [make_parcel(n) for n in range(20)]
    for parcel in parcels:
        fixture.write(parcel)
    assert fixture.bindings.released == [f"handle {n}" for n in range(4)]  # the oldest
    del fixture.express
    assert sorted(fixture.bindings.released) == sorted(fixture.bindings.made)


@pytest.mark.usefixtures("compiled_or_plain")
async def test_a_rank_that_closes_alone_has_written_what_waited_for_slots() -> None:
    few = {"limits": Limits(parcel_bytes=1 << 20), "options": {"slots": 16}}
    cluster = Cluster("nixl", 2, **few)  # a silent peer is given up after 20 s
    seen: list[int] = []
    cluster.receivers[1] = receiver = Recorder(lambda arrival: seen.append(arrival.parcel.stage))
    await cluster.start()
    for value in range(100):
        cluster.ranks[0].post(1, make_parcel(value, 16, 2048))  # two slots
    closing = asyncio.create_task(cluster.close(0))
    async with asyncio.timeout(8):
        while not closing.done():
            await asyncio.sleep(0.01)
            receiver.release_all()
    assert seen == list(range(100))
    receiver.release_all()
    await cluster.close(1)


@pytest.mark.usefixtures("compiled_or_plain")
async def test_a_source_that_is_written_again_and_again_arrives_as_it_is_each_time() -> None:
    cluster = Cluster("nixl", 2)
    await cluster.start()
    parcel, receiver = make_parcel(0, 16, 2048), cluster.receivers[1]
    for value in range(40):
        parcel.payload.fill_(value)
        posted = cluster.ranks[0].post(1, parcel)
        await receiver.until(lambda: receiver.arrivals)
        assert torch.equal(receiver.arrivals[0].parcel.payload, parcel.payload)
        receiver.release_all()
        await until_free([posted])
    await cluster.close()


@compiled
def test_frames_of_a_lost_link_are_dropped() -> None:
    fixture = Fixture("DONE")
    fixture.link.error = "lost"
    fixture.sending.post(make_parcel(0))
    assert fixture.express() > 0
    assert fixture.frames == []


@compiled
@pytest.mark.parametrize(
    ("state", "handle", "trouble"),
    [
        ("PROC", "handle 0", None),
        ("ERR", "handle 0", "ERR"),
        ("gone", "handle 0", "disconnected"),
        ("refused", None, "no memory"),
    ],
)
def test_what_is_under_way_or_failed_is_left_with_its_handle(
    state: str, handle: str | None, trouble: str | None
) -> None:
    fixture = Fixture(state)
    posted = fixture.sending.post(make_parcel(0))
    batch, (left, why) = fixture.express()
    assert (left, why if why is None else str(why)) == (handle, trouble)
    assert len(batch.frames) == 1
    assert (fixture.frames, fixture.bindings.released) == ([], [])
    assert not posted.source_free


@compiled
@pytest.mark.parametrize("rows", [0, 1 + (BATCH_BYTES >> 10)])
def test_what_is_empty_or_large_is_not_begun(rows: int) -> None:
    fixture = Fixture("DONE")
    parcel = make_parcel(0, rows, 512)
    fixture.sending.post(parcel)
    batch, begun = fixture.express()
    assert (batch.nbytes, begun) == (parcel.payload.nbytes, None)
    assert fixture.frames == []


@compiled
async def test_a_write_that_the_library_refuses_ends_the_connection() -> None:
    cluster = Cluster("nixl", 2)
    await cluster.start()
    peer = cluster.ranks[0]._peers[1]
    peer.express = lambda: (peer._sending.next_batch(), (None, OSError("no memory")))
    posted = cluster.ranks[0].post(1, make_parcel(0))
    await cluster.receivers[0].until(lambda: cluster.receivers[0].lost)
    assert "NIXL cannot write: no memory" in str(cluster.receivers[0].lost[0][1])
    await until_free([posted])
    assert peer.express is None
    await cluster.close()


@pytest.mark.parametrize(
    ("bind_host", "family"), [("127.0.0.1", socket.AF_UNIX), ("0.0.0.0", socket.AF_INET)]
)
async def test_links_are_unix_sockets_where_all_are_on_one_machine(
    bind_host: str, family: socket.AddressFamily
) -> None:
    here = NixlReach(bind_host, "127.0.0.1")
    listener = await here.listen()
    assert listener.family == family
    for dialler in ("127.0.0.1", "0.0.0.0"):
        with await NixlReach(dialler).dial(here.address(listener)) as sock:
            assert sock.family == family
    listener.close()
