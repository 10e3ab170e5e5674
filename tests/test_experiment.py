"""Experiments: what a file may say, which runs follow, and what comes of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from asyncmoe.cli.main import main
from asyncmoe.errors import AsyncMoeError, ConfigError, UnknownName
from asyncmoe.experiment.figures import read_figures
from asyncmoe.experiment.grid import layout, settings, virtual_config
from asyncmoe.experiment.impairments import tables
from asyncmoe.experiment.precheck import check
from asyncmoe.experiment.schema import Experiment, checked, load
from asyncmoe.experiment.steady import steady_tokens_per_s
from asyncmoe.experiment.virtual_run import cost_model, run_virtual
from asyncmoe.experiment.worker import decode, encode
from asyncmoe.metrics.recorder import REASONS, Record
from asyncmoe.virtual.shapes import find_hardware

EXAMPLES = Path(__file__).parent.parent / "examples"
FILES = sorted(EXAMPLES.glob("*.toml"))
TOY: dict[str, Any] = {
    "name": "toy",
    "model": {
        "layers": 3,
        "hidden": 256,
        "experts": 8,
        "top_k": 2,
        "expert_intermediate": 256,
        "query_heads": 4,
        "kv_heads": 2,
        "head_dim": 64,
        "vocab": 1000,
    },
    "cluster": {"hosts": 2, "hardware": "l40s", "ranks_per_host": 1},
    "workload": {"lengths": "fixed:16,8", "arrivals": "closed:8", "decode_only": True},
    "systems": {"async": {"scheduler": "defrag"}, "ep": {"scheduler": "lockstep"}},
    "host": {"attention_us": 200, "expert_us": 100},
    "window": {"ramp_s": 0.01, "measure_s": 0.03},
}


def toy(**changes: Any) -> Experiment:
    return checked({**TOY, **changes}, "test")


def test_every_example_file_asks_for_runs_that_can_be() -> None:
    assert {path.stem for path in FILES} >= {
        "streamep_l40s", "streamep_a100", "interference", "ablation", "glm_air", "scale",
    }  # fmt: skip
    for path in FILES:
        experiment = load(path)
        runs = settings(experiment, quick=True)
        check(runs)
        for run in runs:
            assert decode(encode(run)) == run
        for figure in read_figures(experiment):
            assert figure.references()


def test_a_wrong_key_is_told_with_the_nearest() -> None:
    with pytest.raises(UnknownName, match=r"clusters.cluster.host.*Did you mean .*hosts"):
        toy(cluster={"host": 2})
    with pytest.raises(ConfigError, match=r"window.measure_s is -1"):
        toy(window={"measure_s": -1})
    with pytest.raises(UnknownName, match="gpt-oss-120b"):
        toy(model={"shape": "gpt-oss"}).models["model"].made()
    with pytest.raises(ConfigError, match="model has no layers"):
        toy(model={"hidden": 8}).models["model"].made()
    with pytest.raises(ConfigError, match="'workload' is a workload and a system"):
        toy(systems={"workload": {}})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"shape": "gpt-oss-120b", "experts": 2}}, "model.top_k is 4 of 2 experts"),
        (
            {"workload": {**TOY["workload"], "per_rank": 4}},
            "per_rank is 4 and arrivals 'closed:8'; give one",
        ),
        ({"published": {"workload": {"async_toks": 1.0}}}, "Did you mean 'async_tok_s'"),
        ({"workload": {"arrivals": "all"}}, "which needs workload.requests to say how many"),
        ({"config": {"cluster": {"ranks": 2}}}, "config.cluster.ranks is 2: it is set by"),
        ({"config": {"device": {"name": "cpu"}}}, "config.device.name is 'cpu': it is set by"),
        ({"config": {"placement": {"attention_ranks": 9}}}, "async: placement.attention_ranks"),
        ({"impairments": {"x": {"network": {"noise": {"takn": 0.1}}}}}, "noise.taken"),
        ({"impairments": {"x": {"links": {"links": {"1-1": {}}}}}}, "from a rank to itself"),
    ],
)
def test_what_cannot_be_is_told_before_anything_runs(changes: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(settings(toy(**changes), False))


def test_numbers_in_a_file_are_no_texts(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    text = (EXAMPLES / "layouts.toml").read_text()
    file.write_text(text.replace("replicas = 2", 'replicas = "2"'))
    with pytest.raises(ConfigError, match=r"systems.*replicas is '2': Input should be a valid int"):
        load(file)


def test_a_run_is_made_for_every_combination() -> None:
    runs = settings(toy(impairments={"calm": {}, "late": {"links": {"latency_ms": 1}}}), False)
    assert [run.label for run in runs] == ["async calm", "async late", "ep calm", "ep late"]
    assert virtual_config(runs[1]).transport.name == "impaired:model"
    assert [decode(encode(run)).names for run in runs] == [run.names for run in runs]


def test_figures_are_numbers_of_runs_and_ratios() -> None:
    experiment = toy(
        impairments={"calm": {}, "late": {}},
        figures={"gain": "async@late:all.itl_ms.p99 / ep", "lost": "1 - ep@late / ep"},
    )
    gain, lost = read_figures(experiment)
    assert gain.above.names["impairment"] == "late"
    assert gain.above.of({"all": {"itl_ms": {"p99": 4.0}}}) == 4.0
    assert gain.of([6.0, 4.0]) == 1.5
    assert lost.of([6.0, 8.0]) == 0.25
    assert lost.of([None, 8.0]) is None
    with pytest.raises(UnknownName, match="Did you mean 'async'"):
        read_figures(toy(figures={"a": "asinc"}))
    with pytest.raises(ConfigError, match="allowed"):
        read_figures(toy(figures={"a": "1 - async"}))
    with pytest.raises(UnknownName, match="tokens_per_s"):
        read_figures(toy(figures={"a": "async:token_per_s"}))[0].above.of({"tokens_per_s": 1})


def test_layouts_divide_the_devices_and_their_memory() -> None:
    hosts = {"hosts": 4, "hardware": "a100-40gb"}
    systems = {
        "ep": {},
        "dp": {"replicas": 2},
        "pp": {"tensor": 4, "pipeline": 4},
    }
    model = {"shape": "gpt-oss-120b"}
    runs = settings(toy(model=model, cluster=hosts, systems=systems), False)
    assert [(layout(r).groups, layout(r).ranks) for r in runs] == [(1, 16), (2, 8), (4, 1)]
    ep, dp, pp = (virtual_config(run).kv.blocks for run in runs)
    assert ep is not None
    assert dp is not None
    assert pp is not None
    assert dp < ep / 2  # twice the experts on a device
    # All devices together hold somewhat more: no device has all layers' attention.
    assert 16 * ep < 4 * pp < 1.3 * 16 * ep
    with pytest.raises(ConfigError, match="what divides the 4 devices"):
        layout(settings(toy(cluster=hosts, systems={"x": {"tensor": 3}}), False)[0])


def test_devices_that_share_a_layer_are_faster_and_pay_for_the_sum() -> None:
    hosts = {"hosts": 2, "hardware": "l40s"}
    systems = {"one": {}, "two": {"tensor": 2, "pipeline": 2}}
    one, two = (cost_model(s) for s in settings(toy(cluster=hosts, systems=systems), False))
    assert two.expert.expert_s == pytest.approx(one.expert.expert_s / 2)
    hop_s = 512 / find_hardware("l40s").local_bytes_per_s  # 2 (t - 1) / t of a row of 512 bytes
    assert two.attention.wire_row_s == pytest.approx(hop_s)
    assert two.expert.wire_row_s > two.attention.wire_row_s  # the way to the next stage


def test_tokens_count_with_the_part_of_their_making_that_is_in_the_window() -> None:
    aborted = REASONS.index("aborted")
    record = Record(
        end_s=2.0,
        arrival_s=np.array([0.0, 0.0]),
        ended_s=np.array([2.0, 2.0]),
        reason=np.array([aborted, aborted], np.int8),
        prompt_tokens=np.ones(2, np.int64),
        output_tokens=np.ones(2, np.int64),
        underway=np.ones(2, np.bool_),
        token_request=np.array([0, 0, 1, 1, 1]),
        token_s=np.array([0.8, 1.6, 0.5, 1.0, 1.5]),
    )
    # 0: half of the token at 1.6 was made behind 1.2, and half of the next until 2.0
    assert steady_tokens_per_s(record, 1.2) == pytest.approx((0.5 + 0.5 + 0.6 + 1.0) / 0.8)


def test_two_runs_with_one_seed_are_equal_and_a_group_of_replicas_runs() -> None:
    setting = settings(toy(), False)[0]
    first, again = (run_virtual(setting, lambda _: None)["metrics"] for _ in range(2))
    assert orjson.dumps(first) == orjson.dumps(again)
    assert first["steady_tokens_per_s"] > 0
    assert first["protocol"]["parcels_per_step"] > 0
    replicas = toy(systems={"dp": {"replicas": 2}})
    found = run_virtual(settings(replicas, False)[0], lambda _: None)["metrics"]
    assert found["protocol"]["parcels_per_step"] == 0  # each rank has all experts
    assert found["tokens"] > 0


def test_impairments_have_names() -> None:
    assert tables(["none", "delay:0-1,50"], live=True, world=2) == {
        "none": {},
        "delay=0-1,50": {"links": {"links": {"0-1": {"latency_ms": 50.0}}}},
    }
    with pytest.raises(ConfigError, match="allowed: none"):
        tables(["late:3"], live=False, world=2)
    with pytest.raises(ConfigError, match="--virtual"):
        tables(["noise:0.1"], live=True, world=2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("delay:nan", "MS is 'nan'; allowed: 0 to"),
        ("delay:-5", "MS is '-5'"),
        ("delay:0-9,5", "link '0-9' names rank 9; there are 2 ranks"),
        ("delay:0-0,5", "link '0-0' is from a rank to itself"),
        ("delay:a-b,5", "link 'a-b' is not a link"),
        ("jitter:inf", "MS is 'inf'"),
        ("narrow:nan", "MBIT_PER_S is 'nan'"),
        ("narrow:1e-300", "MBIT_PER_S is '1e-300'; allowed: 0.001 to"),
        ("stall:1,nan", "S is 'nan'; allowed: 0 to 1"),
        ("stall:0,0", "EVERY_S is '0'"),
        ("noise:1", "TAKEN is '1'; allowed: 0 to 0.99"),
    ],
)
def test_an_impairment_that_cannot_be_is_refused_by_its_own_name(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        tables([text], live=False, world=2)
    assert str(refused.value).startswith(f"--impairments {text!r}: ")
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--live", "--shape", "gpt-oss-120b"], "--shape is for --virtual"),
        (["--model", "tiny"], "--model is for --live"),
        (["--scheduler", "mtfs"], "--scheduler is for one rule"),
        (["--schedulers", ","], "--schedulers ',' names no rule"),
        (["--duration", "0.2", "--ramp", "0.5"], "--ramp is 0.5 and --duration 0.2"),
        (["--routing", "foo"], "model.routing is 'foo'; allowed: model, uniform"),
        (["--live", "--routing", "foo"], "model.routing is 'foo'; allowed: model, uniform"),
        (["--routing", "replay:/x"], "there is no file /x with a routing recording"),
        (["--live", "--transports", "nosuch"], "unknown transport 'nosuch'"),
        (
            ["--live", "--transports", "impaired:tcp", "--transport.options.latenc_ms", "3"],
            "Did you mean 'latency_ms'",
        ),
        (["--schedulers", "defrag", "--scheduler.parameters.decay", "7"], "decay is 7"),
        (["--live", "--schedulers", "mtfs", "--scheduler.parameters.x", "1"], "'mtfs' 'x'"),
        (["--results", "/nowhere/x.json"], "--results /nowhere/x.json cannot be written"),
        (["--report", "/nowhere/x.html"], "--report /nowhere/x.html cannot be written"),
    ],
)
def test_what_compare_cannot_do_is_refused_before_it_runs(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", "--ranks", "2", *flags]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--seed", "-1"], ["--jobs", "x"]])
def test_a_number_that_cannot_be_is_told_with_what_may(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["compare", *flags])
    assert f"{flags[1]!r} is not a number from" in capsys.readouterr().err


def test_a_wrong_key_of_a_link_is_told_before_anything_runs() -> None:
    def checking(**links: Any) -> None:
        check(settings(toy(impairments={"late": {"links": links}}), False))

    with pytest.raises(UnknownName, match="Did you mean 'latency_ms'"):
        checking(links={"0-1": {"latenc_ms": 5}})
    with pytest.raises(ConfigError, match="names rank 7; there are 2 ranks"):
        checking(links={"0-7": {"latency_ms": 5}})


def asyncmoe(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "asyncmoe", *arguments],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip


def test_the_example_rule_is_compared_with_a_built_in_one(tmp_path: Path) -> None:
    report = tmp_path / "rules.html"
    done = asyncmoe(
        "compare", "--virtual", "--ranks", "2", "--shape", "mixtral-8x7b", "--hardware", "l40s",
        "--schedulers", f"mtfs,{EXAMPLES / 'my_rule.py'}:FullestTail", "--json",
        "--duration", "0.2", "--ramp", "0.01", "--kv.blocks", "5000", "--report", str(report),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    runs = orjson.loads(done.stdout)["runs"]
    assert [run["system"] for run in runs] == ["mtfs", "FullestTail"]
    assert "FullestTail" in report.read_text("utf-8")


def test_simulate_prints_one_line_with_the_published_figures_beside_ours(tmp_path: Path) -> None:
    file = tmp_path / "toy.toml"
    text = (
        'name = "toy"\n[model]\n'
        + "".join(f"{key} = {value}\n" for key, value in TOY["model"].items())
        + '[cluster]\nhosts = 2\nhardware = "l40s"\nranks_per_host = 1\n'
        + '[workload]\nlengths = "fixed:16,8"\narrivals = "closed:8"\ndecode_only = true\n'
        + '[systems.async]\nscheduler = "defrag"\n[window]\nramp_s = 0.01\nmeasure_s = 0.02\n'
        + '[figures]\ntok_s = "async"\n[published.workload]\ntok_s = 7\n'
    )
    file.write_text(text)
    done = asyncmoe("simulate", str(file), "--json")
    assert done.returncode == 0, done.stderr
    found = orjson.loads(done.stdout)["workloads"]["workload"]
    assert found["published"] == {"tok_s": 7}
    assert found["ours"]["tok_s"] > 0


RULES = """
from asyncmoe.scheduler import Scheduler

