"""The two phases without I/O: order, exactly once, and the three events that stay apart."""

from __future__ import annotations

import pytest
import torch

from asyncmoe.errors import PeerLost, ProtocolError
from asyncmoe.lease import make_pool
from asyncmoe.transport import Arrival, Limits, Parcel, ParcelClass, Posted
from asyncmoe.twophase import Transfer, make_inbound, make_outbound
from asyncmoe.wire import PRELUDE_BYTES, Prelude, decode_prelude, payload_memory
from tests.transport_kit import assert_same, compiled_or_plain, make_parcel  # noqa: F401

pytestmark = pytest.mark.usefixtures("compiled_or_plain")
LIMITS = Limits()
GENERATION = 77


class Pair:
    """One direction from rank 3 to a rank that records."""

    def __init__(self) -> None:
        self.leases = make_pool()
        self.arrivals: list[Arrival] = []
        self.out = make_outbound(3, GENERATION, LIMITS)
        self.inbound = make_inbound(3, GENERATION, LIMITS, self.leases, self.arrivals.append)

    def post(self, parcel: Parcel) -> tuple[Posted, bytes]:
        frame, posted = self.out.parcel(parcel)
        return posted, frame

    def accept(self, frame: bytes) -> Transfer:
        """First phase; the columns are there, the payload is not."""
        transfer = self.inbound.accept(prelude_of(frame))
        transfer.columns = frame[PRELUDE_BYTES:]
        return transfer

    def begin(self, parcel: Parcel) -> Transfer:
        return self.accept(self.post(parcel)[1])

    def fill(self, transfer: Transfer, parcel: Parcel) -> None:
        transfer.payload[:] = payload_memory(parcel.payload)
        self.inbound.arrived(transfer)


def prelude_of(frame: bytes) -> Prelude:
    """The checked prelude of a frame."""
    return decode_prelude(frame[:PRELUDE_BYTES], LIMITS)


def test_source_free_arrival_and_release_are_three_events() -> None:
    pair, parcel = Pair(), make_parcel(1)
    posted, frame = pair.post(parcel)
    transfer = pair.accept(frame)
    assert (posted.source_free, pair.arrivals, pair.leases.filling) == (False, [], 1)
    pair.out.sent(posted)
    assert (posted.source_free, pair.arrivals, pair.leases.filling) == (True, [], 1)
    pair.fill(transfer, parcel)
    assert_same(pair.arrivals[0].parcel, parcel)
    assert (pair.leases.held, pair.leases.idle_bytes) == (1, 0)
    pair.arrivals[0].release()
    assert (pair.leases.live, pair.leases.idle_bytes) == (0, 4096)


def test_payloads_that_overtake_each_other_are_handed_over_in_order() -> None:
    pair, parcels = Pair(), [make_parcel(number) for number in range(4)]
    transfers = [pair.begin(parcel) for parcel in parcels]
    seen = []
    for number in (2, 0, 3, 1):
        pair.fill(transfers[number], parcels[number])
        seen.append([arrival.parcel.stage for arrival in pair.arrivals])
    assert seen == [[], [0], [0], [0, 1, 2, 3]]
    for arrival, parcel in zip(pair.arrivals, parcels, strict=True):
        assert_same(arrival.parcel, parcel)


def test_a_dispatch_that_is_slow_to_come_holds_up_no_combine() -> None:
    pair, combine = Pair(), make_parcel(2, kind=ParcelClass.COMBINE)
    pair.begin(make_parcel(1))
    pair.fill(pair.begin(combine), combine)
    assert [arrival.parcel.kind for arrival in pair.arrivals] == [ParcelClass.COMBINE]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source": 4}, "source is 4; allowed: 3"),
        ({"sequence": 0}, "sequence is 0; allowed: 1"),
        ({"sequence": 2}, "sequence is 2; allowed: 1"),
        ({"generation": 76}, "lease and generation are 0 and 76; allowed: 0 and 77"),
        ({"lease": 5}, "lease and generation are 5 and 77; allowed: 0 and 77"),
    ],
)
def test_a_frame_of_another_place_or_time_is_refused_before_it_gets_a_lease(
    change: dict[str, int], message: str
) -> None:
    pair = Pair()
    pair.begin(make_parcel(0))
    _, frame = pair.post(make_parcel(1))
    with pytest.raises(ProtocolError, match=message):
        pair.inbound.accept(prelude_of(frame)._replace(**change))
    assert pair.leases.live == 1


