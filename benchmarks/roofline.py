"""The least time that a step can take here, from its bytes and operations and this machine's rates.

A step reads every weight that it needs once, of the experts only those that are hit, and the K/V of
all earlier positions. Its time is at least bytes / bandwidth and at least operations / product
rate, whichever is longer: that is the roofline (Williams, Waterman and Patterson, 2009), and every
measured rate is a fraction of it. Weights count as wide as the checkpoint has them, and operations
at the fastest dtype's rate. Norms, rotations, activations and sampling are left out; the rows'
own memory is small and stays in the caches.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoints import write_config
from command import counts, run_command
from machine import Machine, measure_machine

from asyncmoe.checkpoint import open_checkpoint
from asyncmoe.cli.numberflags import number
from asyncmoe.config import ModelConfig
from asyncmoe.models.hfconfig import ConfigReader


@dataclass(frozen=True, slots=True)
class Work:
    """What one kind of stage needs in one step, all layers together."""

    bytes: float = 0.0  # read from memory, and K/V written
    ops: float = 0.0  # a multiplication and an addition are two

    def __add__(self, other: Work) -> Work:
        return Work(self.bytes + other.bytes, self.ops + other.ops)

    def least_s(self, machine: Machine) -> float:
        """The longer of the two."""
        return max(self.bytes / machine.read_bytes_s, self.ops / machine.ops_s)


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a model decides its bytes and operations. Counts in elements."""

    hidden: int
    vocab: int
    layers: int
    moe_layers: int
    query: int  # width of all query heads together
    kv: int  # width of all key heads together; values are as wide
    experts: int
    top_k: int
    expert_width: int
    dense_width: int
    window: int | None
    weight_bytes: int  # of one weight
    cache_bytes: int  # of one number in the KV cache

    @property
    def attention_weights(self) -> int:
        """Of one layer's projections."""
        return self.hidden * (2 * self.query + 2 * self.kv)

    @property
    def expert_weights(self) -> int:
        """Of one expert."""
        return 3 * self.hidden * self.expert_width

    def distinct_experts(self, rows: float) -> float:
        """Experts of a layer that are hit by `rows` tokens, if all are equally likely."""
        return self.experts * (1 - (1 - self.top_k / self.experts) ** rows)


def read_shape(model: str) -> Shape:
    """From a checkpoint directory's config.json, or a built-in model's."""
    checkpoint = open_checkpoint(ModelConfig(name=model, load_format="dummy"))
    plan: Any = checkpoint.model_class
    blueprint, spec = plan.blueprint(ConfigReader(checkpoint.config)), checkpoint.spec
    return Shape(
        hidden=blueprint.hidden,
        vocab=blueprint.vocab,
        layers=blueprint.layers,
        moe_layers=len(blueprint.moe_layers),
        query=blueprint.heads * blueprint.head_dim,
        kv=blueprint.kv_heads * blueprint.head_dim,
        experts=blueprint.experts,
        top_k=blueprint.top_k,
        expert_width=blueprint.expert_width,
        dense_width=blueprint.dense_width,
        window=blueprint.window,
        weight_bytes=spec.dtype.itemsize,
        cache_bytes=spec.dtype.itemsize,
    )


def decode_step(shape: Shape, batch: int, context: float) -> dict[str, Work]:
    """One token for each of `batch` requests that have `context` earlier tokens on average."""
    return step(shape, rows=batch, read=batch * context, scored=batch * context, head_rows=batch)


def prefill(shape: Shape, batch: int, prompt: int) -> dict[str, Work]:
    """The prompts of `batch` requests, at once, up to each one's first token."""
    rows = batch * prompt
    return step(shape, rows=rows, read=0, scored=rows * (prompt + 1) / 2, head_rows=batch)


def step(shape: Shape, *, rows: int, read: float, scored: float, head_rows: int) -> dict[str, Work]:
    """Work by kind of stage.

    `read`: cached positions that are read, `scored`: pairs of a row and a position that it attends
    to, both over all requests.
    """
    if shape.window is not None:  # no row looks further back
        scored = min(scored, rows * shape.window)
        read = min(read, rows * shape.window)

    def product(weights: float, times: float) -> Work:
        return Work(weights * shape.weight_bytes, 2 * weights * times)

    cache_row = 2 * shape.kv * shape.cache_bytes  # bytes of a position's key and value
    attention = product(shape.attention_weights * shape.layers, rows) + Work(
        (read + rows) * cache_row * shape.layers, 4 * scored * shape.query * shape.layers
    )
    dense_layers = shape.layers - shape.moe_layers
    attention += product(3 * shape.hidden * shape.dense_width * dense_layers, rows)
    hit = shape.distinct_experts(rows) * shape.expert_weights * shape.moe_layers
    picks = rows * shape.top_k * shape.expert_weights * shape.moe_layers
    return {
        "attention": attention,
        "router": product(shape.hidden * shape.experts * shape.moe_layers, rows),
        "experts": Work(hit * shape.weight_bytes, 2 * picks),
        "head": product(shape.vocab * shape.hidden, head_rows),
    }


def total(parts: dict[str, Work]) -> Work:
    """All kinds together."""
    return sum(parts.values(), Work())


def report(shape: Shape, machine: Machine, batch: int, context: float) -> dict[str, Any]:
    """The limit of one decode step, as it is printed with --json."""
    parts = decode_step(shape, batch, context)
    whole = total(parts)
    least_s = whole.least_s(machine)
    by_bytes = whole.bytes / machine.read_bytes_s >= whole.ops / machine.ops_s
    return {
        "batch": batch,
        "context": context,
        "distinct_experts": shape.distinct_experts(batch),
        "stages": {kind: _numbers(work, machine) for kind, work in parts.items()},
        "total": _numbers(whole, machine),
        "bound": "bytes" if by_bytes else "operations",
        "decode_tok_s": batch / least_s,
    }


def _numbers(work: Work, machine: Machine) -> dict[str, float]:
    return {"bytes": work.bytes, "ops": work.ops, "least_ms": 1e3 * work.least_s(machine)}


def print_table(machine: Machine, results: list[dict[str, Any]]) -> None:
    """What `--json` prints, for people."""
    rates = machine.report()
    products = ", ".join(f"{name} {rate:.0f}" for name, rate in rates["gflop_s"].items())
    print(f"{rates['threads']} threads read {rates['read_gb_s']:.1f} GB/s; GFLOP/s: {products}\n")
    print("batch  stage            MB   MFLOP  least ms")
    for each in results:
        for kind, work in [*each["stages"].items(), ("total", each["total"])]:
            print(
                f"{each['batch']:5}  {kind:<9} {work['bytes'] / 1e6:9.1f} {work['ops'] / 1e6:7.0f} "
                f"{work['least_ms']:9.2f}"
            )
        print(f"       at most {each['decode_tok_s']:.0f} tokens/s, bound by {each['bound']}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="checkpoint directory; default: the benchmarks' own shape")
    parser.add_argument("--batch", type=counts, default=[1, 8, 32, 128])
    parser.add_argument(
        "--context", type=number(0.0, 1e9), default=96, help="earlier tokens of a request"
    )
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        shape = read_shape(arguments.model or str(write_config(Path(folder), {})))
    machine = measure_machine()
    results = [report(shape, machine, batch, arguments.context) for batch in arguments.batch]
    if arguments.json:
        print(json.dumps({"machine": machine.report(), "results": results}))
    else:
        print_table(machine, results)


if __name__ == "__main__":
    run_command(main)
