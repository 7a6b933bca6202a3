"""The stream of one request: the loop writes its chunks, and threads and event loops read them as they come."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from rooftile.engine.generation import Completion, StreamChunk
from rooftile.engine.scheduling import Request
from rooftile.errors import RequestError

if TYPE_CHECKING:
    from rooftile.engine.async_engine import AsyncEngine

Deliver = Callable[[list[tuple[Request, StreamChunk | RequestError]]], None]
Waiter = tuple[asyncio.AbstractEventLoop, "asyncio.Future[None]"]


def wake(waiters: Iterable[Waiter]) -> None:
    """Let coroutines go on, by one call for each event loop: a call costs a system call."""
    by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
    for loop, future in waiters:
        by_loop.setdefault(loop, []).append(future)
    for loop, futures in by_loop.items():
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(_go_on, futures)


def _go_on(futures: Iterable[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)


class Channel:
    """What one request's stream has yet to yield. The loop writes; threads and event loops read.

    Args:
        deliver: takes the items instead, where there is no stream.
    """

    def __init__(self, request: Request, deliver: Deliver | None = None) -> None:
        self.request, self.deliver = request, deliver
        self.ended = False
        self.error: RequestError | None = None
        self._items: deque[StreamChunk | RequestError] = deque()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._threads = 0  # that wait: to notify none costs as much as the rest of `put`
        self._waiters: list[Waiter] = []

    def put(self, item: StreamChunk | RequestError, last: bool) -> list[Waiter]:
        """Returns the coroutines that wait for it."""
        with self._lock:
            self._items.append(item)
            self.ended = last
            self.error = item if isinstance(item, RequestError) else None
            if self._threads:
                self._changed.notify_all()
            waiters = self._waiters
            if waiters:
                self._waiters = []
        return waiters

    def put_back(self, item: StreamChunk | RequestError) -> None:
        with self._lock:
            self._items.appendleft(item)

    def get(self) -> StreamChunk | RequestError | None:
        """The next item, as soon as there is one; None after the last."""
        with self._lock:
            self._threads += 1
            try:
                self._changed.wait_for(lambda: self._items or self.ended)
            finally:
                self._threads -= 1
            return self._items.popleft() if self._items else None

    async def get_async(self, most: int | None = None) -> list[StreamChunk | RequestError]:
        """All items that are there, or so many of them, as soon as there is one; none after the last."""
        while True:
            with self._lock:
                if self._items or self.ended:
                    n = len(self._items) if most is None else min(most, len(self._items))
                    return [self._items.popleft() for _ in range(n)]
                loop = asyncio.get_running_loop()
                waiter = loop, loop.create_future()
                self._waiters.append(waiter)
            try:
                await waiter[1]
            except BaseException:
                with self._lock, contextlib.suppress(ValueError):
                    self._waiters.remove(waiter)
                raise


class Stream:
    """The new tokens of one request, as they come: an iterator and an asynchronous iterator of `StreamChunk`.

    Any thread may take from it, and any event loop. The last chunk has the `finish_reason`: "stop", "length" or
    "abort". An error in the request raises `RequestError`. A stream that is closed, or that nobody refers to any more,
    aborts its request.

    Attributes:
        request_id: of the request.
        prompt_tokens: the tokens of its prompt.
    """

    def __init__(self, engine: AsyncEngine, channel: Channel, abort: Callable[[Channel], bool]) -> None:
        self._engine = engine  # an engine that nobody refers to ends
        self._channel, self._abort = channel, abort
        self.request_id, self.prompt_tokens = channel.request.id, list(channel.request.prompt)
        self._finalizer = weakref.finalize(self, abort, channel)
        self._finalizer.atexit = False

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> StreamChunk:
        if (item := self._channel.get()) is None:
            raise StopIteration
        return self._checked(item)

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> StreamChunk:
        if not (items := await self._channel.get_async(1)):
            raise StopAsyncIteration
        return self._checked(items[0])

    async def ready(self) -> list[StreamChunk]:
        """All chunks that have come and were not taken, as soon as there is one; an empty list after the last.

        Where tokens come faster than they are taken, this costs less than to take them one by one.
        """
        items = await self._channel.get_async()
        if items and isinstance(items[-1], RequestError) and len(items) > 1:
            self._channel.put_back(items.pop())
        return [self._checked(item) for item in items]

    @staticmethod
    def _checked(item: StreamChunk | RequestError) -> StreamChunk:
        if isinstance(item, RequestError):
            raise item
        return item

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that were found in the prefix cache; 0 until the request starts."""
        return self._channel.request.cached

    def result(self) -> Completion:
        """Wait for the end, and return all that was generated, whatever of it was taken before.

        Raises:
            RequestError: an error ended the request.
        """
        for _ in self:
            pass
        if self._channel.error is not None:
            raise self._channel.error
        watch = self._channel.request.watch
        assert watch is not None
        return watch.completion()

    def abort(self) -> bool:
        """End the request, and give back its slot and pages. Returns whether it was waiting or running."""
        return self._abort(self._channel)

    def close(self) -> None:
        """Abort the request, unless it has ended."""
        self._finalizer()

    async def aclose(self) -> None:
        """As `close`."""
        self.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
