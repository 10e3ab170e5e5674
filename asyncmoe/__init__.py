"""asyncmoe: a serving engine for mixture-of-experts models without a layer barrier.

The names below are imported on first use, so that `import asyncmoe` itself costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncmoe.frontend.engine import AsyncEngine
    from asyncmoe.frontend.llm import LLM
    from asyncmoe.frontend.output import RequestOutput
    from asyncmoe.sampling import SamplingParams

__all__ = ["LLM", "AsyncEngine", "RequestOutput", "SamplingParams"]

_HOME = {
    "LLM": "asyncmoe.frontend.llm",
    "AsyncEngine": "asyncmoe.frontend.engine",
    "RequestOutput": "asyncmoe.frontend.output",
    "SamplingParams": "asyncmoe.sampling",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version("asyncmoe")
    if name not in _HOME:
        raise AttributeError(f"module 'asyncmoe' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
