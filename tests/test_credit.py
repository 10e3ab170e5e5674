"""Credits: never more rows outstanding than the window, and none lost."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from asyncmoe.credit import CreditWindow
from asyncmoe.errors import ProtocolError


def test_taking_gives_what_there_is_and_no_more() -> None:
    window = CreditWindow(10)
    assert [window.take(6), window.take(6), window.take(1)] == [6, 4, 0]
    assert window.outstanding == 10


def test_credits_that_come_back_can_be_taken_again() -> None:
    window = CreditWindow(10)
    window.take(10)
    window.give_back(3)
    assert window.take(5) == 3


@pytest.mark.parametrize("rows", [-1, 4, 1 << 40])
def test_a_peer_that_gives_back_what_is_not_outstanding_breaks_the_protocol(rows: int) -> None:
    window = CreditWindow(10)
    window.take(3)
    with pytest.raises(ProtocolError, match=f"gives back {rows} credits; allowed: 0 to the 3"):
        window.give_back(rows)
    assert window.available == 7


def test_impossible_windows_and_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="window of 0 rows"):
        CreditWindow(0)
    with pytest.raises(ValueError, match="-1 rows"):
        CreditWindow(10).take(-1)


class TwoSides(RuleBasedStateMachine):
    """A home that takes, an expert rank that holds and gives back, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.window = CreditWindow(37)
        self.held = 0

    @rule(wanted=st.integers(0, 60))
    def dispatch(self, wanted: int) -> None:
        taken = self.window.take(wanted)
        assert taken == min(wanted, 37 - self.held)
        self.held += taken

    @rule(share=st.floats(0, 1))
    def combine(self, share: float) -> None:
        rows = int(self.held * share)
        self.window.give_back(rows)
        self.held -= rows

    @rule(excess=st.integers(1, 100))
    def give_too_much(self, excess: int) -> None:
        with pytest.raises(ProtocolError):
            self.window.give_back(self.held + excess)

    @invariant()
    def every_credit_is_on_one_side(self) -> None:
        assert self.window.outstanding == self.held <= 37
        assert self.window.available + self.held == 37


TestTwoSides = TwoSides.TestCase
TestTwoSides.settings = settings(max_examples=50, deadline=None)
