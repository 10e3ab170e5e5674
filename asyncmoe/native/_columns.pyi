# The compiled columns; every function has a plain twin beside its caller. Arrays are contiguous.
# Raises TypeError for an array of another type or shape, IndexError for an index out of range.

from collections.abc import Iterable, Sequence
from typing import Any

from numpy.typing import NDArray

Array = NDArray[Any]
Block = bytes | bytearray | memoryview

# wire.py, receptor.py: None or False means "not allowed", and the caller says why
def encode_parcel(fields: tuple[int, ...], limits: object, block: Block) -> bytes | None: ...
def decode_parcel(data: Block, limits: object) -> tuple[int, ...] | None: ...
def check_columns(block: Block, rows: int, pairs: int, experts: int) -> bool: ...
def all_local(block: Block, rows: int, pairs: int, local: Array) -> bool: ...
def memory(owner: object, address: int, size: int) -> memoryview: ...

# routing.py, steps.py
def route(
    experts: Array,
    weights: Array,
    owner: Array,
    world: int,
    per_expert: bool,
    slots: Array,
    epochs: Array,
) -> tuple[Array, list[tuple[int, int, int, bytes, Array | None]]]: ...
def expert_batch(
    parcels: Sequence[tuple[int, int, int, Block]],
    local: Array,
    local_experts: int,
    per_expert: bool,
) -> tuple[Array, Array, Array, Array, list[tuple[int, int, int, bytes]]]: ...
def gather_rows(
    chunks: Array,
    rows: Array,
    first_slot: Array,
    request: Array,
    slots_of: list[Array],
    position: Array,
    epoch: Array,
    part_count: Array,
    pool: Array,
    block_tokens: int,
) -> tuple[Any, ...]: ...

# tokentable.py, chunks.py, policy.py
def accept(
    stage: int,
    block: Block,
    rows: int,
    max_parts: int,
    epoch: Array,
    stage_of: Array,
    open: Array,
) -> tuple[Array, Array, Array | None]: ...
def expect(
    slots: Array, stage: int, parts: Array, stage_of: Array, part_count: Array, open: Array
) -> None: ...
def all_alive(ends: Array, slots: Array, epochs: Array, epoch: Array) -> bool: ...
def complete(
    chunk_of_row: Array, missing: Array, earlier: Array, stage: Array, parked: Array
) -> Array: ...
def leave(
    chunks: Array, next: int, counts: Array, stage: Array, missing: Array, later: Array
) -> bool: ...
def by_stage(chunks: Array, stage: Array, rows: Array) -> list[tuple[int, Array, Array, int]]: ...
def look(
    rows: Array, oldest_s: Array, min_rows: Array, linger_s: Array, now_s: float
) -> tuple[Array, int, int, float | None]: ...
def scatter(to: int, to_rows: int, places: Array, source: int, row_bytes: int) -> None: ...

# link.py: bytes moved, -1 if it would have to wait; raises OSError
def send(fd: int, buffers: Iterable[Block]) -> int: ...
def receive(fd: int, buffers: Iterable[memoryview]) -> int: ...
