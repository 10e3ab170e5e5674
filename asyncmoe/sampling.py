"""What a client may ask of the sampler, validated field by field."""

from __future__ import annotations

import operator
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final

from asyncmoe.errors import ProtocolError, RequestError

STOP_STRINGS: Final = 16  # most stop strings of a request
STOP_CHARS: Final = 1024  # longest stop string
STOP_TOKEN_IDS: Final = 128  # most stop token ids of a request
LOGIT_BIASES: Final = 1024  # most biased tokens of a request
TOP_LOGPROBS: Final = 20  # most alternatives whose logprob is reported
GREEDY_BELOW: Final = 1e-5  # temperatures under this are greedy, as in vLLM
# Beyond these nothing changes but float32 overflow: every token is as likely, or none is.
HOTTEST: Final = 1e6  # temperature
WEAKEST_REPETITION: Final = 1e-3  # penalties under 1 reward repetition
STRONGEST_REPETITION: Final = 1e3

_FRONT_END_ONLY: Final = frozenset({"stop", "include_stop_str_in_output"})


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose the tokens of one request, with the names and ranges of vLLM and OpenAI.

    `stop` may be given as one string, `logit_bias` with its ids as strings (as JSON has them).
    Raises `RequestError` naming the field, its value and what is allowed.
    """

    temperature: float = 1.0  # 0 is greedy; [0, HOTTEST]
    top_k: int = 0  # keep the k most likely; 0 or -1 keeps all
    top_p: float = 1.0  # keep the smallest set with this much probability; (0, 1]
    min_p: float = 0.0  # drop tokens below this fraction of the likeliest; [0, 1]
    seed: int | None = None  # same seed, same request: same tokens, whatever the batch
    repetition_penalty: float = 1.0  # over prompt and output; [WEAKEST_, STRONGEST_REPETITION]
    presence_penalty: float = 0.0  # over the output; [-2, 2]
    frequency_penalty: float = 0.0  # over the output; [-2, 2]
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # added to logits; [-100, 100]
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    max_tokens: int | None = 16  # None: see engine.default_max_tokens
    min_tokens: int = 0  # no EOS, stop token or stop string before this many
    ignore_eos: bool = False
    logprobs: int | None = None  # None: none; n: of the token and the n likeliest; at most 20
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        set_ = object.__setattr__  # the class is frozen for everyone else
        for name, low, high, above in (
            ("temperature", 0.0, HOTTEST, False),
            ("top_p", 0.0, 1.0, True),
            ("min_p", 0.0, 1.0, False),
            ("repetition_penalty", WEAKEST_REPETITION, STRONGEST_REPETITION, False),
            ("presence_penalty", -2.0, 2.0, False),
            ("frequency_penalty", -2.0, 2.0, False),
        ):
            set_(self, name, _real(name, getattr(self, name), low, high, above))
        set_(self, "top_k", max(0, _integer("top_k", self.top_k, -1)))
        set_(self, "min_tokens", _integer("min_tokens", self.min_tokens, 0))
        if self.seed is not None:
            set_(self, "seed", _integer("seed", self.seed, -(2**63), 2**64 - 1))
        if self.max_tokens is not None:
            set_(self, "max_tokens", _integer("max_tokens", self.max_tokens, 1))
        if self.logprobs is not None:
            set_(self, "logprobs", _integer("logprobs", self.logprobs, 0, TOP_LOGPROBS))
        for name in ("ignore_eos", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise _refusal(name, getattr(self, name), "true or false")
        set_(self, "stop", _stop_strings(self.stop))
        set_(self, "stop_token_ids", _stop_token_ids(self.stop_token_ids))
        set_(self, "logit_bias", _logit_bias(self.logit_bias))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _refusal("min_tokens", self.min_tokens, f"at most max_tokens, {self.max_tokens}")

    @property
    def greedy(self) -> bool:
        """Whether each token is the likeliest one."""
        return self.temperature < GREEDY_BELOW

    def check_against(self, vocab: int, context: int) -> None:
        """Raise `RequestError` if a token id or `min_tokens` is beyond the model's own limits."""
        for token in self.stop_token_ids:
            if token >= vocab:
                raise _refusal("stop_token_ids", token, f"ids below the vocabulary size, {vocab}")
        for token in self.logit_bias:
            if token >= vocab:
                raise _refusal("logit_bias", token, f"ids below the vocabulary size, {vocab}")
        if self.min_tokens >= context:
            raise _refusal("min_tokens", self.min_tokens, f"below the context length, {context}")

    def to_wire(self, fresh_seed: Callable[[], int] | None = None) -> dict[str, Any]:
        """The fields that the home rank needs and that differ from their defaults, JSON-ready.

        A request that samples without a seed gets one here, from `fresh_seed` or else from the
        operating system, so that from now on its tokens are a function of its fields.
        """
        wire: dict[str, Any] = {}
        for name in _HOME_FIELDS:
            value = getattr(self, name)
            if value != getattr(_DEFAULTS, name):
                wire[name] = value
        if "logit_bias" in wire:
            wire["logit_bias"] = list(self.logit_bias.items())
        if self.seed is None and not self.greedy:
            wire["seed"] = fresh_seed() if fresh_seed else secrets.randbits(63)
        return wire

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> SamplingParams:
        """The inverse of `to_wire`; the front end's own fields keep their defaults.

        Raises `ProtocolError` for fields or values that `to_wire` does not write.
        """
        unknown = set(wire) - set(_HOME_FIELDS)
        if unknown:
            raise ProtocolError(f"sampling fields not understood: {sorted(unknown)}")
        values = dict(wire)
        try:
            if "logit_bias" in values:
                values["logit_bias"] = dict(values["logit_bias"])
            return cls(**values)
        except (TypeError, ValueError, RequestError) as error:
            raise ProtocolError(f"sampling fields not understood: {error}") from error


