"""The compiled half of the protocol says what its twin says: of frames good, bad and torn."""

from __future__ import annotations

import random
import socket
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncmoe import native
from asyncmoe.errors import ParcelTooLarge, ProtocolError
from asyncmoe.lease import LeasePool, make_pool
from asyncmoe.packed import pack
from asyncmoe.reader import make_reader
from asyncmoe.transport import Arrival, Limits, Parcel, ParcelClass
from asyncmoe.twophase import Outbound, Transfer, make_inbound, make_outbound
from asyncmoe.wire import (
    DTYPES,
    PRELUDE_BYTES,
    Prelude,
    decode_prelude,
    encode_prelude,
    payload_memory,
)
from asyncmoe.writer import make_writer
from tests.transport_kit import make_parcel

pytestmark = pytest.mark.skipif(native.columns is None, reason="not built")
SEEDS = st.integers(0, 2**32 - 1)
LIMITS = Limits(parcel_bytes=4096, parcel_rows=64, stages=7, experts=12, hidden=4)


def judged(data: bytes, whole: bool, compiled: bool, chance: random.Random) -> list[Any]:
    """What a rank hears when these bytes come in pieces, and how it ends."""
    heard: list[Any] = []

    def on_parcel(arrival: Arrival) -> None:
        parcel = arrival.parcel
        columns = [column.tolist() for column in parcel.columns()]
        heard.append((parcel.kind, parcel.stage, parcel.credits, columns, parcel.payload.tolist()))
        arrival.release()

    def on_announced(transfer: Transfer) -> None:
        heard.append((transfer.parcel_class, transfer.sequence, bytes(transfer.columns)))
        transfer.payload[:] = bytes(transfer.payload_bytes)
        inbound.arrived(transfer)

    leases = make_pool() if compiled else LeasePool()
    inbound = make_inbound(
        3, 5, LIMITS, leases, on_parcel, lambda source, text: heard.append((source, text))
    )
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    reader = make_reader(ours, inbound, LIMITS, whole, on_announced, lambda *s: heard.append(s))
    try:
        while data:
            cut = chance.randint(1, 600)
            theirs.sendall(data[:cut])
            data = data[cut:]
            while (more := reader.read()) > 0:
                pass
            assert more == 0
    except ProtocolError as error:
        heard.append(str(error))
    for lease in inbound.abandon():
        lease.quiet()
    assert leases.live == 0
    reader.stop()
    ours.close()
    theirs.close()
    return heard


def parcel_of(rng: np.random.Generator, number: int) -> Parcel:
    rows, kind = int(rng.integers(0, 9)), ParcelClass(int(rng.integers(1, 3)))
    parcel = make_parcel(number % 7, rows, 4, torch.float32, kind, top_k=int(rng.integers(1, 4)))
    parcel.expert[:] = parcel.expert % 12
    return parcel


@given(SEEDS, st.booleans(), st.sampled_from(["nothing", "a byte", "a field", "columns"]))
@settings(max_examples=120, deadline=None)
def test_streams_of_frames_are_judged_alike_wherever_they_are_cut(
    seed: int, whole: bool, harm: str
) -> None:
    rng, out, data = np.random.default_rng(seed), Outbound(3, 5, LIMITS), b""
    harmed = int(rng.integers(0, 6))
    for number in range(6):
        parcel = parcel_of(rng, number)
        frame = bytearray(out.parcel(parcel)[0])
        if number == harmed and harm == "a byte":
            frame[rng.integers(0, PRELUDE_BYTES)] ^= int(rng.integers(1, 256))
        elif number == harmed and harm == "a field":
            name = Prelude._fields[int(rng.integers(0, 14))]
            prelude = decode_prelude(frame[:PRELUDE_BYTES], LIMITS)
            value = int(rng.integers(0, 3 if name == "kind" else 200))
            frame[:PRELUDE_BYTES] = encode_prelude(prelude._replace(**{name: value}))
        elif number == harmed and harm == "columns" and len(frame) > PRELUDE_BYTES:
            frame[rng.integers(PRELUDE_BYTES, len(frame))] = int(rng.integers(0, 256))
        data += bytes(frame) + (bytes(payload_memory(parcel.payload)) if whole else b"")
        text = bytes(int(rng.integers(0, 9)))
        data += out.message(len(text)) + text
    ours = judged(data, whole, True, random.Random(seed))
    assert ours == judged(data, whole, False, random.Random(seed + 1))
    if harm == "nothing":
        assert len(ours) == (12 if whole else 18)


