"""A workload: which requests come when, drawn from one seed, as arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from asyncmoe.config import Section
from asyncmoe.workload import arrivals, lengths


class WorkloadConfig(Section):
    """The requests of a run."""

    lengths: str = Field(
        "sharegpt", description=f"Prompt and output tokens of requests: {lengths.ALLOWED}"
    )
    arrivals: str = Field("all", description=f"When requests come: {arrivals.ALLOWED}")
    requests: int | None = Field(None, ge=1, le=1 << 24, description="How many; default by time")
    duration_s: float | None = Field(
        None,
        gt=0,
        description="The run ends then, and what is under way is given up; default when all "
        "requests have ended",
    )
    underway: int = Field(
        0,
        ge=0,
        le=1 << 20,
        description="Requests that are there at the start, each at a random point of its answer, "
        "so that a run needs no long ramp; of a closed loop all that it starts with",
    )
    spread_s: float = Field(
        0.0,
        ge=0,
        description="Requests that are there at the start, of a closed loop all that it starts "
        "with, come one after the other over this time, so that they are in different layers; "
        "other arrivals follow",
    )
    longest: int | None = Field(
        None, ge=2, description="Requests are cut to this many tokens, prompt and answer together"
    )
    decode_only: bool = Field(
        False,
        description="Requests start as if their prompt were in the KV cache, which holds dummies",
    )
    seed: int = Field(0, ge=0, description="Of arrivals, lengths, prompts")

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        rule = arrivals.make_arrivals(self.arrivals)
        lengths.make_lengths(self.lengths)
        endless = not isinstance(rule, arrivals.Trace)
        if endless and self.requests is None and self.duration_s is None:
            raise ValueError(
                f"workload.requests and workload.duration_s are not set; arrivals "
                f"{self.arrivals!r} need one of them"
            )
        return self


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests of a run, in order of arrival."""

    arrival_s: NDArray[np.float64]  # [n] from the start of the run, ascending
    prompt_tokens: NDArray[np.int64]  # [n] the KV there is at a request's start, if decode only
    output_tokens: NDArray[np.int64]  # [n] still to be made
    underway: int  # the first of them began before the run: they have no time to a first token
    in_flight: int | None  # of a closed loop, which takes the requests in turn, again and again
    spread_s: float  # of a closed loop: over which its first requests come
    duration_s: float | None  # when the run ends; None: with its last request
    decode_only: bool
    seed: int

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def repeats(self) -> bool:
        """Whether requests come again after the last one."""
        return self.in_flight is not None and self.duration_s is not None

    def prompt(self, request: int, vocab: int) -> NDArray[np.int64]:
        """[prompt_tokens] random ids of a request; the same for the same seed."""
        rng = np.random.default_rng((self.seed, request))
        ids: NDArray[np.int64] = rng.integers(0, vocab, self.prompt_tokens[request % len(self)])
        return ids


def make_workload(config: WorkloadConfig) -> Workload:
    """Draw it. Raises `ConfigError` naming the key, its value and what is allowed."""
    arrival_rng, length_rng, underway_rng = (
        np.random.default_rng((config.seed, stream)) for stream in range(3)
    )
    rule, kind = arrivals.make_arrivals(config.arrivals), lengths.make_lengths(config.lengths)
    arrival_s = rule.draw(config.requests, config.duration_s, arrival_rng)
    prompt, output = kind.draw(len(arrival_s), length_rng)
    closed = rule.in_flight is not None
    underway = min(config.underway, len(arrival_s)) if closed else config.underway
    if underway:
        begun = _underway(kind, underway, underway_rng)
        if closed:  # they are the first of the loop
            prompt[:underway], output[:underway] = begun
        else:
            prompt, output = (
                np.concatenate(pair) for pair in zip(begun, (prompt, output), strict=True)
            )
            first_s = np.arange(underway) * (config.spread_s / underway)
            arrival_s = np.concatenate([first_s, arrival_s + config.spread_s])
    if config.longest is not None:
        prompt, output = cut(prompt, output, config.longest)
    return Workload(
        arrival_s,
        prompt,
        output,
        underway,
        rule.in_flight,
        config.spread_s,
        config.duration_s,
        config.decode_only,
        config.seed,
    )


def cut(
    prompt: NDArray[np.int64], output: NDArray[np.int64], longest: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Prompt and output tokens [n] shortened to `longest` together.

    A prompt gives way first, down to half of it; then the answer.
    """
    over = prompt + output > longest
    prompt = np.where(over, np.maximum(longest - output, np.minimum(prompt, longest // 2)), prompt)
    return prompt, np.minimum(output, longest - prompt)


def _underway(kind: lengths.Lengths, count: int, rng: np.random.Generator) -> lengths.Pairs:
    """Requests in the middle of their answers, as one finds them at a random moment.

    A request is met as often as it is long, so that they are drawn by their output tokens; each is
    at an even-handed random point, with what it has written so far in its prompt.
    """
    prompt, output = kind.draw(max(4096, 4 * count), rng)
    met = rng.choice(len(prompt), count, p=output / output.sum())
    written = rng.integers(0, output[met])
    return prompt[met] + written, output[met] - written
