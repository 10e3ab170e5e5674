"""The HTTP server with OpenAI's own client and with clients that misbehave."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from asyncmoe.errors import ConfigError
from asyncmoe.messages import Unable
from asyncmoe.server import Server, running_server
from tests.servedmodel import eventually, make_served_checkpoint, served_config

LONG = 400  # tokens: longer than any test waits for
GREEDY: dict[str, Any] = {"temperature": 0}
ON = {"ignore_eos": True}
END_S = 5.0  # from a signal to the end of every rank


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_served_checkpoint(tmp_path_factory.mktemp("served"))


@pytest.fixture
async def server(checkpoint: Path) -> AsyncIterator[Server]:
    async with running_server(served_config(checkpoint)) as server:
        yield server


@pytest.fixture
async def client(server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as each:
        yield each


@pytest.fixture
async def http(server: Server) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(server.url) as session:
        yield session


async def at_rest(server: Server, timeout_s: float = 15.0) -> None:
    """Wait until no request is running, at the front end and on the rank."""

    async def idle() -> bool:
        reports = await server.engine.stats()
        return server.engine.running == 0 and reports[0]["running_requests"] == 0

    await eventually(idle, timeout_s)


def count_tokenised(server: Server, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that are tokenised from now on."""
    tokenizer, texts = server.engine.tokenizer, list[str]()
    assert tokenizer is not None
    encode = tokenizer.encode

    def counted(text: str, **options: bool) -> list[int]:
        texts.append(text)
        return encode(text, **options)

    monkeypatch.setattr(tokenizer, "encode", counted)
    return texts


async def running(server: Server, requests: int = 1) -> None:
    async def busy() -> bool:
        return server.engine.running == requests and server.engine.tokens_out > 0

    await eventually(busy)


# ---- answers, with OpenAI's client


async def test_a_completion_has_text_usage_and_a_reason(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(
        model="test", prompt=[5, 17, 9], max_tokens=6, extra_body=ON, **GREEDY
    )
    assert answer.object == "text_completion"
    assert answer.choices[0].text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 6)
    assert answer.usage.total_tokens == 9


async def test_streamed_pieces_join_to_the_whole_answer(client: openai.AsyncOpenAI) -> None:
    ask: dict[str, Any] = {
        "model": "test", "prompt": "hello", "max_tokens": 20, "extra_body": ON, **GREEDY
    }  # fmt: skip
    whole = await client.completions.create(**ask)
    chunks = [
        chunk
        async for chunk in await client.completions.create(
            **ask, stream=True, stream_options={"include_usage": True}
        )
    ]
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert len(choices) > 1
    assert "".join(choice.text for choice in choices) == whole.choices[0].text
    assert [c.finish_reason for c in choices] == [None] * (len(choices) - 1) + ["length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


async def test_a_chat_streams_a_role_then_text_then_a_reason(client: openai.AsyncOpenAI) -> None:
    ask: dict[str, Any] = {
        "model": "test",
        "messages": [
            {"role": "system", "content": "be"},
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        ],
        "max_completion_tokens": 12,
        "extra_body": ON,
        **GREEDY,
    }
    whole = await client.chat.completions.create(**ask)
    chunks = [c async for c in await client.chat.completions.create(**ask, stream=True)]
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert whole.object == "chat.completion"
    assert whole.choices[0].message.role == "assistant"
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert (deltas[0].role, deltas[0].content) == ("assistant", "")
    assert "".join(d.content or "" for d in deltas) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"


async def test_several_prompts_and_n_give_choices_in_order(client: openai.AsyncOpenAI) -> None:
    ask: dict[str, Any] = {"model": "test", "max_tokens": 5, "seed": 11, "extra_body": ON}
    prompts = [[5, 17, 9], [4, 4]]
    answer = await client.completions.create(prompt=prompts, n=2, **ask)
    alone = await client.completions.create(prompt=prompts[1], **{**ask, "seed": 12})
    streamed = ["", "", "", ""]
    async for chunk in await client.completions.create(prompt=prompts, n=2, stream=True, **ask):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[0].text != answer.choices[1].text
    assert answer.choices[3].text == alone.choices[0].text
    assert streamed == [choice.text for choice in answer.choices]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 20)


