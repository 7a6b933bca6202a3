"""Server-sent events of many answers at once, at little cost: clients may share a machine with the server."""

from __future__ import annotations

import asyncio
import json
import urllib.parse
from collections.abc import AsyncGenerator, Mapping
from typing import Any


class Body:
    """The body of an answer as it comes.

    Args:
        chunked: whether it has the `chunked` transfer coding; else it ends with the connection.
    """

    def __init__(self, chunked: bool) -> None:
        self.ended = not chunked  # whether the connection may close
        self._chunked, self._rest = chunked, b""

    def add(self, data: bytes) -> bytes:
        """What the data adds to the body. A chunk is held back until it is whole."""
        if not self._chunked:
            return data
        data, at, parts = self._rest + data, 0, []
        while not self.ended and (line := data.find(b"\r\n", at)) >= 0:
            begin = line + 2
            end = begin + int(data[at:line].partition(b";")[0], 16)
            if end + 2 > len(data):
                break
            self.ended = end == begin
            parts.append(data[begin:end])
            at = end + 2
        self._rest = data[at:]
        return b"".join(parts)


async def post(
    url: str, body: Mapping[str, Any], headers: Mapping[str, str], timeout: float
) -> AsyncGenerator[list[bytes], None]:
    """The data of events, as soon as they come: each time that some do, all that are there.

    Args:
        timeout: seconds without a byte.

    Raises:
        ValueError: the URL is none.
        RuntimeError: the status is not 200.
        OSError: the server can't be reached, or the connection has ended before the answer.
    """
    parts = urllib.parse.urlsplit(url)
    tls = parts.scheme == "https"
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"the URL is {url!r}, expected http://HOST:PORT")
    opened = asyncio.open_connection(parts.hostname, parts.port or (443 if tls else 80), ssl=tls or None)
    reader, writer = await asyncio.wait_for(opened, timeout)
    loop = asyncio.get_running_loop()
    seen = loop.time()
    timer: asyncio.TimerHandle

    def check() -> None:  # one timer for all reads
        nonlocal timer
        if (left := seen + timeout - loop.time()) > 0:
            timer = loop.call_later(left, check)
        else:
            reader.set_exception(TimeoutError(f"nothing came for {timeout:g} s"))

    timer = loop.call_later(timeout, check)
    try:
        sent = json.dumps(body).encode()
        own = {"Host": parts.netloc, "Content-Type": "application/json", "Content-Length": len(sent)}
        lines = "".join(f"{name}: {value}\r\n" for name, value in {**own, "Connection": "close", **headers}.items())
        writer.write(f"POST {parts.path} HTTP/1.1\r\n{lines}\r\n".encode() + sent)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        status = int(head.split(None, 2)[1])
        answer = Body(b"transfer-encoding: chunked" in head)
        if status != 200:
            said = answer.add(await reader.read()).decode(errors="replace")
            raise RuntimeError(f"status {status}: {said[:200]}")
        rest = b""
        while data := await reader.read(1 << 16):
            seen = loop.time()
            *whole, rest = (rest + answer.add(data)).split(b"\n")
            if events := [line[5:].strip() for line in whole if line.startswith(b"data:")]:
                yield events
        if not answer.ended:
            raise ConnectionError("the connection has ended before the answer")
    except asyncio.IncompleteReadError:
        raise ConnectionError("the connection has ended before the answer") from None
    finally:
        timer.cancel()
        writer.close()
