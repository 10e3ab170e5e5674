"""What a rank's scheduling rule learns of the other ranks, and tells them (`scheduler.Peers`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from asyncmoe.dispatcher import Dispatcher
from asyncmoe.errors import PeerLost
from asyncmoe.home import Home
from asyncmoe.placement import Placement
from asyncmoe.receptor import Receptor
from asyncmoe.scheduler import Peers

# What a rule says goes through the control channel as it is; no message of `messages.py` begins so.
MARK = b"\0"


class RankPeers(Peers):
    """The peers of a live or virtual rank."""

    def __init__(
        self,
        rank: int,
        placement: Placement,
        dispatcher: Dispatcher,
        receptor: Receptor,
        home: Home | None,
        send: Callable[[int, bytes], None],
    ) -> None:
        """`send` takes a rank and a control message for it."""
        self.rank, self.homes = rank, placement.home_ranks
        self.experts = tuple(np.unique(placement.owner).tolist())
        self._dispatcher, self._receptor, self._home, self._send = dispatcher, receptor, home, send

    def tell(self, rank: int, message: bytes) -> None:
        with suppress(PeerLost):  # the rule is told of that, too
            self._send(rank, MARK + message)

    def sent(self, stage: int) -> NDArray[np.int64]:
        rows: NDArray[np.int64] = self._dispatcher.sent_rows[stage]
        return rows

    def held_back(self, stage: int) -> Mapping[int, int]:
        return self._dispatcher.outboxes.held_back(stage)

    def arrived(self, stage: int) -> NDArray[np.int64]:
        rows: NDArray[np.int64] = self._receptor.arrived_rows[stage]
        return rows

    def missing(self, stage: int) -> int:
        return 0 if self._home is None else self._home.table.waiting_for(stage)
