"""The modelled network: hosts with one NIC each, and the links between ranks (`model_way.py`).

Ranks `i * ranks_per_host` to `(i + 1) * ranks_per_host - 1` share host i. What leaves a host queues
for its NIC's way out, and what reaches one for its way in, first come first served; within a host
each rank has a way of its own, which is usually faster. The switch between them never blocks. A
trace is cross traffic: it leaves a fraction of the bandwidth, at the sender's NIC for the links
`S-T`, `S-*` and `*-*`, at the receiver's for `*-T`.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from asyncmoe.errors import ConfigError
from asyncmoe.transports.impaired_options import Fractions, check_link, checked, fits, read_trace
from asyncmoe.transports.model_way import Way, make_nics

_BYTE_S = 8e-9  # at 1 Gbit/s
_MOST_US = 3.6e9
_MOST_TAKEN = 0.99
_WHERE = "transport.options.network"


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


class Network:
    """All links of one cluster. Times are seconds on the loop's clock."""

    def __init__(self, options: dict[str, Any], world: int) -> None:
        """Raises `ConfigError` naming the option."""
        self.options = known = checked(NetworkOptions, options, _WHERE)
        hosts = -(-world // known.ranks_per_host)
        self._nics = make_nics(hosts, world)
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
            return self._nics.way(True, source, None, self._local_byte_s, latency_s)
        link = self._default
        for name, other in self._links:
            if fits(name, source, target):
                link = other  # the last that fits wins
        into = there if self._nic_byte_s else None
        way = self._nics.way(False, here, into, self._nic_byte_s, link.latency_us * 1e-6)
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
