"""The receptor: takes in what other ranks send, and puts rows where they wait for their stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from asyncmoe import native
from asyncmoe.bell import Bell
from asyncmoe.dispatcher import Dispatcher
from asyncmoe.errors import ProtocolError
from asyncmoe.home import Home
from asyncmoe.microqueue import Queues, are_plain
from asyncmoe.packed import pack
from asyncmoe.stage import Kind, StageChain
from asyncmoe.stats import RankTimes
from asyncmoe.transport import Arrival, Parcel, ParcelClass


class Intake(Protocol):
    """See `Receptor.intake`."""

    is_open: bool  # else `other` gets all arrivals

    def take(self, arrival: Arrival) -> None:
        """See `Receptor.take`."""


class Receptor:
    """The receiving side of one rank's parcels."""

    def __init__(
        self,
        *,
        rank: int,
        world: int,
        chain: StageChain,
        local: NDArray[np.int64],
        dtype: torch.dtype,
        queues: Queues,
        dispatcher: Dispatcher,
        home: Home | None,
        now_s: Callable[[], float],
        window_rows: int,
        times: RankTimes,
        copies: bool = False,
    ) -> None:
        """`local`: [MoE layers, experts] local index of each expert; -1 where it is elsewhere.

        `dtype`: the model's, which payloads must have. `window_rows`: credits of each home.
        `copies`: dispatch rows do not wait in the transport's memory, since their stage may wait
        for more of them, which need that memory.
        """
        self.copies = copies
        self._rank, self._chain, self.local, self.dtype = rank, chain, local, dtype
        self._expert_stages = {s for s, kind in enumerate(chain.kinds) if kind is Kind.EXPERT}
        self._queues, self._dispatcher, self._home = queues, dispatcher, home
        self.bell: Bell  # of the executor, to be set
        self.now_s, self.times = now_s, times
        self.window_rows = window_rows
        self.held_rows = np.zeros(world, np.int64)  # of each home: its rows that are here
        # [stages, ranks] dispatch rows that have come
        self.arrived_rows = np.zeros((len(chain), world), np.int64)

    def intake(
        self, other: Callable[[Arrival], None], failed: Callable[[Exception, str, int], None]
    ) -> Intake | None:
        """`take`, compiled, for arrivals that are as they should be; None where that is not there.

        Args:
            other: takes the others.
            failed: hears of an error of ours, what it was about and the rank that sent it.
        """
        if native.columns is None or are_plain(self._queues):
            return None
        homecoming = None if self._home is None else self._home.homecoming
        made: Intake = native.columns.Intake(
            self, self._queues, self._dispatcher.outboxes, homecoming, self.bell, other, failed
        )
        return made

    def take(self, arrival: Arrival) -> None:
        """A parcel of another rank. Raises `ProtocolError` if it makes no sense here."""
        begin_s = self.times.clock()
        parcel = arrival.parcel
        if parcel.stage not in self._expert_stages:
            raise ProtocolError(f"parcel for stage {parcel.stage}, which is no expert stage")
        if parcel.payload.dtype is not self.dtype:
            raise ProtocolError(f"payload of {parcel.payload.dtype}; the model has {self.dtype}")
        self.bell.ring()  # before the home asks to be called behind the choice that follows
        if parcel.kind is ParcelClass.DISPATCH:
            self._take_dispatch(arrival)
        else:
            self._take_combine(arrival)
        self.times.received_parcels += 1
        self.times.receive_s += self.times.clock() - begin_s

    def left(self, source: int, rows: int) -> None:
        """`rows` dispatch rows of `source` are not held here any more."""
        self.held_rows[source] -= rows

    def put_local(self, parcel: Parcel) -> None:
        """Rows of this rank for experts of this rank, which take no credits."""
        if parcel.rows:
            self.held_rows[self._rank] += parcel.rows
            self._queues.put_parcel(self._rank, parcel, None, self.now_s())

    def _take_dispatch(self, arrival: Arrival) -> None:
        source, parcel = arrival.source, arrival.parcel
        self._check_experts(parcel)
        rows = parcel.rows
        if rows == 0:
            arrival.release()
            return
        held = int(self.held_rows[source]) + rows
        if held > self.window_rows:
            raise ProtocolError(f"{held} rows at once; the window has {self.window_rows}")
        self.held_rows[source] = held
        self.arrived_rows[parcel.stage, source] += rows
        release: Callable[[], None] | None = arrival.release
        if self.copies:
            parcel.payload = parcel.payload.clone()
            arrival.release()
            release = None
        self._queues.put_parcel(source, parcel, release, self.now_s())

    def _check_experts(self, parcel: Parcel) -> None:
        layer = self._chain.layer(parcel.stage)
        if native.columns is not None:
            packed = pack(parcel)
            if native.columns.all_local(
                packed.block, packed.count, packed.pairs, self.local[layer]
            ):
                return
        if parcel.rows and int(parcel.fanout.min()) < 1:
            raise ProtocolError("dispatch row without an expert")
        if len(parcel.expert) and int(parcel.expert.max()) >= self.local.shape[1]:
            raise ProtocolError(f"expert {parcel.expert.max()} of {self.local.shape[1]}")
        if len(parcel.expert) and int(self.local[layer, parcel.expert].min()) < 0:
            stray = parcel.expert[self.local[layer, parcel.expert] < 0][0]
            raise ProtocolError(f"expert {stray} of layer {layer} is not on rank {self._rank}")

    def _take_combine(self, arrival: Arrival) -> None:
        parcel = arrival.parcel
        if self._home is None:
            raise ProtocolError(f"combine rows for rank {self._rank}, which is home of nothing")
        # Credits first: a parcel with wrong ones is refused as a whole, and its lease taken back.
        self._dispatcher.outboxes.credit(arrival.source, parcel.credits)
        self._home.take_in(parcel, arrival.release)
