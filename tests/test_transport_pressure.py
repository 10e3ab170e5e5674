"""What every transport promises when there is more to do than there is room for, or it fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import torch

from asyncmoe.errors import PeerLost
from asyncmoe.linked import LinkedTransport
from asyncmoe.transport import Limits, Parcel, ParcelClass
from asyncmoe.wire import PRELUDE_BYTES, FrameKind, decode_prelude, encode_message, encode_prelude
from tests.transport_kit import (
    ONE_SLOT,
    TRANSPORTS,
    Cluster,
    Reader,
    assert_same,
    make_parcel,
    until_free,
)

DISPATCH, COMBINE = ParcelClass
LINKED = sorted(name for name, kind in TRANSPORTS.items() if issubclass(kind, LinkedTransport))


@pytest.fixture(params=sorted(TRANSPORTS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def numbered(source: int, kind: ParcelClass, number: int) -> Parcel:
    """Parcel `number` of a source and class: 32 to 96 KiB."""
    parcel = make_parcel(number, rows=16 * (1 + number % 3), hidden=512, kind=kind)
    parcel.payload += source
    return parcel


@pytest.mark.parametrize(("world", "each"), [(4, 6), (8, 2)])
async def test_a_burst_of_all_to_all_at_one_slot_per_peer_arrives_whole_and_in_order(
    name: str, world: int, each: int
) -> None:
    cluster = Cluster(name, world, **ONE_SLOT.get(name, {}))
    cluster.receivers = [Reader(numbered) for _ in range(world)]
    await cluster.start()
    for number in range(each):
        for source in range(world):
            for target in {*range(world)} - {source}:
                for kind in ParcelClass:
                    cluster.ranks[source].post(target, numbered(source, kind, number))
    for reader in cluster.receivers:
        await reader.until(lambda reader=reader: reader.count == 2 * each * (world - 1))
    for rank, reader in enumerate(cluster.receivers):
        assert reader.wrong == []
        assert reader.seen == {
            (source, kind): list(range(each))
            for source in {*range(world)} - {rank}
            for kind in ParcelClass
        }
    await cluster.close()
    assert cluster.live_leases() == 0


async def test_dispatches_that_are_held_hold_up_no_combine_no_message_and_no_other_peer(
    name: str,
) -> None:
    cluster = Cluster(name, 3, **ONE_SLOT.get(name, {}))
    slow, other = Reader(numbered, hold=DISPATCH), Reader(numbered)
    cluster.receivers = [Reader(), slow, other]
    await cluster.start()
    posted = [cluster.ranks[0].post(1, numbered(0, DISPATCH, number)) for number in range(6)]
    await slow.until(lambda: slow.held)

    for number in range(4):
        cluster.ranks[0].post(1, numbered(0, COMBINE, number))
        cluster.ranks[2].post(1, numbered(2, COMBINE, number))
        cluster.ranks[0].post(2, numbered(0, DISPATCH, number))
        cluster.ranks[0].send(1, b"message")
        await slow.until(lambda end=number + 1: len(slow.seen.get((0, COMBINE), ())) == end)
        await slow.until(lambda end=number + 1: len(slow.seen.get((2, COMBINE), ())) == end)
        await slow.until(lambda end=number + 1: len(slow.messages) == end)
        await other.until(lambda end=number + 1: len(other.seen.get((0, DISPATCH), ())) == end)

    slow.release_all()
    await slow.until(lambda: len(slow.seen[0, DISPATCH]) == 6)
    await until_free(posted)
    assert slow.wrong == other.wrong == []
    await cluster.close()
    assert cluster.live_leases() == 0


async def test_parcels_between_small_ones_and_the_largest_share_their_room(name: str) -> None:
    limits = Limits(parcel_bytes=4 << 20)
    cluster = Cluster(name, 2, limits=limits)
    sizes = [1, 4 << 20, 3, 1 << 20, 0, 4 << 20, 65536, 65537, 4 << 20]

    def sized(source: int, kind: ParcelClass, number: int) -> Parcel:
        parcel = make_parcel(number, rows=1, hidden=1, dtype=torch.uint8, kind=kind)
        parcel.payload = torch.arange(sizes[number]).add_(number).to(torch.uint8)[None]
        return parcel

    reader = Reader(sized)
    cluster.receivers = [Reader(), reader]
    await cluster.start()
    posted = [cluster.ranks[0].post(1, sized(0, DISPATCH, n)) for n in range(len(sizes))]
    await reader.until(lambda: reader.count == len(sizes))
    await until_free(posted)
    assert reader.wrong == []
    assert reader.seen == {(0, DISPATCH): list(range(len(sizes)))}
    await cluster.close()


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 8, 13])
async def test_buffers_of_cancelled_transfers_are_never_written_by_them_again(
    name: str, turns: int
) -> None:
    cluster = Cluster(name, 2)
    await cluster.start()
    sent = [make_parcel(number, rows=512, hidden=1024) for number in range(6)]  # 2 MiB each
    for parcel in sent:
        cluster.ranks[0].post(1, parcel)
    for _ in range(turns):
        await asyncio.sleep(0)

    cluster.ranks[1].abort()
    leases = cluster.ranks[1].leases
    held = list(cluster.receivers[1].arrivals)
    async with asyncio.timeout(5):
        while leases.live > len(held):  # noqa: ASYNC110 - no event tells of it
            await asyncio.sleep(0.01)
    canaries = [leases.obtain(2 << 20) for _ in range(8)]
    for canary in canaries:
        canary.memory[:] = b"\xa5" * len(canary.memory)
    await cluster.receivers[0].until(lambda: cluster.receivers[0].lost)
    await asyncio.sleep(0.02)

    for canary in canaries:
        assert bytes(canary.memory) == b"\xa5" * len(canary.memory)
        canary.abandon()
        canary.quiet()
    for arrival, parcel in zip(held, sent, strict=False):  # whole, and still as they were sent
        assert arrival.parcel.stage == parcel.stage
        assert_same(arrival.parcel, parcel)
    cluster.receivers[1].release_all()
    await cluster.close()
    assert cluster.live_leases() == 0


async def test_what_waits_for_a_peer_that_is_lost_fails_and_frees_its_source(name: str) -> None:
    cluster = Cluster(name, 2, **ONE_SLOT.get(name, {}))
    await cluster.start()
    posted = [cluster.ranks[0].post(1, numbered(0, DISPATCH, number)) for number in range(4)]
    await cluster.receivers[1].until(lambda: cluster.receivers[1].arrivals)
    cluster.ranks[1].abort()
    await cluster.receivers[0].until(lambda: cluster.receivers[0].lost)
    cluster.receivers[1].release_all()  # an arrival that is held outlives the peer
    await until_free(posted)
    assert all(one.error is None or isinstance(one.error, PeerLost) for one in posted)
    assert sum(peer.outbound.unsent for peer in peers_of(cluster, 0)) == 0
    await cluster.close()
    assert cluster.live_leases() == 0


def peers_of(cluster: Cluster, rank: int) -> list[object]:
    """The connections of a linked rank."""
    transport = cluster.ranks[rank]
    return list(transport._peers.values()) if isinstance(transport, LinkedTransport) else []


# A change of one field of a valid control frame each, which its receiver must find out.
WRONG_FIELDS = {
    "kind": 77,
    "parcel_class": 3,
    "dtype": 8,
    "stage": 65535,
    "source": 1,
    "sequence": 1,
    "lease": 2**32 - 1,
    "rows": 2**32 - 1,
    "pairs": 7,
    "hidden": 9,
    "credits": 1,
    "column_bytes": 99,
    "payload_bytes": 2**62,
}
Frames = Callable[[bytes], bytes]
WRONG_BYTES: dict[str, Frames] = {
    "noise": lambda frame: bytes(range(256)) * 2,
    "a flipped bit": lambda frame: bytes([*frame[:40], frame[40] ^ 1, *frame[41:]]),
    "another version": lambda frame: bytes([*frame[:4], 99, *frame[5:]]),
    "a handshake": lambda frame: changed(frame, kind=int(FrameKind.HANDSHAKE)),
    "a message too many": lambda frame: encode_message(2, 1, 0, Limits()),
    "a message too long": lambda frame: encode_message(2, 0, 1 << 20, Limits()),
}


def changed(frame: bytes, **fields: int) -> bytes:
    """The frame with other fields and a checksum that fits them."""
    prelude = decode_prelude(frame[:PRELUDE_BYTES], Limits())
    return encode_prelude(prelude._replace(**fields)) + frame[PRELUDE_BYTES:]


@pytest.fixture(params=LINKED)
def linked(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("what", [*WRONG_FIELDS, *WRONG_BYTES])
async def test_a_malformed_frame_ends_its_senders_connection_and_nothing_else(
    linked: str, what: str
) -> None:
    cluster = Cluster(linked, 3, limits=Limits(message_bytes=1 << 16))
    await cluster.start()
    attacker = cluster.ranks[2]._peers[0]
    frame, _ = attacker.outbound.parcel(make_parcel(1))
    field = {what: WRONG_FIELDS[what]} if what in WRONG_FIELDS else None
    attacker.link.send([changed(frame, **field) if field else WRONG_BYTES[what](frame)])
    for rank, peer in ((0, 2), (2, 0)):
        receiver = cluster.receivers[rank]
        await receiver.until(lambda receiver=receiver: receiver.lost)
        assert [lost for lost, _ in receiver.lost] == [peer]
    assert "malformed frame" in str(cluster.receivers[0].lost[0][1])
    if field:
        assert what in str(cluster.receivers[0].lost[0][1])

    cluster.ranks[0].post(1, make_parcel(5))
    cluster.ranks[2].post(1, make_parcel(6))
    await cluster.receivers[1].until(lambda: len(cluster.receivers[1].arrivals) == 2)
    assert cluster.receivers[0].arrivals == cluster.receivers[1].lost == []
    cluster.receivers[1].release_all()
    await cluster.close()
    assert cluster.live_leases() == 0
