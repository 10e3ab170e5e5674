"""Workloads: lengths, arrivals, and what is drawn of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncmoe.errors import ConfigError
from asyncmoe.workload.arrivals import make_arrivals
from asyncmoe.workload.lengths import make_lengths
from asyncmoe.workload.table import read_table
from asyncmoe.workload.workload import WorkloadConfig, cut, make_workload


def workload(**keys: Any) -> Any:
    return make_workload(WorkloadConfig.model_validate(keys))


@pytest.mark.parametrize(
    ("name", "prompt_mean", "output_mean", "median"),
    [("sharegpt", 114.97, 301.16, 273), ("gsm8k", 57.56, 100.7, 92)],
)
def test_built_in_lengths_have_the_measured_means(
    name: str, prompt_mean: float, output_mean: float, median: float
) -> None:
    prompt, output = make_lengths(name).draw(50_000, np.random.default_rng(0))
    assert prompt.mean() == pytest.approx(prompt_mean, rel=0.06)
    assert output.mean() == pytest.approx(output_mean, rel=0.02)
    assert np.median(output) == pytest.approx(median, rel=0.02)
    assert prompt.min() >= 1
    assert output.min() >= 1


def test_long_questions_have_the_long_answers_of_their_tenth() -> None:
    prompt, output = make_lengths("gsm8k").draw(50_000, np.random.default_rng(0))
    shortest, longest = output[prompt <= 34], output[prompt > 87]
    assert np.percentile(shortest, (25, 50, 75)) == pytest.approx([48, 62, 79], rel=0.07)
    assert np.percentile(longest, (25, 50, 75)) == pytest.approx([108, 138, 172], rel=0.07)


def test_sharegpt_turns_have_at_most_2048_tokens() -> None:
    prompt, output = make_lengths("sharegpt").draw(50_000, np.random.default_rng(0))
    assert (prompt + output).max() <= 2048


def test_an_azure_trace_gives_lengths_and_arrivals(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:50.9951690,396,109\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
    )
    found = workload(lengths=f"file:{file}", arrivals=f"trace:{file}")
    assert found.arrival_s.tolist() == pytest.approx([0.0, 4.314579])
    assert found.prompt_tokens.tolist() == [374, 396]
    assert found.output_tokens.tolist() == [44, 109]


def test_arrivals_may_come_from_a_file_without_lengths(tmp_path: Path) -> None:
    file = tmp_path / "arrivals.csv"
    file.write_text("arrival_s\n3.5\n1.0\n2.0\n")
    found = workload(lengths="fixed:4,5", arrivals=f"trace:{file}")
    assert found.arrival_s.tolist() == [0.0, 1.0, 2.5]
    assert found.output_tokens.tolist() == [5, 5, 5]


def test_json_lines_may_have_no_arrivals(tmp_path: Path) -> None:
    file = tmp_path / "lengths.jsonl"
    file.write_text('{"prompt_tokens": 5, "output_tokens": 7}\n\n')
    assert read_table(file).arrival_s is None
    with pytest.raises(ConfigError, match="no column arrival_s"):
        make_arrivals(f"trace:{file}")
    found = workload(lengths=f"file:{file}", requests=3)
    assert found.output_tokens.tolist() == [7, 7, 7]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.csv", "prompt_tokens\n5\n", "no column output_tokens"),
        ("a.csv", "prompt_tokens,output_tokens\n5,0\n", "request 1: output_tokens is '0'"),
        ("a.csv", "prompt_tokens,output_tokens\n5,5\n5\n", "2: output_tokens is None"),
        ("a.csv", "", "no requests|no column"),
        ("a.jsonl", "[1]\n", "line 1: not an object"),
        ("a.jsonl", "{\n", "line 1: not JSON"),
        ("a.csv", "prompt_tokens,output_tokens,arrival_s\n5,5,inf\n", "must be finite"),
    ],
)
def test_a_table_with_a_fault_is_refused_with_its_place(
    tmp_path: Path, name: str, text: str, said: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_table(tmp_path / name)


@pytest.mark.parametrize(
    "keys",
    [
        {"arrivals": "poisson:0", "requests": 1},
        {"arrivals": "poisson:nan", "requests": 1},
        {"arrivals": "bursty:5", "requests": 1},
        {"arrivals": "closed:0", "requests": 1},
        {"arrivals": "sometimes", "requests": 1},
        {"lengths": "fixed:0,5", "requests": 1},
        {"lengths": "fixed:5", "requests": 1},
        {"lengths": "sharegpt:2", "requests": 1},
    ],
)
def test_what_cannot_be_is_refused_with_what_is_allowed(keys: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"workload\.(arrivals|lengths) is .*; allowed: "):
        workload(**keys)


def test_arrivals_without_an_end_need_one() -> None:
    with pytest.raises(ValueError, match="need one of them"):
        WorkloadConfig(arrivals="poisson:3")


def test_poisson_arrivals_have_their_rate_and_no_memory() -> None:
    gaps_s = np.diff(workload(arrivals="poisson:50", requests=20_000).arrival_s)
    assert gaps_s.mean() == pytest.approx(0.02, rel=0.03)
    assert gaps_s.std() / gaps_s.mean() == pytest.approx(1.0, rel=0.03)


def test_a_burst_comes_at_once_and_the_rate_stays() -> None:
    found = workload(arrivals="bursty:50,10", duration_s=200)
    assert len(found) == pytest.approx(10_000, rel=0.1)
    assert found.arrival_s[-1] < 200
    assert len(np.unique(found.arrival_s[:1000])) == 100


def test_the_same_seed_gives_the_same_workload() -> None:
    keys = {"arrivals": "poisson:9", "duration_s": 20.0, "underway": 5}
    one, same, other = (workload(**keys, seed=seed) for seed in (1, 1, 2))
    assert one.arrival_s.tolist() == same.arrival_s.tolist()
    assert one.output_tokens.tolist() == same.output_tokens.tolist()
    assert one.prompt(3, 100).tolist() == same.prompt(3, 100).tolist()
    assert one.arrival_s.tolist() != other.arrival_s.tolist()
    assert one.prompt(3, 100).tolist() != one.prompt(4, 100).tolist()


def test_requests_under_way_are_met_by_their_length_and_at_a_random_point() -> None:
    found = workload(lengths="gsm8k", arrivals="poisson:1", duration_s=1, underway=20_000)
    whole_mean = 100.7
    # Met as often as they are long, and on average in the middle.
    _, answers = make_lengths("gsm8k").draw(9999, np.random.default_rng(0))
    expected = (answers**2).mean() / answers.mean() / 2
    assert expected > whole_mean / 2
    assert found.output_tokens[:20_000].mean() == pytest.approx(expected, rel=0.05)
    assert found.output_tokens.min() >= 1
    assert (found.arrival_s[:20_000] == 0).all()


def test_a_closed_loop_begins_with_requests_under_way() -> None:
    found = workload(lengths="fixed:10,8", arrivals="closed:4", requests=6, underway=4)
    assert found.in_flight == 4
    assert found.underway == 4
    assert (found.prompt_tokens + found.output_tokens).tolist() == [18] * 6
    assert found.output_tokens[4:].tolist() == [8, 8]
    assert not found.repeats


def test_long_requests_are_cut_prompts_first() -> None:
    prompt, output = cut(np.array([10, 90, 90, 10]), np.array([10, 40, 90, 200]), 100)
    assert (prompt + output).tolist() == [20, 100, 100, 100]
    assert prompt.tolist() == [10, 60, 50, 10]
