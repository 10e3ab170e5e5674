"""Shared memory: slots change owners safely, hostile segments are refused, waits have an end."""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import random
import socket
import stat
import struct
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncmoe.errors import ConfigError, PeerLost, ProtocolError, UnknownName
from asyncmoe.lease import LeasePool
from asyncmoe.reach import UnixReach
from asyncmoe.transport import Limits, ParcelClass
from asyncmoe.transports import shm_segment
from asyncmoe.transports.shm import ShmPeer, ShmTransport
from asyncmoe.transports.shm_lanes import ReceiverSlots, Sender, SenderSlots, lowest_run
from asyncmoe.transports.shm_segment import Geometry, exchange, make_segment, map_segment
from asyncmoe.twophase import make_outbound
from asyncmoe.wire import PRELUDE_BYTES, FrameKind, decode_prelude, encode_prelude, encode_signal
from tests.transport_kit import (
    Cluster,
    Reader,
    assert_same,
    compiled_or_plain,  # noqa: F401 - a fixture
    make_parcel,
    until_free,
)

DISPATCH, COMBINE = ParcelClass
PAGE = 4096
SMALL = Geometry(slots=4, slot_bytes=PAGE)
ONE_SLOT: dict[str, Any] = {
    "options": {"slots": 1, "slot_bytes": 1 << 20},
    "limits": Limits(parcel_bytes=1 << 20),
}


def both_ends(kind: ParcelClass = DISPATCH) -> tuple[SenderSlots, ReceiverSlots]:
    """Of one class of one direction, in mappings as two processes have them."""
    mine, to_mine = make_segment(SMALL)
    theirs, to_theirs = make_segment(SMALL)
    sender = SenderSlots(mine, map_segment(to_theirs, SMALL), kind)
    receiver = ReceiverSlots(theirs, map_segment(to_mine, SMALL), kind)
    os.close(to_mine)
    os.close(to_theirs)
    return sender, receiver


def named(first: int, generation: int, nbytes: int = 1) -> tuple[int, int, int]:
    """What a control frame says of a payload in slot `first`."""
    return first + 1, generation, nbytes


def send(sender: SenderSlots, first: int, count: int = 1) -> tuple[int, int, int]:
    """Take slots, and name them."""
    return named(first, sender.take(first, count), count * PAGE)


def test_a_slot_is_the_senders_again_only_when_the_receiver_has_given_it_back() -> None:
    sender, receiver = both_ends()
    leases = [receiver.accept(*send(sender, sender.find(1))) for _ in range(4)]
    assert sender.find(1) == -1
    receiver.give_back(*leases[2])
    assert sender.find(1) == 2
    assert sender.find(2) == -1
    receiver.give_back(*leases[1])
    assert sender.find(2) == 1


def test_a_notice_is_due_once_for_every_time_that_the_sender_waits() -> None:
    sender, receiver = both_ends()
    leases = [receiver.accept(*send(sender, n)) for n in range(4)]
    assert sender.wait(3) == -1
    assert [receiver.give_back(*lease) for lease in leases[:2]] == [True, False]
    assert sender.wait(3) == -1
    assert receiver.give_back(*leases[2]) is True
    assert sender.wait(3) == 0
    assert receiver.give_back(*leases[3]) is True  # it looked again just in time, and nobody waits
    assert not receiver.give_back(*receiver.accept(*send(sender, 0)))


@pytest.mark.parametrize(
    ("prelude", "message"),
    [
        (named(-1, 1), "lease is 0; allowed: 1 to 4"),
        (named(4, 1), "lease is 5; allowed: 1 to 4"),
        (named(3, 1, PAGE + 1), "lease is 4; allowed: 1 to 3 for 2 slots"),
        (named(0, 1, 1 << 40), "lease is 1; allowed"),
        (named(0, 2), "generation is 2; allowed: 1 for slot 0"),
        (named(1, 0), "generation is 0; allowed: 1 for slot 1"),
        (named(2, 1), "lease is 3, which this rank holds"),
        (named(1, 1, 2 * PAGE), "lease is 2, which this rank holds"),
    ],
)
def test_a_frame_may_name_only_slots_that_are_there_and_not_held(
    prelude: tuple[int, int, int], message: str
) -> None:
    sender, receiver = both_ends()
    first = send(sender, 0)
    receiver.accept(*send(sender, 2))
    with pytest.raises(ProtocolError, match=message):
        receiver.accept(*prelude)
    assert receiver.accept(*first) == (0, 1)


