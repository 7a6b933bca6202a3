"""What stands in front of the routes: request ids, the API key, limits on bodies, draining, and the log."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import re
import secrets
import time
import uuid
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rooftile.serve import errors
from rooftile.serve.errors import ApiError
from rooftile.serve.metrics import Metrics

log = logging.getLogger("rooftile.serve")

_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
# Of a body that is too large this much more is read, so that the client has sent it and reads the answer.
_DISCARDED = 16 << 20


@dataclasses.dataclass
class Gate:
    """Whether requests are let in, and how many are being answered."""

    closed: bool = False
    inside: int = 0


class _Gone(Exception):
    """The client left before it had sent its request."""


class Limits:
    """ASGI middleware.

    Args:
        app: what it stands in front of.
        gate: closed while the server drains.
        metrics: count the answers.
        api_keys: one of which `/v1` needs, if there are any.
        max_body: bytes.
        body_timeout: seconds for the whole of it.
        paths: those counted under their own name.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        gate: Gate,
        metrics: Metrics,
        api_keys: tuple[str, ...],
        max_body: int,
        body_timeout: float,
        paths: frozenset[str],
    ) -> None:
        self._app, self._gate, self._metrics, self._paths = app, gate, metrics, paths
        self._keys = [key.encode() for key in api_keys]
        self._max_body, self._body_timeout = max_body, body_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers, started = Headers(scope=scope), time.perf_counter()
        given = headers.get("x-request-id", "")
        # `notes` is for the log: the routes add to it.
        request_id = given if _ID.fullmatch(given) else uuid.uuid4().hex
        notes: dict[str, Any] = {}
        scope["state"] = {**scope.get("state", {}), "request_id": request_id, "notes": notes}
        status: int | None = None

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        self._gate.inside += 1
        try:
            api = scope["path"].startswith("/v1/")
            try:
                if api:
                    self._admit(headers)
                replay = await self._body(headers, receive)
            except HTTPException as error:
                await errors.response(error)(scope, receive, answer)
            else:
                await self._app(scope, replay, answer)
        except _Gone:
            notes["left"] = True
        except Exception:
            log.exception("an error in the server, id=%s", request_id)
            if status is not None:
                raise  # uvicorn closes the connection
            await errors.response(ApiError(500, "an error in the server"))(scope, receive, answer)
        finally:
            path = scope["path"] if scope["path"] in self._paths else "other"
            self._metrics.answers.labels(path, str(status or 499)).inc()
            # A path may have any character.
            said = "".join(f" {name}={value}" for name, value in notes.items())
            level = logging.INFO if api else logging.DEBUG
            took = time.perf_counter() - started
            log.log(
                level, "%s %r %s %.3fs id=%s%s", scope["method"], scope["path"], status or 499, took, request_id, said
            )
            self._gate.inside -= 1

    def _admit(self, headers: Headers) -> None:
        if self._keys:
            scheme, _, key = headers.get("authorization", "").partition(" ")
            given = key.strip().encode("latin-1")  # as Starlette decodes headers
            # Each key is compared, and in constant time.
            right = [secrets.compare_digest(given, expected) for expected in self._keys]
            if scheme.lower() != "bearer" or not any(right):
                raise ApiError(401, "the API key is absent or wrong: expected Authorization: Bearer KEY")
        if self._gate.closed:
            raise ApiError(503, "the server is shutting down", code="shutting_down", retry_after=5)

    async def _body(self, headers: Headers, receive: Receive) -> Receive:
        """The whole body, to be received at once."""
        most = self._max_body
        length = headers.get("content-length", "")
        size = int(length) if length.isdecimal() and len(length) < 20 else 0
        end = time.monotonic() + self._body_timeout
        parts, read, more = [], 0, size <= most + _DISCARDED
        while more:
            try:
                message = await asyncio.wait_for(receive(), max(0.0, end - time.monotonic()))
            except asyncio.TimeoutError:
                raise ApiError(408, f"the body did not come within {self._body_timeout:g} seconds") from None
            if message["type"] == "http.disconnect":
                raise _Gone
            part = message.get("body", b"")
            read += len(part)
            if max(size, read) <= most:
                parts.append(part)
            more = message.get("more_body", False) and read <= most + _DISCARDED
        if max(size, read) > most:
            raise ApiError(413, f"the body is larger than {most} bytes", code="request_too_large")
        body: bytes | None = b"".join(parts)

        async def replay() -> Message:
            nonlocal body
            if body is None:
                return await receive()
            whole, body = body, None
            return {"type": "http.request", "body": whole, "more_body": False}

        return replay
