"""How ranks reach each other before they are linked: where one listens, and how others dial it."""

from __future__ import annotations

import asyncio
import os
import socket
from abc import ABC, abstractmethod
from pathlib import Path

from asyncmoe.errors import ConfigError

WILDCARDS = ("", "0.0.0.0", "::")


class Reach(ABC):
    """One kind of stream socket. All sockets that it makes are non-blocking."""

    @abstractmethod
    async def listen(self) -> socket.socket:
        """A bound, listening socket. Raises `ConfigError` if there can be none."""

    @abstractmethod
    def address(self, listener: socket.socket) -> str:
        """What others dial to get to `listener`."""

    @abstractmethod
    async def dial(self, address: str) -> socket.socket:
        """A connection to `address`. Raises `OSError`; `ConfigError` if it is out of reach."""


class TcpReach(Reach):
    """A free port of `bind_host`, published as `advertise_host` if that is another name for it."""

    def __init__(self, bind_host: str, advertise_host: str | None = None) -> None:
        self._bind_host = bind_host
        self._host = advertise_host or bind_host

    async def listen(self) -> socket.socket:
        """See `Reach`."""
        loop = asyncio.get_running_loop()
        try:
            family, kind, proto, _, address = (
                await loop.getaddrinfo(
                    self._bind_host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
                )
            )[0]
            return _listening(socket.socket(family, kind, proto), address)
        except OSError as error:
            raise ConfigError(
                f"cluster.bind_host {self._bind_host!r} cannot be bound: {error}"
            ) from error

    def address(self, listener: socket.socket) -> str:
        """See `Reach`."""
        host = socket.gethostname() if self._host in WILDCARDS else self._host
        return f"{host}:{listener.getsockname()[1]}"

    async def dial(self, address: str) -> socket.socket:
        """See `Reach`."""
        host, _, port = address.rpartition(":")
        family, kind, proto, _, where = (
            await asyncio.get_running_loop().getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
        )[0]
        return await _connected(socket.socket(family, kind, proto), where)


class UnixReach(Reach):
    """A socket of this machine alone, over which descriptors can be passed.

    Its name is an abstract one that the kernel chooses: no file is left behind.
    """

    async def listen(self) -> socket.socket:
        """See `Reach`."""
        try:
            return _listening(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), "")
        except OSError as error:
            raise ConfigError(f"this system has no abstract unix sockets: {error}") from error

    def address(self, listener: socket.socket) -> str:
        """See `Reach`."""
        name: bytes = listener.getsockname()
        return f"{machine()}/{name.hex()}"

    async def dial(self, address: str) -> socket.socket:
        """See `Reach`."""
        where, _, name = address.rpartition("/")
        if where != machine():
            raise ConfigError(
                f"a transport for ranks of one machine cannot reach {address}, which is another "
                f"machine or network namespace than {machine()}; use tcp between them"
            )
        return await _connected(
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), bytes.fromhex(name)
        )


def machine() -> str:
    """Equal in two processes exactly if a unix socket's abstract name joins them."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}.{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()


def _listening(sock: socket.socket, address: object) -> socket.socket:
    try:
        sock.setblocking(False)
        sock.bind(address)  # type: ignore[arg-type] # whatever its family takes
        sock.listen(socket.SOMAXCONN)
    except BaseException:
        sock.close()
        raise
    return sock


async def _connected(sock: socket.socket, address: object) -> socket.socket:
    try:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, address)  # type: ignore[arg-type]
    except BaseException:
        sock.close()
        raise
    return sock
