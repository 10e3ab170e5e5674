"""The engine for scripts and notebooks: blocking calls, answers in the order of the prompts."""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

from tqdm.auto import tqdm

from asyncmoe import configfile
from asyncmoe.config import Config
from asyncmoe.configflags import ALIASES
from asyncmoe.errors import RequestError, UnknownName
from asyncmoe.frontend.engine import AsyncEngine
from asyncmoe.frontend.loopthread import LoopThread, Work
from asyncmoe.frontend.output import RequestOutput
from asyncmoe.frontend.prompts import Prompt, list_prompts
from asyncmoe.frontend.together import together
from asyncmoe.sampling import SamplingParams

T = TypeVar("T")
Message = Mapping[str, Any]


class LLM:
    """A model over one or several ranks, with blocking calls.

    The engine runs on a thread of its own; its other ranks are processes that this object starts
    and stops. Use it as a context manager, or `close()` it; what is still open when the script
    ends, or when the object is collected, is closed then.
    """

    def __init__(self, model: str = "tiny", ranks: int | None = None, **settings: Any) -> None:
        """Start the engine; returns when all ranks have loaded their weights.

        `ranks` is 1 by default. `settings` are config keys: dotted (`**{"kv.blocks": 512}`), or by
        their last part where that is unique (`prefill_chunk=64`), or by the short name of their
        flag (`dtype`, `scheduler`, `transport`, `threads`).

        Raises `ConfigError`, `CheckpointError`, `RankFailed`.
        """
        overrides = {"model.name": model, "cluster.ranks": ranks, **_by_path(settings)}
        config = configfile.load(overrides=overrides)
        self._thread = LoopThread("asyncmoe")
        try:
            self._engine = self._thread.submit(AsyncEngine.start(config)).wait()
        except BaseException:
            self._thread.stop()
            raise
        self._finalizer = weakref.finalize(self, _close, self._thread, self._engine)
        self._finalizer.atexit = False
        # atexit comes too late for an orderly end: by then no thread pool takes work any more.
        threading._register_atexit(self._finalizer)  # type: ignore[attr-defined]

    @property
    def config(self) -> Config:
        """The whole configuration, with what the start has filled in."""
        return self._engine.config

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Answer one prompt or many, each text or token ids; one output per prompt, in order.

        Ids may be in arrays and tensors too.

        `params` is for all prompts, or one for each. Each output holds the whole answer. The first
        prompt that is refused raises `RequestError` and stops the others.
        """
        return self._answer(list_prompts(prompts), params, progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation or many: `{"role": ..., "content": ...}` messages, as `generate`.

        Raises `RequestError` if the checkpoint has no chat template.
        """
        single = len(messages) > 0 and isinstance(messages[0], Mapping)
        listed = cast("list[Prompt]", [messages] if single else list(messages))
        return self._answer(listed, params, progress)

    def stats(self) -> dict[int, dict[str, Any]]:
        """The counters of every rank, by rank."""
        return self._submit(self._engine.stats()).wait()

    def close(self) -> None:
        """Stop all ranks and wait for them. Idempotent."""
        self._finalizer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _submit(self, work: Coroutine[Any, Any, T]) -> Work[T]:
        if not self._finalizer.alive:
            work.close()
            raise RuntimeError("this LLM is closed")
        return self._thread.submit(work)

    def _answer(
        self,
        prompts: list[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        progress: bool,
    ) -> list[RequestOutput]:
        given: Any = SamplingParams() if params is None else params
        each = list(given) if isinstance(given, Sequence) else [given] * len(prompts)
        for one in each:
            if not isinstance(one, SamplingParams):
                raise RequestError(f"params are {one!r:.80}; allowed: SamplingParams", "params")
        if len(each) != len(prompts):
            raise RequestError(f"{len(prompts)} prompts and {len(each)} SamplingParams", "params")
        outputs: list[RequestOutput | None] = [None] * len(prompts)
        answering = self._submit(
            _answer_all(self._engine, zip(prompts, each, strict=True), outputs)
        )
        with tqdm(total=len(prompts), unit="request", disable=not progress, leave=True) as bar:
            tokens_before, start_s = self._engine.tokens_out, time.monotonic()

            def draw() -> None:
                tokens = self._engine.tokens_out - tokens_before
                rate = tokens / max(time.monotonic() - start_s, 1e-9)
                bar.set_postfix_str(f"{rate:.1f} tokens/s", refresh=False)
                bar.update(sum(output is not None for output in outputs) - bar.n)

            answering.wait(draw)
        return cast("list[RequestOutput]", outputs)


async def _answer_all(
    engine: AsyncEngine,
    work: Iterable[tuple[Prompt, SamplingParams]],
    outputs: list[RequestOutput | None],
) -> None:
    """Fill `outputs`, with no more requests at a time than keep all home ranks busy."""

    async def worker(todo: Iterator[tuple[int, tuple[Prompt, SamplingParams]]]) -> None:
        for index, (prompt, params) in todo:
            async with engine.generate(prompt, params) as generation:
                outputs[index] = await generation.complete()

    todo = iter(enumerate(work))
    await together(worker(todo) for _ in range(min(engine.request_window, len(outputs))))


def _close(thread: LoopThread, engine: AsyncEngine) -> None:
    if thread.is_current:  # collected on the loop's own thread, which cannot wait for itself
        engine.loop.create_task(engine.close()).add_done_callback(lambda _: engine.loop.stop())
        return
    try:
        thread.submit(engine.close()).wait()
    finally:
        thread.stop()


def _by_path(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings by the path of their config key. Raises `UnknownName`."""
    short = {alias.removeprefix("--").replace("-", "_"): path for alias, path in ALIASES.items()}
    keys = configfile.keys()
    leaves = Counter(key.name for key in keys.values())
    unique = {key.name: path for path, key in keys.items() if leaves[key.name] == 1}
    names = {**unique, **short}
    for name in settings:
        if "." not in name and name not in names:
            raise UnknownName("setting", name, names)
    return {names.get(name, name): value for name, value in settings.items()}
