"""The bytes of tokens that are only a part of a character, from how vocabularies spell them.

A byte-level vocabulary has one printable character for each byte: those of Latin-1 that can be seen
stand for themselves, U+0100 onwards for the others in turn. A vocabulary with byte fallback spells
a byte as `<0xE6>`.
"""

from __future__ import annotations

import re
from typing import Final

BROKEN: Final = "\ufffd"  # what decoders make of bytes that are no character

_FALLBACK: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def spelled_bytes(token: str) -> bytes | None:
    """The bytes of a token that decodes to U+FFFD, from its spelling; None if it tells nothing."""
    if fallback := _FALLBACK.fullmatch(token):
        return bytes.fromhex(fallback[1])
    if token and all(char in _BYTE_OF for char in token):
        return bytes(_BYTE_OF[char] for char in token)
    return token.encode() if BROKEN in token else None


def byte_level_bytes(token: str) -> bytes:
    """The bytes of a token of a byte-level vocabulary, as its decoder reads them: an added token is
    spelled as it is, unless it could be bytes."""
    try:
        return bytes(map(_BYTE_OF.__getitem__, token))
    except KeyError:
        return token.encode()


def _alphabet() -> dict[str, int]:
    seen = {*range(0x21, 0x7F), *range(0xA1, 0x100)} - {0xAD}
    hidden = [byte for byte in range(256) if byte not in seen]
    shown = {chr(byte): byte for byte in seen}
    return shown | {chr(0x100 + place): byte for place, byte in enumerate(hidden)}


_BYTE_OF: Final = _alphabet()
