"""Combine rows that have come home and still lie where their transport put them.

The compute thread copies them before its next merge, where that takes no time of the loop's. But a
sender may wait for that memory, and no merge is certain to come: so the loop copies them as soon as
nothing computes, and at the latest when the second batch from then on has ended.
"""

from __future__ import annotations

from asyncmoe.host import Host
from asyncmoe.tokentable import TokenTable


class Arrivals:
    """Of one home. What it does per batch is compiled where that is there (`intake.cpp`)."""

    def __init__(self, table: TokenTable, host: Host) -> None:
        self._table, self._host = table, host
        self._awaited = False  # somebody waits for memory that has arrived since `look` was called
        self._seen: object = None  # the oldest that was not copied when a stage last ended
        self._asked = False  # whether `_settle_if_idle` is to come
        self._put_off = False  # it came while a batch computed

    def came(self) -> None:
        """Rows have come whose memory somebody waits for."""
        self._awaited |= bool(self._table.arrived)
        self.see_to()

    def see_to(self) -> None:
        """Copy what has arrived in the loop's next turn, should nothing compute then."""
        if self._table.arrived and not self._asked:
            self._asked = True
            self._host.soon(self._settle_if_idle)

    def let_go(self) -> None:
        """A stage has ended: release the memory of the rows that it has copied."""
        self._table.let_go()
        if self._awaited:
            self._awaited = bool(self._table.arrived)
            self.look()

    def look(self) -> None:
        """A stage has ended, and there may be rows whose memory somebody waits for."""
        if not self._table.arrived:
            self._seen, self._put_off = None, False
            return
        oldest = self._table.oldest_arrival
        if oldest is not None and oldest is self._seen:
            self.settle()
        self._seen = oldest
        if self._put_off:
            self.see_to()

    def settle(self) -> None:
        """Copy all, and release their memory."""
        self._table.settle()
        self._table.let_go()

    def _settle_if_idle(self) -> None:
        self._asked = False
        self._put_off = self._host.computing
        if not self._put_off:
            self.settle()
