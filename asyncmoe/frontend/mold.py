"""The JSON of a stream's usual entries, cut once and filled in for every token.

Nearly every entry of an answer differs from the one before in its text and its token ids only. So
one is made with marks in their places, and cut there; the rest of it is not made again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import orjson

from asyncmoe.frontend.output import RequestOutput, Transcript

_TEXT: Final = "\0"
_IDS: Final = [-1]


class Mold:
    """Entries of one choice that say nothing but text and token ids."""

    def __init__(self, news: Callable[[RequestOutput], dict[str, Any]]) -> None:
        """`news` makes the entry of any item (`Choice.news`)."""
        self._spoken = _parts(news, _TEXT)
        self._silent = _parts(news, "")  # whose text is not empty but left out, for some choices
        self._has_ids = orjson.dumps(_IDS) in orjson.dumps(news(_item("")))

    def entry(self, text: str, token_ids: list[int]) -> bytes:
        """The JSON of an item that has these, and no more."""
        ids = orjson.dumps(token_ids) if self._has_ids else b""
        if text:
            before, between, behind = self._spoken
            return b"%b%b%b%b%b" % (before, orjson.dumps(text), between, ids, behind)
        before, between, behind = self._silent
        return b"%b%b%b%b" % (before, between, ids, behind)


def _parts(
    news: Callable[[RequestOutput], dict[str, Any]], text: str
) -> tuple[bytes, bytes, bytes]:
    """The entry before, between and behind text and ids; where it has no text it begins between."""
    entry = orjson.dumps(news(_item(text)))
    before, _, rest = entry.partition(orjson.dumps(text)) if text else (b"", b"", entry)
    between, _, behind = rest.partition(orjson.dumps(_IDS))
    return before, between, behind


def _item(text: str) -> RequestOutput:
    return RequestOutput(
        delta=text,
        new_token_ids=_IDS,
        logprobs=None,
        finish_reason=None,
        stop_reason=None,
        transcript=Transcript("", [], 0.0),
        tokens_so_far=1,
        pieces_so_far=1,
    )
