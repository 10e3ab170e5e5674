"""The barriers of one track: when a rank goes from one stage to the next, in step with all others.

A **round** is one layer of one iteration, and all ranks go through the same rounds. In a round
each home rank runs A(l) and then tells every other rank so (a *call*), with the number of rows that
it has for that rank. A rank with experts runs E(l) once every home has called and the rows are
here, and then tells every home so (an *answer*). A home goes on to A(l+1), or to H, once every rank
with experts has answered and all of its own rows are home. That is what a rank of a synchronous
engine waits for: an all-to-all ends on a rank when it has heard from all others.

Rows may come before or behind the call that announces them, in several parcels, and if they are
more than the credits, only after earlier ones have been computed. So a call gives two numbers,
counted from the start of the run: the rows there will be, and those of them that have left already.
E(l) begins when the latter are here, which needs no credit, and ends when all are.

A home without requests takes part with no rows as soon as another home has called it to a round.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncmoe.errors import ProtocolError
from asyncmoe.scheduler import Peers
from asyncmoe.stage import StageChain

_NOTICE = struct.Struct("<BHQQQ")
_MOST = 1 << 62  # so that sums of counts stay below 2^63


class Word(IntEnum):
    """What a notice says."""

    CALL = 1  # of a home: A(l) of this round is done here
    ANSWER = 2  # of a rank with experts: E(l) of this round is done here


class Notice(NamedTuple):
    """What one rank tells another."""

    word: int
    track: int
    round: int
    rows: int = 0  # CALL: for the expert stage of this round on the rank that is told, so far
    sent: int = 0  # those that had left when this was said


def encode(notice: Notice) -> bytes:
    """The notice as bytes."""
    return _NOTICE.pack(*notice)


def decode(data: bytes) -> Notice:
    """The inverse. Raises `ProtocolError` for anything else."""
    if len(data) != _NOTICE.size:
        raise ProtocolError(f"a notice of {len(data)} bytes; allowed: {_NOTICE.size}")
    notice = Notice._make(_NOTICE.unpack(data))
    if not notice.sent <= notice.rows < _MOST:
        raise ProtocolError(f"a notice of {notice.rows} rows of which {notice.sent} have left")
    return notice


class Phase(IntEnum):
    """Where a home is."""

    IDLE = 0  # between iterations
    ATTENTION = 1
    AWAY = 2  # its rows are with the experts
    HEAD = 3


class HomeSide:
    """What a rank does in a track as the home of requests."""

    def __init__(self, peers: Peers, chain: StageChain, track: int) -> None:
        self._peers, self._layers, self._track = peers, chain.layers, track
        self._first = track * chain.track_stages
        everyone = sorted({*peers.homes, *peers.experts})
        self._others = [rank for rank in everyone if rank != peers.rank]
        self._experts = set(peers.experts)
        self.round = 0
        self._layer = 0
        self._phase = Phase.HEAD if not chain.layers else Phase.IDLE
        self._called = -1  # highest round to which another home has called
        self._running = 0  # batches that are with the device
        self._joined = 0  # rows of A0 that are in this iteration and have not been taken
        self._told: dict[int, int] = {}  # rows that were announced, of ranks with rows held back
        self._unanswered: set[int] = set()

    @property
    def stage(self) -> int | None:
        """The stage that may run now."""
        if self._phase in (Phase.ATTENTION, Phase.HEAD):
            return self._first + 2 * self._layer
        return None

    def executed(self, rows: int) -> None:
        """A batch of `stage` is with the device."""
        self._running += 1
        self._joined -= rows

    def finished(self) -> None:
        """The oldest batch is through."""
        self._running -= 1

    @property
    def has_just_called(self) -> bool:
        """Whether `attend` went on by telling all others that A of this round is done."""
        return self._phase is Phase.AWAY

    def called(self, round: int) -> bool:
        """Another home has called to this round; whether that lets this one begin."""
        self._called = max(self._called, round)
        return self._phase is Phase.IDLE

    def answered(self, rank: int, round: int) -> bool:
        """A rank with experts is done with this round; whether it was the last one.

        Raises `ProtocolError`.
        """
        if round != self.round or rank not in self._unanswered:
            raise ProtocolError(f"answer to round {round}; this home is in {self.round}")
        self._unanswered.discard(rank)
        return not self._unanswered

    def lost(self, rank: int) -> None:
        """The rank is gone."""
        self._others = [other for other in self._others if other != rank]
        self._experts.discard(rank)
        self._unanswered.discard(rank)
        self._told.pop(rank, None)

    def attend(self, rows: NDArray[np.int64]) -> bool:
        """Go on if nothing is left to wait for; whether it did. `rows`: ready rows by stage."""
        match self._phase:
            case Phase.IDLE:
                return self._begin(int(rows[self._first]))
            case Phase.ATTENTION:
                waiting = rows[self._first + 2 * self._layer]
                if self._running or (waiting and (self._layer or self._joined > 0)):
                    return False
                self._phase = Phase.AWAY
                self._unanswered = set(self._experts)
                self._call()
            case Phase.AWAY:
                if self._told:
                    self._correct()
                if self._unanswered or self._peers.missing(self._expert_stage):
                    return False
                self.round += 1
                self._layer += 1
                self._phase = Phase.HEAD if self._layer == self._layers else Phase.ATTENTION
            case Phase.HEAD:
                if not self._layers or self._running or rows[self._first + 2 * self._layers]:
                    return False
                self._phase = Phase.IDLE
        return True

    def _begin(self, waiting: int) -> bool:
        """Begin an iteration with the rows that wait for one, if any home has some."""
        if not waiting and self._called < self.round:
            return False
        self._layer, self._joined, self._phase = 0, waiting, Phase.ATTENTION
        return True

    @property
    def _expert_stage(self) -> int:
        return self._first + 2 * self._layer + 1

    def _call(self) -> None:
        stage = self._expert_stage
        sent, held_back = self._peers.sent(stage).tolist(), self._peers.held_back(stage)
        for rank in self._others:
            self._tell(rank, sent[rank] + held_back.get(rank, 0), sent[rank])
        self._told = {rank: sent[rank] + rows for rank, rows in held_back.items()}

    def _correct(self) -> None:
        """Rows that were held back will never leave if their requests were cancelled: say so."""
        stage = self._expert_stage
        sent, held_back = self._peers.sent(stage), self._peers.held_back(stage)
        for rank, told in list(self._told.items()):
            rows = int(sent[rank]) + held_back.get(rank, 0)
            if rows < told:
                self._tell(rank, rows, int(sent[rank]))
                self._told[rank] = rows

    def _tell(self, rank: int, rows: int, sent: int) -> None:
        self._peers.tell(rank, encode(Notice(Word.CALL, self._track, self.round, rows, sent)))


class ExpertSide:
    """What a rank does in a track for the experts that it holds."""

    def __init__(self, peers: Peers, chain: StageChain, track: int) -> None:
        self._peers, self._layers, self._track = peers, chain.layers, track
        self._first = track * chain.track_stages
        self._homes = set(peers.homes)
        self.round = 0
        self._open = False
        self._running = 0
        self._uncalled = set(self._homes)
        world = len(peers.arrived(self._stage))
        self._rows = np.zeros(world, np.int64)  # that each home will have sent, once all are here
        self._sent = np.zeros(world, np.int64)  # that each home had sent when it called

    @property
    def stage(self) -> int | None:
        """The stage that may run now."""
        return self._stage if self._open else None

    @property
    def _stage(self) -> int:
        return self._first + 2 * (self.round % self._layers) + 1

    def executed(self, rows: int) -> None:
        """A batch of `stage` is with the device."""
        self._running += 1

    def finished(self) -> None:
        """The oldest batch is through."""
        self._running -= 1

    def called(self, home: int, round: int, rows: int = 0, sent: int = 0) -> bool:
        """A home is done with A of this round; whether all are. Raises `ProtocolError`."""
        if round != self.round or home not in self._homes:
            raise ProtocolError(
                f"call to round {round} by rank {home}; this rank is in {self.round}"
            )
        self._rows[home], self._sent[home] = rows, sent
        self._uncalled.discard(home)
        return not self._uncalled

    def lost(self, rank: int) -> None:
        """The rank is gone."""
        self._homes.discard(rank)
        self._uncalled.discard(rank)
        self._rows[rank] = self._sent[rank] = 0

    def attend(self, rows: NDArray[np.int64]) -> bool:
        """Go on if nothing is left to wait for; whether this round is over, and homes are told."""
        if self._uncalled or not self._homes:
            return False
        stage = self._stage
        arrived = self._peers.arrived(stage)
        if not self._open and bool((arrived < self._sent).any()):
            return False
        self._open = True
        if self._running or rows[stage] or bool((arrived < self._rows).any()):
            return False
        answer = encode(Notice(Word.ANSWER, self._track, self.round))
        for home in sorted(self._homes):
            if home != self._peers.rank:
                self._peers.tell(home, answer)
        self.round += 1
        self._open = False
        self._uncalled = set(self._homes)
        self._rows[:] = self._sent[:] = 0
        return True
