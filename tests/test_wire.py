"""Frames: what is encoded comes back, and nothing else is believed."""

from __future__ import annotations

import struct
import tracemalloc
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncmoe.errors import ParcelTooLarge, ProtocolError
from asyncmoe.transport import Limits, Parcel, ParcelClass
from asyncmoe.wire import (
    DTYPES,
    HANDSHAKE_BYTES,
    PRELUDE_BYTES,
    FrameKind,
    Handshake,
    Prelude,
    decode_handshake,
    decode_parcel,
    decode_prelude,
    encode_handshake,
    encode_message,
    encode_parcel,
    encode_prelude,
    encode_signal,
    payload_memory,
)
from tests.transport_kit import assert_same, make_parcel

LIMITS = Limits(parcel_bytes=1 << 20, parcel_rows=512, message_bytes=4096, stages=99, experts=300)
VALID = Prelude(FrameKind.PARCEL, ParcelClass.DISPATCH, 1, 3, 0, 0, 0, 0, 4, 8, 8, 0, 92, 128)


def encode(parcel: Parcel, limits: Limits = LIMITS) -> bytes:
    """The frame of `parcel` with some numbers in the other fields."""
    return encode_parcel(parcel, limits, source=2, sequence=5, lease=7, generation=9)


def decode(frame: bytes, payload: torch.Tensor, limits: Limits = LIMITS) -> Parcel:
    """The parcel of a whole frame."""
    prelude = decode_prelude(frame[:PRELUDE_BYTES], limits)
    return decode_parcel(prelude, frame[PRELUDE_BYTES:], payload, limits)


@st.composite
def parcels(draw: st.DrawFn) -> Parcel:
    """Any parcel within the limits, with rows that visit different numbers of experts."""
    number, rows = draw(st.integers(0, 98)), draw(st.integers(0, 40))
    hidden, dtype = draw(st.integers(0, 20)), draw(st.sampled_from(DTYPES))
    parcel = make_parcel(number, rows, hidden, dtype, draw(st.sampled_from(ParcelClass)))
    if parcel.kind is ParcelClass.DISPATCH and rows:
        fanout = draw(st.lists(st.integers(1, 255), min_size=rows, max_size=rows))
        pairs = sum(fanout)
        random = np.random.default_rng(number)
        parcel.fanout = np.array(fanout, np.uint8)
        parcel.part = random.integers(0, 256, pairs, dtype=np.uint8)
        parcel.expert = random.integers(0, 300, pairs, dtype=np.uint16)
        parcel.weight = random.random(pairs, dtype=np.float32)
    return parcel


@given(parcels())
@settings(max_examples=100, deadline=None)
def test_a_parcel_comes_back_as_it_was(parcel: Parcel) -> None:
    frame = encode(parcel)
    prelude = decode_prelude(frame[:PRELUDE_BYTES], LIMITS)
    assert_same(decode(frame, parcel.payload), parcel)
    assert (prelude.source, prelude.sequence, prelude.lease, prelude.generation) == (2, 5, 7, 9)
    assert prelude.payload_bytes == len(payload_memory(parcel.payload))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_payload_memory_is_the_tensors_own(dtype: torch.dtype) -> None:
    payload = torch.zeros((3, 5), dtype=dtype)
    payload_memory(payload)[0] = 1
    assert payload.flatten()[0] != 0
    assert len(payload_memory(payload)) == 15 * dtype.itemsize


def test_a_single_column_with_an_odd_stride_is_still_one_run_of_bytes() -> None:
    payload = torch.arange(4, dtype=torch.float32).as_strided((4, 1), (1, 7))
    assert bytes(payload_memory(payload)) == np.arange(4, dtype=np.float32).tobytes()


@given(st.binary(max_size=2 * PRELUDE_BYTES))
@settings(max_examples=300, deadline=None)
def test_random_bytes_are_never_a_prelude(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_prelude(data, LIMITS)


@given(st.integers(0, 8 * PRELUDE_BYTES - 1))
@settings(max_examples=300, deadline=None)
def test_every_flipped_bit_of_a_prelude_is_found_out(bit: int) -> None:
    data = bytearray(encode_prelude(VALID))
    decode_prelude(data, LIMITS)
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ProtocolError):
        decode_prelude(data, LIMITS)


