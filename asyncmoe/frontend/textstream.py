"""Text from tokens as they come: whole characters only, and nothing beyond a stop string.

A token's text depends on its neighbours: a character may be spread over tokens, and decoders strip
or join spaces. So each new token is decoded together with a short window of those before it, and
what the window's text has grown by is new. The window is cut where the rest decodes to the end of
the same text, which bounds the cost of a token whatever the length of the answer. Tokens of a
byte-level vocabulary need no window: their bytes are decoded as they come.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Final, Protocol

from asyncmoe.sampling import SamplingParams

_KEEP: Final = 6  # tokens that give the next one its context
_CUT: Final = 16  # a window of this many tokens is cut, if there is a clean place to cut it
_FORCE: Final = 64  # a window of this many is cut in any case
_BROKEN: Final = "\ufffd"  # what decoders make of bytes that are no character (yet)
_BROKEN_TAIL: Final = 3  # most of these that later bytes can still turn into a character


class Decoder(Protocol):
    """What is needed of a tokenizer."""

    @property
    def special_ids(self) -> AbstractSet[int]:
        """Tokens that have no text."""
        ...

    @property
    def bytes_of(self) -> Mapping[int, bytes] | None:
        """What each token adds to the bytes of a text, if it is the same in every text."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`."""
        ...


class Detokenizer:
    """Turns one request's tokens into pieces of text that join to the text of all of them."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._window: list[int] = []
        self._text = ""  # of the window
        self._sent = 0  # characters of it that are out

    def push(self, token: int) -> str:
        """The text that is certain now; the rest of a character comes with its last token."""
        if token in self._decoder.special_ids:
            return ""
        self._window.append(token)
        self._text = self._decoder.decode(self._window)
        forced = len(self._window) >= _FORCE
        broken = len(self._text) - len(self._text.rstrip(_BROKEN))
        piece = self._send_up_to(
            len(self._text) - (min(broken, _BROKEN_TAIL) if forced else broken)
        )
        if len(self._window) >= _CUT:
            self._cut(forced)
        return piece

    def flush(self) -> str:
        """What was held back, as it is, since no more tokens come."""
        return self._send_up_to(len(self._text))

    def _send_up_to(self, end: int) -> str:
        piece = self._text[self._sent : end]
        self._sent = max(self._sent, end)
        return piece

    def _cut(self, forced: bool) -> None:
        """Drop old tokens, not from within a character, lest its rest spoils what follows."""
        for keep in range(_KEEP, _KEEP + 4):
            window = self._window[-keep:]
            text = self._decoder.decode(window)
            if text and self._text.endswith(text) and not text.startswith(_BROKEN):
                break
        else:
            if not forced:
                return
            window = self._window[-_CUT:]
            text = self._decoder.decode(window)
        unsent = len(self._text) - self._sent
        self._window, self._text, self._sent = window, text, max(0, len(text) - unsent)


class ByteDetokenizer:
    """`Detokenizer` for tokens that each stand for their own bytes."""

    def __init__(self, bytes_of: Mapping[int, bytes]) -> None:
        self._bytes_of = bytes_of
        self._begun = b""  # the first bytes of a character

    def push(self, token: int) -> str:
        """See `Detokenizer`."""
        data = self._begun + self._bytes_of[token]
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._begun = data[used:]
        return text

    def flush(self) -> str:
        """See `Detokenizer`."""
        begun, self._begun = self._begun, b""
        return begun.decode(errors="replace")


class StopMatcher:
    """Finds the first stop string to be completed, wherever the text is split.

    Of several completed by the same character the longest counts. Text that may be the beginning
    of a stop string is held back. Each character costs a bounded time: the search is Knuth, Morris
    and Pratt's, and nothing is looked at twice.
    """

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        """`include` keeps the stop string in the text."""
        self.matched: str | None = None
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._include = include
        self._borders = [_borders(stop) for stop in self._stops]
        self._matching = [0] * len(self._stops)  # characters of each that the text ends with
        self._first = {stop[0] for stop in self._stops}
        self._held = ""

    def push(self, text: str, armed: bool = True) -> str:
        """The text that is certain now; `matched` is set if a stop string is complete.

        A stop string that is completed while not `armed` is text like any other. After a match
        nothing comes any more.
        """
        if self.matched is not None:
            return ""
        if not self._held and self._first.isdisjoint(text):
            return text
        pending = self._held + text
        for end, char in enumerate(text, len(self._held) + 1):
            stop = self._step(char)
            if stop is not None and armed:
                self.matched, self._held = stop, ""
                return pending[: end if self._include else end - len(stop)]
        certain = len(pending) - max(self._matching)
        self._held = pending[certain:]
        return pending[:certain]

    def flush(self) -> str:
        """What was held back, since no more text comes."""
        held, self._held = self._held, ""
        return held

    def _step(self, char: str) -> str | None:
        """Advance all stop strings by a character; the longest that it completes."""
        completed = None
        for i, stop in enumerate(self._stops):
            length = self._matching[i]
            while length and stop[length] != char:
                length = self._borders[i][length - 1]
            length += stop[length] == char
            if length == len(stop):
                completed = completed or stop
                length = self._borders[i][-1]
            self._matching[i] = length
        return completed


class TextStream:
    """The text of one request's answer: detokenised, and ended by its stop strings."""

    def __init__(self, decoder: Decoder, params: SamplingParams) -> None:
        self._detokenizer: Detokenizer | ByteDetokenizer = (
            Detokenizer(decoder) if decoder.bytes_of is None else ByteDetokenizer(decoder.bytes_of)
        )
        self._has_stops = bool(params.stop)
        self._matcher = StopMatcher(params.stop, params.include_stop_str_in_output)
        self._min_tokens = params.min_tokens
        self._tokens = 0

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._matcher.matched

    def push(self, tokens: Sequence[int]) -> str:
        """Take tokens in and return the text that is certain now; "" for all after a stop.

        A stop string counts once more than `min_tokens` tokens have come. A token that ended the
        request (EOS, a stop token) has no text: leave it out.
        """
        if not self._has_stops:
            return "".join(map(self._detokenizer.push, tokens))
        pieces: list[str] = []
        for token in tokens:
            if self.stopped is not None:
                break
            self._tokens += 1
            text = self._detokenizer.push(token)
            pieces.append(self._matcher.push(text, self._armed))
        return "".join(pieces)

    def finish(self) -> str:
        """The rest of the text, since no more tokens come."""
        rest = self._matcher.push(self._detokenizer.flush(), self._armed)
        return rest + self._matcher.flush()

    @property
    def _armed(self) -> bool:
        return self._tokens > self._min_tokens


def _borders(stop: str) -> list[int]:
    """For each prefix of `stop` the length of its longest proper prefix that it also ends with."""
    borders = [0] * len(stop)
    length = 0
    for i in range(1, len(stop)):
        while length and stop[length] != stop[i]:
            length = borders[length - 1]
        length += stop[length] == stop[i]
        borders[i] = length
    return borders
