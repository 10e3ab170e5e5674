"""What the ranks did in a run, from the reports of their counters at its start and its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncmoe.metrics.account import KINDS, Account, Report, accounts
from asyncmoe.metrics.probe import GAUGES, LEAST_WAIT_S, STEPS_PER_OCTAVE

TIME_BINS = 240  # of the picture of queue depths

Reports = Mapping[int, Report]  # by rank


def cluster_figures(
    before: Reports,
    after: Reports,
    layers: int,
    link_bytes_per_s: float | None = None,
    ramp_s: float = 0.0,
) -> dict[str, Any]:
    """Figures of all ranks together and of each, JSON-ready.

    Counters are of the whole time between the reports; what the probes sampled is from `ramp_s` on.

    Args:
        layers: MoE layers, for the names of stages.
        link_bytes_per_s: what a link can carry, if that is known.
    """
    ranks = {}
    for rank, account in accounts(before, after).items():
        spent_s = account.whole_s
        ranks[str(rank)] = {
            "device_utilisation": sum(account.compute_s.values()) / spent_s,
            "compute_share": {kind: account.compute_s[kind] / spent_s for kind in KINDS},
            "hidden_share": _hidden_share(before[rank], after[rank], account),
            "batches": account.batches,
            "mean_rows": {k: account.rows[k] / max(1, account.batches[k]) for k in KINDS},
            "parcels_per_s": account.parcels / spent_s,
            "bytes_per_s": account.sent_bytes / spent_s,
        }
    figures: dict[str, Any] = {
        "device_utilisation": _mean(ranks, "device_utilisation"),
        "hidden_share": _mean(ranks, "hidden_share"),
        "mean_rows": _mean_rows(before, after),
        "links": _links(before, after, link_bytes_per_s),
        "ranks": ranks,
    }
    if ranks and all("probe" in after[int(rank)] for rank in ranks):
        figures |= _probed(before, after, layers, ramp_s)
    return figures


def _hidden_share(before: Report, after: Report, account: Account) -> float:
    """Share of the loop's CPU time that passed while the device computed.

    As its probe saw for the work on batches, unless the report leaves that out, as in a world
    whose CPU time is modelled; or else the least that it can be.
    """
    if "cpu_s" not in after.get("probe", {}):
        return account.hidden
    cpu_s, hidden_s = (
        sum(after["probe"][name].values()) - sum(before["probe"][name].values())
        for name in ("cpu_s", "hidden_s")
    )
    return hidden_s / cpu_s if cpu_s > 0 else 1.0


def _mean(ranks: Mapping[str, Any], name: str) -> float | None:
    values = [each[name] for each in ranks.values()]
    return float(np.mean(values)) if values else None


def _mean_rows(before: Reports, after: Reports) -> dict[str, float]:
    found = accounts(before, after).values()
    batches = {kind: sum(each.batches[kind] for each in found) for kind in KINDS}
    return {k: sum(each.rows[k] for each in found) / max(1, batches[k]) for k in KINDS}


def _links(before: Reports, after: Reports, capacity: float | None) -> dict[str, Any]:
    """Payload bytes per second from each rank (row) to each (column)."""
    ranks = sorted(set(before) & set(after))
    matrix = []
    for rank in ranks:
        seconds = max(after[rank]["loop_s"] - before[rank]["loop_s"], 1e-9)
        sent = np.subtract(after[rank]["bytes_to"], before[rank]["bytes_to"])
        matrix.append((sent / seconds).tolist())
    return {"ranks": ranks, "bytes_per_s": matrix, "capacity_bytes_per_s": capacity}


def _probed(before: Reports, after: Reports, layers: int, ramp_s: float) -> dict[str, Any]:
    ranks = sorted(set(before) & set(after))
    chain = 2 * layers + 1
    names = [f"{kind}{layer}" for layer in range(layers) for kind in "AE"] + ["H"]
    spent = {rank: _since(before[rank]["probe"], after[rank]["probe"]) for rank in ranks}
    seconds = min(after[rank]["loop_s"] - before[rank]["loop_s"] for rank in ranks)
    edges = np.linspace(ramp_s, max(seconds, ramp_s + 1e-9), TIME_BINS + 1)
    depth = np.zeros((TIME_BINS, chain))
    gauges: dict[str, list[float]] = {name: [] for name in GAUGES}
    for rank in ranks:
        probe = after[rank]["probe"]
        at, inside = _samples_at(probe, before[rank]["loop_s"], edges)
        sampled = _folded(np.array(probe["depth"], np.float64), chain)
        depth += sampled[at] if len(at) else 0.0
        for name in GAUGES:
            of_rank = np.array(probe["gauges"][name], np.float64)[inside]
            gauges[name].append(float(of_rank.mean()) if len(inside) else 0.0)
    rows, waited, batches = (
        _folded(np.sum([each[name] for each in spent.values()], 0)[None], chain)[0]
        for name in ("taken_rows", "waited_s", "batches")
    )
    rate = rows / max(seconds, 1e-9)
    mean_depth = depth.mean(0)
    return {
        "stages": {
            "names": names,
            "mean_depth": mean_depth.tolist(),
            # Little's law: rows that wait, by rows that pass in a second.
            "queue_delay_ms": _ratio(1e3 * mean_depth, rate),
            "oldest_wait_ms": _ratio(1e3 * waited, batches),
            "mean_rows": _ratio(rows, batches),
        },
        "depth": {"time_s": edges[:-1].tolist(), "rows": np.round(depth, 2).T.tolist()},
        "batch_sizes": {
            kind: _added(each["sizes"][kind] for each in spent.values()) for kind in KINDS
        },
        "cpu_per_batch": {kind: _cpu(spent.values(), kind) for kind in KINDS},
        "oldest_wait_ms": {
            kind: _wait_percentiles(_added(each["waits"][kind] for each in spent.values()))
            for kind in KINDS
        },
        "gauges": {
            name: {"mean": float(np.mean(values)), "of_ranks": values}
            for name, values in gauges.items()
        },
    }


def _cpu(spent: Iterable[Mapping[str, Any]], kind: str) -> dict[str, float] | None:
    """The loop's work on a batch of a kind, and the share of it that compute hid."""
    found = [each for each in spent if "cpu_s" in each]
    batches = sum(sum(each["sizes"][kind].values()) for each in found)
    cpu_s, hidden_s = (sum(each[name][kind] for each in found) for name in ("cpu_s", "hidden_s"))
    if not batches or not cpu_s:
        return None
    return {"us": 1e6 * cpu_s / batches, "hidden_share": hidden_s / cpu_s}


