"""What `asyncmoe doctor` tries for real: a small compute on a device, a parcel over a transport."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from asyncmoe import registry
from asyncmoe.directory import MemoryDirectory
from asyncmoe.errors import AsyncMoeError, MissingDependency, MissingHardware
from asyncmoe.transport import (
    Arrival,
    Limits,
    Parcel,
    ParcelClass,
    Receiver,
    Transport,
    TransportContext,
)
from asyncmoe.virtual.run import make_loop

TRIAL_S = 20.0
ROWS, HIDDEN = 4, 64


@dataclass(frozen=True, slots=True)
class Trial:
    """How a try ended: `works`, `missing` (a library or a device) or `broken`."""

    name: str
    status: str
    detail: str


def try_devices(threads: int) -> list[Trial]:
    """Try every registered device."""
    trials = []
    for name in registry.names("devices"):
        with asyncio.Runner(loop_factory=_loop_for(name)) as runner:
            trials.append(runner.run(_tried(name, _compute(name, threads))))
    return trials


def _loop_for(device: str) -> Callable[[], asyncio.AbstractEventLoop] | None:
    """What a device needs; None for any loop."""
    try:
        return make_loop if registry.find("devices", device).virtual else None
    except AsyncMoeError:
        return None  # the trial itself tells it


def try_transports() -> list[Trial]:
    """Try every registered transport between two ranks on loopback."""
    return [asyncio.run(_tried(name, _exchange(name))) for name in registry.names("transports")]


async def _tried(name: str, work: Coroutine[Any, Any, str]) -> Trial:
    try:
        return Trial(name, "works", await asyncio.wait_for(work, TRIAL_S))
    except (MissingDependency, MissingHardware) as error:
        return Trial(name, "missing", str(error))
    except TimeoutError as error:
        return Trial(name, "broken", str(error) or f"no end within {TRIAL_S:g} s")
    except Exception as error:  # whatever it is, it is the diagnosis
        known = isinstance(error, AsyncMoeError)
        return Trial(name, "broken", str(error) if known else f"{type(error).__name__}: {error}")


async def _compute(name: str, threads: int) -> str:
    device = registry.find("devices", name)(threads)
    try:
        where = device.torch_device
        done: list[str] = []
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.ones(ROWS, HIDDEN, dtype=dtype, device=where)
            total = await device.run(partial(_sum_of_product, x))
            if total != ROWS * ROWS * HIDDEN:
                raise AsyncMoeError(f"a {dtype} product gave {total}, not {ROWS * ROWS * HIDDEN}")
            done.append(str(dtype).removeprefix("torch."))
        return f"computed in {' and '.join(done)} on {where}"
    finally:
        await device.close()


def _sum_of_product(x: torch.Tensor) -> float:
    return float((x @ x.T).sum())


async def _exchange(name: str) -> str:
    kind, directory = registry.find("transports", name), MemoryDirectory()
    ends = [_End(kind, rank, directory) for rank in range(2)]
    try:
        await asyncio.gather(*(end.transport.start(end) for end in ends))
        for end, other in (ends, ends[::-1]):
            end.transport.post(1 - end.rank, _parcel(end.rank + 1, end.device))
            end.transport.send(1 - end.rank, b"hello")
            if await other.payload_sum != ROWS * HIDDEN * (end.rank + 1):
                raise AsyncMoeError(f"a parcel of rank {end.rank} arrived changed")
            if await other.message != b"hello":
                raise AsyncMoeError(f"a message of rank {end.rank} arrived changed")
        chosen = ends[0].transport.carriers().get(1)
        over = f", over {chosen}" if chosen else ""
        return f"two ranks exchanged parcels and messages on loopback{over}"
    finally:
        await asyncio.gather(*(end.transport.close() for end in ends))


class _End(Receiver):
    """One of two ranks; it keeps what it gets first."""

    def __init__(self, kind: type[Transport], rank: int, directory: MemoryDirectory) -> None:
        loop = asyncio.get_running_loop()
        self.rank = rank
        on_cpu = "cpu" in kind.device_types
        self.device = torch.device("cpu") if on_cpu else torch.device(kind.device_types[0], rank)
        self.payload_sum: asyncio.Future[float] = loop.create_future()
        self.message: asyncio.Future[bytes] = loop.create_future()
        self.transport = kind(
            TransportContext(
                rank, 2, directory, Limits(), self.device, b"doctor", start_timeout_s=10.0
            )
        )

    def on_parcel(self, arrival: Arrival) -> None:
        self.payload_sum.set_result(float(arrival.parcel.payload.sum()))
        arrival.release()

    def on_message(self, source: int, message: bytes) -> None:
        self.message.set_result(message)

    def on_peer_lost(self, peer: int, error: Exception) -> None:
        for future in (self.payload_sum, self.message):
            if not future.done():
                future.set_exception(error)
                future.exception()  # at an orderly end nobody waits for it any more


def _parcel(fill: int, device: torch.device) -> Parcel:
    each = np.arange(ROWS)
    return Parcel(
        kind=ParcelClass.DISPATCH,
        stage=1,
        slot=each.astype(np.uint32),
        epoch=np.zeros(ROWS, np.uint32),
        part=np.zeros(ROWS, np.uint8),
        payload=torch.full((ROWS, HIDDEN), float(fill), device=device),
        fanout=np.ones(ROWS, np.uint8),
        expert=each.astype(np.uint16),
        weight=np.ones(ROWS, np.float32),
    )