U32 = st.integers(0, 600) | st.integers(0, 2**32 - 1)
PRELUDES = st.builds(
    Prelude, st.integers(1, 5), st.integers(0, 3), st.integers(0, 8), *[U32] * 10,
    st.integers(0, 600) | st.integers(0, 2**64 - 1),
)  # fmt: skip


@given(PRELUDES)
@settings(max_examples=150, deadline=None)
def test_random_fields_are_refused_or_within_the_limits(prelude: Prelude) -> None:
    try:
        decode_prelude(encode_prelude(prelude), LIMITS)
    except ProtocolError:
        return
    assert prelude.kind != FrameKind.HANDSHAKE
    assert prelude.payload_bytes <= LIMITS.parcel_bytes
    assert prelude.column_bytes <= LIMITS.parcel_bytes


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"kind": 0}, "kind"),
        ({"kind": FrameKind.HANDSHAKE}, "kind"),
        ({"parcel_class": 3}, "parcel_class"),
        ({"dtype": 0}, "dtype"),
        ({"dtype": 8}, "dtype"),
        ({"stage": 99}, "stage is 99; allowed: below limits.stages = 99"),
        ({"rows": 513}, "rows is 513; allowed: at most limits.parcel_rows = 512"),
        ({"rows": 5}, "payload_bytes is 128; allowed: rows"),
        ({"hidden": 9}, "payload_bytes is 128; allowed: rows"),
        ({"hidden": 1 << 31, "rows": 0, "payload_bytes": 0}, "hidden"),
        ({"payload_bytes": (1 << 20) + 1}, "payload_bytes is 1048577"),
        ({"payload_bytes": 2**63}, "payload_bytes"),
        ({"pairs": 3}, "pairs is 3; allowed: 4 to 1020 for 4 rows"),
        ({"pairs": 1021}, "pairs"),
        ({"credits": 1}, "credits is 1; allowed: 0 in a dispatch"),
        ({"column_bytes": 91}, "column_bytes"),
        ({"parcel_class": 2}, "pairs is 8; allowed: 0 in a combine"),
        ({"parcel_class": 2, "pairs": 0, "column_bytes": 36, "credits": 513}, "credits is 513"),
    ],
)
def test_a_wrong_field_is_named_with_its_value_and_what_is_allowed(
    change: dict[str, Any], field: str
) -> None:
    decode_prelude(encode_prelude(VALID), LIMITS)
    with pytest.raises(ProtocolError, match=field):
        decode_prelude(encode_prelude(VALID._replace(**change)), LIMITS)


def test_a_hidden_size_that_is_fixed_is_enforced() -> None:
    with pytest.raises(ProtocolError, match=r"hidden is 8; allowed: limits.hidden = 16"):
        decode_prelude(encode_prelude(VALID), Limits(hidden=16))


def test_another_version_and_another_protocol_are_named() -> None:
    for at, field in ((4, "version is 2; allowed: 1"), (0, "magic")):
        data = bytearray(encode_prelude(VALID))
        data[at] ^= 3
        struct.pack_into("<I", data, PRELUDE_BYTES - 4, crc32(data[: PRELUDE_BYTES - 4]))
        with pytest.raises(ProtocolError, match=field):
            decode_prelude(data, LIMITS)


def _columns(**changed: Any) -> tuple[bytes, torch.Tensor]:
    """A frame whose columns contradict each other."""
    parcel = make_parcel(1, rows=4, hidden=8)
    for name, value in changed.items():
        setattr(parcel, name, value)
    return encode(parcel), parcel.payload


def test_a_fanout_that_does_not_add_up_is_refused() -> None:
    with pytest.raises(ProtocolError, match="fanout is '9 in total'; allowed: 8 pairs"):
        decode(*_columns(fanout=np.array([2, 2, 2, 3], np.uint8)))


def test_a_row_without_experts_is_refused() -> None:
    with pytest.raises(ProtocolError, match="fanout is 0; allowed: at least one expert a row"):
        decode(*_columns(fanout=np.array([2, 2, 4, 0], np.uint8)))


