"""uvicorn, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from rooftile.errors import counted

log = logging.getLogger("rooftile.serve")


def listen(host: str, port: int) -> socket.socket:
    """A socket that is bound to the address; clients wait in its backlog until the server runs.

    Raises:
        OSError: the address is in use, or none of this machine's; the message names it.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise OSError(f"can't listen on {host}:{port}: {error.strerror or error}; --port takes another") from None


class Server(uvicorn.Server):
    """uvicorn, which on `handle_exit` lets running requests end first. It handles no signals itself.

    After the first call new requests get 503, on open connections and on new ones, so that a load balancer sees it.
    When all requests have ended, or the time is over, the server exits. A second call ends the time at once.

    Args:
        app: of `create_app`.
        abort: ends the requests that are left when the time is over; those that it does not end have 5 s.
        drain_timeout: seconds.
        settings: of `uvicorn.Config`.
    """

    def __init__(
        self, app: FastAPI, *, abort: Callable[[], Any] | None = None, drain_timeout: float = 60.0, **settings: Any
    ) -> None:
        settings = {"access_log": False, "server_header": False, "ws": "none", "lifespan": "off", **settings}
        super().__init__(uvicorn.Config(app, timeout_graceful_shutdown=5, **settings))
        self._gate, self._abort, self._drain_timeout = app.state.gate, abort, drain_timeout
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None
        self._deadline = 0.0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        # A connection that takes nothing for a minute is closed by the kernel, whatever waits in its buffers.
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            for server in self.servers:
                for each in server.sockets:
                    with contextlib.suppress(OSError):  # a Unix socket
                        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 60_000)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._loop is None or self.should_exit:
            super().handle_exit(sig, frame)
        elif self._gate.closed:
            self._deadline = 0.0
        else:
            self._gate.closed, self._deadline = True, time.monotonic() + self._drain_timeout
            self._loop.call_soon_threadsafe(self._begin_draining, signal.Signals(sig).name)

    def _begin_draining(self, name: str) -> None:
        log.info("%s: %s running; new ones are refused", name, counted(self._gate.inside, "request"))
        self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        while self._gate.inside and time.monotonic() < self._deadline:
            await asyncio.sleep(0.02)
        if self._gate.inside:
            log.warning("%s still running: aborted", counted(self._gate.inside, "request"))
            if self._abort is not None:
                await asyncio.to_thread(self._abort)
        self.should_exit = True


class BackgroundServer:
    """A server in a thread of its own, on a free port of loopback: for tests and notebooks.

    with BackgroundServer(app) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    """

    def __init__(self, app: FastAPI, **settings: Any) -> None:
        self.app = app
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._server = Server(app, log_level="warning", **settings)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True)

    def __enter__(self) -> BackgroundServer:
        self._thread.start()  # what connects before it listens waits in the socket's backlog
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(20)