def _since(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Counters of a probe between two reports."""
    spent: dict[str, Any] = {
        name: np.subtract(after[name], before[name])
        for name in ("taken_rows", "batches", "waited_s")
    }
    for name in ("cpu_s", "hidden_s"):
        if name in after:
            spent[name] = {kind: after[name][kind] - before[name][kind] for kind in KINDS}
    for name in ("sizes", "waits"):
        spent[name] = {
            kind: {
                key: count - before[name][kind].get(key, 0)
                for key, count in after[name][kind].items()
            }
            for kind in KINDS
        }
    return spent


def _samples_at(
    probe: Mapping[str, Any], begin_s: float, edges: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The sample that stands for each bin of time [bins], and all that lie in one [samples].

    Both are empty if there is none.
    """
    times_s = np.array(probe["time_s"]) - begin_s
    inside = np.flatnonzero((times_s >= edges[0]) & (times_s <= edges[-1]))
    if not len(inside):
        return inside, inside
    middle = (edges[:-1] + edges[1:]) / 2
    nearest = times_s[inside].searchsorted(middle).clip(0, len(inside) - 1)
    return inside[nearest], inside


def _folded(stages: NDArray[Any], chain: int) -> NDArray[Any]:
    """[n, lanes * chain] -> [n, chain]: the lanes of a stage together."""
    folded: NDArray[Any] = stages.reshape(len(stages), -1, chain).sum(1)
    return folded


def _ratio(above: NDArray[Any], below: NDArray[Any]) -> list[float | None]:
    """Quotients; None where nothing is below."""
    return [
        float(a) / float(b) if b else None
        for a, b in zip(above.tolist(), below.tolist(), strict=True)
    ]


def _added(counters: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The sum of counters, in order of their keys, which are whole numbers; without zeros."""
    total: Counter[int] = Counter()
    for counter in counters:
        total.update({int(key): count for key, count in counter.items()})
    return {str(key): count for key, count in sorted(total.items()) if count}


def _wait_percentiles(counts: Mapping[str, int]) -> dict[str, float] | None:
    """Percentiles in ms, from the histogram of a probe; each the upper end of its bin."""
    if not counts:
        return None
    ends_ms = 1e3 * LEAST_WAIT_S * 2 ** ((np.array([*map(int, counts)]) + 1) / STEPS_PER_OCTAVE)
    share = np.cumsum([*counts.values()]) / sum(counts.values())
    return {f"p{p}": float(ends_ms[share.searchsorted(p / 100)]) for p in (50, 90, 99)}
