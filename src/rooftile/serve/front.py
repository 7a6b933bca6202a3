"""HTTP in a process of its own, so that the thread of the engine never waits for Python's lock while answers are sent.

`Front` is the end in the engine's process: it starts the other process and passes requests on to the engine. After a
step it sends the chunks of all streams as one message. `Remote` is the end in the front, which neither imports PyTorch
nor knows the model's weights: the engine as the routes see it.

A message is a pickled tuple behind its length. The front sends

    ready
    add, number, calls         the arguments of `AsyncEngine.add` for each request, its id among them
    abort, ids
    abort_all
    compile, number, grammar
    state, number

and the engine's process

    model, Model               once, without the tokenizer
    reply, number, value       to what has that number; an exception, or what was asked for
    chunks, items              of a step: (id, cached tokens, fields of a `Chunk`), or (id, the text of an error, that
                               of its cause if it is a `GrammarError`)
    signal, number
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import multiprocessing
import os
import pickle
import queue
import signal
import socket
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

from rooftile.errors import QueueFull, RequestError
from rooftile.serve.guided import GrammarError

if TYPE_CHECKING:
    from rooftile.serve.app import Options
    from rooftile.serve.backend import Local, Model

log = logging.getLogger("rooftile.serve")

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_GRACE = 5.0  # seconds in which the front may end by itself


def _packed(*message: Any) -> bytes:
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return len(data).to_bytes(4, "big") + data


def _messages(channel: socket.socket) -> Iterator[tuple[Any, ...]]:
    """Those that come, until the other end is closed."""
    with channel.makefile("rb") as file:
        while len(head := file.read(4)) == 4:
            size = int.from_bytes(head, "big")
            if len(data := file.read(size)) < size:
                return
            yield pickle.loads(data)


def _plain(error: BaseException) -> Exception:
    """An exception that can be pickled, of one of the kinds that the routes tell apart."""
    for kind in (QueueFull, ValueError, TypeError, RuntimeError):
        if isinstance(error, kind):
            return kind(str(error))
    return Exception(f"{type(error).__name__}: {error}")


class Front:
    """The process that answers HTTP, and the engine's end of the channel to it. To be entered.

    The process starts when this object is entered, and imports what it needs while the model is loaded. If it ends
    before it is told to, `run` returns; if this process ends, so does it.

    Args:
        listening: the socket that clients connect to. The front takes it over.
        options: of the server.
        tokenizer: what the model's tokenizer.json has.
        drain_timeout: seconds for running requests after the first signal.
    """

    def __init__(
        self, listening: socket.socket, options: Options, tokenizer: str, *, drain_timeout: float = 60.0
    ) -> None:
        host, port = listening.getsockname()[:2]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self._channel, theirs = socket.socketpair()
        # Messages wait here where the front falls behind, and the engine's thread goes on.
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._writing = threading.Thread(target=self._write, name="rooftile-front-writes", daemon=True)
        self._events: queue.SimpleQueue[int | None] = queue.SimpleQueue()  # signals; None when the front has ended
        self._ready, self._ended = threading.Event(), False
        self._reading: threading.Thread | None = None
        self._compiling = ThreadPoolExecutor(1, "rooftile-grammars")
        context = multiprocessing.get_context("spawn")  # a process that has used a GPU can't be forked
        level = logging.getLogger().getEffectiveLevel()
        arguments = theirs, listening, options, tokenizer, drain_timeout, level
        self._process = context.Process(target=_main, args=arguments, name="rooftile-front", daemon=True)
        self._handed_over = theirs, listening

    def begin(self, engine: Any) -> None:
        """Let the front answer with an `AsyncEngine`. Returns when it does.

        Raises:
            ValueError: the engine has no tokenizer.
            RuntimeError: the front has ended.
        """
        from rooftile.serve.backend import Local

        local = Local(engine)
        self._send("model", dataclasses.replace(local.model, tokenizer=None))  # type: ignore[arg-type]
        self._reading = threading.Thread(target=self._read, args=(local,), name="rooftile-front-reads", daemon=True)
        self._reading.start()
        self._ready.wait()
        if self._ended:
            raise RuntimeError("the process that answers HTTP has ended")

    def run(self) -> int:
        """Pass signals on to the front until it has ended. Only the main thread may call it.

        Returns 0 if the front has let all requests end, else 1: it was killed, or a second signal has cut them.
        """
        before = {each: signal.signal(each, lambda number, _: self._events.put(number)) for each in _SIGNALS}
        try:
            came = 0
            while (number := self._events.get()) is not None:
                came += 1
                if came > 2:  # it does not end by itself
                    self._process.kill()
                self._send("signal", number)
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)
        self._process.join(_GRACE)
        if not came:
            log.error("the process that answers HTTP has ended, with exit code %s", self._process.exitcode)
        return int(came != 1 or self._process.exitcode != 0)

    def close(self) -> None:
        """End the front, and what runs in it."""
        self._process.kill()
        self._process.join()
        self._outbox.put(None)
        self._writing.join()
        if self._reading is not None:
            self._reading.join()  # all has come that the front sent
        self._channel.close()
        self._compiling.shutdown(cancel_futures=True)

    def __enter__(self) -> Front:
        self._process.start()
        for each in self._handed_over:
            each.close()
        self._writing.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What the front asks for.

    def _send(self, *message: Any) -> None:
        self._outbox.put(_packed(*message))

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # the front has ended, which the thread that reads sees
            while (data := self._outbox.get()) is not None:
                self._channel.sendall(data)

    def _read(self, local: Local) -> None:
        try:
            with contextlib.suppress(OSError):  # the other end was killed
                for message in _messages(self._channel):
                    self._do(local, *message)
        finally:
            self._ended = True
            self._ready.set()
            self._events.put(None)

    def _do(self, local: Local, kind: str, *rest: Any) -> None:
        engine = local.engine
        if kind == "ready":
            self._ready.set()
        elif kind == "abort":
            for request_id in rest[0]:
                engine.abort(request_id)
        elif kind == "abort_all":
            engine.close()
        elif kind == "state":
            self._send("reply", rest[0], (engine.failed, vars(engine.stats())))
        elif kind == "compile":  # it may take a second, and others don't wait
            self._compiling.submit(self._reply, rest[0], "a grammar was not compiled", local.grammars.compile, rest[1])
        else:
            assert kind == "add", kind
            added = lambda: engine.add_for(self._deliver, [local.arguments(**call) for call in rest[1]])  # noqa: E731
            self._reply(rest[0], "the engine takes no requests", added)

    def _reply(self, number: int, what: str, do: Any, *arguments: Any) -> None:
        value = None
        try:
            do(*arguments)
        except BaseException as error:  # llguidance's panics are no Exceptions, and a client waits
            value = _plain(error)
            if not isinstance(value, (QueueFull, ValueError, TypeError)):
                log.error("%s: %s", what, error, exc_info=error)
        self._send("reply", number, value)

    def _deliver(self, batch: Sequence[tuple[Any, Any]]) -> None:
        """The engine's thread calls it after a step."""
        items: list[tuple[Any, ...]] = []
        causes: dict[int, BaseException] = {}
        for request, chunk in batch:
            if isinstance(chunk, RequestError):
                cause = chunk.__cause__
                items.append((request.id, str(chunk), str(cause) if isinstance(cause, GrammarError) else None))
                if cause is not None and not isinstance(cause, GrammarError):
                    causes[id(cause)] = cause
            else:
                items.append(
                    (request.id, request.cached, chunk.token, chunk.text, chunk.finish_reason, chunk.logprob,
                     chunk.top_logprobs)
                )  # fmt: skip
        self._send("chunks", items)
        for cause in causes.values():  # of a step that failed all requests have the same
            log.error("an error ended requests: %r", cause, exc_info=cause)