async def test_logprobs_have_the_shape_of_each_endpoint(client: openai.AsyncOpenAI) -> None:
    completion = await client.completions.create(
        model="test", prompt="hi", max_tokens=3, logprobs=2, extra_body=ON, **GREEDY
    )
    chat = await client.chat.completions.create(
        model="test",
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=3,
        logprobs=True,
        top_logprobs=2,
        extra_body=ON,
        **GREEDY,
    )
    flat = completion.choices[0].logprobs
    assert flat is not None
    assert flat.tokens is not None
    assert flat.token_logprobs is not None
    assert flat.top_logprobs is not None
    assert len(flat.tokens) == len(flat.token_logprobs) == len(flat.top_logprobs) == 3
    assert flat.text_offset is not None
    assert flat.text_offset[:2] == [0, len(flat.tokens[0])]
    assert max(flat.top_logprobs[0].values()) == flat.token_logprobs[0]
    nested = chat.choices[0].logprobs
    assert nested is not None
    assert nested.content is not None
    first = nested.content[0]
    assert len(nested.content) == 3
    spelled = b"".join(bytes(each.bytes or ()) for each in nested.content)
    assert spelled.decode(errors="replace") == chat.choices[0].message.content
    assert list("\ufffd".encode()) not in [each.bytes for each in nested.content]
    assert first.top_logprobs[0].logprob == first.logprob


async def test_fields_beyond_openais_reach_the_sampler(client: openai.AsyncOpenAI) -> None:
    async def ask(**extra: Any) -> Any:
        answer = await client.completions.create(
            model="test",
            prompt=[5, 17, 9],
            max_tokens=8,
            temperature=1.5,
            seed=1,
            extra_body={**ON, "return_token_ids": True, "no_such_field": 1, **extra},
        )
        return answer.choices[0]

    free, narrow = await ask(), await ask(top_k=1, temperature=2.0, seed=None)
    greedy = await ask(temperature=0)
    stopped = await ask(temperature=0, stop_token_ids=[greedy.token_ids[2]])
    assert narrow.token_ids == greedy.token_ids != free.token_ids
    assert len(greedy.token_ids) == 8
    assert stopped.finish_reason == "stop"
    assert stopped.stop_reason == greedy.token_ids[2]


async def test_models_are_listed_and_health_is_ok(
    client: openai.AsyncOpenAI, http: aiohttp.ClientSession
) -> None:
    listed = await client.models.list()
    assert [model.id for model in listed.data] == ["test"]
    assert (await client.models.retrieve("test")).id == "test"
    async with http.get("/health") as response:
        assert (response.status, (await response.json())["status"]) == (200, "ok")


