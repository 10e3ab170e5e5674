"""The credit window of one home rank towards one expert rank, counted in dispatch rows.

A row takes a credit before it goes on the wire and the credit comes back when its combine row has
left the expert rank (or the row was discarded there). So an expert rank never holds more rows of a
home than the window, and a full window stops nobody but that pair. Combine rows take none.
"""

from __future__ import annotations

from asyncmoe.errors import ProtocolError


class CreditWindow:
    """How many rows may be outstanding. Invariant: 0 <= available <= window."""

    __slots__ = ("available", "window")

    def __init__(self, window: int) -> None:
        if window < 1:
            raise ValueError(f"credit window of {window} rows; at least 1")
        self.window = window
        self.available = window

    @property
    def outstanding(self) -> int:
        """Rows whose credit has not come back."""
        return self.window - self.available

    def take(self, wanted: int) -> int:
        """Take credits for up to `wanted` rows and return for how many."""
        if wanted < 0:
            raise ValueError(f"credits for {wanted} rows; at least 0")
        taken = min(wanted, self.available)
        self.available -= taken
        return taken

    def give_back(self, rows: int) -> None:
        """The peer returns credits. Raises `ProtocolError` for more than are outstanding."""
        if not 0 <= rows <= self.outstanding:
            raise ProtocolError(
                f"peer gives back {rows} credits; allowed: 0 to the {self.outstanding} outstanding"
            )
        self.available += rows
