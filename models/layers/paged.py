"""Attention over a paged K/V cache for segments of any lengths, without padding to the longest.

Decode rows: each request's context is cut into spans of a few blocks; every (request, span) is one
small attention, and a request's spans are joined by a float32 softmax over their log-sums, so that
a row costs its own spans whatever its neighbours have. Requests of nearly the same length need no
cut: one span each, and nothing to join. Prefill chunks: one fused attention per chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from asyncmoe.model import RowBatch

SPAN_TOKENS = 32  # of a span, if contexts differ: little to pad, few spans to join
PADDING = 1.25  # contexts are not cut if padding them to the longest costs at most this factor


@dataclass(frozen=True, slots=True)
class Spans:
    """The (request, span) pairs of a batch's decode rows, sorted by request."""

    row: Tensor | None  # int64 [pairs]: decode row; None: one span per row, in order
    block: Tensor  # int64 [pairs * blocks of a span]: block ids in the cache
    mask: Tensor  # [pairs, 1, 1, tokens of a span]: 0 or, where the row must not look, -inf


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
        self._spans: dict[tuple[int | None, torch.dtype], Spans] = {}
        self._chunks: list[Chunk] | None = None

    def spans(self, window: int | None, dtype: torch.dtype) -> Spans:
        """Spans of the decode rows, for layers with this window, mask in `dtype`."""
        key = window, dtype
        if key not in self._spans:
            self._spans[key] = _spans(self.rows, window, dtype)
        return self._spans[key]

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


def _spans(rows: RowBatch, window: int | None, dtype: torch.dtype) -> Spans:
    size, device = rows.block_tokens, rows.context_len.device
    context = rows.context_len[: rows.decode_rows]
    blocks = (context + (size - 1)) // size
    longest = int(blocks.max())
    if window is None and longest * len(context) <= PADDING * int(blocks.sum()):
        block = rows.block_table[: rows.decode_rows, :longest].reshape(-1)
        position = torch.arange(longest * size, device=device)
        return Spans(None, block, _additive(position >= context[:, None], dtype))
    oldest = torch.zeros_like(context) if window is None else (context - window).clamp_(min=0)
    first = oldest // size
    span = max(1, SPAN_TOKENS // size)
    counts = (blocks - first + (span - 1)) // span
    row = torch.repeat_interleave(counts)
    nth = torch.arange(len(row), device=device) - (counts.cumsum(0) - counts)[row]
    start = (first[row] + nth * span)[:, None]
    ordinal = start + torch.arange(span, device=device)  # of the request's blocks
    block = rows.block_table[row[:, None], ordinal.clamp_(max=rows.block_table.shape[1] - 1)]
    position = start * size + torch.arange(span * size, device=device)
    hidden = (position >= context[row, None]) | (position < oldest[row, None])
    return Spans(row, block.view(-1), _additive(hidden, dtype))


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
        spans = batch.spans(window, query.dtype)
        return _decode(query, key_cache, value_cache, spans, scale, sinks)
    output = torch.empty_like(query)
    if decode:
        spans = batch.spans(window, query.dtype)
        output[:decode] = _decode(query[:decode], key_cache, value_cache, spans, scale, sinks)
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
    spans: Spans,
    scale: float,
    sinks: Tensor | None,
) -> Tensor:
    rows, heads, dim = query.shape
    kv_heads = key_cache.shape[2]
    pairs = len(spans.mask)
    # The query heads of a KV head are the queries of one attention, so that K and V are not spread.
    grouped = query.view(rows, kv_heads, heads // kv_heads, dim)
    if spans.row is not None:
        grouped = grouped[spans.row]
    keys = key_cache.index_select(0, spans.block).view(pairs, -1, kv_heads, dim)
    values = value_cache.index_select(0, spans.block).view(pairs, -1, kv_heads, dim)
    mixed, log_sum = _attend(
        grouped, keys.transpose(1, 2), values.transpose(1, 2), spans.mask, scale
    )
    mixed, log_sum = mixed.reshape(pairs, heads, dim), log_sum.reshape(pairs, heads)
    if spans.row is not None:
        mixed, log_sum = _join(mixed, log_sum, spans.row, rows)
    if sinks is not None:
        mixed = mixed * _left_by_sinks(log_sum, sinks)[..., None]
    return mixed.to(query.dtype)


def _join(mixed: Tensor, log_sum: Tensor, row: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Join each row's spans: float32 [rows, heads, head_dim] and log-sums [rows, heads]."""
    pairs, heads, dim = mixed.shape
    top = log_sum.new_full((rows, heads), -torch.inf)
    top.scatter_reduce_(0, row[:, None].expand(pairs, heads), log_sum, "amax")
    share = (log_sum - top[row]).exp_()[..., None]
    shares = torch.cat((mixed * share, share), -1)  # the sum of shares rides along
    total = shares.new_zeros((rows, heads, dim + 1)).index_add_(0, row, shares)
    mass = total[..., dim:]
    return total[..., :dim] / mass, top + mass[..., 0].log()


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
