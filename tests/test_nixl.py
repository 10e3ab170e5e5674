"""What only the NIXL transport has: notifications, slots, registrations, arenas, and its agent."""

from __future__ import annotations

import asyncio
import struct
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncmoe.errors import ConfigError, ProtocolError, UnknownName
from asyncmoe.transport import Limits, ParcelClass
from asyncmoe.transports.nixl_memory import Arena, Sources, Span
from asyncmoe.transports.nixl_slots import ReceiverSlots, SenderSlots
from asyncmoe.transports.nixl_wire import (
    RECORD_BYTES,
    Freed,
    NoteKind,
    Place,
    Written,
    decode_head,
    decode_note,
    encode_note,
    encode_place,
    note_generation,
)
from asyncmoe.transports.shm_segment import Geometry
from asyncmoe.wire import PRELUDE_BYTES, decode_prelude
from tests.transport_kit import (
    Cluster,
    assert_same,
    compiled_or_plain,  # noqa: F401 - a fixture
    make_parcel,
    until_free,
)

GENERATION = 7
PLACE = Place("DRAM", 4, 4096, 1 << 40, "asyncmoe-00000000-0123456789abcdef", b"metadata")


@pytest.mark.parametrize(
    ("kind", "entries"),
    [
        (NoteKind.HELLO, []),
        (NoteKind.WRITTEN, [Written(1, 180 << 10, 1 << 40), Written(2, 1, 0)]),
        (NoteKind.FREED, [Freed(2, 3, 0xFFFFFFFF)]),
        (NoteKind.WHOLE, []),
    ],
)
def test_notifications_come_out_as_they_went_in(kind: NoteKind, entries: Any) -> None:
    note = encode_note(kind, GENERATION, entries)
    assert note_generation(note) == GENERATION
    assert decode_note(note) == (kind, entries)


@given(st.binary(max_size=80))
def test_a_notification_of_any_bytes_is_refused_or_means_what_it_says(noise: bytes) -> None:
    for note in (noise, encode_note(NoteKind.HELLO, GENERATION)[:2] + noise):
        if note_generation(note) is None:
            continue
        try:
            kind, entries = decode_note(note)
        except ProtocolError:
            continue
        assert encode_note(NoteKind(kind), note_generation(note) or 0, entries) == note


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"kind": "VRAM"}, "kind, slots and slot_bytes"),
        ({"slots": 5}, "kind, slots and slot_bytes"),
        ({"slot_bytes": 1 << 60}, "kind, slots and slot_bytes"),
        ({"address": 0}, "address is 0"),
        ({"address": (1 << 64) - 4096}, "address"),
        ({"name": "asyncmoe"}, "lengths"),
        ({"metadata": bytes(1 << 19)}, "lengths"),
    ],
)
def test_a_place_that_this_rank_does_not_expect_is_refused(
    change: dict[str, Any], match: str
) -> None:
    record = encode_place(PLACE._replace(**change))
    with pytest.raises(ProtocolError, match=match):
        decode_head(record[:RECORD_BYTES], PLACE)
    assert decode_head(encode_place(PLACE)[:RECORD_BYTES], PLACE)[1:] == (len(PLACE.name), 8)


def frame(first: int, generation: int, nbytes: int) -> tuple[int, int, int]:
    """What a control frame says of a payload in slot `first`."""
    return first + 1, generation, nbytes


def test_slots_go_round_and_words_about_former_owners_are_refused() -> None:
    sender, receiver = SenderSlots(Geometry(4, 4096)), ReceiverSlots(Geometry(4, 4096))
    first = sender.find(2)
    generation = sender.next_generation(first)
    sender.take(first, 2)
    assert (first, sender.find(3), sender.find(2)) == (0, -1, 2)
    held = receiver.accept(*frame(first, generation, 5000))
    for wrong in (frame(first, generation + 1, 5000), frame(1, 1, 1), frame(3, 1, 5000)):
        with pytest.raises(ProtocolError):
            receiver.accept(*wrong)
    with pytest.raises(ProtocolError, match="generation 0; allowed: 1"):
        sender.give_back(first, 0)
    sender.give_back(first, receiver.give_back(*held))
    assert (sender.out, sender.find(4), receiver.held) == (0, 0, 0)
    with pytest.raises(ProtocolError, match="allowed: None"):
        sender.give_back(first, generation)
    with pytest.raises(ProtocolError, match="generation is 1; allowed: 2"):
        receiver.accept(*frame(first, generation, 5000))


