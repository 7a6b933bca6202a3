"""An engine's loop without a model: what the server needs of it, with an answer that is a function of the prompt."""

import asyncio
import collections
import hashlib
import os
import signal
import threading
import time
import types

import torch
from tokenizers import Tokenizer

from rooftile import byte_model
from rooftile.engine import QueueFull, RequestError, StreamChunk
from rooftile.serve.app import Options, create_app
from rooftile.serve.chat import ChatTemplate
from rooftile.serve.front import Front
from rooftile.serve.server import BackgroundServer, listen

END = 256
TOKENIZER = (byte_model.folder() / "tokenizer.json").read_text(encoding="utf-8")
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ (tools or []) | tojson }}[assistant]"
HELLO = [{"role": "user", "content": "hello"}]


def prompt_of(*messages, tools="[]"):
    """What the template makes of messages."""
    return "".join(f"[{m['role']}]{m['content']}" for m in messages) + f"{tools}[assistant]"


def options_of(**options):
    return Options(**{"names": ("small", "alias"), "chat_template": ChatTemplate({"default": TEMPLATE}, {}), **options})


def serve(engine, **options):
    """A server on a free port of loopback, to be entered."""
    return BackgroundServer(create_app(engine, options_of(**options)))


def started(*, drain_timeout=60.0, **options):
    """A front on a free port of loopback, to be entered, and to begin with an engine."""
    return Front(listen("127.0.0.1", 0), options_of(**options), TOKENIZER, drain_timeout=drain_timeout)


def until(true, seconds=20.0):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def send(number):
    """A signal to this process, once `Front.run` takes it: a process of pytest-xdist has other handlers before."""
    until(lambda: "Front.run." in getattr(signal.getsignal(number), "__qualname__", ""))
    os.kill(os.getpid(), number)


def in_background(front, action):
    """Run what must make the front end. If it fails, the front is killed, so that no test waits for it forever."""

    def run():
        try:
            action()
        except BaseException:
            front._process.kill()
            raise

    threading.Thread(target=run).start()


