"""Parcels over TCP: control frame and payload follow each other on the rank's link to the peer.

A payload goes from the sender's tensor to the kernel, and from the kernel straight into a leased
buffer. Every CPU machine has it, so it is the default between ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

from asyncmoe.errors import ConfigError
from asyncmoe.lease import Lease
from asyncmoe.linked import LinkedTransport, Peer
from asyncmoe.transport import TransportContext


class TcpTransport(LinkedTransport):
    """See the module. Option: `advertise_host`, where peers dial if it is not `bind_host`."""

    name = "tcp"
    whole = True

    def __init__(self, context: TransportContext) -> None:
        super().__init__(context)
        if context.device.type != "cpu":
            raise ConfigError(f"transport tcp moves host memory; device is {context.device}")

    def _quarantined(self, peer: Peer, leases: Sequence[Lease]) -> None:
        # Only this process writes to the buffers, and its link no longer reads.
        for lease in leases:
            lease.quiet()
