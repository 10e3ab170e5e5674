"""Attention over a paged K/V cache for segments of any lengths, without padding to the longest.

Decode rows: requests of similar length share one attention, padded to the longest of them. Prefill
chunks: one fused attention per chunk. Padding comes behind a row's own tokens and adds exact zeros
to its sums, so that on a CPU a row's result is the same, bit for bit, whatever its neighbours; but
a prompt that is cut into other chunks may be rounded otherwise, and so may a token that is prefill
rather than decode.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from asyncmoe.model import RowBatch

PADDING = 1.25  # rows are not parted if padding them to the longest costs at most this factor
SHORT_TOKENS = 64  # rows up to this long are never parted
TILE_TOKENS = 16  # contexts are padded to a multiple: BLAS rounds the last few columns otherwise


@dataclass(frozen=True, slots=True)
class Group:
    """Decode rows that share one attention."""

    rows: Tensor | None  # int64 [n]; None: all decode rows, in order
    block: Tensor  # int64 [n * blocks of a row]: block ids in the cache
    mask: Tensor  # [n, 1, 1, tokens of a row]: 0 or, where the row must not look, -inf


@dataclass(frozen=True, slots=True)
class Chunk:
    """One prefill segment: rows [start, stop) of the batch."""

    index: int  # segment
    start: int
    stop: int
    context: int  # tokens of the request including this chunk


class PagedBatch:
    """A `RowBatch` with the index arrays that the layers of a stage share, made on demand."""

    def __init__(self, rows: RowBatch) -> None:
        self.rows, self.count = rows, rows.cache_index.shape[0]
        self._groups: dict[tuple[int | None, torch.dtype], list[Group]] = {}
        self._chunks: list[Chunk] | None = None
        self._compiled: tuple[Any, tuple[Tensor, ...]] | None = None

    def compiled(self, kernels: Any) -> Any:
        """The batch as kernels take it, valid as long as this object.

        Raises `IndexError` where the columns contradict each other.
        """
        if self._compiled is None:
            rows = self.rows
            columns = (
                _int64s(rows.cache_index),
                _int64s(rows.query_start),
                _int64s(rows.context_len),
                _int64s(rows.block_table),
            )
            index, starts, context, table = columns
            segments, width = table.shape
            if starts.shape != (segments + 1,) or context.shape != (segments,):
                raise IndexError(f"columns of a batch of {segments} segments differ in length")
            made = kernels.PagedRows(
                self.count, segments, rows.decode_rows, index.data_ptr(), starts.data_ptr(),
                context.data_ptr(), table.data_ptr(), width, rows.block_tokens,
            )  # fmt: skip
            self._compiled = made, columns
        return self._compiled[0]

    def groups(self, window: int | None, dtype: torch.dtype) -> list[Group]:
        """The decode rows, for layers with this window, masks in `dtype`."""
        key = window, dtype
        if key not in self._groups:
            self._groups[key] = _groups(self.rows, window, dtype)
        return self._groups[key]

    def chunks(self) -> list[Chunk]:
        """The prefill segments."""
        if self._chunks is None:
            first = self.rows.decode_rows
            starts = self.rows.query_start[first:].tolist()
            context = self.rows.context_len[first:].tolist()
            self._chunks = [
                Chunk(first + i, starts[i], starts[i + 1], context[i]) for i in range(len(context))
            ]
        return self._chunks


def _int64s(column: Tensor) -> Tensor:
    """The column as kernels read it; the column itself, but for unusual ones."""
    if column.dtype is torch.int64 and column.is_contiguous():
        return column
    return column.to(torch.int64).contiguous()


def _groups(batch: RowBatch, window: int | None, dtype: torch.dtype) -> list[Group]:
    """One group if all rows are of similar length, else one per halving of the longest."""
    size = batch.block_tokens
    context = batch.context_len[: batch.decode_rows]
    oldest = torch.zeros_like(context) if window is None else (context - window).clamp_(min=0)
    first = oldest // size
    blocks = (context + (size - 1)) // size - first
    most = int(blocks.max())
    if most * len(blocks) <= PADDING * int(blocks.sum()):
        return [_group(batch, None, first, most, oldest, dtype)]
    groups = []
    while most:
        least = most // 2 if most * size > SHORT_TOKENS else 0
        rows = ((blocks > least) & (blocks <= most)).nonzero()[:, 0]
        if len(rows):
            longest = int(blocks[rows].max())
            groups.append(_group(batch, rows, first[rows], longest, oldest[rows], dtype))
        most = least
    return groups


def _group(
    batch: RowBatch,
    rows: Tensor | None,
    first: Tensor,  # int64 [n]: first block, by its place in the request
    blocks: int,  # of the longest row
    oldest: Tensor,  # int64 [n]: first position that the row sees
    dtype: torch.dtype,
) -> Group:
    size, device = batch.block_tokens, first.device
    tile = TILE_TOKENS // math.gcd(TILE_TOKENS, size)
    blocks = -(-blocks // tile) * tile
    every = slice(0, batch.decode_rows) if rows is None else rows
    ordinal = first[:, None] + torch.arange(blocks, device=device)
    table = batch.block_table[every]
    block = table.gather(1, ordinal.clamp_(max=table.shape[1] - 1)).view(-1)
    position = (first * size)[:, None] + torch.arange(blocks * size, device=device)
    context = batch.context_len[every, None]
    hidden = (position >= context) | (position < oldest[:, None])
    return Group(rows, block, _additive(hidden, dtype))


def _additive(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask to add to scores: bool [pairs, tokens] -> [pairs, 1, 1, tokens], -inf where hidden."""
    mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    return mask.masked_fill_(hidden, -torch.inf)[:, None, None]


