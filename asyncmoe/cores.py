"""The cores of this machine that a process may use, and how its ranks share them."""

from __future__ import annotations

import os

from asyncmoe.world import World

Cores = frozenset[int]


def available_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def core_share(world: World, threads: int) -> Cores | None:
    """The cores of one of several ranks of a machine, `threads` of them, none of them another's.

    None if there is nothing to share out: one rank, too few cores, or a system that cannot pin.
    """
    if world.local_size == 1 or not hasattr(os, "sched_getaffinity"):
        return None
    cores = sorted(os.sched_getaffinity(0))
    if world.local_size * threads > len(cores):
        return None
    first = world.local_rank * threads
    return frozenset(cores[first : first + threads])
