"""Routing recordings: a Parquet file with one row per (request, position, layer).

Each rank writes what its router chose into a part of its own; the parts become one file at the end
of the run. Columns: request u32, position u32, layer u16, experts u16[top_k], weights f32[top_k].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncmoe.errors import ConfigError, MissingDependency

ROWS_PER_GROUP = 1 << 16  # kept in memory before they are written
_MOST_TOKENS = 1 << 26
_SHAPE = ("layers", "experts", "top_k")


@dataclass(frozen=True, slots=True)
class RoutingTrace:
    """A recording, for look-ups by layer and token."""

    layers: int
    experts: int
    top_k: int
    first: NDArray[np.int64]  # [requests] token of each request's position 0
    tokens: NDArray[np.int64]  # [requests] positions of each, from 0 on
    chosen: NDArray[np.uint16]  # [layers, tokens, top_k]
    weights: NDArray[np.float32]  # [layers, tokens, top_k]


class RoutingWriter:
    """Writes one rank's part. Not thread-safe: one thread adds, and it or a later one closes."""

    def __init__(self, path: Path, layers: int, experts: int, top_k: int) -> None:
        """Raises `MissingDependency` without pyarrow, `ConfigError` if `path` cannot be written."""
        self._arrow, self._top_k = _pyarrow(), top_k
        self._kept: list[tuple[NDArray[Any], ...]] = []
        self._rows = 0
        schema = _schema(self._arrow, dict(zip(_SHAPE, (layers, experts, top_k), strict=True)))
        try:
            self._writer = self._arrow.parquet.ParquetWriter(path, schema)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error}") from None

    def add(
        self,
        layer: int,
        requests: NDArray[np.int64],
        positions: NDArray[np.int64],
        experts: NDArray[np.int64],
        weights: NDArray[np.float32],
    ) -> None:
        """The choices [rows, top_k] of a batch. Arrays are copied, since callers reuse them."""
        layers = np.full(len(requests), layer, np.uint16)
        self._kept.append(
            (
                requests.astype(np.uint32),
                positions.astype(np.uint32),
                layers,
                experts.astype(np.uint16),
                weights.astype(np.float32),
            )
        )
        self._rows += len(requests)
        if self._rows >= ROWS_PER_GROUP:
            self._flush()

    def close(self) -> None:
        """Write what is kept and end the file. Idempotent."""
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        if self._kept:
            columns = [np.concatenate(column) for column in zip(*self._kept, strict=True)]
            self._kept, self._rows = [], 0
            self._writer.write_table(_table(self._arrow, self._writer.schema, columns))


def part_path(path: Path, rank: int) -> Path:
    """Where a rank writes its part of `path`."""
    return path.with_name(f"{path.name}.rank{rank}")


def join_parts(
    path: Path, ranks: int, number: Callable[[NDArray[np.int64]], NDArray[np.int64]]
) -> int:
    """Make one file of the ranks' parts, and remove them. Returns its rows.

    `number` maps engine request ids to those in the file; below 0 leaves the row out.

    Raises `ConfigError` if a part is missing or not a recording.
    """
    arrow, writer, rows = _pyarrow(), None, 0
    parts = [part_path(path, rank) for rank in range(ranks)]
    missing = [str(part) for part in parts if not part.exists()]
    if missing:
        raise ConfigError(f"parts of {path} are not here: {', '.join(missing)}")
    try:
        for part in parts:
            file = arrow.parquet.ParquetFile(part)
            writer = writer or arrow.parquet.ParquetWriter(path, file.schema_arrow)
            for group in range(file.num_row_groups):
                table = file.read_row_group(group)
                requests = number(table.column("request").to_numpy().astype(np.int64))
                table = table.set_column(
                    0, "request", arrow.array(np.maximum(requests, 0), arrow.uint32())
                )
                table = table.filter(arrow.array(requests >= 0)).cast(file.schema_arrow)
                writer.write_table(table)
                rows += table.num_rows
    except (OSError, arrow.ArrowException) as error:
        raise ConfigError(f"the parts of {path} cannot be joined: {error}") from None
    finally:
        if writer is not None:
            writer.close()
    for part in parts:
        part.unlink(missing_ok=True)
    return rows