@given(st.lists(st.integers(0, 3) | st.integers(-4, -1), max_size=60))
@settings(max_examples=60, deadline=None)
def test_no_slot_ever_has_two_owners_and_no_wake_up_is_lost(acts: list[int]) -> None:
    sender, receiver = both_ends(COMBINE)
    held: list[tuple[int, int]] = []
    waits = 0  # slots that the sender waits for
    for act in acts:
        if act >= 0 and held:
            told = receiver.give_back(*held.pop(act % len(held)))
            if waits:
                first = sender.wait(waits) if told else sender.find(waits)
                assert told or first < 0
                waits = 0 if first >= 0 else waits
        elif act < 0 and not waits:
            first = sender.find(-act)
            if first < 0:
                first = sender.wait(-act)
            waits = -act if first < 0 else 0
            if first >= 0:
                bits = ((1 << -act) - 1) << first
                assert not any(bits & other for _, other in held)
                held.append(receiver.accept(*send(sender, first, -act)))
        assert sum(bits.bit_count() for _, bits in held) <= SMALL.slots


def test_thelowest_run_is_found_in_any_set_of_free_slots() -> None:
    chance = random.Random(1)
    for _ in range(500):
        free, count = chance.getrandbits(12), chance.randint(1, 12)
        run = (1 << count) - 1
        fits = [i for i in range(12) if free >> i & run == run]
        assert lowest_run(free, count) == (fits[0] if fits else -1)


def test_a_segment_has_no_name_and_nobody_else_can_open_write_or_cut_it() -> None:
    _, descriptor = make_segment(SMALL)
    assert stat.S_IMODE(os.fstat(descriptor).st_mode) == 0o600
    assert not list(Path("/dev/shm").glob("*asyncmoe*"))
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, PAGE)
    with pytest.raises(PermissionError):
        mmap.mmap(descriptor, SMALL.size_bytes)
    reader = map_segment(descriptor, SMALL)
    with pytest.raises(TypeError, match="read-only"):
        reader.reclaimed(DISPATCH)[0] = 1
    os.close(descriptor)


