"""The compiled queues and outboxes do what their plain twins do, step for step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncmoe import native
from asyncmoe.errors import PeerLost, ProtocolError
from asyncmoe.microqueue import Queues, make_queues
from asyncmoe.outbox import Outboxes, make_outboxes
from asyncmoe.packed import pack
from asyncmoe.stage import StageChain
from asyncmoe.transport import Parcel, Posted
from tests.test_native_columns import dispatch

pytestmark = pytest.mark.skipif(native.columns is None, reason="not built")

RANK, WORLD, WINDOW, PARCEL_ROWS = 1, 4, 9, 5
STAGE = 3  # of the parcels of `dispatch`, an expert stage
SEEDS = st.integers(0, 2**32 - 1)


def contents(parcel: Parcel) -> tuple[Any, ...]:
    """All of a parcel, to be compared."""
    columns = (parcel.slot, parcel.epoch, parcel.part, parcel.fanout, parcel.expert, parcel.weight)
    return (
        parcel.kind, parcel.stage, parcel.credits, parcel.payload.tolist(),
        *(column.tolist() for column in columns),
    )  # fmt: skip


def outcome(call: Callable[[], Any]) -> Any:
    """What the call returns, or the error that it raises."""
    try:
        return call()
    except (ProtocolError, KeyError) as error:
        return type(error), str(error).strip("'")


def drive_outboxes(make: Callable[..., Outboxes], seed: int, steps: int) -> list[Any]:
    """What a random run posts, returns and counts."""
    rng, seen = np.random.default_rng(seed), []
    sent_rows, lost = np.zeros((8, WORLD), np.int64), {int(rng.integers(WORLD))}

    def post(peer: int, parcel: Parcel) -> Posted:
        if peer in lost:
            raise PeerLost(peer, "gone")
        seen.append((peer, contents(parcel)))
        return Posted()

    wire = SimpleNamespace(post=post)
    boxes, sent = make(RANK, WORLD, WINDOW, PARCEL_ROWS, 16, wire, sent_rows), []
    for _ in range(steps):
        action, peer = rng.integers(5), int(rng.integers(WORLD))
        match action:
            case 0 | 1:
                to = np.flatnonzero(rng.random(WORLD) < 0.5).tolist()
                parcels = [(rank, pack(dispatch(rng, int(rng.integers(1, 8))))) for rank in to]
                sent += [parcel for _, parcel in parcels]
                local = boxes.send(parcels)
                seen.append(None if local is None else contents(local))
            case 2:
                seen.append(outcome(partial(boxes.credit, peer, int(rng.integers(-1, 6)))))
            case 3 if sent:
                dead = sent[int(rng.integers(len(sent)))]
                keep = rng.random(len(dead.slot)) < 0.5
                boxes.discard(dead.slot[keep].copy(), dead.epoch[keep].copy())
            case 4 if rng.random() < 0.1:
                boxes.forget(peer)
            case _:
                ranks = np.flatnonzero(rng.random(WORLD) < 0.5).tolist()
                sizes = rng.integers(1, 9, len(ranks)).tolist()
                back = [
                    (rank, rows, 2 * rows, rng.bytes(9 * rows))
                    for rank, rows in zip(ranks, sizes, strict=True)
                ]
                if back:
                    out = torch.from_numpy(rng.random((sum(sizes), 4)))
                    seen.append([contents(p) for p in boxes.answer(STAGE, back, out)])
        held = [boxes.held_back(stage) for stage in range(8)]
        seen.append((boxes.waiting_rows, boxes.outstanding_rows, boxes.sent_parcels, held))
    return [*seen, list(boxes.bytes_to), sent_rows.tolist()]


@given(SEEDS, st.integers(1, 25))
def test_outboxes_post_the_same(seed: int, steps: int) -> None:
    assert drive_outboxes(make_outboxes, seed, steps) == drive_outboxes(Outboxes, seed, steps)


def drive_queues(make: Callable[[StageChain], Queues], seed: int, steps: int) -> list[Any]:
    """What a random run takes, releases and shows."""
    rng, seen = np.random.default_rng(seed), []
    queues, held, queued = make(StageChain(3)), np.zeros(WORLD, np.int64), []
    for step in range(steps):
        now_s, source = float(step), int(rng.integers(WORLD))
        match rng.integers(6):
            case 0 | 1:
                parcel = dispatch(rng, int(rng.integers(1, 8)))
                queued.append((source, parcel))
                held[source] += parcel.rows
                release = None if rng.random() < 0.3 else lambda step=step: seen.append(step)
                queues.put_parcel(source, parcel, release, now_s)
            case 2:
                chunks = rng.permutation(20)[: int(rng.integers(1, 5))]
                queues.put_chunks(2, chunks, rng.integers(1, 6, len(chunks)), now_s)
            case 3 if queues.rows[2]:
                seen.append(queues.take_chunks(2, int(rng.integers(1, 9))).tolist())
                queues.decision += 1
            case 4 if queues.rows[STAGE]:
                taken = queues.take_rows(STAGE, int(rng.integers(1, 12)))
                queues.decision += 1
                columns = taken.columns(np.arange(12), 12, bool(rng.random() < 0.5))
                seen.append([taken.rows, *(c.tolist() for c in columns[:4]), columns[4]])
                seen.append([payload.tolist() for payload in taken.payloads])
                taken.read(held)
            case 5 if queued:
                source, dead = queued[int(rng.integers(len(queued)))]
                keep = rng.random(dead.rows) < 0.5
                gone = queues.discard(source, dead.slot[keep].copy(), dead.epoch[keep].copy())
                held[source] -= gone
                seen.append(gone)
            case _:
                queues.remove_chunks(2, rng.permutation(20)[:3])
        waiting = queues.rows > 0
        seen.append((queues.rows.tolist(), queues.total, queues.decision, held.tolist()))
        seen.append((queues.oldest_s[waiting].tolist(), queues.oldest_decision[waiting].tolist()))
    return seen


@given(SEEDS, st.integers(1, 40))
def test_queues_hand_out_the_same(seed: int, steps: int) -> None:
    assert drive_queues(make_queues, seed, steps) == drive_queues(Queues, seed, steps)


def test_a_stage_has_a_queue_of_its_own_kind_only() -> None:
    queues, rng = make_queues(StageChain(1)), np.random.default_rng(0)
    with pytest.raises(ValueError, match="stage 1 has no queue of chunks"):
        queues.take_chunks(1, 4)
    with pytest.raises(ValueError, match="stage 3 has no queue of rows"):
        queues.put_parcel(0, dispatch(rng, 1), None, 0.0)