def outcome(call: Callable[[], Any]) -> Any:
    """What the call returns, or the error that it raises."""
    try:
        return call()
    except (ProtocolError, ParcelTooLarge, ValueError) as error:
        return type(error), str(error)


BAD_PARCELS: dict[str, Callable[[Parcel], None]] = {
    "none": lambda p: None,
    "dtype": lambda p: setattr(p, "payload", p.payload.double()),
    "stride": lambda p: setattr(p, "payload", p.payload.t().contiguous().t()),
    "dimensions": lambda p: setattr(p, "payload", p.payload.flatten()),
    "rows": lambda p: setattr(p, "payload", p.payload[:-1]),
    "hidden": lambda p: setattr(p, "payload", torch.zeros(4, 5)),
    "large": lambda p: setattr(p, "payload", torch.zeros(4, 4096)),
    "stage": lambda p: setattr(p, "stage", 7),
    "negative": lambda p: setattr(p, "stage", -1),
    "credits": lambda p: setattr(p, "credits", 1),
    "columns": lambda p: setattr(p, "part", p.part[:-1]),
}


@pytest.mark.parametrize("what", BAD_PARCELS)
@pytest.mark.parametrize("packed", [False, True])
def test_parcels_that_cannot_be_sent_are_refused_in_the_same_words(what: str, packed: bool) -> None:
    def frame(outbound: Outbound) -> Any:
        parcel = make_parcel(1, 4, 4)
        if packed:
            parcel = pack(parcel)
        BAD_PARCELS[what](parcel)
        return outcome(lambda: outbound.parcel(parcel)[0])

    if packed and what == "columns":
        return  # they are packed before they are harmed
    ours, twin = frame(make_outbound(3, 5, LIMITS)), frame(Outbound(3, 5, LIMITS))
    assert ours == twin
    assert isinstance(ours, bytes) == (what == "none")


GOOD_PAYLOADS: dict[str, Callable[[], torch.Tensor]] = {
    **{str(dtype): lambda dtype=dtype: torch.ones(4, 4).to(dtype) for dtype in DTYPES},
    "part of another": lambda: torch.arange(32.0).view(8, 4)[2:6],
    "parameter": lambda: torch.nn.Parameter(torch.ones(4, 4)),
    "wants a gradient": lambda: torch.ones(4, 4, requires_grad=True),
    "one column of many": lambda: torch.arange(4.0).view(4, 1).expand(4, 4)[:, :1].contiguous(),
    "one row of a wide one": lambda: torch.ones(1, 9)[:, :4],
    "no rows": lambda: torch.ones(0, 4),
}


@pytest.mark.parametrize("what", GOOD_PAYLOADS)
def test_payloads_of_any_kind_are_announced_alike(what: str) -> None:
    payload = GOOD_PAYLOADS[what]()
    limits = Limits()
    parcel = make_parcel(1, len(payload), 4)
    parcel.payload = payload
    frame = make_outbound(3, 5, limits).parcel(parcel)[0]
    assert frame == Outbound(3, 5, limits).parcel(parcel)[0]


def test_a_posted_parcel_goes_out_with_the_bytes_of_its_payload() -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    parcel = make_parcel(1, 2, 4, torch.float32)
    parcel.payload = torch.arange(32.0).view(8, 4)[3:5]
    writer = make_writer(ours, lambda: None, lambda error: None)
    assert writer.post(make_outbound(3, 5, LIMITS), parcel).source_free
    sent = theirs.recv(4096)
    assert sent.endswith(parcel.payload.numpy().tobytes())
    writer.stop()
    ours.close()
    theirs.close()
