"""Running something on a virtual loop, and what it takes in the real world."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Coroutine
from typing import Any, TypeVar

import torch

from asyncmoe.virtual.loop import VirtualLoop

T = TypeVar("T")

SLACK_S = 20e-6  # about what a parcel costs a host


def run(main: Coroutine[Any, Any, T], seed: int | None = None, slack_s: float = SLACK_S) -> T:
    """Run `main` on a new virtual loop to its end; `seed` and `slack_s` as for `VirtualLoop`.

    Raises what `main` does, and `Standstill`.
    """
    torch.set_num_threads(1)  # nothing here is worth a second thread
    gc.collect()
    gc.freeze()  # what is there already need not be walked again and again
    try:
        with asyncio.Runner(loop_factory=lambda: VirtualLoop(seed, slack_s)) as runner:
            return runner.run(main)
    finally:
        gc.unfreeze()
