"""The server's routes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from rooftile.errors import QueueFull, RequestError
from rooftile.serve import chat, errors
from rooftile.serve.answers import Aborted, Answer, ChatAnswer, Choice, CompletionAnswer, event
from rooftile.serve.backend import Backend, Local
from rooftile.serve.errors import ApiError
from rooftile.serve.guided import GrammarError
from rooftile.serve.limits import Gate, Limits
from rooftile.serve.metrics import Metrics
from rooftile.serve.prompts import Prompt, Prompts, seed_of, wants_logprobs
from rooftile.serve.protocol import ChatRequest, CompletionRequest, Sampled
from rooftile.serve.vocabulary import Vocabulary

log = logging.getLogger("rooftile.serve")

_PATHS = frozenset({"/v1/models", "/v1/completions", "/v1/chat/completions", "/health", "/metrics"})


@dataclasses.dataclass(frozen=True)
class Options:
    """Of a server.

    Attributes:
        names: of the model; requests name one of them, and answers the first.
        api_keys: one of which requests to /v1 need, if there are any.
        chat_template: how chats become prompts; without one they are refused.
        tool_format: of tool calls: "hermes", "llama3", or None to look for none.
        max_body: the most bytes of a request.
        max_prompt_tokens: the most tokens of a prompt; by default what the engine can hold.
        body_timeout: seconds in which a body must come.
        send_timeout: seconds that a client may read nothing while an answer waits to be sent.
    """

    names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    chat_template: chat.ChatTemplate | None = None
    tool_format: str | None = None
    max_body: int = 4 << 20
    max_prompt_tokens: int | None = None
    body_timeout: float = 30.0
    send_timeout: float = 60.0


def create_app(engine: Any, options: Options) -> FastAPI:
    """An ASGI application that answers with an `AsyncEngine`. It neither starts nor closes the engine.

    Its `state.gate` counts the requests inside, and can be closed.

    Raises:
        ValueError: the engine has no tokenizer.
    """
    return app_of(Local(engine), options)


def app_of(engine: Backend, options: Options) -> FastAPI:
    """`create_app` for an engine in this process or in another one."""
    server = _Server(engine, options)
    app = FastAPI(title="Rooftile", docs_url=None, redoc_url=None, openapi_url=None)
    app.state.gate, app.state.metrics = server.gate, server.metrics
    app.add_middleware(
        Limits,
        gate=server.gate,
        metrics=server.metrics,
        api_keys=options.api_keys,
        max_body=options.max_body,
        body_timeout=options.body_timeout,
        paths=_PATHS,
    )
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_api_route("/v1/models", server.models, methods=["GET"])
    app.add_api_route("/v1/models/{name:path}", server.model, methods=["GET"])
    app.add_api_route("/v1/completions", server.completions, methods=["POST"], response_model=None)
    app.add_api_route("/v1/chat/completions", server.chat_completions, methods=["POST"], response_model=None)
    app.add_api_route("/health", server.health, methods=["GET", "HEAD"])
    app.add_api_route("/metrics", server.read_metrics, methods=["GET"])
    return app


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404 and not isinstance(error, ApiError):
        error = ApiError(404, f"there is no {request.url.path[:200]!r}, expected one of {', '.join(sorted(_PATHS))}")
    return errors.response(error)


async def _on_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return errors.response(errors.of_validation(error.errors()))


class _Server:
    def __init__(self, engine: Backend, options: Options) -> None:
        self.engine, self.options = engine, options
        self.gate, self.metrics = Gate(), Metrics()
        self.prompts = Prompts(engine, options.chat_template, options.max_prompt_tokens)
        self.vocabulary = Vocabulary(engine.model.tokenizer)
        self.begun = int(time.time())

    async def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [self._card(name) for name in self.options.names]}

    async def model(self, name: str) -> dict[str, Any]:
        self._check_model(name)
        return self._card(name)

    def _card(self, name: str) -> dict[str, Any]:
        card = {"id": name, "object": "model", "created": self.begun, "owned_by": "rooftile"}
        return {**card, "max_model_len": self.engine.model.max_seq_len}

    def _check_model(self, name: str | None) -> None:
        if name is not None and name not in self.options.names:
            served = " or ".join(map(repr, self.options.names))
            said = f"the model {name[:200]!r} does not exist, expected {served}"
            raise ApiError(404, said, param="model", code="model_not_found")

    async def health(self) -> JSONResponse:
        """200 while requests are let in and the engine runs."""
        failed, _ = await self.engine.state()
        status = "failed" if failed else "draining" if self.gate.closed else "ok"
        return JSONResponse({"status": status}, 200 if status == "ok" else 503)

    async def read_metrics(self) -> Response:
        _, self.metrics.stats = await self.engine.state()
        return Response(generate_latest(self.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def completions(self, request: CompletionRequest, http: Request) -> Response:
        started = time.perf_counter()
        self._check_model(request.model)
        prompts = await self.prompts.of_completion(request)
        n = request.n or 1

        def make(streams: list[Any]) -> Answer:
            of_streams = [prompt for prompt in prompts for _ in range(n)]
            choices = [Choice(i, s, p.text) for i, (s, p) in enumerate(zip(streams, of_streams, strict=True))]
            return CompletionAnswer(self._base("cmpl"), choices, **self._shared(request, prompts, started))

        return await self._answer(request, http, prompts, make)

    async def chat_completions(self, request: ChatRequest, http: Request) -> Response:
        started = time.perf_counter()
        self._check_model(request.model)
        prompts = [await self.prompts.of_chat(request)]
        format = self.options.tool_format

        def make(streams: list[Any]) -> Answer:
            choices = [Choice(i, s, parser=chat.parser_of(request, format)) for i, s in enumerate(streams)]
            return ChatAnswer(self._base("chatcmpl"), choices, **self._shared(request, prompts, started))

        return await self._answer(request, http, prompts, make)

    def _base(self, prefix: str) -> dict[str, Any]:
        return {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": self.options.names[0]}

    def _shared(self, request: Sampled, prompts: list[Prompt], started: float) -> dict[str, Any]:
        return {
            "prompt_tokens": [len(prompt.tokens) for prompt in prompts],
            "logprobs": wants_logprobs(request),
            "ends": frozenset((*self.engine.model.eos, *(request.stop_token_ids or ()))),
            "token_bytes": self.vocabulary.bytes_of,
            "metrics": self.metrics,
            "started": started,
            "token_ids": request.return_token_ids,
            "usage": request.stream_options is not None and bool(request.stream_options.include_usage),
        }

    async def _answer(
        self, request: Sampled, http: Request, prompts: list[Prompt], make: Callable[[list[Any]], Answer]
    ) -> Response:
        options, n = self.prompts.options(request), request.n or 1
        limits = [self.prompts.limit(request, prompt) for prompt in prompts]
        grammar = await self.prompts.grammar(request)
        calls = [
            {
                "prompt": prompt.tokens, "n": n, "max_new_tokens": limit, "seed": seed_of(request), **options,
                **({} if grammar is None else {"grammar": grammar, "ignore_eos": False}),
            }
            for prompt, limit in zip(prompts, limits, strict=True)
        ]  # fmt: skip
        added = iter(await self._added(request, [call for call in calls if call["max_new_tokens"]]))
        streams = [next(added) if limit else _Nothing() for limit in limits for _ in range(n)]
        try:
            answer = make(streams)
        except BaseException:  # nobody would take from them
            for stream in streams:
                await stream.aclose()
            raise
        http.state.notes["prompt"] = answer.prompt_tokens
        if request.stream:
            return _Events(answer, self.options.send_timeout, http.state.notes)
        return _Whole(answer, http.state.notes)

    async def _added(self, request: Sampled, calls: list[dict[str, Any]]) -> list[Any]:
        """The streams of all requests; if there is no room for one, none is added."""
        try:
            return await self.engine.add_all(calls)
        except QueueFull as error:
            raise ApiError(429, f"the queue is full: {error}", code="queue_full", retry_after=1) from None
        except (ValueError, TypeError) as error:
            _, _, said = str(error).partition(": ")  # behind the name of the function
            field = said.partition(" ")[0]
            raise ApiError(400, str(error), param=field if field in type(request).model_fields else None) from None
        except RuntimeError as error:
            log.error("the engine takes no requests: %s", error, exc_info=error)
            raise ApiError(503, "the engine takes no requests", code="engine_failed", retry_after=30) from None


class _Nothing:
    """The stream of a request for no tokens: `max_tokens: 0` with `echo`."""

    cached_tokens = 0

    async def ready(self) -> list[Any]:
        return []

    async def aclose(self) -> None:
        pass


async def _left(receive: Receive) -> None:
    """Returns when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancelled(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _told(error: RequestError) -> ApiError:
    """What a client is told of an error that ended its request."""
    if isinstance(error, Aborted):
        return ApiError(503, str(error), code="shutting_down", retry_after=5)
    if isinstance(error.__cause__, GrammarError):
        return ApiError(400, str(error.__cause__), code="grammar_error")
    log.error("a request failed: %s", error, exc_info=error.__cause__)
    return ApiError(500, "the request failed in the engine")


class _Whole(Response):
    """The answer as one object. A client that leaves before it is made ends its streams."""

    def __init__(self, answer: Answer, notes: dict[str, Any]) -> None:
        super().__init__()
        self._answer, self._notes = answer, notes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        made, left = asyncio.ensure_future(self._made()), asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait({made, left}, return_when=asyncio.FIRST_COMPLETED)
            if not made.done():
                self._notes["left"] = True
                return
            await made.result()(scope, receive, send)
        finally:
            await _cancelled(made, left)
            await self._answer.close()
            self._notes |= {"tokens": self._answer.usage()["completion_tokens"]}

    async def _made(self) -> Response:
        answer = self._answer
        try:
            async for choice, chunks in answer.chunks():
                for chunk in chunks:
                    answer.add(choice, chunk)
        except RequestError as error:
            return errors.response(_told(error))
        for choice in answer.choices:
            choice.finish_reason = choice.finish_reason or "length"
        return JSONResponse(answer.whole())


class _Events(Response):
    """The answer as server-sent events. A client that leaves, or reads nothing for too long, ends its streams."""

    def __init__(self, answer: Answer, timeout: float, notes: dict[str, Any]) -> None:
        super().__init__()
        self._answer, self._timeout, self._notes = answer, timeout, notes
        self._sent = 0
        self._sending = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        written, left = asyncio.ensure_future(self._written(send)), asyncio.ensure_future(_left(receive))
        try:
            while not (written.done() or left.done()):
                # One timer for many events: a client is given up after once to twice the time.
                seen = self._sent
                await asyncio.wait({written, left}, timeout=self._timeout, return_when=asyncio.FIRST_COMPLETED)
                if self._sending and self._sent == seen and not (written.done() or left.done()):
                    self._notes["stalled"] = True
                    break
            if written.done():
                written.result()
            else:
                self._notes["left"] = True
        finally:
            await _cancelled(written, left)
            await self._answer.close()
            self._notes |= {"tokens": self._answer.usage()["completion_tokens"]}

    async def _send(self, send: Send, body: bytes, more: bool = True) -> None:
        self._sending = True
        await send({"type": "http.response.body", "body": body, "more_body": more})
        self._sending = False
        self._sent += 1

    async def _written(self, send: Send) -> None:
        # A proxy must not gather events.
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-store"),
            (b"x-accel-buffering", b"no"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async with contextlib.aclosing(self._bodies()) as bodies:
            async for body in bodies:
                await self._send(send, body)
        await self._send(send, b"", more=False)

    async def _bodies(self) -> AsyncGenerator[bytes, None]:
        answer = self._answer
        for made in answer.openings():
            yield event(made)
        try:
            async with contextlib.aclosing(answer.chunks()) as some:
                async for choice, chunks in some:
                    if events := answer.sent(choice, chunks):
                        yield events
        except RequestError as error:
            told = _told(error)
            yield event(errors.body(told.status_code, told.detail, told.param, told.code))
        else:
            if (last := answer.last()) is not None:
                yield event(last)
        yield b"data: [DONE]\n\n"


def folder_options(folder: Path, template_file: Path | None, tool_format: str) -> dict[str, Any]:
    """`Options` that a checkpoint's folder decides: its chat template, and the format of tool calls.

    Args:
        template_file: instead of the checkpoint's template.
        tool_format: "auto", "none", or the name of a format.
    """
    template = chat.ChatTemplate.load(folder, template_file)
    format = None if tool_format == "none" or template is None else tool_format
    if format == "auto" and template is not None:
        format = chat.format_of(template)
    return {"chat_template": template, "tool_format": format}
