"""Multi-head attention of one decoder layer: projections, norms, rotation, cache, mixing."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from asyncmoe.models.layers.linear import Linear
from asyncmoe.models.layers.norm import RmsNorm
from asyncmoe.models.layers.paged import PagedBatch, paged_attention
from asyncmoe.models.layers.rope import Rotary


class Attention:
    """Grouped-query attention with the switches that families differ in.

    `head_norm` normalises each head of q and k, with weights [heads + kv_heads, head_dim];
    `vector_norm` takes all heads of q, and all of k, as one vector; `clip` bounds q, k and v.
    Latent or recurrent attention is another class with the same call: the cache that it is given
    has the tensors of its layer's `CacheSpec`.
    """

    def __init__(
        self,
        qkv: Linear,
        out: Linear,
        rotary: Rotary,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        head_norm: RmsNorm | None = None,
        vector_norm: tuple[RmsNorm, RmsNorm] | None = None,
        clip: float | None = None,
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        self.qkv, self.out, self.rotary = qkv, out, rotary
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.head_norm, self.vector_norm, self.clip = head_norm, vector_norm, clip
        self.window, self.sinks = window, sinks
        self.scale = head_dim**-0.5

    def __call__(
        self, x: Tensor, angles: Tensor, batch: PagedBatch, cache: Mapping[str, Tensor]
    ) -> Tensor:
        """x [rows, hidden] -> [rows, hidden]; writes the rows' K and V to the cache."""
        heads, kv_heads, dim = self.heads, self.kv_heads, self.head_dim
        qkv = self.qkv(x)
        if self.vector_norm is not None:
            q, k, v = torch.split(qkv, [heads * dim, kv_heads * dim, kv_heads * dim], -1)
            qkv = torch.cat((self.vector_norm[0](q), self.vector_norm[1](k), v), -1)
        if self.clip is not None:
            qkv = qkv.clamp(-self.clip, self.clip)
        qk, v = torch.split(qkv.view(len(x), -1, dim), [heads + kv_heads, kv_heads], 1)
        if self.head_norm is not None:
            qk = self.head_norm(qk)
        q, k = torch.split(self.rotary.rotate(qk, angles), [heads, kv_heads], 1)
        for name, rows in (("k", k), ("v", v)):
            cache[name].flatten(0, 1).index_copy_(0, batch.rows.cache_index, rows)
        mixed = paged_attention(
            q, k, v, cache["k"], cache["v"], batch,
            scale=self.scale, window=self.window, sinks=self.sinks,
        )  # fmt: skip
        return self.out(mixed.flatten(1))

    @property
    def nbytes(self) -> int:
        """Bytes held, but for the rotary table, which the layers share."""
        norms = (self.head_norm, *(self.vector_norm or ()))
        return sum(part.nbytes for part in (self.qkv, self.out, *norms) if part is not None)
