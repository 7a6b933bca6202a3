"""An engine's loop without a model: what the server needs of it, with an answer that is a function of the prompt."""

import asyncio
import hashlib
import types

from tokenizers import Tokenizer

from rooftile import byte_model
from rooftile.engine import QueueFull, RequestError, StreamChunk

END = 256


def expected(prompt, n=40):
    """The text that a prompt is continued with."""
    digest = hashlib.sha256(prompt.encode()).hexdigest()
    return (digest * (n // len(digest) + 1))[:n]


class Stream:
    def __init__(self, engine, request_id, prompt_tokens, tokens, logprobs):
        self.request_id, self.prompt_tokens = request_id, prompt_tokens
        self._engine, self._tokens, self._logprobs = engine, tokens, logprobs
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
                self._queue.put_nowait(StreamChunk(0, token, text, -0.5 if self._logprobs else None, reason))
                engine.generated_tokens += 1
        except RequestError as error:
            self._queue.put_nowait(error)
        finally:
            engine.running -= 1
            engine.slots.release()

    def __aiter__(self):
        return self

    async def __anext__(self):
        if self._ended:
            raise StopAsyncIteration
        item = await self._queue.get()
        if isinstance(item, Exception):
            raise item
        self._ended = item.finish_reason is not None
        return item

    async def aclose(self):
        self._task.cancel()


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
        self.running = self.waiting = self.generated_tokens = self.prompt_tokens = self.added = 0
        self.last = {}

    def add(
        self, prompt, *, max_new_tokens, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0,
        stop=(), seed=0, logprobs=False, ignore_eos=False, priority=0, request_id=None,
    ):  # fmt: skip
        self.last = dict(locals())
        if self.waiting >= self.max_waiting:
            raise QueueFull("as many wait as may")
        self.added += 1
        self.prompt_tokens += len(prompt)
        text = self.answer(self.engine.tokenizer.decode(prompt))
        tokens = [*self.engine.tokenizer.encode(text).ids, END][:max_new_tokens]
        return Stream(self, request_id or f"request-{self.added}", prompt, tokens, logprobs)

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