def test_messages_are_numbered_apart_from_parcels() -> None:
    pair = Pair()
    pair.begin(make_parcel(0))
    pair.inbound.message(prelude_of(pair.out.message(5)))
    repeated = prelude_of(pair.out.message(5))
    pair.inbound.message(repeated)
    with pytest.raises(ProtocolError, match="sequence is 1; allowed: 2"):
        pair.inbound.message(repeated)


def test_transfers_under_way_at_a_loss_are_quarantined_until_they_are_quiet() -> None:
    pair, whole = Pair(), make_parcel(1)
    half = pair.begin(make_parcel(0))
    pair.fill(pair.begin(whole), whole)  # whole, but its predecessor is not
    given_up = pair.inbound.abandon()
    assert given_up == [half.lease]
    assert (pair.leases.quarantined, pair.leases.live, pair.arrivals) == (1, 1, [])
    assert pair.inbound.abandon() == []
    given_up[0].quiet()
    assert pair.leases.live == 0


def test_an_arrival_that_was_handed_over_outlives_the_loss_of_its_sender() -> None:
    pair, parcel = Pair(), make_parcel(0)
    pair.fill(pair.begin(parcel), parcel)
    pair.inbound.abandon()
    assert_same(pair.arrivals[0].parcel, parcel)
    pair.arrivals[0].release()
    assert pair.leases.live == 0


def test_a_loss_fails_every_parcel_that_is_not_sent_and_no_other() -> None:
    pair, error = Pair(), PeerLost(1, "for a test")
    first, second = (pair.post(make_parcel(number))[0] for number in range(2))
    pair.out.sent(first)
    told: list[Posted] = []
    second.when_free(told.append)
    pair.out.fail(error)
    assert (first.error, second.error, second.source_free) == (None, error, True)
    assert told == [second]
    assert pair.out.unsent == 0


def test_inconsistent_columns_give_no_arrival_and_leave_no_lease() -> None:
    pair, parcel = Pair(), make_parcel(0)
    transfer = pair.begin(parcel)
    transfer.columns = bytes(len(transfer.columns))
    with pytest.raises(ProtocolError, match="fanout"):
        pair.fill(transfer, parcel)
    assert (pair.inbound.abandon(), pair.arrivals, pair.leases.live) == ([], [], 0)


def test_a_parcel_that_the_receiver_refuses_is_released() -> None:
    pair, parcel = Pair(), make_parcel(0)

    def refuse(arrival: Arrival) -> None:
        raise ProtocolError("no")

    pair.inbound = make_inbound(3, GENERATION, LIMITS, pair.leases, refuse)
    with pytest.raises(ProtocolError, match="no"):
        pair.fill(pair.begin(parcel), parcel)
    assert pair.leases.live == 0


def test_a_payload_that_is_known_already_is_read_where_it_lies() -> None:
    pair, parcel = Pair(), make_parcel(0)
    posted, frame = pair.post(parcel)
    memory = parcel.payload.flatten().view(torch.uint8)
    lease = pair.leases.adopt(memory, lambda: pair.out.sent(posted))
    pair.inbound.arrived(pair.inbound.accept(prelude_of(frame), frame[PRELUDE_BYTES:], lease))
    assert pair.arrivals[0].parcel.payload.data_ptr() == parcel.payload.data_ptr()
    assert not posted.source_free
    pair.arrivals[0].release()
    assert posted.source_free