async def test_a_prompt_is_tokenised_once_for_all_its_answers(
    server: Server, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenised = count_tokenised(server, monkeypatch)
    body = {"prompt": ["hello", "you"], "n": 4, "max_tokens": 2, **ON}
    async with http.post("/v1/completions", json=body) as response:
        answer = await response.json()
    assert len(answer["choices"]) == 8
    assert answer["usage"]["prompt_tokens"] == 8
    assert sorted(tokenised) == ["hello", "you"]


@pytest.mark.parametrize("chat", [False, True])
async def test_a_text_that_is_far_too_long_is_refused_before_it_is_tokenised(
    server: Server, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch, chat: bool
) -> None:
    tokenised = count_tokenised(server, monkeypatch)
    text = "x" * 4000  # there is room for 512 tokens of 6 bytes
    path, body = "completions", {"prompt": text, "n": 128}
    if chat:
        path, body = "chat/completions", {"messages": [{"role": "user", "content": text}]}
    async with http.post(f"/v1/{path}", json=body) as response:
        error = (await response.json())["error"]
    assert response.status == 400
    assert "is too long: there is room for 512 tokens" in error["message"]
    assert tokenised == []


async def test_health_names_a_rank_that_is_unable(
    server: Server, http: aiohttp.ClientSession
) -> None:
    server.engine._on_message(0, Unable("its link to rank 1 is lost"))
    async with http.get("/health") as response:
        assert response.status == 503
        assert (await response.json())["unable"] == {"0": "its link to rank 1 is lost"}
    async with http.post("/v1/completions", json={"prompt": "x"}) as response:
        assert response.status == 503


async def test_more_requests_than_a_home_queues_are_told_to_try_again(checkpoint: Path) -> None:
    config = served_config(checkpoint, kv={"blocks": 4}, engine={"queue_requests": 1})
    body = {"prompt": [5], "max_tokens": 40, **ON}
    async with running_server(config) as server, aiohttp.ClientSession(server.url) as http:

        async def ask() -> int:
            async with http.post("/v1/completions", json=body) as response:
                await response.read()
                return response.status

        statuses = await asyncio.gather(*(ask() for _ in range(8)))
    assert set(statuses) == {200, 429}


# ---- bad requests

HELLO = {"messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "says"),
    [
        ("completions", b"{", 400, None, "not JSON"),
        ("completions", b"[1]", 400, None, "must be a JSON object"),
        ("completions", {}, 400, "prompt", "prompt is missing"),
        ("completions", {"prompt": 5}, 400, "prompt", "prompt is 5; allowed: a string"),
        ("completions", {"prompt": [1, "a"]}, 400, "prompt", "[1, 'a']; allowed"),
        ("completions", {"prompt": []}, 400, "prompt", "[]; allowed"),
        ("completions", {"prompt": ""}, 400, "prompt", "empty"),
        ("completions", {"prompt": [999]}, 400, "prompt", "999 is not in the vocabulary"),
        ("completions", {"prompt": "x", "temperature": "hot"}, 400, "temperature", "'hot'; all"),
        ("completions", {"prompt": "x", "temperature": -1}, 400, "temperature", "from 0"),
        ("completions", {"prompt": "x", "top_p": 0}, 400, "top_p", "above 0 and up to 1"),
        ("completions", {"prompt": "x", "n": 0}, 400, "n", "n is 0"),
        ("completions", {"prompt": ["x"] * 9, "n": 128}, 400, "n", "1152 answers"),
        ("completions", {"prompt": "x", "echo": True}, 400, "echo", "not supported"),
        ("completions", {"prompt": "x", "skip_special_tokens": False}, 400, "skip_special_tokens",
         "not supported"),
        ("completions", {"prompt": "x", "max_tokens": 600}, 400, "max_tokens", "512 tokens"),
        ("completions", {"prompt": "x", "model": "gpt"}, 404, "model", "'gpt' does not exist"),
        ("chat/completions", {"messages": []}, 400, "messages", "at least 1"),
        ("chat/completions", {"messages": [{"content": "x"}]}, 400, "messages", "role"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "tools": [{}]},
            400,
            "tools",
            "not supported",
        ),
        ("chat/completions", {**HELLO, "echo": True}, 400, "echo", "not supported"),
        ("chat/completions", {**HELLO, "chat_template": "x"}, 400, "chat_template", "not supp"),
        ("chat/completions", {**HELLO, "add_generation_prompt": False}, 400,
         "add_generation_prompt", "not supported"),
        ("embeddings", {}, 404, None, "Not Found"),
    ],
)  # fmt: skip
async def test_a_bad_body_is_refused_with_field_value_and_status(
    http: aiohttp.ClientSession,
    server: Server,
    path: str,
    body: Any,
    status: int,
    param: str | None,
    says: str,
) -> None:
    data = body if isinstance(body, bytes) else json.dumps({"stream": True, **body}).encode()
    async with http.post(f"/v1/{path}", data=data) as response:
        error = (await response.json())["error"]
        assert (response.status, error["param"], error["code"]) == (status, param, status)
        assert says in error["message"]
    assert server.engine.running == 0


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_a_body_that_cannot_be_unpacked_is_refused(
    http: aiohttp.ClientSession, encoding: str
) -> None:
    headers = {"Content-Encoding": encoding}
    async with http.post("/v1/completions", data=b"no such thing", headers=headers) as response:
        error = (await response.json())["error"]
        assert response.status == 400
        assert "the body cannot be read" in error["message"]


async def test_a_body_beyond_the_limit_is_refused(checkpoint: Path) -> None:
    config = served_config(checkpoint, server={"port": 0, "body_bytes": 1024})
    async with running_server(config) as server, aiohttp.ClientSession(server.url) as http:
        body = json.dumps({"prompt": "x" * 2000})
        async with http.post("/v1/completions", data=body) as response:
            error = (await response.json())["error"]
            assert response.status == 413
            assert "server.body_bytes is 1024" in error["message"]


