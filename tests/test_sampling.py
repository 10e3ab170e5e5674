"""Sampling: the tokens follow the stated distribution, whatever the batch."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from asyncmoe.sampler import Sampled, best_of, sample, uniforms
from asyncmoe.sampling import HOTTEST, SamplingParams
from asyncmoe.samplingtable import GO_ON, LENGTH, STOP, SamplingTable

VOCAB = 700  # several blocks of the cumulative sum, and not a multiple of them
EOS = 7
GREEDY = SamplingParams(temperature=0)
torch.set_num_threads(1)


def make_logits(rows: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


def make_table(
    *params: SamplingParams, prompt: tuple[int, ...] = (1, 2, 3), context: int = 1000
) -> SamplingTable:
    table = SamplingTable(len(params) + 3, VOCAB, [EOS])
    for row, each in enumerate(params):
        table.set(row, each, list(prompt), context)
    return table


def sample_all(logits: torch.Tensor, *params: SamplingParams) -> Sampled:
    return sample(logits, make_table(*params).batch(np.arange(len(params))))


# ---- distribution


def naive_weights(logits: NDArray[np.float32], params: SamplingParams) -> NDArray[np.float64]:
    """Relative probabilities of a row in float64, by the definition of each filter."""
    x = logits.astype(np.float64) / params.temperature
    p = np.exp(x - x.max())
    p[p < params.min_p] = 0
    if 0 < params.top_k < len(p):
        p[p < np.sort(p)[-params.top_k]] = 0
    if params.top_p < 1:
        order = np.argsort(-p, kind="stable")
        mass = np.cumsum(p[order]) / p.sum()
        p[order[int(np.searchsorted(mass, params.top_p)) + 1 :]] = 0
    return p


FILTERS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.01, 0.3, 1.0, 5.0]),
    top_k=st.sampled_from([0, 1, 2, 40, VOCAB - 1, VOCAB, 10**6]),
    top_p=st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    seed=st.integers(0, 2**64 - 1),
)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(FILTERS, min_size=1, max_size=6), st.integers(0, 1000), st.sampled_from([0.1, 3, 9])
)
def test_tokens_are_those_of_the_definition_row_by_row(
    params: list[SamplingParams], seed: int, scale: float
) -> None:
    logits = make_logits(len(params), seed, scale)
    tokens = sample_all(logits, *params).tokens
    for row, each in enumerate(params):
        assert each.seed is not None
        cumulative = np.cumsum(naive_weights(logits[row].numpy(), each))
        u = float(uniforms(np.array([each.seed], np.uint64), np.array([0]))[0])
        # float32 against float64: within 1e-5 of a boundary, the token on its other side will do.
        near = np.searchsorted(cumulative / cumulative[-1], [u - 1e-5, u, u + 1e-5], side="right")
        assert tokens[row] in near


@pytest.mark.parametrize(
    "params", [{"top_k": 20}, {"top_p": 0.6}, {"min_p": 0.05}, {"temperature": 0.7}]
)
def test_frequencies_follow_the_distribution(params: dict[str, Any]) -> None:
    draws = 4000
    logits = make_logits(1, scale=2.0)
    each = SamplingParams(**params)
    requests = [SamplingParams(**params, seed=seed) for seed in range(draws)]
    tokens = sample_all(logits.expand(draws, -1), *requests).tokens
    p = naive_weights(logits[0].numpy(), each)
    p /= p.sum()
    counts = np.bincount(tokens, minlength=VOCAB)
    assert not counts[p == 0].any()
    tested = p * draws >= 5
    deviation = (counts - p * draws)[tested] ** 2 / (p * draws)[tested]
    # Chi-squared has mean n and variance 2n: six standard deviations, with fixed seeds.
    assert deviation.sum() < tested.sum() + 6 * math.sqrt(2 * tested.sum())


def test_uniforms_are_uniform_over_seeds_and_over_steps() -> None:
    n = 20_000
    same = np.zeros(n, np.int64)
    over_seeds = uniforms(np.arange(n, dtype=np.uint64), same)
    over_steps = uniforms(same.astype(np.uint64), np.arange(n))
    for u in (over_seeds, over_steps):
        assert u.min() >= 0
        assert u.max() < 1
        spread = np.bincount((u * 50).astype(int), minlength=50) - n / 50
        assert (spread**2).sum() / (n / 50) < 50 + 6 * math.sqrt(100)
        assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.03
    assert abs(np.corrcoef(over_seeds, over_steps)[0, 1]) < 0.03


@pytest.mark.parametrize("edge", [0, 5])
def test_extreme_uniforms_choose_tokens_that_have_probability(
    monkeypatch: pytest.MonkeyPatch, edge: int
) -> None:
    logits = make_logits(4)
    logits[:, :edge] = -math.inf
    logits[:, VOCAB - edge :] = -math.inf
    for u, expected in ((0.0, edge), (1 - 2**-53, VOCAB - edge - 1)):
        monkeypatch.setattr("asyncmoe.sampler.uniforms", lambda seed, _, u=u: np.full(len(seed), u))
        tokens = sample_all(logits, *[SamplingParams(temperature=100.0, seed=1)] * 4).tokens
        assert tokens.tolist() == [expected] * 4


@pytest.mark.parametrize("params", [{"top_k": 2}, {"top_p": 0.3}, {"top_k": 2, "top_p": 0.9}])
def test_tokens_as_likely_as_the_last_one_kept_are_kept_too(params: dict[str, Any]) -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [4, 100, 290]] = 10.0
    requests = [SamplingParams(**params, seed=seed) for seed in range(60)]
    assert set(sample_all(logits.expand(60, -1), *requests).tokens.tolist()) == {4, 100, 290}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-4, 4), min_size=1, max_size=700), st.data())
def test_the_best_are_those_of_a_sort(values: list[int], data: st.DataObject) -> None:
    x = np.array([values, values[::-1]], np.float32)
    k = np.array([data.draw(st.integers(1, len(values))) for _ in range(2)])
    ids, best = best_of(x, k)
    for row in range(2):
        kept = best[row] > -np.inf
        assert (
            ids[row, kept].tolist() == np.flatnonzero(x[row] >= np.sort(x[row])[-k[row]]).tolist()
        )
        assert best[row, kept].tolist() == x[row, ids[row, kept]].tolist()


@pytest.mark.parametrize(
    "filters", [{"top_k": 20}, {"top_p": 0.9}, {"top_k": 50, "top_p": 0.8, "min_p": 0.01}], ids=str
)
def test_python_runs_no_line_more_for_more_rows_of_a_chunk(filters: dict[str, Any]) -> None:
    def lines(rows: int) -> int:
        params = [SamplingParams(seed=seed, logprobs=5, **filters) for seed in range(rows)]
        logits, batch, count = make_logits(rows), make_table(*params).batch(np.arange(rows)), 0

        def trace(_frame: Any, event: str, _arg: Any) -> Any:
            nonlocal count
            count += event == "line"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            sample(logits, batch)
        finally:
            sys.settrace(before)
        return count

    assert lines(200) == lines(2)


@pytest.mark.parametrize(
    "extreme",
    [{"temperature": HOTTEST}, {"repetition_penalty": 1e3}, {"repetition_penalty": 1e-3}],
    ids=str,
)
@pytest.mark.parametrize("filters", [{}, {"top_k": 600}, {"top_p": 0.99}], ids=str)
def test_the_most_extreme_values_allowed_still_sample(
    extreme: dict[str, Any], filters: dict[str, Any]
) -> None:
    params = [SamplingParams(seed=seed, min_tokens=1, **extreme, **filters) for seed in range(50)]
    sampled = sample_all(make_logits(1).expand(50, -1), *params)
    assert not sampled.bad.any()
    assert len(set(sampled.tokens.tolist())) > (40 if "temperature" in extreme else 0)
    assert EOS not in sampled.tokens


# ---- batches


MIXED = [
    GREEDY,
    SamplingParams(seed=1),
    SamplingParams(seed=2, top_p=0.8),
    SamplingParams(seed=3, top_k=12, logprobs=3),
    SamplingParams(seed=4, min_p=0.1, top_k=30, top_p=0.9, temperature=0.8),
    SamplingParams(temperature=0, repetition_penalty=1.5),
    SamplingParams(seed=5, presence_penalty=1.0, frequency_penalty=0.5),
    SamplingParams(seed=6, logit_bias={11: 5.0, 12: -100.0}),
    SamplingParams(seed=7, min_tokens=4),
]


def run_steps(rows: list[int], order: NDArray[np.int64], steps: int = 6) -> dict[int, list[int]]:
    """The tokens of MIXED's `rows`, batched in `order`, on logits that depend on row and step."""
    table = SamplingTable(64, VOCAB, [EOS])
    for row in rows:
        table.set(40 - row, MIXED[row], [1, 2, 3], 1000)
    out: dict[int, list[int]] = {row: [] for row in rows}
    for step in range(steps):
        batch = np.array(rows)[order]
        logits = torch.cat([make_logits(1, seed=100 * row + step) for row in batch.tolist()])
        tokens = sample(logits, table.batch(40 - batch)).tokens
        table.append(40 - batch, tokens)
        for row, token in zip(batch.tolist(), tokens.tolist(), strict=True):
            out[row].append(token)
    return out


