"""What one rank sends to the others: dispatch parcels as credits allow, combine parcels at once.

What `make_outboxes` gives is compiled where that is there (`native/src/columns/outboxes.cpp`); it
is used like `Outboxes`, and says the same.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from asyncmoe import native
from asyncmoe.credit import CreditWindow
from asyncmoe.errors import PeerLost
from asyncmoe.microqueue import row_key
from asyncmoe.packed import Buffer, PackedParcel
from asyncmoe.transport import Parcel, ParcelClass, Posted

_To = TypeVar("_To")


class Poster(Protocol):
    """What is needed of a transport."""

    def post(self, peer: int, parcel: Parcel) -> Posted:
        """See `Transport`."""


class Outbox:
    """Dispatch parcels for one expert rank, and the credits it gave."""

    # Below this share of the window a parcel rather waits than leaves in crumbs. Safe, since all
    # credits come back: a full window satisfies any share.
    SMALLEST_SHARE = 4

    def __init__(self, window_rows: int, parcel_rows: int) -> None:
        """`parcel_rows`: most rows of one parcel."""
        self.window = CreditWindow(window_rows)
        self.waiting: deque[Parcel] = deque()
        self._parcel_rows = parcel_rows

    def next(self) -> Parcel | None:
        """The next parcel, or the first rows of it, for which there are credits; taken."""
        if not self.waiting:
            return None
        parcel = self.waiting[0]
        wanted = parcel.rows
        least = min(wanted, max(1, self.window.window // self.SMALLEST_SHARE))
        if self.window.available < least:
            return None
        rows = self.window.take(min(wanted, self._parcel_rows))
        if rows == wanted:
            return self.waiting.popleft()
        self.waiting[0] = parcel.piece(rows, wanted)
        return parcel.piece(0, rows)

    def discard(self, slots: NDArray[np.uint32], epochs: NDArray[np.uint32]) -> None:
        """Drop waiting rows with these (slot, epoch): they would only cost credits and compute."""
        dead = row_key(slots, epochs)
        waiting, self.waiting = self.waiting, deque()
        for parcel in waiting:
            alive = np.flatnonzero(~np.isin(row_key(parcel.slot, parcel.epoch), dead))
            if len(alive):
                whole = len(alive) == parcel.rows
                self.waiting.append(parcel if whole else parcel.select(alive))


class Outboxes:
    """One for each other rank."""

    def __init__(
        self,
        rank: int,
        world: int,
        window_rows: int,
        parcel_rows: int,
        row_bytes: int,
        transport: Poster,
        sent_rows: NDArray[np.int64],
    ) -> None:
        """`parcel_rows`, `row_bytes`: most rows of a parcel, and the payload of each. `sent_rows`:
        [stages, ranks] dispatch rows that have left, to be counted."""
        self._rank, self._transport = rank, transport
        self._parcel_rows, self._row_bytes = parcel_rows, row_bytes
        self.boxes = {
            peer: Outbox(window_rows, parcel_rows) for peer in range(world) if peer != rank
        }
        self._sent_rows = sent_rows
        self.sent_parcels = 0
        self.bytes_to = [0] * world  # payload sent to each rank

    @property
    def waiting_rows(self) -> int:
        """Dispatch rows that wait for credits."""
        return sum(p.rows for box in self.boxes.values() for p in box.waiting)

    @property
    def outstanding_rows(self) -> int:
        """Dispatch rows whose credits are with expert ranks."""
        return sum(box.window.outstanding for box in self.boxes.values())

    def held_back(self, stage: int) -> dict[int, int]:
        """Dispatch rows for `stage` that wait for credits, by rank."""
        found: dict[int, int] = {}
        for peer, box in self.boxes.items():
            rows = sum(parcel.rows for parcel in box.waiting if parcel.stage == stage)
            if rows:
                found[peer] = rows
        return found

    def send(self, parcels: list[tuple[int, PackedParcel]]) -> Parcel | None:
        """Send dispatch parcels, each with its rank, in ascending order of these.

        Returns the one for this very rank, which never touches the transport.
        """
        local = None
        for to, parcel in in_turn(self._rank, parcels, itemgetter(0)):
            if to == self._rank:
                local = parcel
            elif to in self.boxes:  # else it is lost
                self.boxes[to].waiting.append(parcel)
                self._flush(to)
        return local

    def answer(
        self, stage: int, back: list[tuple[int, int, int, Buffer]], out: torch.Tensor
    ) -> list[Parcel]:
        """Send the output rows of an expert batch home, with the credits of their input rows.

        Args:
            back: per home its rank, output rows, input rows and columns (see `ExpertColumns`).
            out: [output rows, hidden], those of one home next to each other.

        Returns the parcels of rows whose home is this rank.
        """
        local: list[Parcel] = []
        payloads = torch.split(out, [rows for _, rows, _, _ in back])
        for (home, rows, credits, block), payload in in_turn(
            self._rank, list(zip(back, payloads, strict=True)), lambda each: each[0][0]
        ):
            parcel = PackedParcel(ParcelClass.COMBINE, stage, rows, 0, block, payload, credits)
            if home == self._rank:
                local.append(parcel)
            else:
                self._post_pieces(home, parcel)
        return local

    def credit(self, peer: int, rows: int) -> None:
        """`peer` gave back `rows` credits. Raises `ProtocolError` if it had fewer outstanding."""
        if rows:
            self.boxes[peer].window.give_back(rows)
            self._flush(peer)

    def discard(self, slots: NDArray[np.uint32], epochs: NDArray[np.uint32]) -> None:
        """These rows are dead: send none of those that still wait."""
        for peer, outbox in self.boxes.items():
            if outbox.waiting:
                outbox.discard(slots, epochs)
                self._flush(peer)

    def forget(self, peer: int) -> None:
        """The peer is lost: drop what waits for it, its credits, and all that is to come."""
        self.boxes.pop(peer, None)

    def _flush(self, peer: int) -> None:
        outbox = self.boxes[peer]
        while (parcel := outbox.next()) is not None:
            self._sent_rows[parcel.stage, peer] += parcel.rows
            self._post(peer, parcel)

    def _post_pieces(self, home: int, parcel: Parcel) -> None:
        if parcel.rows <= self._parcel_rows:
            self._post(home, parcel)
            return
        for first in range(0, parcel.rows, self._parcel_rows):
            last = min(first + self._parcel_rows, parcel.rows)
            self._post(home, parcel.piece(first, last))

    def _post(self, peer: int, parcel: Parcel) -> None:
        try:
            self._transport.post(peer, parcel)
        except PeerLost:
            return  # whoever depends on it is told by `on_peer_lost`
        self.sent_parcels += 1
        self.bytes_to[peer] += parcel.rows * self._row_bytes


def make_outboxes(
    rank: int,
    world: int,
    window_rows: int,
    parcel_rows: int,
    row_bytes: int,
    transport: Poster,
    sent_rows: NDArray[np.int64],
) -> Outboxes:
    """As `Outboxes`, compiled if that is there."""
    kind = Outboxes if native.columns is None else native.columns.Outboxes
    made: Outboxes = kind(rank, world, window_rows, parcel_rows, row_bytes, transport, sent_rows)
    return made


def in_turn(rank: int, sendings: Sequence[_To], to: Callable[[_To], int]) -> list[_To]:
    """Sendings `to` ranks in ascending order, those to ranks above `rank` first.

    Ranks that are done at the same time would otherwise all send to rank 0 first, which can take in
    no more than its link does while those of the others are idle.
    """
    above = bisect_right(sendings, rank, key=to)
    return [*sendings[above:], *sendings[:above]]
