"""Frames as pure functions: what stands on the wire, byte by byte, and what of it is allowed.

A frame is a fixed prelude of 64 bytes, then its columns, then its payload, all little-endian. The
prelude ends in a checksum over itself, so that a torn or flipped one is never believed. Columns
stand in the order slot u32, epoch u32, weight f32, expert u16, fanout u8, part u8, the widest
first, so that each begins aligned. Every field is checked against `Limits` before anything is
allocated for it; a frame that fails raises `ProtocolError` naming field, value and what is allowed.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple, NoReturn
from zlib import crc32

import numpy as np
import torch

from asyncmoe import native
from asyncmoe.errors import ParcelTooLarge, ProtocolError
from asyncmoe.packed import Buffer, PackedParcel, column_bytes, pack
from asyncmoe.transport import Limits, Parcel, ParcelClass

MAGIC = b"aMoE"
VERSION = 1
_HEAD = struct.Struct("<4sBBBBIIQIIIIIIIQ")
_CHECKSUM = struct.Struct("<I")
PRELUDE_BYTES = _HEAD.size + _CHECKSUM.size
_HANDSHAKE = struct.Struct("<4sBBBxII32s")
HANDSHAKE_BYTES = _HANDSHAKE.size

DTYPES: tuple[torch.dtype, ...] = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
)
_CODES = {dtype: code for code, dtype in enumerate(DTYPES, start=1)}
_ITEMSIZE = (0, *(dtype.itemsize for dtype in DTYPES))
_CONTROL_CLASS = 0  # the class of frames that are not parcels
_MOST_FANOUT = 255  # `fanout` is a u8
_MOST_EXPERT = 65535  # `expert` is a u16


class FrameKind(IntEnum):
    """What a frame is for."""

    PARCEL = 1
    MESSAGE = 2
    HEARTBEAT = 3
    GOODBYE = 4
    HANDSHAKE = 5
    NOTICE = 6
    TAKEN = 7


# Plain ints for the hot path: looking up an enum's member costs as much as reading a field.
_PARCEL, _MESSAGE = int(FrameKind.PARCEL), int(FrameKind.MESSAGE)
_TAKEN = int(FrameKind.TAKEN)
_SIGNALS = frozenset(map(int, (FrameKind.HEARTBEAT, FrameKind.GOODBYE, FrameKind.NOTICE)))
_DISPATCH, _COMBINE = int(ParcelClass.DISPATCH), int(ParcelClass.COMBINE)


class Prelude(NamedTuple):
    """The fixed head of a frame. Fields that a kind has no use for are 0.

    `lease` and `generation` name the buffer that the payload goes to: on transports whose sender
    writes into the receiver's slots, that slot and its generation; elsewhere lease 0 and the
    generation of the connection, which the handshake agreed on.
    """

    kind: int
    parcel_class: int
    dtype: int  # 1 + index in DTYPES
    stage: int
    source: int  # rank of the sender
    sequence: int  # counts the frames of one (sender, receiver, class) from 0
    lease: int
    generation: int
    rows: int
    pairs: int
    hidden: int
    credits: int
    column_bytes: int
    payload_bytes: int


class Handshake(NamedTuple):
    """One record of the handshake; see `handshake.py` for its four steps."""

    step: int
    rank: int
    world: int
    secret: bytes  # 32 bytes: a nonce or a proof


def encode_parcel(
    parcel: Parcel, limits: Limits, *, source: int, sequence: int, lease: int, generation: int
) -> bytes:
    """Prelude and columns of `parcel` in one piece; the payload is not read.

    Raises `ParcelTooLarge`, `ProtocolError` for what the limits do not allow, and `ValueError`
    for a payload or a column that is not what `Parcel` says it is.
    """
    payload = parcel.payload
    code = _CODES.get(payload.dtype)
    if code is None or payload.dim() != 2 or not payload.is_contiguous():
        raise ValueError(f"payload {payload.dtype} {tuple(payload.shape)} is not contiguous rows")
    count, hidden = payload.shape
    payload_bytes = count * hidden * _ITEMSIZE[code]
    if payload_bytes > limits.parcel_bytes:
        raise ParcelTooLarge(payload_bytes, limits.parcel_bytes)
    packed = pack(parcel)
    rows = packed.count
    fields = (
        _PARCEL, int(parcel.kind), code, parcel.stage, source, sequence, lease, generation,
        rows, packed.pairs, hidden, parcel.credits, len(packed.block), payload_bytes,
    )  # fmt: skip
    prelude = Prelude._make(fields)
    _check_parcel(prelude, limits)
    if rows != count:
        raise ValueError(f"{rows} rows of columns do not fit a payload of {count} empty rows")
    return encode_prelude(prelude) + packed.block


def encode_message(source: int, sequence: int, length: int, limits: Limits) -> bytes:
    """Prelude of a control message of `length` bytes. Raises `ProtocolError` if it is too long."""
    prelude = _control(_MESSAGE, source, sequence, length)
    _check_control(prelude, limits)
    return encode_prelude(prelude)


def encode_signal(kind: FrameKind, source: int) -> bytes:
    """A frame without a body: HEARTBEAT, GOODBYE or NOTICE."""
    return encode_prelude(_control(kind, source, 0, 0))


def encode_taken(source: int, parcel_class: int, count: int) -> bytes:
    """A frame without a body: the receiver has `count` more parcels of a class whole."""
    empty = _control(_TAKEN, source, 0, 0)
    return encode_prelude(empty._replace(parcel_class=parcel_class, rows=count))


def _control(kind: int, source: int, sequence: int, length: int) -> Prelude:
    return Prelude(kind, _CONTROL_CLASS, 0, 0, source, sequence, 0, 0, 0, 0, 0, 0, 0, length)


def encode_prelude(prelude: Prelude) -> bytes:
    """The prelude as bytes, unchecked."""
    head = _HEAD.pack(MAGIC, VERSION, *prelude)
    return head + _CHECKSUM.pack(crc32(head))


def readdress(frame: bytes, lease: int, generation: int) -> bytes:
    """A parcel's frame with another buffer to go to."""
    _, _, *fields = _HEAD.unpack_from(frame)
    prelude = Prelude._make(fields)._replace(lease=lease, generation=generation)
    return encode_prelude(prelude) + frame[PRELUDE_BYTES:]


