"""The compiled way of rows through a home rank does what the plain one does, step for step."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncmoe import native
from asyncmoe.bell import Bell
from asyncmoe.dispatcher import Dispatcher
from asyncmoe.microqueue import are_plain
from asyncmoe.packed import pack
from asyncmoe.placement import Placement, Role
from asyncmoe.receptor import Receptor
from asyncmoe.stage import Kind
from asyncmoe.stages import RankStages
from asyncmoe.stats import RankTimes
from asyncmoe.steps import AttentionResult, AttentionStep
from asyncmoe.transport import Limits, Parcel, ParcelClass, Posted
from tests.test_home import CHAIN, Desk
from tests.test_native_columns import plain
from tests.test_native_engine import contents

pytestmark = pytest.mark.skipif(native.columns is None, reason="not built")

WORLD, EXPERTS, TOP_K = 3, 6, 2
OWNER = np.tile(np.repeat(np.arange(WORLD, dtype=np.uint16), 2), (2, 1))
LOCAL = np.where(OWNER == 0, np.tile(np.arange(2), (2, 3)), -1)
PLACEMENT = Placement(
    (Role.BOTH,) * WORLD, OWNER, np.tile(np.arange(2, dtype=np.uint16), (2, WORLD))
)


class Layers:
    """The home side of a rank whose experts are elsewhere or do not compute: rows come back as the
    test wants."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.desk = desk = Desk(blocks=64, max_requests=6)
        self.away: list[Parcel] = []  # dispatched, and not come back as a whole
        dispatcher = Dispatcher(
            rank=0, placement=PLACEMENT, chain=CHAIN, transport=self, limits=Limits(),
            row_bytes=4, window_rows=1000, per_expert=bool(rng.integers(2)),
        )  # type: ignore[arg-type]  # fmt: skip
        self.receptor = Receptor(
            rank=0, world=WORLD, chain=CHAIN, local=LOCAL, dtype=torch.float32,
            queues=desk.queues, dispatcher=dispatcher, home=desk.home, now_s=desk.now_s,
            window_rows=1000, times=RankTimes(),
        )  # fmt: skip
        self.receptor.bell = Bell(lambda _: None, lambda: None, deque(), 1)
        self.stages = RankStages(
            model=None, chain=CHAIN, queues=desk.queues, local=LOCAL, per_expert=False,
            home=desk.home, cache=(), dispatcher=dispatcher, receptor=self.receptor,
            fatal=pytest.fail,
        )  # type: ignore[arg-type]  # fmt: skip

    def post(self, peer: int, parcel: Parcel) -> Posted:
        """See `Transport`."""
        self.away.append(parcel)
        return Posted()

    def begin(self, stage: int) -> AttentionStep:
        """Take a batch of an attention stage."""
        step = self.stages.prepare(stage, int(self.rng.integers(1, 12)))
        assert isinstance(step, AttentionStep)
        return step

    def finish(self, step: AttentionStep) -> None:
        """The device is done with it, and chose experts."""
        rows = step.row_count
        experts = np.array([self.rng.permutation(EXPERTS)[:TOP_K] for _ in range(rows)], np.int64)
        weights, hidden = self.rng.random((rows, TOP_K), np.float32), torch.rand(rows, 1)
        columns, router = step.rows.columns, step.router
        assert router is not None
        routed = router(step.stage + 1, columns.slots, columns.epochs, hidden, experts, weights)
        self.stages.finish(step, AttentionResult(hidden, experts, weights, routed))

    def take_local(self) -> None:
        """Rows for experts of this rank are computed."""
        for stage in np.flatnonzero(self.desk.queues.rows[1::2]) * 2 + 1:
            taken = self.desk.queues.take_rows(int(stage), 1000)
            *_, back = taken.columns(LOCAL[0], 2, False)
            for _, rows, _, block in back:
                slot, epoch = np.frombuffer(block, np.uint32, 2 * rows).reshape(2, rows)
                part = np.frombuffer(block, np.uint8, rows, 8 * rows)
                self.come_home(int(stage), slot, epoch, part)
            taken.read(self.receptor.held_rows)

    def come_back(self) -> None:
        """Some rows of a parcel come back, maybe not for the first time."""
        at = int(self.rng.integers(len(self.away)))
        parcel = self.away[at]
        part = parcel.part[np.cumsum(parcel.fanout) - parcel.fanout]  # of the first pair
        keep = np.flatnonzero(self.rng.random(parcel.rows) < 0.8)
        self.come_home(parcel.stage, parcel.slot[keep], parcel.epoch[keep], part[keep])
        if self.rng.random() < 0.5:
            self.come_home(parcel.stage, parcel.slot, parcel.epoch, part)
            del self.away[at]

    def come_home(self, stage: int, slot: Any, epoch: Any, part: Any) -> None:
        """Combine rows of these columns arrive."""
        payload = torch.zeros(len(slot), 1)
        parcel = Parcel(ParcelClass.COMBINE, stage, slot, epoch, part, payload)
        self.desk.home.take_in(pack(parcel))

    def seen(self) -> list[Any]:
        """All that may depend on who did the work."""
        table, chunks, queues = self.desk.table, self.desk.home.chunks, self.desk.queues
        columns = (
            table.epoch, table.stage, table.open, table.part_count, table.chunk, chunks.stage,
            chunks.missing, chunks.parked, queues.rows, self.receptor.held_rows,
        )  # fmt: skip
        return [table.dropped_rows, table.free_slots, *(column.tolist() for column in columns)]


def drive(seed: int, steps: int) -> list[Any]:
    """What a random run shows."""
    rng, seen = np.random.default_rng(seed), []
    layers = Layers(rng)
    desk, computing = layers.desk, deque[AttentionStep]()
    attention = [s for s, kind in enumerate(CHAIN.kinds) if kind is Kind.ATTENTION]
    for request_id in range(steps):
        ready = [stage for stage in attention if desk.queues.rows[stage]]
        match rng.integers(7):
            case 0 | 1 if desk.home.running < 6:
                desk.admit(request_id, int(rng.integers(1, 14)))
            case 2 | 3 if ready:
                computing.append(layers.begin(ready[int(rng.integers(len(ready)))]))
                seen.append(computing[-1].rows.chunks.tolist())
            case 4 if layers.away:
                layers.come_back()
            case 5:
                layers.take_local()
            case 6 if desk.home.request_ids and rng.random() < 0.3:
                ids = desk.home.request_ids
                desk.home.end(ids[int(rng.integers(len(ids)))], "aborted")
            case _ if computing:
                layers.finish(computing.popleft())
        seen.append(layers.seen())
    return [seen, [contents(parcel)[:3] for parcel in layers.away]]


@given(st.integers(0, 2**32 - 1), st.integers(1, 60))
def test_rows_go_through_a_home_alike(seed: int, steps: int) -> None:
    ours = drive(seed, steps)
    with plain():
        assert ours == drive(seed, steps)


def test_whole_batches_leave_by_the_compiled_way() -> None:
    layers = Layers(np.random.default_rng(0))
    assert not are_plain(layers.desk.queues)
    layers.desk.home.leave_attention = pytest.fail  # type: ignore[method-assign]
    layers.desk.admit(1, tokens=10)
    layers.finish(layers.begin(0))
    assert layers.away or layers.receptor.held_rows[0]