def expected(prompt, n=40):
    """The text that a prompt is continued with."""
    digest = hashlib.sha256(prompt.encode()).hexdigest()
    return (digest * (n // len(digest) + 1))[:n]


class Stream:
    cached_tokens = 0

    def __init__(self, engine, request_id, prompt_tokens, tokens, logprobs, top=0):
        self.request_id, self.prompt_tokens = request_id, prompt_tokens
        self._engine, self._tokens, self._logprobs, self._top = engine, tokens, logprobs, top
        self._queue = asyncio.Queue()
        self._ended = False
        self._task = asyncio.ensure_future(self._run())

    async def _run(self):
        engine = self._engine
        engine.waiting += 1
        try:
            await engine.slots.acquire()
        finally:
            engine.waiting -= 1
        engine.running += 1
        try:
            for i, token in enumerate(self._tokens):
                await asyncio.sleep(engine.delay)
                if engine.fails is not None and engine.fails(self, i):
                    raise RequestError("it fails as the test asks")
                last = i + 1 == len(self._tokens)
                reason = ("stop" if token == END else "length") if last else None
                text = "" if token == END else engine.engine.tokenizer.decode([token])
                chunk = types.SimpleNamespace(
                    token=token, text=text, logprob=-0.5 if self._logprobs else None, finish_reason=reason
                )
                if self._top:
                    chunk.top_logprobs = [(token, -0.5), (token + 1, -1.5)][: self._top]
                self._queue.put_nowait(chunk)
                engine.generated_tokens += 1
        except RequestError as error:
            self._queue.put_nowait(error)
        finally:
            engine.running -= 1
            engine.slots.release()

    async def ready(self):
        if self._ended:
            return []
        item = await self._queue.get()
        if isinstance(item, Exception):
            raise item
        self._ended = item.finish_reason is not None
        return [item]

    async def aclose(self):
        self._task.cancel()
        self._engine.live.discard(self)

    def end(self):
        self._task.cancel()
        self._queue.put_nowait(types.SimpleNamespace(token=-1, text="", logprob=None, finish_reason="abort"))


def each(requests):
    """Those of `AsyncEngine.add` with n, as n without it."""
    for request in requests:
        for i in range(request.get("n") or 1):
            own = {"seed": request["seed"] + i} if "seed" in request else {}
            own |= {"mask": request["mask"][i]} if "mask" in request else {}
            yield {**request, **own, "n": None, "request_id": f"{request.get('request_id')}-{i}"}


class FakeEngine:
    """Args:
    answer: the text for a prompt's text.
    delay: seconds of a token.
    fails: whether a stream fails at its i-th token.
    """

    def __init__(self, *, answer=expected, delay=0.0, max_batch=8, max_seq_len=512, max_waiting=1000, fails=None):
        tokenizer = Tokenizer.from_file(str(byte_model.folder() / "tokenizer.json"))
        config = types.SimpleNamespace(vocab=264, eos=(END,))
        self.engine = types.SimpleNamespace(
            tokenizer=tokenizer, config=config, max_seq_len=max_seq_len, max_batch=max_batch
        )
        self.answer, self.delay, self.fails, self.max_waiting = answer, delay, fails, max_waiting
        self.slots = asyncio.Semaphore(max_batch)
        self.live = set()
        self.running = self.waiting = self.generated_tokens = self.prompt_tokens = self.added = 0
        self.last = {}
        self.failed = False

    def add(
        self, prompt, *, max_new_tokens, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0,
        stop=(), seed=0, logprobs=False, ignore_eos=False, priority=0, request_id=None, n=None,
    ):  # fmt: skip
        return self._add(prompt, dict(locals()), self.answer(self.engine.tokenizer.decode(prompt)))

    def add_all(self, requests):
        requests = list(each(requests))
        if len(requests) > self.max_waiting:
            raise ValueError(f"{len(requests)} requests, expected at most {self.max_waiting}")
        if self.waiting + len(requests) > self.max_waiting:
            raise QueueFull("as many wait as may")
        return [self.add(**arguments) for arguments in requests]

    def _add(self, prompt, options, text, top=0):
        self.last = options
        self.added += 1
        self.prompt_tokens += len(prompt)
        tokens = [*self.engine.tokenizer.encode(text).ids, END][: options["max_new_tokens"]]
        stream = Stream(self, f"request-{self.added}", prompt, tokens, options["logprobs"], top)
        self.live.add(stream)
        self.loop = asyncio.get_running_loop()
        return stream

    def close(self):
        """Abort everything. Any thread may call it."""
        for stream in [*self.live]:
            self.loop.call_soon_threadsafe(stream.end)

    def stats(self):
        return types.SimpleNamespace(
            running=self.running,
            waiting=self.waiting,
            pages_used=self.running,
            pages=self.engine.max_batch,
            prompt_tokens=self.prompt_tokens,
            generated_tokens=self.generated_tokens,
            prefix_hit_tokens=0,
            prefix_query_tokens=0,
            preemptions=0,
            steps=0,
        )


def written(mask, tokenizer):
    """A text whose tokens are among those that the mask allows, which ends as soon as it may."""
    ids, closing, space = [], [END, *tokenizer.encode('"}],:{').ids], tokenizer.encode(" \t\n\r").ids
    for _ in range(200):
        words = mask.mask()
        assert (words.dtype, words.shape) == (torch.int32, (9,))
        allowed = [t for t in range(264) if int(words[t // 32]) >> t % 32 & 1]
        token = next((t for t in closing if t in allowed), min(allowed, key=lambda t: (t in space, t)))
        mask.advance(token)
        if token == END:
            return tokenizer.decode(ids)
        ids.append(token)
    raise AssertionError("it did not end")


class MaskedEngine(FakeEngine):
    """One that takes all options of sampling, and writes what a mask allows."""

    def add(
        self, prompt, *, max_new_tokens, logprobs=False, mask=None, presence_penalty=0.0, frequency_penalty=0.0,
        logit_bias=None, top_logprobs=0, **options,
    ):  # fmt: skip
        tokenizer = self.engine.tokenizer
        text = self.answer(tokenizer.decode(prompt)) if mask is None else written(mask, tokenizer)
        return self._add(prompt, dict(locals()), text, top_logprobs)


class RelayedEngine(MaskedEngine):
    """One for another process, as `AsyncEngine.add_for`: every `delay` seconds a thread gives a token to each of the
    first `max_batch` requests."""

    def __init__(self, *, delay=0.001, **more):
        super().__init__(delay=delay, **more)
        self._lock, self._requests = threading.Lock(), {}
        threading.Thread(target=self._run, daemon=True).start()

    def add_for(self, deliver, requests):
        if self.failed:
            raise RuntimeError("the engine has failed")
        requests = list(each(requests))
        with self._lock:
            if len(self._requests) + len(requests) > self.max_waiting:
                raise QueueFull("as many wait as may")
            made = [self.add(**arguments) for arguments in requests]
            self._requests |= {request.id: (deliver, request) for request in made}

    def _add(self, prompt, options, text, top=0):
        self.added += 1
        self.last = options
        tokens = collections.deque([*self.engine.tokenizer.encode(text).ids, END][: options["max_new_tokens"]])
        logprob = -0.5 if options["logprobs"] else None
        return types.SimpleNamespace(
            id=options["options"]["request_id"], prompt_tokens=prompt, cached=len(prompt) // 2,
            left=tokens, logprob=logprob, top=top,
        )  # fmt: skip

    def _next(self, request):
        try:
            if self.fails is not None and self.fails(request, len(request.left)):
                raise RequestError("it fails as the test asks")
        except RequestError as error:
            return error
        self.generated_tokens += 1
        token = request.left.popleft()
        reason = None if request.left else "stop" if token == END else "length"
        text = "" if token == END else self.engine.tokenizer.decode([token])
        top = [(token, -0.5), (token + 1, -1.5)][: request.top] or None
        return StreamChunk(0, token, text, request.logprob, reason, top)

    def _run(self):
        while True:
            time.sleep(self.delay)
            with self._lock:
                batches = {}
                for deliver, request in [*self._requests.values()][: self.engine.max_batch]:
                    chunk = self._next(request)
                    if isinstance(chunk, RequestError) or chunk.finish_reason is not None:
                        del self._requests[request.id]
                    batches.setdefault(deliver, []).append((request, chunk))
                for deliver, batch in batches.items():
                    deliver(batch)

    def abort(self, request_id):
        with self._lock:
            if request_id in self._requests:
                deliver, request = self._requests.pop(request_id)
                deliver([(request, StreamChunk(0, -1, "", None, "abort"))])

    def close(self):
        for request_id in [*self._requests]:
            self.abort(request_id)

    def stats(self):
        held = len(self._requests)
        self.running = min(held, self.engine.max_batch)
        self.waiting = held - self.running
        return super().stats()
