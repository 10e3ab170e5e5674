"""The compiled parts: `kernels` (what models compute) and `columns` (index columns of the engine).

Each is None where it was not built, or where ASYNCMOE_COMPILED=0 asks for the plain twins in torch
and numpy, which give the same results. Users look them up here at each call or at load, so that
tests can switch them off.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType
from typing import Any

SWITCH = "ASYNCMOE_COMPILED"
absent: dict[str, str] = {}  # name -> why it is None


def _find(name: str) -> ModuleType | None:
    if os.environ.get(SWITCH) == "0":
        absent[name] = f"{SWITCH}=0"
        return None
    try:
        return importlib.import_module(f"asyncmoe.native._{name}")
    except ImportError as error:
        absent[name] = f"not built: {error}"
        return None


kernels: Any = _find("kernels")
columns: Any = _find("columns")
