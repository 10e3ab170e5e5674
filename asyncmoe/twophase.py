"""The two phases of a parcel, as state machines without I/O that every transport drives.

Sending: `Outbound` numbers a parcel and makes its control frame; the transport moves frame and
payload and says when the source is free. Receiving: `Inbound.accept` checks the control frame and
takes a lease, the transport fills the lease, `Inbound.arrived` hands the parcel over, in the order
of its sequence whatever order payloads arrive in. Three events stay apart: *source free* is
`Outbound.sent`, *arrival* is `Inbound.arrived`, and the receive buffer is reusable only when the
arrival's `release` is called.

Those that `make_outbound` and `make_inbound` give are compiled where that is there (`inbound.cpp`,
`outbound.cpp` in `native/src/columns`); they are used like the ones here, and say the same.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import NoReturn

import torch

from asyncmoe import native
from asyncmoe.errors import ProtocolError
from asyncmoe.lease import Lease, LeasePool, LeaseState
from asyncmoe.packed import Buffer
from asyncmoe.transport import Arrival, Limits, Parcel, Posted
from asyncmoe.wire import DTYPES, Prelude, decode_parcel, encode_message, encode_parcel

Place = Callable[["Transfer"], Lease | None]

_CLASSES = 3  # control messages, dispatch, combine: the sequences of one direction


class Outbound:
    """What this rank sends to one peer: sequences per class, and the parcels still on their way."""

    def __init__(self, rank: int, generation: int, limits: Limits) -> None:
        self._rank, self._generation, self._limits = rank, generation, limits
        self._sequence = [0] * _CLASSES
        self._unsent: dict[Posted, None] = {}  # in the order posted

    def parcel(
        self, parcel: Parcel, lease: int = 0, generation: int | None = None
    ) -> tuple[bytes, Posted]:
        """Number the parcel: its control frame, and its source side. Raises as `encode_parcel`.

        `lease` and `generation`: of the receiver's buffer, where the sender chooses that.
        """
        frame = encode_parcel(
            parcel,
            self._limits,
            source=self._rank,
            sequence=self._sequence[parcel.kind],
            lease=lease,
            generation=self._generation if generation is None else generation,
        )
        self._sequence[parcel.kind] += 1
        posted = Posted()
        self._unsent[posted] = None
        return frame, posted

    def message(self, length: int) -> bytes:
        """Number a control message of `length` bytes: its prelude."""
        prelude = encode_message(self._rank, self._sequence[0], length, self._limits)
        self._sequence[0] += 1
        return prelude

    def sent(self, posted: Posted) -> None:
        """First event: nothing reads the source any more."""
        self._unsent.pop(posted, None)
        posted.complete()

    def fail(self, error: Exception) -> None:
        """Give up all parcels on their way; the caller promises that nothing reads them."""
        unsent, self._unsent = self._unsent, {}
        for posted in unsent:
            posted.complete(error)

    @property
    def unsent(self) -> int:
        """Parcels whose source is not free."""
        return len(self._unsent)


class Transfer:
    """One parcel on its way in: fill `columns` and `payload`, then call `Inbound.arrived`."""

    __slots__ = ("columns", "lease", "prelude")

    def __init__(self, prelude: Prelude, columns: Buffer, lease: Lease | None) -> None:
        self.prelude, self.columns = prelude, columns
        self.lease: Lease = lease  # type: ignore[assignment]  # None while its place is looked for

    @property
    def payload(self) -> memoryview:
        """The leased host memory that the payload goes to."""
        return self.lease.memory

    @property
    def rows(self) -> torch.Tensor:
        """The same as what the parcel's payload will be; [rows, hidden]."""
        prelude = self.prelude
        return self.lease.rows(DTYPES[prelude.dtype - 1], prelude.rows, prelude.hidden)

    @property
    def parcel_class(self) -> int:
        """Of its prelude, as all below."""
        return self.prelude.parcel_class

    @property
    def sequence(self) -> int:
        return self.prelude.sequence

    @property
    def slot(self) -> int:
        """The field `lease`: where its sender has put the payload, or 0."""
        return self.prelude.lease

    @property
    def generation(self) -> int:
        return self.prelude.generation

    @property
    def column_bytes(self) -> int:
        return self.prelude.column_bytes

    @property
    def payload_bytes(self) -> int:
        return self.prelude.payload_bytes


