"""Each kind of stage on a live rank: how its batch is taken, and what becomes of its result."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncmoe.dispatcher import Dispatcher
from asyncmoe.errors import AsyncMoeError
from asyncmoe.executor import Step
from asyncmoe.home import Home
from asyncmoe.microqueue import Queues
from asyncmoe.model import Cache, Model
from asyncmoe.receptor import Receptor
from asyncmoe.stage import Kind, StageChain
from asyncmoe.steps import AttentionStep, ExpertStep, HeadStep, expert_step, gather_rows

log = logging.getLogger(__name__)


class RankStages:
    """Implements `executor.Stages`: between the queues of a rank and its dispatcher and home."""

    def __init__(
        self,
        *,
        model: Model,
        chain: StageChain,
        queues: Queues,
        local: NDArray[np.int64],
        per_expert: bool,
        home: Home | None,
        cache: Cache,
        dispatcher: Dispatcher,
        receptor: Receptor,
        fatal: Callable[[Exception], None],
    ) -> None:
        """`local`: [MoE layers, experts] local index of each expert; -1 where it is elsewhere.

        `fatal` is called with what ends the rank.
        """
        self._model, self._chain, self._queues, self._local = model, chain, queues, local
        self._local_experts = (local >= 0).sum(1).tolist()
        self._per_expert, self._home_or_none, self._cache = per_expert, home, cache
        self._dispatcher, self._receptor, self._fatal = dispatcher, receptor, fatal

    @property
    def _home(self) -> Home:
        assert self._home_or_none is not None  # no rows of these stages are on other ranks
        return self._home_or_none

    def prepare(self, stage: int, max_rows: int) -> Step:
        """See `Stages`."""
        kind, layer = self._chain.kind(stage), self._chain.layer(stage)
        if kind is Kind.EXPERT:
            return expert_step(
                self._model,
                stage,
                layer,
                self._queues.take_rows(stage, max_rows),
                self._local[layer],
                self._local_experts[layer],
                self._per_expert,
            )
        home, model, cache = self._home, self._model, self._cache
        rows = gather_rows(home, self._queues.take_chunks(stage, max_rows))
        if kind is Kind.ATTENTION:
            tokens = home.table.token[rows.slots] if layer == 0 else rows.slots[:0]
            return AttentionStep(stage, layer, rows, tokens, model, home.table, cache)
        sampled = home.chunks.samples[rows.chunks].nonzero()[0]
        sampling = home.sampling.batch(home.chunks.request[rows.chunks[sampled]])
        tokens = home.table.token[rows.slots]
        return HeadStep(stage, rows, tokens, sampled, sampling, model, home.table, cache)

    def finish(self, step: Step, result: Any) -> None:
        """See `Stages`."""
        match step:
            case AttentionStep():
                slots, result = self._home.leave_attention(step, result)
                if len(slots):
                    local = self._dispatcher.dispatch(
                        step.stage + 1, self._home.table, slots, result
                    )
                    if local is not None:
                        self._receptor.put_local(local)
                self._home.pump()
            case HeadStep():
                self._home.leave_head(step, result)
            case ExpertStep():
                for parcel in self._dispatcher.combine(step, result):
                    self._home.take_in(parcel)
                for segment in step.segments:
                    segment.hold.read(segment.parcel.rows)
                    self._receptor.left(segment.source, segment.parcel.rows)

    def failed(self, step: Step, error: BaseException) -> None:
        """See `Stages`: an expert batch belongs to others, so its failure is this rank's."""
        name = self._chain.name(step.stage)
        log.error("stage %s failed", name, exc_info=error)
        if isinstance(step, ExpertStep):
            self._fatal(AsyncMoeError(f"{name} failed: {error}"))
            return
        for chunk in step.rows.chunks[step.rows.alive(self._home.table)].tolist():
            self._home.end(self._home.request_of(chunk), "failed", f"{name} failed: {error}")

    def broken(self, error: Exception) -> None:
        """See `Stages`."""
        log.error("the executor stopped", exc_info=error)
        self._fatal(AsyncMoeError(f"the executor stopped: {error}"))
