"""`asyncmoe transports`: what works here, and figures from real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from asyncmoe import registry
from asyncmoe.cli.main import main
from asyncmoe.netbench.plan import Plan
from asyncmoe.netbench.run import _result

QUICK = ["--seconds", "0.05", "--rounds", "1", "--idle", "0.05"]
EXPECTED = {"transport", "size", "depth", "gb_per_s", "raw_gb_per_s", "p50_us", "p99_us"}
EXPECTED |= {"cpu_s_per_gb", "idle_cpu"}


def plan(**changes: Any) -> Plan:
    values = {"transport": "tcp", "ranks": 3, "pattern": "pairs", "sizes": (10, 20)}
    values |= {"depths": (1, 4), "seconds": 1.0, "rounds": 2, "idle_s": 1.0}
    return Plan(**{**values, **changes})


def test_list_names_every_transport_with_what_to_install(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["transports", "list", "--json"])
    found = {each["name"]: each for each in json.loads(capsys.readouterr().out)["transports"]}
    assert list(found) == registry.names("transports")
    for name in ("auto", "gloo", "impaired", "inproc", "shm", "tcp"):
        assert found[name]["status"] == "works", found[name]
    assert found["auto"]["detail"].endswith("over shm")
    for each in found.values():
        assert each["status"] != "missing" or "pip install" in each["detail"], each


def test_list_takes_no_flags_of_bench(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["transports", "list", "--rounds", "3"]) == 2
    assert capsys.readouterr().err.endswith("unknown argument '--rounds'. Known: --help, --json\n")


def test_bench_measures_between_processes_and_beside_the_raw_stack(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["--transports", "tcp", "--sizes", "184320", "--depth", "1,16", "--json", *QUICK]
    assert main(["transports", "bench", *flags]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["skipped"] == []
    assert [(r["transport"], r["size"], r["depth"]) for r in report["results"]] == [
        ("tcp", 184320, 1),
        ("tcp", 184320, 16),
    ]
    for result in report["results"]:
        assert set(result) >= EXPECTED
        assert 0 < result["p50_us"] <= result["p99_us"]
        assert result["gb_per_s"] > 0
        assert result["raw_gb_per_s"] > 0
        assert result["cpu_s_per_gb"] > 0
        assert 0 <= result["idle_cpu"] < 1


def test_bench_tells_of_a_transport_that_does_not_start_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "from asyncmoe.errors import ConfigError\n"
        "from asyncmoe.transports.tcp import TcpTransport\n"
        "class Mine(TcpTransport):\n"
        "    def __init__(self, context):\n"
        "        raise ConfigError('there is no wire')\n"
    )
    assert main(["transports", "bench", "--transports", f"{path}:Mine", "--json", *QUICK]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["results"] == []
    assert report["skipped"] == [{"transport": f"{path}:Mine", "reason": "there is no wire"}]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--transports", "tpc"], "Did you mean 'tcp'"),
        (["--sizes", "12,x"], "'x' is not a number from 1"),
        (["--depth", "0"], "'0' is not a number from 1"),
        (["--seconds", "-1"], "is not a number from 0.001 to 3600"),
        (["--dept", "1"], "Did you mean '--depth'"),
    ],
)
def test_a_flag_that_cannot_be_is_refused(
    flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(["transports", "bench", *flags])
    except SystemExit as end:
        status = int(end.code or 0)
    assert status == 2
    assert says in capsys.readouterr().err


def test_plots_without_matplotlib_name_the_extra_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
    assert main(["transports", "bench", "--plot", str(tmp_path)]) == 1
    assert "pip install 'asyncmoe[plot]'" in capsys.readouterr().err


def test_plots_are_png_files_of_each_subject(tmp_path: Path) -> None:
    line = {"transport": "tcp", "depth": 1, "flows": ["0-1"], "gb_per_s": 1.0, "p50_us": 5.0}
    line |= {"raw_gb_per_s": 2.0, "cpu_s_per_gb": 1.0}
    lines = [{**line, "size": size} for size in (10, 20)]
    # in a process of its own, since matplotlib keeps its fonts open
    program = (
        "import pathlib; from asyncmoe.netbench import plots;"
        f"plots.draw({lines!r}, pathlib.Path({str(tmp_path)!r}))"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    made = list(tmp_path.iterdir())
    assert len(made) == 3
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in made)


def test_pairs_are_measured_in_turn_and_fan_in_at_once() -> None:
    pairs = plan().cases()
    assert [case.flows for case in pairs[::4]] == [((0, 1),), ((0, 2),), ((1, 2),)]
    assert [(c.size, c.depth) for c in pairs[:4]] == [(10, 1), (10, 4), (20, 1), (20, 4)]
    assert {case.flows for case in plan(pattern="fan-in").cases()} == {((1, 0), (2, 0))}
    assert Plan.decode(plan().encode()) == plan()


def test_a_result_is_the_best_round_over_all_its_flows() -> None:
    fan_in = plan(pattern="fan-in", sizes=(10**6,), depths=(1,))
    flow = {"count": 1000, "p50_us": 1.0, "p99_us": 2.0, "cpu_s": 0.5}
    slow, fast = {**flow, "seconds": 4.0}, {**flow, "seconds": 2.0}
    reports = [
        {"ours": [[{"cpu_s": 1.0}] * 2], "raw_gb_per_s": [None], "idle_cpu": 0.5},
        {"ours": [[slow, fast]], "raw_gb_per_s": [None], "idle_cpu": 0.1},
        {"ours": [[slow, {**fast, "p99_us": 7.0}]], "raw_gb_per_s": [None], "idle_cpu": 0.1},
    ]
    result = _result(fan_in, fan_in.cases()[0], reports)
    assert (result["gb_per_s"], result["raw_gb_per_s"], result["ratio"]) == (1.0, None, None)
    assert (result["p99_us"], result["cpu_s_per_gb"], result["idle_cpu"]) == (7.0, 1.0, 0.5)
    assert result["flows"] == ["1-0", "2-0"]
