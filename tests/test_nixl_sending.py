"""What is written to one NIXL peer together, and when it takes slots there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from asyncmoe import native
from asyncmoe.errors import PeerLost
from asyncmoe.transport import Limits, ParcelClass
from asyncmoe.transports.nixl_sending import BATCH_BYTES, WRITE_BYTES, make_sending
from asyncmoe.transports.nixl_wire import Freed, NoteKind, Written, decode_note, encode_note
from asyncmoe.transports.shm_segment import Geometry
from asyncmoe.twophase import make_outbound
from asyncmoe.wire import PRELUDE_BYTES, decode_prelude
from tests.transport_kit import make_parcel

GENERATION, ADDRESS, DEVICE = 7, 1 << 40, 1
SLOT_BYTES = 64 << 10


@pytest.fixture(params=["compiled", "plain"])
def is_compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Each test twice."""
    if request.param == "plain":
        monkeypatch.setattr(native, "columns", None)
    elif native.columns is None:
        pytest.skip("not built")
    return native.columns is not None


def make(is_compiled: bool, slots: int = 64) -> Any:
    outbound = make_outbound(0, GENERATION, Limits())
    geometry = Geometry(slots, SLOT_BYTES)
    return make_sending(outbound, geometry, ADDRESS, GENERATION, DEVICE, is_compiled)


def slots_of(batch: Any) -> list[int]:
    """The first slot of each parcel of a batch, by its control frames."""
    preludes = [decode_prelude(frame[:PRELUDE_BYTES], Limits()) for frame in batch.frames]
    return [prelude.lease - 1 for prelude in preludes]


def test_a_batch_says_what_is_read_where_it_goes_and_in_which_frames(is_compiled: bool) -> None:
    sending = make(is_compiled)
    small, large = make_parcel(1), make_parcel(2, 16, 8192)
    combine = make_parcel(3, kind=ParcelClass.COMBINE)
    for parcel in (small, large, combine):
        sending.post(parcel)
    batch = sending.next_batch()
    sent = [combine, small, large]  # combines first
    address = [ADDRESS + 64 * SLOT_BYTES, ADDRESS, ADDRESS + SLOT_BYTES]
    sizes = [each.payload.nbytes for each in sent]
    assert batch.local.dtype == batch.remote.dtype == np.uint64
    assert batch.local.tolist() == [[p.payload.data_ptr(), p.payload.nbytes, DEVICE] for p in sent]
    assert batch.remote.tolist() == [[a, n, 0] for a, n in zip(address, sizes, strict=True)]
    assert batch.nbytes == sum(sizes)
    written = [Written(2, sizes[0], 0), Written(1, sizes[1], 0), Written(1, sizes[2], 1)]
    assert decode_note(batch.note) == (NoteKind.WRITTEN, written)
    assert slots_of(batch) == [0, 0, 1]
    assert sending.next_batch() is None


def test_a_parcel_takes_its_slots_when_it_is_written_and_not_when_it_is_posted(
    is_compiled: bool,
) -> None:
    sending = make(is_compiled)
    rows = BATCH_BYTES // 2 // (4 * 8192)
    posted = [sending.post(make_parcel(n, rows, 8192)) for n in range(6)]
    half = BATCH_BYTES // 2 // SLOT_BYTES
    assert (sending.out, sending.waits) == (0, True)
    first = sending.next_batch()
    assert slots_of(first) == [0, half]  # as much as is written together
    freed = [Freed(1, 0, 1), Freed(1, half, 1)]
    sending.on_freed(encode_note(NoteKind.FREED, GENERATION, freed))
    assert sending.out == 0
    assert slots_of(sending.next_batch()) == [0, half]  # the same, which are in the caches
    sending.written_out(first)
    assert [each.source_free for each in posted] == [True, True] + 4 * [False]


def test_a_parcel_without_slots_waits_with_all_behind_it_of_its_class(is_compiled: bool) -> None:
    sending = make(is_compiled, slots=3)
    for n in range(2):
        sending.post(make_parcel(n, 16, 2048))  # two slots each
    sending.post(make_parcel(2))
    assert slots_of(sending.next_batch()) == [0]
    sending.post(make_parcel(3, kind=ParcelClass.COMBINE))
    assert slots_of(sending.next_batch()) == [0]  # of the other class
    assert sending.next_batch() is None
    assert sending.waits
    sending.on_freed(encode_note(NoteKind.FREED, GENERATION, [Freed(1, 0, 1)]))
    assert slots_of(sending.next_batch()) == [0, 2]
    assert not sending.waits


def test_what_is_larger_than_a_batch_goes_alone_and_in_pieces(is_compiled: bool) -> None:
    sending = make(is_compiled, slots=256)
    rows = (WRITE_BYTES + BATCH_BYTES) // (4 * 8192)
    for parcel in (make_parcel(0), make_parcel(1, rows, 8192), make_parcel(2)):
        sending.post(parcel)
    batches = []
    while (batch := sending.next_batch()) is not None:
        batches.append(batch)
    assert [batch.nbytes for batch in batches] == [128, WRITE_BYTES, BATCH_BYTES, 128]
    assert [len(batch.frames) for batch in batches] == [1, 0, 1, 1]  # behind its last piece


class FakeLink:
    """A link, as far as who posts looks at it."""

    def __init__(self) -> None:
        self.error: PeerLost | None = None

    def check(self) -> None:
        if self.error is not None:
            raise self.error


def test_the_compiled_door_tells_once_that_there_is_something_and_knows_a_lost_link() -> None:
    if native.columns is None:
        pytest.skip("not built")
    sending, link = make(True), FakeLink()
    told: list[None] = []
    door = sending.poster(link, lambda: told.append(None))
    door(make_parcel(0))
    door(make_parcel(1))
    assert len(told) == 1
    assert len(sending.next_batch().frames) == 2
    door(make_parcel(2))
    assert len(told) == 2
    link.error = PeerLost(1, "gone")
    with pytest.raises(PeerLost, match="gone"):
        door(make_parcel(3))
    assert len(sending.next_batch().frames) == 1
