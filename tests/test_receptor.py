"""What a rank takes in from its peers, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from asyncmoe.errors import ProtocolError
from asyncmoe.packed import pack
from asyncmoe.rank import Rank
from asyncmoe.transport import Arrival, Parcel, ParcelClass
from tests import toymodel
from tests.cluster import cluster

STAGE = 1  # E0; of the toy model's experts 0 to 5, rank 1 has 3 to 5
# Attention and experts apart, so that nothing computes but what a test sends.
APART = {"placement": {"roles": ["attention", "expert"], "experts_per_rank": [0, 6]}}


def dispatch(
    expert: int = 4, fanout: int = 1, stage: int = STAGE, dtype: torch.dtype = torch.float32
) -> Parcel:
    """One row for `fanout` experts from `expert` on."""
    return Parcel(
        ParcelClass.DISPATCH,
        stage,
        np.array([0], np.uint32),
        np.array([0], np.uint32),
        np.zeros(fanout, np.uint8),
        torch.ones(1, toymodel.HIDDEN, dtype=dtype),
        np.array([fanout], np.uint8),
        np.arange(expert, expert + fanout, dtype=np.uint16),
        np.ones(fanout, np.float32),
    )


def combine(rows: int = 1, credits: int = 0) -> Parcel:
    """Rows that belong to nobody."""
    return Parcel(
        ParcelClass.COMBINE,
        STAGE,
        np.arange(rows, dtype=np.uint32),
        np.full(rows, 99, np.uint32),
        np.zeros(rows, np.uint8),
        torch.ones(rows, toymodel.HIDDEN),
        credits=credits,
    )


def give(rank: Rank, source: int, parcel: Parcel) -> list[str]:
    """Hand a parcel over as a transport does; returns what became of its lease."""
    released: list[str] = []
    rank.on_parcel(Arrival(source, parcel, lambda: released.append("released")))
    return released


STRAYS = {
    "expert elsewhere": (dispatch(expert=1), "expert 1 of layer 0 is not on rank 1"),
    "no such expert": (dispatch(expert=6), "expert 6 of 6"),
    "an attention stage": (dispatch(stage=2), "stage 2, which is no expert stage"),
    "the head": (dispatch(stage=6), "stage 6, which is no expert stage"),
    "beyond the chain": (dispatch(stage=7), "stage 7, which is no expert stage"),
    "no expert at all": (dispatch(fanout=0), "without an expert"),
    "another dtype": (dispatch(dtype=torch.bfloat16), "payload of torch.bfloat16"),
    "credits nobody has": (combine(credits=1), "gives back 1 credits"),
}


@pytest.mark.parametrize("name", STRAYS)
async def test_a_parcel_that_makes_no_sense_here_is_the_senders_fault(name: str) -> None:
    parcel, message = STRAYS[name]
    async with cluster(2, toymodel.checkpoint(), transport={"name": "inproc"}) as engine:
        with pytest.raises(ProtocolError, match=message):
            give(engine.ranks[1], 0, parcel)
        assert engine.ranks[1].queues.rows.sum() == 0


async def test_combine_rows_for_a_rank_that_is_no_home_are_refused() -> None:
    async with cluster(2, toymodel.checkpoint(), transport={"name": "inproc"}, **APART) as engine:
        with pytest.raises(ProtocolError, match="home of nothing"):
            give(engine.ranks[1], 0, combine())


async def test_stray_combine_rows_are_counted_dropped_and_their_lease_returned() -> None:
    async with cluster(2, toymodel.checkpoint(), transport={"name": "inproc"}) as engine:
        assert give(engine.ranks[0], 1, combine(rows=3)) == ["released"]
        assert engine.ranks[0].stats()["dropped_rows"] == 3


async def test_a_dispatch_lease_is_returned_only_after_its_last_row_was_read() -> None:
    config = {**APART, "batch": {"expert_min_rows": 2, "expert_linger_ms": 20.0}}
    async with cluster(2, toymodel.checkpoint(), transport={"name": "inproc"}, **config) as engine:
        expert = engine.ranks[1]
        leases = expert.transport.leases
        engine.ranks[0]._dispatcher.outboxes.send([(1, pack(dispatch()))])
        while not expert.queues.rows[STAGE]:
            await expert.device.run(lambda: None)
        assert leases.held == 1
        while expert.queues.rows[STAGE]:
            await expert.device.run(lambda: None)
        await engine.settled()
        assert leases.held == 0


async def test_an_empty_parcel_is_released_at_once() -> None:
    empty = replace(dispatch(), slot=np.empty(0, np.uint32), epoch=np.empty(0, np.uint32),
                    part=np.empty(0, np.uint8), payload=torch.empty(0, toymodel.HIDDEN),
                    fanout=np.empty(0, np.uint8), expert=np.empty(0, np.uint16),
                    weight=np.empty(0, np.float32))  # fmt: skip
    async with cluster(2, toymodel.checkpoint(), transport={"name": "inproc"}) as engine:
        assert give(engine.ranks[1], 0, empty) == ["released"]


async def test_home_that_sends_beyond_its_window_is_refused() -> None:
    config = {**APART, "transport": {"window_rows": 2}}
    async with cluster(2, toymodel.checkpoint(), **config) as engine:
        rank = engine.ranks[1]
        give(rank, 0, dispatch())
        give(rank, 0, dispatch())
        with pytest.raises(ProtocolError, match="3 rows at once; the window has 2"):
            give(rank, 0, dispatch())
        rank._receptor.left(0, 1)
        give(rank, 0, dispatch())
