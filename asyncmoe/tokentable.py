"""The token table of a home rank: one slot per row in the layers, with epochs and open parts.

A combine row is taken in only if its slot's epoch is current, the slot waits for that very expert
stage, and the part's bit is still open; everything else is counted and dropped (DESIGN.md §6,
"Exactly once"). Clearing a bit is idempotent, so a repeated row can never complete a token early.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

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
        self.epoch = np.zeros(slots, np.uint32)
        self.stage = np.full(slots, -1, np.int64)  # expert stage whose parts are to come
        self.open = np.zeros(slots, np.uint64)  # parts to come, as bits
        self.part_count = np.zeros(slots, np.int64)
        self.chunk = np.full(slots, -1, np.int64)
        self.token = np.zeros(slots, np.int64)
        self.position = np.zeros(slots, np.int64)
        self.residual = torch.zeros(slots, hidden, dtype=dtype, device=device)
        self.parts = torch.zeros(slots * max_parts, hidden, dtype=dtype, device=device)
        self.dropped_rows = 0  # combine rows that were stale, repeated or out of range
        self._scratch = np.empty(slots, np.int64)
        self._place_scratch = np.empty(slots * max_parts, np.int64)
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

    def expect(self, slots: NDArray[np.int64], stage: int, parts: NDArray[np.int64]) -> None:
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
        """Store combine rows of `stage`; return the slots that now have all their parts.

        Args:
            slot, epoch, part: [rows], from the wire and not trusted.
            payload: [rows, hidden].
        """
        if not len(slot):
            return np.empty(0, np.int64)
        if int(slot.max()) >= self.slots or int(part.max()) >= self.max_parts:
            inside = (slot < self.slots) & (part < self.max_parts)
            return self._accept_some(inside, stage, slot, epoch, part, payload)
        index, bit = slot.astype(np.int64), _BIT[part]
        good = (self.epoch[index] == epoch) & (self.stage[index] == stage)
        good &= (self.open[index] & bit) != 0
        if not good.all():
            return self._accept_some(good, stage, slot, epoch, part, payload)
        place = index * self.max_parts + part
        if len(distinct(place, self._place_scratch)) < len(place):
            first = np.zeros(len(place), np.bool_)
            first[np.unique(place, return_index=True)[1]] = True
            return self._accept_some(first, stage, slot, epoch, part, payload)
        self.parts.index_copy_(0, torch.from_numpy(place), payload)
        np.bitwise_and.at(self.open, index, ~bit)
        return distinct(index[self.open[index] == 0], self._scratch)

    def _accept_some(
        self,
        good: NDArray[np.bool_],
        stage: int,
        slot: NDArray[np.uint32],
        epoch: NDArray[np.uint32],
        part: NDArray[np.uint8],
        payload: torch.Tensor,
    ) -> NDArray[np.int64]:
        keep = good.nonzero()[0]
        self.dropped_rows += len(good) - len(keep)
        rows = payload.index_select(0, torch.from_numpy(keep))
        return self.accept(stage, slot[keep], epoch[keep], part[keep], rows)

    def merge(self, slots: torch.Tensor, part_count: NDArray[np.int64]) -> torch.Tensor:
        """Residual plus parts, summed in part order in float32: [rows, hidden], model dtype.

        Runs on the compute thread. `part_count` is the table's column at `slots`, copied when the
        batch was prepared.
        """
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


def distinct(indices: NDArray[np.int64], scratch: NDArray[np.int64]) -> NDArray[np.int64]:
    """`indices` without repeats, in no particular order; `scratch` is as long as they reach.

    Unlike np.unique it does not sort, and costs a few microseconds.
    """
    place = np.arange(len(indices))
    scratch[indices] = place
    once: NDArray[np.int64] = indices[scratch[indices] == place]
    return once