def test_tokens_do_not_depend_on_the_batch_or_its_order() -> None:
    everyone = list(range(len(MIXED)))
    together = run_steps(everyone, np.arange(len(MIXED)))
    reversed_ = run_steps(everyone, np.arange(len(MIXED))[::-1])
    alone = {row: run_steps([row], np.arange(1))[row] for row in everyone}
    assert together == reversed_ == alone


def test_rows_beyond_one_chunk_are_sampled_as_if_alone() -> None:
    rows = 800  # of 700 tokens: three chunks
    logits = make_logits(rows)
    requests = [SamplingParams(seed=seed, top_p=0.9) for seed in range(rows)]
    tokens = sample_all(logits, *requests).tokens
    for row in (0, 373, 374, 375, rows - 1):
        assert sample_all(logits[row : row + 1], requests[row]).tokens[0] == tokens[row]


def test_greedy_rows_are_the_argmax_whatever_their_neighbours() -> None:
    logits = make_logits(3)
    sampled = sample_all(logits, GREEDY, SamplingParams(seed=1, temperature=50), GREEDY)
    assert sampled.tokens[[0, 2]].tolist() == logits.argmax(1)[[0, 2]].tolist()


def test_a_batch_of_plain_greedy_rows_asks_for_nothing() -> None:
    batch = make_table(GREEDY, GREEDY).batch(np.arange(2))
    assert (batch.draws, batch.edits, batch.logprob_rows) == (None, None, None)


