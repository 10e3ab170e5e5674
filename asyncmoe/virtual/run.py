"""Running something on a virtual loop, and what it takes in the real world."""

from __future__ import annotations

import asyncio
import functools
import gc
from collections.abc import Coroutine
from typing import Any, TypeVar

import torch

from asyncmoe import native
from asyncmoe.virtual.loop import VirtualLoop
from asyncmoe.virtual.plainloop import PlainLoop

T = TypeVar("T")

SLACK_S = 20e-6  # about what a parcel costs a host
_NEW_OBJECTS = 1_000_000  # before the garbage collector looks at them: hardly any are garbage


def run(main: Coroutine[Any, Any, T], seed: int | None = None, slack_s: float = SLACK_S) -> T:
    """Run `main` on a new virtual loop to its end; `seed` and `slack_s` as for `VirtualLoop`.

    Raises what `main` does, and `Standstill`.
    """
    torch.set_num_threads(1)  # nothing here is worth a second thread
    gc.collect()
    gc.freeze()  # what is there already need not be walked again and again
    thresholds = gc.get_threshold()
    gc.set_threshold(_NEW_OBJECTS)
    try:
        with asyncio.Runner(loop_factory=lambda: make_loop(seed, slack_s)) as runner:
            return runner.run(main)
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def make_loop(seed: int | None = None, slack_s: float = 0.0) -> VirtualLoop:
    """A new loop, compiled if that is there; arguments as for `VirtualLoop`."""
    kind = PlainLoop if native.columns is None else _compiled(native.columns.Timeline)
    return kind(seed, slack_s)


@functools.cache
def _compiled(timeline: type[Any]) -> type[VirtualLoop]:
    return type("CompiledLoop", (timeline, VirtualLoop), {})
