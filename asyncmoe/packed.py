"""Parcels whose columns lie in one block of memory, in the order in which they go on the wire.

From the router to the expert batch, and back to the token table, most parcels are never looked into
column by column: they are written, sent, checked and read as a block. The columns are there as
arrays, views of the block, as soon as somebody asks for one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from asyncmoe.transport import Parcel, ParcelClass

Buffer = bytes | bytearray | memoryview


def column_bytes(kind: int, rows: int, pairs: int) -> int:
    """Length of a parcel's columns."""
    return 9 * rows + 7 * pairs if kind == ParcelClass.DISPATCH else 9 * rows


class PackedParcel(Parcel):
    """A parcel of `count` rows and `pairs` pairs; `block` has `column_bytes` bytes: slot u32,
    epoch u32, then weight f32, expert u16, fanout u8 and part u8 (dispatch) or part u8 (combine).
    """

    __slots__ = ("block", "count", "described", "pairs")

    def __init__(
        self,
        kind: ParcelClass,
        stage: int,
        rows: int,
        pairs: int,
        block: Buffer,
        payload: torch.Tensor,
        credits: int = 0,
    ) -> None:
        self.kind, self.stage, self.count, self.pairs = kind, stage, rows, pairs
        self.block, self.payload, self.credits = block, payload, credits
        self.described: object = None  # what compiled code noted of `payload` when it made this

    @property
    def rows(self) -> int:
        """Number of payload rows."""
        return self.count

    def __getattr__(self, name: str) -> Any:
        """A column, on first use."""
        if name not in ("slot", "epoch", "part", "fanout", "expert", "weight"):
            raise AttributeError(name)
        rows, pairs, block = self.count, self.pairs, self.block
        numbers = np.frombuffer(block, np.uint32, 2 * rows, 0)
        self.slot, self.epoch = numbers[:rows], numbers[rows:]
        if self.kind == ParcelClass.DISPATCH:
            self.weight = np.frombuffer(block, np.float32, pairs, 8 * rows)
            self.expert = np.frombuffer(block, np.uint16, pairs, 8 * rows + 4 * pairs)
            small = np.frombuffer(block, np.uint8, rows + pairs, 8 * rows + 6 * pairs)
            self.fanout, self.part = small[:rows], small[rows:]
        else:
            self.part = np.frombuffer(block, np.uint8, rows, 8 * rows)
            self.weight, self.expert = np.empty(0, np.float32), np.empty(0, np.uint16)
            self.fanout = np.empty(0, np.uint8)
        return object.__getattribute__(self, name)


def pack(parcel: Parcel) -> PackedParcel:
    """The parcel with its columns in one block. Raises `ValueError` if they are not what `Parcel`
    says they are."""
    if isinstance(parcel, PackedParcel):
        return parcel
    rows, pairs = len(parcel.slot), len(parcel.expert)
    columns = (
        parcel.slot, parcel.epoch, parcel.weight, parcel.expert, parcel.fanout, parcel.part
    )  # fmt: skip
    block = b"".join([column.tobytes() for column in columns])
    if len(block) != column_bytes(parcel.kind, rows, pairs):
        shapes = [f"{column.dtype}[{len(column)}]" for column in columns]
        raise ValueError(f"columns {shapes} do not fit {rows} rows and {pairs} pairs")
    return PackedParcel(
        parcel.kind, parcel.stage, rows, pairs, block, parcel.payload, parcel.credits
    )
