"""One request on its home rank: what of it is known, and whether it can ever run there."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from asyncmoe.chunks import NONE
from asyncmoe.errors import RequestError
from asyncmoe.kvcache import BlockPool
from asyncmoe.messages import Admit
from asyncmoe.sampling import SamplingParams


@dataclass(slots=True, eq=False)
class Request:
    """One admitted or waiting request."""

    request_id: int
    prompt: NDArray[np.int64]
    params: SamplingParams
    limit: int  # most new tokens
    blocks: int
    deadline_s: float  # loop time
    row: int = NONE
    injected: int = 0  # prompt positions that have entered the layers
    chunks: list[int] = field(default_factory=list)  # in the layers, in order


def checked_request(
    message: Admit, vocab: int, context: int, pool: BlockPool, deadline_s: float
) -> Request:
    """The request that `message` asks for. Raises `RequestError` if it can never run."""
    prompt = np.asarray(message.prompt, np.int64)
    params = SamplingParams.from_wire(message.sampling)
    params.check_against(vocab, context)
    if not len(prompt):
        raise RequestError("the prompt is empty", "prompt")
    if int(prompt.min()) < 0 or int(prompt.max()) >= vocab:
        wrong = prompt[(prompt < 0) | (prompt >= vocab)][0]
        raise RequestError(
            f"prompt token id {wrong}: the vocabulary has ids 0 to {vocab - 1}", "prompt"
        )
    if len(prompt) >= context:
        raise RequestError(
            f"the prompt has {len(prompt)} tokens; the context is {context} tokens, "
            "answer included",
            "prompt",
        )
    room = context - len(prompt)
    limit = room if params.max_tokens is None else min(params.max_tokens, room)
    blocks = pool.needed(len(prompt) + limit - 1)
    if blocks > pool.blocks:
        raise RequestError(
            f"{len(prompt)} prompt tokens and {limit} new ones need {blocks} KV blocks of "
            f"{pool.block_tokens} tokens; the pool has {pool.blocks}",
            "prompt",
        )
    request = Request(message.request_id, prompt, params, limit, blocks, deadline_s)
    if message.dummy_kv:
        request.injected = len(prompt) - 1  # the first token comes of the prompt's last alone
    return request
