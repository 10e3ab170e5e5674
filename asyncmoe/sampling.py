"""What a client may ask of the sampler, validated field by field."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose the tokens of one request, with the names and ranges of vLLM and OpenAI.

    Raises `RequestError` naming the field, its value and what is allowed.
    """

    temperature: float = 1.0  # 0 is greedy; at least 0
    top_k: int = 0  # keep the k most likely; 0 or -1 keeps all
    top_p: float = 1.0  # keep the smallest set with this much probability; (0, 1]
    min_p: float = 0.0  # drop tokens below this fraction of the likeliest; [0, 1]
    seed: int | None = None  # same seed, same request: same tokens, whatever the batch
    repetition_penalty: float = 1.0  # over prompt and output; above 0
    presence_penalty: float = 0.0  # over the output; [-2, 2]
    frequency_penalty: float = 0.0  # over the output; [-2, 2]
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    max_tokens: int | None = 16  # None: as many as the context allows
    min_tokens: int = 0  # no EOS and no stop token before this many
    ignore_eos: bool = False
    logprobs: int | None = None  # None: none; n: of the token and the n likeliest; at most 20
    include_stop_str_in_output: bool = False
    extra: dict[str, object] = field(default_factory=dict)
