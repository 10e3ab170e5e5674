"""The token table of a home rank: one slot per row in the layers, with epochs and open parts.

A combine row is taken in only if its slot's epoch is current, the slot waits for that very expert
stage, and the part's bit is still open; everything else is counted and dropped (DESIGN.md §6,
"Exactly once"). Clearing a bit is idempotent, so a repeated row can never complete a token early.

The loop looks at columns alone. Rows are copied by the compute thread, before it next merges: a
copy takes time that grows with the rows, and the loop must not.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from asyncmoe import native
from asyncmoe.native.kinds import kernels_for
from asyncmoe.packed import Buffer, pack
from asyncmoe.transport import Parcel, ParcelClass

MAX_PARTS = 64  # a slot's open parts are the bits of one uint64
_BIT = np.uint64(1) << np.arange(MAX_PARTS, dtype=np.uint64)
_ALL = np.concatenate([[np.uint64(0)], np.cumsum(_BIT, dtype=np.uint64)])  # [n]: n lowest bits


class TokenTable:
    """Columns of all slots, and their rows of hidden state.

    Residuals and parts are in the model's dtype; `merge` sums them in float32 in part order.
    """

    def __init__(
        self, slots: int, max_parts: int, hidden: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        if max_parts > MAX_PARTS:
            raise ValueError(f"{max_parts} parts for a token; at most {MAX_PARTS} are supported")
        self.slots, self.max_parts = slots, max_parts
        self.has_columns = hidden > 0  # a model that only stands for another has rows of none
        self.epoch = np.zeros(slots, np.uint32)
        self.stage = np.full(slots, -1, np.int32)  # expert stage whose parts are to come
        self.open = np.zeros(slots, np.uint64)  # parts to come, as bits
        self.part_count = np.zeros(slots, np.uint8)
        self.chunk = np.full(slots, -1, np.int32)
        self.token = np.zeros(slots, np.int64)
        self.position = np.zeros(slots, np.int32)
        self.residual = torch.zeros(slots, hidden, dtype=dtype, device=device)
        self.parts = torch.zeros(slots * max_parts, hidden, dtype=dtype, device=device)
        self.dropped_rows = 0  # combine rows that were stale, repeated or out of range
        self._scratch = np.empty(slots, np.int64)
        self._place_scratch = np.empty(slots * max_parts, np.int64)
        # (rows, their places, what to call then): arrived and to be copied; in order. The places
        # may be the columns of a combine parcel, which say as much.
        self.arrived: deque[
            tuple[torch.Tensor, NDArray[np.int64] | Buffer, Callable[[], None] | None]
        ] = deque()
        self.copied: deque[Callable[[], None]] = deque()  # what to call for rows that are
        self._settling = threading.Lock()
        self._free = np.arange(slots - 1, -1, -1, dtype=np.int64)
        self.free_slots = slots

    def allocate(self, count: int) -> NDArray[np.int64]:
        """Take `count` slots. There must be as many in `free_slots`."""
        assert count <= self.free_slots, (count, self.free_slots)
        self.free_slots -= count
        return self._free[self.free_slots : self.free_slots + count].copy()

    def release(self, slots: NDArray[np.int64]) -> None:
        """Give slots back; rows still on their way to them die on the epoch."""
        self.renew(slots)
        self.chunk[slots] = -1
        self._free[self.free_slots : self.free_slots + len(slots)] = slots
        self.free_slots += len(slots)
        assert self.free_slots <= self.slots

    def renew(self, slots: NDArray[np.int64]) -> None:
        """Start the next generation of slots that their owner keeps (the next decode step)."""
        self.epoch[slots] += np.uint32(1)
        self.open[slots] = 0
        self.stage[slots] = -1

    def waiting_for(self, stage: int) -> int:
        """Slots with parts of expert stage `stage` to come."""
        return int(np.count_nonzero(self.open[self.stage == stage]))

    def expect(self, slots: NDArray[np.int64], stage: int, parts: NDArray[np.uint8]) -> None:
        """The rows of `slots` were dispatched to `stage` and `parts[i]` parts will come back."""
        self.stage[slots] = stage
        self.part_count[slots] = parts
        self.open[slots] = _ALL[parts]

    def accept(
        self,
        stage: int,
        slot: NDArray[np.uint32],
        epoch: NDArray[np.uint32],
        part: NDArray[np.uint8],
        payload: torch.Tensor,
    ) -> NDArray[np.int64]:
        """Take in combine rows of `stage`; return the slots that now have all their parts.

        Args:
            slot, epoch, part: [rows], from the wire and not trusted.
            payload: [rows, hidden].
        """
        return self.arrive(Parcel(ParcelClass.COMBINE, stage, slot, epoch, part, payload))

    def arrive(
        self, parcel: Parcel, release: Callable[[], None] | None = None
    ) -> NDArray[np.int64]:
        """Take in a combine parcel; return the slots that now have all their parts.

        Its rows are copied by the next `settle` or `merge`, on whichever thread that runs;
        `release` is called by the first `let_go` behind it, or at once if no row was taken.
        """
        if native.columns is None:
            done, place, keep = self._judge(parcel)
        else:
            packed = pack(parcel)
            done, place, keep = native.columns.accept(
                parcel.stage, packed.block, packed.count, self.max_parts,
                self.epoch, self.stage, self.open,
            )  # fmt: skip
        payload = parcel.payload
        if keep is not None:
            self.drop(parcel.rows - len(keep))
            payload = payload[keep]
        if len(place) and self.has_columns:
            self.arrived.append((payload, place, release))
        elif release is not None:
            release()
        return done

    def drop(self, rows: int) -> None:
        """So many combine rows were not taken in."""
        self.dropped_rows += rows

    def _judge(
        self, parcel: Parcel
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64] | None]:
        """Which rows are taken in (None: all), their places, and the slots that they complete."""
        slot, epoch, part = parcel.slot, parcel.epoch, parcel.part
        good = (slot < self.slots) & (part < self.max_parts)
        inside = np.where(good, slot, 0)
        index, which = inside.astype(np.int64), np.where(good, part, 0)
        good &= (self.epoch[index] == epoch) & (self.stage[index] == parcel.stage)
        good &= (self.open[index] & _BIT[which]) != 0
        keep = good.nonzero()[0]
        place = index[keep] * self.max_parts + which[keep]
        if len(distinct(place, self._place_scratch)) < len(place):
            keep = keep[np.sort(np.unique(place, return_index=True)[1])]  # the first of each
            place = index[keep] * self.max_parts + which[keep]
        np.bitwise_and.at(self.open, index[keep], ~_BIT[which[keep]])
        done = distinct(index[keep][self.open[index[keep]] == 0], self._scratch)
        return done, place, None if len(keep) == len(slot) else keep

    def settle(self) -> None:
        """Copy the rows that have arrived to their places. On any thread.

        What arrived before this was called is there when it returns.
        """
        # One thread at a time, also where nothing is left to take: what another thread took may
        # not be there yet. In the order of arrival, since a place may have had two owners.
        with self._settling:
            while self.arrived:
                payload, place, release = self.arrived.popleft()
                self._copy(payload, place)
                if release is not None:
                    self.copied.append(release)

    def _copy(self, payload: torch.Tensor, place: NDArray[np.int64] | Buffer) -> None:
        if isinstance(place, np.ndarray):
            copy_rows(self.parts, place, payload)
            return
        parts, rows = self.parts, len(payload)
        if native.columns is None or not (parts.is_cpu and payload.is_contiguous()):
            slot, part = np.frombuffer(place, np.uint32, rows), np.frombuffer(place, np.uint8)
            copy_rows(parts, slot * np.int64(self.max_parts) + part[8 * rows :], payload)
            return
        assert payload.shape[1:] == parts.shape[1:]
        assert payload.dtype is parts.dtype
        native.columns.scatter_combine(
            parts.data_ptr(), len(parts), place, rows, self.max_parts, payload.data_ptr(),
            parts.shape[1] * parts.itemsize,
        )  # fmt: skip

    @property
    def oldest_arrival(self) -> object:
        """What stands for the oldest parcel that is not copied; None if all are."""
        try:
            return self.arrived[0]
        except IndexError:
            return None

    def let_go(self) -> None:
        """Release what has been copied. On the loop."""
        while self.copied:
            self.copied.popleft()()

    def merge(self, slots: torch.Tensor, part_count: NDArray[np.uint8]) -> torch.Tensor:
        """Residual plus parts, summed in part order in float32: [rows, hidden], model dtype.

        Runs on the compute thread. `part_count` is the table's column at `slots`, copied when the
        batch was prepared.
        """
        if not self.has_columns:
            return self.residual[: len(slots)]
        self.settle()
        merged = self._merged(slots, part_count)
        if merged is not None:
            return merged
        total = self.residual.index_select(0, slots).float()
        base = slots * self.max_parts
        fewest, most = int(part_count.min()), int(part_count.max())
        for part in range(most):
            rows = self.parts.index_select(0, base + part)
            if part >= fewest:  # what lies there for the others is of an earlier token
                absent = torch.from_numpy(part_count <= part).unsqueeze(1)
                rows = rows.masked_fill(absent, 0)
            total += rows
        return total.to(self.residual.dtype)

    def _merged(self, slots: torch.Tensor, part_count: NDArray[np.uint8]) -> torch.Tensor | None:
        """`merge` in one compiled call; None where kernels do not know the table's kind."""
        kernels, residual = kernels_for(self.residual), self.residual
        if kernels is None:
            return None
        rows, width = len(slots), residual.shape[1]
        assert slots.dtype is torch.int64
        assert slots.is_contiguous()
        assert part_count.dtype == np.uint8
        assert part_count.flags.c_contiguous
        assert len(part_count) == rows
        out = torch.empty((rows, width), dtype=residual.dtype)
        kernels.merge(
            residual.dtype is torch.bfloat16, residual.data_ptr(), self.parts.data_ptr(),
            slots.data_ptr(), part_count.ctypes.data, out.data_ptr(), rows, self.slots,
            self.max_parts, width,
        )  # fmt: skip
        return out

    def keep(self, slots: NDArray[np.int64], residual: torch.Tensor) -> None:
        """Store what the parts of `slots` will be added to: [rows, hidden]. On the compute
        thread."""
        if self.has_columns:
            copy_rows(self.residual, slots, residual)


def copy_rows(to: torch.Tensor, rows: NDArray[np.int64], payload: torch.Tensor) -> None:
    """to[rows] = payload, both [*, hidden] and of one dtype."""
    if native.columns is None or not (to.is_cpu and payload.is_contiguous()):
        to.index_copy_(0, torch.from_numpy(rows), payload)
        return
    assert payload.shape == (len(rows), to.shape[1])
    assert payload.dtype is to.dtype
    native.columns.scatter(
        to.data_ptr(), len(to), rows, payload.data_ptr(), to.shape[1] * to.itemsize
    )


def distinct(indices: NDArray[np.int64], scratch: NDArray[np.int64]) -> NDArray[np.int64]:
    """`indices` without repeats, in no particular order; `scratch` is as long as they reach.

    Unlike np.unique it does not sort, and costs a few microseconds.
    """
    place = np.arange(len(indices))
    scratch[indices] = place
    once: NDArray[np.int64] = indices[scratch[indices] == place]
    return once
