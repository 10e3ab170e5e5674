"""The HTTP server: OpenAI's completions API over an `AsyncEngine`, as an aiohttp application."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from http import HTTPStatus
from typing import Any, Literal

import orjson
from aiohttp import web

from asyncmoe.config import Config, ServerConfig
from asyncmoe.errors import ConfigError, RequestError, RequestFailed
from asyncmoe.frontend.admission import Overloaded, Unavailable
from asyncmoe.frontend.engine import AsyncEngine
from asyncmoe.frontend.events import EventWriter
from asyncmoe.frontend.generation import Generation
from asyncmoe.frontend.live import Answer, Live, Round, ServerStopping, raise_if_stopping
from asyncmoe.frontend.openai_api import (
    Body,
    ChatBody,
    ChatChoice,
    Choice,
    CompletionBody,
    CompletionChoice,
    Envelope,
    error_body,
    parse,
    usage,
)
from asyncmoe.frontend.output import RequestOutput
from asyncmoe.frontend.together import together

log = logging.getLogger(__name__)

GOODBYE_S = 1.0  # how long clients have to read that the server stops
BACKLOG = 1024

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def bind(config: ServerConfig) -> socket.socket:
    """A socket bound to the server's address, not listening yet: clients knock when all is up.

    Raises `ConfigError` if the address cannot be bound, for example since the port is in use.
    """
    try:
        info = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(*info[:3])
    except OSError as error:
        raise _cannot_listen(config, error) from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(info[4])
    except OSError as error:
        listener.close()
        raise _cannot_listen(config, error) from None
    return listener


def _cannot_listen(config: ServerConfig, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot listen on server.host {config.host!r}, server.port {config.port}: {error.strerror}"
    )


class Server:
    """One engine's HTTP server.

    Promises:
    - a client that disconnects cancels its requests, streamed or not;
    - a client that reads slowly is waited for with bounded buffers, and delays nobody else;
    - every error has OpenAI's shape and names the parameter at fault where there is one, unless
      what came is not HTTP.
    """

    def __init__(self, engine: AsyncEngine, listener: socket.socket) -> None:
        """`listener` comes from `bind`; the server closes it."""
        self.engine, self._listener = engine, listener
        self._round = Round(engine.loop)
        config = engine.config
        self.model_name = config.server.served_name or config.model.name
        application = web.Application(
            client_max_size=config.server.body_bytes, middlewares=[_errors_as_json]
        )
        application.add_routes(
            [
                web.get("/health", self._health),
                web.get("/v1/models", self._models),
                web.get("/v1/models/{model:.+}", self._model),
                web.post("/v1/completions", self._completions),
                web.post("/v1/chat/completions", self._chat_completions),
            ]
        )
        self._runner = web.AppRunner(
            application,
            access_log=None,
            logger=_library_log(),
            handler_cancellation=True,
            shutdown_timeout=GOODBYE_S,
        )

    @property
    def url(self) -> str:
        """Where the server listens, with the real port."""
        host, port = self._listener.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def start(self) -> None:
        """Start to listen. Raises `ConfigError` if the port has been taken since `bind`."""
        await self._runner.setup()
        try:
            await web.SockSite(self._runner, self._listener, backlog=BACKLOG).start()
        except OSError as error:
            await self._runner.cleanup()
            raise _cannot_listen(self.engine.config.server, error) from None

    async def close(self) -> None:
        """Stop listening, let handlers say goodbye for a moment, and drop what is left."""
        await self._runner.cleanup()
        self._listener.close()

    async def _health(self, request: web.Request) -> web.Response:
        lost, unable = (
            {str(rank): reason for rank, reason in ranks.items()}
            for ranks in (self.engine.lost, self.engine.unable)
        )
        if not lost and not unable:
            return _json({"status": "ok", "requests": self.engine.running})
        report = {
            "status": "ranks are lost" if lost else "ranks are unable to run requests",
            "lost": lost,
            "unable": unable,
        }
        return _json(report, HTTPStatus.SERVICE_UNAVAILABLE)

    async def _models(self, request: web.Request) -> web.Response:
        return _json({"object": "list", "data": [self._card()]})

    async def _model(self, request: web.Request) -> web.Response:
        self._check_model(request.match_info["model"])
        return _json(self._card())

    def _card(self) -> dict[str, Any]:
        return {
            "id": self.model_name,
            "object": "model",
            "created": 0,
            "owned_by": "asyncmoe",
            "max_model_len": self.engine.rank.spec.context,
        }

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self.model_name:
            raise UnknownModelError(name, self.model_name)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = parse(CompletionBody, await _read_json(request))
        return await self._answer(request, body, "text_completion", CompletionChoice)

    async def _chat_completions(self, request: web.Request) -> web.StreamResponse:
        body = parse(ChatBody, await _read_json(request))
        return await self._answer(request, body, "chat.completion", ChatChoice)

    async def _answer(
        self,
        request: web.Request,
        body: Body,
        kind: Literal["text_completion", "chat.completion"],
        choice: type[CompletionChoice] | type[ChatChoice],
    ) -> web.StreamResponse:
        """Run all answers of one request; whatever ends this ends them too."""
        self._check_model(body.model)
        envelope = Envelope(kind, self.model_name)
        options = body.chat_options()
        prompts, answers = body.requests(self.engine.sampling_defaults)
        # Each prompt is tokenised once, however many answers it gets.
        work = itertools.product(await self.engine.tokenize(prompts, options), answers)
        generations = [
            self.engine.generate(ids, params, f"{envelope.id}-{index}")
            for index, (ids, params) in enumerate(work)
        ]
        choices: list[Choice] = [
            choice(index, self.engine.tokenizer, bool(body.return_token_ids))
            for index in range(len(generations))
        ]
        try:
            for generation in generations:
                await generation.start()
            if body.stream:
                return await _stream(request, body, envelope, choices, generations, self._round)
            return await _whole(body, envelope, choices, generations)
        finally:
            for generation in generations:
                await generation.aclose()


@contextlib.asynccontextmanager
async def running_server(config: Config) -> AsyncIterator[Server]:
    """An engine and its HTTP server, from the start of the ranks to the end of all of them.

    At the end running requests are told. Raises what `bind` and `AsyncEngine.start` raise.
    """
    listener = bind(config.server)
    try:
        engine = await AsyncEngine.start(config)
        server = Server(engine, listener)
        try:
            await server.start()
            yield server
        finally:
            # Closing the engine ends every request first, so that the handlers can say so.
            await asyncio.gather(engine.close(), server.close())
    finally:
        listener.close()


class UnknownModelError(RequestError):
    """The body or the path names a model that is not served here."""

    def __init__(self, name: str, served: str) -> None:
        super().__init__(f"the model {name!r} does not exist; served here: {served!r}", "model")


async def _whole(
    body: Body, envelope: Envelope, choices: list[Choice], generations: list[Generation]
) -> web.Response:
    outputs: list[RequestOutput | None] = [None] * len(generations)

    async def one(index: int, generation: Generation) -> None:
        output = outputs[index] = await generation.complete()
        raise_if_stopping(output)

    await together(one(index, generation) for index, generation in enumerate(generations))
    done = [output for output in outputs if output is not None]
    entries = [choice.whole(output) for choice, output in zip(choices, done, strict=True)]
    return _json(envelope.whole(entries, usage(done, body.n or 1)))


async def _stream(
    request: web.Request,
    body: Body,
    envelope: Envelope,
    choices: list[Choice],
    generations: list[Generation],
    round_: Round,
) -> web.StreamResponse:
    """Server-sent events. An error after the first event is an event itself."""
    events = EventWriter(request)
    report_usage = body.stream_options is not None and body.stream_options.include_usage
    around = envelope.chunk_around({"usage": None} if report_usage else {})
    answers = [
        Answer(choice, generation.stream, around, bool(body.return_token_ids))
        for choice, generation in zip(choices, generations, strict=True)
    ]
    try:
        await Live(events, answers, round_).run()
        if report_usage:
            total = usage([answer.told for answer in answers if answer.told], body.n or 1)
            events.write({**envelope.chunk([]), "usage": total})
    except (RequestError, RequestFailed) as error:
        if not events.begun:
            raise
        events.write(error_body(str(error), *_status(error)))
    return await events.finish()


class _WithoutTraceback(logging.Filter):
    """What aiohttp reports with a traceback is what a client did wrong: one line says it, and
    nothing where a client left, which it may do.

    Our own errors are logged in full by `_errors_as_json`.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether it is worth a line; takes the traceback out of the record."""
        if record.exc_info:
            error = record.exc_info[1]
            if isinstance(error, ConnectionError):
                return False
            said = " ".join(str(error).split())
            record.msg = f"{record.getMessage()}: {type(error).__name__}: {said:.200}"
            record.args, record.exc_info = (), None
            record.levelno, record.levelname = logging.WARNING, "WARNING"
        return True


def _library_log() -> logging.Logger:
    """Where aiohttp reports connections that it cannot serve."""
    found = log.getChild("http")
    if not found.filters:
        found.addFilter(_WithoutTraceback())
    return found


async def _read_json(request: web.Request) -> Any:
    limit = request.app._client_max_size
    if (request.content_length or 0) > limit:  # without waiting for a body that is not read
        raise web.HTTPRequestEntityTooLarge(limit, request.content_length or 0)
    try:
        raw = await request.read()
    except web.RequestPayloadError as error:
        raise RequestError(f"the body cannot be read: {error}") from None
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the body is not JSON: {error}") from None


def _json(value: Any, status: HTTPStatus = HTTPStatus.OK) -> web.Response:
    return web.Response(
        body=orjson.dumps(value), status=status.value, content_type="application/json"
    )


def _status(error: RequestError | RequestFailed) -> tuple[HTTPStatus, str | None]:
    """The status that fits the error, and the parameter at fault."""
    match error:
        case UnknownModelError():
            return HTTPStatus.NOT_FOUND, error.parameter
        case RequestError():
            return HTTPStatus.BAD_REQUEST, error.parameter
        case Overloaded():
            return HTTPStatus.TOO_MANY_REQUESTS, None
        case ServerStopping() | Unavailable():
            return HTTPStatus.SERVICE_UNAVAILABLE, None
        case _:
            return HTTPStatus.INTERNAL_SERVER_ERROR, None


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPRequestEntityTooLarge as error:
        limit = request.app._client_max_size
        message = f"the body is too large ({error.text}); server.body_bytes is {limit}"
        return _json(error_body(message, HTTPStatus.REQUEST_ENTITY_TOO_LARGE), HTTPStatus(413))
    except web.HTTPException as error:
        status = HTTPStatus(error.status)
        return _json(error_body(f"{request.method} {request.path}: {error.reason}", status), status)
    except (RequestError, RequestFailed) as error:
        status, parameter = _status(error)
        return _json(error_body(str(error), status, parameter), status)
    except ConnectionError:
        raise  # the client is gone; nobody reads an answer
    except Exception:
        log.exception("%s %s", request.method, request.path)
        status = HTTPStatus.INTERNAL_SERVER_ERROR
        return _json(error_body("internal error; the server's log has it", status), status)