class Never(Scheduler):
    def choose(self, view):
        return None

class Fails(Scheduler):
    def choose(self, view):
        raise ValueError("what went wrong")

class NotMade(Never):
    def __init__(self, context, parameters):
        raise RuntimeError("what went wrong")
"""


def test_runs_that_fail_are_told_and_the_others_count(tmp_path: Path) -> None:
    rules, report = tmp_path / "rules.py", tmp_path / "rules.html"
    rules.write_text(RULES)
    done = asyncmoe(
        "compare", "--virtual", "--ranks", "2", "--shape", "mixtral-8x7b", "--json",
        "--schedulers", f"{rules}:Never,mtfs,{rules}:Fails",
        "--duration", "0.2", "--ramp", "0.01", "--kv.blocks", "5000", "--report", str(report),
    )  # fmt: skip
    assert done.returncode == 1
    never, mtfs, fails = orjson.loads(done.stdout)["runs"]
    assert mtfs["steady_tokens_per_s"] > 0
    assert never["error"].startswith("no stage ran between 0.01 and 0.2 s")
    assert fails["error"].endswith("what went wrong")
    for name in ("Never", "Fails"):
        assert f"the run of {name} failed: " in done.stderr
        assert f"<b>{name}</b>: " in report.read_text("utf-8")


def test_a_rule_that_cannot_be_made_is_an_error_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "rules.py").write_text(RULES)
    systems = {"one": {"scheduler": f"{tmp_path}/rules.py:NotMade"}}
    with pytest.raises(ConfigError, match="NotMade' cannot be made: RuntimeError: what went wrong"):
        check(settings(toy(systems=systems), False))


def test_a_figure_of_an_unknown_metric_ends_with_the_first_run(tmp_path: Path) -> None:
    experiment = toy(figures={"a": "ep:all.itl_ms.p98"})
    names = {"model": "model", "cluster": "cluster", "system": "async"}
    figure = read_figures(experiment)[0]
    with pytest.raises(UnknownName, match=r"Did you mean 'all.itl_ms.p9[09]'"):
        figure.check(names, {"all": {"itl_ms": {"p90": 1.0, "p99": 2.0}}})
    figure.check({**names, "cluster": "another"}, {})


def test_a_run_that_ends_within_its_ramp_is_an_error() -> None:
    workload = {**TOY["workload"], "arrivals": "all", "requests": 4}
    setting = settings(toy(workload=workload, window={"ramp_s": 5.0, "measure_s": 1.0}), False)[0]
    with pytest.raises(AsyncMoeError, match=r"within the ramp of 5 s.*allowed: a shorter one"):
        run_virtual(setting, lambda _: None)


def test_a_run_whose_requests_do_not_fit_ends_with_an_error() -> None:
    setting = settings(toy(config={"kv": {"blocks": 1}}), False)[0]
    with pytest.raises(AsyncMoeError, match="'refused'"):
        run_virtual(setting, lambda _: None)
