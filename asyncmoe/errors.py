"""Errors that asyncmoe raises on purpose; each names the thing, the value and what is allowed."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class AsyncMoeError(Exception):
    """Base of all errors raised by asyncmoe."""


class ConfigError(AsyncMoeError):
    """A configuration key or value is not usable."""


class UnknownName(ConfigError):
    """A name (architecture, scheduler, config key …) that nothing is registered under."""

    def __init__(self, what: str, name: str, known: Iterable[str]) -> None:
        self.what, self.name, self.known = what, name, sorted(known)
        near = difflib.get_close_matches(name, self.known, n=1, cutoff=0.6)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        super().__init__(f"unknown {what} {name!r}.{hint} Known: {', '.join(self.known) or 'none'}")


class MissingDependency(AsyncMoeError):
    """An optional library is not installed; the message names the extra to install.

    `extra` is one of `package`, which is another one for a third party's implementation; None says
    that no extra brings the library.
    """

    def __init__(
        self, what: str, library: str, extra: str | None, package: str = "asyncmoe"
    ) -> None:
        install = library if extra is None else f"'{package}[{extra}]'"
        super().__init__(f"{what} needs {library}, which is not installed: pip install {install}")


class MissingHardware(AsyncMoeError):
    """This machine lacks a device, or enough of them; nothing that can be installed helps."""


class CheckpointError(AsyncMoeError):
    """A checkpoint directory is missing something, or holds something it should not."""


class RequestError(AsyncMoeError):
    """A request is refused; the engine goes on. `parameter` names the field at fault, if any."""

    def __init__(self, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


class RequestFailed(AsyncMoeError):
    """An admitted request ended without its answer, for example since a rank was lost."""


class ProtocolError(AsyncMoeError):
    """A peer sent a frame that the protocol does not allow."""


class ParcelTooLarge(AsyncMoeError):
    """A parcel is beyond `limits.parcel_bytes`."""

    def __init__(self, size_bytes: int, limit_bytes: int) -> None:
        super().__init__(f"parcel of {size_bytes} bytes; limits.parcel_bytes is {limit_bytes}")


FAREWELL = "it closed its transport"


class PeerLost(AsyncMoeError):
    """The connection to a rank is gone."""

    def __init__(self, peer: int, reason: str) -> None:
        super().__init__(f"rank {peer} is lost: {reason}")
        self.peer, self.reason = peer, reason

    @property
    def took_leave(self) -> bool:
        """Whether the rank ended its connections itself, as at the end of the whole engine."""
        return self.reason == FAREWELL


class RankFailed(AsyncMoeError):
    """A rank failed at start-up or stopped; the message carries that rank's own error."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(f"rank {rank} failed: {message}")
        self.rank, self.message = rank, message
