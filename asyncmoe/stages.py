"""Each kind of stage on a live rank: how its batch is taken, and what becomes of its result."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from asyncmoe import native
from asyncmoe.attentionstages import AttentionStages
from asyncmoe.dispatcher import Dispatcher
from asyncmoe.errors import AsyncMoeError
from asyncmoe.executor import Step
from asyncmoe.expertstages import ExpertStages
from asyncmoe.herald import Herald
from asyncmoe.home import Home
from asyncmoe.march import March, Together
from asyncmoe.microqueue import Queues, are_plain
from asyncmoe.model import Cache, Model
from asyncmoe.passage import Passage, Passed
from asyncmoe.receptor import Receptor
from asyncmoe.rows import Rows, gather_rows, no_rows
from asyncmoe.sampler import Course
from asyncmoe.stage import Kind, StageChain
from asyncmoe.steps import AttentionStep, ExpertStep, HeadStep

log = logging.getLogger(__name__)
_NO_TOKENS = np.empty(0, np.int64)


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
        self._model, self._chain, self._queues = model, chain, queues
        # By stage and by layer, so that nothing is looked up or sliced for a batch.
        self._kinds = chain.kinds
        self._layers = [chain.layer(stage) for stage in range(len(chain))]
        self.experts = ExpertStages(
            model=model,
            queues=queues,
            layers=self._layers,
            local=list(local),
            local_experts=(local >= 0).sum(1).tolist(),
            per_expert=per_expert,
            dispatcher=dispatcher,
            held_rows=receptor.held_rows,
            home=home,
        )
        self._cache = cache
        self._home = cast(Home, home)  # None where no rows of stages that need it are
        self._fatal = fatal
        departure: Any = None
        if home is not None and home.books is not None and not are_plain(queues):
            departure = native.columns.Departure(
                home.books, dispatcher.outboxes, queues, dispatcher.rank,
                receptor.held_rows, receptor.now_s, home.wake,
            )  # fmt: skip
        self.attention = AttentionStages(
            model=model,
            queues=queues,
            layers=self._layers,
            cache=cache,
            dispatcher=dispatcher,
            receptor=receptor,
            home=self._home,
            no_tokens=_NO_TOKENS,
            departure=departure,
        )
        self._local_tensors = [torch.from_numpy(of_layer) for of_layer in local]
        plain = not per_expert and chain.tracks == 1
        self._passable = [plain and bool((of_layer >= 0).all()) for of_layer in local]
        self._all_passable = all(self._passable)

    def prepare(self, stage: int, max_rows: int) -> Step:
        """See `Stages`."""
        kind = self._kinds[stage]
        if kind is Kind.EXPERT:
            return self.experts.prepare(stage, max_rows)
        if kind is Kind.ATTENTION:
            return self.attention.prepare(stage, max_rows)
        return self._head_step(
            stage, gather_rows(self._home, self._queues.take_chunks(stage, max_rows))
        )

    def _head_step(self, stage: int, rows: Rows) -> HeadStep:
        home = self._home
        sampled = home.chunks.samples[rows.chunks].nonzero()[0]
        sampling = home.sampling.batch(home.chunks.requests_of(rows.chunks[sampled]))
        tokens = rows.gathered.at_slots(home.table.token) if stage == 0 else _NO_TOKENS
        return HeadStep(
            stage, rows, tokens, sampled, sampling, self._model, home.table, self._cache
        )

    def passage(self, step: Step, last: Callable[[], int], herald: Herald) -> Step:
        """See `Stages`. Chunks with another of their request in the layers keep to the queues."""
        if not isinstance(step, AttentionStep) or not self._passable[step.layer]:
            return step
        if not self._home.chunks.alone(step.rows.chunks):
            return step
        behind = last()
        layers = (behind + 1) // 2
        end = next((i for i in range(step.layer, layers) if not self._passable[i]), layers)
        head = course = None
        if self._home.prunes(step.rows):  # some of its rows end behind the last attention stage
            end = min(end, self._chain.layers - 1)
        elif behind == self._chain.head and end == layers:
            head = self._head_step(behind, step.rows)
            course = self._home.course(step.rows) if self._all_passable else None
        if end == step.layer:
            return step
        return Passage(step, end, head, self._local_tensors, herald, course)

    def march(self, chunks: NDArray[np.int64], together: Together, herald: Herald) -> March:
        """See `Stages`."""
        home, layers = self._home, self._chain.layers
        rows = gather_rows(home, chunks) if len(chunks) else no_rows(home)
        tokens = rows.gathered.at_slots(home.table.token)
        return March(
            first=AttentionStep(0, 0, rows, tokens, self._model, home.table, self._cache),
            end=layers,
            head=self._head_step(self._chain.head, rows) if len(chunks) else None,
            local=self._local_tensors,
            herald=herald,
            course=home.course(rows) if len(chunks) else Course.of_none(),
            together=together,
        )

    def went_on(self, step: Passage, passed: Passed) -> None:
        """See `Stages`."""
        assert passed.sampled is not None
        self._home.pass_head(step.first.rows, passed.sampled.tokens)
        step.heard()
        self._home.let_go()

    def finish(self, step: Step, result: Any) -> None:
        """See `Stages`."""
        match step:
            case ExpertStep():
                self.experts.finish(step, result)
                return
            case AttentionStep():
                self.attention.finish(step, result)
            case HeadStep():
                self._home.leave_head(step, result)
            case Passage():
                if isinstance(step, March):
                    step.is_over()
                self._leave_passage(step, result)
        if self._home is not None:
            self._home.let_go()

    def _leave_passage(self, step: Passage, passed: Passed) -> None:
        if passed.next_stage is not None:
            self._home.leave_passage(step.first.rows, passed.next_stage)
            self._home.pump()
        else:
            assert step.head is not None
            self._home.leave_head(step.head, passed.sampled)

    def failed(self, step: Step, error: BaseException) -> None:
        """See `Stages`: an expert batch belongs to others, so its failure is this rank's."""
        name = self._chain.name(step.stage)
        log.error("stage %s failed", name, exc_info=error)
        if isinstance(step, ExpertStep):
            self._fatal(AsyncMoeError(f"{name} failed: {error}"))
            return
        if isinstance(step, March):
            step.is_over()
        rows = step.first.rows if isinstance(step, Passage) else step.rows
        for chunk in rows.chunks[rows.alive(self._home.table)].tolist():
            self._home.end(self._home.request_of(chunk), "failed", f"{name} failed: {error}")

    def broken(self, error: Exception) -> None:
        """See `Stages`."""
        log.error("the executor stopped", exc_info=error)
        self._fatal(AsyncMoeError(f"the executor stopped: {error}"))
