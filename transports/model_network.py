"""The modelled network: hosts with one NIC each, and when what is put on a link comes out of it.

Ranks `i * ranks_per_host` to `(i + 1) * ranks_per_host - 1` share host i. What leaves a host queues
for its NIC's way out, and what reaches one for its way in, first come first served; within a host
each rank has a way of its own, which is usually faster. The switch between them never blocks. A
trace is cross traffic: it leaves a fraction of the bandwidth, at the sender's NIC for the links
`S-T`, `S-*` and `*-*`, at the receiver's for `*-T`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from asyncmoe.errors import ConfigError
from asyncmoe.transports.impaired_options import Fractions, check_link, checked, fits, read_trace

_BYTE_S = 8e-9  # at 1 Gbit/s
_MOST_US = 3.6e9
_MOST_TAKEN = 0.99
_WHERE = "transport.options.network"
# What reaches a NIC within this of now, beyond the latency, gets its turn there at once, to save an
# event; what is sent later and comes before it may use the time that the NIC has until then.
_NEAR_S = 200e-6


class LinkOptions(BaseModel):
    """What may differ between the links of different hosts."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    latency_us: float = Field(0.0, ge=0, le=_MOST_US)
    jitter_us: float = Field(0.0, ge=0, le=_MOST_US)  # at most; evenly distributed; seeded


