# The compiled columns; every function has a plain twin beside its caller. Arrays are contiguous.
# Raises TypeError for an array of another type or shape, IndexError for an index out of range.

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

Array = NDArray[Any]
Block = bytes | bytearray | memoryview

# receptor.py: False means "not allowed", and the caller says why
def all_local(block: Block, rows: int, pairs: int, local: Array) -> bool: ...

# wire.py
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
    stage: int,
    hidden: Any,
) -> tuple[Array, list[tuple[int, Any]]]: ...
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

# microqueue.py, outbox.py, bell.py, home.py, receptor.py: used like the classes there
class Taken:
    rows: int
    payloads: list[Any]
    def columns(self, local: Array, local_experts: int, per_expert: bool) -> tuple[Any, ...]: ...
    def read(self, held_rows: Array) -> None: ...

class Queues:
    def __init__(self, chain: Any) -> None: ...

class Outboxes:
    def __init__(
        self,
        rank: int,
        world: int,
        window_rows: int,
        parcel_rows: int,
        row_bytes: int,
        transport: Any,
        sent_rows: Array,
    ) -> None: ...

class Bell:
    def __init__(self, call_soon: Any, hear: Any, running: Any, enough: int) -> None: ...

class Homecoming:
    def __init__(
        self,
        table: Any,
        chunks: Any,
        queues: Queues,
        now_s: Any,
        see_to_arrivals: Any,
        look: Any,
    ) -> None: ...
    def take_in(self, parcel: Any, release: Any) -> None: ...
    def let_go(self) -> None: ...

class Intake:
    is_open: bool
    def __init__(
        self,
        receptor: Any,
        queues: Any,
        outboxes: Any,
        homecoming: Homecoming | None,
        bell: Any,
        other: Any,
        failed: Any,
    ) -> None: ...
    def take(self, arrival: Any) -> None: ...

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
def scatter_combine(
    to: int, to_rows: int, block: Block, rows: int, max_parts: int, source: int, row_bytes: int
) -> None: ...
def described(tensor: Any) -> object: ...

# workload/draws.py
def draw_distinct(
    start: int,
    request_ids: Array,
    positions: Array,
    limit: Array,
    other: Array,
    weights: Array,
    count: int,
) -> Array: ...

# lease.py, twophase.py, reader.py, writer.py, transports/shm_lanes.py: classes, used as those
# there, where they are described; made by the functions that stand beside those.
class LeasePool:
    def __init__(self, idle_bytes: int, allocate: object) -> None: ...

class Outbound:
    def __init__(self, rank: int, generation: int, limits: object) -> None: ...

class Inbound:
    def __init__(
        self,
        source: int,
        generation: int,
        limits: object,
        leases: LeasePool,
        on_parcel: object,
        on_message: object,
        place: object,
    ) -> None: ...

class Reader:
    def __init__(
        self, fd: int, inbound: Inbound, whole: bool, on_parcel: object, on_signal: object
    ) -> None: ...

class Writer:
    def __init__(self, fd: int, on_full: object, on_fault: object) -> None: ...

class Segment:
    def __init__(
        self,
        memory: memoryview,
        slots: int,
        slot_bytes: int,
        ring_at: int,
        columns_at: int,
        slots_at: int,
    ) -> None: ...

class ShmSender:
    def __init__(self, mine: Segment, theirs: Segment, kind: int, outbound: Outbound) -> None: ...

class ShmReceiver:
    def __init__(
        self,
        mine: Segment,
        theirs: Segment,
        kind: int,
        inbound: Inbound,
        leases: LeasePool,
        memory: object,
        on_asked: object,
    ) -> None: ...

class ShmBell:
    def __init__(self, mine: Segment, theirs: Segment) -> None: ...
