"""Implementations are found by name: built in, of a third party's package, or in a plain file."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from asyncmoe import registry
from asyncmoe.config import SchedulerConfig
from asyncmoe.errors import ConfigError, MissingDependency, UnknownName
from asyncmoe.scheduler import QueueView, SchedulerContext
from asyncmoe.schedulers.mtfs import Mtfs
from asyncmoe.stage import StageChain

CONTEXT = SchedulerContext(StageChain(2), 1.0)
SCHEDULER = """
from asyncmoe.scheduler import Scheduler, SchedulerParameters

class Parameters(SchedulerParameters):
    step: int = 1

class Last(Scheduler):
    Parameters = Parameters

    def choose(self, view):
        stages = view.runnable.nonzero()[0]
        return int(stages[-1]) if len(stages) else None

class Other:
    pass
"""


def forget() -> None:
    """Let the registry read the metadata anew, as a new process would."""
    registry._all_entries.cache_clear()
    registry._from_entry_point.cache_clear()


@pytest.fixture
def third_party(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on sys.path with an installed package `acme` that registers four schedulers."""
    (tmp_path / "acme").mkdir()
    (tmp_path / "acme/__init__.py").write_text(SCHEDULER)
    (tmp_path / "acme/needy.py").write_text("import library_that_nobody_has.part\n")
    info = tmp_path / "acme-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: acme\nVersion: 1.0\nProvides-Extra: fast\n"
    )
    (info / "entry_points.txt").write_text(
        "[asyncmoe.schedulers]\nlast = acme:Last\nfast = acme.needy:Fast\nslow = acme.needy:Slow\n"
        "gone = acme.gone:Gone\nother = acme:Other\nmtfs = acme:Last\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    forget()
    yield tmp_path
    sys.modules.pop("acme", None)
    forget()


@pytest.fixture
def scheduler_file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(SCHEDULER)
    return path


def test_built_in_names_are_those_of_the_metadata() -> None:
    assert registry.names("schedulers") == [
        "defrag",
        "defrag_aging",
        "defrag_cyclic",
        "flfs",
        "lockstep",
        "mtfs",
        "two_batch",
    ]
    assert registry.find("schedulers", "mtfs") is Mtfs


def test_an_unknown_name_lists_the_known_ones_and_the_nearest() -> None:
    with pytest.raises(UnknownName, match=r"unknown scheduler 'defrga'. Did you mean 'defrag'\?"):
        registry.find("schedulers", "defrga")
    with pytest.raises(UnknownName, match=r"unknown transport 'tpc'. Did you mean 'tcp'\?"):
        registry.find("transports", "tpc")


def test_an_unknown_group_is_an_error_and_not_an_empty_list() -> None:
    with pytest.raises(UnknownName, match=r"Did you mean 'schedulers'\?"):
        registry.names("scheduler")


def test_a_third_party_registers_as_the_built_ins_do(third_party: Path) -> None:
    assert "last" in registry.names("schedulers")
    assert registry.find("schedulers", "last").__module__ == "acme"


def test_a_missing_library_names_the_extra_of_the_package_that_needs_it(third_party: Path) -> None:
    with pytest.raises(MissingDependency, match=r"'fast' needs library_that.*'acme\[fast\]'"):
        registry.find("schedulers", "fast")


def test_a_missing_library_without_an_extra_names_the_library(third_party: Path) -> None:
    with pytest.raises(MissingDependency, match=r"pip install library_that_nobody_has$"):
        registry.find("schedulers", "slow")


def test_a_registration_of_what_is_not_there_is_no_missing_library(third_party: Path) -> None:
    with pytest.raises(ConfigError, match=r"'gone' \(acme.gone:Gone\) cannot be imported"):
        registry.find("schedulers", "gone")


def test_a_class_that_does_not_keep_the_contract_is_refused(third_party: Path) -> None:
    with pytest.raises(ConfigError, match=r"not a subclass of asyncmoe.scheduler.Scheduler"):
        registry.find("schedulers", "other")


def test_a_name_that_two_packages_claim_is_refused(third_party: Path) -> None:
    with pytest.raises(ConfigError, match=r"'mtfs' is registered more than once: acme:Last, async"):
        registry.find("schedulers", "mtfs")


def test_metadata_is_read_once_and_nothing_is_imported_for_names() -> None:
    script = (
        "import sys\n"
        "from asyncmoe import registry\n"
        "calls, real = [], registry.distributions\n"
        "registry.distributions = lambda: calls.append(1) or real()\n"
        "[registry.names(g) for g in ('schedulers', 'transports', 'models') for _ in range(3)]\n"
        "assert 'torch' not in sys.modules\n"
        "registry.find('schedulers', 'mtfs'), registry.find('schedulers', 'flfs')\n"
        "assert 'torch' not in sys.modules and len(calls) == 1, calls\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_a_class_in_a_plain_file_is_found_and_loaded_once(scheduler_file: Path) -> None:
    found = registry.find("schedulers", f"{scheduler_file}:Last")
    folder = scheduler_file.parent
    again = registry.find("schedulers", f"{folder}/../{folder.name}/mine.py:Last")
    assert found is again
    assert found.__name__ == "Last"


def test_a_plain_file_of_the_working_directory_needs_no_folder(
    scheduler_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(scheduler_file.parent)
    config = SchedulerConfig(name="mine.py:Last", parameters={"step": "3"})
    scheduler = registry.make_scheduler(config, CONTEXT)
    assert scheduler.parameters.model_dump() == {"step": 3}


def test_a_wrong_class_of_a_file_names_those_that_it_has(scheduler_file: Path) -> None:
    with pytest.raises(UnknownName, match=r"'Lats'. Did you mean 'Last'\? Known: Last$"):
        registry.find("schedulers", f"{scheduler_file}:Lats")
    with pytest.raises(ConfigError, match=r"'Other', is not a subclass of .*Scheduler"):
        registry.find("schedulers", f"{scheduler_file}:Other")
    scheduler_file.write_text(
        "from asyncmoe.scheduler import Scheduler\nclass Half(Scheduler):\n    pass\n"
    )
    half = scheduler_file.rename(scheduler_file.with_name("half.py"))
    with pytest.raises(ConfigError, match="'Half', lacks what Scheduler wants of it: choose"):
        registry.find("schedulers", f"{half}:Half")


def test_a_file_that_is_missing_or_broken_says_so(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("1 / 0\n")
    with pytest.raises(ConfigError, match=r"there is no file .*none\.py"):
        registry.find("schedulers", f"{tmp_path}/none.py:Last")
    with pytest.raises(ConfigError, match=r"broken\.py cannot be loaded: ZeroDivisionError"):
        registry.find("schedulers", f"{broken}:Last")
    assert not [name for name in sys.modules if name.startswith("asyncmoe_file_broken")]


def test_the_rule_that_the_documentation_shows_runs_from_its_file(tmp_path: Path) -> None:
    text = (Path(__file__).parents[1] / "docs/schedulers.md").read_text()
    (tmp_path / "oldest.py").write_text(text.split("```python\n")[1].split("```")[0])
    config = SchedulerConfig(name=f"{tmp_path}/oldest.py:OldestFirst", parameters={"enough": 4})
    rule = registry.make_scheduler(config, CONTEXT)
    rows, oldest_s = np.array([1, 9, 9, 0, 0]), np.array([0.0, 2.0, 1.0, 0.0, 0.0])
    view = QueueView(rows, rows > 0, np.zeros(5, np.int64), oldest_s, 0, 3.0)
    assert rule.choose(view) == 2


def test_an_unknown_parameter_names_the_nearest() -> None:
    config = SchedulerConfig(name="defrag", parameters={"decya": 0.5})
    with pytest.raises(UnknownName, match=r"'decya'. Did you mean 'decay'\?"):
        registry.make_scheduler(config, CONTEXT)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("decay", 2, r"decay is 2: .*; allowed is >= 0 and <= 1"),
        ("decay", float("nan"), r"decay is nan: .*; allowed is >= 0 and <= 1"),
        ("look_ahead", 1.5, r"look_ahead is 1.5: .* integer"),
        ("patience", 0, r"patience is 0: .*; allowed is >= 1"),
    ],
)
def test_a_bad_parameter_names_key_value_and_what_is_allowed(
    key: str, value: float, said: str
) -> None:
    config = SchedulerConfig(name="defrag_aging", parameters={key: value})
    with pytest.raises(ConfigError, match=rf"scheduler.parameters of 'defrag_aging': {said}"):
        registry.make_scheduler(config, CONTEXT)


def test_every_built_in_parameter_has_a_meaning_and_a_default() -> None:
    for name in registry.names("schedulers"):
        for field in registry.find("schedulers", name).Parameters.model_fields.values():
            assert field.description
            assert not field.is_required()