def test_different_steps_of_a_request_draw_different_numbers() -> None:
    table = make_table(SamplingParams(seed=1))
    logits = make_logits(1, scale=0.1)
    tokens = []
    for _ in range(8):
        tokens.append(int(sample(logits, table.batch(np.arange(1))).tokens[0]))
        table.append(np.arange(1), np.array(tokens[-1:]))
    assert len(set(tokens)) > 4


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(seed=1, top_p=0.9, logprobs=2)])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_row_without_usable_logits_is_marked_and_its_neighbours_are_not(
    params: SamplingParams, poison: float
) -> None:
    logits = make_logits(3)
    healthy = sample_all(logits, params, params, params)
    logits[1, 20] = poison
    sampled = sample_all(logits, params, params, params)
    assert sampled.bad.tolist() == [False, True, False]
    assert sampled.tokens[[0, 2]].tolist() == healthy.tokens[[0, 2]].tolist()
    assert sampled.tokens[1] == 0


def test_a_row_whose_tokens_are_all_excluded_is_marked() -> None:
    logits = torch.full((2, VOCAB), -math.inf)
    logits[:, EOS] = 1.0
    sampled = sample_all(logits, SamplingParams(temperature=0, min_tokens=1), GREEDY)
    assert sampled.bad.tolist() == [True, False]


def test_sampling_leaves_the_logits_as_they_were() -> None:
    logits = make_logits(len(MIXED))
    before = logits.clone()
    sample_all(logits, *MIXED)
    assert torch.equal(logits, before)


# ---- penalties, bias, min_tokens


@settings(max_examples=60, deadline=None)
@given(
    st.floats(0.5, 2),
    st.floats(-2, 2),
    st.floats(-2, 2),
    st.lists(st.integers(0, 40), max_size=12),
    st.lists(st.integers(0, 40), min_size=1, max_size=60),
    st.dictionaries(st.integers(0, 40), st.floats(-5, 5), max_size=4),
    st.sampled_from([-8.0, 0.0, 8.0]),
)
def test_edited_logits_are_those_of_the_definition(
    repetition: float,
    presence: float,
    frequency: float,
    prompt: list[int],
    output: list[int],
    bias: dict[int, float],
    shift: float,
) -> None:
    params = SamplingParams(
        temperature=0,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias=bias,
    )
    table = SamplingTable(4, VOCAB, [EOS])
    table.set(2, params, prompt, 1000)
    for token in output:
        table.append(np.array([2]), np.array([token]))
    logits = make_logits(1) + shift
    logits[0, 41:] = -1000.0  # the tokens that are edited win
    expected = logits[0].double().numpy()
    for token, amount in bias.items():
        expected[token] += amount
    for token in set(prompt + output):
        x = expected[token]
        expected[token] = x / repetition if x > 0 else x * repetition
    for token in set(output):
        expected[token] -= presence + frequency * output.count(token)
    token = int(sample(logits, table.batch(np.array([2]))).tokens[0])
    assert expected[token] >= expected.max() - 1e-4


@pytest.mark.parametrize("filters", [{}, {"top_k": 30}, {"top_p": 0.9}])
def test_edits_reach_rows_that_are_sampled(filters: dict[str, Any]) -> None:
    params = [SamplingParams(seed=i, logit_bias={11 + i: 100.0}, **filters) for i in range(3)]
    sampled = sample_all(make_logits(4), GREEDY, *params)
    assert sampled.tokens[1:].tolist() == [11, 12, 13]