class NoiseOptions(BaseModel):
    """Cross traffic at every NIC, each way on its own: it takes another part of each window."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    taken: float = Field(ge=0, lt=1)  # mean part of the bandwidth
    deviation: float = Field(ge=0, lt=1)  # standard, of the part; normal, within 0 and 0.99
    busy: float = Field(1.0, gt=0, le=1)  # part of the windows that have any
    window_ms: float = Field(1.0, gt=0, le=1000)


class NetworkOptions(LinkOptions):
    """The options under `network`."""

    ranks_per_host: int = Field(1, ge=1)
    nic_gbit_per_s: float | None = Field(None, gt=0)  # of a host, each way; None: no limit
    local_gbit_per_s: float | None = Field(None, gt=0)  # of a rank, to the others of its host
    local_latency_us: float = Field(0.0, ge=0, le=_MOST_US)
    links: dict[str, dict[str, Any]] = Field(default_factory=dict)  # "0-1", "*-1": see LinkOptions
    trace: str | None = None  # CSV file as of `impaired`: time_s,link,available
    noise: NoiseOptions | None = None  # instead of a trace
    seed: int = Field(0, ge=0)  # of jitter and noise


class Noise:
    """Parts of the bandwidth that are left, window by window; after many they come again."""

    _WINDOWS = 1 << 14

    def __init__(self, options: NoiseOptions, seed: int) -> None:
        random, busy = Random(seed), options.busy
        self._window_s = 1e-3 * options.window_ms
        self._left = []
        for _ in range(self._WINDOWS):
            part = random.gauss(options.taken / busy, options.deviation)
            taken = min(max(part, 0.0), _MOST_TAKEN) if random.random() < busy else 0.0
            self._left.append(1 - taken)

    def end_of(self, begin_s: float, work_s: float) -> float:
        """As `Fractions.end_of`."""
        window_s, left = self._window_s, self._left
        window, now_s = int(begin_s / window_s), begin_s
        while True:
            part, end_s = left[window % self._WINDOWS], (window + 1) * window_s
            done_s = max(0.0, end_s - now_s) * part
            if done_s >= work_s:
                return now_s + work_s / part
            work_s -= done_s
            window, now_s = window + 1, max(now_s, end_s)


class Way:
    """One directed link, as the network sees it."""

    __slots__ = (
        "at_source", "at_target", "byte_s", "exit", "exits_s", "into", "jitter_s", "latency_s",
        "near_s", "random", "sent_bytes",
    )  # fmt: skip

    def __init__(
        self, exits_s: list[float], place: int, into: int | None, byte_s: float, latency_s: float
    ) -> None:
        """`exits_s[place]`: when what it leaves by is free. `into`: the NIC at the other end, if
        there is one to wait for."""
        self.exits_s, self.exit, self.into = exits_s, place, into
        self.byte_s, self.latency_s, self.near_s = byte_s, latency_s, latency_s + _NEAR_S
        self.jitter_s = 0.0
        self.random: Callable[[], float] | None = None  # where there is jitter
        self.at_source: Fractions | Noise | None = None
        self.at_target: Fractions | Noise | None = None
        self.sent_bytes = 0


class Network:
    """All links of one cluster. Times are seconds on the loop's clock."""

    def __init__(self, options: dict[str, Any], world: int) -> None:
        """Raises `ConfigError` naming the option."""
        self.options = known = checked(NetworkOptions, options, _WHERE)
        hosts = -(-world // known.ranks_per_host)
        # When the NICs' ways out and in, and each rank's way within its host, are free.
        self._out_s, self._in_s, self._local_s = [0.0] * hosts, [0.0] * hosts, [0.0] * world
        # Where each NIC's way in has nothing to do before that.
        self._idle_s = [(0.0, 0.0)] * hosts
        self._nic_byte_s = _byte_s(known.nic_gbit_per_s)
        self._local_byte_s = _byte_s(known.local_gbit_per_s)
        defaults = known.model_dump(include=set(LinkOptions.model_fields))
        self._default = LinkOptions(**defaults)
        self._links: list[tuple[str, LinkOptions]] = []
        for link, values in known.links.items():
            check_link(link, f"key of {_WHERE}.links {link!r}", world)
            where = f"{_WHERE}.links.{link}"
            self._links.append((link, checked(LinkOptions, {**defaults, **values}, where)))
        self._trace = [] if known.trace is None else read_trace(Path(known.trace), world)
        if self._trace and known.nic_gbit_per_s is None:
            raise ConfigError(f"{_WHERE}.trace needs nic_gbit_per_s, of which it takes a part")
        self._noise = _noise(known, hosts)

    def host(self, rank: int) -> int:
        """The host of `rank`."""
        return rank // self.options.ranks_per_host

    def way(self, source: int, target: int) -> Way:
        """A new link from rank `source` to rank `target`."""
        known, here, there = self.options, self.host(source), self.host(target)
        if here == there:
            latency_s = known.local_latency_us * 1e-6
            return Way(self._local_s, source, None, self._local_byte_s, latency_s)
        link = self._default
        for name, other in self._links:
            if fits(name, source, target):
                link = other  # the last that fits wins
        into = there if self._nic_byte_s else None
        way = Way(self._out_s, here, into, self._nic_byte_s, link.latency_us * 1e-6)
        if link.jitter_us:
            way.jitter_s = link.jitter_us * 1e-6
            way.random = Random(f"{known.seed} {source} {target}").random
        steps = [step for step in self._trace if fits(step[1], source, target)]
        far = [(t, part) for t, name, part in steps if name[0] == "*" != name[-1]]
        near = [(t, part) for t, name, part in steps if name[0] != "*" or name[-1] == "*"]
        way.at_source = Fractions(near) if near else None
        way.at_target = Fractions(far) if far else None
        if self._noise:
            way.at_source, way.at_target = self._noise[here][0], self._noise[there][1]
        return way

    def put(
        self, way: Way, now_s: float, begin_s: float, nbytes: int
    ) -> tuple[float, float, float | None]:
        """Put `nbytes` on a link at `begin_s`, which is now or a little later.

        Returns when the first byte reaches the other end, when the last one does at best, and when
        all is there. The last is None where it depends on what else comes to that NIC before: then
        call `enter` at the first of these times.
        """
        way.sent_bytes += nbytes
        end_s = begin_s
        if way.byte_s:
            exits_s, place = way.exits_s, way.exit
            if exits_s[place] > begin_s:
                begin_s = exits_s[place]
            end_s = begin_s + nbytes * way.byte_s
            if way.at_source is not None:
                end_s = way.at_source.end_of(begin_s, nbytes * way.byte_s)
            exits_s[place] = end_s
        first_s, last_s = begin_s + way.latency_s, end_s + way.latency_s
        if way.random is not None:
            last_s += way.jitter_s * way.random()
        if way.into is None:
            return first_s, last_s, last_s
        if first_s - now_s <= way.near_s:
            return first_s, last_s, self.enter(way, first_s, last_s, nbytes)
        return first_s, last_s, None

    def enter(self, way: Way, first_s: float, last_s: float, nbytes: int) -> float:
        """When all of it is in, behind what came to that NIC before it."""
        into, ins_s, work_s = way.into, self._in_s, nbytes * way.byte_s
        assert into is not None
        begin_s, free_s = first_s, ins_s[into]
        if begin_s < free_s:
            idle_s, until_s = self._idle_s[into]
            end_s = (begin_s if begin_s > idle_s else idle_s) + work_s
            if end_s <= until_s and way.at_target is None:
                self._idle_s[into] = end_s, until_s
                return end_s if end_s > last_s else last_s
            begin_s = free_s
        else:
            self._idle_s[into] = free_s, begin_s
        end_s = begin_s + work_s
        if way.at_target is not None:
            end_s = way.at_target.end_of(begin_s, work_s)
        ins_s[into] = end_s
        return end_s if end_s > last_s else last_s


def _noise(options: NetworkOptions, hosts: int) -> list[tuple[Noise, Noise]]:
    """Of each host's NIC, out and in."""
    if options.noise is None:
        return []
    if options.trace is not None or options.nic_gbit_per_s is None:
        raise ConfigError(f"{_WHERE}.noise needs nic_gbit_per_s, and no trace beside it")
    first = options.seed * 2**32
    return [
        (Noise(options.noise, first + 2 * host), Noise(options.noise, first + 2 * host + 1))
        for host in range(hosts)
    ]


def _byte_s(gbit_per_s: float | None) -> float:
    return 0.0 if gbit_per_s is None else _BYTE_S / gbit_per_s
