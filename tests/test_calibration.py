"""The fit of costs to a live run's counters, and a fitted cost model as an experiment takes it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from asyncmoe.experiment.grid import settings
from asyncmoe.experiment.schema import checked
from asyncmoe.experiment.virtual_run import cost_model
from asyncmoe.virtual import costs
from tests.test_experiment import TOY

FILE = Path(__file__).parent.parent / "benchmarks" / "calibration.py"


@pytest.fixture(scope="module")
def calibration() -> ModuleType:
    spec = importlib.util.spec_from_file_location("calibration", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sample(rng: np.random.Generator) -> dict[str, Any]:
    """The counters of one rank over an interval, of known costs."""
    found: dict[str, Any] = {"loop_system_s": 0.0, "sent_parcels": int(rng.integers(5, 50))}
    found["received_parcels"] = found["sent_parcels"]
    found["loop_user_s"] = 0.0
    for kind in ("attention", "expert", "head"):
        batches = int(rng.integers(1, 20))
        rows = batches * int(rng.integers(1, 30))
        found |= {
            f"{kind}_batches": batches,
            f"{kind}_rows": rows,
            f"{kind}_compute_s": 3e-4 * batches + 2e-6 * rows,
            f"{kind}_prepare_s": 1e-4 * batches,
            f"{kind}_finish_s": 5e-5 * batches,
        }
        found["loop_user_s"] += 1.5e-4 * batches
    found["receive_s"] = 2e-5 * found["received_parcels"]
    found["loop_user_s"] += found["receive_s"] + 1e-5 * 2 * found["sent_parcels"]
    return found


def test_known_costs_are_found_again(calibration: ModuleType, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    model = calibration.fit([{0: sample(rng), 1: sample(rng)} for _ in range(30)])
    assert model.expert.fixed_s == pytest.approx(3e-4)
    assert model.head.row_s == pytest.approx(2e-6)
    assert (model.attention.before_s, model.attention.after_s) == pytest.approx((1e-4, 5e-5))
    assert (model.parcel_out_s, model.parcel_in_s) == pytest.approx((1e-5, 3e-5))
    profile = tmp_path / "profile.json"
    profile.write_bytes(costs.dump(calibration.scaled(model, 2.0)))
    experiment = checked({**TOY, "costs": str(profile)}, "test")
    loaded = cost_model(settings(experiment, False)[0])
    assert loaded.expert.fixed_s == pytest.approx(6e-4)
    assert loaded.parcel_in_s == pytest.approx(6e-5)


def test_no_coefficient_is_below_zero(calibration: ModuleType) -> None:
    batches, rows = np.array([1.0, 2.0, 3.0]), np.array([30.0, 20.0, 10.0])
    fixed_s, row_s = calibration.least_squares([batches, rows], np.array([1.0, 2.2, 3.4]))
    assert row_s == 0.0
    assert fixed_s == pytest.approx((1 + 4.4 + 10.2) / 14)
