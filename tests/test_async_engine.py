"""AsyncEngine: requests as they come get the tokens of `generate`, and all they took is given back."""

import asyncio
import gc
import threading
import time

import pytest
import torch

import rooftile
from rooftile.engine import QueueFull, RequestError

pytest.importorskip("transformers")

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 131,
    "max_position_embeddings": 96,
    "initializer_range": 0.3,
}
PROMPTS = [[3, 5, 8, 13, 21], [9, 9, 4], [100, 2, 64, 17, 31, 5, 77], [50]]
# Greedy, drawn, penalised, and both.
HOW = [
    {},
    {"temperature": 0.9, "top_k": 20, "seed": 3},
    {"repetition_penalty": 1.4},
    {"temperature": 1.1, "min_p": 0.02, "repetition_penalty": 1.2, "seed": 9},
]
NEW = 4


def made(**more):
    options = {"dtype": torch.float32, "max_batch": 3, "max_seq_len": 48, "page_size": 16, **more}
    return rooftile.Engine.from_config(CONFIG, **options)


@pytest.fixture(scope="module")
def engine():
    return made()


@pytest.fixture(scope="module")
def expected(engine):
    """The tokens of each prompt alone, by the other way."""
    return [
        engine.generate(p, max_new_tokens=NEW, ignore_eos=True, **how)[0].tokens
        for p, how in zip(PROMPTS, HOW, strict=True)
    ]


@pytest.fixture
def served(engine):
    with rooftile.AsyncEngine(engine) as served:
        yield served
    assert free_of(engine) == (9, 0)


def free_of(engine):
    return engine.runner.cache.free_pages, len(engine.runner.cache.sequences)


def add(served, i, **more):
    return served.add(PROMPTS[i], **{"max_new_tokens": NEW, "ignore_eos": True, **HOW[i], **more})


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2]])
def test_tokens_are_those_of_generate_in_whatever_order_requests_come(order, served, expected):
    streams = {i: add(served, i) for i in order}
    for i, stream in streams.items():
        found = stream.result()
        assert (found.prompt, found.tokens, found.finish_reason) == (PROMPTS[i], expected[i], "length")
    stats = served.stats()
    assert (stats.running, stats.waiting, stats.pages_used, stats.pages) == (0, 0, 0, 9)
    assert stats.finished == {"stop": 0, "length": 4, "abort": 0, "error": 0}
    assert stats.generated_tokens == 4 * NEW


def test_chunks_come_as_from_generate(served, engine, expected):
    stream = add(served, 1, logprobs=True, request_id="mine")
    assert (stream.request_id, stream.prompt_tokens) == ("mine", PROMPTS[1])
    chunks = list(stream)
    assert [c.token for c in chunks] == expected[1]
    assert [c.finish_reason for c in chunks] == [None] * (NEW - 1) + ["length"]
    assert stream.result().logprobs == [c.logprob for c in chunks]
    assert all(c.logprob < 0 for c in chunks)
    assert list(stream) == []


def test_an_abandoned_a_closed_and_an_aborted_stream_give_back_what_they_took(served, engine):
    abandoned, closed, aborted, waiting = (add(served, 0, max_new_tokens=40) for _ in range(4))
    for stream in (abandoned, closed, aborted):
        next(stream)
    assert waiting.abort()
    del abandoned, stream
    gc.collect()
    closed.close()
    assert served.abort(aborted.request_id)
    for stream in (closed, aborted, waiting):
        assert [c.finish_reason for c in stream][-1] == "abort"
    assert waiting.result().tokens == []
    assert not served.abort("no such request")
    add(served, 1).result()  # the loop has taken all that was asked before
    assert served.stats().finished == {"stop": 0, "length": 1, "abort": 4, "error": 0}
    assert served.stats().pages_used == 0


def test_what_cannot_be_added(served):
    for error, message, arguments in (
        (TypeError, "prompt is 5", {"prompt": 5}),
        (ValueError, "prompt 0 is empty", {"prompt": []}),
        (ValueError, "token 131", {"prompt": [131]}),
        (ValueError, "no tokenizer", {"prompt": "text"}),
        (TypeError, "expected text, or token ids", {"prompt": [[1], [2]]}),
        (ValueError, "max_new_tokens is 0", {"max_new_tokens": 0}),
        (ValueError, "max_seq_len, 48", {"max_new_tokens": 48}),
        (ValueError, "temperature is -1", {"temperature": -1}),
        (TypeError, "seed is 'x'", {"seed": "x"}),
        (TypeError, "priority is 0.5", {"priority": 0.5}),
        (TypeError, "request_id is 7", {"request_id": 7}),
        (TypeError, "heat", {"heat": 1}),
    ):
        with pytest.raises(error, match=message):
            served.add(**{"prompt": [1], "max_new_tokens": 3, **arguments})
    assert served.stats().waiting == 0


