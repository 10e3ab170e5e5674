"""Parcels over TCP: control frame and payload follow each other on the rank's link to the peer.

A payload goes from the sender's tensor to the kernel, and from the kernel straight into a leased
buffer. Every CPU machine has it, so it is the default between ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from asyncmoe.errors import ConfigError
from asyncmoe.lease import Lease
from asyncmoe.link import Link
from asyncmoe.linked import LinkedTransport, Peer
from asyncmoe.transport import Parcel, Posted, Receiver, TransportContext


class TcpTransport(LinkedTransport):
    """See the module. Option: `advertise_host`, where peers dial if it is not `bind_host`."""

    name = "tcp"
    whole = True

    def __init__(self, context: TransportContext) -> None:
        super().__init__(context)
        if context.device.type != "cpu":
            raise ConfigError(f"transport tcp moves host memory; device is {context.device}")

    def _make_peer(self, link: Link, generation: int, receiver: Receiver, met: Any) -> Peer:
        return TcpPeer(self, link, generation, receiver)

    def _quarantined(self, peer: Peer, leases: Sequence[Lease]) -> None:
        # Only this process writes to the buffers, and its link no longer reads.
        for lease in leases:
            lease.quiet()


class TcpPeer(Peer):
    """A peer whose parcels go over the link whole."""

    def door(self) -> Callable[[Parcel], Posted] | None:
        """See `Peer`."""
        return self.link.poster(self.outbound)
