"""Parcels over TCP: control frame and payload follow each other on the rank's link to the peer.

A payload goes from the sender's tensor to the kernel, and from the kernel straight into a leased
buffer. Every CPU machine has it, so it is the default between ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from asyncmoe.errors import ConfigError
from asyncmoe.lease import Lease
from asyncmoe.linked import LinkedTransport, Peer
from asyncmoe.transport import Parcel, Posted, TransportContext
from asyncmoe.twophase import Transfer
from asyncmoe.wire import payload_memory


class TcpTransport(LinkedTransport):
    """See the module. Option: `advertise_host`, where peers dial if it is not `bind_host`."""

    name = "tcp"

    def __init__(self, context: TransportContext) -> None:
        super().__init__(context)
        if context.device.type != "cpu":
            raise ConfigError(f"transport tcp moves host memory; device is {context.device}")

    def _transmit(self, peer: Peer, parcel: Parcel) -> Posted:
        frame, posted = peer.outbound.parcel(parcel)
        payload = payload_memory(parcel.payload)
        peer.link.send((frame, payload), partial(peer.outbound.sent, posted))
        return posted

    def _body(self, transfer: Transfer) -> Sequence[memoryview]:
        return memoryview(transfer.columns), transfer.payload

    def _filled(self, peer: Peer, transfer: Transfer) -> None:
        peer.inbound.arrived(transfer)

    def _quarantined(self, peer: Peer, leases: Sequence[Lease]) -> None:
        # Only this process writes to the buffers, and its link no longer reads.
        for lease in leases:
            lease.quiet()