class Chunk(NamedTuple):
    """What the routes read of an `engine.StreamChunk`."""

    token: int
    text: str | None
    finish_reason: str | None
    logprob: float | None
    top_logprobs: list[tuple[int, float]] | None


class _Stream:
    """The new tokens of one request, in the front's event loop."""

    def __init__(self, remote: Remote, request_id: str) -> None:
        self._remote, self.request_id = remote, request_id
        self.cached_tokens = 0
        self._chunks: list[Chunk] = []
        self._error: RequestError | None = None
        self._ended = False
        self._waiter: asyncio.Future[None] | None = None

    def put(self, cached: int | str, *fields: Any) -> bool:
        """Takes an item of a message, and returns whether it is the last."""
        if isinstance(cached, str):
            self._error = RequestError(cached)
            if fields[0] is not None:
                self._error.__cause__ = GrammarError(fields[0])
            self._ended = True
        else:
            chunk = Chunk(*fields)
            self.cached_tokens = cached
            self._chunks.append(chunk)
            self._ended = chunk.finish_reason is not None
        if self._waiter is not None:
            if not self._waiter.done():
                self._waiter.set_result(None)
            self._waiter = None
        return self._ended

    async def ready(self) -> list[Chunk]:
        """As `engine.Stream.ready`."""
        if not (self._chunks or self._ended):
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        chunks, self._chunks = self._chunks, []
        if not chunks and self._error is not None:
            error, self._error = self._error, None
            raise error
        return chunks

    async def aclose(self) -> None:
        if not self._ended:
            self._ended = True
            self._remote.abort([self.request_id])


