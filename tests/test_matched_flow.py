"""What two ranks of matched transfers announce, gather and take, by both twins of the code."""

from __future__ import annotations

from typing import Any

import pytest

from asyncmoe import native
from asyncmoe.errors import ProtocolError
from asyncmoe.lease import LeasePool, make_pool
from asyncmoe.packed import pack
from asyncmoe.transport import Arrival, Limits, ParcelClass
from asyncmoe.transports.matched_flow import (
    BURST_BYTES,
    WINDOW_PARCELS,
    make_receiving,
    make_sending,
)
from asyncmoe.twophase import Outbound, make_inbound, make_outbound
from asyncmoe.wire import PRELUDE_BYTES, decode_prelude
from tests.transport_kit import make_parcel

LIMITS = Limits()
NOTICE = b"notice"
DISPATCH = int(ParcelClass.DISPATCH)
BUILT = hasattr(native.columns, "MatchedSending")


class Both:
    """Two sides without a library between them."""

    def __init__(self, compiled: bool, notice: bytes | None = NOTICE) -> None:
        kind = make_outbound if compiled else Outbound
        self.outbound = kind(0, 5, LIMITS)
        self.ready = self.whole = 0
        self.sending = make_sending(self.outbound, notice, self._on_ready)
        self.arrived: list[Arrival] = []
        leases = make_pool() if compiled else LeasePool()
        self.receiving = make_receiving(leases, None, self._on_whole)
        self.inbound = make_inbound(
            0, 5, LIMITS, leases, self.arrived.append, None, self.receiving.place
        )
        self.receiving.begin(self.inbound)

    def _on_ready(self) -> None:
        self.ready += 1

    def _on_whole(self) -> None:
        self.whole += 1

    def post(self, stage: int, rows: int = 1, hidden: int = 8) -> Any:
        return self.sending.post(pack(make_parcel(stage, rows, hidden)))

    def announce(self, frames: list[bytes]) -> None:
        for frame in frames:
            if frame != NOTICE:
                transfer = self.inbound.accept(decode_prelude(frame[:PRELUDE_BYTES], LIMITS))
                transfer.columns = frame[PRELUDE_BYTES:]
                self.receiving.announced(transfer)


_IF_BUILT = pytest.mark.skipif(not BUILT, reason="not built")


@pytest.fixture(params=[False, pytest.param(True, marks=_IF_BUILT)])
def compiled(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_a_turn_leaves_as_bursts_with_a_notice_behind_each(compiled: bool) -> None:
    both = Both(compiled)
    for stage in range(3):
        both.post(stage, 256, BURST_BYTES // 2048)  # half a burst
    both.post(3, rows=0)
    frames, bursts = both.sending.leave()
    assert [len(payloads) for payloads, _ in bursts] == [2, 1]
    assert [number for number, frame in enumerate(frames) if frame == NOTICE] == [2, 5]
    assert both.ready == 1
    assert both.sending.leave() == ([], [])


def test_without_notices_a_turn_is_one_burst(compiled: bool) -> None:
    both = Both(compiled, notice=None)
    for stage in range(3):
        both.post(stage, 256, BURST_BYTES // 2048)
    frames, bursts = both.sending.leave()
    assert (len(frames), [len(payloads) for payloads, _ in bursts]) == (3, [3])


def test_beyond_the_window_a_parcel_is_announced_when_others_are_taken(compiled: bool) -> None:
    both = Both(compiled)
    posted = [both.post(stage % 4) for stage in range(WINDOW_PARCELS + 2)]
    assert len([f for f in both.sending.leave()[0] if f != NOTICE]) == WINDOW_PARCELS
    assert both.sending.taken(DISPATCH, 1) == 1
    assert [each.source_free for each in posted[:2]] == [True, False]
    assert len([f for f in both.sending.leave()[0] if f != NOTICE]) == 1
    assert both.ready == 2
    assert not both.sending.idle
    both.sending.taken(DISPATCH, WINDOW_PARCELS)
    both.sending.taken(DISPATCH, 1)
    assert both.sending.idle
    assert both.outbound.unsent == 0


def test_more_than_was_announced_cannot_be_taken(compiled: bool) -> None:
    both = Both(compiled)
    both.post(0)
    with pytest.raises(ProtocolError, match="2 parcels taken; announced: 1"):
        both.sending.taken(DISPATCH, 2)


def test_parcels_are_handed_over_and_told_in_order_whichever_is_whole_first(
    compiled: bool,
) -> None:
    both = Both(compiled)
    for stage, rows in enumerate((1, 0, 1, 1)):
        both.post(stage, rows)
    both.announce(both.sending.leave()[0])
    first, third, fourth = both.receiving.take()
    both.receiving.arrived([third])
    assert (both.arrived, both.receiving.told(), both.whole) == ([], [], 0)
    both.receiving.arrived([first])
    assert [each.parcel.stage for each in both.arrived] == [0, 1, 2]
    assert (both.receiving.told(), both.whole) == ([(DISPATCH, 3)], 1)
    both.receiving.arrived([fourth])
    assert (both.receiving.told(), both.whole) == ([(DISPATCH, 1)], 2)


def test_a_peer_that_announces_more_than_its_window_is_refused_before_anything_is_allocated(
    compiled: bool,
) -> None:
    sender, both = Both(compiled), Both(compiled)
    for stage in range(WINDOW_PARCELS + 1):
        sender.post(stage % 4)
        sender.sending.taken(DISPATCH, 1)
    frames = [frame for frame in sender.sending.leave()[0] if frame != NOTICE]
    both.announce(frames[:-1])
    with pytest.raises(ProtocolError, match=f"not taken; allowed: {WINDOW_PARCELS} with"):
        both.announce(frames[-1:])


def test_what_was_stopped_hands_nothing_over(compiled: bool) -> None:
    both = Both(compiled)
    both.post(0)
    both.announce(both.sending.leave()[0])
    burst = both.receiving.take()
    both.receiving.stop()
    both.sending.stop()
    both.receiving.arrived(burst)
    assert (both.arrived, both.whole) == ([], 0)
