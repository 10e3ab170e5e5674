"""Links: nobody in without the token, no frame believed, silence found out, strangers harmless."""

from __future__ import annotations

import asyncio
import contextlib
import random
import resource
import socket
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncmoe import handshake, mesh
from asyncmoe.errors import PeerLost, ProtocolError, RankFailed, UnknownName
from asyncmoe.lease import make_pool
from asyncmoe.link import Link
from asyncmoe.transport import Arrival, Limits
from asyncmoe.transports.tcp import TcpTransport
from asyncmoe.twophase import Outbound, Transfer, make_inbound
from asyncmoe.wire import (
    PRELUDE_BYTES,
    FrameKind,
    Handshake,
    decode_prelude,
    encode_handshake,
    encode_message,
    encode_prelude,
    encode_signal,
    payload_memory,
)
from tests.transport_kit import TOKEN, Cluster, make_parcel

LIMITS = Limits()


class RawPeer:
    """Rank 2 of three, by hand: an authenticated socket to rank 0, another to rank 1."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.socks: list[socket.socket] = []
        self.generations: list[int] = []

    async def connect(self) -> None:
        """Dial both ranks and pass the handshake."""
        for peer in range(2):
            sock = await dial_address(await self.cluster.directory.lookup(f"tcp/{peer}", 10.0))
            self.socks.append(sock)
            self.generations.append(await handshake.dial(sock, 2, peer, 3, TOKEN))

    async def send(self, data: bytes, peer: int = 0) -> None:
        """Send bytes as they are."""
        await asyncio.get_running_loop().sock_sendall(self.socks[peer], data)

    async def at_end(self) -> bool:
        """Whether rank 0 has ended the connection; reads what it sent before."""
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(10):
                while await asyncio.get_running_loop().sock_recv(self.socks[0], 4096):
                    pass
        return True


async def dial_address(address: str) -> socket.socket:
    """A non-blocking socket that is connected to host:port."""
    host, _, port = address.rpartition(":")
    sock = socket.socket()
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
    return sock


@pytest.fixture
async def raw() -> AsyncIterator[RawPeer]:
    """Ranks 0 and 1 over tcp, and a third one made by hand."""
    cluster = Cluster("tcp", 3)
    peer = RawPeer(cluster)
    await asyncio.gather(cluster.start(0, 1), peer.connect())
    yield peer
    for sock in peer.socks:
        sock.close()
    await cluster.close(0, 1)
    assert cluster.live_leases() == 0


def frame(generation: int, number: int = 1) -> tuple[bytes, bytes]:
    """Control frame and payload of the first parcel of rank 2."""
    parcel = make_parcel(number)
    return Outbound(2, generation, LIMITS).parcel(parcel)[0], bytes(payload_memory(parcel.payload))


def changed(data: bytes, **fields: int) -> bytes:
    """The frame with other fields and a checksum that fits them."""
    prelude = decode_prelude(data[:PRELUDE_BYTES], LIMITS)
    return encode_prelude(prelude._replace(**fields)) + data[PRELUDE_BYTES:]


BAD: dict[str, Callable[[bytes, bytes], bytes]] = {
    "noise": lambda f, p: random.Random(1).randbytes(500),
    "checksum": lambda f, p: bytes([*f[:40], f[40] ^ 1, *f[41:]]) + p,
    "length": lambda f, p: changed(f, payload_bytes=129) + p,
    "huge": lambda f, p: changed(f, rows=2**32 - 1, payload_bytes=2**62) + p,
    "source": lambda f, p: changed(f, source=1) + p,
    "sequence": lambda f, p: changed(f, sequence=1) + p,
    "repeated": lambda f, p: f + p + f + p,
    "generation": lambda f, p: changed(f, generation=12345) + p,
    "lease": lambda f, p: changed(f, lease=1) + p,
    "columns": lambda f, p: f[:PRELUDE_BYTES] + bytes(len(f) - PRELUDE_BYTES) + p,
    "handshake": lambda f, p: encode_handshake(Handshake(0, 2, 3, bytes(32))) + bytes(16),
    "message": lambda f, p: encode_message(2, 1, 0, LIMITS),
}


@pytest.mark.parametrize("what", sorted(BAD))
async def test_a_malformed_frame_costs_its_sender_the_connection_and_nobody_else(
    raw: RawPeer, what: str
) -> None:
    ranks, receivers = raw.cluster.ranks, raw.cluster.receivers
    await raw.send(BAD[what](*frame(raw.generations[0])))
    await receivers[0].until(lambda: receivers[0].lost)
    assert "malformed frame" in str(receivers[0].lost[0][1])
    assert len(receivers[0].arrivals) == (1 if what == "repeated" else 0)
    assert await raw.at_end()
    receivers[0].release_all()
    ranks[0].post(1, make_parcel(5))
    await receivers[1].until(lambda: receivers[1].arrivals)
    receivers[1].release_all()
    assert receivers[1].lost == []


async def test_a_frame_in_single_bytes_arrives_like_any_other(raw: RawPeer) -> None:
    control, payload = frame(raw.generations[0])
    for byte in control + payload:
        await raw.send(bytes([byte]))
        await asyncio.sleep(0)
    receiver = raw.cluster.receivers[0]
    await receiver.until(lambda: receiver.arrivals)
    assert receiver.arrivals[0].parcel.payload.tolist() == make_parcel(1).payload.tolist()
    receiver.release_all()


async def test_frames_cut_anywhere_are_put_together_again(raw: RawPeer) -> None:
    out, chance = Outbound(2, raw.generations[0], LIMITS), random.Random(7)
    data = b""
    for number in range(60):
        parcel = make_parcel(number, rows=number % 3)
        data += out.parcel(parcel)[0] + bytes(payload_memory(parcel.payload))
        data += out.message(number) + bytes(number) + encode_signal(FrameKind.HEARTBEAT, 2)
    while data:
        cut = chance.randint(1, 900)
        await raw.send(data[:cut])
        await asyncio.sleep(0)
        data = data[cut:]
    receiver = raw.cluster.receivers[0]
    await receiver.until(lambda: len(receiver.messages) == 60)
    assert receiver.stages(2) == list(range(60))
    assert receiver.messages == [(2, bytes(number)) for number in range(60)]
    receiver.release_all()


async def test_a_peer_that_ends_within_a_payload_leaves_no_arrival_and_no_lease(
    raw: RawPeer,
) -> None:
    control, payload = frame(raw.generations[0])
    await raw.send(control + payload[:-1])
    raw.socks[0].close()
    receiver = raw.cluster.receivers[0]
    await receiver.until(lambda: receiver.lost)
    assert receiver.arrivals == []
    assert raw.cluster.ranks[0].leases.live == 0


async def test_a_source_is_not_free_while_any_of_it_waits_for_the_kernel(raw: RawPeer) -> None:
    big = make_parcel(0, rows=8192, hidden=512)  # 16 MiB
    posted = raw.cluster.ranks[0].post(2, big)
    await asyncio.sleep(0.05)
    assert not posted.source_free
    loop, got = asyncio.get_running_loop(), 0
    while got < big.payload.nbytes:
        got += len(await loop.sock_recv(raw.socks[0], 1 << 20))
    await asyncio.sleep(0.05)
    assert posted.source_free
    assert posted.error is None


async def test_a_silent_peer_is_lost_within_the_timeout_and_live_ones_are_kept() -> None:
    cluster = Cluster("tcp", 3, peer_timeout_s=0.5)
    peer, loop = RawPeer(cluster), asyncio.get_running_loop()
    await asyncio.gather(cluster.start(0, 1), peer.connect())
    begin_s = loop.time()
    await cluster.receivers[0].until(lambda: cluster.receivers[0].lost)
    assert loop.time() - begin_s < 1.5
    assert "silent for 0.5 s" in str(cluster.receivers[0].lost[0][1])
    await asyncio.sleep(1.0)  # twice the timeout, in which only heartbeats go between 0 and 1
    assert [[lost for lost, _ in r.lost] for r in cluster.receivers[:2]] == [[2], [2]]
    for sock in peer.socks:
        sock.close()
    await cluster.close(0, 1)


async def test_a_peer_that_does_not_read_delays_close_no_longer_than_the_timeout() -> None:
    cluster = Cluster("tcp", 3, peer_timeout_s=1.0)
    peer, loop = RawPeer(cluster), asyncio.get_running_loop()
    await asyncio.gather(cluster.start(0, 1), peer.connect())
    posted = [cluster.ranks[0].post(2, make_parcel(0, 2048, 2048)) for _ in range(4)]
    begin_s = loop.time()
    await cluster.close(0, 1)
    assert loop.time() - begin_s < 3.0
    assert isinstance(posted[-1].error, PeerLost)
    for sock in peer.socks:
        sock.close()


async def test_ranks_with_different_tokens_do_not_meet() -> None:
    cluster = Cluster("tcp", 2, start_timeout_s=0.5)
    cluster.ranks[1] = TcpTransport(cluster.context(1, 2, token=b"another", start_timeout_s=0.5))
    starts = (cluster.start(0), cluster.start(1))
    listener, dialler = await asyncio.gather(*starts, return_exceptions=True)
    assert isinstance(listener, TimeoutError)
    assert "no connection to ranks [1]" in str(listener)
    assert isinstance(dialler, RankFailed)
    assert "different cluster token" in str(dialler)
    await cluster.close()


async def test_a_listener_without_the_token_is_found_out_by_the_dialler() -> None:
    ours, theirs = socket.socketpair()
    for sock in (ours, theirs):
        sock.setblocking(False)

    async def impostor() -> None:
        loop = asyncio.get_running_loop()
        await loop.sock_recv(theirs, 48)
        await loop.sock_sendall(theirs, encode_handshake(Handshake(1, 0, 2, bytes(32))))
        await loop.sock_recv(theirs, 48)
        await loop.sock_sendall(theirs, encode_handshake(Handshake(3, 0, 2, bytes(32))))

    task = asyncio.create_task(impostor())
    with pytest.raises(ProtocolError, match="listener does not hold this cluster's token"):
        await handshake.dial(ours, 1, 0, 2, TOKEN)
    await task
    ours.close()
    theirs.close()


@pytest.mark.parametrize(
    ("rank", "peer", "world", "message"),
    [
        (1, 0, 4, "world is 4; allowed: 3"),
        (0, 0, 3, "rank is 0; allowed: 1 to 2"),
        (7, 0, 3, "rank is 7; allowed: 1 to 2"),
    ],
)
async def test_ranks_of_another_cluster_are_refused(
    rank: int, peer: int, world: int, message: str
) -> None:
    ours, theirs = socket.socketpair()
    for sock in (ours, theirs):
        sock.setblocking(False)
    dialling = asyncio.create_task(handshake.dial(theirs, rank, peer, world, TOKEN))
    with pytest.raises(ProtocolError, match=message):
        await handshake.admit(ours, 0, 3, TOKEN)
    ours.close()
    with pytest.raises(ProtocolError, match="ended the handshake"):
        await dialling
    theirs.close()


async def test_both_sides_of_a_connection_agree_on_a_generation_that_no_other_has() -> None:
    seen = set()
    for _ in range(3):
        ours, theirs = socket.socketpair()
        for sock in (ours, theirs):
            sock.setblocking(False)
        dialled, admitted = await asyncio.gather(
            handshake.dial(theirs, 1, 0, 2, TOKEN), handshake.admit(ours, 0, 2, TOKEN)
        )
        assert admitted == (1, dialled)
        seen.add(dialled)
        ours.close()
        theirs.close()
    assert len(seen) == 3


async def test_strangers_that_say_nothing_or_noise_do_not_hinder_the_start() -> None:
    cluster = Cluster("tcp", 2)
    starting = asyncio.create_task(cluster.start(0))
    address = await cluster.directory.lookup("tcp/0", 10.0)
    strangers = [await dial_address(address) for _ in range(3)]
    await asyncio.get_running_loop().sock_sendall(strangers[1], b"GET / HTTP/1.1\r\n" * 9)
    await asyncio.get_running_loop().sock_sendall(
        strangers[2], encode_handshake(Handshake(0, 1, 2, bytes(32)))
    )
    await asyncio.sleep(0.05)
    await cluster.start(1)
    await starting
    cluster.ranks[1].send(0, b"in")
    await cluster.receivers[0].until(lambda: cluster.receivers[0].messages == [(1, b"in")])
    await cluster.close()
    for sock in strangers:
        sock.close()


async def test_of_too_many_strangers_the_oldest_are_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mesh, "_SPARE_HANDSHAKES", 3)
    cluster, loop = Cluster("tcp", 2), asyncio.get_running_loop()
    starting = asyncio.create_task(cluster.start(0))
    address = await cluster.directory.lookup("tcp/0", 10.0)

    strangers = [await dial_address(address) for _ in range(8)]  # 3 more than it has room for

    async with asyncio.timeout(5):
        for sock in strangers[:3]:
            assert await loop.sock_recv(sock, 1) == b""
    await cluster.start(1)
    await starting
    await cluster.close()
    for sock in strangers:
        sock.close()


async def test_strangers_who_take_all_descriptors_do_not_end_the_start(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster = Cluster("tcp", 2)
    starting = asyncio.create_task(cluster.start(0))
    host, _, port = (await cluster.directory.lookup("tcp/0", 10.0)).rpartition(":")
    strangers = [socket.socket() for _ in range(8)]
    with few_descriptors(more=4):
        for sock in strangers:
            sock.connect((host, int(port)))
        while "cannot accept a connection" not in caplog.text and not starting.done():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await cluster.start(1)
    await starting
    await cluster.close()
    for sock in strangers:
        sock.close()


@contextlib.contextmanager
def few_descriptors(more: int) -> Iterator[None]:
    """This process may open `more` files, and then no more."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as probe:
        lowest = probe.fileno()
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + more, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


