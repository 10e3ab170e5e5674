"""No interleaving of the slot and credit state machines deadlocks or breaks a promise.

The second half breaks the pieces one by one, and expects the explorer to find each out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from asyncmoe.credit import CreditWindow
from asyncmoe.microqueue import RowQueue
from asyncmoe.outbox import Outboxes
from asyncmoe.tokentable import TokenTable
from asyncmoe.transport import ParcelClass
from tests.explorer import Explorer, Setup, State, Violation

SETUPS = {
    "one_credit": Setup(window=1, tokens=(2, 2)),
    "two_credits": Setup(window=2, tokens=(2, 2)),
    "slots_used_again": Setup(window=1, tokens=(4, 1)),
    "cancelled": Setup(window=1, tokens=(2, 1), cancels=1),
    "cancelled_twice": Setup(window=1, tokens=(3, 0), cancels=2),
    "repeated": Setup(window=1, tokens=(2, 0), layers=2, duplicates=1),
    "repeated_of_two_homes": Setup(window=1, tokens=(2, 1), duplicates=1),
    "cancelled_and_repeated": Setup(window=1, tokens=(3, 0), cancels=1, duplicates=1),
}


@pytest.mark.parametrize("name", SETUPS)
def test_every_interleaving_ends_well(name: str) -> None:
    explorer = Explorer(SETUPS[name])
    explorer.run()
    assert explorer.states > 1000
    assert explorer.ends >= 1


# ---- each of these breaks one piece


def combine_needs_room(patch: pytest.MonkeyPatch) -> None:
    """A combine row waits for one of two buffer rows, which are free when their token goes on."""

    def may_deliver(self: Explorer, state: State, to: int, kind: int) -> bool:
        return kind != ParcelClass.COMBINE or sum(map(int.bit_count, self.rank(state, to).seen)) < 2

    patch.setattr(Explorer, "may_deliver", may_deliver)


def epoch_stays(patch: pytest.MonkeyPatch) -> None:
    def renew(self: TokenTable, slots: np.ndarray) -> None:
        self.open[slots] = 0

    patch.setattr(TokenTable, "renew", renew)


def stage_is_not_checked(patch: pytest.MonkeyPatch) -> None:
    accept = TokenTable.accept

    def any_stage(self: TokenTable, stage: int, *columns: Any) -> np.ndarray:
        self.stage[:] = stage
        return accept(self, stage, *columns)

    patch.setattr(TokenTable, "accept", any_stage)


def parts_are_counted(patch: pytest.MonkeyPatch) -> None:
    """The next open part is ticked off, whichever part came."""
    accept = TokenTable.accept

    def count(self: TokenTable, stage: int, slot: Any, epoch: Any, part: Any, x: Any) -> np.ndarray:
        open_parts = int(self.open[int(slot[0])])
        lowest = max((open_parts & -open_parts).bit_length() - 1, 0)
        return accept(self, stage, slot, epoch, np.array([lowest], np.uint8), x)

    patch.setattr(TokenTable, "accept", count)


def discarded_rows_keep_their_credit(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Explorer, "answers_discards", False)


def dead_rows_stay_in_the_outbox(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Outboxes, "discard", lambda self, slots, epochs: None)


def window_is_not_kept(patch: pytest.MonkeyPatch) -> None:
    def take(self: CreditWindow, wanted: int) -> int:
        self.available -= wanted
        return wanted

    patch.setattr(CreditWindow, "take", take)


def discard_ignores_epochs(patch: pytest.MonkeyPatch) -> None:
    """It takes the rows of the slot's next token, too."""
    discard = RowQueue.discard

    def whole_slot(self: RowQueue, source: int, slots: Any, epochs: Any) -> int:
        return sum(discard(self, source, slots, np.full(1, e, np.uint32)) for e in range(9))

    patch.setattr(RowQueue, "discard", whole_slot)


MUTATIONS = [
    (combine_needs_room, "one_credit", "deadlock"),
    (epoch_stays, "cancelled", "dead token|deadlock"),
    (stage_is_not_checked, "repeated", "dead token"),
    (parts_are_counted, "repeated", "twice"),
    (discarded_rows_keep_their_credit, "cancelled", "credits"),
    (dead_rows_stay_in_the_outbox, "cancelled_and_repeated", "two rows of one slot"),
    (window_is_not_kept, "one_credit", "its window is 1"),
    (discard_ignores_epochs, "cancelled", "deadlock"),
]


@pytest.mark.parametrize(("mutate", "name", "message"), MUTATIONS)
def test_a_broken_piece_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
    mutate: Callable[[pytest.MonkeyPatch], None],
    name: str,
    message: str,
) -> None:
    mutate(monkeypatch)
    with pytest.raises(Violation, match=message):
        Explorer(SETUPS[name]).run()