def read_routing(path: Path) -> RoutingTrace:
    """Read a recording. Of each request the positions up to the first that is incomplete count.

    Raises `ConfigError` for a file that is none, `MissingDependency` without pyarrow.
    """
    arrow = _pyarrow()
    if not path.is_file():
        raise ConfigError(f"there is no file {path} with a routing recording")
    try:
        table = arrow.parquet.read_table(path)
        shape = [int(table.schema.metadata[name.encode()]) for name in _SHAPE]
        request, position, layer = (
            table.column(name).to_numpy().astype(np.int64)
            for name in ("request", "position", "layer")
        )
        chosen, weights = (
            table.column(name).combine_chunks().flatten().to_numpy()
            for name in ("experts", "weights")
        )
    except (OSError, arrow.ArrowException, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} is no routing recording: {error}") from None
    _, experts, top_k = shape
    if not len(request) or len(chosen) != len(request) * top_k or int(chosen.max()) >= experts:
        raise ConfigError(f"{path} is no routing recording of {experts} experts, {top_k} of a row")
    return _arranged(path, shape, request, position, layer, chosen, weights)


def _arranged(
    path: Path,
    shape: Sequence[int],
    request: NDArray[np.int64],
    position: NDArray[np.int64],
    layer: NDArray[np.int64],
    chosen: NDArray[np.uint16],
    weights: NDArray[np.float32],
) -> RoutingTrace:
    layers, experts, top_k = shape
    ids, number = np.unique(request, return_inverse=True)
    spans = np.zeros(len(ids), np.int64)
    np.maximum.at(spans, number, position + 1)
    if int(spans.sum()) > _MOST_TOKENS or int(layer.max()) >= layers:
        raise ConfigError(f"{path} has positions or layers beyond what a recording can have")
    first = np.cumsum(spans) - spans
    token = first[number] + position
    of_token = np.zeros((layers, int(spans.sum()), top_k), np.uint16)
    weight_of = np.zeros(of_token.shape, np.float32)
    of_token[layer, token] = chosen.reshape(-1, top_k)
    weight_of[layer, token] = weights.reshape(-1, top_k)
    seen = np.zeros(of_token.shape[:2], np.bool_)
    seen[layer, token] = True
    gaps = np.flatnonzero(~seen.all(0))
    owner = np.repeat(np.arange(len(ids)), spans)[gaps]
    np.minimum.at(spans, owner, gaps - first[owner])
    whole = spans > 0
    if not whole.any():
        raise ConfigError(f"{path} has no position with all of its {layers} layers")
    return RoutingTrace(layers, experts, top_k, first[whole], spans[whole], of_token, weight_of)


def _schema(arrow: Any, shape: dict[str, int]) -> Any:
    top_k = shape["top_k"]
    fields = [
        ("request", arrow.uint32()),
        ("position", arrow.uint32()),
        ("layer", arrow.uint16()),
        ("experts", arrow.list_(arrow.uint16(), top_k)),
        ("weights", arrow.list_(arrow.float32(), top_k)),
    ]
    return arrow.schema(fields, {name: str(value) for name, value in shape.items()})


def _table(arrow: Any, schema: Any, columns: Sequence[NDArray[Any]]) -> Any:
    arrays = [
        arrow.array(column)
        if column.ndim == 1
        else arrow.FixedSizeListArray.from_arrays(arrow.array(column.ravel()), column.shape[1])
        for column in columns
    ]
    return arrow.Table.from_arrays(arrays, schema=schema)


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingDependency("a routing recording", "pyarrow", "research") from error
    return pyarrow
