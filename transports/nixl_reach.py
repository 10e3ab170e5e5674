"""How the ranks of a NIXL transport reach each other for their link."""

from __future__ import annotations

import socket

from asyncmoe.config import is_loopback
from asyncmoe.reach import Reach, TcpReach, UnixReach


class NixlReach(Reach):
    """A unix socket where all peers must be on this machine, since a frame costs half as much on it
    as over loopback; else a port. Dials either, whatever it listens on itself."""

    def __init__(self, bind_host: str, advertise_host: str | None = None) -> None:
        self._unix, self._tcp = UnixReach(), TcpReach(bind_host, advertise_host)
        self._own: Reach = self._unix if is_loopback(bind_host) else self._tcp

    async def listen(self) -> socket.socket:
        """See `Reach`."""
        return await self._own.listen()

    def address(self, listener: socket.socket) -> str:
        """See `Reach`."""
        return self._own.address(listener)

    async def dial(self, address: str) -> socket.socket:
        """See `Reach`."""
        return await (self._unix if "/" in address else self._tcp).dial(address)
