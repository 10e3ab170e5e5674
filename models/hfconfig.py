"""Typed reading of a config.json: every error names the key, its value and what is allowed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from asyncmoe.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class ConfigReader:
    """One config.json. A key that is null counts as absent, as it does in `transformers`."""

    def __init__(self, config: Mapping[str, Any], where: str = "config.json") -> None:
        self.config, self.where = config, where

    def fail(self, key: str, allowed: str) -> ConfigError:
        """The error for the value of `key`."""
        value = self.config.get(key)
        said = "is missing" if value is None else f"is {value!r}"
        return ConfigError(f"{self.where}: {key} {said}; allowed: {allowed}")

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self.config.get(key) is not None

    def integer(self, *keys: str, default: int | None = None, minimum: int = 1) -> int:
        """The first of `keys` that is there: the names that one value has had over the years."""
        key = next((key for key in keys if self.has(key)), keys[0])
        value = self.config.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.fail(key, f"an integer of at least {minimum}")
        return value

    def number(self, key: str, default: float | None = None, *, above: float = 0.0) -> float:
        """A finite number above `above`."""
        value = self.config.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fail(key, f"a number above {above}")
        if not above < value < float("inf"):
            raise self.fail(key, f"a finite number above {above}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """true or false."""
        value = self.config.get(key, default)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fail(key, "true or false")
        return value

    def choice(self, key: str, allowed: Collection[str], default: str) -> str:
        """One of some words."""
        value = self.config.get(key)
        if value is None:
            return default
        if value not in allowed:
            raise self.fail(key, ", ".join(sorted(allowed)))
        return str(value)

    def only(self, key: str, *allowed: object) -> None:
        """Refuse a switch that this architecture does not have, unless it is off or absent."""
        if self.has(key) and self.config[key] not in allowed:
            raise self.fail(key, " or ".join(["absent", *map(repr, allowed)]))

    def layer_list(self, key: str, layers: int) -> tuple[int, ...]:
        """A list of decoder layers; default none."""
        value = self.config.get(key) or []
        good = isinstance(value, list) and all(
            isinstance(i, int) and not isinstance(i, bool) and 0 <= i < layers for i in value
        )
        if not good:
            raise self.fail(key, f"a list of layers from 0 to {layers - 1}")
        return tuple(value)

    def layer_types(self, layers: int, kind: str) -> None:
        """Refuse `layer_types` that do not say `kind` for every layer."""
        value = self.config.get("layer_types")
        if value is not None and (not isinstance(value, list) or len(value) != layers):
            raise self.fail("layer_types", f"a list of {layers}")
        if any(given != kind for given in value or ()):
            raise self.fail("layer_types", f"{kind} for every layer")

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One token id or a list of them; default none."""
        value = self.config.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise self.fail(key, "a token id or a list of token ids")
        return tuple(ids)

    def dtype(self, chosen: torch.dtype | None) -> torch.dtype:
        """The model's dtype: `chosen`, else the config's own, else float32."""
        if chosen is not None:
            return chosen
        key = "dtype" if self.has("dtype") else "torch_dtype"
        return DTYPES[self.choice(key, DTYPES, "float32")]

    def section(self, key: str) -> ConfigReader:
        """A nested object; empty if the key is absent."""
        value = self.config.get(key) or {}
        if not isinstance(value, Mapping):
            raise self.fail(key, "an object")
        return ConfigReader(value, f"{self.where}: {key}")
