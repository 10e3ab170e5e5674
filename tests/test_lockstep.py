"""The synchronous rules: what waits for what, who takes part, and that nobody hangs."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncmoe.chunks import NONE, ChunkTable
from asyncmoe.config import Config
from asyncmoe.directory import MemoryDirectory
from asyncmoe.errors import ConfigError, ProtocolError
from asyncmoe.rank import Rank
from asyncmoe.scheduler import SchedulerContext
from asyncmoe.schedulers.barrier import Notice, Word, decode, encode
from asyncmoe.schedulers.lockstep import Lockstep
from asyncmoe.schedulers.two_batch import TwoBatch
from asyncmoe.stage import Kind, StageChain
from asyncmoe.tracks import Tracks
from asyncmoe.world import World
from tests import toymodel
from tests.cluster import Cluster, cluster
from tests.test_engine_toy import PROMPTS, sections

RULES = [("lockstep", {}), ("lockstep", {"exchange": "all_gather"}), ("two_batch", {})]
Log = dict[tuple[int, int], dict[str, list[int]]]  # (track, round): moments of what happened


def rule(name: str, **parameters: Any) -> dict[str, Any]:
    return {"name": name, "parameters": parameters}


async def run(engine: Cluster, home: int | None = None, new: int = 6) -> None:
    """All prompts at once; their tokens must be right, and nothing left."""
    ids = [engine.submit(prompt, home=home, max_tokens=new) for prompt in PROMPTS]
    await engine.ended(*ids)
    for request_id, prompt in zip(ids, PROMPTS, strict=True):
        assert engine.tokens[request_id] == toymodel.reference(prompt, new, toymodel.spec())
    await engine.settled()


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    """When batches of all ranks began and ended, by track and round."""
    found: Log = defaultdict(lambda: defaultdict(list))
    moment = iter(range(1 << 30))
    rounds: dict[tuple[int, int], list[int]] = defaultdict(list)  # of batches that run, by rank
    executed, finished = Lockstep.executed, Lockstep.finished

    def note(self: Lockstep, what: str, stage: int, round: int) -> None:
        chain = self.context.chain
        kind = "expert" if chain.kinds[stage] is Kind.EXPERT else "home"
        found[chain.track(stage), round][f"{kind} {what}"].append(next(moment))

    def on_executed(self: Lockstep, stage: int, rows: int) -> None:
        round = self._track_of(stage).side(stage).round
        rounds[self.context.peers.rank, stage].append(round)
        note(self, "began", stage, round)
        executed(self, stage, rows)

    def on_finished(self: Lockstep, stage: int) -> None:
        note(self, "ended", stage, rounds[self.context.peers.rank, stage].pop(0))
        finished(self, stage)

    monkeypatch.setattr(Lockstep, "executed", on_executed)
    monkeypatch.setattr(Lockstep, "finished", on_finished)
    return found


@pytest.mark.parametrize("batch", [{}, {"attention_max_rows": 8, "expert_max_rows": 8}])
@pytest.mark.parametrize(("name", "parameters"), RULES)
async def test_no_rank_begins_a_stage_before_all_have_ended_the_one_before(
    name: str, parameters: dict[str, Any], batch: dict[str, int], log: Log
) -> None:
    config = sections(scheduler=rule(name, **parameters), batch=batch)
    async with cluster(3, toymodel.checkpoint(), **config) as engine:
        await run(engine)
    assert len(log) > 3 * 7  # three layers, at least seven steps
    for (track, round), seen in log.items():
        following = log.get((track, round + 1), {})
        assert max(seen["home ended"]) < min(seen["expert began"], default=1 << 30)
        if "home began" in following and seen["expert ended"]:
            assert max(seen["expert ended"]) < min(following["home began"])


async def test_micro_batches_overlap_and_have_about_as_many_rows(log: Log) -> None:
    config = sections(scheduler=rule("two_batch", micro_batches=2))
    async with cluster(2, toymodel.checkpoint(), **config) as engine:
        home = engine.ranks[0].home
        assert home is not None
        ids = [engine.submit([i, 1, 2], home=0, max_tokens=30) for i in range(7)]
        await engine.until(lambda: all(len(engine.tokens[i]) > 8 for i in ids))
        assert sorted(home._tracks._rows().tolist()) == [3, 4]
        await engine.ended(*ids)
    spans = {key: (min(seen["home began"]), max(seen["home ended"])) for key, seen in log.items()}
    inside = [
        key for key, (begin, _) in spans.items() for other, span in spans.items()
        if key[0] != other[0] and span[0] < begin < max(log[other].get("expert ended", [0]))
    ]  # fmt: skip
    assert inside  # a round of one track begins within one of the other


@pytest.mark.parametrize(("name", "parameters"), RULES)
async def test_ranks_without_requests_take_part(name: str, parameters: dict[str, Any]) -> None:
    async with cluster(
        3, toymodel.checkpoint(), **sections(scheduler=rule(name, **parameters))
    ) as engine:
        await run(engine, home=1, new=3)


@pytest.mark.parametrize(
    ("ranks", "attention_ranks", "name", "transport"),
    [
        (2, 1, "defrag_aging", "tcp"),
        (2, 1, "lockstep", "inproc"),
        (2, 1, "two_batch", "tcp"),
        (4, 1, "defrag_aging", "inproc"),
        (4, 1, "lockstep", "tcp"),
        (4, 3, "defrag_aging", "tcp"),
        (4, 3, "two_batch", "inproc"),
        (4, 2, "defrag_aging", "inproc"),
        (4, 2, "lockstep", "tcp"),
        (4, 2, "two_batch", "tcp"),
    ],
)
async def test_attention_and_expert_ranks_apart_in_any_ratio(
    ranks: int, attention_ranks: int, name: str, transport: str
) -> None:
    config = sections(
        scheduler=rule(name),
        placement={"attention_ranks": attention_ranks},
        transport={"name": transport},
    )
    async with cluster(ranks, toymodel.checkpoint(), **config) as engine:
        assert [rank.home is not None for rank in engine.ranks] == [
            rank < attention_ranks for rank in range(ranks)
        ]
        ids = [
            engine.submit(p, home=i % attention_ranks, max_tokens=4) for i, p in enumerate(PROMPTS)
        ]
        await engine.ended(*ids)
        for request_id, prompt in zip(ids, PROMPTS, strict=True):
            assert engine.tokens[request_id] == toymodel.reference(prompt, 4, toymodel.spec())
        await engine.settled()


@pytest.mark.parametrize("exchange", ["all_to_all", "all_gather"])
async def test_each_form_of_the_exchange_sends_the_rows_that_it_says(exchange: str) -> None:
    spec = toymodel.spec(experts=8, top_k=1)
    config = sections(scheduler=rule("lockstep", exchange=exchange))
    async with cluster(4, toymodel.checkpoint(spec), **config) as engine:
        await engine.ended(engine.submit(list(range(8)), home=0, max_tokens=1))
        sent = [rank.stats()["sent_bytes"] // spec.row_bytes for rank in engine.ranks]
    rows = 8 + 8 + 1  # only the last goes on behind the last attention stage
    assert sent[0] == sum(sent[1:])  # as many come back
    if exchange == "all_gather":
        assert sent == [3 * rows, rows, rows, rows]
    else:
        assert 0 < sent[0] <= rows


@pytest.mark.parametrize(("name", "parameters"), RULES)
async def test_cancelled_rows_hold_no_barrier_up(name: str, parameters: dict[str, Any]) -> None:
    config = sections(
        scheduler=rule(name, **parameters), transport={"name": "tcp", "window_rows": 4}
    )
    async with cluster(3, toymodel.checkpoint(), **config) as engine:
        doomed = [engine.submit(prompt, max_tokens=60) for prompt in PROMPTS]
        kept = [engine.submit(prompt, max_tokens=3) for prompt in PROMPTS[:6]]
        for request_id in doomed:
            engine.abort(request_id)
            await engine.until(lambda request_id=request_id: request_id in engine.end)
        await engine.ended(*kept)
        for request_id, prompt in zip(kept, PROMPTS, strict=False):
            assert engine.tokens[request_id] == toymodel.reference(prompt, 3, toymodel.spec())
        await engine.settled()


@pytest.mark.parametrize("name", ["lockstep", "two_batch"])
async def test_requests_fail_by_name_when_a_rank_with_experts_is_lost(name: str) -> None:
    async with cluster(3, toymodel.checkpoint(), **sections(scheduler=rule(name))) as engine:
        ids = [engine.submit([1, 2, 3], home=home, max_tokens=100) for home in (0, 1)]
        await engine.until(lambda: all(engine.tokens[i] for i in ids))
        engine.ranks[2].transport.abort()
        await engine.ended(*ids)
        assert [engine.end[i] for i in ids] == ["failed", "failed"]
        assert all("rank 2 is lost" in engine.message[i] for i in ids)


@pytest.mark.parametrize("name", ["lockstep", "two_batch"])
async def test_the_others_go_on_when_a_rank_without_experts_is_lost(name: str) -> None:
    config = sections(scheduler=rule(name), placement={"attention_ranks": 2})
    async with cluster(3, toymodel.checkpoint(), **config) as engine:
        lost, kept = (engine.submit([1, 2, 3], home=home, max_tokens=60) for home in (1, 0))
        await engine.until(lambda: engine.tokens[lost] and engine.tokens[kept])
        engine.ranks[1].transport.abort()
        await engine.ended(kept)
        assert engine.tokens[kept] == toymodel.reference([1, 2, 3], 60, toymodel.spec())


async def test_ranks_whose_rules_differ_do_not_start() -> None:
    made = [
        Config.model_validate({"cluster": {"ranks": 2, "token": "test"}, "scheduler": which})
        for which in (rule("lockstep"), rule("lockstep", exchange="all_gather"))
    ]
    directory = MemoryDirectory()
    ranks = [
        Rank(config, World(i, 2, i, 2), directory, toymodel.checkpoint())
        for i, config in enumerate(made)
    ]
    said = r"scheduler.parameters.exchange is all_gather on rank 1 and all_to_all on rank 0"
    try:
        start = asyncio.create_task(ranks[0].start())
        with pytest.raises(ConfigError, match=said):
            await ranks[1].start()
        start.cancel()
        await asyncio.wait([start])
    finally:
        await asyncio.gather(*(rank.close() for rank in ranks))


@pytest.mark.parametrize("name", ["lockstep", "two_batch"])
async def test_barrier_holds_no_memory_that_the_transport_needs_for_more(name: str) -> None:
    config = sections(
        scheduler=rule(name),
        batch={"attention_max_rows": 8},  # several parcels for a stage
        transport={
            "name": "shm", "parcel_bytes": 4096, "options": {"slots": 1, "slot_bytes": 4096},
        },
    )  # fmt: skip
    async with cluster(2, toymodel.checkpoint(), **config) as engine:
        await run(engine, new=2)


async def test_partial_sums_of_all_ranks_and_parts_per_expert_do_not_go_together() -> None:
    config = sections(
        scheduler=rule("lockstep", exchange="all_gather"), engine={"combine": "per_expert"}
    )
    with pytest.raises(ConfigError, match="allowed is per_rank"):
        async with cluster(1, toymodel.checkpoint(), **config):
            raise AssertionError


def lockstep(kind: type[Lockstep] = Lockstep, **parameters: Any) -> Lockstep:
    made = kind.Parameters(**parameters)
    return kind(SchedulerContext(StageChain(2, made.tracks), 1.0), made)


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\1" * 26,
        encode(Notice(Word.CALL, 0, 5)),
        encode(Notice(Word.CALL, 1, 0)),
        encode(Notice(Word.CALL, 0, 0, rows=3, sent=4)),
        encode(Notice(Word.CALL, 0, 0, rows=1 << 63)),
        encode(Notice(Word.ANSWER, 0, 0)),
        encode(Notice(9, 0, 0)),
    ],
)
def test_notice_that_makes_no_sense_is_refused(message: bytes) -> None:
    with pytest.raises(ProtocolError):
        lockstep().heard(0, message)


@given(st.binary(max_size=40) | st.binary(min_size=27, max_size=27))
def test_bytes_are_a_notice_or_a_fault_of_the_sender(data: bytes) -> None:
    try:
        notice = decode(data)
    except ProtocolError:
        return
    assert encode(notice) == data
    assert 0 <= notice.sent <= notice.rows


@pytest.mark.parametrize("name", ["lockstep", "two_batch"])
async def test_model_without_experts_has_no_barrier(name: str) -> None:
    dense = toymodel.spec(layers=0)
    config = sections(scheduler=rule(name))
    async with cluster(1, toymodel.checkpoint(dense), **config) as engine:
        ids = [engine.submit(prompt, max_tokens=4) for prompt in PROMPTS]
        await engine.ended(*ids)
        for request_id, prompt in zip(ids, PROMPTS, strict=True):
            assert engine.tokens[request_id] == toymodel.reference(prompt, 4, dense)


def test_a_track_gives_rows_to_one_that_has_fewer() -> None:
    chunks = ChunkTable(16)
    chain = StageChain(2, 2)
    tracks = Tracks(chain, chunks)
    opened = [chunks.open(i, np.array([i]), NONE, True, tracks.first_stage(NONE)) for i in range(6)]
    assert chunks.stage[opened].tolist() == [0, 5] * 3
    chunks.close(np.array(opened[1::2]))
    left = np.array(opened[::2])
    chunks.stage[left] = chain.head
    assert sorted(tracks.next_stages(left).tolist()) == [0, 0, 5]
    behind = chunks.open(0, np.array([9]), opened[0], True, tracks.first_stage(opened[0]))
    assert chunks.stage[behind] == 0


def test_two_batch_names_its_stages_by_track() -> None:
    chain = lockstep(TwoBatch, micro_batches=3).context.chain
    assert [chain.name(stage) for stage in (0, 4, 5, 11)] == ["A0", "H", "A0/1", "E0/2"]
