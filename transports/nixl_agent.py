"""This rank's NIXL agent: all that is ever asked of the library, in terms of addresses and bytes.

An agent is not safe for several threads, and what it copies inline keeps whoever asked. So it has
one user at a time, which `nixl_courier.py` sees to, and no call here waits for a peer. Nothing that
the library pickles is used: descriptors cross the wire as numbers (`nixl_wire.py`).
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import logging
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from asyncmoe import native
from asyncmoe.config import is_loopback
from asyncmoe.errors import AsyncMoeError, ProtocolError
from asyncmoe.link import Link
from asyncmoe.transports.nixl_memory import Sources, Span
from asyncmoe.transports.nixl_sending import Batch, Place, Places, Sending

_MODULES = ("nixl_cu12", "nixl_cu13", "nixl")  # the last one chooses among the others
_BACKEND = "UCX"
_STAGE_BYTES = 64 << 10  # up to which a copy costs less than a registration
_ALIGNMENT = 64
# All memory that a process can have, of a device of its own: the library looks memory up by its
# neighbour among what is registered of one device, and arenas are of another.
_EVERYWHERE = Span(4096, (1 << 48) - 8192, "DRAM", 1)


def _library() -> ModuleType:
    """The library. Raises `ModuleNotFoundError` naming the distribution that brings it."""
    # UCX, which comes with it, would warn on the standard output, where others expect results.
    os.environ.setdefault("UCX_LOG_FILE", "stderr")
    for name in _MODULES:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
            continue
        if hasattr(module, "nixl_agent"):
            if "NIXL_LOG_LEVEL" not in os.environ:
                # It tells of every agent that begins, on the standard output.
                logging.getLogger("nixl").setLevel(logging.WARNING)
            return module
    raise ModuleNotFoundError("no module of NIXL", name="nixl-cu12")


_NIXL: Any = _library()
# The library's own errors have no base but this, and stand in a private module.
_FAILURES = Exception


class NixlError(AsyncMoeError):
    """The library refused or failed; the message is its own."""


# Writes the next batch and does all that is due behind it: returns the bytes of that, or None if
# there is nothing. What is not done by then is left to the caller: the batch, with what
# `Agent.under_way` takes, or with None if it is empty or too large.
Express = Callable[[], "int | tuple[Any, tuple[Any, object] | None] | None"]


class Write:
    """One transfer that was begun: its handle, and what its source keeps."""

    __slots__ = ("done", "handle", "kept", "spans", "stage")

    def __init__(self) -> None:
        self.handle: Any = None
        self.spans: list[Span] = []
        self.kept: list[torch.Tensor] = []  # what the spans are registered for
        self.stage: torch.Tensor | None = None  # where they lie instead
        self.done = False  # nothing reads the source any more, and the peer has it


class Agent:
    """See the module. All methods raise `NixlError`."""

    def __init__(self, name: str, bind_host: str, progress_thread: bool) -> None:
        """Takes half a second the first time. UCX listens where `bind_host` is."""
        self.name = name
        one_machine = _on_one_machine(bind_host)
        self.source_device = 0  # that sources in host memory are said to be of
        try:
            config = _NIXL.nixl_agent_config(enable_prog_thread=progress_thread, backends=[])
            self._agent: Any = _NIXL.nixl_agent(name, config)
            self._agent.create_backend(_BACKEND, _parameters(one_machine))
        except _FAILURES as error:
            raise NixlError(
                f"NIXL cannot make an agent with backend {_BACKEND}: {error}"
            ) from error
        self._sources: Sources | None = Sources(self._register, self._deregister)
        self._quick: Any = None  # what writes compiled batches, whose sources may all be read
        self._handle: Any = None  # what the package makes of a transfer of its bindings
        if one_machine:  # UCX pins nothing, so a registration is a record of a range
            with contextlib.suppress(NixlError):
                self._register(_EVERYWHERE)
                self._sources, self.source_device = None, _EVERYWHERE.device
                self._quick = self._quick_library()
        self._get_notes: Any = self._agent.get_new_notifs
        if self._quick is not None:
            self._get_notes = self._quick.notes
        self._stages: list[torch.Tensor] = []  # that no write reads
        self._stuck: list[Write] = []  # given up, but the library would not let go of them

    def publish(self, span: Span) -> tuple[Any, bytes]:
        """Let peers write to `span`: (what `withdraw` takes, what allows a peer to do so)."""
        registered = self._register(span)
        try:
            return registered, self._agent.get_partial_agent_metadata(registered, True, [_BACKEND])
        except _FAILURES as error:
            raise NixlError(f"NIXL gives no metadata: {error}") from error

    def withdraw(self, registered: Any) -> None:
        """Let nobody write there any more, as far as the network can enforce it."""
        self._deregister(registered)

    def admit(self, name: str, metadata: bytes, like: bytes) -> None:
        """Take in a peer's metadata, which must be that of agent `name` and begin as `like`, this
        agent's own, does. Raises `ProtocolError`."""
        # Checked before the library parses it: metadata of another name would replace that peer's.
        begin = like.find(self.name.encode())
        if metadata[: begin + len(name)] != like[:begin] + name.encode():
            raise ProtocolError("agent metadata is of another agent or version of NIXL")
        try:
            got = self._agent.add_remote_agent(metadata)
            self._agent.make_connection(name)
        except _FAILURES as error:
            raise ProtocolError(f"NIXL refused the agent metadata: {error}") from error
        if _text(got) != name:
            raise ProtocolError(f"agent metadata is of {_text(got)!r}; allowed: {name!r}")

    def forget(self, name: str) -> None:
        """Disconnect from a peer."""
        try:
            self._agent.remove_remote_agent(name)
        except _FAILURES as error:
            raise NixlError(f"NIXL cannot disconnect: {error}") from error

    def write(self, peer: str, batch: Batch) -> Write:
        """Begin to write all of `batch`, and its note behind that, at agent `peer`.

        May copy everything before it returns, and then is `done`.
        """
        if self._quick is not None and type(batch) is not Batch:
            return self._write_quickly(peer, batch)
        write, agent = Write(), self._agent
        kind = "VRAM" if batch.payloads[0].is_cuda else "DRAM"
        try:
            local = self._readable(write, batch)
            write.handle = agent.initialize_xfer(
                "WRITE",
                agent.get_xfer_descs(local, kind),
                agent.get_xfer_descs(batch.remote, kind),
                peer,
                batch.note,
            )
            state = agent.transfer(write.handle)
        except _FAILURES as error:
            self.give_up(write)
            raise NixlError(f"NIXL cannot write: {error}") from error
        if state == "ERR":
            self.give_up(write)
            raise NixlError("NIXL cannot write")
        if state == "DONE":
            self._finish(write)
        return write

    def _write_quickly(self, peer: str, batch: Any) -> Write:
        try:
            left = self._quick.write(peer, batch)
        except _FAILURES as error:
            raise NixlError(f"NIXL cannot write: {error}") from error
        if left is not None:
            return self.under_way(batch, *left)
        write = Write()
        write.done = True
        return write

    def express(self, peer: str, sending: Any, link: Link, most: int) -> Express | None:
        """What writes the next batch of `sending` at agent `peer`, and its frames to `link`, if
        both are compiled and sources may be read as they are. See `Express`."""
        if self._quick is None or isinstance(sending, Sending):
            return None
        express: Express = self._quick.writer(peer, sending, link, most)
        return express

    def under_way(self, batch: Any, handle: Any, trouble: object) -> Write:
        """The write of `batch` that `Express` has begun, and what went wrong or None."""
        write = Write()
        if handle is not None:
            write.handle = self._handle(self._agent.agent, handle)
        write.kept = batch.payloads
        if trouble is not None:
            self.give_up(write)
            raise NixlError(f"NIXL cannot write: {trouble}")
        return write

    def _quick_library(self) -> Any:
        """The compiled part, around the bindings that the package stands on; None without it, or
        for a package that stands on others."""
        if native.columns is None:
            return None
        package = sys.modules[type(self._agent).__module__]
        try:
            bindings, agent = package.nixlBind, self._agent.agent
            self._handle = package.nixl_xfer_handle
            return native.columns.NixlLibrary(
                agent, bindings.nixlXferDList, bindings.DRAM_SEG, bindings.NIXL_WRITE,
                bindings.NIXL_SUCCESS, bindings.NIXL_IN_PROG,
            )  # fmt: skip
        except AttributeError:
            return None

    def look(self, write: Write) -> bool:
        """Whether `write` is done."""
        try:
            state = self._agent.check_xfer_state(write.handle)
        except _FAILURES as error:
            raise NixlError(f"a NIXL write failed: {error}") from error
        if state == "ERR":
            raise NixlError("a NIXL write failed")
        if state == "DONE":
            self._finish(write)
        return write.done

    def give_up(self, write: Write) -> None:
        """Cancel a write. Where the library cannot, its source is kept until it can."""
        if not write.done and not self._let_go(write):
            self._stuck.append(write)

    def notify(self, peer: str, note: bytes) -> None:
        """Send `note`, in no order with anything else."""
        try:
            self._agent.send_notif(peer, note)
        except _FAILURES as error:
            raise NixlError(f"NIXL cannot notify: {error}") from error

    def notes(self) -> dict[str, list[bytes]]:
        """What has come in from each agent; drives everything that is under way."""
        if self._stuck:
            self._stuck = [write for write in self._stuck if not self._let_go(write)]
        try:
            notes: dict[str, list[bytes]] = self._get_notes()
        except _FAILURES as error:
            raise NixlError(f"NIXL does not listen: {error}") from error
        return notes

    def close(self) -> None:
        """End it, with everything that is under way. Idempotent."""
        for write in self._stuck:
            self._let_go(write)
        # Its threads, sockets and registrations end with it.
        self._agent = self._quick = self._get_notes = None

    def _finish(self, write: Write) -> None:
        write.done = True
        self._let_go(write)

    def _let_go(self, write: Write) -> bool:
        handle, write.handle = write.handle, None
        if handle is not None:
            try:
                handle.release()
            except _FAILURES:
                write.handle = handle
                return False
        if write.stage is not None:
            self._stages.append(write.stage)
            write.stage = None
        if self._sources is not None:
            for span in write.spans:
                self._sources.release(span)
        write.spans, write.kept = [], []
        return True

    def _readable(self, write: Write, batch: Batch) -> Places | list[Place]:
        """Where the library may read what is to be written, for as long as `write` lasts."""
        if self._sources is None:
            write.kept = batch.payloads
            return batch.local
        if batch.nbytes + len(batch.local) * _ALIGNMENT <= _STAGE_BYTES:
            return self._stage(write, batch)
        for payload, (address, nbytes, _) in zip(batch.payloads, batch.local.tolist(), strict=True):
            self._keep(write, payload, address - payload.data_ptr(), nbytes)
        return [(span.address, span.nbytes, span.device) for span in write.spans]

    def _stage(self, write: Write, batch: Batch) -> list[Place]:
        """Copy small pieces to memory that is registered once and for all."""
        device = batch.payloads[0].device
        stage = self._stages.pop() if self._stages else self._new_stage(device)
        write.stage = stage
        span, offset, places = Span.of(stage), 0, []
        for payload, (address, nbytes, _) in zip(batch.payloads, batch.local.tolist(), strict=True):
            if payload.is_cpu:
                ctypes.memmove(span.address + offset, address, nbytes)
            else:
                begin = address - payload.data_ptr()
                source = payload.flatten().view(torch.uint8)[begin : begin + nbytes]
                stage[offset : offset + nbytes].copy_(source)
            places.append((span.address + offset, nbytes, span.device))
            offset += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        if stage.is_cuda:
            torch.cuda.current_stream(stage.device).synchronize()
        return places

    def _new_stage(self, device: torch.device) -> torch.Tensor:
        stage = torch.empty(_STAGE_BYTES, dtype=torch.uint8, device=device)
        self._register(Span.of(stage))
        return stage

    def _keep(self, write: Write, payload: torch.Tensor, begin: int, nbytes: int) -> None:
        """Register a piece's source for as long as the write lasts."""
        assert self._sources is not None
        span = Span.of(payload, begin, nbytes)
        write.kept.append(payload)
        if not self._sources.acquire(span):
            # It overlaps a source that is being read, without lying in it: rare, so it is copied.
            copy = payload.flatten().view(torch.uint8)[begin : begin + nbytes].clone()
            write.kept.append(copy)
            span = Span.of(copy, 0, nbytes)
            if not self._sources.acquire(span):
                raise NixlError(f"{span} overlaps memory that is registered")
        write.spans.append(span)

    def _register(self, span: Span) -> Any:
        try:
            return self._agent.register_memory(
                [(span.address, span.nbytes, span.device, "")], span.kind, [_BACKEND]
            )
        except _FAILURES as error:
            raise NixlError(f"NIXL cannot register {span.nbytes} bytes: {error}") from error

    def _deregister(self, registered: Any) -> None:
        try:
            self._agent.deregister_memory(registered, [_BACKEND])
        except _FAILURES as error:
            raise NixlError(f"NIXL cannot deregister: {error}") from error


def _parameters(one_machine: bool) -> dict[str, str]:
    """Of the backend, whose defaults are right between machines.

    UCX listens on every interface unless it is told not to. And to be told of dead peers by UCX, as
    the default is, means to have notifications go over TCP instead of shared memory, with a reply
    from the peer before any write is done; the link tells of dead peers anyway.
    """
    if not one_machine:
        return {}
    return {"ucx_error_handling_mode": "none", "engine_config": "NET_DEVICES=lo"}


def _on_one_machine(bind_host: str) -> bool:
    """Whether all peers must be here, and nobody has chosen a network device for them."""
    return is_loopback(bind_host) and "UCX_NET_DEVICES" not in os.environ


def _text(name: str | bytes) -> str:
    return name.decode(errors="replace") if isinstance(name, bytes) else name
