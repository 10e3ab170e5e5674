"""Memory that is not there, said in the names of what asked for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from asyncmoe.config import Config
from asyncmoe.errors import ConfigError
from asyncmoe.model import ModelSpec


@contextmanager
def fitting_memory(what: str, settings: str) -> Iterator[None]:
    """Raise `ConfigError` if the memory for `what` cannot be had; `settings`: what its size
    follows from, with the values."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # torch has no class of its own for this on a CPU
        if not isinstance(error, MemoryError) and "allocate memory" not in str(error):
            raise
        raise ConfigError(
            f"there is no memory for {what}; smaller values take less: {settings}"
        ) from error


def table_settings(config: Config, spec: ModelSpec, blocks: int) -> str:
    """What the tables and caches of a rank grow with."""
    values = {
        "engine.slots": config.engine.slots,
        "engine.max_requests": config.engine.max_requests,
        "engine.prefill_chunk": config.engine.prefill_chunk,
        "kv.blocks": blocks,
        "transport.window_rows": config.transport.window_rows,
        "model.context": spec.context,
    }
    return ", ".join(f"{name} = {value}" for name, value in values.items())