def test_two_event_loops_and_a_thread_take_at_once(served, expected):
    found = {}

    async def take(i):
        found[i] = [chunk.token async for chunk in add(served, i)]

    async def several(which):
        await asyncio.gather(*(take(i) for i in which))

    threads = [threading.Thread(target=lambda w=which: asyncio.run(several(w))) for which in ([0, 1], [2])]
    for thread in threads:
        thread.start()
    found[3] = [chunk.token for chunk in add(served, 3)]
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(4)] == expected


def test_the_queue_is_bounded_and_a_lower_number_goes_first(engine):
    with rooftile.AsyncEngine(engine, max_waiting=3) as served, held(served) as release:
        running = [add(served, 0) for _ in range(3)]
        until(lambda: served.stats().running == 3)
        waiting = [add(served, 0, priority=p, request_id=f"{p}") for p in (1, 2, 0)]
        with pytest.raises(QueueFull, match="3 requests wait already"):
            add(served, 0)
        with pytest.raises(ValueError, match="request_id is '1', which a live request has"):
            add(served, 0, request_id="1")
        order, admit = [], served._worker.loop.scheduler.admit
        served._worker.loop.scheduler.admit = lambda: (got := admit(), order.extend(r.id for r in got))[0]
        release()
        for stream in running + waiting:
            stream.result()
    assert order == ["0", "1", "2"]
    assert free_of(engine) == (9, 0)


class held:
    """The loop stands still once three requests run, until it is released."""

    def __init__(self, served):
        self.loop, self.event = served._worker.loop, threading.Event()

    def __enter__(self):
        step = self.loop.step

        def held():
            if len(self.loop.scheduler.running) == 3:
                assert self.event.wait(30)
            return step()

        self.loop.step = held
        return self.event.set

    def __exit__(self, *_):
        self.event.set()


def until(true):
    for _ in range(3000):
        if true():
            return
        time.sleep(0.01)
    raise AssertionError("it did not come true in 30 s")


def test_an_error_in_one_request_ends_that_request_alone(served, expected, monkeypatch):
    good, bad = add(served, 0), add(served, 1, stop=[5])
    watch = bad._channel.request.watch

    def failing(*_):
        raise OSError("no such character")

    monkeypatch.setattr(watch, "add", failing)
    with pytest.raises(RequestError, match="no such character") as raised:
        bad.result()
    assert isinstance(raised.value.__cause__, OSError)
    with pytest.raises(RequestError):
        bad.result()
    assert list(bad) == []
    assert good.result().tokens == expected[0]
    assert served.stats().finished["error"] == 1


def test_an_error_of_a_step_ends_all_and_the_next_request_runs(served, engine, expected, monkeypatch):
    def failing(*args):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(engine.runner.decoder, "decode", failing)
        streams = [add(served, i) for i in range(4)]
        for stream in streams:
            with pytest.raises(RequestError, match="out of memory"):
                stream.result()
    assert free_of(engine) == (9, 0)
    assert add(served, 2).result().tokens == expected[2]


def test_an_engine_that_has_failed_says_so(monkeypatch):
    engine = made()
    served = rooftile.AsyncEngine(engine)

    def failing(*args):
        raise RuntimeError("the device is lost")

    with monkeypatch.context() as patched:
        patched.setattr(engine.runner.decoder, "decode", failing)
        patched.setattr(engine.runner, "free", failing)
        with pytest.raises(RequestError, match="the device is lost"):
            add(served, 0).result()
        served._worker._thread.join(30)
        with pytest.raises(RuntimeError, match="the engine has failed"):
            add(served, 0)
    served.close()


def test_it_closes_at_once_or_when_all_have_ended(engine, expected):
    served = rooftile.AsyncEngine(engine)
    with pytest.raises(RuntimeError, match="another call generates"):
        engine.generate([1], max_new_tokens=1)
    with pytest.raises(RuntimeError, match="the engine generates already"):
        rooftile.AsyncEngine(engine)
    streams = [add(served, i) for i in range(4)]
    served.close(drain=True)
    assert [s.result().tokens for s in streams] == expected
    with pytest.raises(RuntimeError, match="is closed"):
        add(served, 0)
    assert engine.generate(PROMPTS[0], max_new_tokens=NEW, ignore_eos=True)[0].tokens == expected[0]

    served = rooftile.AsyncEngine(engine)
    stream = add(served, 0, max_new_tokens=40)
    next(stream)
    served.close()
    assert stream.result().finish_reason == "abort"

    served = rooftile.AsyncEngine(engine)
    thread, stream = served._worker._thread, add(served, 0, max_new_tokens=40)
    del served, stream
    gc.collect()
    thread.join(30)
    assert not thread.is_alive()
    assert free_of(engine) == (9, 0)