def test_an_expert_that_is_not_there_is_refused() -> None:
    with pytest.raises(ProtocolError, match=r"expert is 300; allowed: below limits.experts = 300"):
        decode(*_columns(expert=np.array([0, 1, 2, 3, 4, 5, 6, 300], np.uint16)))


@given(st.binary(min_size=92, max_size=92) | st.binary(max_size=200))
@settings(max_examples=200, deadline=None)
def test_random_columns_are_refused_or_consistent(columns: bytes) -> None:
    payload = torch.zeros((4, 8))
    try:
        parcel = decode_parcel(VALID, columns, payload, LIMITS)
    except ProtocolError:
        return
    assert int(parcel.fanout.sum()) == len(parcel.expert) == 8
    assert int(parcel.expert.max()) < 300


def test_a_prelude_that_asks_for_much_makes_nothing_be_allocated() -> None:
    greedy = encode_prelude(VALID._replace(rows=2**32 - 1, payload_bytes=2**63))
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            decode_prelude(greedy, Limits(parcel_rows=2**32))
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_a_parcel_that_is_not_one_is_refused_where_it_is_made() -> None:
    with pytest.raises(ParcelTooLarge, match="1048580 bytes"):
        encode(make_parcel(0, rows=1, hidden=(1 << 18) + 1))
    wrong_dtype = make_parcel(0)
    wrong_dtype.payload = wrong_dtype.payload.double()
    scattered = make_parcel(0, rows=8, hidden=8)
    scattered.payload = scattered.payload.t()
    short = make_parcel(0)
    short.epoch = short.epoch[1:]
    wide = make_parcel(0)
    wide.slot = wide.slot.astype(np.uint64)  # type: ignore[assignment]
    more = make_parcel(0)
    more.payload = torch.zeros((5, 8))
    for parcel in (wrong_dtype, scattered, short, wide):
        with pytest.raises(ValueError, match=r"not contiguous rows|do not fit"):
            encode(parcel)
    with pytest.raises(ProtocolError, match="payload_bytes is 160"):
        encode(more)


def test_columns_with_strides_are_sent_as_they_read() -> None:
    parcel = make_parcel(0)
    every_second = np.arange(8, dtype=np.uint32)[::2]
    parcel.slot = every_second
    np.testing.assert_array_equal(decode(encode(parcel), parcel.payload).slot, every_second)


def test_messages_and_signals_carry_only_what_they_need() -> None:
    message = decode_prelude(encode_message(3, 11, 4096, LIMITS), LIMITS)
    assert (message.kind, message.source, message.sequence) == (FrameKind.MESSAGE, 3, 11)
    with pytest.raises(ProtocolError, match=r"payload_bytes is 4097; allowed: at most limits"):
        encode_message(3, 11, 4097, LIMITS)
    for kind in (FrameKind.HEARTBEAT, FrameKind.GOODBYE):
        signal = decode_prelude(encode_signal(kind, 3), LIMITS)
        assert (signal.kind, signal.source) == (kind, 3)
        for change in ({"payload_bytes": 1}, {"sequence": 1}, {"rows": 1}, {"parcel_class": 1}):
            with pytest.raises(ProtocolError):
                decode_prelude(encode_prelude(signal._replace(**change)), LIMITS)


def test_a_handshake_record_comes_back_as_it_was() -> None:
    record = Handshake(2, 65534, 65535, bytes(range(32)))
    data = encode_handshake(record)
    assert len(data) == HANDSHAKE_BYTES
    assert decode_handshake(data, 2) == record


@given(st.binary(max_size=2 * HANDSHAKE_BYTES) | st.binary(min_size=48, max_size=48))
@settings(max_examples=200, deadline=None)
def test_random_bytes_are_never_a_handshake(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_handshake(data, 0)


@pytest.mark.parametrize(("at", "field"), [(0, "magic"), (4, "version"), (5, "kind"), (6, "step")])
def test_a_wrong_handshake_field_is_named(at: int, field: str) -> None:
    data = bytearray(encode_handshake(Handshake(0, 1, 2, bytes(32))))
    data[at] ^= 1
    with pytest.raises(ProtocolError, match=field):
        decode_handshake(data, 0)
