"""Names for states of the network, as a command line gives them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from asyncmoe.errors import ConfigError
from asyncmoe.transports.impaired_options import check_link

ALLOWED = "none, delay:S-T,MS, delay:MS, jitter:MS, narrow:MBIT_PER_S, stall:EVERY_S,S, noise:TAKEN"


_MOST_MS = 3.6e6
_LEAST_MBIT, _MOST_MBIT = 1e-3, 1e9


def tables(texts: Sequence[str], live: bool, world: int) -> dict[str, Any]:
    """An entry of `impairments` for each text, of links between `world` ranks.

    Raises `ConfigError` naming it and what may be.
    """
    return {text.strip().replace(":", "="): _table(text.strip(), live, world) for text in texts}


def _table(text: str, live: bool, world: int) -> dict[str, Any]:
    name, _, argument = text.partition(":")
    parts = argument.split(",")
    try:
        match name, parts:
            case "none", [""]:
                return {}
            case "delay", [ms]:
                return {"links": {"latency_ms": _number(ms, "MS", 0, _MOST_MS)}}
            case "delay", [link, ms]:
                latency_ms = _number(ms, "MS", 0, _MOST_MS)
                check_link(link, f"link {link!r}", world)
                return {"links": {"links": {link: {"latency_ms": latency_ms}}}}
            case "jitter", [ms]:
                return {"links": {"jitter_ms": _number(ms, "MS", 0, _MOST_MS)}}
            case "narrow", [mbit]:
                rate = _number(mbit, "MBIT_PER_S", _LEAST_MBIT, _MOST_MBIT)
                return {"links": {"mbit_per_s": rate}}
            case "stall", [every_s, seconds]:
                every = _number(every_s, "EVERY_S", 1e-3, 3600)
                return {
                    "links": {"stall_every_s": every, "stall_s": _number(seconds, "S", 0, every)}
                }
            case "noise", [taken] if not live:
                part = _number(taken, "TAKEN", 0, 0.99)
                return {"network": {"noise": {"taken": part, "deviation": part / 2}}}
    except ConfigError as error:
        raise ConfigError(f"--impairments {text!r}: {error}") from None
    where = "; noise is for --virtual" if name == "noise" and live else ""
    raise ConfigError(f"--impairments {text!r}; allowed: {ALLOWED}{where}")


def _number(text: str, what: str, least: float, most: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value <= most:
        raise ConfigError(f"{what} is {text!r}; allowed: {least:g} to {most:g}")
    return value
