"""The dispatcher: sends rows to the experts they chose, and partial sums home.

Deadlock freedom is kept here (docs/architecture.md, "No deadlock"): a dispatch parcel leaves only
when it has credits of its expert rank, and waits in an outbox of this process until then; a
combine parcel needs none, since its rows were reserved in the home's token table when the dispatch
was posted, and is posted at once. So no combine ever stands behind a dispatch that waits.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from operator import itemgetter

import numpy as np
import torch
from numpy.typing import NDArray

from asyncmoe.credit import CreditWindow
from asyncmoe.errors import ConfigError, PeerLost
from asyncmoe.microqueue import row_key
from asyncmoe.packed import PackedParcel
from asyncmoe.placement import Placement
from asyncmoe.routing import Router
from asyncmoe.stage import StageChain
from asyncmoe.steps import AttentionResult, ExpertStep
from asyncmoe.tokentable import TokenTable
from asyncmoe.transport import Limits, Parcel, ParcelClass, Transport


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


class Dispatcher:
    """Turns results of steps into parcels of one rank."""

    def __init__(
        self,
        *,
        rank: int,
        placement: Placement,
        chain: StageChain,
        transport: Transport,
        limits: Limits,
        row_bytes: int,
        window_rows: int,
        per_expert: bool,
        to_all: bool = False,
    ) -> None:
        """`to_all`: each row goes to every rank with experts of its layer."""
        self._rank = rank
        self._transport = transport
        self.router = Router(chain, placement.owner, placement.world, per_expert, to_all)
        if limits.parcel_bytes < row_bytes:
            raise ConfigError(
                f"transport.parcel_bytes = {limits.parcel_bytes}: a row of this model takes "
                f"{row_bytes} bytes"
            )
        self._parcel_rows = min(limits.parcel_rows, limits.parcel_bytes // row_bytes)
        self._row_bytes = row_bytes
        self._outboxes = {
            peer: Outbox(window_rows, self._parcel_rows)
            for peer in range(placement.world)
            if peer != rank
        }
        # [stages, ranks] dispatch rows that have left
        self.sent_rows = np.zeros((len(chain), placement.world), np.int64)
        self.sent_parcels = 0
        self.bytes_to = [0] * placement.world  # payload sent to each rank

    @property
    def waiting_rows(self) -> int:
        """Dispatch rows that wait for credits."""
        return sum(p.rows for box in self._outboxes.values() for p in box.waiting)

    def held_back(self, stage: int) -> dict[int, int]:
        """Dispatch rows for `stage` that wait for credits, by rank."""
        found: dict[int, int] = {}
        for peer, box in self._outboxes.items():
            if box.waiting:
                rows = sum(parcel.rows for parcel in box.waiting if parcel.stage == stage)
                if rows:
                    found[peer] = rows
        return found

    @property
    def outstanding_rows(self) -> int:
        """Dispatch rows whose credits are with expert ranks."""
        return sum(box.window.outstanding for box in self._outboxes.values())

    @property
    def sent_bytes(self) -> int:
        """Payload sent to all ranks."""
        return sum(self.bytes_to)

    def dispatch(
        self,
        stage: int,
        table: TokenTable,
        slots: NDArray[np.int64],
        result: AttentionResult,
    ) -> Parcel | None:
        """Send the rows of an attention batch to their experts of `stage`.

        Returns the parcel for the experts of this very rank, which never touches the transport.
        """
        routed = result.routed
        if routed is None:  # rows were taken out behind the step
            epochs = table.epoch[slots]
            routed = self.router(
                stage, slots, epochs, result.hidden, result.experts, result.weights
            )
        table.expect(slots, stage, routed.parts)
        local = None
        for to, parcel in _in_turn(self._rank, routed.parcels):
            if to == self._rank:
                local = parcel
            elif to in self._outboxes:  # else it is lost
                self._outboxes[to].waiting.append(parcel)
                self._flush(to)
        return local

    def combine(self, step: ExpertStep, out: torch.Tensor) -> list[Parcel]:
        """Send the output rows of an expert batch home, with the credits of their input rows.

        Returns the parcels of rows whose home is this rank.
        """
        local: list[Parcel] = []
        parcels = []
        first = 0
        for home, rows, credits, block in step.back:
            payload = out if rows == out.shape[0] else out[first : first + rows]
            first += rows
            parcel = PackedParcel(ParcelClass.COMBINE, step.stage, rows, 0, block, payload, credits)
            parcels.append((home, parcel))
        for home, parcel in _in_turn(self._rank, parcels):
            if home == self._rank:
                local.append(parcel)
            elif parcel.rows <= self._parcel_rows:
                self._post(home, parcel)
            else:
                self._post_pieces(home, parcel)
        return local

    def credit(self, peer: int, rows: int) -> None:
        """`peer` gave back `rows` credits. Raises `ProtocolError` if it had fewer outstanding."""
        if rows:
            self._outboxes[peer].window.give_back(rows)
            self._flush(peer)

    def discard(self, slots: NDArray[np.uint32], epochs: NDArray[np.uint32]) -> None:
        """These rows are dead: send none of those that still wait."""
        for peer, outbox in self._outboxes.items():
            if outbox.waiting:
                outbox.discard(slots, epochs)
                self._flush(peer)

    def forget(self, peer: int) -> None:
        """The peer is lost: drop what waits for it, its credits, and all that is to come."""
        self._outboxes.pop(peer, None)

    def _flush(self, peer: int) -> None:
        outbox = self._outboxes[peer]
        while (parcel := outbox.next()) is not None:
            self.sent_rows[parcel.stage, peer] += parcel.rows
            self._post(peer, parcel)

    def _post_pieces(self, home: int, parcel: Parcel) -> None:
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


def _in_turn(rank: int, parcels: list[tuple[int, PackedParcel]]) -> list[tuple[int, PackedParcel]]:
    """`parcels` to ranks in ascending order, those to ranks above `rank` first.

    Ranks that are done at the same time would otherwise all send to rank 0 first, which can take in
    no more than its link does while those of the others are idle.
    """
    above = bisect_right(parcels, rank, key=itemgetter(0))
    return parcels[above:] + parcels[:above]
