"""Two ranks prove to each other that they hold the cluster's token, before anything else is read.

Four records of fixed size: the dialler's nonce, the listener's nonce, the dialler's proof, the
listener's proof. A proof is an HMAC-SHA256 over role, both ranks, the world size and both nonces,
so it cannot be replayed, reflected, or used for another rank. The dialler proves itself first: a
listener tells nothing about the token to strangers.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
import struct

from asyncmoe.errors import ProtocolError
from asyncmoe.wire import HANDSHAKE_BYTES, Handshake, decode_handshake, encode_handshake

_DIALLER_NONCE, _LISTENER_NONCE, _DIALLER_PROOF, _LISTENER_PROOF = range(4)
_NONCE_BYTES = 32
_GENERATION = struct.Struct("<I")


async def dial(sock: socket.socket, rank: int, peer: int, world: int, token: bytes) -> int:
    """Authenticate towards the listening rank `peer`; returns the connection's generation.

    Raises `ProtocolError` if the other side is not that rank of this cluster, `OSError`.
    """
    nonce = secrets.token_bytes(_NONCE_BYTES)
    await _send(sock, Handshake(_DIALLER_NONCE, rank, world, nonce))
    answer = await _receive(sock, _LISTENER_NONCE, world)
    if answer.rank != peer:
        raise ProtocolError(f"handshake field rank is {answer.rank}; allowed: {peer}")
    keys = _Keys(token, rank, peer, world, nonce, answer.secret)
    await _send(sock, Handshake(_DIALLER_PROOF, rank, world, keys.proof(b"dialler")))
    last = await _receive(sock, _LISTENER_PROOF, world)
    keys.check(b"listener", last.secret)
    return keys.generation()


async def admit(sock: socket.socket, rank: int, world: int, token: bytes) -> tuple[int, int]:
    """Authenticate whoever dialled: (its rank, the connection's generation). Raises as `dial`."""
    hello = await _receive(sock, _DIALLER_NONCE, world)
    if not rank < hello.rank < world:
        raise ProtocolError(
            f"handshake field rank is {hello.rank}; allowed: {rank + 1} to {world - 1}"
        )
    nonce = secrets.token_bytes(_NONCE_BYTES)
    await _send(sock, Handshake(_LISTENER_NONCE, rank, world, nonce))
    keys = _Keys(token, hello.rank, rank, world, hello.secret, nonce)
    keys.check(b"dialler", (await _receive(sock, _DIALLER_PROOF, world)).secret)
    await _send(sock, Handshake(_LISTENER_PROOF, rank, world, keys.proof(b"listener")))
    return hello.rank, keys.generation()


class _Keys:
    """What both sides can derive from the token and what was said in the clear."""

    def __init__(
        self, token: bytes, dialler: int, listener: int, world: int, nonce: bytes, answer: bytes
    ) -> None:
        self._token = token
        self._said = struct.pack("<III", dialler, listener, world) + nonce + answer

    def proof(self, role: bytes) -> bytes:
        return hmac.digest(self._token, role + self._said, "sha256")

    def check(self, role: bytes, proof: bytes) -> None:
        if not hmac.compare_digest(proof, self.proof(role)):
            raise ProtocolError(f"the {role.decode()} does not hold this cluster's token")

    def generation(self) -> int:
        """A number that both sides share and that the next connection of the pair will not."""
        generation: int = _GENERATION.unpack_from(self.proof(b"generation"))[0]
        return generation


async def _send(sock: socket.socket, record: Handshake) -> None:
    await asyncio.get_running_loop().sock_sendall(sock, encode_handshake(record))


async def _receive(sock: socket.socket, step: int, world: int) -> Handshake:
    """Read exactly one record: what follows it is not the handshake's."""
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < HANDSHAKE_BYTES:
        piece = await loop.sock_recv(sock, HANDSHAKE_BYTES - len(data))
        if not piece:
            raise ProtocolError(
                "the other side ended the handshake, as it does for a different cluster token"
            )
        data += piece
    record = decode_handshake(data, step)
    if record.world != world:
        raise ProtocolError(f"handshake field world is {record.world}; allowed: {world}")
    return record
