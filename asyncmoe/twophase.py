"""The two phases of a parcel, as state machines without I/O that every transport drives.

Sending: `Outbound` numbers a parcel and makes its control frame; the transport moves frame and
payload and says when the source is free. Receiving: `Inbound.accept` checks the control frame and
takes a lease, the transport fills the lease, `Inbound.arrived` hands the parcel over, in the order
of its sequence whatever order payloads arrive in. Three events stay apart: *source free* is
`Outbound.sent`, *arrival* is `Inbound.arrived`, and the receive buffer is reusable only when the
arrival's `release` is called.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from asyncmoe.errors import ProtocolError
from asyncmoe.lease import Lease, LeasePool, LeaseState
from asyncmoe.packed import Buffer
from asyncmoe.transport import Arrival, Limits, Parcel, Posted
from asyncmoe.wire import (
    Prelude,
    decode_parcel,
    dtype_of,
    encode_message,
    encode_parcel,
)

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

    def __init__(self, prelude: Prelude, columns: Buffer, lease: Lease) -> None:
        self.prelude, self.columns, self.lease = prelude, columns, lease

    @property
    def payload(self) -> memoryview:
        """The leased host memory that the payload goes to."""
        return self.lease.memory


class Inbound:
    """What one peer sends to this rank."""

    def __init__(
        self,
        source: int,
        generation: int,
        limits: Limits,
        leases: LeasePool,
        deliver: Callable[[Arrival], None],
        place: Callable[[Prelude], Lease | None] = lambda prelude: None,
    ) -> None:
        """`place`: the lease of a payload that lies somewhere before its control frame is here.

        It raises `ProtocolError` if the prelude names a place that the peer may not.
        """
        self._source, self._generation, self._limits = source, generation, limits
        self._leases, self._deliver, self._place = leases, deliver, place
        self._sequence = [0] * _CLASSES
        self._queues: tuple[deque[Transfer], ...] = tuple(deque() for _ in range(_CLASSES))

    def accept(
        self, prelude: Prelude, columns: Buffer | None = None, lease: Lease | None = None
    ) -> Transfer:
        """First phase: take a parcel's checked prelude and give the memory for the rest of it.

        `columns` and `lease` are given where they are known already (a frame that came whole, a
        payload that is read where it lies). Raises `ProtocolError` for a wrong source, sequence,
        lease or generation.
        """
        self._check_order(prelude)
        if lease is None:
            lease = self._place(prelude)
        if lease is None:
            if (prelude.lease, prelude.generation) != (0, self._generation):
                raise ProtocolError(
                    f"frame fields lease and generation are {prelude.lease} and "
                    f"{prelude.generation}; allowed: 0 and {self._generation}"
                )
            lease = self._leases.obtain(prelude.payload_bytes)
        if columns is None:
            columns = bytearray(prelude.column_bytes)
        transfer = Transfer(prelude, columns, lease)
        self._queues[prelude.parcel_class].append(transfer)
        return transfer

    def arrived(self, transfer: Transfer) -> None:
        """Second event: the payload is visible. Hands over all parcels that this completes.

        Raises `ProtocolError` when the columns are not consistent, or when the receiver does.
        """
        transfer.lease.arrived()
        queue = self._queues[transfer.prelude.parcel_class]
        while queue and queue[0].lease.state is LeaseState.HELD:
            head, prelude = queue[0], queue[0].prelude
            payload = head.lease.rows(dtype_of(prelude), prelude.rows, prelude.hidden)
            parcel = decode_parcel(prelude, head.columns, payload, self._limits)
            queue.popleft()
            try:
                self._deliver(Arrival(self._source, parcel, head.lease.release))
            except ProtocolError:
                if head.lease.state is LeaseState.HELD:  # the receiver refused the parcel
                    head.lease.release()
                raise

    def message(self, prelude: Prelude) -> None:
        """Take a control message's checked prelude. Raises `ProtocolError` out of order."""
        self._check_order(prelude)

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

    def _check_order(self, prelude: Prelude) -> None:
        if prelude.source != self._source:
            raise ProtocolError(f"frame field source is {prelude.source}; allowed: {self._source}")
        expected = self._sequence[prelude.parcel_class]
        if prelude.sequence != expected:
            raise ProtocolError(
                f"frame field sequence is {prelude.sequence}; allowed: {expected} "
                f"(class {prelude.parcel_class})"
            )
        self._sequence[prelude.parcel_class] = expected + 1
