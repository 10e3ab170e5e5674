"""One flag for every field of `SamplingParams`, generated from its fields."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from asyncmoe.errors import RequestError
from asyncmoe.sampling import SamplingParams

HELP = {
    "temperature": "0 is greedy",
    "top_k": "keep the k most likely tokens; 0 keeps all",
    "top_p": "keep the smallest set of tokens with this much probability",
    "min_p": "drop tokens below this fraction of the likeliest one's probability",
    "seed": "same seed, same request: same tokens",
    "repetition_penalty": "over prompt and answer; 1 is none",
    "presence_penalty": "over the answer; 0 is none",
    "frequency_penalty": "over the answer; 0 is none",
    "logit_bias": 'JSON object {"token id": bias}',
    "stop": "end before this text; may be given several times",
    "stop_token_ids": "end after one of these ids: 5,17",
    "max_tokens": "most new tokens; none: see engine.default_max_tokens",
    "min_tokens": "no end before this many tokens",
    "ignore_eos": "go on behind the end-of-text token",
    "logprobs": "report log probabilities, of this many alternatives too",
    "include_stop_str_in_output": "keep the stop text in the answer",
}


def add_arguments(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """Add the flags; `defaults` replace those of `SamplingParams`."""
    group = parser.add_argument_group("sampling")
    initial = SamplingParams(**defaults)
    for each in fields(SamplingParams):
        flag, default = "--" + each.name.replace("_", "-"), getattr(initial, each.name)
        text = HELP[each.name]
        if default not in (None, (), {}, False):
            text += f" (default {default})"
        if isinstance(default, bool):
            group.add_argument(flag, action="store_true", default=default, help=text)
        elif each.name == "stop":
            group.add_argument(flag, action="append", default=None, help=text, metavar="TEXT")
        else:
            group.add_argument(
                flag, type=_reader(each.name), default=default, help=text, metavar="VALUE"
            )


def from_args(args: argparse.Namespace) -> SamplingParams:
    """The parameters that the flags set. Raises `RequestError` naming the field at fault."""
    values = {each.name: getattr(args, each.name) for each in fields(SamplingParams)}
    return SamplingParams(**values)


def _reader(name: str) -> Callable[[str], Any]:
    """How the text of a flag becomes the value that `SamplingParams` checks."""

    def read(text: str) -> Any:
        if text.lower() == "none":
            return None
        if name == "stop_token_ids":
            return token_ids(text, name)
        try:
            return json.loads(text)
        except ValueError:
            return float(text) if text.lower().lstrip("+-") in ("nan", "inf", "infinity") else text

    return read


def token_ids(text: str, name: str) -> list[int]:
    """Ids written as `5,17,9`. Raises `RequestError`."""
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise RequestError(
            f"{name} is {text!r}; allowed: token ids with commas between", name
        ) from None