async def test_a_rank_that_only_admits_others_hears_that_one_has_failed() -> None:
    cluster = Cluster("tcp", 3)
    starting = asyncio.create_task(cluster.start(0))
    await asyncio.sleep(0)
    cluster.directory.fail(2, "no such checkpoint")
    with pytest.raises(RankFailed, match="rank 2 failed: no such checkpoint"):
        await asyncio.wait_for(starting, 5)


async def test_a_rank_that_failed_at_start_up_ends_the_start_of_the_others() -> None:
    cluster = Cluster("tcp", 2)
    starting = asyncio.create_task(cluster.start(1))
    await asyncio.sleep(0)
    cluster.directory.fail(0, "no such checkpoint")
    with pytest.raises(RankFailed, match="rank 0 failed: no such checkpoint"):
        await starting


async def test_an_unknown_option_is_named_with_the_known_ones() -> None:
    cluster = Cluster("tcp", 1)
    with pytest.raises(UnknownName, match="Did you mean 'advertise_host'"):
        TcpTransport(cluster.context(0, 1, options={"advertise": "x"}))


class _Sink:
    """A handler that takes any message and counts."""

    whole = True

    def __init__(self, limits: Limits) -> None:
        self.lost = asyncio.Event()
        self.largest = 0
        self.leases = make_pool(allocate=self._allocate)
        self.inbound = make_inbound(1, 0, limits, self.leases, self._on_parcel, self._on_message)

    def _allocate(self, size: int) -> torch.Tensor:
        self.largest = max(self.largest, size - 4096)  # of which the smallest lease is
        return torch.empty(size, dtype=torch.uint8)

    def _on_parcel(self, arrival: Arrival) -> None:
        arrival.release()

    def _on_message(self, source: int, message: bytes) -> None:
        self.largest = max(self.largest, len(message))

    def on_announced(self, transfer: Transfer) -> None:
        raise AssertionError("parcels are whole here")

    def on_notice(self) -> None:
        pass

    def on_taken(self, parcel_class: int, count: int) -> None:
        pass

    def on_leave(self) -> None:
        pass

    def on_lost(self, error: PeerLost) -> None:
        self.inbound.abandon()
        self.lost.set()