def decode_prelude(data: Buffer, limits: Limits) -> Prelude:
    """Read and check a prelude. Raises `ProtocolError`; allocates nothing that `data` asks for."""
    if len(data) != PRELUDE_BYTES:
        _refuse("prelude length", len(data), f"{PRELUDE_BYTES} bytes")
    magic, version, *fields = _HEAD.unpack_from(data)
    _check_version(magic, version)
    (stated,) = _CHECKSUM.unpack_from(data, _HEAD.size)
    if stated != crc32(memoryview(data)[: _HEAD.size]):
        _refuse("checksum", stated, "the checksum of the prelude")
    prelude = Prelude._make(fields)
    if prelude.kind == _PARCEL:
        _check_parcel(prelude, limits)
    elif prelude.kind == _TAKEN:
        _check_taken(prelude)
    else:
        _check_control(prelude, limits)
    return prelude


def decode_parcel(
    prelude: Prelude, columns: Buffer, payload: torch.Tensor, limits: Limits
) -> Parcel:
    """The parcel of a checked prelude. Its columns are views of `columns`, which it keeps.

    Raises `ProtocolError` when the columns contradict the prelude or each other.
    """
    kind = ParcelClass.COMBINE if prelude.parcel_class == _COMBINE else ParcelClass.DISPATCH
    parcel = PackedParcel(
        kind, prelude.stage, prelude.rows, prelude.pairs, columns, payload, prelude.credits
    )
    check_parcel(parcel, prelude.column_bytes, limits)
    return parcel


def check_parcel(parcel: PackedParcel, column_bytes: int, limits: Limits) -> None:
    """Raise `ProtocolError` when the columns are not so long, or contradict each other."""
    if len(parcel.block) != column_bytes:
        _refuse("columns", len(parcel.block), f"{column_bytes} bytes")
    if parcel.kind is ParcelClass.COMBINE or not parcel.count:
        return
    total = int(np.add.reduce(parcel.fanout, dtype=np.int64))
    if total != parcel.pairs:
        _refuse("fanout", f"{total} in total", f"{parcel.pairs} pairs")
    if b"\0" in parcel.fanout.tobytes():
        _refuse("fanout", 0, "at least one expert a row")
    highest = int(parcel.expert.max())
    if limits.experts <= _MOST_EXPERT and highest >= limits.experts:
        _refuse("expert", highest, f"below limits.experts = {limits.experts}")


def payload_memory(payload: torch.Tensor) -> memoryview:
    """The bytes of a contiguous host tensor, without a copy; the view keeps the tensor alive."""
    if native.columns is not None:
        if not (payload.is_cpu and payload.is_contiguous()):
            raise ValueError("a payload that is not contiguous host memory")
        view: memoryview = native.columns.memory(payload, payload.data_ptr(), payload.nbytes)
        return view
    if payload.numel() and payload.stride(-1) == 1:
        return payload.view(torch.uint8).numpy().data.cast("B")
    # A dimension of size 0 or 1 may have a stride that cannot be viewed as bytes, a flat one not.
    return payload.flatten().view(torch.uint8).numpy().data


def encode_handshake(record: Handshake) -> bytes:
    """One handshake record as bytes."""
    return _HANDSHAKE.pack(MAGIC, VERSION, FrameKind.HANDSHAKE, *record)


