"""Multi-head attention of one decoder layer: projections, and what lies between them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from asyncmoe.models.layers.linear import Linear
from asyncmoe.models.layers.norm import RmsNorm
from asyncmoe.models.layers.paged import PagedBatch, paged_attention
from asyncmoe.models.layers.rope import Angles, Rotary
from asyncmoe.native.kinds import kernels_for


@dataclass(frozen=True)
class AttentionSpec:
    """Grouped-query attention with the switches that families differ in.

    `head_norm` normalises each head of q and k, with weights [heads + kv_heads, head_dim];
    `vector_norm` takes all heads of q, and all of k, as one vector; `clip` bounds q, k and v;
    `window` w lets position p see positions above p - w; `sinks` [heads] is one more logit in each
    head's softmax, with no value.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rotary: Rotary
    scale: float
    head_norm: RmsNorm | None = None
    vector_norm: tuple[RmsNorm, RmsNorm] | None = None
    clip: float | None = None
    window: int | None = None
    sinks: Tensor | None = None

    @property
    def norms(self) -> list[RmsNorm]:
        """All that there are."""
        return [n for n in (self.head_norm, *(self.vector_norm or ())) if n is not None]


class Mixer(ABC):
    """All of a layer's attention but its products with weights."""

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec

    @abstractmethod
    def __call__(
        self, qkv: Tensor, angles: Angles, batch: PagedBatch, cache: Mapping[str, Tensor]
    ) -> Tensor:
        """qkv [rows, (heads + 2 * kv_heads) * head_dim] -> [rows, heads * head_dim].

        Writes the rows' K and V to the cache; `qkv` is given up and may be overwritten.
        """


class TorchMixer(Mixer):
    """On any device and in any dtype."""

    def __call__(
        self, qkv: Tensor, angles: Angles, batch: PagedBatch, cache: Mapping[str, Tensor]
    ) -> Tensor:
        spec = self.spec
        heads, kv_heads, dim = spec.heads, spec.kv_heads, spec.head_dim
        if spec.vector_norm is not None:
            q, k, v = torch.split(qkv, [heads * dim, kv_heads * dim, kv_heads * dim], -1)
            qkv = torch.cat((spec.vector_norm[0](q), spec.vector_norm[1](k), v), -1)
        if spec.clip is not None:
            qkv = qkv.clamp(-spec.clip, spec.clip)
        qk, v = torch.split(qkv.view(len(qkv), -1, dim), [heads + kv_heads, kv_heads], 1)
        if spec.head_norm is not None:
            qk = spec.head_norm(qk)
        q, k = torch.split(spec.rotary.rotate(qk, angles), [heads, kv_heads], 1)
        for name, rows in (("k", k), ("v", v)):
            cache[name].flatten(0, 1).index_copy_(0, batch.rows.cache_index, rows)
        mixed = paged_attention(
            q, k, v, cache["k"], cache["v"], batch,
            scale=spec.scale, window=spec.window, sinks=spec.sinks,
        )  # fmt: skip
        return mixed.flatten(1)


