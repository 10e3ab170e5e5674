"""When what is put on a modelled link comes out of it.

`Nics` is what ranks share. It is compiled where that is there (`native/src/columns/model_way.cpp`);
the one here is the twin. Times are seconds on the loop's clock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from asyncmoe import native

# What reaches a NIC within this of now, beyond the latency, gets its turn there at once, to save an
# event; what is sent later and comes before it may use the time that the NIC has until then.
_NEAR_S = 200e-6


class Traffic(Protocol):
    """What leaves a part of a link's bandwidth."""

    def end_of(self, begin_s: float, work_s: float) -> float:
        """When work is done that begins then and would take `work_s` alone."""


class Nics:
    """When the NICs' ways out and in, and each rank's way within its host, are free."""

    def __init__(self, hosts: int, world: int) -> None:
        self.out_s, self.in_s, self.local_s = [0.0] * hosts, [0.0] * hosts, [0.0] * world
        # Where each NIC's way in has nothing to do before that.
        self.idle_s = [(0.0, 0.0)] * hosts

    def way(
        self, local: bool, place: int, into: int | None, byte_s: float, latency_s: float
    ) -> Way:
        """A directed link, which leaves rank `place` within its host, or host `place`.

        `into`: the NIC at the other end, if there is one to wait for. `byte_s`: 0 for no limit.
        """
        return Way(self, self.local_s if local else self.out_s, place, into, byte_s, latency_s)


def make_nics(hosts: int, world: int) -> Nics:
    """As `Nics`, compiled if that is there."""
    kind: type[Nics] = Nics if native.columns is None else native.columns.Nics
    return kind(hosts, world)


class Way:
    """One directed link, as the network sees it."""

    __slots__ = (
        "_byte_s", "_exits_s", "_into", "_near_s", "_nics", "_place", "at_source", "at_target",
        "jitter_s", "latency_s", "random", "sent_bytes",
    )  # fmt: skip

    def __init__(
        self,
        nics: Nics,
        exits_s: list[float],
        place: int,
        into: int | None,
        byte_s: float,
        latency_s: float,
    ) -> None:
        self._nics, self._exits_s, self._place, self._into = nics, exits_s, place, into
        self._byte_s, self.latency_s, self._near_s = byte_s, latency_s, latency_s + _NEAR_S
        self.jitter_s = 0.0
        self.random: Callable[[], float] | None = None  # where there is jitter
        self.at_source: Traffic | None = None
        self.at_target: Traffic | None = None
        self.sent_bytes = 0

    def put(self, now_s: float, begin_s: float, nbytes: int) -> tuple[float, float, float | None]:
        """Put `nbytes` on the link at `begin_s`, which is now or a little later.

        Returns when the first byte reaches the other end, when the last one does at best, and when
        all is there. The last is None where it depends on what else comes to that NIC before: then
        call `enter` at the first of these times.
        """
        self.sent_bytes += nbytes
        end_s = begin_s
        if self._byte_s:
            begin_s = max(begin_s, self._exits_s[self._place])
            work_s = nbytes * self._byte_s
            end_s = begin_s + work_s
            if self.at_source is not None:
                end_s = self.at_source.end_of(begin_s, work_s)
            self._exits_s[self._place] = end_s
        first_s, last_s = begin_s + self.latency_s, end_s + self.latency_s
        if self.random is not None:
            last_s += self.jitter_s * self.random()
        if self._into is None:
            return first_s, last_s, last_s
        if first_s - now_s <= self._near_s:
            return first_s, last_s, self.enter(first_s, last_s, nbytes)
        return first_s, last_s, None

    def enter(self, first_s: float, last_s: float, nbytes: int) -> float:
        """When all of it is in, behind what came to that NIC before it."""
        into, nics, work_s = self._into, self._nics, nbytes * self._byte_s
        assert into is not None
        begin_s, free_s = first_s, nics.in_s[into]
        if begin_s < free_s:
            idle_s, until_s = nics.idle_s[into]
            end_s = max(begin_s, idle_s) + work_s
            if end_s <= until_s and self.at_target is None:
                nics.idle_s[into] = end_s, until_s
                return max(end_s, last_s)
            begin_s = free_s
        else:
            nics.idle_s[into] = free_s, begin_s
        end_s = begin_s + work_s
        if self.at_target is not None:
            end_s = self.at_target.end_of(begin_s, work_s)
        nics.in_s[into] = end_s
        return max(end_s, last_s)
