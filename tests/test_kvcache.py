"""The tensors of the paged cache."""

from __future__ import annotations

from pathlib import Path

import torch

from asyncmoe.checkpoint import open_checkpoint
from asyncmoe.config import ModelConfig
from asyncmoe.kvcache import cache_tensors, token_bytes
from tests.checkpoints import cached_checkpoint

CPU = torch.device("cpu")


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_a_cache_is_zero_aligned_and_of_the_model_s_shape() -> None:
    spec = open_checkpoint(ModelConfig(name=str(cached_checkpoint("olmoe")), dtype="bfloat16")).spec
    cache = cache_tensors(spec, blocks=3, block_tokens=16, requests=2, device=CPU)
    assert len(cache) == 4
    for layer in cache:
        for tensor in layer.values():
            assert (tensor.shape, tensor.dtype) == ((3, 16, 2, 16), torch.bfloat16)
            assert tensor.is_contiguous()
            assert tensor.data_ptr() % 64 == 0
            assert not tensor.any()


def test_a_cache_takes_memory_only_when_it_is_written() -> None:
    spec = open_checkpoint(ModelConfig(name=str(cached_checkpoint("olmoe")))).spec
    before = resident_bytes()
    # So large that no tensor of it fits into what the heap has kept of earlier ones.
    blocks = (1 << 33) // (16 * token_bytes(spec.caches))
    cache = cache_tensors(spec, blocks, 16, requests=2, device=CPU)
    assert resident_bytes() - before < 64 << 20
    assert sum(tensor.nbytes for layer in cache for tensor in layer.values()) > 8191 << 20