def memfd(size: int, seals: int) -> int:
    """Anonymous memory as a hostile peer may make it."""
    descriptor = os.memfd_create("hostile", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


ALL_SEALS = shm_segment._SEALS
HOSTILE: dict[str, tuple[Callable[[], int], str]] = {
    "small": (lambda: memfd(SMALL.size_bytes - PAGE, ALL_SEALS), "segment size is"),
    "huge": (lambda: memfd(1 << 44, ALL_SEALS), "segment size is"),
    "shrinks": (lambda: memfd(SMALL.size_bytes, fcntl.F_SEAL_GROW), "segment seals are 0x4"),
    "not memory": (lambda: os.open("/dev/null", os.O_RDWR), "no sealed memory"),
}


@pytest.mark.parametrize("what", sorted(HOSTILE))
def test_a_segment_that_could_harm_its_reader_is_refused(what: str) -> None:
    make, message = HOSTILE[what]
    descriptor = make()
    with pytest.raises(ProtocolError, match=message):
        map_segment(descriptor, SMALL)
    os.close(descriptor)


def record(
    slots: int = 4,
    slot_bytes: int = PAGE,
    common_bytes: int = 0,
    magic: bytes = b"aShm",
    version: int = 2,
) -> bytes:
    """What a peer says about its segment."""
    return struct.pack("<4sIQQQ", magic, version, slots, slot_bytes, common_bytes)


@pytest.fixture
async def pair() -> AsyncIterator[tuple[socket.socket, socket.socket]]:
    """A rank's socket, and the other end of it."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    yield ours, theirs
    ours.close()
    theirs.close()


@pytest.mark.parametrize(
    ("data", "descriptors", "message"),
    [
        (record(slots=5), 1, "slots is 5; allowed: 4"),
        (record(slot_bytes=2**63), 1, f"slot_bytes is {2**63}; allowed: 4096"),
        (record(common_bytes=64), 1, "common_bytes is 64; allowed: 0"),
        (record(magic=b"what"), 1, "magic and version are b'what' and 2"),
        (record(version=1), 1, "magic and version are b'aShm' and 1"),
        (record(), 0, "came with 0 descriptors; allowed: 1"),
        (record()[:-1], 1, "ended the exchange"),
        (b"", 0, "ended the exchange"),
    ],
)
async def test_a_record_that_is_not_as_expected_ends_the_exchange(
    pair: tuple[socket.socket, socket.socket], data: bytes, descriptors: int, message: str
) -> None:
    ours, theirs = pair
    descriptor = memfd(SMALL.size_bytes, ALL_SEALS)
    if data:
        socket.send_fds(theirs, [data], [descriptor] * descriptors)
    theirs.shutdown(socket.SHUT_WR)
    os.close(descriptor)
    with pytest.raises(ProtocolError, match=message):
        await exchange(ours, SMALL)


async def test_a_record_in_single_bytes_and_too_many_descriptors_is_handled(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    descriptor = memfd(SMALL.size_bytes, ALL_SEALS)
    exchanging = asyncio.create_task(exchange(ours, SMALL))
    for byte in record():
        socket.send_fds(theirs, [bytes([byte])], [descriptor] * 3)
        await asyncio.sleep(0)
    os.close(descriptor)
    with pytest.raises(ProtocolError, match="32 descriptors; allowed: 1"):
        await exchanging


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slot_bytes": "64k"}, "slot_bytes is '64k'; allowed: 1 to"),
        ({"slot_bytes": 5000}, "slot_bytes is 5000; allowed: multiples of 4096"),
        ({"slots": 0}, "slots is 0; allowed: 1 to"),
        ({"slots": True}, "slots is True; allowed: 1 to"),
        ({"slots": 3}, "slots is 3; allowed: at least 1024 of 65536 bytes"),
    ],
)
def test_options_are_checked_by_name(options: dict[str, Any], message: str) -> None:
    context = Cluster("shm", 0).context(0, 1, options=options)
    with pytest.raises(ConfigError, match=message):
        ShmTransport(context)


def test_an_unknown_option_is_told_the_nearest() -> None:
    context = Cluster("shm", 0).context(0, 1, options={"slot_byte": 1})
    with pytest.raises(UnknownName, match="Did you mean 'slot_bytes'"):
        ShmTransport(context)


async def test_ranks_of_different_machines_are_told_so() -> None:
    with pytest.raises(ConfigError, match="another machine or network namespace"):
        await UnixReach().dial("other.4026531840/006162")


async def test_a_payload_is_read_where_the_sender_wrote_it() -> None:
    cluster = Cluster("shm", 2)
    await cluster.start()
    cluster.ranks[0].post(1, make_parcel(1, dtype=torch.uint8))
    await cluster.receivers[1].until(lambda: cluster.receivers[1].arrivals)
    cluster.ranks[0]._peers[1].segment.payloads(DISPATCH)[0] = 211
    assert cluster.receivers[1].arrivals[0].parcel.payload[0, 0] == 211
    cluster.receivers[1].release_all()
    await cluster.close()


async def test_a_sender_without_slots_keeps_its_source_until_one_comes_back() -> None:
    cluster = Cluster("shm", 2, **ONE_SLOT)
    await cluster.start()
    receiver = cluster.receivers[1]
    sent = [make_parcel(number, 64, 64) for number in range(3)]
    posted = [cluster.ranks[0].post(1, parcel) for parcel in sent]
    assert [one.source_free for one in posted] == [True, False, False]
    for number in range(3):
        await receiver.until(lambda: receiver.arrivals)
        assert [one.source_free for one in posted] == [n <= number for n in range(3)]
        assert_same(receiver.arrivals[0].parcel, sent[number])
        receiver.release_all()
    await cluster.close()


async def test_a_large_payload_leaves_the_loop_to_others_and_combines_overtake_it() -> None:
    cluster = Cluster("shm", 2)
    reader = Reader()
    cluster.receivers[1] = reader
    await cluster.start()
    large = cluster.ranks[0].post(1, make_parcel(0, 4096, 2048))  # 32 MiB
    cluster.ranks[0].post(1, make_parcel(1, kind=COMBINE))
    await reader.until(lambda: reader.seen)
    assert list(reader.seen) == [(0, COMBINE)]
    assert not large.source_free
    await reader.until(lambda: reader.count == 2)
    await cluster.close()


async def test_slots_are_used_again_before_untouched_ones() -> None:
    cluster = Cluster("shm", 2)
    reader = Reader()
    cluster.receivers[1] = reader
    await cluster.start()
    lane = cluster.ranks[0]._peers[1].sending[DISPATCH]
    for number in range(40):
        await until_free([cluster.ranks[0].post(1, make_parcel(number))])
        await reader.until(lambda number=number: reader.count == number + 1)
        await asyncio.sleep(0)
    assert sum(generation > 0 for generation in lane.generations) <= 3
    await cluster.close()


async def test_close_waits_for_parcels_without_slots_but_not_for_a_peer_that_closes_too() -> None:
    cluster = Cluster("shm", 2, **ONE_SLOT)
    await cluster.start()
    for rank in range(2):  # neither reads what it gets
        for number in range(3):
            cluster.ranks[rank].post(1 - rank, make_parcel(number))
    first = asyncio.create_task(cluster.close(0))
    await asyncio.sleep(0.05)
    assert not first.done()
    with pytest.raises(PeerLost, match="this rank closed"):
        cluster.ranks[0].send(1, b"late")
    async with asyncio.timeout(5):
        await asyncio.gather(first, cluster.close(1))
    for receiver in cluster.receivers:
        receiver.release_all()
    assert cluster.live_leases() == 0


async def test_a_peer_that_never_gives_back_delays_close_no_longer_than_the_timeout() -> None:
    cluster = Cluster("shm", 2, peer_timeout_s=0.6, **ONE_SLOT)
    await cluster.start()
    posted = [cluster.ranks[0].post(1, make_parcel(number)) for number in range(3)]
    async with asyncio.timeout(2):
        await cluster.close(0)
    assert isinstance(posted[-1].error, PeerLost)
    cluster.receivers[1].release_all()
    await cluster.close(1)


class Forger:
    """Rank 1 of two, whose parcels are put into its segment by hand."""

    def __init__(self, cluster: Cluster) -> None:
        self.peer: ShmPeer = cluster.ranks[1]._peers[0]
        self._lane = Sender(
            self.peer.segment, self.peer.segment, DISPATCH, make_outbound(1, 7, Limits())
        )

    def put(self, change: Callable[[bytes], bytes] = lambda frame: frame, **fields: int) -> None:
        """Publish an empty parcel in slot 0 with other fields, or any other change."""
        frame, _ = self._lane._outbound.parcel(make_parcel(1))
        prelude = decode_prelude(frame[:PRELUDE_BYTES], Limits())
        prelude = prelude._replace(**{"lease": 1, "generation": 1, **fields})
        self._lane._put(change(encode_prelude(prelude) + frame[PRELUDE_BYTES:]), 0)
        self.peer.link.send([encode_signal(FrameKind.NOTICE, 1)])


FORGED: dict[str, tuple[dict[str, Any], str]] = {
    "slot 0": ({"lease": 0}, "lease is 0; allowed"),
    "no slot": ({"lease": 2**32 - 1}, "lease is 4294967295; allowed"),
    "generation": ({"generation": 2}, "generation is 2; allowed: 1"),
    "sequence": ({"sequence": 1}, "sequence is 1; allowed: 0"),
    "source": ({"source": 0}, "source is 0; allowed: 1"),
    "class": ({"parcel_class": 2, "pairs": 0, "column_bytes": 36}, "parcel_class is 2; allowed: 1"),
    "rows": ({"rows": 2**32 - 1}, "rows is"),
    "noise": ({"change": lambda frame: bytes(len(frame))}, "magic"),
    "a bit": ({"change": lambda f: bytes([*f[:40], f[40] ^ 1, *f[41:]])}, "checksum"),
    "columns": ({"change": lambda f: f[:PRELUDE_BYTES] + bytes(len(f) - PRELUDE_BYTES)}, "fanout"),
}


@pytest.mark.parametrize("what", FORGED)
@pytest.mark.usefixtures("compiled_or_plain")
async def test_a_forged_parcel_costs_the_connection_and_leaves_no_lease(what: str) -> None:
    cluster = Cluster("shm", 2)
    await cluster.start()
    fields, message = FORGED[what]
    Forger(cluster).put(**fields)
    receiver = cluster.receivers[0]
    await receiver.until(lambda: receiver.lost)
    assert "malformed frame" in str(receiver.lost[0][1])
    assert message in str(receiver.lost[0][1])
    assert receiver.arrivals == []
    assert cluster.live_leases() == 0
    await cluster.close()


@pytest.mark.usefixtures("compiled_or_plain")
async def test_a_slot_that_is_held_and_more_parcels_than_slots_cost_the_connection() -> None:
    for step, message in ((1, "which this rank holds"), (2000, "published is")):
        cluster = Cluster("shm", 2)
        await cluster.start()
        forger, receiver = Forger(cluster), cluster.receivers[0]
        forger.put()
        await receiver.until(lambda receiver=receiver: receiver.arrivals)
        forger.peer.segment.published(DISPATCH)[0] += step - 1
        forger.put(sequence=1)
        await receiver.until(lambda receiver=receiver: receiver.lost)
        assert message in str(receiver.lost[0][1])
        receiver.release_all()
        await cluster.close()
        assert cluster.live_leases() == 0


async def test_a_parcel_on_the_socket_costs_the_connection() -> None:
    cluster = Cluster("shm", 2)
    await cluster.start()
    attacker: ShmPeer = cluster.ranks[1]._peers[0]
    attacker.link.send([attacker.outbound.parcel(make_parcel(1))[0]])
    await cluster.receivers[0].until(lambda: cluster.receivers[0].lost)
    assert "a parcel on the socket" in str(cluster.receivers[0].lost[0][1])
    assert cluster.live_leases() == 0
    await cluster.close()


async def test_what_was_published_before_the_end_of_its_sender_is_handed_over() -> None:
    cluster = Cluster("shm", 2)
    await cluster.start()
    sent, receiver = [make_parcel(number) for number in range(5)], cluster.receivers[0]
    await until_free([cluster.ranks[1].post(0, parcel) for parcel in sent])
    cluster.ranks[1].abort()
    await receiver.until(lambda: receiver.lost)
    assert receiver.stages(1) == [0, 1, 2, 3, 4]
    for arrival, parcel in zip(receiver.arrivals, sent, strict=True):
        assert_same(arrival.parcel, parcel)
    receiver.release_all()
    await cluster.close()
    assert cluster.live_leases() == 0


async def test_the_compiled_lanes_and_the_plain_ones_understand_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster("shm", 2, **ONE_SLOT)
    plain = cluster.ranks[1]
    plain.leases = LeasePool()  # makes its lanes plain
    readers = [Reader(), Reader()]
    cluster.receivers = readers
    await cluster.start()
    for number in range(20):
        for rank in range(2):
            for kind in ParcelClass:
                cluster.ranks[rank].post(1 - rank, make_parcel(number, kind=kind))
    for rank, reader in enumerate(readers):
        await reader.until(lambda reader=reader: reader.count == 40)
        assert reader.seen == {(1 - rank, kind): list(range(20)) for kind in ParcelClass}
    await cluster.close()
    assert cluster.live_leases() == 0