class Remote(asyncio.Protocol):
    """An engine in the process that started this one: a `Backend`.

    Everything happens in the event loop: it reads a step's message when it has sent what the last one brought, and
    where it falls behind, a stream sends several tokens at once.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self.on_signal: Callable[[int], None] = lambda number: None
        self._channel: Any = None
        self._received = bytearray()
        self._numbers, self._ids = itertools.count(), itertools.count()
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._live: dict[str, _Stream] = {}

    async def open(self, channel: socket.socket) -> None:
        channel.setblocking(False)
        self._loop = asyncio.get_running_loop()
        await self._loop.create_unix_connection(lambda: self, sock=channel)

    def ready(self) -> None:
        """Requests are taken."""
        self._send("ready")

    # The routes.

    async def compile(self, grammar: str) -> None:
        await self._ask("compile", grammar)

    async def add_all(self, calls: Sequence[Mapping[str, Any]]) -> list[_Stream]:
        named = [{**call, "request_id": str(next(self._ids))} for call in calls]
        streams = [_Stream(self, f"{call['request_id']}-{i}") for call in named for i in range(call["n"])]
        self._live |= {stream.request_id: stream for stream in streams}
        try:
            await self._ask("add", named)
        except BaseException as error:
            ids = [stream.request_id for stream in streams]
            if isinstance(error, asyncio.CancelledError):  # the client has left
                self.abort(ids)
            for request_id in ids:
                self._live.pop(request_id, None)
            raise
        return streams

    async def state(self) -> tuple[bool, Any]:
        failed, stats = await self._ask("state")
        return failed, types.SimpleNamespace(**stats)

    def abort(self, ids: Sequence[str]) -> None:
        for request_id in ids:
            self._live.pop(request_id, None)
        self._send("abort", ids)

    def abort_all(self) -> None:
        """Any thread may call it."""
        self._loop.call_soon_threadsafe(self._send, "abort_all")

    async def _ask(self, kind: str, *rest: Any) -> Any:
        number = next(self._numbers)
        reply = self._replies[number] = asyncio.get_running_loop().create_future()
        self._send(kind, number, *rest)
        try:
            value = await reply
        finally:
            del self._replies[number]
        if isinstance(value, Exception):
            raise value
        return value

    def _send(self, *message: Any) -> None:
        self._channel.write(_packed(*message))

    # The event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._channel = transport

    def data_received(self, data: bytes) -> None:
        received = self._received
        received += data
        while len(received) >= 4 and len(received) >= (end := 4 + int.from_bytes(received[:4], "big")):
            message = pickle.loads(memoryview(received)[4:end])
            del received[:end]
            self._take(*message)

    def _take(self, kind: str, *rest: Any) -> None:
        if kind == "chunks":
            live = self._live
            for request_id, *item in rest[0]:
                if (stream := live.get(request_id)) is not None and stream.put(*item):
                    del live[request_id]
        elif kind == "reply":
            number, value = rest
            if (reply := self._replies.get(number)) is not None and not reply.done():
                reply.set_result(value)
        else:
            assert kind == "signal", kind
            self.on_signal(*rest)

    def connection_lost(self, error: Exception | None) -> None:
        log.error("the engine's process has ended")
        os._exit(1)


def _main(
    channel: socket.socket, listening: socket.socket, options: Options, tokenizer: str, drain_timeout: float, level: int
) -> None:
    """The front's process."""
    if hasattr(os, "setpgrp"):
        os.setpgrp()  # Ctrl-C is the engine's process's
    for each in _SIGNALS:
        signal.signal(each, signal.SIG_IGN)  # a service manager may send it to all; the engine's process passes it on
    logging.basicConfig(level=level, format=LOG_FORMAT)
    from tokenizers import Tokenizer

    from rooftile.serve.app import app_of
    from rooftile.serve.server import Server

    class Answering(Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await remote.open(channel)
            await super().startup(sockets)
            remote.ready()

    try:
        read = Tokenizer.from_str(tokenizer)
        _, model = next(_messages(channel))
    except Exception:
        os._exit(1)  # the engine's process says what is wrong with a tokenizer, or it has ended
    remote = Remote(dataclasses.replace(model, tokenizer=read))
    server = Answering(app_of(remote, options), abort=remote.abort_all, drain_timeout=drain_timeout, log_config=None)
    remote.on_signal = lambda number: server.handle_exit(number, None)
    server.run(sockets=[listening])
