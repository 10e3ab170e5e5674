"""When the ranks of a machine march (`march.py`), agreed on by messages between their loops.

Ranks march while none of them has anything to do but decode steps whose tokens are greedy. One rank
leads: it is told by each whether it is able, and with how many rows. When all are, it calls a
march. A rank that is called keeps its decode rows back where they would enter A0, and is ready once
all of them are there; it still computes the experts of others, so that their rows get there too.
When all are ready no row is between two stages anywhere, and the leader lets them go. A march ends
for all ranks before the same step, as soon as one of them wants: a request ends there or another
begins. If they are able still they are ready for the next march at once, without a call.

A rank that becomes unable says so. If it is ready already it goes all the same, should the leader
not have heard of it in time, and ends the march where it begins. The leader cancels a march that it
has called and not begun once a rank is unable.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from enum import Enum, auto
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from asyncmoe.errors import PeerLost, ProtocolError
from asyncmoe.messages import Muster

Chunks = NDArray[np.int64]
LEADER = 0
_LOG = logging.getLogger(__name__)
_NO_CHUNKS = np.empty(0, np.int64)
_TO_LEADER = "able", "unable", "ready"


class Leader:
    """What the leading rank knows of all ranks."""

    def __init__(self, world: int, tell: Callable[[int, Muster], None]) -> None:
        self._tell = tell  # a rank, this one too
        self._rows: list[int | None] = [None] * world  # None: not able
        self._number = 0  # of the last march called
        self._called = False  # and it is neither begun nor cancelled
        self._ready: set[int] = set()

    def hear(self, source: int, message: Muster) -> None:
        """A rank is able, unable or ready."""
        match message.word:
            case "able":
                self._rows[source] = message.rows
                if not any(self._rows):
                    self._cancel()
                elif not self._called and None not in self._rows:
                    self._expect(self._number + 1)
                    self._tell_all("call")
            case "unable":
                self._rows[source] = None
                self._cancel()
            case "ready" if self._called and message.number == self._number:
                self._ready.add(source)
                if len(self._ready) == len(self._rows):
                    self._tell_all("go")
                    self._expect(self._number + 1)  # as the ranks do, see `Marches.over`

    def _cancel(self) -> None:
        if self._called:
            self._called = False
            self._tell_all("cancel")

    def _expect(self, number: int) -> None:
        self._number, self._called = number, True
        self._ready.clear()

    def _tell_all(self, word: str) -> None:
        for rank in range(len(self._rows)):
            self._tell(rank, Muster(word, self._number))


class _State(Enum):
    APART = auto()
    CALLED = auto()  # keeps rows back
    READY = auto()  # has them all, and waits for the leader
    UNDERWAY = auto()


class Decoding(Protocol):
    """What `Marches` asks of a home."""

    @property
    def running(self) -> int:
        """Requests in the layers."""

    def is_steady(self) -> bool:
        """Whether all running requests decode, and nobody has to decide anything of their next
        tokens."""

    def begin_steps(self, chunks: Chunks) -> None:
        """Decode chunks are ready for A0."""


class Marches:
    """One rank's part in the agreement."""

    STEPS_APART: Final = 1  # that a rank takes through the queues before it is able

    def __init__(
        self,
        rank: int,
        world: int,
        most_rows: int,
        home: Decoding,
        send: Callable[[int, Muster], None],
        begin: Callable[[int], None],
        leave: Callable[[int], None],
    ) -> None:
        """
        Args:
            most_rows: that a rank marches with.
            send: a message to a rank, this one too; may raise `PeerLost`.
            begin: the march of a number, with the decode chunks that `take` gives then.
            leave: that march, without having begun it.
        """
        self.count = 0  # marches begun here
        self._most_rows, self._home, self._send = most_rows, home, send
        self._begin, self._leave = begin, leave
        self._leader = Leader(world, self._tell) if rank == LEADER else None
        self._state = _State.APART
        self._number = 0  # of the march that it has been called to, or is in
        self._called = self._cancelled = 0  # the last numbers heard of
        self._kept = _NO_CHUNKS
        self._told: int | None = None  # rows of which the leader was told; None: not able
        self._steps_apart = 0  # rows that went into A0 while all was steady
        self._closed = False

    def open(self) -> None:
        """All ranks can be reached."""
        self.look()

    def close(self) -> None:
        """A rank is lost, or this one ends: there are no more marches. Idempotent."""
        if not self._closed:
            self._closed = True
            if self._told is not None:
                self._tell_leader("unable")
            self._let_go()

    # ---- what the home tells

    def enter(self, chunks: Chunks) -> None:
        """Decode chunks are ready for A0: keep them back, or let them in."""
        if self._state is _State.CALLED:
            self._kept = np.concatenate([self._kept, chunks])
            self._look_whether_ready()
            return
        self._home.begin_steps(chunks)
        if not self._closed and self._told is None:
            steady = self._home.is_steady() and self._home.running <= self._most_rows
            self._steps_apart = self._steps_apart + len(chunks) if steady else 0
            if steady and self._steps_apart >= self.STEPS_APART * self._home.running:
                self._tell_leader("able", rows=self._home.running)

    def disturb(self) -> None:
        """A request begins."""
        self._steps_apart = 0
        if self._told is not None:
            self._tell_leader("unable")
        if self._state is _State.CALLED:
            self._let_go()

    def leaves(self, chunk: int) -> None:
        """A decode chunk is about to be closed."""
        if len(self._kept):
            self._kept = self._kept[self._kept != chunk]

    def look(self) -> None:
        """Requests may have left."""
        if not self._home.running and self._told != 0 and not self._closed:
            self._tell_leader("able")
        if self._state is _State.CALLED:
            self._look_whether_ready()

    # ---- what the ranks tell

    def hear(self, source: int, message: Muster) -> None:
        """A message of the leader to this rank, or of a rank to the leader."""
        if message.word in _TO_LEADER:
            if self._leader is None:
                raise ProtocolError(f"{message.word} is for the rank that leads marches")
            self._leader.hear(source, message)
            return
        if source != LEADER:
            raise ProtocolError(f"{message.word} comes from rank {LEADER} only")
        match message.word:
            case "call":
                self._called = message.number
                if self._state is _State.APART:
                    self._follow_call()
            case "cancel":
                self._cancelled = message.number
                if self._state in (_State.CALLED, _State.READY) and self._number <= message.number:
                    self._let_go()
            case "go" if self._state is _State.READY and message.number == self._number:
                self._go()
            # A leader that loses a rank while it lets all go has cancelled the march for the rest.
            case "go" if self._closed or message.number <= self._cancelled:
                self._leave(message.number)  # the others must not wait for this rank
            case "go":
                raise ProtocolError(f"march {message.number} begins, but {self._number} is ready")

    def _go(self) -> None:
        self._state, self._called = _State.UNDERWAY, self._number + 1
        self.count += 1
        self._begin(self._number)

    def take(self) -> Chunks:
        """The decode chunks that were kept back, but for those that have left since."""
        chunks, self._kept = self._kept, _NO_CHUNKS
        return chunks

    def over(self, agreed: bool) -> None:
        """The march that this rank was in has ended; its rows enter A0 next.

        If that was not `agreed`, a rank has failed in it, or is lost. It might do so again and
        again, and nobody would get a token: there are no more marches.
        """
        self._state = _State.APART
        if not agreed and not self._closed:
            _LOG.warning("a march was broken off: decode steps go through the queues from now on")
            self.close()
        self._follow_call()

    def _follow_call(self) -> None:
        """Keep rows back if there is a call that was not cancelled, and this rank is able."""
        if self._closed or self._told is None or self._called <= max(self._number, self._cancelled):
            return
        if not self._home.is_steady():
            self.disturb()
            return
        self._state, self._number = _State.CALLED, self._called
        self._look_whether_ready()

    def _look_whether_ready(self) -> None:
        if len(self._kept) == self._home.running:
            self._state = _State.READY
            self._tell_leader("ready", self._number)

    def _let_go(self) -> None:
        """The rows that were kept back go their own way."""
        if self._state in (_State.CALLED, _State.READY):
            self._state = _State.APART
        chunks = self.take()
        if len(chunks):
            self._home.begin_steps(chunks)

    def _tell_leader(self, word: str, number: int = 0, rows: int = 0) -> None:
        if word == "able":
            self._told = rows
        elif word == "unable":
            self._told = None
        self._tell(LEADER, Muster(word, number, rows))

    def _tell(self, rank: int, message: Muster) -> None:
        try:
            self._send(rank, message)
        except PeerLost:
            self.close()
