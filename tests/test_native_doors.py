"""Outboxes that reach a socket without Python send what a `post` sends."""

from __future__ import annotations

import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asyncmoe import native
from asyncmoe.errors import PeerLost
from asyncmoe.outbox import Outboxes, make_outboxes
from asyncmoe.transport import Limits, Parcel, Posted
from asyncmoe.twophase import make_outbound
from asyncmoe.writer import make_writer
from tests.test_native_engine import PARCEL_ROWS, RANK, STAGE, WINDOW, WORLD

pytestmark = pytest.mark.skipif(native.columns is None, reason="not built")
PEER = 2


class Wire:
    """A socket to rank 2, and outboxes before it; `door`: whether nothing is in between."""

    def __init__(self, door: bool) -> None:
        self.near, self.far = socket.socketpair()
        self.error: PeerLost | None = None  # as a link's
        writer: Any = make_writer(self.near, lambda: None, lambda error: None)
        post = writer.poster(make_outbound(RANK, 1, Limits(hidden=4, stages=8, experts=12)), self)
        table = native.columns.by_key({PEER: post}, None)
        by_python: Callable[[int, Parcel], Posted] = lambda peer, parcel: post(parcel)  # noqa: E731
        sent_rows = torch.zeros((8, WORLD), dtype=torch.int64).numpy()
        transport = SimpleNamespace(post=table if door else by_python)
        self.boxes: Outboxes = make_outboxes(
            RANK, WORLD, WINDOW, PARCEL_ROWS, 16, transport, sent_rows
        )

    def check(self) -> None:
        if self.error is not None:
            raise self.error

    def answer(self, rows: int) -> bytes:
        """What the socket gets of a combine of `rows` rows."""
        out = torch.arange(4.0 * rows).view(rows, 4)
        self.boxes.answer(STAGE, [(PEER, rows, rows, bytes(9 * rows))], out)
        self.far.setblocking(False)
        try:
            return self.far.recv(1 << 16)
        except BlockingIOError:
            return b""

    def close(self) -> None:
        self.near.close()
        self.far.close()


@pytest.mark.parametrize("rows", [1, PARCEL_ROWS, 2 * PARCEL_ROWS + 1])
def test_the_same_bytes_leave_with_and_without_python(rows: int) -> None:
    direct, by_python = Wire(True), Wire(False)
    for _ in range(2):  # numbered as well
        sent = direct.answer(rows)
        assert len(sent) > 25 * rows
        assert sent == by_python.answer(rows)
    assert direct.boxes.sent_parcels == by_python.boxes.sent_parcels
    assert list(direct.boxes.bytes_to) == [0, 0, 32 * rows, 0]
    direct.close()
    by_python.close()


def test_what_is_for_a_lost_peer_is_dropped_and_not_counted() -> None:
    wire = Wire(True)
    wire.error = PeerLost(PEER, "gone")
    assert wire.answer(2) == b""
    assert wire.boxes.sent_parcels == 0
    wire.close()
