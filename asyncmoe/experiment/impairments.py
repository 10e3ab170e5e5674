"""Names for states of the network, as a command line gives them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncmoe.errors import ConfigError

ALLOWED = "none, delay:S-T,MS, delay:MS, jitter:MS, narrow:MBIT_PER_S, stall:EVERY_S,S, noise:TAKEN"


def tables(texts: Sequence[str], live: bool) -> dict[str, Any]:
    """An entry of `impairments` for each text. Raises `ConfigError` naming it and what may be."""
    return {text.replace(":", "="): _table(text, live) for text in texts}


def _table(text: str, live: bool) -> dict[str, Any]:
    name, _, argument = text.partition(":")
    parts = argument.split(",")
    try:
        match name, parts:
            case "none", [""]:
                return {}
            case "delay", [ms]:
                return {"links": {"latency_ms": float(ms)}}
            case "delay", [link, ms]:
                return {"links": {"links": {link: {"latency_ms": float(ms)}}}}
            case "jitter", [ms]:
                return {"links": {"jitter_ms": float(ms)}}
            case "narrow", [mbit]:
                return {"links": {"mbit_per_s": float(mbit)}}
            case "stall", [every_s, seconds]:
                return {"links": {"stall_every_s": float(every_s), "stall_s": float(seconds)}}
            case "noise", [taken] if not live:
                part = float(taken)
                return {"network": {"noise": {"taken": part, "deviation": part / 2}}}
    except ValueError:
        pass
    where = "; noise is for --virtual" if name == "noise" and live else ""
    raise ConfigError(f"--impairments {text!r}; allowed: {ALLOWED}{where}")
