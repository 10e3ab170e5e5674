"""What this machine can do at most: bytes read from memory and matrix operations, per second.

Both with all threads that torch uses here, the median of the repeats. Memory is read by the sum of
a float32 tensor far larger than the caches; operations are those of a square matrix product.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

READ_BYTES = 256 << 20
REPEATS = 7
PRODUCT_SIZE = 2048
SLOW_PRODUCT_S = 0.5  # a dtype that takes longer than this for the small product is not repeated
DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Machine:
    """Rates of all threads together."""

    threads: int
    read_bytes_s: float
    product_ops_s: dict[str, float]  # by dtype; a multiplication and an addition are two operations

    @property
    def ops_s(self) -> float:
        """The fastest product of any dtype: narrower weights can be widened on their way in."""
        return max(self.product_ops_s.values())

    def report(self) -> dict[str, Any]:
        """In the units that people use."""
        return {
            "threads": self.threads,
            "read_gb_s": self.read_bytes_s / 1e9,
            "gflop_s": {name: rate / 1e9 for name, rate in self.product_ops_s.items()},
        }


def measure_machine() -> Machine:
    """Takes a few seconds, and half a GB of memory."""
    with torch.inference_mode():
        return Machine(
            torch.get_num_threads(),
            _read_bytes_s(),
            {str(dtype).removeprefix("torch."): _product_ops_s(dtype) for dtype in DTYPES},
        )


def _read_bytes_s() -> float:
    values = torch.ones(READ_BYTES // 4)
    return values.nbytes / _median_s(values.sum)


def _product_ops_s(dtype: torch.dtype) -> float:
    """Larger products are faster, unless the dtype has no instructions here: then it is enough to
    know that it is slow."""
    rate, size = 0.0, PRODUCT_SIZE // 4
    while size <= PRODUCT_SIZE:
        left, right = (torch.randn(size, size).to(dtype) for _ in range(2))
        seconds = _median_s(lambda left=left, right=right: left @ right.T)
        rate = max(rate, 2 * size**3 / seconds)
        if seconds * 8 > SLOW_PRODUCT_S:
            break
        size *= 2
    return rate


def _median_s(work: Callable[[], object]) -> float:
    work()
    times = []
    for _ in range(REPEATS):
        begin_s = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin_s)
    return statistics.median(times)
