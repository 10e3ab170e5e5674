"""What two NIXL ranks tell each other beside their link's frames, as pure functions.

When they meet they exchange one record: where the arena lies that the other may write to, how it is
divided, and the metadata that allows it. Later, notifications travel with writes or alone. Each
begins with the generation that the two agreed on in the handshake, which nobody else knows, so one
in another rank's name is found out. All is little-endian, and checked before it is believed.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from asyncmoe.errors import ProtocolError
from asyncmoe.transport import ParcelClass

_MAGIC, _VERSION = b"aNix", 1
_RECORD = struct.Struct("<4sB4sIQQII")
RECORD_BYTES = _RECORD.size
_MOST_TEXT_BYTES = 1 << 18  # name and metadata, which grow with the network interfaces

_NOTE = struct.Struct("<2sBI")
_NOTE_MAGIC = b"aN"
_WRITTEN = struct.Struct("<BIQ")
_FREED = struct.Struct("<BII")
_CLASSES = frozenset(map(int, ParcelClass))


class Place(NamedTuple):
    """What one side says of itself when the two meet."""

    kind: str  # DRAM or VRAM
    slots: int  # of each class
    slot_bytes: int
    address: int  # of the arena: the slots of dispatch parcels, then those of combine parcels
    name: str
    metadata: bytes


class NoteKind(IntEnum):
    """What a notification is for."""

    HELLO = 1  # the way is open
    WRITTEN = 2  # so many more bytes of these parcels are in their slots
    FREED = 3  # these slots have been read for the last time
    WHOLE = 4  # everything whose control frame came before the notice is whole


class Written(NamedTuple):
    """One entry of WRITTEN."""

    kind: int  # class of the parcel
    nbytes: int
    sequence: int


class Freed(NamedTuple):
    """One entry of FREED."""

    kind: int  # class of the slots
    first: int
    generation: int


_ENTRIES: dict[int, tuple[struct.Struct, type[Written] | type[Freed]] | None] = {
    NoteKind.HELLO: None,
    NoteKind.WRITTEN: (_WRITTEN, Written),
    NoteKind.FREED: (_FREED, Freed),
    NoteKind.WHOLE: None,
}


def encode_place(place: Place) -> bytes:
    """The record and what follows it."""
    name = place.name.encode()
    head = _RECORD.pack(
        _MAGIC, _VERSION, place.kind.encode(), place.slots, place.slot_bytes, place.address,
        len(name), len(place.metadata),
    )  # fmt: skip
    return head + name + place.metadata


def decode_head(head: bytes, mine: Place) -> tuple[Place, int, int]:
    """The peer's place without texts, and their lengths. Raises `ProtocolError` unless its arena
    is as `mine`."""
    magic, version, kind, slots, slot_bytes, address, name, metadata = _RECORD.unpack(head)
    if (magic, version) != (_MAGIC, _VERSION):
        raise ProtocolError(
            f"record magic and version are {magic!r} and {version}; "
            f"allowed: {_MAGIC!r} and {_VERSION}"
        )
    stated = (kind.decode("ascii", "replace"), slots, slot_bytes)
    if stated != (mine.kind, mine.slots, mine.slot_bytes):
        raise ProtocolError(
            f"record fields kind, slots and slot_bytes are {stated}; allowed: "
            f"{(mine.kind, mine.slots, mine.slot_bytes)}, as the device and the transport options "
            "of this rank have it"
        )
    nbytes = len(ParcelClass) * slots * slot_bytes
    if not 0 < address <= (1 << 64) - nbytes:
        raise ProtocolError(f"record field address is {address}; allowed: room for {nbytes} bytes")
    if name != len(mine.name) or metadata > _MOST_TEXT_BYTES:
        raise ProtocolError(
            f"record lengths of name and metadata are {name} and {metadata}; "
            f"allowed: {len(mine.name)} and at most {_MOST_TEXT_BYTES}"
        )
    return Place(*stated, address, "", b""), name, metadata


def encode_note(
    kind: NoteKind, generation: int, entries: Sequence[Written] | Sequence[Freed] = ()
) -> bytes:
    """A notification."""
    form = _ENTRIES[kind]
    head = _NOTE.pack(_NOTE_MAGIC, kind, generation)
    if form is None:
        return head
    return head + b"".join([form[0].pack(*entry) for entry in entries])


def note_generation(note: bytes) -> int | None:
    """The generation of the pair that a notification says it is of; None if it is none of ours."""
    if len(note) < _NOTE.size or note[:2] != _NOTE_MAGIC:
        return None
    return int(_NOTE.unpack_from(note)[2])


def decode_note(note: bytes) -> tuple[int, list[Written] | list[Freed]]:
    """Kind and entries of a notification of this pair. Raises `ProtocolError`."""
    kind = note[2]
    if kind not in _ENTRIES:
        raise ProtocolError(f"notification kind is {kind}; allowed: 1 to {len(_ENTRIES)}")
    form, body = _ENTRIES[kind], note[_NOTE.size :]
    if form is None:
        if body:
            raise ProtocolError(f"notification of kind {kind} has {len(body)} bytes; allowed: 0")
        return kind, []
    record, entry = form
    if not body or len(body) % record.size:
        raise ProtocolError(
            f"notification of kind {kind} has {len(body)} bytes; allowed: {record.size} an entry"
        )
    entries = [entry._make(fields) for fields in record.iter_unpack(body)]
    for each in entries:
        if each.kind not in _CLASSES:
            raise ProtocolError(f"notification class is {each.kind}; allowed: 1 or 2")
    return kind, entries  # type: ignore[return-value] # all are of one type
