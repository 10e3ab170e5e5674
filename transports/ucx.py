"""Parcels over UCX, by NVIDIA's ucxx: tagged messages from the sender's tensor into the lease.

Control frames go over the rank's authenticated link, and so do the addresses of the UCX workers.
The payloads of a direction are numbered in the order of its control frames, which both sides know,
and a payload's tag is its number behind a channel: 32 random bits that the receiver chose for this
connection and told this peer alone. So a tag names peer, connection, class and sequence, is never
used again, and is not to be guessed by whoever dials UCX's own port, which asks for no token.

A receive is never cancelled while its peer is connected. When a peer is lost, one that no message
has matched gets an empty message of our own, one that has begun goes on to its end, and a message
that comes late is refused; only then, or when the peer is dead or does not move, the endpoint is
closed. Until UCX has completed a receive, its lease is in quarantine (`ucx_pair.py`).

UCX takes shared memory for no peer whose failure it is to report, so ranks of one machine meet over
TCP here; use `shm` there. Device memory is sent and received where it is; not yet run on a GPU.
"""

from __future__ import annotations

import asyncio
import secrets
from functools import partial

import torch

from asyncmoe.errors import ConfigError
from asyncmoe.lease import make_pool
from asyncmoe.transport import Receiver, TransportContext
from asyncmoe.transports.matched import MatchedTransport
from asyncmoe.transports.matched_pair import Pair
from asyncmoe.transports.ucx_config import chosen_tls, config_of
from asyncmoe.transports.ucx_pair import UcxPair
from asyncmoe.transports.ucx_worker import UcxError, Worker, reporting_transports

_MOST_PATIENCE_S = 1.0


class UcxTransport(MatchedTransport):
    """See the module. Options, which win over UCX's variables in the environment:

    `tls`: UCX's transports (`UCX_TLS`), `net_devices`: its network devices (`UCX_NET_DEVICES`, by
    default the one that has `bind_host`), `segment_bytes`: of its TCP, and `advertise_host` of the
    link.
    """

    name = "ucx"
    option_names = ("advertise_host", "net_devices", "segment_bytes", "tls")
    device_types = ("cpu", "cuda")

    def __init__(self, context: TransportContext) -> None:
        super().__init__(context)
        if context.device.type not in self.device_types:
            raise ConfigError(
                f"transport ucx moves host and CUDA memory; device is {context.device}"
            )
        if context.device.type == "cuda":
            empty = partial(torch.empty, dtype=torch.uint8, device=context.device)
            self.leases = make_pool(allocate=empty)
            empty(1)  # UCX looks for a CUDA context when it starts
        self._worker: Worker | None = None
        self._channels: set[int] = set()

    async def start(self, receiver: Receiver) -> None:
        """See `Transport`."""
        if self.context.world > 1:
            await self._open_worker()
        try:
            await super().start(receiver)
        except BaseException:
            self._close_worker()
            raise

    async def _open_worker(self) -> None:
        """Raise `ConfigError` naming the setting if UCX cannot start, or could reach nobody."""
        config, chosen = await config_of(self.context), chosen_tls(self.context)
        try:
            self._worker = Worker(config)
            if chosen is not None:  # else there is nothing to find out, and it takes 25 ms
                self._worker.check_reach()
        except UcxError as error:
            self._close_worker()
            if chosen is None:
                raise ConfigError(f"UCX does not start with {config}: {error}") from error
            raise ConfigError(
                f"{chosen[0]} is {chosen[1]!r}, by which UCX reaches no other rank ({error}); "
                "allowed: names that UCX knows, with one that reports a lost peer, of which this "
                f"machine has {', '.join(reporting_transports())}"
            ) from error

    async def close(self) -> None:
        """See `Transport`. If cancelled, disconnects at once."""
        try:
            await super().close()
        finally:
            self._close_worker()

    def abort(self) -> None:
        """See `LinkedTransport`. UCX ends when all pairs are quiet."""
        super().abort()
        quiet = asyncio.gather(*(pair.quiet for pair in self._pairs))
        quiet.add_done_callback(lambda _: self._close_worker())

    def _close_worker(self) -> None:
        if self._worker is not None:
            self._worker.close()

    def _make_pair(self, peer: int) -> Pair:
        assert self._worker is not None
        while (channel := secrets.randbits(32)) in self._channels:
            pass
        self._channels.add(channel)
        patience_s = min(_MOST_PATIENCE_S, self.context.peer_timeout_s / 2)
        return UcxPair(peer, self._worker, channel, patience_s)
