"""Sampling parameters: what is allowed, and what goes over the wire."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import orjson
import pytest

from asyncmoe.errors import ProtocolError, RequestError
from asyncmoe.sampling import SamplingParams

VOCAB = 700
GREEDY = SamplingParams(temperature=0)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [-0.1, math.nan, math.inf, 1e39, "1", True, None, 1j]),
        ("top_k", [-2, 1.0, "5", True, None]),
        ("top_p", [0, -0.1, 1.01, math.nan, "0.5", True]),
        ("min_p", [-0.1, 1.01, math.nan, False]),
        ("seed", [2**64, -(2**63) - 1, 1.5, "3", True]),
        ("repetition_penalty", [0, -1, 1e-300, 1e39, math.inf, math.nan]),
        ("presence_penalty", [-2.1, 2.1, math.nan, "0"]),
        ("frequency_penalty", [-2.1, 2.1, math.nan, None]),
        ("logit_bias", [[1], {1: 101}, {1: math.nan}, {-1: 1}, {"x": 1}, {1.5: 1}, {1: "2"}]),
        ("stop", [[""], "", [1], ["x"] * 17, 3, ["x" * 1025]]),
        ("stop_token_ids", [[-1], ["1"], [True], 5, [1] * 129]),
        ("max_tokens", [0, -1, 1.5, "16", True]),
        ("min_tokens", [-1, 17, 1.5, True]),
        ("logprobs", [-1, 21, True, "5"]),
        ("ignore_eos", [1, "true", None]),
        ("include_stop_str_in_output", [0]),
    ],
)
def test_a_bad_value_is_refused_with_its_field_and_value(field: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(RequestError, match=f"^{field} is .*; allowed: ") as caught:
            SamplingParams(**{field: value})
        assert caught.value.parameter == field


def test_values_are_normalised_to_one_form() -> None:
    params = SamplingParams(
        temperature=1, top_k=-1, stop="end", stop_token_ids=[np.int64(3)], logit_bias={"5": 2}
    )
    assert params.stop == ("end",)
    assert params.top_k == 0
    assert params.stop_token_ids == (3,)
    assert params.logit_bias == {5: 2.0}
    assert isinstance(params.temperature, float)


def test_ids_beyond_the_vocabulary_are_refused_against_it() -> None:
    for params, field in (
        (SamplingParams(stop_token_ids=[VOCAB]), "stop_token_ids"),
        (SamplingParams(logit_bias={VOCAB: 1}), "logit_bias"),
        (SamplingParams(max_tokens=None, min_tokens=100), "min_tokens"),
    ):
        with pytest.raises(RequestError, match=f"{field} is") as caught:
            params.check_against(VOCAB, 100)
        assert caught.value.parameter == field
    SamplingParams(stop_token_ids=[VOCAB - 1], min_tokens=16).check_against(VOCAB, 100)


def test_the_wire_carries_what_the_home_rank_needs_and_no_more() -> None:
    params = SamplingParams(
        temperature=0.5, seed=3, logit_bias={4: -1.5}, stop="x", stop_token_ids=[9], logprobs=0
    )
    wire = orjson.loads(orjson.dumps(params.to_wire()))
    assert set(wire) == {"temperature", "seed", "logit_bias", "stop_token_ids", "logprobs"}
    back = SamplingParams.from_wire(wire)
    assert back == SamplingParams(
        temperature=0.5, seed=3, logit_bias={4: -1.5}, stop_token_ids=[9], logprobs=0
    )


def test_a_request_without_a_seed_gets_one_on_the_wire_unless_it_is_greedy() -> None:
    assert "seed" not in GREEDY.to_wire()
    assert SamplingParams().to_wire(lambda: 42)["seed"] == 42
    assert SamplingParams().to_wire()["seed"] != SamplingParams().to_wire()["seed"]


@pytest.mark.parametrize("wire", [{"stop": ["x"]}, {"top_p": 7}, {"logit_bias": 3}, {"seed": "a"}])
def test_sampling_fields_that_nobody_writes_are_a_protocol_error(wire: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match="sampling fields not understood"):
        SamplingParams.from_wire(wire)
