"""`asyncmoe bench`: its figures, and the account of where a rank's time went."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from asyncmoe.cli import main as command_line
from asyncmoe.cli.synthetic import Finished, random_prompts, spread_ms
from asyncmoe.cli.timetable import time_table
from asyncmoe.frontend.output import Transcript
from asyncmoe.metrics.account import Account, accounts
from asyncmoe.report.results import read_results
from asyncmoe.workload.trace import read_routing
from tests.checkpoints import cached_checkpoint

FLAGS = ["--threads", "1", "--batch", "3", "--prompt", "5", "--new", "6", "--log-level", "warning"]


def bench(*flags: str) -> int:
    return command_line.main(["bench", "--model", str(cached_checkpoint("olmoe")), *FLAGS, *flags])


def report(**changes: Any) -> dict[str, Any]:
    names = ("batches", "rows", "compute_s", "prepare_s", "finish_s")
    zero = {f"{kind}_{name}": 0 for kind in ("attention", "expert", "head") for name in names}
    rest = ("receive_s", "loop_s", "loop_user_s", "loop_system_s", "sent_parcels", "sent_bytes")
    return {**zero, **dict.fromkeys(rest, 0), **changes}


def test_json_holds_rates_and_the_time_of_each_rank(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--where", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["batch"], result["prompt"], result["new"], result["ranks"]) == (3, 5, 6, 1)
    assert result["tokens"] == 18
    assert result["tokens_per_s"] == pytest.approx(18 / result["whole_s"])
    assert 0 < result["itl_ms"]["p50"] <= result["itl_ms"]["p99"]
    assert result["ttft_ms"]["mean"] > 0
    where = result["where"]["ranks"]["0"]
    device_ms = sum(where["compute_ms"].values()) + where["waiting_ms"]
    assert device_ms == pytest.approx(where["whole_ms"])
    # the account is of the measured run alone, not of the one that warmed up
    assert where["rows"]["head"] == 18
    assert 0 <= where["hidden_share"] <= 1


def test_without_where_the_text_has_the_rates_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench() == 0
    shown = capsys.readouterr().out
    assert re.search(r"^[\d.]+ tokens/s, [\d.]+ once all have their first$", shown, re.MULTILINE)
    assert "compute:" not in shown


def test_with_where_the_text_has_a_column_for_every_rank(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert bench("--where", "--ranks", "2", "--transport", "inproc") == 0
    shown = capsys.readouterr().out
    assert re.search(r"^ +rank 0 +rank 1$", shown, re.MULTILINE)
    assert re.search(r"^compute: expert +[\d.]+ ms +\d+% +[\d.]+ ms +\d+%$", shown, re.MULTILINE)


def test_a_workload_has_metrics_results_a_report_and_a_recording(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    files = {name: tmp_path / name for name in ("out.json", "out.html", "routing")}
    flags = ["--lengths", "fixed:6,5", "--arrivals", "closed:3", "--requests", "7"]
    flags += ["--output", str(files["out.json"]), "--report", str(files["out.html"])]
    assert bench(*flags, "--record-routing", str(files["routing"])) == 0
    shown = capsys.readouterr().out
    assert "7 requests came" in shown
    results = read_results(files["out.json"])
    metrics = results.runs[0].metrics
    assert metrics["tokens"] == 35
    assert metrics["requests"]["completed"] == 7
    assert metrics["all"]["ttft_ms"]["p50"] > 0
    assert sum(results.runs[0].cluster["batch_sizes"]["head"].values()) > 0
    assert results.workload["arrivals"] == "closed:3"
    assert "Queue depth" in files["out.html"].read_text()
    # Without the requests that warmed up; the last token of an answer never enters the layers.
    assert read_routing(files["routing"]).tokens.tolist() == [10] * 7
    assert sorted(tmp_path.iterdir()) == sorted(files.values())


def test_a_workload_that_cannot_be_is_refused_before_the_start(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for flags, said in (
        (["--arrivals", "poisson:3", "--requests", "0"], "workload.requests = '0'"),
        (["--lengths", "long"], "workload.lengths is 'long'; allowed: sharegpt"),
        (["--requests", "3", "--itl-target-ms", "-1"], "measure.itl_target_ms = '-1'"),
        (["--requests", "3", "--output", str(tmp_path / "no" / "x")], "cannot be written"),
        (["--requests", "3", "--where"], "--where is for the run of equal prompts"),
    ):
        assert bench(*flags) == 2
        assert said in capsys.readouterr().err


def test_a_batch_of_nothing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench("--batch", "0")
    assert "--batch: '0' is not a number from 1" in capsys.readouterr().err


def test_the_time_table_shows_differences_as_shares_of_the_time_between() -> None:
    before = {0: report(loop_s=5.0, attention_compute_s=1.0)}
    after = {0: report(loop_s=7.0, attention_compute_s=1.5, attention_batches=4, attention_rows=10)}
    rows = [
        re.split(r" {2,}", line, maxsplit=1)
        for line in time_table(accounts(before, after)).split("\n")
    ]
    lines = {name: cells.split() for name, cells in rows}
    assert lines["compute: attention"] == ["500", "ms", "25%"]
    assert lines["compute: waiting for rows"] == ["1500", "ms", "75%"]
    assert lines["attention batches x mean rows"] == ["4", "x", "2.5"]


def test_times_per_step_are_divided_and_shares_are_not() -> None:
    account = Account.between(report(), report(loop_s=2.0, expert_compute_s=1.0))
    (line,) = (
        r for r in time_table({0: account}, 4).split("\n") if r.startswith("compute: expert")
    )
    assert line.split()[2:] == ["250.00", "ms", "50%"]
    assert account.figures(4)["compute_ms"]["expert"] == 250


def test_the_loop_s_cpu_time_is_split_without_rest() -> None:
    account = Account.between(
        report(),
        report(
            loop_s=10.0,
            loop_user_s=3.0,
            loop_system_s=1.0,
            attention_prepare_s=0.5,
            head_finish_s=0.25,
            receive_s=1.25,
        ),
    )
    assert (account.prepare_s, account.finish_s, account.receive_s) == (0.5, 0.25, 1.25)
    assert account.other_s == 2.0
    assert account.idle_s == 6.0


@pytest.mark.parametrize(
    ("compute_s", "hidden"),
    [(10.0, 1.0), (9.0, 0.5), (7.0, 0.0)],
)
def test_what_the_device_did_not_wait_for_was_hidden(compute_s: float, hidden: float) -> None:
    account = Account.between(
        report(), report(loop_s=10.0, loop_user_s=2.0, head_compute_s=compute_s)
    )
    assert account.hidden == pytest.approx(hidden)


def test_ranks_that_are_silent_at_one_end_are_left_out() -> None:
    assert list(accounts({0: report(), 1: report()}, {0: report(loop_s=1.0)})) == [0]


def test_the_decode_rate_begins_when_the_last_request_has_its_first_token() -> None:
    early = Transcript("a", [1], 0.0, [5] * 4, [1.0, 2.0, 3.0, 4.0])
    late = Transcript("b", [1], 0.0, [5] * 3, [2.0, 3.0, 4.0])
    rates = Finished([early, late], 4.0).rates()
    assert rates["tokens_per_s"] == 7 / 4
    assert rates["decode_tokens_per_s"] == 4 / 2
    assert rates["ttft_ms"]["mean"] == 1500


def test_one_token_each_has_no_decode_rate() -> None:
    rates = Finished([Transcript("a", [1], 0.0, [5], [1.0])], 1.0).rates()
    assert rates["decode_tokens_per_s"] is None
    assert rates["itl_ms"] == {"mean": None, "p50": None, "p99": None}


def test_spread_is_in_milliseconds() -> None:
    assert spread_ms([0.001, 0.003]) == {"mean": 2.0, "p50": 2.0, "p99": pytest.approx(2.98)}


def test_prompts_depend_on_the_seed_alone() -> None:
    same = random_prompts(2, 8, 100, 3)
    assert (same == random_prompts(2, 8, 100, 3)).all()
    assert (same != random_prompts(2, 8, 100, 4)).any()
    assert same.max() < 100