def decode_handshake(data: Buffer, step: int) -> Handshake:
    """Read the record of `step`. Raises `ProtocolError` for anything else."""
    if len(data) != HANDSHAKE_BYTES:
        _refuse("handshake length", len(data), f"{HANDSHAKE_BYTES} bytes")
    magic, version, kind, *fields = _HANDSHAKE.unpack(data)
    _check_version(magic, version)
    record = Handshake._make(fields)
    if kind != FrameKind.HANDSHAKE:
        _refuse("kind", kind, f"{FrameKind.HANDSHAKE:d} (handshake)")
    if record.step != step:
        _refuse("handshake step", record.step, str(step))
    return record


def _check_version(magic: bytes, version: int) -> None:
    if magic != MAGIC:
        _refuse("magic", magic, repr(MAGIC))
    if version != VERSION:
        _refuse("version", version, str(VERSION))


def _check_control(prelude: Prelude, limits: Limits) -> None:
    """A frame that is not a parcel: everything that its kind has no use for is 0."""
    kind, sequence, length = prelude.kind, prelude.sequence, prelude.payload_bytes
    if kind != _MESSAGE:
        if kind not in _SIGNALS:
            _refuse("kind", kind, "parcel, message, heartbeat, goodbye or notice")
        if sequence or length:
            _refuse("sequence, payload_bytes", (sequence, length), "0 in a frame without a body")
    if length > limits.message_bytes:
        _refuse("payload_bytes", length, f"at most limits.message_bytes = {limits.message_bytes}")
    if prelude != _control(kind, prelude.source, sequence, length):
        _refuse("prelude", prelude, "0 in the fields of a parcel")


def _check_taken(p: Prelude) -> None:
    if p.parcel_class != _DISPATCH and p.parcel_class != _COMBINE:
        _refuse("parcel_class", p.parcel_class, "1 (dispatch) or 2 (combine)")
    if not p.rows:
        _refuse("rows", p.rows, "the number of parcels that were taken")
    if p != _control(_TAKEN, p.source, 0, 0)._replace(parcel_class=p.parcel_class, rows=p.rows):
        _refuse("prelude", p, "0 in the fields of a parcel")


def _check_parcel(p: Prelude, limits: Limits) -> None:
    if p.parcel_class != _DISPATCH and p.parcel_class != _COMBINE:
        _refuse("parcel_class", p.parcel_class, "1 (dispatch) or 2 (combine)")
    if not 0 <= p.stage < limits.stages:
        _refuse("stage", p.stage, f"below limits.stages = {limits.stages}")
    if not 1 <= p.dtype <= len(DTYPES):
        _refuse("dtype", p.dtype, f"1 to {len(DTYPES)}")
    if p.rows > limits.parcel_rows:
        _refuse("rows", p.rows, f"at most limits.parcel_rows = {limits.parcel_rows}")
    if limits.hidden is not None and p.hidden != limits.hidden:
        _refuse("hidden", p.hidden, f"limits.hidden = {limits.hidden}")
    if p.payload_bytes > limits.parcel_bytes:
        _refuse("payload_bytes", p.payload_bytes, f"limits.parcel_bytes = {limits.parcel_bytes}")
    if p.hidden * _ITEMSIZE[p.dtype] > limits.parcel_bytes:  # bounds it in a parcel without rows
        _refuse("hidden", p.hidden, f"a row within limits.parcel_bytes = {limits.parcel_bytes}")
    if p.payload_bytes != p.rows * p.hidden * _ITEMSIZE[p.dtype]:
        _refuse("payload_bytes", p.payload_bytes, "rows * hidden * item size")
    if p.parcel_class == _DISPATCH:
        if not p.rows <= p.pairs <= _MOST_FANOUT * p.rows:
            _refuse("pairs", p.pairs, f"{p.rows} to {_MOST_FANOUT * p.rows} for {p.rows} rows")
        if p.credits:
            _refuse("credits", p.credits, "0 in a dispatch")
    elif p.pairs:
        _refuse("pairs", p.pairs, "0 in a combine")
    if not 0 <= p.credits <= limits.parcel_rows:
        _refuse("credits", p.credits, f"at most limits.parcel_rows = {limits.parcel_rows}")
    if p.column_bytes != column_bytes(p.parcel_class, p.rows, p.pairs):
        _refuse("column_bytes", p.column_bytes, "the length that rows and pairs give")
    if p.column_bytes > limits.parcel_bytes:
        _refuse("column_bytes", p.column_bytes, f"limits.parcel_bytes = {limits.parcel_bytes}")


def _refuse(field: str, value: object, allowed: str) -> NoReturn:
    raise ProtocolError(f"frame field {field} is {value!r}; allowed: {allowed}")
