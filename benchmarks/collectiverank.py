"""One rank of a plain synchronous engine: a static batch, a loop over the layers, and collectives
of `torch.distributed` (Gloo) between the ranks; on the model class and the kernels of asyncmoe.

Each rank holds half of the requests and half of the experts. A layer is: attention and router, an
all-to-all of sizes, an all-to-all of the rows with their (expert, weight) columns, the experts, an
all-to-all of the partial sums back, and their sum. Nothing is admitted, streamed or cancelled.

Started by `collective.py`, which writes jobs to standard input, one JSON object a line, and reads a
line of JSON for each: {"prompts": [[ids]], "new": N} gives {"tokens": [[ids]], "seconds": S}.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from asyncmoe import native
from asyncmoe.checkpoint import open_checkpoint
from asyncmoe.config import ModelConfig, PlacementConfig
from asyncmoe.cores import core_share
from asyncmoe.kvcache import BlockPool, cache_tensors
from asyncmoe.microqueue import Hold, RowSegment, Taken
from asyncmoe.model import RowBatch
from asyncmoe.packed import PackedParcel, column_bytes
from asyncmoe.placement import make_placement
from asyncmoe.routing import Router
from asyncmoe.stage import StageChain
from asyncmoe.steps import ExpertStep
from asyncmoe.transport import ParcelClass
from asyncmoe.world import World

BLOCK_TOKENS = 16
ALIGNMENT = 64  # of what one rank sends to another within the bytes of an all-to-all


class StaticRank:
    """The model and the caches of one rank."""

    def __init__(self, model: str, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        checkpoint = open_checkpoint(ModelConfig(name=model))
        self.spec = spec = checkpoint.spec
        layers = len(spec.moe_layers)
        placement = make_placement(PlacementConfig(), world, layers, spec.experts)
        self.model = checkpoint.load(placement.load_plan(rank), torch.device("cpu"))
        self.chain = StageChain(layers)
        self.router = Router(self.chain, placement.owner, world, per_expert=False)
        self.local = np.where(placement.owner == rank, placement.local.astype(np.int64), -1)

    def generate(self, prompts: list[list[int]], new: int) -> list[list[int]]:
        """Greedy tokens after prompts of equal length, those of this rank."""
        count, length = len(prompts), len(prompts[0])
        blocks = -(-(length + new) // BLOCK_TOKENS)
        self.pool = BlockPool(count * blocks, BLOCK_TOKENS, count, self.spec.context)
        for row in range(count):
            self.pool.reserve(row, blocks)
        self.cache = cache_tensors(
            self.spec, count * blocks, BLOCK_TOKENS, count, torch.device("cpu")
        )
        ids = torch.tensor(prompts)
        tokens: list[Tensor] = []
        for step in range(new):
            first = 0 if step == 0 else length + step - 1
            last = self._step(ids, first)
            ids = self.model.logits(last).argmax(-1, keepdim=True)
            tokens.append(ids)
        return torch.cat(tokens, 1).tolist()

    def _step(self, ids: Tensor, first: int) -> Tensor:
        """All layers for `ids` [requests, rows of each], at positions from `first` on.

        Returns the hidden state of each request's last row.
        """
        requests, each = ids.shape
        batch = self._batch(requests, each, first)
        x = self.model.embed(ids.flatten())
        slots = np.arange(len(x))
        for layer in range(self.chain.layers):
            routed = self.model.attention(layer, x, batch, self.cache)
            parcels = self.router(
                self.chain.expert(layer), slots, slots.astype(np.uint32), routed.hidden,
                routed.experts.numpy(), routed.weights.numpy(),
            ).parcels  # fmt: skip
            x = self._exchange(layer, routed.residual, dict(parcels))
        x = self.model.finish(x, batch, self.cache)
        return x[each - 1 :: each]

    def _batch(self, requests: int, each: int, first: int) -> RowBatch:
        rows = np.arange(requests).repeat(each)
        positions = np.tile(np.arange(first, first + each), requests)
        used = -(-(first + each) // BLOCK_TOKENS)
        return RowBatch(
            positions=torch.from_numpy(positions),
            cache_index=torch.from_numpy(self.pool.index(rows, positions)),
            decode_rows=requests if each == 1 else 0,
            query_start=torch.arange(requests + 1) * each,
            context_len=torch.full((requests,), first + each),
            block_table=torch.from_numpy(self.pool.table[:, :used]),
            request=torch.arange(requests),
            block_tokens=BLOCK_TOKENS,
        )

    def _exchange(self, layer: int, residual: Tensor, parcels: dict[int, PackedParcel]) -> Tensor:
        """Rows to the ranks of their experts, through these, back, and onto the residual."""
        sizes = torch.tensor(
            [[parcels[r].count, parcels[r].pairs] if r in parcels else [0, 0]
             for r in range(self.world)]
        )  # fmt: skip
        theirs = torch.empty_like(sizes)
        dist.all_to_all_single(theirs, sizes)
        segments = self._forth(layer, parcels, sizes.tolist(), theirs.tolist())
        out = residual[:0]
        if segments:
            taken, local = Taken(segments), self.local[layer]
            out = ExpertStep(
                self.chain.expert(layer), layer, self.model, taken, taken.rows, local,
                int((local >= 0).sum()), per_expert=False,
            )()  # fmt: skip
        back = residual.new_empty((int(sizes[:, 0].sum()), residual.shape[1]))
        dist.all_to_all_single(
            as_bytes(back), as_bytes(out), *(self._row_bytes(t) for t in (sizes, theirs))
        )
        total, at = residual.float(), 0
        for rank in range(self.world):
            if rank in parcels:
                rows = torch.from_numpy(parcels[rank].slot.astype(np.int64))
                total.index_add_(0, rows, back[at : at + len(rows)].float())
                at += len(rows)
        return total.to(residual.dtype)

    def _row_bytes(self, sizes: Tensor) -> list[int]:
        row: list[int] = (sizes[:, 0] * self.spec.row_bytes).tolist()
        return row

    def _forth(
        self,
        layer: int,
        parcels: dict[int, PackedParcel],
        sizes: list[list[int]],
        theirs: list[list[int]],
    ) -> list[RowSegment]:
        """Send each rank its rows and columns, and take in those for this one."""
        sent, taken = ([self._sent_bytes(*pair) for pair in of] for of in (sizes, theirs))
        outgoing = torch.empty(sum(sent), dtype=torch.uint8)
        incoming = torch.empty(sum(taken), dtype=torch.uint8)
        at = 0
        for rank, length in enumerate(sent):
            if length:
                parcel = parcels[rank]
                rows = parcel.count * self.spec.row_bytes
                outgoing[at : at + rows] = as_bytes(parcel.payload)
                block = torch.frombuffer(bytearray(parcel.block), dtype=torch.uint8)
                outgoing[at + rows : at + rows + len(block)] = block
            at += length
        dist.all_to_all_single(incoming, outgoing, taken, sent)
        segments, at = [], 0
        for rank, length in enumerate(taken):
            if length:
                segments.append(self._segment(layer, rank, *theirs[rank], incoming[at:]))
            at += length
        return segments

    def _sent_bytes(self, rows: int, pairs: int) -> int:
        size = rows * self.spec.row_bytes + column_bytes(ParcelClass.DISPATCH, rows, pairs)
        return -(-size // ALIGNMENT) * ALIGNMENT

    def _segment(self, layer: int, source: int, rows: int, pairs: int, data: Tensor) -> RowSegment:
        size = rows * self.spec.row_bytes
        columns: NDArray[np.uint8] = data.numpy()[size:]
        block = columns[: column_bytes(ParcelClass.DISPATCH, rows, pairs)].data
        payload = data[:size].view(self.spec.dtype).view(rows, self.spec.hidden)
        stage = self.chain.expert(layer)
        parcel = PackedParcel(ParcelClass.DISPATCH, stage, rows, pairs, block, payload)
        return RowSegment(source, parcel, Hold(rows), 0.0, 0)


def as_bytes(rows: Tensor) -> Tensor:
    """A contiguous tensor as its bytes."""
    return rows.view(torch.uint8).flatten()


def main() -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    if native.kernels is not None:
        native.kernels.set_threads(1)
    dist.init_process_group("gloo")
    cores = core_share(World(rank, world, rank, world), 1)
    if cores is not None:  # this thread, which computes, and not those of Gloo, as in our ranks
        os.sched_setaffinity(0, cores)
    with torch.inference_mode():
        static = StaticRank(sys.argv[1], rank, world)
        print(json.dumps("ready"), flush=True)
        for line in sys.stdin:
            job: dict[str, Any] = json.loads(line)
            begin_s = time.perf_counter()
            tokens = static.generate(job["prompts"][rank::world], job["new"])
            seconds = time.perf_counter() - begin_s
            print(json.dumps({"tokens": tokens, "seconds": seconds}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
