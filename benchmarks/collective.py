"""Is `lockstep` an honest baseline? It beside a plain synchronous engine on `torch.distributed`.

Both run the same checkpoint on two ranks of this machine, a compute thread each, in turn: ours
with everything that a server needs, and `collectiverank.py`, a loop over the layers of a static
batch with Gloo's all-to-all between them. The figures are those of `throughput.py`; `ratio` is ours
to the other's. The tokens of both must be equal.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import roofline
from checkpoints import write_checkpoint
from command import count, counts, run_command
from throughput import rates, synthetic_prompts

RANKS = 2
RANK_FILE = Path(__file__).with_name("collectiverank.py")
Tokens = list[list[int]]


class Collective:
    """The ranks of the plain engine, as children of this process."""

    def __init__(self, model: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS),
                  "OMP_NUM_THREADS": "1"}  # fmt: skip
        self._ranks = [
            subprocess.Popen(
                [sys.executable, str(RANK_FILE), model],
                env={**os.environ, **common, "RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(RANKS)
        ]
        self._answers()

    def run(self, prompts: Tokens, new: int) -> tuple[float, Tokens]:
        """Seconds of the slower rank, and the tokens of all prompts."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(json.dumps({"prompts": prompts, "new": new}) + "\n")
            rank.stdin.flush()
        answers = self._answers()
        tokens: Tokens = [[]] * len(prompts)
        for number, answer in enumerate(answers):
            tokens[number::RANKS] = answer["tokens"]
        return max(answer["seconds"] for answer in answers), tokens

    def _answers(self) -> list[Any]:
        lines = [rank.stdout.readline() for rank in self._ranks if rank.stdout is not None]
        if not all(lines):
            raise SystemExit("a rank of the plain engine has died; see above")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """End the processes."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.close()
        for rank in self._ranks:
            rank.wait(20)


class Ours:
    """asyncmoe with a synchronous rule."""

    def __init__(self, model: str, scheduler: str, transport: str) -> None:
        from asyncmoe import LLM

        settings = {"scheduler.name": scheduler, "transport.name": transport, "device.threads": 1}
        self._llm = LLM(model=model, ranks=RANKS, **{"log.level": "warning"}, **settings)

    def run(self, prompts: Tokens, new: int) -> tuple[float, Tokens]:
        """Seconds, and the tokens of all prompts."""
        from asyncmoe import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
        begin_s = time.perf_counter()
        outputs = self._llm.generate(prompts, params, progress=False)
        return time.perf_counter() - begin_s, [list(output.token_ids) for output in outputs]

    def close(self) -> None:
        """Stop the ranks."""
        self._llm.close()


@contextlib.contextmanager
def engines(arguments: argparse.Namespace, model: str) -> Iterator[list[Any]]:
    """The plain one first."""
    with contextlib.ExitStack() as stack:
        made: list[Any] = []
        for make in (
            lambda: Collective(model),
            lambda: Ours(model, arguments.scheduler, arguments.transport),
        ):
            made.append(make())
            stack.callback(made[-1].close)
        yield made


def compare(engines: list[Any], arguments: argparse.Namespace, batch: int, vocab: int) -> Any:
    """One batch on both, in turn; the best of the repeats."""
    prompts = synthetic_prompts(batch, arguments.prompt, vocab)
    tokens = [engine.run(prompts, 8)[1] for engine in engines]  # warms up, too
    best = [{1: float("inf"), arguments.new: float("inf")} for _ in engines]
    for _ in range(arguments.repeats):
        for new in (1, arguments.new):
            for seconds, engine in zip(best, engines, strict=True):
                seconds[new] = min(seconds[new], engine.run(prompts, new)[0])
    shape = (batch, arguments.prompt, arguments.new)
    plain, ours = (rates(seconds[arguments.new], seconds[1], *shape) for seconds in best)
    return {
        "batch": batch,
        "ours": ours,
        "collective": plain,
        "ratio": ours["decode_tok_s"] / plain["decode_tok_s"],
        "whole_ratio": ours["tok_s"] / plain["tok_s"],
        "equal_tokens": tokens[0] == tokens[1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="checkpoint directory; default makes one")
    parser.add_argument("--batch", type=counts, default=[32, 128], help="of both ranks together")
    parser.add_argument("--prompt", type=count, default=64, help="prompt tokens")
    parser.add_argument("--new", type=count, default=32, help="new tokens")
    parser.add_argument("--repeats", type=count, default=3)
    parser.add_argument("--scheduler", default="lockstep")
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or str(write_checkpoint(Path(folder)))
        vocab = roofline.read_shape(model).vocab
        with engines(arguments, model) as both:
            results = [compare(both, arguments, batch, vocab) for batch in arguments.batch]
    settings = {key: getattr(arguments, key) for key in ("scheduler", "transport", "prompt", "new")}
    if arguments.json:
        print(json.dumps({**settings, "results": results}))
        return
    print(settings)
    print("batch  ours, decode tok/s  collective  ratio  of the whole  equal tokens")
    for r in results:
        print(
            f"{r['batch']:5} {r['ours']['decode_tok_s']:19.1f} "
            f"{r['collective']['decode_tok_s']:11.1f} {r['ratio']:6.2f} {r['whole_ratio']:13.2f} "
            f"{r['equal_tokens']!s:>13}"
        )


if __name__ == "__main__":
    run_command(main)
