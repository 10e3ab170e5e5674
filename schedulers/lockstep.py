"""Synchronous expert parallelism: all ranks go through each layer together, with a barrier behind
the attention stage and one behind the experts.

The baseline that "Toward Cost-Efficient Serving of Mixture-of-Experts with Asynchrony" (arXiv
2505.08944) and its kin compare with, and the way of the usual engines, on the same kernels, queues
and transports as every other rule here. Requests join at iteration boundaries, and a rank without
requests takes part. `barrier.py` has the protocol, docs/schedulers.md why nobody hangs.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from asyncmoe.errors import ProtocolError
from asyncmoe.scheduler import QueueView, Scheduler, SchedulerContext, SchedulerParameters
from asyncmoe.schedulers.barrier import ExpertSide, HomeSide, Word, decode
from asyncmoe.stage import Kind


class Track:
    """One micro-batch on one rank: as a home of requests, with experts, or both."""

    def __init__(self, context: SchedulerContext, track: int) -> None:
        peers, chain = context.peers, context.chain
        self._rank, self._kinds = peers.rank, chain.kinds
        self.home = HomeSide(peers, chain, track) if self._rank in peers.homes else None
        has_experts = chain.layers > 0 and self._rank in peers.experts
        self.expert = ExpertSide(peers, chain, track) if has_experts else None

    def side(self, stage: int) -> HomeSide | ExpertSide:
        """The side that runs `stage`."""
        side = self.expert if self._kinds[stage] is Kind.EXPERT else self.home
        assert side is not None  # there are no rows for it here
        return side

    def attend(self, rows: NDArray[np.int64]) -> None:
        """Go on as far as nothing is left to wait for."""
        home, expert = self.home, self.expert
        while True:
            if home is not None and home.attend(rows):
                if home.has_just_called and expert is not None:
                    expert.called(self._rank, home.round)
            elif expert is not None and expert.attend(rows):
                if home is not None:
                    home.answered(self._rank, expert.round - 1)
            else:
                return

    def stages(self) -> list[int]:
        """Those that may run."""
        sides = (self.home, self.expert)
        return [side.stage for side in sides if side is not None and side.stage is not None]


class Lockstep(Scheduler):
    """The stage that the barrier lets through; the batch policy cuts it into batches."""

    synchronous = True

    class Parameters(SchedulerParameters):
        """Which form the exchange has."""

        exchange: Literal["all_to_all", "all_gather"] = Field(
            "all_to_all",
            description="all_to_all: a row goes to the ranks whose experts it chose; all_gather: "
            "every row goes to every rank with experts, and a partial sum of every row comes back "
            "from each",
        )

        @property
        def to_all(self) -> bool:
            return self.exchange == "all_gather"

    def __init__(self, context: SchedulerContext, parameters: SchedulerParameters) -> None:
        super().__init__(context, parameters)
        self._tracks = [Track(context, track) for track in range(context.chain.tracks)]

    def attend(self, rows: NDArray[np.int64]) -> None:
        for track in self._tracks:
            track.attend(rows)

    def choose(self, view: QueueView) -> int | None:
        stages = [s for track in self._tracks for s in track.stages() if view.runnable[s]]
        if len(stages) < 2:
            return stages[0] if stages else None
        return min(stages, key=lambda stage: (view.oldest_s[stage], stage))

    def executed(self, stage: int, rows: int) -> None:
        self._track_of(stage).side(stage).executed(rows)

    def finished(self, stage: int) -> None:
        self._track_of(stage).side(stage).finished()

    def heard(self, source: int, message: bytes) -> bool:
        notice = decode(message)
        if notice.track >= len(self._tracks):
            raise ProtocolError(f"notice of track {notice.track}; there are {len(self._tracks)}")
        track = self._tracks[notice.track]
        if notice.word == Word.CALL:
            begins = track.home is not None and track.home.called(notice.round)
            if track.expert is None:
                return begins
            opens = track.expert.called(source, notice.round, notice.rows, notice.sent)
            return begins or opens
        if notice.word == Word.ANSWER and track.home is not None:
            return track.home.answered(source, notice.round)
        raise ProtocolError(f"a notice with word {notice.word} for rank {self.context.peers.rank}")

    def lost(self, rank: int) -> None:
        for track in self._tracks:
            for side in (track.home, track.expert):
                if side is not None:
                    side.lost(rank)

    def _track_of(self, stage: int) -> Track:
        return self._tracks[self.context.chain.track(stage)]