def test_sources_are_registered_once_while_they_are_read_and_never_overlap() -> None:
    calls: list[Any] = []
    sources = Sources(lambda span: calls.append(span) or span.address, calls.append)
    whole = Span(1000, 100, "DRAM", 0)
    assert sources.acquire(whole)
    assert sources.acquire(whole)
    assert sources.acquire(Span(1050, 50, "DRAM", 0))  # lies within
    assert not sources.acquire(Span(1050, 51, "DRAM", 0))
    assert not sources.acquire(Span(990, 11, "DRAM", 0))
    assert not sources.acquire(Span(990, 200, "DRAM", 0))
    other = Span(1050, 51, "VRAM", 0)
    assert sources.acquire(other)
    sources.release(other)
    sources.release(Span(1050, 50, "DRAM", 0))
    sources.release(whole)
    assert calls == [whole, other, 1050]
    sources.release(whole)
    assert calls[-1] == 1000
    assert len(sources) == 0


def test_the_addresses_of_an_arena_outlive_it_but_its_pages_do_not() -> None:
    arena = Arena(1 << 20, torch.device("cpu"))
    memory = arena.memory
    memory.fill_(7)
    arena.retire()
    del arena
    assert not memory.any()  # fresh pages at the same addresses
    memory[5] = 1  # where a late write would go


# Where all ranks are on loopback one registration covers all memory; elsewhere each source has one.
@pytest.mark.parametrize("bind_host", ["127.0.0.1", "0.0.0.0"])
async def test_pieces_and_copies_of_one_source_arrive_unchanged_at_several_peers(
    bind_host: str,
) -> None:
    cluster = Cluster("nixl", 3, bind_host=bind_host, options={"advertise_host": "127.0.0.1"})
    await cluster.start()
    parcel = make_parcel(3, rows=64, hidden=512)
    parts = [parcel, parcel.piece(0, 40), parcel.piece(20, 64), parcel.piece(40, 64), parcel]
    posted = [cluster.ranks[0].post(peer, part) for part in parts for peer in (1, 2)]
    for receiver in cluster.receivers[1:]:
        await receiver.until(lambda receiver=receiver: len(receiver.arrivals) == len(parts))
        for arrival, part in zip(receiver.arrivals, parts, strict=True):
            assert_same(arrival.parcel, part)
        receiver.release_all()
    await until_free(posted)
    sources = cluster.ranks[0]._agent._sources
    assert (sources is None) == (bind_host == "127.0.0.1")
    assert not sources
    await cluster.close()


NOTES = {
    "of no kind": struct.pack("<2sBI", b"aN", 9, 0),
    "cut": encode_note(NoteKind.WRITTEN, 0, [Written(1, 1, 0)])[:-1],
    "of no class": encode_note(NoteKind.WRITTEN, 0, [Written(3, 1, 0)]),
    "of a parcel far ahead": encode_note(NoteKind.WRITTEN, 0, [Written(1, 1, 1 << 20)]),
    "of slots that nobody has": encode_note(NoteKind.FREED, 0, [Freed(1, 0, 1)]),
    "of slots that are not there": encode_note(NoteKind.FREED, 0, [Freed(2, 1 << 20, 1)]),
}


@pytest.mark.usefixtures("compiled_or_plain")
@pytest.mark.parametrize("what", NOTES)
async def test_a_malformed_notification_ends_its_senders_connection_and_nothing_else(
    what: str,
) -> None:
    cluster = Cluster("nixl", 3)
    await cluster.start()
    attacker, note = cluster.ranks[2]._peers[0], bytearray(NOTES[what])
    struct.pack_into("<I", note, 3, attacker._generation)
    attacker._courier.notify(attacker, bytes(note))
    await cluster.receivers[0].until(lambda: cluster.receivers[0].lost)
    assert "malformed notification" in str(cluster.receivers[0].lost[0][1])
    cluster.ranks[0].post(1, make_parcel(1))
    await cluster.receivers[1].until(lambda: cluster.receivers[1].arrivals)
    cluster.receivers[1].release_all()
    await cluster.close()
    assert cluster.live_leases() == 0


@pytest.mark.usefixtures("compiled_or_plain")
async def test_more_bytes_than_a_parcel_has_end_the_connection() -> None:
    cluster = Cluster("nixl", 2)
    await cluster.start()
    attacker = cluster.ranks[1]._peers[0]
    early = encode_note(NoteKind.WRITTEN, attacker._generation, [Written(1, 1 << 20, 0)])
    attacker._courier.notify(attacker, early)
    await asyncio.sleep(0.3)
    assert cluster.receivers[0].lost == []  # its control frame might still come
    cluster.ranks[1].post(0, make_parcel(0))
    await cluster.receivers[0].until(lambda: cluster.receivers[0].lost)
    assert "notifications of" in str(cluster.receivers[0].lost[0][1])
    await cluster.close()
    assert cluster.live_leases() == 0