def paged_attention(
    query: Tensor,  # [rows, heads, head_dim]
    key: Tensor,  # [rows, kv_heads, head_dim], already written to the cache
    value: Tensor,  # likewise
    key_cache: Tensor,  # [blocks, block_tokens, kv_heads, head_dim]
    value_cache: Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of each row over its own request: [rows, heads, head_dim] in query's dtype.

    `window` w lets position p see positions above p - w. `sinks` [heads] is one more logit in each
    head's softmax, with no value.
    """
    decode = batch.rows.decode_rows
    chunks = batch.chunks()
    if not chunks:
        groups = batch.groups(window, query.dtype)
        return _decode(query, key_cache, value_cache, groups, scale, sinks)
    output = torch.empty_like(query)
    if decode:
        groups = batch.groups(window, query.dtype)
        output[:decode] = _decode(query[:decode], key_cache, value_cache, groups, scale, sinks)
    for chunk in chunks:
        rows = slice(chunk.start, chunk.stop)
        keys, values, oldest = key[rows], value[rows], 0
        if chunk.context > chunk.stop - chunk.start:
            keys, values, oldest = _gather(chunk, batch.rows, key_cache, value_cache, window)
        output[rows] = _prefill(query[rows], keys, values, chunk, oldest, scale, window, sinks)
    return output


def _attend(
    query: Tensor,  # [batch, heads, queries, head_dim]
    keys: Tensor,  # [batch, heads, tokens, head_dim]
    values: Tensor,
    mask: Tensor | None,  # added to the scores; None: causal, as many queries as tokens
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Mixed values like `query`, and the float32 log-sum of the weights [batch, heads, queries].

    This is what `scaled_dot_product_attention` runs on a CPU; the public call keeps the log-sum to
    itself.
    """
    mixed, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys, values, 0.0, mask is None, attn_mask=mask, scale=scale
    )
    return mixed, log_sum


def _decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    groups: list[Group],
    scale: float,
    sinks: Tensor | None,
) -> Tensor:
    if groups[0].rows is None:
        return _decode_group(query, key_cache, value_cache, groups[0], scale, sinks)
    output = torch.empty_like(query)
    for group in groups:
        own = query[group.rows]
        output[group.rows] = _decode_group(own, key_cache, value_cache, group, scale, sinks)
    return output


def _decode_group(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    group: Group,
    scale: float,
    sinks: Tensor | None,
) -> Tensor:
    rows, heads, dim = query.shape
    kv_heads = key_cache.shape[2]
    # The query heads of a KV head are the queries of one attention, so that K and V are not spread.
    grouped = query.view(rows, kv_heads, heads // kv_heads, dim)
    keys = key_cache.index_select(0, group.block).view(rows, -1, kv_heads, dim)
    values = value_cache.index_select(0, group.block).view(rows, -1, kv_heads, dim)
    mixed, log_sum = _attend(
        grouped, keys.transpose(1, 2), values.transpose(1, 2), group.mask, scale
    )
    mixed = mixed.reshape(rows, heads, dim)
    if sinks is not None:
        mixed = mixed * _left_by_sinks(log_sum.reshape(rows, heads), sinks)[..., None]
    return mixed.to(query.dtype)


def _left_by_sinks(log_sum: Tensor, sinks: Tensor) -> Tensor:
    """The part of each head's weight that its sink leaves: e^log_sum / (e^log_sum + e^sink)."""
    return torch.sigmoid(log_sum - sinks.float())


def _gather(
    chunk: Chunk, rows: RowBatch, key_cache: Tensor, value_cache: Tensor, window: int | None
) -> tuple[Tensor, Tensor, int]:
    """The chunk's K and V [tokens, kv_heads, head_dim] and the position of the first of them."""
    size = rows.block_tokens
    oldest = 0
    if window is not None:
        first_query = chunk.context - (chunk.stop - chunk.start)
        oldest = max(0, first_query - window + 1) // size * size
    blocks = rows.block_table[chunk.index, oldest // size : -(-chunk.context // size)]
    tokens = chunk.context - oldest
    return (
        key_cache[blocks].flatten(0, 1)[:tokens],
        value_cache[blocks].flatten(0, 1)[:tokens],
        oldest,
    )


def _prefill(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    chunk: Chunk,
    oldest: int,
    scale: float,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    rows, heads, dim = query.shape
    tokens, kv_heads, _ = keys.shape
    group = heads // kv_heads
    # The query heads of a KV head are the heads of one batch entry, so that K and V are not copied.
    grouped = query.view(rows, kv_heads, group, dim).permute(1, 2, 0, 3)
    keys = keys.transpose(0, 1)[:, None].expand(-1, group, -1, -1)
    values = values.transpose(0, 1)[:, None].expand(-1, group, -1, -1)
    mask = None
    if rows < tokens or (window is not None and window < tokens):
        mask = _mask(chunk, oldest, tokens, window, query)
    mixed, log_sum = _attend(grouped, keys, values, mask, scale)
    if sinks is not None:
        left = _left_by_sinks(log_sum.reshape(heads, rows), sinks[:, None])
        mixed = mixed * left.view(kv_heads, group, rows, 1)
    return mixed.permute(2, 0, 1, 3).flatten(1, 2)


def _mask(
    chunk: Chunk,
    oldest: int,
    tokens: int,
    window: int | None,
    like: Tensor,
) -> Tensor:
    """[1, 1, rows, tokens]: 0 where the i-th row sees the token at oldest + j, else -inf."""
    rows = chunk.stop - chunk.start
    at = torch.arange(chunk.context - rows, chunk.context, device=like.device)[:, None]
    seen = torch.arange(oldest, oldest + tokens, device=like.device)
    hidden = seen > at
    if window is not None:
        hidden |= seen <= at - window
    return _additive(hidden, like.dtype).view(1, 1, rows, tokens)