def test_presence_and_frequency_do_not_look_at_the_prompt() -> None:
    logits = make_logits(1)
    second, likeliest = (int(i) for i in logits[0].topk(2).indices.flip(0))
    logits[0, likeliest] = logits[0, second] + 1
    for penalty in ("presence_penalty", "frequency_penalty"):
        table = make_table(SamplingParams(temperature=0, **{penalty: 2.0}), prompt=(likeliest,))
        assert sample(logits, table.batch(np.arange(1))).tokens[0] == likeliest
        table.append(np.arange(1), np.array([likeliest]))
        assert sample(logits, table.batch(np.arange(1))).tokens[0] == second


def test_end_tokens_are_excluded_until_min_tokens() -> None:
    logits = make_logits(1)
    logits[0, EOS], logits[0, 30], logits[0, 50] = 100.0, 90.0, 80.0
    params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[30])
    table, tokens = make_table(params), []
    for _ in range(3):
        tokens.append(int(sample(logits, table.batch(np.arange(1))).tokens[0]))
        table.append(np.arange(1), np.array(tokens[-1:]))
    assert tokens == [50, 50, EOS]


# ---- the end of a request


def test_requests_finish_by_eos_stop_token_length_and_context() -> None:
    plain = SamplingParams(temperature=0, max_tokens=None)
    table = make_table(
        plain,
        SamplingParams(temperature=0, max_tokens=None, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=None, stop_token_ids=[30, 31]),
        SamplingParams(temperature=0, max_tokens=1),
        context=5,  # the prompt has 3
    )
    rows = np.arange(4)
    for token, expected in (
        (EOS, [STOP, GO_ON, STOP, STOP]),
        (31, [LENGTH, LENGTH, STOP, LENGTH]),
    ):
        tokens = np.full(4, token)
        table.append(rows, tokens)
        assert table.finished(rows, tokens).tolist() == expected


def test_a_row_that_is_set_anew_remembers_nothing() -> None:
    table = make_table(
        SamplingParams(seed=1, repetition_penalty=2.0, logprobs=4, stop_token_ids=[5, 6, 8])
    )
    row = np.array([0])
    table.append(row, np.array([5]))
    table.clear(0)
    assert not table._edits
    table.set(0, SamplingParams(temperature=0, max_tokens=2), [1], 1000)
    batch = table.batch(row)
    assert (batch.draws, batch.edits, batch.logprob_rows) == (None, None, None)
    table.append(row, np.array([5]))
    assert table.finished(row, np.array([5])).tolist() == [GO_ON]


def test_a_batch_is_not_changed_by_what_comes_after_it() -> None:
    params = SamplingParams(seed=1, repetition_penalty=1.3, frequency_penalty=2.0)
    table, logits = make_table(params), make_logits(1)
    batch = table.batch(np.arange(1))
    before = sample(logits, batch).tokens.tolist()
    for token in range(40):
        table.append(np.arange(1), np.array([token]))
    table.set(0, GREEDY, [1], 1000)
    assert sample(logits, batch).tokens.tolist() == before


# ---- logprobs


def test_logprobs_are_those_of_the_raw_distribution_for_rows_that_ask() -> None:
    logits = make_logits(4)
    sampled = sample_all(
        logits,
        SamplingParams(seed=1, temperature=0.2, top_k=5, logit_bias={9: 50.0}, logprobs=3),
        GREEDY,
        SamplingParams(temperature=0, logprobs=0),
        SamplingParams(temperature=0, logprobs=20),
    )
    assert sampled.logprobs is not None
    lists = sampled.logprobs.as_lists(4)
    exact = torch.log_softmax(logits.double(), 1)
    assert lists[1] is None
    for row, n in ((0, 3), (2, 0), (3, 20)):
        entry = lists[row]
        assert entry is not None
        chosen, ids, values = entry
        top = exact[row].topk(n)
        assert chosen == pytest.approx(float(exact[row, sampled.tokens[row]]), abs=1e-5)
        assert ids == top.indices.tolist()
        assert values == pytest.approx(top.values.tolist(), abs=1e-5)


def test_logprobs_of_impossible_tokens_are_json() -> None:
    logits = torch.full((1, VOCAB), -math.inf)
    logits[0, 3] = 0.0
    sampled = sample_all(logits, SamplingParams(temperature=0, logprobs=2))
    assert sampled.logprobs is not None
    entry = sampled.logprobs.as_lists(1)[0]
    assert entry is not None
    assert orjson.loads(orjson.dumps(entry))[2] == [0.0, -9999.0]
