"""The paged KV cache of a home rank: a pool of blocks, the requests' block tables, the tensors."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

from asyncmoe.config import KvConfig
from asyncmoe.errors import ConfigError
from asyncmoe.model import Cache, CacheSpec, ModelSpec

ALIGNMENT = 64  # bytes: a line of the caches, as torch aligns its own memory


def _bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def token_bytes(caches: tuple[CacheSpec, ...]) -> int:
    """Bytes of cache per token, all layers together."""
    return sum(_bytes(t.shape, t.dtype) for c in caches for t in c.per_token.values())


def pool_blocks(config: KvConfig, spec: ModelSpec, max_requests: int) -> int:
    """Blocks of the pool: as configured, or as many as fit the memory and could ever be used."""
    if config.blocks is not None:
        return config.blocks
    per_token = token_bytes(spec.caches)
    useful = max_requests * math.ceil(spec.context / config.block_tokens)
    if per_token == 0:
        return useful
    fitting = int(config.memory_gib * 2**30) // (per_token * config.block_tokens)
    if fitting == 0:
        raise ConfigError(
            f"kv.memory_gib = {config.memory_gib} does not hold one block of "
            f"{per_token * config.block_tokens} bytes"
        )
    return min(fitting, useful)


class BlockPool:
    """Which blocks are free, and the block table of every request row."""

    def __init__(self, blocks: int, block_tokens: int, requests: int, context: int) -> None:
        self.blocks, self.block_tokens = blocks, block_tokens
        self.free_blocks = blocks
        self._free = np.arange(blocks - 1, -1, -1, dtype=np.int64)
        width = min(blocks, math.ceil(context / block_tokens))
        self.table = np.zeros((requests, width), np.int64)

    def needed(self, tokens: int) -> int:
        """Blocks for `tokens` tokens."""
        return math.ceil(tokens / self.block_tokens)

    def reserve(self, row: int, count: int) -> None:
        """Give `count` blocks to request `row`. There must be as many in `free_blocks`."""
        assert count <= self.free_blocks, (count, self.free_blocks)
        self.free_blocks -= count
        self.table[row, :count] = self._free[self.free_blocks : self.free_blocks + count]
        self.table[row, count:] = self.table[row, 0]  # padding reads the request's own cache

    def release(self, row: int, count: int) -> None:
        """Take the `count` blocks of request `row` back."""
        self._free[self.free_blocks : self.free_blocks + count] = self.table[row, :count]
        self.free_blocks += count
        assert self.free_blocks <= self.blocks

    def index(self, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Cache index (block * block_tokens + offset) of each (request row, position)."""
        block, offset = np.divmod(positions, self.block_tokens)
        return self.table[rows, block] * self.block_tokens + offset


def cache_tensors(
    spec: ModelSpec, blocks: int, block_tokens: int, requests: int, device: torch.device
) -> Cache:
    """The tensors of every decoder layer, paged ones as [blocks, block_tokens, *shape].

    Zeroed: a masked-out position is multiplied by 0, and 0 times an uninitialised NaN is NaN.
    """
    return [
        {
            **{
                name: _zeros((blocks, block_tokens, *t.shape), t.dtype, device)
                for name, t in layer.per_token.items()
            },
            **{
                name: _zeros((requests, *t.shape), t.dtype, device)
                for name, t in layer.per_request.items()
            },
        }
        for layer in spec.caches
    ]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """On a CPU the kernel's zero pages, which become memory when they are first written: torch
    writes all of its zeros at once, half a second for a GiB that may never be used."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    count = _bytes(shape, dtype)
    memory = torch.from_numpy(np.zeros(count + ALIGNMENT, np.uint8))
    first = -memory.data_ptr() % ALIGNMENT
    return memory[first : first + count].view(dtype).view(shape)
