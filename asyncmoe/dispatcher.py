"""The dispatcher: sends rows to the experts they chose, and partial sums home.

Deadlock freedom is kept here (docs/architecture.md, "No deadlock"): a dispatch parcel leaves only
when it has credits of its expert rank, and waits in an outbox of this process until then; a
combine parcel needs none, since its rows were reserved in the home's token table when the dispatch
was posted, and is posted at once. So no combine ever stands behind a dispatch that waits.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from asyncmoe.errors import ConfigError
from asyncmoe.outbox import make_outboxes
from asyncmoe.placement import Placement
from asyncmoe.routing import Router
from asyncmoe.stage import StageChain
from asyncmoe.steps import AttentionResult, ExpertStep
from asyncmoe.tokentable import TokenTable
from asyncmoe.transport import Limits, Parcel, Transport


class Dispatcher:
    """Turns results of steps into parcels of one rank."""

    def __init__(
        self,
        *,
        rank: int,
        placement: Placement,
        chain: StageChain,
        transport: Transport,
        limits: Limits,
        row_bytes: int,
        window_rows: int,
        per_expert: bool,
        to_all: bool = False,
    ) -> None:
        """`to_all`: each row goes to every rank with experts of its layer."""
        self.rank = rank
        self.router = Router(chain, placement.owner, placement.world, per_expert, to_all)
        if limits.parcel_bytes < row_bytes:
            raise ConfigError(
                f"transport.parcel_bytes = {limits.parcel_bytes}: a row of this model takes "
                f"{row_bytes} bytes"
            )
        # [stages, ranks] dispatch rows that have left
        self.sent_rows = np.zeros((len(chain), placement.world), np.int64)
        self.outboxes = make_outboxes(
            rank,
            placement.world,
            window_rows,
            min(limits.parcel_rows, limits.parcel_bytes // row_bytes),
            row_bytes,
            transport,
            self.sent_rows,
        )

        self._answer = self.outboxes.answer

    @property
    def sent_bytes(self) -> int:
        """Payload sent to all ranks."""
        return sum(self.outboxes.bytes_to)

    def dispatch(
        self,
        stage: int,
        table: TokenTable,
        slots: NDArray[np.int64],
        result: AttentionResult,
    ) -> Parcel | None:
        """Send the rows of an attention batch to their experts of `stage`.

        Returns the parcel for the experts of this very rank, which never touches the transport.
        """
        routed = result.routed
        if routed is None:  # rows were taken out behind the step
            epochs = table.epoch[slots]
            routed = self.router(
                stage, slots, epochs, result.hidden, result.experts, result.weights
            )
        table.expect(slots, stage, routed.parts)
        return self.outboxes.send(routed.parcels)

    def combine(self, step: ExpertStep, out: torch.Tensor) -> list[Parcel]:
        """Send the output rows of an expert batch home; see `Outboxes.answer`."""
        return self._answer(step.stage, step.back, out)
