"""Which rank this process is, as torchrun and others that start processes say it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from asyncmoe.config import Config
from asyncmoe.cores import available_cores
from asyncmoe.errors import ConfigError
from asyncmoe.world import World


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the ranks meet: the address of a TCPStore, who hosts it, and this run's part of it."""

    host: str
    port: int
    prefix: str  # differs between runs and restarts that share a store
    agent_hosts: bool  # the launching agent hosts the store; otherwise rank 0 does


ONE_RANK = World(rank=0, size=1, local_rank=0, local_size=1)


def detect_world(environ: Mapping[str, str]) -> tuple[World, Rendezvous] | None:
    """What `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT` say, or None when no launcher
    has set them.

    `LOCAL_RANK` and `LOCAL_WORLD_SIZE` default to one process per machine. Raises `ConfigError`
    naming a variable that is missing or that does not fit.
    """
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        return None
    size = _number(environ, "WORLD_SIZE", 1, 65535)
    rank = _number(environ, "RANK", 0, size - 1)
    local_size = _number(environ, "LOCAL_WORLD_SIZE", 1, size, default="1")
    local_rank = _number(environ, "LOCAL_RANK", 0, local_size - 1, default="0")
    if not environ.get("MASTER_ADDR"):
        raise ConfigError("RANK and WORLD_SIZE are set, but MASTER_ADDR is not")
    run = environ.get("TORCHELASTIC_RUN_ID", "none")
    restart = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    rendezvous = Rendezvous(
        host=environ["MASTER_ADDR"],
        port=_number(environ, "MASTER_PORT", 1, 65535),
        prefix=f"asyncmoe/{run}/{restart}",
        agent_hosts=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )
    return World(rank, size, local_rank, local_size), rendezvous


def world_variables(world: World, rendezvous: Rendezvous) -> dict[str, str]:
    """The environment from which `detect_world` makes `world` and `rendezvous` again."""
    return {
        "RANK": str(world.rank),
        "WORLD_SIZE": str(world.size),
        "LOCAL_RANK": str(world.local_rank),
        "LOCAL_WORLD_SIZE": str(world.local_size),
        "MASTER_ADDR": rendezvous.host,
        "MASTER_PORT": str(rendezvous.port),
    }


def fit_to_world(config: Config, world: World) -> Config:
    """`config` with the number of ranks and the threads of each filled in.

    Raises `ConfigError` if `cluster.ranks` was set to something other than the world's size.
    """
    if "ranks" in config.cluster.model_fields_set and config.cluster.ranks != world.size:
        raise ConfigError(
            f"cluster.ranks is {config.cluster.ranks}, but WORLD_SIZE is {world.size}; leave "
            "cluster.ranks out when another program starts the ranks"
        )
    cluster = config.cluster.model_copy(update={"ranks": world.size})
    threads = config.device.threads or max(1, available_cores() // world.local_size)
    device = config.device.model_copy(update={"threads": threads})
    return config.model_copy(update={"cluster": cluster, "device": device})


def _number(
    environ: Mapping[str, str], name: str, least: int, most: int, default: str | None = None
) -> int:
    text = environ.get(name, default)
    if text is None:
        raise ConfigError(f"RANK and WORLD_SIZE are set, but {name} is not")
    if not text.isdecimal() or not least <= int(text) <= most:
        raise ConfigError(f"environment variable {name} is {text!r}; it must be {least} to {most}")
    return int(text)
