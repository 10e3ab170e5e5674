"""A synthetic run: equal prompts of random ids, all at once, and the rates that came of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncmoe.frontend.engine import AsyncEngine
from asyncmoe.frontend.output import RequestOutput, Transcript
from asyncmoe.frontend.together import together
from asyncmoe.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Finished:
    """The answers of one run, and how long it took."""

    transcripts: Sequence[Transcript]
    whole_s: float

    @property
    def tokens(self) -> int:
        """New tokens of all answers."""
        return sum(len(each.token_ids) for each in self.transcripts)

    def rates(self) -> dict[str, Any]:
        """Tokens per second, over it all and once every request has its first token; times to the
        first token and between tokens. None for what there was nothing of."""
        gaps_s = [gap for each in self.transcripts for gap in each.gaps_s]
        return {
            "tokens": self.tokens,
            "whole_s": self.whole_s,
            "tokens_per_s": self.tokens / self.whole_s,
            "decode_tokens_per_s": self._decode_tokens_per_s(),
            "ttft_ms": spread_ms([each.ttft_s or 0.0 for each in self.transcripts]),
            "itl_ms": spread_ms(gaps_s),
        }

    def _decode_tokens_per_s(self) -> float | None:
        times_s = np.sort(np.concatenate([each.token_times_s for each in self.transcripts]))
        begin_s = max(each.token_times_s[0] for each in self.transcripts)
        seconds = float(times_s[-1] - begin_s)
        return float((times_s > begin_s).sum()) / seconds if seconds > 0 else None


def spread_ms(seconds: Sequence[float]) -> dict[str, float | None]:
    """Mean, median and 99th percentile, in milliseconds; None of nothing."""
    if not seconds:
        return dict.fromkeys(("mean", "p50", "p99"))
    ms = 1e3 * np.asarray(seconds)
    p50, p99 = (float(each) for each in np.percentile(ms, (50, 99)))
    return {"mean": float(ms.mean()), "p50": p50, "p99": p99}


def random_prompts(batch: int, tokens: int, vocab: int, seed: int) -> NDArray[np.int64]:
    """[batch, tokens]: the same for the same seed."""
    return np.random.default_rng(seed).integers(0, vocab, (batch, tokens))


async def run_batch(engine: AsyncEngine, prompts: NDArray[np.int64], new: int) -> Finished:
    """All prompts at once, each answered greedily with `new` tokens.

    Raises `RequestError` or `RequestFailed`; then the other requests are aborted.
    """
    params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
    outputs: list[RequestOutput] = []

    async def one(ids: list[int]) -> None:
        async with engine.generate(ids, params) as generation:
            outputs.append(await generation.complete())

    begin_s = time.monotonic()
    await together(one(ids) for ids in prompts.tolist())
    whole_s = time.monotonic() - begin_s
    return Finished([output.transcript for output in outputs], whole_s)
