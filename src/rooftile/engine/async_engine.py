"""An engine that takes requests as they come: a thread runs the loop, and each request has a stream of its own.

The thread alone touches the device and the scheduler. What other threads want (a new request, an abort) reaches it
through a queue that a destructor may use too, wherever the garbage collector runs it.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import gc
import inspect
import itertools
import math
import queue
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

from rooftile.engine.cache import check_positive
from rooftile.engine.engine import Engine, Masks, Stop
from rooftile.engine.generation import StreamChunk, encoded, integer
from rooftile.engine.leading import follow, leading
from rooftile.engine.loop import Loop
from rooftile.engine.runner import Sampling
from rooftile.engine.scheduling import Request, Scheduler
from rooftile.engine.streams import Channel, Deliver, Stream, Waiter, wake
from rooftile.errors import QueueFull, RequestError, checks_keywords, did_you_mean


def check_step_tokens(step_tokens: int, max_batch: int) -> None:
    """Raises ValueError unless a step has room for a token of each sequence, and for a part of a prompt."""
    if step_tokens <= max_batch:
        raise ValueError(
            f"AsyncEngine: step_tokens is {step_tokens}, expected more than max_batch, {max_batch}: each sequence that "
            "decodes gets a token in every step"
        )


@dataclasses.dataclass(frozen=True)
class EngineStats:
    """What an `AsyncEngine` does now, and has done so far.

    Attributes:
        running, waiting: requests now.
        pages_used, pages: of the cache: those that running requests hold, and all.
        prompt_tokens: tokens of prompts that were computed.
        generated_tokens: new tokens.
        prefix_hit_tokens, prefix_query_tokens: tokens of prompts that were found in the prefix cache, of how many.
        preemptions: how often a running request gave back its pages, to be computed again.
        steps: forward passes.
        proposed_tokens, accepted_tokens: of speculative decoding, how many were.
        host_seconds: what the steps took without waiting for the device.
        finished: requests that ended, by reason: "stop", "length", "abort" and "error".
    """

    running: int = 0
    waiting: int = 0
    pages_used: int = 0
    pages: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    prefix_hit_tokens: int = 0
    prefix_query_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    proposed_tokens: int = 0
    accepted_tokens: int = 0
    host_seconds: float = 0.0
    finished: Mapping[str, int] = dataclasses.field(default_factory=dict)


class _Freezer:
    """Keeps Python's garbage collector from what exists, as long as any engine of the process wants it.

    A full collection stops all threads: 0.1 s for what the imports alone have made, and on a GPU 0.3 s. Python thaws
    all or nothing. So what others froze before stays frozen, and ours with it.
    """

    def __init__(self) -> None:
        self._lock, self._users, self._thaws = threading.Lock(), 0, True

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        gc.collect()
        with self._lock:
            if not self._users:
                self._thaws = not gc.get_freeze_count()
            self._users += 1
            gc.freeze()
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users and self._thaws:
                    gc.unfreeze()


_FREEZER = _Freezer()


class _Worker:
    """The thread of an `AsyncEngine`, and what reaches it."""

    def __init__(
        self, engine: Engine, max_waiting: int, step_tokens: int, prefix_cache: bool, warm_up: bool
    ) -> None:  # fmt: skip
        with contextlib.ExitStack() as stack:
            stack.enter_context(leading(engine))
            if warm_up:
                engine.runner.warm_up(step_tokens)
                stack.enter_context(_FREEZER.frozen())
            self._begin(engine, max_waiting, step_tokens, prefix_cache)
            self._left = stack.pop_all()  # when the thread ends
        try:
            self._thread.start()
        except Exception:  # "can't start new thread": there is none to end
            self._left.close()
            raise

    def _begin(self, engine: Engine, max_waiting: int, step_tokens: int, prefix_cache: bool) -> None:
        scheduler = Scheduler(engine.runner, step_tokens, prefix_cache)
        self.engine, self.max_waiting, self._scheduler = engine, max_waiting, scheduler
        self.loop = Loop(engine.runner, scheduler, engine._speculation())
        # A request to add, the channel of one to abort, or None, to look at the rest.
        self._inbox: queue.SimpleQueue[Request | Channel | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._live: dict[str, Channel] = {}  # with the lock, as all below
        self._untaken = 0  # requests in the inbox
        self._finished = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        self._stats = EngineStats()
        self._closing = self._draining = False
        self._failure: BaseException | None = None
        self._ids = itertools.count()
        self._publish()
        self._thread = threading.Thread(target=self._run, name="rooftile-engine", daemon=True)

    # Called by any thread.

    def add(self, requests: Sequence[Request], deliver: Deliver | None = None) -> list[Channel]:
        """All of them or, if anything is raised, none. Those without an id get one."""
        with self._lock:
            if self._failure is not None:
                raise RuntimeError("AsyncEngine.add: the engine has failed") from self._failure
            if self._closing:
                raise RuntimeError("AsyncEngine.add: the engine is closed")
            given = [request.id for request in requests if request.id]
            for at, request_id in enumerate(given):
                if request_id in self._live or request_id in given[:at]:
                    raise ValueError(f"AsyncEngine.add: request_id is {request_id!r}, which a live request has")
            if len(requests) > self.max_waiting:
                raise ValueError(f"AsyncEngine.add: {len(requests)} requests, expected at most {self.max_waiting}")
            waiting = self._stats.waiting + self._untaken
            if waiting + len(requests) > self.max_waiting:
                raise QueueFull(
                    f"AsyncEngine.add: {waiting} requests wait already, and {len(requests)} more would be over "
                    f"max_waiting, {self.max_waiting}"
                )
            channels = []
            for request in requests:
                if not request.id:
                    ids = (f"request-{n}" for n in self._ids)
                    request.id = next(i for i in ids if i not in self._live and i not in given)
                channel = self._live[request.id] = Channel(request, deliver)
                channels.append(channel)
                self._untaken += 1
                self._inbox.put(request)  # inside of the lock: requests start in the order in which they were added
        return channels

    def named(self, request_id: str) -> Channel | None:
        with self._lock:
            return self._live.get(request_id)

    def abort(self, channel: Channel) -> bool:
        if channel.ended:
            return False
        self._inbox.put(channel)  # no lock: the garbage collector may call this where the lock is held
        return True

    @property
    def failed(self) -> bool:
        return self._failure is not None

    def stats(self) -> EngineStats:
        with self._lock:
            return dataclasses.replace(
                self._stats, waiting=self._stats.waiting + self._untaken, finished=dict(self._finished)
            )

    def stop(self) -> None:
        """Refuse new requests, abort those that live, and end the thread."""
        self._closing, self._draining = True, False
        self._inbox.put(None)  # no lock, as in `abort`

    def close(self, drain: bool, timeout: float | None) -> None:
        if drain and not self._closing:
            with self._lock:
                self._closing = self._draining = True
            self._inbox.put(None)
            self._thread.join(timeout)
        self.stop()
        self._thread.join(None if drain else timeout)

    # The thread.

    def _run(self) -> None:
        try:
            while True:
                self._take()
                if self._closing and not (self._draining and (self.loop.busy or self._untaken)):
                    break
                if self.loop.busy:
                    self._step()
        except BaseException as error:
            with self._lock:
                self._failure = error
        finally:
            with contextlib.suppress(Exception):  # the device may be lost
                self.loop.clear()
            with contextlib.suppress(Exception):  # or another rank
                self._left.close()
            with self._lock:  # from here on, none is added
                self._untaken, channels = 0, list(self._live.values())
            self._publish()
            requests = [channel.request for channel in channels]
            self._deliver((request, self._failure or self._aborted(request)) for request in requests)
            self.engine._generating = False

    def _take(self) -> None:
        """Do what the inbox asks for, until the next step is due, or indefinitely if there is none."""
        with contextlib.suppress(queue.Empty):
            while True:
                left = 0.0 if self._closing else self.loop.due - time.perf_counter()
                asked = self._inbox.get(left > 0, left if 0 < left < math.inf else None)
                if isinstance(asked, Request):
                    self.loop.add(asked)
                    with self._lock:
                        self._untaken -= 1
                        self._stats = dataclasses.replace(self._stats, waiting=len(self.loop.scheduler.waiting))
                elif asked is not None and not asked.ended:
                    self.loop.remove(asked.request)
                    self._publish()
                    self._deliver([(asked.request, self._aborted(asked.request))])

    def _step(self) -> None:
        try:
            events = self.loop.step()
        except Exception as error:
            # No request can go on. Some may have ended by what the step had read before.
            ended = [*self.loop.scheduler.waiting, *self.loop.scheduler.running]
            try:
                self.loop.clear()  # if this fails, too, the engine has failed
            finally:
                self._publish()
                self._deliver(self.loop.events)
            self._deliver((request, error) for request in ended)
        else:
            self._publish()  # first: who sees the end of a stream sees its pages free
            self._deliver(events)

    @staticmethod
    def _aborted(request: Request) -> StreamChunk | Exception:
        assert request.watch is not None
        try:
            return request.watch.abort()
        except Exception as error:  # of the tokenizer
            request.finish_reason = "error"
            return error

    def _deliver(self, events: Iterable[tuple[Request, StreamChunk | BaseException]]) -> None:
        waiters: list[Waiter] = []
        batches: dict[Deliver, list[tuple[Request, StreamChunk | RequestError]]] = {}
        for request, event in events:
            channel = self._live[request.id]
            item: StreamChunk | RequestError
            if isinstance(event, StreamChunk):
                item, reason = event, event.finish_reason
            else:
                item = RequestError(f"request {request.id} ended with an error: {event!r}")
                item.__cause__ = event
                request.finish_reason = reason = "error"
            if reason is not None:
                with self._lock:
                    del self._live[request.id]
                    self._finished[reason] += 1
            if channel.deliver is None:
                waiters += channel.put(item, reason is not None)
            else:
                channel.ended = reason is not None
                batches.setdefault(channel.deliver, []).append((request, item))
        for deliver, batch in batches.items():
            deliver(batch)
        wake(waiters)

    def _publish(self) -> None:
        loop, cache = self.loop, self.loop.runner.cache
        pages = cache.k.shape[1]
        with self._lock:
            self._stats = EngineStats(
                running=len(loop.scheduler.running),
                waiting=len(loop.scheduler.waiting),
                pages_used=pages - cache.free_pages,
                pages=pages,
                prompt_tokens=loop.prompt_tokens,
                generated_tokens=loop.generated_tokens,
                prefix_hit_tokens=self._scheduler.prefix_hit_tokens,
                prefix_query_tokens=self._scheduler.prefix_query_tokens,
                preemptions=self._scheduler.preemptions,
                steps=loop.steps,
                proposed_tokens=loop.proposed_tokens,
                accepted_tokens=loop.accepted_tokens,
                host_seconds=loop.host_seconds,
            )


class _Follower:
    """The thread of an `AsyncEngine` on a rank that follows."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._failure = engine, list[BaseException]()
        self._thread = threading.Thread(target=self._run, name="rooftile-engine", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with _FREEZER.frozen():  # the other ranks wait for this one
                follow(self._engine)
        except BaseException as error:
            self._failure.append(error)
        finally:
            self._engine._generating = False

    def add(self, requests: Sequence[Request], deliver: Deliver | None = None) -> list[Channel]:
        raise RuntimeError(f"AsyncEngine.add: this is rank {self._engine.rank}, expected 0, which takes the requests")

    def named(self, request_id: str) -> None:
        return None

    def abort(self, channel: Channel) -> bool:
        return False

    @property
    def failed(self) -> bool:
        return bool(self._failure)

    def stats(self) -> EngineStats:
        return EngineStats()

    def stop(self) -> None:
        """It stops when rank 0 does."""

    def close(self, drain: bool, timeout: float | None) -> None:
        self._thread.join(timeout)


_WORKERS: weakref.WeakSet[_Worker | _Follower] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A thread that runs while the interpreter ends may crash."""
    for worker in list(_WORKERS):
        worker.close(False, None)


class AsyncEngine:
    """An engine that takes requests at any time, from any thread.

        with rooftile.AsyncEngine.from_pretrained("path/to/a/checkpoint", max_batch=64) as engine:
            for chunk in engine.add("Once upon a time", max_new_tokens=100):
                print(chunk.text, end="")

    A thread of its own runs the steps. Meanwhile `engine.generate` raises.

    Where several processes have a part of the model each, all of them make one of these, and rank 0 takes the requests;
    its options count. On the other ranks `close` waits for rank 0's.

    Args:
        engine: what computes; it belongs to this object until `close`.
        max_waiting: the most requests that wait. One more raises `QueueFull`.
        prefix_cache: keep the pages of earlier requests for later ones that begin with the same tokens.
        step_tokens: the most tokens of a step: one of each sequence that decodes, and parts of prompts.
        warm_up: compile kernels and capture CUDA graphs now, not when requests first need them. Until `close`, Python's
            garbage collector leaves alone what exists by then (`gc.freeze`): a full collection would stop all requests.
            On other ranks it leaves alone what exists when they begin, in any case.

    Attributes:
        engine: with `config`, `tokenizer`, `max_seq_len` and `max_batch`.
        max_waiting: as given.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_waiting: int = 1024,
        prefix_cache: bool = True,
        step_tokens: int = 1024,
        warm_up: bool = False,
    ) -> None:
        if not isinstance(engine, Engine):
            raise TypeError(f"AsyncEngine: engine is {engine!r}, expected an Engine")
        check_positive("AsyncEngine", max_waiting=max_waiting, step_tokens=step_tokens)
        check_step_tokens(step_tokens, engine.max_batch)
        if engine._generating:
            raise RuntimeError("AsyncEngine: the engine generates already")
        engine._generating = True
        self.engine, self.max_waiting = engine, max_waiting
        self._worker: _Worker | _Follower
        try:
            if engine.rank:
                self._worker = _Follower(engine)
            else:
                self._worker = _Worker(engine, max_waiting, step_tokens, prefix_cache, warm_up)
        except BaseException:
            engine._generating = False
            raise
        self._finalizer = weakref.finalize(self, self._worker.stop)
        self._finalizer.atexit = False
        _WORKERS.add(self._worker)

    @classmethod
    @functools.partial(checks_keywords, passes_to=Engine.from_pretrained)
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        max_waiting: int = 1024,
        prefix_cache: bool = True,
        step_tokens: int = 1024,
        warm_up: bool = False,
        **engine_options: Any,
    ) -> AsyncEngine:
        """Load a checkpoint; `engine_options` and what is raised are as in `Engine.from_pretrained`."""
        engine = Engine.from_pretrained(path, **engine_options)
        return cls(
            engine, max_waiting=max_waiting, prefix_cache=prefix_cache, step_tokens=step_tokens, warm_up=warm_up
        )  # fmt: skip

    @classmethod
    @functools.partial(checks_keywords, passes_to=Engine.from_config)
    def from_config(
        cls,
        config: Any,
        *,
        max_waiting: int = 1024,
        prefix_cache: bool = True,
        step_tokens: int = 1024,
        warm_up: bool = False,
        **engine_options: Any,
    ) -> AsyncEngine:
        """A model with random weights; `engine_options` and what is raised are as in `Engine.from_config`."""
        engine = Engine.from_config(config, **engine_options)
        return cls(
            engine, max_waiting=max_waiting, prefix_cache=prefix_cache, step_tokens=step_tokens, warm_up=warm_up
        )  # fmt: skip

    @overload
    def add(
        self, prompt: str | Sequence[int], *, n: None = ..., max_new_tokens: int | None = ..., stop: Stop = ...,
        seed: int = ..., logprobs: bool = ..., ignore_eos: bool = ..., priority: int = ...,
        request_id: str | None = ..., **sampling: Any,
    ) -> Stream: ...  # fmt: skip

    @overload
    def add(
        self, prompt: str | Sequence[int], *, n: int, max_new_tokens: int | None = ..., stop: Stop = ...,
        seed: int = ..., logprobs: bool = ..., ignore_eos: bool = ..., priority: int = ...,
        request_id: str | None = ..., **sampling: Any,
    ) -> list[Stream]: ...  # fmt: skip

    def add(
        self,
        prompt: str | Sequence[int],
        *,
        n: int | None = None,
        max_new_tokens: int | None = None,
        stop: Stop = (),
        seed: int = 0,
        logprobs: bool = False,
        ignore_eos: bool = False,
        priority: int = 0,
        request_id: str | None = None,
        **sampling: Any,
    ) -> Stream | list[Stream]:
        """Add a request. It starts as soon as there is room for it.

        Args:
            prompt: a text or token ids.
            n: so many continuations of the prompt, for which a list of streams is returned. Their chunks have the
                `index` 0 to n - 1, and their seeds are seed, seed + 1 and so on; -2^63 follows 2^63 - 1. With the
                prefix cache the full pages of the prompt are computed once.
            max_new_tokens, stop, seed, logprobs, ignore_eos: as in `Engine.generate`.
            priority: requests with a lower number start first; those with the same number start as they came.
            request_id: a name of your choice, which no live request has. n continuations have this name, "-" and their
                index.
            sampling: the other options of `Engine.generate`, from temperature on, with one mask; with n, one for each
                continuation.

        Raises:
            ValueError, TypeError: as `Engine.generate`. All checks are made here.
            QueueFull: `max_waiting` requests wait already. With n, all continuations are added or none.
            RuntimeError: the engine is closed, or has failed.
        """
        streams = self._streams(
            self._requests(
                prompt, n=n, max_new_tokens=max_new_tokens, stop=stop, seed=seed, logprobs=logprobs,
                ignore_eos=ignore_eos, priority=priority, request_id=request_id, **sampling,
            )
        )  # fmt: skip
        return streams[0] if n is None else streams

    def add_all(self, requests: Iterable[Mapping[str, Any]]) -> list[Stream]:
        """Add several requests at once: all of them or, if anything is raised, none.

        Args:
            requests: the arguments of `add` for each, the prompt among them. One with n has n streams in the list.

        Raises:
            QueueFull: with these more than `max_waiting` requests would wait.
            ValueError, TypeError, RuntimeError: as `add`; or they are more than `max_waiting`.
        """
        return self._streams([request for arguments in requests for request in self._requests(**arguments)])

    def add_for(self, deliver: Deliver, requests: Iterable[Mapping[str, Any]]) -> None:
        """As `add_all`, without streams: for what passes chunks on to another process.

        Args:
            deliver: the engine's thread calls it once after a step, with all new chunks of requests that were added
                with it, or what ended them. It must be quick, and raise nothing.
        """
        self._worker.add([request for arguments in requests for request in self._requests(**arguments)], deliver)

    def _streams(self, requests: Sequence[Request]) -> list[Stream]:
        return [Stream(self, channel, self._worker.abort) for channel in self._worker.add(requests)]

    def _requests(
        self, prompt: str | Sequence[int], *, n: int | None = None, max_new_tokens: int | None = None, stop: Stop = (),
        seed: int = 0, logprobs: bool = False, ignore_eos: bool = False, priority: int = 0,
        request_id: str | None = None, mask: Masks = None, **sampling: Any,
    ) -> list[Request]:  # fmt: skip
        """A checked request for each continuation."""
        if not isinstance(prompt, str) and integer(prompt) is not None:
            raise TypeError(f"add: prompt is {prompt!r}, expected text or token ids")
        if request_id is not None and not isinstance(request_id, str):
            raise TypeError(f"add: request_id is {request_id!r}, expected a string")
        rank, one = integer(priority), integer(seed)
        if rank is None:
            raise TypeError(f"add: priority is {priority!r}, expected an integer")
        count = 1 if n is None else integer(n)
        if count is None:
            raise TypeError(f"add: n is {n!r}, expected an integer")
        if not 1 <= count <= self.max_waiting:
            raise ValueError(f"add: n is {count}, expected 1 to max_waiting, {self.max_waiting}")
        if n is None and isinstance(mask, Sequence):
            raise TypeError("add: mask is a sequence, expected one object, as there is no n")
        masks = list(mask) if isinstance(mask, Sequence) else [mask] * (1 if mask is not None else count)
        if len(masks) != count:
            raise ValueError(f"add: mask has {len(masks)} objects, expected {count}, one for each continuation")
        known = [field.name for field in dataclasses.fields(Sampling)]
        if unknown := [name for name in sampling if name not in known]:
            known += inspect.signature(self._requests).parameters
            raise TypeError(
                f"add: {unknown[0]} is no argument; "
                f"{did_you_mean(unknown[0], dict.fromkeys(name for name in known if name != 'sampling'))}"
            )
        (ids,) = encoded([prompt], self.engine.tokenizer, self.engine.config.vocab)
        its, requests = seed if one is None else one, []
        for i, its_mask in enumerate(masks):
            how = Sampling(seed=its, mask=its_mask, **sampling)
            request = self.engine._request(i, ids, max_new_tokens, stop, logprobs, ignore_eos, how, "add")
            request.priority, request.id = rank, request_id or ""
            if n is not None and request_id:
                request.id += f"-{i}"
            requests.append(request)
            its = its + 1 if its < (1 << 63) - 1 else -(1 << 63)
        return requests

    def abort(self, request_id: str) -> bool:
        """End a request, and give back its slot and pages. Its stream ends with the reason "abort".

        Returns whether such a request was waiting or running. Each of n continuations has an id of its own.
        """
        channel = self._worker.named(request_id)
        return channel is not None and self._worker.abort(channel)

    @property
    def failed(self) -> bool:
        """Whether an error has ended the thread: no request is taken any more."""
        return self._worker.failed

    def stats(self) -> EngineStats:
        """What runs and waits after the last step, and counts since the start."""
        return self._worker.stats()

    def close(self, *, drain: bool = False, timeout: float | None = None) -> None:
        """Take no more requests, and end the thread; the engine is free again.

        Args:
            drain: wait until all requests have ended, instead of aborting them.
            timeout: seconds to wait; with `drain`, requests that still live are aborted then.
        """
        self._worker.close(drain, timeout)

    def __enter__(self) -> AsyncEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