def _refusal(name: str, value: object, allowed: str) -> RequestError:
    shown = repr(value)
    if len(shown) > 80:
        shown = shown[:77] + "..."
    return RequestError(f"{name} is {shown}; allowed: {allowed}", name)


def _integer(name: str, value: object, low: int, high: int | None = None) -> int:
    """`value` as an int of [low, high]; bools, strings and floats are no integers."""
    span = f"integers from {low}" + ("" if high is None else f" to {high}")
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise _refusal(name, value, span) from None
    if isinstance(value, bool) or number < low or (high is not None and number > high):
        raise _refusal(name, value, span)
    return number


def _real(name: str, value: object, low: float, high: float, above: bool) -> float:
    """`value` as a float of [low, high], or of (low, high] if `above`; both are finite."""
    span = (
        f"numbers {'above' if above else 'from'} {low:g} {'and up to' if above else 'to'} {high:g}"
    )
    if isinstance(value, (bool, str, bytes)) or not hasattr(value, "__float__"):
        raise _refusal(name, value, span)
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise _refusal(name, value, span) from None
    inside = low < number <= high if above else low <= number <= high
    if not inside:
        raise _refusal(name, value, span)
    return number


def _sequence(name: str, value: object, most: int, what: str) -> list[Any]:
    allowed = f"a list of at most {most} {what}"
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise _refusal(name, value, allowed)
    if len(value) > most:
        raise _refusal(name, f"a list of {len(value)}", allowed)
    return list(value)


def _stop_strings(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    strings = (
        [value]
        if isinstance(value, str)
        else _sequence("stop", value, STOP_STRINGS, "non-empty strings")
    )
    for string in strings:
        if not isinstance(string, str) or not 1 <= len(string) <= STOP_CHARS:
            raise _refusal("stop", string, f"strings of 1 to {STOP_CHARS} characters")
    return tuple(strings)


def _stop_token_ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    ids = _sequence("stop_token_ids", value, STOP_TOKEN_IDS, "token ids")
    return tuple(_integer("stop_token_ids", token, 0) for token in ids)


def _logit_bias(value: object) -> dict[int, float]:
    if value is None:
        return {}
    allowed = f"a map of at most {LOGIT_BIASES} token ids to numbers from -100 to 100"
    if not isinstance(value, Mapping) or len(value) > LOGIT_BIASES:
        raise _refusal("logit_bias", value, allowed)
    bias: dict[int, float] = {}
    for token, amount in value.items():
        if isinstance(token, str) and token.isascii() and token.isdigit() and len(token) < 20:
            token = int(token)
        bias[_integer("logit_bias", token, 0)] = _real("logit_bias", amount, -100, 100, False)
    return bias


_HOME_FIELDS: Final = tuple(
    item.name for item in fields(SamplingParams) if item.name not in _FRONT_END_ONLY
)
_DEFAULTS: Final = SamplingParams()