# ---- clients that leave or dawdle


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_disconnects_cancels_its_requests(server: Server, stream: bool) -> None:
    body = {"prompt": "x", "max_tokens": LONG, "n": 2, "stream": stream, **ON}
    async with aiohttp.ClientSession(server.url) as http:
        request = asyncio.create_task(http.post("/v1/completions", json=body))
        await running(server, 2)
        if stream:
            response = await request
            await response.content.readline()
            response.close()
        else:
            request.cancel()
            await asyncio.wait([request])
    await at_rest(server)
    assert server.engine.tokens_out < 2 * LONG


async def test_a_slow_reader_gets_all_and_delays_nobody(
    server: Server, client: openai.AsyncOpenAI
) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps(
        {"prompt": [5], "max_tokens": 60, "n": 4, "logprobs": 20, "stream": True, **ON, **GREEDY,
         "return_token_ids": True}
    )  # fmt: skip
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    slow.setblocking(False)
    server._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    loop = asyncio.get_running_loop()
    with slow:
        await loop.sock_connect(slow, (host, int(port)))
        head = f"POST /v1/completions HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n"
        await loop.sock_sendall(slow, (head + body).encode())
        await running(server, 4)
        other = await client.completions.create(
            model="test", prompt="x", max_tokens=60, extra_body=ON, **GREEDY
        )
        assert other.usage is not None
        assert other.usage.completion_tokens == 60
        await at_rest(server)  # all is computed though nothing was read
        received = b""
        while piece := await loop.sock_recv(slow, 65536):
            received += piece
    events = [line[6:] for line in received.split(b"\n") if line.startswith(b"data: ")]
    counts = [0] * 4
    for event in events[:-1]:
        for choice in json.loads(event)["choices"]:
            counts[choice["index"]] += len(choice["token_ids"])
    assert counts == [60] * 4
    assert len(events) < sum(counts)  # the server waited, and what it held back was merged
    assert events[-1] == b"[DONE]"


async def test_two_streams_run_at_once(client: openai.AsyncOpenAI) -> None:
    order: list[str] = []

    async def read(name: str) -> None:
        stream = await client.completions.create(
            model="test", prompt=name, max_tokens=30, stream=True, extra_body=ON, **GREEDY
        )
        async for _ in stream:
            order.append(name)  # noqa: PERF401 - the order of both is what counts

    await asyncio.gather(read("a"), read("b"))
    first_half = order[: len(order) // 2]
    assert {"a", "b"} == set(first_half)


# ---- the end


async def test_the_servers_end_tells_streams_and_waiting_clients(checkpoint: Path) -> None:
    async with running_server(served_config(checkpoint)) as server:
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0)
        ask: dict[str, Any] = {
            "model": "test", "prompt": "x", "max_tokens": LONG, "extra_body": ON
        }  # fmt: skip
        stream = await client.completions.create(**ask, stream=True)
        waiting = asyncio.create_task(client.completions.create(**ask))
        await running(server, 2)
    with pytest.raises(openai.APIError, match="shutting down"):
        async for _ in stream:
            pass
    with pytest.raises(openai.InternalServerError, match="shutting down") as caught:
        await waiting
    assert caught.value.status_code == 503
    await client.close()


async def test_a_port_in_use_is_one_clear_error(checkpoint: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = served_config(checkpoint, server={"port": port})
        with pytest.raises(ConfigError, match=rf"server.port {port}: Address already in use"):
            async with running_server(config):
                pass


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_signal_ends_every_rank_in_time_and_tells_the_client(
    checkpoint: Path, number: signal.Signals
) -> None:
    command = [sys.executable, "-m", "asyncmoe.cli.main", "serve", "--model", str(checkpoint)]
    process = subprocess.Popen(
        [*command, "--ranks", "2", "--port", "0", "--served-name", "test"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    url = process.stdout.readline().split()[-1]
    children = child_processes(process.pid)
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0)
    stream = client.completions.create(
        model="test", prompt="x", max_tokens=LONG, stream=True, extra_body=ON
    )
    next(stream)
    began_s = time.monotonic()
    process.send_signal(number)
    with pytest.raises(openai.APIError, match="shutting down"):
        list(stream)
    _, errors = process.communicate(timeout=END_S)
    assert time.monotonic() - began_s < END_S
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
    assert children
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]


def child_processes(parent: int) -> list[int]:
    path = Path(f"/proc/{parent}/task/{parent}/children")
    return [int(pid) for pid in path.read_text().split()]
