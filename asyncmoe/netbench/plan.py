"""What a benchmark of one transport does: the cases, and where its ranks leave word for each other.

A plan is all that the processes of a benchmark share; it crosses to them as JSON.
"""

from __future__ import annotations

import asyncio
import dataclasses
from dataclasses import dataclass
from pathlib import Path

import orjson

KIB, MIB = 1 << 10, 1 << 20
FOCUS_BYTES = 180 * KIB  # 32 rows of 2880 in bfloat16: what ranks mostly send
SWEEP_BYTES = (4 * KIB, 16 * KIB, 64 * KIB, FOCUS_BYTES, MIB, 4 * MIB, 16 * MIB)
PATTERNS = ("pairs", "fan-in")
_POLL_S = 0.005
_GROUPS = 4  # that are in flight, at the least, where the depth allows it


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement: who sends to whom at once, how much at a time, and how many in flight."""

    number: int
    size: int  # bytes of a payload
    depth: int  # parcels of a flow that are posted and not acknowledged
    flows: tuple[tuple[int, int], ...]  # (source, target)


@dataclass(frozen=True, slots=True)
class Plan:
    """A benchmark of one transport."""

    transport: str
    ranks: int
    pattern: str  # of PATTERNS
    sizes: tuple[int, ...]
    depths: tuple[int, ...]
    seconds: float  # of each round
    rounds: int  # of each case; the best counts
    idle_s: float

    def cases(self) -> list[Case]:
        """All cases, in the order in which they run: `pairs` takes each pair of ranks in turn."""
        if self.pattern == "fan-in":
            together = [tuple((rank, 0) for rank in range(1, self.ranks))]
        else:
            lower = range(self.ranks)
            together = [((low, high),) for low in lower for high in range(low + 1, self.ranks)]
        shapes = [(size, depth) for size in self.sizes for depth in self.depths]
        return [
            Case(number, size, depth, flows)
            for number, (flows, (size, depth)) in enumerate(
                (flows, shape) for flows in together for shape in shapes
            )
        ]

    def encode(self) -> str:
        """As text."""
        return orjson.dumps(dataclasses.asdict(self)).decode()

    @classmethod
    def decode(cls, text: str) -> Plan:
        """From text."""
        values = orjson.loads(text)
        return cls(**{**values, "sizes": tuple(values["sizes"]), "depths": tuple(values["depths"])})


class FolderDirectory:
    """A `Directory` of files, for ranks that one process has started on this machine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def publish(self, key: str, value: str) -> None:
        """See `Directory`."""
        path = self._path(key)
        partial = path.with_suffix(".partial")
        partial.write_text(value)
        partial.rename(path)

    async def lookup(self, key: str, timeout_s: float) -> str:
        """See `Directory`."""
        path = self._path(key)
        async with asyncio.timeout(timeout_s):
            while not path.exists():  # noqa: ASYNC110 - another process makes it
                await asyncio.sleep(_POLL_S)
        return path.read_text()

    def _path(self, key: str) -> Path:
        return self._folder / key.replace("/", "-")


def group_of(depth: int) -> int:
    """How many parcels are acknowledged together: up to a quarter of what is in flight, so that
    sender and receiver work at the same time."""
    return next(size for size in range(max(1, depth // _GROUPS), 0, -1) if depth % size == 0)