class CompiledMixer(Mixer):
    """One call of a kernel, which reads K and V where they lie in the cache."""

    def __init__(self, spec: AttentionSpec, dtype: torch.dtype, kernels: Any) -> None:
        super().__init__(spec)
        self._dtype, self._kernels = dtype, kernels
        self._sinks = None if spec.sinks is None else spec.sinks.float().contiguous()
        vector_norm = spec.vector_norm or (None, None)
        self.kernel = kernels.AttentionLayer(
            bf16=dtype is torch.bfloat16,
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            dim=spec.head_dim,
            rotated=spec.rotary.spec.dim,
            window=spec.window or 0,
            scale=spec.scale,
            clip=0.0 if spec.clip is None else float(torch.tensor(spec.clip, dtype=dtype)),
            eps=max((norm.eps for norm in spec.norms), default=0.0),
            q_norm=_address(vector_norm[0]),
            k_norm=_address(vector_norm[1]),
            head_norm=_address(spec.head_norm),
            sinks=0 if self._sinks is None else self._sinks.data_ptr(),
        )
        self._mixed = spec.heads * spec.head_dim
        self._width = self._mixed + 2 * spec.kv_heads * spec.head_dim
        self._store: _Store | None = None

    @staticmethod
    def takes(spec: AttentionSpec) -> bool:
        """Whether the kernel can do what `spec` asks."""
        return spec.head_dim % 8 == 0 and len({norm.eps for norm in spec.norms}) < 2

    def __call__(
        self, qkv: Tensor, angles: Angles, batch: PagedBatch, cache: Mapping[str, Tensor]
    ) -> Tensor:
        rows = batch.count
        if (
            qkv.dtype is not self._dtype
            or not qkv.is_contiguous()
            or qkv.shape != (rows, self._width)
        ):
            raise ValueError("q, k and v do not fit the layer and the batch")
        angle, store = self.memory(angles, batch, cache)
        out = qkv.new_empty((rows, self._mixed))
        self.kernel(batch.compiled(self._kernels), qkv.data_ptr(), angle, out.data_ptr(), *store)
        return out

    def memory(
        self, angles: Angles, batch: PagedBatch, cache: Mapping[str, Tensor]
    ) -> tuple[int, tuple[int, int, int, int, int]]:
        """What the kernel is told of the batch's angles, and of the cache and the rotary table.

        Raises `ValueError` if they do not fit the layer and the batch.
        """
        row, store = angles.row, self._store
        if row is not None and not _is_column(row, batch.count):
            raise ValueError("positions do not fit the batch")
        if store is None or not store.holds(cache["k"], cache["v"], angles.table):
            self._store = store = _Store(
                self.spec, self._dtype, cache["k"], cache["v"], angles.table
            )
        if store.block_tokens != batch.rows.block_tokens:
            raise ValueError(f"blocks of {store.block_tokens} tokens, not as in the batch")
        return 0 if row is None else row.data_ptr(), store.addresses


class _Store:
    """The cache of a layer and its rotary table, which are the same tensors step after step.

    Looking up and checking all that the kernel must know of them would take as long as the kernel.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        dtype: torch.dtype,
        keys: Tensor,  # [blocks, block_tokens, kv_heads, head_dim]
        values: Tensor,  # likewise
        table: Tensor,  # [positions, 2, rotated dimensions]
    ) -> None:
        """Raises `ValueError` if the tensors are not those of such a layer."""
        right = keys.shape == values.shape and keys.shape[2:] == (spec.kv_heads, spec.head_dim)
        right = right and table.shape[1:] == (2, spec.rotary.spec.dim)
        for tensor in (keys, values, table):
            right = right and tensor.dtype is dtype and tensor.is_contiguous()
        if not right:
            raise ValueError("the cache or the rotary angles do not fit the layer")
        self._tensors = ref(keys), ref(values), ref(table)
        self.block_tokens: int = keys.shape[1]
        self.addresses = (
            keys.data_ptr(), values.data_ptr(), keys.shape[0], table.data_ptr(), table.shape[0],
        )  # fmt: skip

    def holds(self, keys: Tensor, values: Tensor, table: Tensor) -> bool:
        """Whether it was made of these very tensors."""
        own_keys, own_values, own_table = self._tensors
        return own_keys() is keys and own_values() is values and own_table() is table


def _is_column(column: Tensor, rows: int) -> bool:
    return column.dtype is torch.int64 and column.is_contiguous() and column.shape[0] == rows


def _address(norm: RmsNorm | None) -> int:
    return 0 if norm is None else norm.weight.data_ptr()


def make_mixer(spec: AttentionSpec, like: Tensor) -> Mixer:
    """The fastest mixer for a layer with weights like this one."""
    kernels = kernels_for(like)
    if kernels is None or not CompiledMixer.takes(spec):
        return TorchMixer(spec)
    return CompiledMixer(spec, like.dtype, kernels)


class Attention:
    """Grouped-query attention.

    Latent or recurrent attention is another class with the same call: the cache that it is given
    has the tensors of its layer's `CacheSpec`.
    """

    def __init__(self, qkv: Linear, out: Linear, mixer: Mixer) -> None:
        self.qkv, self.out, self.mixer = qkv, out, mixer

    def __call__(
        self, x: Tensor, angles: Angles, batch: PagedBatch, cache: Mapping[str, Tensor]
    ) -> Tensor:
        """x [rows, hidden] -> [rows, hidden]; writes the rows' K and V to the cache."""
        return self.out(self.mixer(self.qkv(x), angles, batch, cache))

    @property
    def nbytes(self) -> int:
        """Bytes held, but for the rotary table, which the layers share."""
        norms = self.mixer.spec.norms
        return self.qkv.nbytes + self.out.nbytes + sum(norm.nbytes for norm in norms)
