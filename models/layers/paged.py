"""Attention over a paged K/V cache for segments of any lengths, without padding to the longest.

Decode rows: every (request, KV block) pair is one small product; the softmax of a request runs over
its pairs in float32. A request with 3 blocks costs 3, whatever its neighbours have. Prefill chunks:
one fused attention per chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from asyncmoe.model import RowBatch
from asyncmoe.models.layers.linear import product_dtype


@dataclass(frozen=True, slots=True)
class DecodePairs:
    """The (request, block) pairs of a batch's decode rows, sorted by request."""

    segment: Tensor  # int64 [pairs]: decode row
    block: Tensor  # int64 [pairs]: block id in the cache
    hidden: Tensor  # bool [pairs, 1, 1, block_tokens]: positions that the row must not see
    starts: Tensor  # int64 [decode rows]: first pair of each row


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
        self.rows = rows
        self._pairs: dict[int | None, DecodePairs] = {}
        self._chunks: list[Chunk] | None = None

    def pairs(self, window: int | None) -> DecodePairs:
        """Pairs of the decode rows for layers with this window."""
        if window not in self._pairs:
            self._pairs[window] = _decode_pairs(self.rows, window)
        return self._pairs[window]

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


def _decode_pairs(rows: RowBatch, window: int | None) -> DecodePairs:
    size = rows.block_tokens
    context = rows.context_len[: rows.decode_rows]
    oldest = torch.zeros_like(context) if window is None else (context - window).clamp(min=0)
    first = oldest // size
    counts = (context + size - 1) // size - first
    segment = torch.repeat_interleave(counts)
    starts = counts.cumsum(0) - counts
    ordinal = torch.arange(len(segment), device=context.device) + (first - starts)[segment]
    block = rows.block_table[segment, ordinal]
    position = ordinal[:, None] * size + torch.arange(size, device=context.device)
    hidden = (position >= context[segment, None]) | (position < oldest[segment, None])
    return DecodePairs(segment, block, hidden[:, None, None], starts)


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
        return _decode(query, key_cache, value_cache, batch.pairs(window), scale, sinks)
    output = torch.empty_like(query)
    if decode:
        output[:decode] = _decode(
            query[:decode], key_cache, value_cache, batch.pairs(window), scale, sinks
        )
    for chunk in chunks:
        rows = slice(chunk.start, chunk.stop)
        keys, values, oldest = key[rows], value[rows], 0
        if chunk.context > chunk.stop - chunk.start:
            keys, values, oldest = _gather(chunk, batch.rows, key_cache, value_cache, window)
        output[rows] = _prefill(query[rows], keys, values, chunk, oldest, scale, window, sinks)
    return output


def _decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    pairs: DecodePairs,
    scale: float,
    sinks: Tensor | None,
) -> Tensor:
    rows, heads, dim = query.shape
    kv_heads = key_cache.shape[2]
    grouped = (query.float() * scale).view(rows, kv_heads, heads // kv_heads, dim)
    keys = key_cache[pairs.block].float()  # [pairs, block_tokens, kv_heads, dim]
    values = value_cache[pairs.block].float()
    scores = grouped[pairs.segment] @ keys.permute(0, 2, 3, 1)
    scores.masked_fill_(pairs.hidden, float("-inf"))
    top = _largest(scores.amax(-1), pairs, rows)
    if sinks is not None:
        sink = sinks.float().view(1, kv_heads, -1)
        top = torch.maximum(top, sink)
    weights = (scores - top[pairs.segment, ..., None]).exp_()
    mixed = weights @ values.transpose(1, 2)  # [pairs, kv_heads, group, dim]
    total = _sums(torch.cat((mixed, weights.sum(-1, keepdim=True)), -1), pairs, rows)
    mixed, mass = total[..., :dim], total[..., dim:]
    if sinks is not None:
        mass = mass + (sink - top).exp()[..., None]
    return (mixed / mass).reshape(rows, heads, dim).to(query.dtype)


def _largest(scores: Tensor, pairs: DecodePairs, rows: int) -> Tensor:
    """Maximum over the pairs of each row: [pairs, ...] -> [rows, ...]."""
    flat = scores.flatten(1)
    index = pairs.segment[:, None].expand_as(flat)
    top = flat.new_full((rows, flat.shape[1]), float("-inf")).scatter_reduce_(
        0, index, flat, "amax"
    )
    return top.view(rows, *scores.shape[1:])


def _sums(values: Tensor, pairs: DecodePairs, rows: int) -> Tensor:
    """Sum over the pairs of each row: [pairs, ...] -> [rows, ...]."""
    total = values.new_zeros((rows, *values.shape[1:]))
    return total.index_add_(0, pairs.segment, values)


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
    if sinks is not None:
        query, keys, values = _with_sinks(query, keys, values, sinks, scale)
    dtype = product_dtype(query.dtype, query.device)
    # The query heads of a KV head are the heads of one batch entry, so that K and V are not copied.
    group = heads // kv_heads
    grouped = query.to(dtype).view(rows, kv_heads, group, -1).permute(1, 2, 0, 3)
    keys = keys.to(dtype).transpose(0, 1)[:, None].expand(-1, group, -1, -1)
    values = values.to(dtype).transpose(0, 1)[:, None].expand(-1, group, -1, -1)
    whole = rows == tokens and (window is None or window >= tokens) and sinks is None
    mask = None
    if not whole:
        mask = _visible(rows, tokens, chunk.context, oldest, window, query.device)
        mask = functional.pad(mask, (0, keys.shape[2] - tokens), value=True)
    mixed = functional.scaled_dot_product_attention(
        grouped, keys, values, attn_mask=mask, is_causal=whole, scale=scale
    )
    return mixed.permute(2, 0, 1, 3).flatten(1, 2)[..., :dim]


def _visible(
    rows: int, tokens: int, context: int, oldest: int, window: int | None, device: torch.device
) -> Tensor:
    """bool [rows, tokens]: whether the chunk's i-th row sees the token at position oldest + j."""
    at = torch.arange(context - rows, context, device=device)[:, None]
    seen = torch.arange(oldest, oldest + tokens, device=device)
    visible = seen <= at
    return visible if window is None else visible & (seen > at - window)


def _with_sinks(
    query: Tensor, keys: Tensor, values: Tensor, sinks: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Make the sink an ordinary token: one more dimension, in which only that token's key is 1."""
    extra = (sinks.to(query.dtype) / scale).view(1, -1, 1).expand(len(query), -1, 1)
    query = torch.cat((query, extra), -1)
    keys, values = (
        functional.pad(keys, (0, 1, 0, 0, 0, 1)),
        functional.pad(values, (0, 1, 0, 0, 0, 1)),
    )
    keys[-1, :, -1] = 1
    return query, keys, values