class Inbound:
    """What one peer sends to this rank."""

    def __init__(
        self,
        source: int,
        generation: int,
        limits: Limits,
        leases: LeasePool,
        on_parcel: Callable[[Arrival], None],
        on_message: Callable[[int, bytes], None] | None = None,
        place: Place | None = None,
    ) -> None:
        """`on_parcel`, `on_message`: of the receiver. `place`: the lease of a payload whose place
        the sender has chosen, or None; it raises `ProtocolError` if the sender may not.
        """
        self.limits = limits
        self._source, self._generation = source, generation
        self._leases, self._place = leases, place
        self._on_parcel, self._on_message = on_parcel, on_message
        self._sequence = [0] * _CLASSES
        self._queues: tuple[deque[Transfer], ...] = tuple(deque() for _ in range(_CLASSES))

    def accept(
        self, prelude: Prelude, columns: Buffer | None = None, lease: Lease | None = None
    ) -> Transfer:
        """First phase: take a parcel's checked prelude, and a lease for its payload.

        `columns` and `lease` are given where they are known already (a frame that came whole, a
        payload that is read where it lies). Raises `ProtocolError` for a wrong source, sequence,
        lease or generation.
        """
        self.check_order(prelude)
        transfer = Transfer(prelude, b"" if columns is None else columns, lease)
        if lease is None and self._place is not None:
            lease = self._place(transfer)
        if lease is None:
            if (prelude.lease, prelude.generation) != (0, self._generation):
                refuse_place(prelude.lease, prelude.generation, self._generation)
            lease = self._leases.obtain(prelude.payload_bytes)
        transfer.lease = lease
        self._queues[prelude.parcel_class].append(transfer)
        return transfer

    def admit(self, prelude: Prelude, lease: Lease) -> Transfer:
        """As `accept` behind `check_order`, for a payload that has its lease."""
        transfer = Transfer(prelude, b"", lease)
        self._queues[prelude.parcel_class].append(transfer)
        return transfer

    def arrived(self, transfer: Transfer) -> None:
        """Second event: columns are there, the payload is visible. Hands over all parcels that this
        completes.

        Raises `ProtocolError` when the columns are not consistent, or when the receiver does.
        """
        transfer.lease.arrived()
        queue = self._queues[transfer.prelude.parcel_class]
        while queue and queue[0].lease.state is LeaseState.HELD:
            head = queue[0]
            parcel = decode_parcel(head.prelude, head.columns, head.rows, self.limits)
            queue.popleft()
            try:
                self._guard(self._on_parcel, Arrival(self._source, parcel, head.lease.release))
            except ProtocolError:
                if head.lease.state is LeaseState.HELD:  # the receiver refused the parcel
                    head.lease.release()
                raise

    def message(self, prelude: Prelude) -> None:
        """Take a control message's checked prelude. Raises `ProtocolError` out of order."""
        self.check_order(prelude)

    def deliver_message(self, message: bytes) -> None:
        """Hand over a control message that was taken. Raises `ProtocolError` as the receiver."""
        if self._on_message is not None:
            self._guard(self._on_message, self._source, message)

    def abandon(self) -> list[Lease]:
        """The peer is lost: give up all transfers that were not handed over.

        Returns the leases that are now in quarantine; the transport calls `quiet` on each once
        it has proof that no late write can come.
        """
        given_up: list[Lease] = []
        for queue in self._queues:
            for transfer in queue:
                if transfer.lease.state is LeaseState.HELD:
                    transfer.lease.release()  # whole, so quiet
                else:
                    transfer.lease.abandon()
                    given_up.append(transfer.lease)
            queue.clear()
        return given_up

    def _guard(self, call: Callable[..., None], *arguments: object) -> None:
        """A fault of the receiver is not the peer's: report it and go on.

        A `ProtocolError` is the peer's: the receiver found out what the frame alone did not show.
        """
        try:
            call(*arguments)
        except ProtocolError:
            raise
        except Exception as error:
            report_fault(self._source, error)

    def check_order(self, prelude: Prelude) -> None:
        """Number a frame. Raises `ProtocolError` for a wrong source or sequence."""
        expected = self._sequence[prelude.parcel_class]
        if (prelude.source, prelude.sequence) != (self._source, expected):
            refuse_order(
                prelude.parcel_class, prelude.source, self._source, prelude.sequence, expected
            )
        self._sequence[prelude.parcel_class] = expected + 1


def make_outbound(rank: int, generation: int, limits: Limits) -> Outbound:
    """As `Outbound`, compiled if that is there."""
    kind = Outbound if native.columns is None else native.columns.Outbound
    outbound: Outbound = kind(rank, generation, limits)
    return outbound


def make_inbound(
    source: int,
    generation: int,
    limits: Limits,
    leases: LeasePool,
    on_parcel: Callable[[Arrival], None],
    on_message: Callable[[int, bytes], None] | None = None,
    place: Place | None = None,
) -> Inbound:
    """As `Inbound`, compiled if that is there and the pool is."""
    kind = Inbound if isinstance(leases, LeasePool) else native.columns.Inbound
    inbound: Inbound = kind(source, generation, limits, leases, on_parcel, on_message, place)
    return inbound


def is_plain(inbound: object) -> bool:
    """Whether a direction is driven by `Inbound` itself, and not by its compiled twin."""
    return isinstance(inbound, Inbound)


def report_fault(source: int, error: Exception) -> None:
    """Tell the loop that the receiver failed on what rank `source` sent."""
    asyncio.get_running_loop().call_exception_handler(
        {"message": f"receiver failed on input of rank {source}", "exception": error}
    )


def refuse_order(
    parcel_class: int, source: int, right_source: int, sequence: int, right_sequence: int
) -> NoReturn:
    """Raise `ProtocolError`: one of the two is not what it should be."""
    if source != right_source:
        raise ProtocolError(f"frame field source is {source}; allowed: {right_source}")
    raise ProtocolError(
        f"frame field sequence is {sequence}; allowed: {right_sequence} (class {parcel_class})"
    )


def refuse_place(lease: int, generation: int, right_generation: int) -> NoReturn:
    """Raise `ProtocolError`: this connection has no such place."""
    raise ProtocolError(
        f"frame fields lease and generation are {lease} and {generation}; "
        f"allowed: 0 and {right_generation}"
    )