@given(st.lists(st.binary(max_size=200) | st.just(encode_message(1, 0, 9, LIMITS)), max_size=6))
@settings(max_examples=60, deadline=None)
def test_whatever_a_peer_sends_a_link_ends_orderly(pieces: list[bytes]) -> None:
    async def run() -> None:
        ours, theirs = socket.socketpair()
        limits = Limits(message_bytes=64, parcel_bytes=64)
        sink, link = _Sink(limits), Link(ours, 0, 1, limits, 5.0)
        link.open(sink)
        for piece in pieces:
            theirs.sendall(piece)
        theirs.close()
        async with asyncio.timeout(5):
            await sink.lost.wait()
        assert sink.largest <= 64
        assert ours.fileno() == -1

    asyncio.run(run())


async def test_a_reset_behind_bytes_that_arrived_is_noticed_at_once() -> None:
    cluster = Cluster("shm", 2)  # over unix sockets, which are reset by an end with unread bytes
    await cluster.start()
    loop = asyncio.get_running_loop()
    cluster.ranks[1].send(0, b"last words")
    link = cluster.ranks[1]._peers[0].link
    loop.remove_reader(link._sock)
    cluster.ranks[0].send(1, b"never read")
    begin_s = loop.time()
    cluster.ranks[1].abort()
    receiver = cluster.receivers[0]
    await receiver.until(lambda: receiver.lost)
    assert receiver.messages == [(1, b"last words")]
    assert loop.time() - begin_s < 1.0  # not by the next heartbeat but one
    await cluster.close()
