"""What a home rank does with its requests: admission, chunks into the layers, tokens out, the end.

The home rank alone decides about a request. Slots and KV blocks of its whole life are reserved at
admission, so nothing is ever preempted and no request in the layers waits for memory.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncmoe import native
from asyncmoe.arrivals import Arrivals
from asyncmoe.chunks import NONE, ChunkTable
from asyncmoe.config import EngineConfig
from asyncmoe.errors import ConfigError, RequestError
from asyncmoe.host import Host
from asyncmoe.kvcache import BlockPool
from asyncmoe.marches import Marches
from asyncmoe.messages import Admit, Ended, TokensOut
from asyncmoe.microqueue import Queues, are_plain
from asyncmoe.request import Request, checked_request
from asyncmoe.rows import Rows
from asyncmoe.sampler import BAD_LOGITS, Course, Sampled
from asyncmoe.samplingtable import GO_ON, STOP, SamplingTable
from asyncmoe.stage import StageChain
from asyncmoe.steps import AttentionResult, AttentionStep, HeadStep
from asyncmoe.tokentable import TokenTable
from asyncmoe.tracks import Tracks
from asyncmoe.transport import Parcel

_FINISH = (None, "stop", "length")
_TOKENS_PER_MESSAGE = 512  # with 20 logprobs each they stay below the least message limit
_MOST_CHUNKS = 4  # of one request in the layers, so that a long prompt leaves slots to others


class Home:
    """The requests of one home rank, from admission to their last token."""

    def __init__(
        self,
        *,
        config: EngineConfig,
        context: int,
        vocab: int,
        chain: StageChain,
        table: TokenTable,
        pool: BlockPool,
        sampling: SamplingTable,
        queues: Queues,
        prune: bool,
        host: Host,
    ) -> None:
        """`prune`: the rows that do not sample need nothing after the last attention stage."""
        if config.slots < config.max_requests + config.prefill_chunk:
            raise ConfigError(
                f"engine.slots = {config.slots}: at least engine.max_requests + "
                f"engine.prefill_chunk = {config.max_requests + config.prefill_chunk}"
            )
        self.table, self.pool, self.sampling = table, pool, sampling
        self.chunks = ChunkTable(config.slots)
        self._tracks = Tracks(chain, self.chunks)
        self._config, self._context, self._vocab = config, context, vocab
        self._chain, self._queues, self._prune = chain, queues, prune
        self._host = host
        self._arrivals = Arrivals(table, host)
        self.books: Any = None  # the tables, for what is compiled
        self.homecoming: Any = None  # `take_in` and `let_go`, compiled
        if native.columns is not None:
            self.books = native.columns.Books(table, self.chunks)
            if not are_plain(queues):
                self.homecoming = native.columns.Homecoming(
                    table,
                    self.books,
                    queues,
                    host.now_s,
                    self._arrivals.see_to,
                    self._arrivals.look,
                )
        self.marches: Marches | None = None  # None: there are none
        self._waiting: deque[Request] = deque()
        self._prefilling: deque[Request] = deque()
        self._by_id: dict[int, Request] = {}
        self._by_row: list[Request | None] = [None] * config.max_requests
        self._free_rows = list(range(config.max_requests - 1, -1, -1))
        # One for each row, in its order, for good: a decode batch touches few lines of the tables.
        self._decode_slot = table.allocate(config.max_requests)[::-1].copy()
        # by row, NONE where the prompt is not through
        self.decode_chunk = np.full(config.max_requests, NONE, np.int64)
        self._length = np.zeros(config.max_requests, np.int64)  # tokens known: prompt and answer
        self._ids = np.zeros(config.max_requests, np.int64)
        self.id_of_row = torch.from_numpy(self._ids)

    @property
    def running(self) -> int:
        """Requests in the layers."""
        return len(self._by_row) - len(self._free_rows)

    @property
    def waiting(self) -> int:
        """Requests that wait for admission."""
        return len(self._waiting)

    @property
    def free_slots(self) -> int:
        """Token slots that no request has."""
        return self.table.free_slots + len(self._free_rows)

    def stats(self) -> dict[str, int]:
        """Gauges by name."""
        return {
            "running_requests": self.running,
            "waiting_requests": self.waiting,
            "free_slots": self.free_slots,
            "slots": self.table.slots,
            "free_kv_blocks": self.pool.free_blocks,
            "kv_blocks": self.pool.blocks,
            "dropped_rows": self.table.dropped_rows,
            "chunks": self.chunks.in_use,
        }

    def occupancy(self) -> list[int]:
        """Requests in the layers and waiting, token slots and KV blocks in use."""
        return [
            self.running,
            self.waiting,
            self.table.slots - self.free_slots,
            self.pool.blocks - self.pool.free_blocks,
        ]

    # ---- admission

    def admit(self, message: Admit) -> None:
        """Queue a request; one that can never run is refused with the numbers."""
        try:
            request = self._checked(message)
        except RequestError as error:
            self._host.emit(Ended(message.request_id, "refused", str(error), error.parameter))
            return
        if len(self._waiting) >= self._config.queue_requests:
            full = f"{len(self._waiting)} requests wait already; try again later"
            self._host.emit(Ended(message.request_id, "overloaded", full))
            return
        self._by_id[request.request_id] = request
        self._waiting.append(request)
        self.pump()

    def _checked(self, message: Admit) -> Request:
        if message.request_id in self._by_id:
            raise RequestError(f"request id {message.request_id} is in use", "request_id")
        timeout_s = self._config.request_timeout_s
        deadline_s = math.inf if timeout_s is None else self._host.now_s() + timeout_s
        return checked_request(message, self._vocab, self._context, self.pool, deadline_s)

    def pump(self) -> None:
        """Admit what fits, in order, and put prefill chunks into the layers while slots last.

        Requests take turns by the chunk, so that a short prompt does not wait for a long one.
        """
        while self._waiting and self._fits(self._waiting[0]):
            self._start(self._waiting.popleft())
        full = 0  # requests at the front in turn that have all the chunks in the layers they may
        while full < len(self._prefilling):
            request = self._prefilling[0]
            rows = min(self._config.prefill_chunk, len(request.prompt) - request.injected)
            if len(request.chunks) >= _MOST_CHUNKS:
                full += 1
            elif rows > self.table.free_slots:
                return  # it keeps its turn
            else:
                full = 0
                self._inject(request, rows)
            self._prefilling.popleft()
            if request.injected < len(request.prompt):
                self._prefilling.append(request)

    def _fits(self, request: Request) -> bool:
        return bool(self._free_rows) and request.blocks <= self.pool.free_blocks

    def _start(self, request: Request) -> None:
        row = request.row = self._free_rows.pop()
        self._by_row[row] = request
        self._ids[row] = request.request_id
        self.pool.reserve(row, request.blocks)
        self.decode_chunk[row] = NONE
        self._length[row] = len(request.prompt)
        self.sampling.set(row, request.params, request.prompt, len(request.prompt) + request.limit)
        self._prefilling.append(request)
        if self.marches is not None:
            self.marches.disturb()

    def _inject(self, request: Request, rows: int) -> None:
        first, last = request.injected, request.injected + rows
        slots = self.table.allocate(rows)
        self.table.token[slots] = request.prompt[first:last]
        self.table.position[slots] = np.arange(first, last)
        earlier = request.chunks[-1] if request.chunks else NONE
        stage, samples = self._tracks.first_stage(earlier), last == len(request.prompt)
        chunk = self.chunks.open(request.row, slots, earlier, samples, stage)
        self.table.chunk[slots] = chunk
        request.chunks.append(chunk)
        request.injected = last
        self._enqueue(self.chunks.may_enter(np.array([chunk])))

    # ---- through the layers

    def _enqueue(self, chunks: NDArray[np.int64]) -> None:
        """Chunks are ready for their stage."""
        if len(chunks):
            now_s = self._host.now_s()
            for stage, ready, rows, total in self.chunks.by_stage(chunks):
                self._queues.put_chunks(stage, ready, rows, now_s, total)

    def leave_attention(
        self, step: AttentionStep, result: AttentionResult
    ) -> tuple[NDArray[np.int64], AttentionResult]:
        """An attention batch is done: move its chunks on.

        Returns slots and results of the rows that go to experts: those that were not cancelled
        meanwhile and, behind the last layer, those that something still needs.
        """
        rows, columns = step.rows, step.rows.columns
        slots, chunks, counts = columns.slots, rows.chunks, columns.counts
        pruned, alive = self.prunes_behind(step), rows.alive(self.table)
        if pruned or not alive.all():
            needed = np.repeat(alive, counts)
            if pruned:
                needed &= self._end_prefill(rows)
            keep = np.flatnonzero(needed)
            slots = slots[keep]
            hidden = result.hidden.index_select(0, torch.from_numpy(keep))
            result = AttentionResult(hidden, result.experts[keep], result.weights[keep])
            counts = np.add.reduceat(needed.astype(np.int64), columns.query_start[:-1])
            chunks, counts = chunks[counts > 0], counts[counts > 0]
        later = self.chunks.leave(chunks, step.stage + 2, counts)
        if len(later):
            self._enqueue(later)
        return slots, result

    def prunes(self, rows: Rows) -> bool:
        """Whether some of these rows are not needed behind the last attention stage."""
        return self._prune and rows.count > rows.gathered.singles

    def prunes_behind(self, step: AttentionStep) -> bool:
        """Whether some rows of this batch go no further."""
        return step.layer == self._chain.layers - 1 and self.prunes(step.rows)

    def wake(self, chunks: NDArray[np.int64]) -> None:
        """`chunks` have left their stage: chunks behind them may now enter it."""
        self._enqueue(self.chunks.woken(chunks))

    def leave_passage(self, rows: Rows, stage: int) -> None:
        """The rows of a passage wait for attention stage `stage` now, with no parts to come."""
        alive = rows.alive(self.table)
        chunks = rows.chunks[alive]
        columns = rows.columns
        self.table.part_count[columns.slots[np.repeat(alive, columns.counts)]] = 0
        later = self.chunks.leave(chunks, stage, np.zeros(len(chunks), np.int64))
        if stage or self.marches is None:
            self._enqueue(chunks)
        else:
            self.marches.enter(chunks)
        self._enqueue(later)

    def _end_prefill(self, rows: Rows) -> NDArray[np.bool_]:
        """Behind the last attention stage only the row that samples goes on; free the others."""
        needed, columns = np.ones(rows.count, np.bool_), rows.columns
        slots, counts = columns.slots, columns.counts
        alive = rows.alive(self.table)
        for segment in np.flatnonzero(alive & (counts > 1)).tolist():
            chunk, end = int(rows.chunks[segment]), int(rows.ends[segment])
            first = end - int(counts[segment])
            if self.chunks.samples[chunk]:
                needed[first : end - 1] = False
                self.table.release(slots[first : end - 1])
                self.chunks.narrow(chunk, slots[end - 1 : end])
            else:
                needed[first:end] = False
                self._close_chunk(chunk)
        return needed

    def _close_chunk(self, chunk: int) -> None:
        """A prefill chunk is through: its slots are free for the next one."""
        request = self._by_row[self.chunks.request[chunk]]
        assert request is not None
        request.chunks.remove(chunk)
        self.table.release(self.chunks.slots[chunk])
        self._enqueue(self.chunks.close(np.array([chunk])))

    def take_in(self, parcel: Parcel, release: Callable[[], None] | None = None) -> None:
        """Combine rows arrived. `release` is called once their memory is read no more."""
        if self.homecoming is not None:
            self.homecoming.take_in(parcel, release)
            return
        done = self.table.arrive(parcel, release)
        if len(done):
            self._enqueue(self.chunks.complete(self.table.chunk[done].astype(np.int64)))
        if release is not None:
            self._arrivals.came()

    def let_go(self) -> None:
        """A stage has ended: release the memory of the rows that it has copied (`Arrivals`)."""
        if self.homecoming is not None:
            self.homecoming.let_go()
        else:
            self._arrivals.let_go()

    def leave_head(self, step: HeadStep, sampled: Sampled | None) -> None:
        """A head batch is done: send its tokens out, start the next step or end the request."""
        alive = step.rows.alive(self.table)
        silent = alive.copy()
        silent[step.sampled_segments] = False
        for chunk in step.rows.chunks[silent].tolist():
            self._close_chunk(chunk)
        if sampled is not None:
            self._leave_sampled(step, sampled, alive[step.sampled_segments])
        self.pump()

    def _leave_sampled(self, step: HeadStep, sampled: Sampled, alive: NDArray[np.bool_]) -> None:
        chunks = step.rows.chunks[step.sampled_segments]
        for i in np.flatnonzero(alive & sampled.bad).tolist():
            row = int(self.chunks.request[chunks[i]])
            request = self._by_row[row]
            assert request is not None
            self._host.wipe(self.pool.table[row, : request.blocks])
            self.end(request.request_id, "failed", BAD_LOGITS)
        keep = np.flatnonzero(alive & ~sampled.bad)
        chunks, tokens = chunks[keep], sampled.tokens[keep]
        rows = self.chunks.requests_of(chunks)
        self.sampling.append(rows, tokens)
        finish = self.sampling.finished(rows, tokens)
        for chunk in chunks[self.decode_chunk[rows] == NONE].tolist():
            self._begin_decode(chunk)
        going = finish == GO_ON
        self._next_step(rows[going], tokens[going])
        logprobs: list[list[Any] | None] = [None] * len(sampled.tokens)
        if sampled.logprobs is not None:
            logprobs = sampled.logprobs.as_lists(len(sampled.tokens))
        stops, reported = (finish == STOP).tolist(), [logprobs[i] for i in keep]
        requests = self._send_out(
            rows, tokens, [_FINISH[code] for code in finish.tolist()], stops, reported
        )
        for i in np.flatnonzero(~going).tolist():
            self._leave_layers(requests[i])
            self._free_memory(requests[i])

    def course(self, rows: Rows) -> Course | None:
        """What lies before decode steps that may go on from H by themselves; else None."""
        requests = self.chunks.requests_of(rows.chunks)
        are_decode = bool((self.decode_chunk[requests] == rows.chunks).all())
        return self.sampling.course(requests) if are_decode else None

    def pass_head(self, rows: Rows, tokens: NDArray[np.int64]) -> None:
        """Rows with a `Course` got `tokens`, end by none of them, and are in their next step."""
        alive = rows.alive(self.table)
        requests, tokens = self.chunks.requests_of(rows.chunks[alive]), tokens[alive]
        self.sampling.append(requests, tokens)
        rows.columns.epochs[alive] = self.table.epoch[self._renew(requests, tokens)]
        count = len(requests)
        self._send_out(requests, tokens, [None] * count, [False] * count, [None] * count)

    def _send_out(
        self,
        rows: NDArray[np.int64],
        tokens: NDArray[np.int64],
        reasons: list[str | None],
        stops: list[bool],
        logprobs: list[list[Any] | None],
    ) -> list[Request]:
        """Tell the front end what each of the request rows got; return the requests."""
        requests = [request for request in map(self._by_row.__getitem__, rows.tolist()) if request]
        ids = [request.request_id for request in requests]
        for first in range(0, len(ids), _TOKENS_PER_MESSAGE):
            at = slice(first, first + _TOKENS_PER_MESSAGE)
            self._host.emit(
                TokensOut(ids[at], tokens[at].tolist(), reasons[at], stops[at], logprobs[at])
            )
        return requests

    def _begin_decode(self, chunk: int) -> None:
        """The prompt is through: from here on the request goes by its decode slot."""
        row, stage = int(self.chunks.request[chunk]), int(self.chunks.stage[chunk])
        self._close_chunk(chunk)
        slots = self._decode_slot[row : row + 1].copy()
        decode = self.chunks.open(row, slots, NONE, True, stage)
        self.table.chunk[slots] = decode
        self.decode_chunk[row] = decode

    def _next_step(self, rows: NDArray[np.int64], tokens: NDArray[np.int64]) -> None:
        self._renew(rows, tokens)
        chunks = self.decode_chunk[rows]
        if self.marches is None:
            self.begin_steps(chunks)
        else:
            self.marches.enter(chunks)

    def begin_steps(self, chunks: NDArray[np.int64]) -> None:
        """Decode chunks, whose tokens are there, go into the queue of A0."""
        self._enqueue(chunks)

    def is_steady(self) -> bool:
        """Whether all running requests decode, and each of their tokens will be the likeliest."""
        rows = np.flatnonzero(self.decode_chunk != NONE)
        return len(rows) == self.running and self.sampling.are_greedy(rows)

    def _renew(self, rows: NDArray[np.int64], tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Decode slots are for the next token now; returns them."""
        slots, chunks = self._decode_slot[rows], self.decode_chunk[rows]
        self.table.renew(slots)
        self.table.token[slots] = tokens
        self.table.position[slots] = self._length[rows]
        self._length[rows] += 1
        self.chunks.stage[chunks] = self._tracks.next_stages(chunks)
        return slots

    # ---- the end

    def expire(self) -> None:
        """End the requests that have taken longer than `engine.request_timeout_s`."""
        now_s = self._host.now_s()
        for request in [r for r in self._by_id.values() if r.deadline_s <= now_s]:
            limit_s = self._config.request_timeout_s
            reason = f"it took longer than engine.request_timeout_s = {limit_s}"
            self.end(request.request_id, "failed", reason)

    def end(self, request_id: int, reason: str, message: str = "") -> None:
        """End a request early ("aborted" or "failed"). An unknown id is ignored: it is over.

        Slots of prefill chunks are free at once, since late rows die on their epochs; the
        request's row, its decode slot and KV blocks when the stages that now run have ended.
        """
        request = self._by_id.get(request_id)
        if request is None:
            return
        self._host.emit(Ended(request_id, reason, message))
        if request.row == NONE:
            self._waiting.remove(request)
            del self._by_id[request_id]
            self.pump()  # it may have stood before one that fits
            return
        slots = np.concatenate(
            [*(self.chunks.slots[c] for c in request.chunks), self._decode_slot[[request.row]]]
        )
        away = slots[self.table.open[slots] != 0]
        if len(away):
            self._host.discard(away, self.table.epoch[away])
        self._leave_layers(request)
        self._host.after_running(lambda: self._free_memory(request))

    def _leave_layers(self, request: Request) -> None:
        """Give slots and chunks back."""
        row = request.row
        chunks = list(request.chunks)
        for chunk in chunks:
            self.table.release(self.chunks.slots[chunk])
        self.table.renew(self._decode_slot[[row]])
        if (decode := int(self.decode_chunk[row])) != NONE:
            chunks.append(decode)
            if self.marches is not None:
                self.marches.leaves(decode)
        for chunk in chunks:
            self._queues.remove_chunks(int(self.chunks.stage[chunk]), np.array([chunk]))
        self.chunks.close(np.array(chunks, np.int64))
        request.chunks.clear()
        if request in self._prefilling:
            self._prefilling.remove(request)
        del self._by_id[request.request_id]

    def _free_memory(self, request: Request) -> None:
        """No running stage reads or writes the request's cache any more."""
        row = request.row
        self._arrivals.settle()
        self.pool.release(row, request.blocks)
        self.sampling.clear(row)
        self._by_row[row] = None
        self.decode_chunk[row] = NONE
        self._free_rows.append(row)
        self.pump()
        if self.marches is not None:
            self.marches.look()

    def request_of(self, chunk: int) -> int:
        """Id of the request that a chunk in the layers belongs to."""
        request = self._by_row[int(self.chunks.request[chunk])]
        assert request is not None
        return request.request_id

    @property
    def request_ids(self) -> list[int]:
        """Ids of all requests that wait or run."""
        return list(self._by_id)