@pytest.mark.usefixtures("compiled_or_plain")
async def test_slots_that_are_read_in_one_turn_of_the_loop_go_back_together() -> None:
    cluster = Cluster("nixl", 2)
    await cluster.start()
    for n in range(8):
        cluster.ranks[0].post(1, make_parcel(n, 16, 2048))  # 128 KiB, two slots
    receiver, peer = cluster.receivers[1], cluster.ranks[1]._peers[0]
    await receiver.until(lambda: len(receiver.arrivals) == 8)
    told: list[bytes] = []
    peer._courier.notify = lambda client, note: told.append(note)
    receiver.release_all()
    assert told == []
    await asyncio.sleep(0.01)
    assert [decode_note(note) for note in told] == [
        (NoteKind.FREED, [Freed(1, 2 * n, 1) for n in range(8)])
    ]
    del peer._courier.notify
    peer._courier.notify(peer, told[0])
    await cluster.close()


async def test_a_notification_without_the_pairs_secret_is_not_believed() -> None:
    cluster = Cluster("nixl", 2)
    await cluster.start()
    stranger = cluster.ranks[1]._peers[0]
    wrong = (stranger._generation + 1) & 0xFFFFFFFF
    for note in (b"", b"noise", encode_note(NoteKind.FREED, wrong, [Freed(1, 0, 1)])):
        stranger._courier.notify(stranger, note)
    cluster.ranks[1].post(0, make_parcel(0))
    await cluster.receivers[0].until(lambda: cluster.receivers[0].arrivals)
    assert cluster.receivers[0].lost == []
    cluster.receivers[0].release_all()
    await cluster.close()


@pytest.mark.usefixtures("compiled_or_plain")
async def test_a_control_frame_without_slots_for_its_payload_ends_the_connection() -> None:
    cluster = Cluster("nixl", 2)
    await cluster.start()
    attacker = cluster.ranks[1]._peers[0]
    frame, _ = attacker.outbound.parcel(make_parcel(0))  # lease 0
    assert decode_prelude(frame[:PRELUDE_BYTES], Limits()).lease == 0
    attacker.link.send([frame])
    await cluster.receivers[0].until(lambda: cluster.receivers[0].lost)
    assert "lease is 0" in str(cluster.receivers[0].lost[0][1])
    await cluster.close()


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"slot": 3}, UnknownName, "Did you mean 'slots'"),
        ({"slots": 2}, ConfigError, "slots is 2; allowed: at least"),
        ({"spin_us": 0.5}, ConfigError, "spin_us is 0.5"),
        ({"progress_thread": 1}, ConfigError, "progress_thread is 1; allowed: true or false"),
    ],
)
def test_options_that_cannot_be_used_are_named(
    options: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        Cluster("nixl", 2, options=options)


def test_a_network_device_that_the_environment_names_and_is_not_there_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "eth77")
    with pytest.raises(ConfigError, match=r"UCX_NET_DEVICES is 'eth77'.*allowed: all, .*lo"):
        Cluster("nixl", 2)


@pytest.mark.usefixtures("compiled_or_plain")
@pytest.mark.parametrize(
    ("thread", "bind_host"), [(False, "127.0.0.1"), (True, "127.0.0.1"), (False, "0.0.0.0")]
)
async def test_parcels_of_both_classes_arrive_however_the_library_is_driven_and_bound(
    thread: bool, bind_host: str
) -> None:
    options = {"progress_thread": thread, "advertise_host": "127.0.0.1"}
    cluster = Cluster("nixl", 2, options=options, bind_host=bind_host)
    await cluster.start()
    sent = [make_parcel(n, 700, 1024, kind=kind) for n in range(3) for kind in ParcelClass]
    posted = [cluster.ranks[0].post(1, parcel) for parcel in sent]
    receiver = cluster.receivers[1]
    await receiver.until(lambda: len(receiver.arrivals) == len(sent))
    for kind in ParcelClass:
        assert receiver.stages(0, kind) == [0, 1, 2]
    receiver.release_all()
    await until_free(posted)
    await cluster.close()
    assert cluster.live_leases() == 0
