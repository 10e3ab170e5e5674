"""Request lengths and arrival times from a file: CSV or JSON lines.

Columns are `prompt_tokens`, `output_tokens` and, if there are arrivals, `arrival_s`; those of the
public Azure traces (TIMESTAMP, ContextTokens, GeneratedTokens) are understood as well.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from asyncmoe.errors import ConfigError

FILE_BYTES = 256 << 20  # about 8 million requests; a wrong path is not read into memory
_MOST_TOKENS = 1 << 31
_ALIASES = {
    "contexttokens": "prompt_tokens",
    "generatedtokens": "output_tokens",
    "timestamp": "arrival_s",
}
_ALLOWED = (
    "prompt_tokens, output_tokens and arrival_s (or ContextTokens, GeneratedTokens, TIMESTAMP)"
)


@dataclass(frozen=True, slots=True)
class RequestTable:
    """What a file says of its requests, in order of arrival where it has arrivals."""

    prompt_tokens: NDArray[np.int64]  # [n], as the next
    output_tokens: NDArray[np.int64]
    arrival_s: NDArray[np.float64] | None  # [n], from the first on


def read_table(path: Path) -> RequestTable:
    """Read it. Raises `ConfigError` naming the file, the line and what is wrong with it."""
    rows = _read(path)
    for name in ("prompt_tokens", "output_tokens"):
        if name not in rows[0]:
            raise ConfigError(f"{path} has no column {name}; allowed: {_ALLOWED}")
    prompt = np.array(_values(path, rows, "prompt_tokens", _tokens), np.int64)
    output = np.array(_values(path, rows, "output_tokens", _tokens), np.int64)
    if "arrival_s" not in rows[0]:
        return RequestTable(prompt, output, None)
    arrival = _arrivals(path, rows)
    order = arrival.argsort(kind="stable")
    return RequestTable(prompt[order], output[order], arrival[order] - arrival[order[0]])


def read_arrivals(path: Path) -> NDArray[np.float64]:
    """When its requests come, whatever else it says of them: [n], from the first on.

    Raises as `read_table`.
    """
    rows = _read(path)
    if "arrival_s" not in rows[0]:
        raise ConfigError(f"{path} has no column arrival_s (or TIMESTAMP)")
    arrival: NDArray[np.float64] = np.sort(_arrivals(path, rows))
    arrival -= arrival[0]
    return arrival


def _read(path: Path) -> list[Mapping[str, Any]]:
    """Its rows, at least one."""
    try:
        if path.stat().st_size > FILE_BYTES:
            raise ConfigError(f"{path} is longer than {FILE_BYTES} bytes")
        with path.open(encoding="utf-8", newline="") as file:
            rows = (_json_rows if path.suffix in (".jsonl", ".json") else _csv_rows)(path, file)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path} is no table: {error}") from None
    if not rows:
        raise ConfigError(f"{path} has no requests")
    return rows


def _arrivals(path: Path, rows: list[Mapping[str, Any]]) -> NDArray[np.float64]:
    return np.array(_values(path, rows, "arrival_s", _seconds), np.float64)


def _values(
    path: Path, rows: list[Mapping[str, Any]], name: str, read: Callable[[Any], Any]
) -> list[Any]:
    found = []
    for number, row in enumerate(rows, 1):
        try:
            found.append(read(row[name]))
        except (KeyError, TypeError, ValueError) as error:
            value = row.get(name)
            raise ConfigError(f"{path}, request {number}: {name} is {value!r}: {error}") from None
    return found


def _tokens(value: Any) -> int:
    tokens = int(value)
    if not 0 < tokens < _MOST_TOKENS:
        raise ValueError("it must be at least 1")
    return tokens


def _seconds(value: Any) -> float:
    try:
        seconds = float(value)
    except ValueError:  # Azure writes seven digits behind the second, datetime takes six
        moment, dot, digits = str(value).partition(".")
        seconds = datetime.fromisoformat(moment + "+00:00").timestamp()
        seconds += float(f"0.{digits}") if dot else 0.0
    if not np.isfinite(seconds):
        raise ValueError("it must be finite")
    return seconds


def _csv_rows(path: Path, file: TextIO) -> list[Mapping[str, Any]]:
    reader = csv.reader(file)
    names = [_name(column) for column in next(reader, [])]
    return [dict(zip(names, values, strict=False)) for values in reader if values]


def _json_rows(path: Path, file: TextIO) -> list[Mapping[str, Any]]:
    rows: list[Mapping[str, Any]] = []
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{path}, line {number}: not JSON: {error}") from None
        if not isinstance(row, dict):
            raise ConfigError(f"{path}, line {number}: not an object")
        rows.append({_name(key): value for key, value in row.items()})
    return rows


def _name(column: str) -> str:
    name = column.strip().lower()
    return _ALIASES.get(name, name)
