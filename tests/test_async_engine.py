"""AsyncEngine: requests as they come get the tokens of `generate`, and all they took is given back."""

import asyncio
import collections
import contextlib
import gc
import operator
import pickle
import queue
import random
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch

import rooftile
from rooftile.engine import QueueFull, RequestError, cascade
from rooftile.engine import runner as runners
from rooftile.engine.async_engine import _FREEZER
from rooftile.engine.generation import Readback
from rooftile.engine.loop import Loop
from rooftile.engine.pace import Pace
from rooftile.engine.paged_cache import PagedSequence
from rooftile.engine.prefix import PrefixCache, page_names
from rooftile.engine.prompts import MixedBatch, rounded, slots_of
from rooftile.engine.sampling import Sampling
from rooftile.engine.scheduling import Request, Scheduler

pytest.importorskip("transformers")

CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
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
NEW = 3


def made(config=None, **more):
    options = {"dtype": torch.float32, "max_batch": 3, "max_seq_len": 48, "page_size": 16, **more}
    return rooftile.Engine.from_config(CONFIG | (config or {}), **options)


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


def test_chunks_that_have_come_are_taken_at_once_and_an_error_behind_them(served, expected):
    async def take():
        stream = add(served, 0)
        while served.stats().running or served.stats().waiting:
            await asyncio.sleep(0.01)
        stream._channel.put(RequestError("behind them"), True)
        chunks = await stream.ready()
        with pytest.raises(RequestError, match="behind them"):
            await stream.ready()
        return [chunk.token for chunk in chunks], await stream.ready()

    assert asyncio.run(take()) == (expected[0], [])


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
        (TypeError, "n is 1.5, expected an integer", {"n": 1.5}),
        (ValueError, "n is 0, expected 1 to max_waiting, 1024", {"n": 0}),
        (ValueError, "n is 1025", {"n": 1025}),
        (ValueError, "mask has 1 objects, expected 2, one for each continuation", {"n": 2, "mask": object()}),
        (ValueError, "seed is 9223372036854775808", {"n": 2, "seed": 2**63}),
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
        order, scheduler = [], served._worker.loop.scheduler
        admitted = scheduler._admitted
        scheduler._admitted = lambda r, *more: admitted(r, *more) and (order.append(r.id) or True)
        release()
        for stream in running + waiting:
            stream.result()
    assert order == ["0", "1", "2"]
    assert free_of(engine) == (9, 0)


def test_several_are_added_together_or_not_at_all(engine, expected):
    ask = {"prompt": PROMPTS[0], "max_new_tokens": NEW, "ignore_eos": True}
    with rooftile.AsyncEngine(engine, max_waiting=3) as served, held(served) as release:
        streams = served.add_all([ask] * 3)
        until(lambda: served.stats().running == 3)
        streams += served.add_all([ask])
        with pytest.raises(QueueFull, match="1 requests wait already, and 3 more"):
            served.add_all([ask] * 3)
        with pytest.raises(ValueError, match="4 requests, expected at most 3"):
            served.add_all([ask] * 4)
        with pytest.raises(ValueError, match="request_id is 'x'"):
            served.add_all([{**ask, "request_id": "x"}] * 2)
        with pytest.raises(ValueError, match="is empty"):
            served.add_all([ask, {"prompt": []}])
        assert served.stats().waiting == 1
        streams += served.add_all([ask, {**ask, "request_id": "x"}])
        release()
        assert [stream.result().tokens for stream in streams] == [expected[0]] * 6


def test_n_continuations_are_those_of_n_requests_whose_prompt_is_computed_once(engine):
    """Each has the seed after the last one's; after the greatest of 64 bits comes the least."""
    prompt, seeds = [11, 12] * 17, [2**63 - 2, 2**63 - 1, -(2**63)]
    how = {"temperature": 1.5, "max_new_tokens": NEW, "ignore_eos": True}
    expected = [engine.generate(prompt, seed=seed, **how)[0].tokens for seed in seeds]
    assert len({*map(tuple, expected)}) == 3
    with rooftile.AsyncEngine(engine) as served:
        streams = served.add(prompt, n=3, seed=seeds[0], request_id="mine", **how)
        assert [stream.request_id for stream in streams] == ["mine-0", "mine-1", "mine-2"]
        assert [{chunk.index for chunk in stream} for stream in streams] == [{0}, {1}, {2}]
        assert [stream.result().tokens for stream in streams] == expected
        assert served.stats().prompt_tokens == 34 + 2 * (34 - 32)
        streams = served.add_all([{"prompt": prompt, "n": 2, "seed": seeds[1], **how}, {"prompt": prompt, **how}])
        assert [stream.result().tokens for stream in streams[:2]] == expected[1:]
        assert [len(streams), len(served.add(prompt, n=1, **how))] == [3, 1]
    engine.runner.cache.forget()
    assert free_of(engine) == (9, 0)


def test_of_n_continuations_each_ends_by_itself_and_all_are_added_or_none(engine, expected):
    with rooftile.AsyncEngine(engine, max_waiting=3) as served:
        first, second, third = add(served, 0, n=3, max_new_tokens=12)
        assert second.abort()
        assert second.result().finish_reason == "abort"
        third.close()
        assert len(first.result().tokens) == 12
        assert first.result().tokens[:NEW] == expected[0]
        with held(served) as release:
            running = add(served, 0, n=3)
            until(lambda: served.stats().running == 3)
            waiting = add(served, 2, n=2)
            with pytest.raises(QueueFull, match="2 requests wait already, and 2 more"):
                add(served, 2, n=2)
            assert served.stats().waiting == 2
            release()
            assert [s.result().tokens for s in running] == [expected[0]] * 3  # greedy: the seed is not read
            assert [s.result().tokens for s in waiting] == [expected[2]] * 2
    assert free_of(engine) == (9, 0)


def test_chunks_for_another_process_come_together_after_each_step(served, engine, expected, monkeypatch):
    batches, by_id = [], collections.defaultdict(list)

    def deliver(batch):
        batches.append([request.id for request, _ in batch])
        for request, chunk in batch:
            by_id[request.id].append(chunk)

    def ask(i, request_id, **more):
        return {"prompt": PROMPTS[i], "max_new_tokens": NEW, "ignore_eos": True, "request_id": request_id, **more}

    def ended(*ids):
        until(lambda: all(by_id[i] and getattr(by_id[i][-1], "finish_reason", "error") for i in ids))

    with pytest.raises(ValueError, match="is empty"):
        served.add_for(deliver, [ask(0, "x"), {"prompt": []}])
    served.add_for(deliver, [ask(0, "a"), ask(0, "b"), ask(0, "c", max_new_tokens=40)])
    ended("a", "b")
    assert served.abort("c")
    ended("c")
    assert [[chunk.token for chunk in by_id[i]] for i in "ab"] == [expected[0]] * 2
    assert (by_id["c"][-1].token, by_id["c"][-1].finish_reason) == (-1, "abort")
    assert ["a", "b", "c"] in batches
    assert not by_id["x"]
    with monkeypatch.context() as patched:
        patched.setattr(engine.runner, "decode", lambda *_: 1 / 0)
        served.add_for(deliver, [ask(0, "d"), ask(0, "e")])
        ended("d", "e")
    assert all(isinstance(by_id[i][-1].__cause__, ZeroDivisionError) for i in "de")
    assert served.stats().finished == {"stop": 0, "length": 2, "abort": 1, "error": 2}


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


LONG = [[(7 * t) % 131 for t in range(37)], [(5 * t + 3) % 131 for t in range(20)]]


@pytest.mark.parametrize(
    ("family", "step_tokens"),
    [
        pytest.param("llama", 4, marks=pytest.mark.nightly),
        ("mistral", 11),
        pytest.param("qwen3", 30, marks=pytest.mark.nightly),
        pytest.param("phi3", 11, marks=pytest.mark.nightly),
        pytest.param("gemma2", 11, marks=pytest.mark.nightly),
    ],
)
def test_prompts_in_parts_beside_decoding_give_the_tokens_of_whole_ones(family, step_tokens):
    """None decodes less often than once a step, and no step has more tokens than it may."""
    more = {
        "mistral": {"sliding_window": 7},
        "qwen3": {"head_dim": 8},
        "phi3": {"partial_rotary_factor": 0.5, "pad_token_id": 0},
        "gemma2": {"head_dim": 16, "sliding_window": 7, "num_hidden_layers": 2, "attn_logit_softcapping": 1.5},
    }.get(family, {})
    engine = rooftile.Engine.from_config(
        CONFIG | {"model_type": family} | more, dtype=torch.float32, max_batch=3, max_seq_len=48, page_size=16
    )
    prompts = [PROMPTS[1], *LONG, PROMPTS[3]]
    expected = [c.tokens for c in engine.generate(prompts, max_new_tokens=5, ignore_eos=True)]
    plans = []
    with rooftile.AsyncEngine(engine, step_tokens=step_tokens, prefix_cache=False) as served:
        scheduler = served._worker.loop.scheduler
        plan = scheduler.plan
        scheduler.plan = lambda: plans.append(plan()) or plans[-1]
        streams = [served.add(p, max_new_tokens=5, ignore_eos=True) for p in prompts]
        assert [s.result().tokens for s in streams] == expected
        assert served.stats().prompt_tokens == sum(len(p) for p in prompts)
    assert max(sum(p.values()) for p in plans) <= step_tokens
    assert any(1 in p.values() and len({*p.values()}) > 1 for p in plans), "no step was mixed"
    assert free_of(engine) == (9, 0)


def test_the_layout_of_a_mixed_step(device):
    """Newest tokens in the rows of their slots, then a part of a prompt, and padding as a sequence without keys."""
    new = {
        PagedSequence(5, 17, [8, 9]): None,
        PagedSequence(0, 4, [2]): None,
        PagedSequence(2, 18, [4, 5]): [71, 72, 73],
        PagedSequence(1, 41, [1, 6, 7]): None,
        PagedSequence(3, 1, [3]): None,
    }
    batch = MixedBatch(new, {2}, 16, 3, 6)
    newest = torch.arange(100, 108, dtype=torch.int32, device=device)
    inputs = batch.filled(batch.numbers.to(device), newest)
    assert (batch.newest, batch.rows, batch.longest) == (6, 6, 10)
    assert batch.shape == (6, 16, 6, 4)
    assert inputs.ids.tolist() == [100, 101, 102, 103, 104, 105, 71, 72, 73, *[0] * 7]
    assert inputs.positions.tolist() == [3, 40, 0, 0, 0, 16, 15, 16, 17, *[0] * 7]
    assert inputs.starts.tolist() == [3, 8, 0, 0, 0, 0, 15, 0, 1, *[0] * 7]
    assert inputs.pages.flatten().tolist() == [2, 7, 0, 3, 0, 9, 4, 5, 5, *[0] * 7]
    assert inputs.counts.tolist() == [1, 1, 0, 1, 0, 1, 1, 1, 1, *[0] * 7]
    assert inputs.lengths.tolist() == [4, 41, 0, 1, 0, 17]
    assert inputs.ends.tolist() == [0, *[3] * 3, 10]
    assert inputs.part_lengths.tolist() == [18, *[0] * 3]
    assert inputs.part_pages.tolist() == [[4, 5, -1], *[[-1, -1, -1]] * 3]
    assert inputs.rows.tolist() == [0, 1, 8, 3, 4, 5]

    only = MixedBatch({s: tokens for s, tokens in new.items() if tokens}, (), 16, 3, 6, every=True)
    inputs = only.of(only.numbers)
    assert (only.shape, only.newest, inputs.rows, inputs.lengths) == (None, 0, None, None)
    assert inputs.ids.tolist() == [71, 72, 73, 0]


def test_mixed_steps_have_few_shapes():
    """Whatever prompts come, and however many sequences decode."""
    assert [rounded(n) for n in (1, 2, 3, 33, 64, 65, 449, 512, 513)] == [1, 2, 4, 64, 64, 128, 512, 512, 640]
    assert [slots_of(n, 200) for n in (1, 2, 17, 33, 64, 65, 129)] == [16, 16, 32, 64, 64, 96, 160]
    assert slots_of(193, 200) == 200
    shapes, rng = set(), random.Random(0)
    for _ in range(500):
        decoding = rng.randrange(33)
        budget = 512 - (slots_of(decoding, 64) if decoding else 0)
        lengths = [rng.randrange(1, budget)]
        lengths.append(rng.randrange(budget - lengths[0] + 1))
        new = {PagedSequence(slot, 8, [0]): None for slot in range(decoding)}
        new |= {PagedSequence(decoding + i, n, [0] * 32): [1] * n for i, n in enumerate(lengths) if n}
        last = {slot for slot in (decoding, decoding + 1) if rng.randrange(2)}
        shapes.add(MixedBatch(new, last, 16, 64, 64).shape)
    assert {total for _, total, _, _ in shapes} <= {rounded(n) for n in range(1, 577)}
    assert {sequences for *_, sequences in shapes} == {4}
    assert {rows for _, _, rows, _ in shapes} == {16, 32, 64}
    assert {newest for newest, *_ in shapes} == {0, 16, 32, 64}
    assert all(newest in (0, rows) for newest, _, rows, _ in shapes)


class Planned:
    """A scheduler's steps without a model: sequences end by length, and tokens are all alike."""

    def __init__(self, slots, pages, step_tokens):
        self._slots = slots
        self.cache = PrefixCache(pages, 16, 1, 8, max_sequences=slots, max_seq_len=64, device="cpu")
        runner = SimpleNamespace(cache=self.cache, max_batch=slots, share=self.cache.share, free=self.cache.free)
        self.scheduler = Scheduler(runner, step_tokens, False)

    def step(self):
        """What is computed of each request, and the layout of the step."""
        work, new = self.scheduler.plan(), {}
        for request, n in work.items():
            request.sequence = request.sequence or self.cache.share([])
            start, decodes = request.computed, request.decoding
            request.launched += start + n >= len(request.filled)
            new[request.sequence] = None if decodes else request.filled[start : start + n]
        self.cache.reserve({r.sequence: n for r, n in work.items()})
        self.cache._advanced = True
        for request in work:
            self.scheduler.launched(request)
        laid_out = MixedBatch(new, {r.sequence.slot for r in work if r.launched}, 16, 4, self._slots)
        for request in [r for r in work if r.launched == r.limit]:
            self.scheduler.remove(request)
            self.cache.free(request.sequence)
        return work, laid_out


def test_steps_have_no_more_tokens_than_they_may_with_the_rows_of_slots():
    """Slots from which sequences have gone have rows, too."""
    rng, mixed = random.Random(0), 0
    planned = Planned(12, 48, 32)
    for i in range(200):
        planned.scheduler.add(Request(i, [1] * rng.randrange(1, 40), rng.randrange(1, 9), Sampling()))
    while planned.scheduler.waiting or planned.scheduler.running:
        work, laid_out = planned.step()
        tokens = laid_out.of(laid_out.numbers).ids.shape[0]
        if any(n > 1 for n in work.values()):
            assert tokens <= 32
            mixed += tokens == 32 and laid_out.newest > 0
    assert mixed > 20, "few full steps were mixed"


def test_every_slot_is_used_where_each_has_pages_for_the_longest_sequence():
    """No page is kept back for what a sequence can't become."""
    planned = Planned(4, 8, 128)  # two pages for each
    for i in range(12):
        planned.scheduler.add(Request(i, [1] * 17, 13 + i % 4, Sampling()))
    steps = 0
    while planned.scheduler.waiting:
        work, _ = planned.step()
        assert len(work) == 4
        steps += 1
    assert steps > 30
    assert planned.scheduler.preemptions == 0


def test_empty_rows_leave_room_for_prompts_in_small_steps():
    planned = Planned(32, 40, 33)
    decoding, prompt = Request(0, [1], 30, Sampling()), Request(1, [1] * 40, 2, Sampling())
    planned.scheduler.add(decoding)
    planned.step()
    planned.scheduler.add(prompt)
    assert [planned.step()[0][prompt] for _ in range(4)] == [17, 17, 6, 1]


def shapes_of(runner, monkeypatch):
    """Those of the mixed steps that are given to it from now on, which computes nothing."""
    shapes = []
    monkeypatch.setattr(runner, "_graphs", {})
    monkeypatch.setattr(runner, "_prefilled", lambda step: shapes.append(step.shape) or torch.zeros(step.rows, 384))
    return shapes


def test_a_warm_up_covers_mixed_steps_that_are_not_full(monkeypatch):
    """Up to so many tokens, beside up to so many slots; full ones beside any number."""
    monkeypatch.setattr(runners, "_PARTLY_FULL_TOKENS", 128)
    monkeypatch.setattr(runners, "_PARTLY_FULL_SLOTS", 32)
    runner = made(max_batch=72, max_seq_len=80, pages=100).runner  # full steps take several parts
    shapes = shapes_of(runner, monkeypatch)
    monkeypatch.setattr(runner, "_sample_first", lambda *args: None)
    monkeypatch.setattr(runner, "_graph", lambda *args: None)
    runner.warm_up(192)
    alone = {(0, total, 16, 4) for total in (1, 2, 4, 8, 16, 32, 64, 128)}
    beside = {(16, 32, 16, 4), (16, 64, 16, 4), (16, 128, 16, 4), (32, 64, 32, 4), (32, 128, 32, 4)}
    full = {(b, 192, b, room) for b in (16, 32, 64, 72) for room in (4, 16)}
    captured = collections.Counter(shapes)
    assert {shape for shape, n in captured.items() if n > 1} == alone | beside | full
    assert {shape for shape, n in captured.items() if n == 1} == {(0, 192, 16, 4)}, "compiled"


@pytest.mark.parametrize(
    ("options", "verifies", "grouped"),
    [
        ({}, [False], []),
        ({"deterministic": True}, [False], []),
        ({"speculate": rooftile.NGram(tokens=2)}, [False, True], []),
        ({"cascade": True}, [False], [4, 8]),
    ],
)
def test_a_warm_up_covers_decoding_and_full_steps(options, verifies, grouped, monkeypatch):
    monkeypatch.setattr(cascade, "MIN_SEQUENCES", 3)
    monkeypatch.setattr(cascade, "MIN_TOKENS", 48)
    engine = made(max_batch=8, pages=12, **options)
    runner, graphs, ways = engine.runner, [], set()
    shapes = shapes_of(runner, monkeypatch)
    monkeypatch.setattr(runner, "_sample_first", lambda b, logits, greedy: ways.add(greedy))
    monkeypatch.setattr(runner, "_graph", lambda *args: graphs.append(args))
    runner.warm_up(32)
    assert ways == ({False} if "deterministic" in options else {True, False})
    for room in (4, 16):  # of parts
        assert shapes.count((8, 32, 8, room)) == 2, "eagerly, and captured"
    assert {total for _, total, *_ in shapes} == {1, 2, 4, 8, 16, 32}
    kinds = [(b, v, False) for b in (1, 2, 4, 8) for v in verifies] + [(b, False, True) for b in grouped]
    assert sorted(graphs) == sorted((b, greedy, *kind) for b, *kind in kinds for greedy in ways)
    assert free_of(engine) == (12, 0)


def test_a_warm_up_leaves_an_engine_as_it_was(device, monkeypatch):
    """What it writes is where nothing is: tokens are the same, also of prompts that were in the prefix cache."""
    engine = made(max_batch=2, pages=4)
    with rooftile.AsyncEngine(engine) as served:
        expected = served.add(LONG[0], max_new_tokens=3, ignore_eos=True).result().tokens
    monkeypatch.setattr(engine.runner, "_graphs", {})
    monkeypatch.setattr(engine.runner, "_graph", lambda *args: None)
    engine.runner.warm_up(4)
    monkeypatch.undo()
    assert free_of(engine) == (4, 0)
    with rooftile.AsyncEngine(engine) as served:
        assert served.add(LONG[0], max_new_tokens=3, ignore_eos=True).result().tokens == expected
        assert served.stats().prefix_hit_tokens == 0
    sequence = engine.runner.share([])
    monkeypatch.setattr(engine.runner, "_graphs", {})
    with pytest.raises(RuntimeError, match="warm_up: there are sequences"):
        rooftile.AsyncEngine(engine, warm_up=True)
    engine.runner.free(sequence)
    monkeypatch.undo()
    assert len(engine.generate(PROMPTS[0], max_new_tokens=1)) == 1  # it is free again


@pytest.mark.parametrize("warm", [True, False])
def test_a_warm_engine_keeps_the_garbage_collector_from_what_there_is(warm):
    """A full collection stops the thread, and with it all requests."""
    gc.unfreeze()
    with rooftile.AsyncEngine(made(max_batch=2), warm_up=warm):
        with rooftile.AsyncEngine(made(max_batch=2), warm_up=warm):
            assert (gc.get_freeze_count() > 0) == warm
        assert (gc.get_freeze_count() > 0) == warm  # for the other one
    assert not gc.get_freeze_count()


@pytest.mark.parametrize("end", ["closed", "failed"])
@pytest.mark.parametrize("second", ["rank 0", "rank 1"])
def test_what_several_engines_keep_is_kept_until_the_last_one_ends(second, end, monkeypatch):
    """Whichever was first, and also where the second one is a rank that follows: it ends when rank 0 says so."""
    gc.unfreeze()
    first = rooftile.AsyncEngine(made(max_batch=2), warm_up=True)
    engine, said = made(max_batch=2), queue.SimpleQueue()
    if second == "rank 1":
        monkeypatch.setattr(engine, "rank", 1)
        monkeypatch.setattr(engine.runner, "ranks", SimpleNamespace(rank=1, receive=said.get))
    with contextlib.ExitStack() as stack:
        last = stack.enter_context(rooftile.AsyncEngine(engine, warm_up=True))
        stack.callback(said.put, pickle.dumps(([], True)) if end == "closed" else b"")
        until(lambda: _FREEZER._users >= 2)  # a follower's thread freezes
        if end == "failed":
            first._worker.loop.step = lambda: sys.exit("the device is lost")
            with pytest.raises(RequestError, match="the device is lost"):
                add(first, 0).result()
        first.close()
        assert first.failed == (end == "failed")
        assert gc.get_freeze_count()
    assert last.failed == (second == "rank 1" and end == "failed")
    assert not gc.get_freeze_count()
    with rooftile.AsyncEngine(made(max_batch=2), warm_up=True):
        assert gc.get_freeze_count()
    assert not gc.get_freeze_count()


def test_an_engine_whose_thread_does_not_start_is_free_again(monkeypatch):
    """Nothing stays frozen, its runner no longer leads, and other ranks hear of the end."""
    gc.unfreeze()
    engine, sent = made(max_batch=2), []
    runner = engine.runner

    def failing(_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(runner, "ranks", SimpleNamespace(rank=0, send=sent.append))
        patched.setattr(threading.Thread, "start", failing)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            rooftile.AsyncEngine(engine, warm_up=True)
    assert pickle.loads(sent[-1]) == ([], True)
    assert engine.runner is runner
    assert not gc.get_freeze_count()
    with rooftile.AsyncEngine(engine) as served:
        assert len(add(served, 0).result().tokens) == NEW


def test_what_others_froze_stays_frozen():
    gc.freeze()
    try:
        with rooftile.AsyncEngine(made(max_batch=2), warm_up=True):
            pass
        assert gc.get_freeze_count()
    finally:
        gc.unfreeze()


@pytest.mark.gpu
def test_a_warm_engine_captures_nothing_more_in_full_steps(device):
    """And its tokens are those of one that was not warmed up."""
    found = []
    for warm in (True, False):
        engine = made(max_batch=4, max_seq_len=64, device=device)
        with rooftile.AsyncEngine(engine, step_tokens=16, warm_up=warm) as served:
            graphs, prompts = ({**x} for x in (engine.runner._graphs, engine.runner._of_prompts._graphs))
            streams = [served.add(p, max_new_tokens=9, ignore_eos=True) for p in (*LONG, *LONG, *PROMPTS)]
            found.append([s.result().tokens for s in streams])
            if warm:
                assert engine.runner._graphs.keys() == graphs.keys()
                more = engine.runner._of_prompts._graphs.keys() - prompts.keys()
                assert not [shape for shape in more if shape[0] and shape[1] == 16]
    assert found[0] == found[1]


@pytest.mark.gpu
def test_graphs_between_mixed_steps_give_what_plain_launches_give(device):
    """Bit-identical for one order of arrival: the loop begins when all requests are there."""
    found, more = [], {"config": {"num_hidden_layers": 2}, "device": device}
    for graphs in (True, False):
        engine = made(cuda_graphs=graphs, max_batch=4, **more)
        with rooftile.AsyncEngine(engine, step_tokens=11) as served:
            step, begun = served._worker.loop.step, threading.Event()
            served._worker.loop.step = lambda step=step, begun=begun: begun.wait(60) and step()
            prompts = [*PROMPTS, *LONG, LONG[0][:30]]
            options = [*HOW, HOW[1], HOW[0], HOW[3]]
            streams = [
                served.add(p, max_new_tokens=9, logprobs=True, ignore_eos=True, **how)
                for p, how in zip(prompts, options, strict=True)
            ]
            begun.set()
            found.append([s.result() for s in streams])
        assert bool(engine.runner._graphs) == graphs
    assert found[0] == found[1]


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.int8])
def test_a_cache_of_8_bits_is_read_with_its_scales(kv_dtype):
    """A part of a prompt sees the rounded keys of earlier parts: log-probabilities are about those of exact ones."""
    exact = made().generate(LONG[0], max_new_tokens=1, logprobs=True, ignore_eos=True)[0]
    with rooftile.AsyncEngine(made(kv_dtype=kv_dtype), step_tokens=8) as served:
        found = served.add(LONG[0], max_new_tokens=1, logprobs=True, ignore_eos=True).result()
    assert found.tokens == exact.tokens
    assert found.logprobs == pytest.approx(exact.logprobs, abs=0.1)
    assert found.logprobs != exact.logprobs


def checked(served):
    """Check after each step that pages are free or used as often as sequences hold them. Returns the plans."""
    loop, cache, plans = served._worker.loop, served.engine.runner.cache, []
    step, plan = loop.step, loop.scheduler.plan

    def step_and_check():
        events = step()
        running = {id(r.sequence) for r in loop.scheduler.running}
        assert running == {id(s) for s in cache.sequences}
        assert not any(r.sequence for r in loop.scheduler.waiting)
        users = collections.Counter(page for s in cache.sequences for page in s.pages)
        assert cache._users == [users[page] for page in range(len(cache._users))]
        assert sorted([*cache._free, *cache._unused, *users]) == list(range(len(cache._users)))
        assert cache._page_of == {name: page for page, name in cache._name_of.items()}
        assert {*cache._unused} <= {*cache._name_of}
        assert not {*cache._free} & {*cache._name_of}
        for s in cache.sequences:
            assert (s.length, len(s.pages)) == (int(cache.lengths[s.slot]), -(-s.length // cache.page_size))
            for page in s.pages[s.length // cache.page_size :]:
                assert users[page] == 1, "a page that is still written has several users"
        return events

    loop.step, loop.scheduler.plan = step_and_check, lambda: plans.append(plan()) or plans[-1]
    return plans


def test_equal_beginnings_share_pages_and_give_the_tokens_of_whole_prompts():
    """While the first one runs, after it has ended, behind its new tokens, and for a prompt that is all there."""
    engine, beginning = made(max_batch=2), LONG[0][:32]
    prompts = [[*beginning, 1, 2, 3], [*beginning, 9], beginning, beginning[:16] + [5] * 9]
    how = {"max_new_tokens": 4, "ignore_eos": True}
    expected = [engine.generate(p, **how)[0].tokens for p in prompts]
    with rooftile.AsyncEngine(engine, step_tokens=40) as served:
        checked(served)
        first = served.add(prompts[0], **how)
        next(first)
        streams = [served.add(p, **how) for p in prompts[1:]]
        assert [s.result().tokens for s in (first, *streams)] == expected
        stats = served.stats()
        assert stats.prefix_hit_tokens == 0 + 32 + 16 + 16
        assert stats.prefix_query_tokens == sum(len(p) for p in prompts)
        assert stats.prompt_tokens == stats.prefix_query_tokens - stats.prefix_hit_tokens

        longest = served.add(LONG[1], max_new_tokens=16, ignore_eos=True).result()
        follow = longest.prompt + longest.tokens
        served.add(follow, max_new_tokens=2, ignore_eos=True).result()
        assert served.stats().prefix_hit_tokens - stats.prefix_hit_tokens == 32  # of 35 whose keys were computed
        assert served.stats().pages_used == 0
    with rooftile.AsyncEngine(engine, prefix_cache=False) as served:
        assert served.add(prompts[0], **how).result().tokens == expected[0]
        assert served.stats().prefix_query_tokens == 0


BEGINNING = LONG[0][:32]
BEGUN = [[*BEGINNING, 1, 2, 3], [*BEGINNING, 9], [*BEGINNING, 50, 60]]


def looped(engine, prompts, new=2):
    """A loop without a thread, and its requests."""
    loop = Loop(engine.runner, Scheduler(engine.runner, 200, True))
    new = [new] * len(prompts) if isinstance(new, int) else new
    requests = [
        engine._request(i, p, n, (), False, True, Sampling()) for i, (p, n) in enumerate(zip(prompts, new, strict=True))
    ]
    for request in requests:
        loop.add(request)
    return loop, requests


def finish(loop, most=40):
    for _ in range(most):
        if not loop.busy:
            return
        loop.step()
    raise AssertionError(f"it did not end in {most} steps")


def test_a_beginning_that_several_waiting_requests_have_is_computed_once(engine):
    """Those behind them that begin otherwise start meanwhile, as far as slots and pages are not kept for them."""
    prompts = [BEGUN[0], BEGUN[1], PROMPTS[0], PROMPTS[1], BEGUN[2]]
    expected = [c.tokens for c in engine.generate(prompts, max_new_tokens=2, ignore_eos=True)]
    loop, requests = looped(engine, prompts)
    loop.step()
    assert [r.index for r in loop.scheduler.running] == [0, 2]  # the third slot is kept for 1
    loop.step()
    assert [r.index for r in loop.scheduler.running] == [0, 1, 2]
    finish(loop)
    assert [r.tokens for r in requests] == expected
    assert loop.prompt_tokens == 35 + 1 + 5 + 3 + 2
    engine.runner.cache.forget()


@pytest.mark.parametrize("end", ["abort", "error", "failure"])
def test_who_waits_for_pages_goes_on_when_the_one_that_computes_them_ends(engine, end, monkeypatch):
    expected = [c.tokens for c in engine.generate(BEGUN, max_new_tokens=2, ignore_eos=True)]
    loop, requests = looped(engine, BEGUN)

    def failing(*_):
        raise OSError("no such character")

    if end == "error":  # in its first token
        monkeypatch.setattr(requests[0].watch, "add", failing)
    if end == "failure":  # of the step, after which all are taken out
        with monkeypatch.context() as patched:
            patched.setattr(engine.runner, "_mixed", failing)
            with pytest.raises(OSError, match="no such character"):
                loop.step()
        loop.clear()
        engine.runner.cache.forget()
        loop, requests = looped(engine, BEGUN)
    loop.step()
    assert [r.index for r in loop.scheduler.running] == [0]
    if end == "abort":
        loop.remove(requests[0])
    finish(loop)
    first = 0 if end == "failure" else 1
    assert [r.tokens for r in requests[first:]] == expected[first:]
    assert loop.prompt_tokens == 35 + 1 + 2
    engine.runner.cache.forget()
    assert free_of(engine) == (9, 0)


def test_who_waits_for_pages_goes_on_when_they_were_given_back_meanwhile():
    """The first one decodes, the second gives its pages back, and the third has the beginning of the second."""
    engine, new = made(pages=6, max_seq_len=64), [5, 4, 2]
    prompts = [[8] * 31, [*BEGINNING, *range(15)], BEGUN[1]]
    expected = [
        engine.generate(p, max_new_tokens=n, ignore_eos=True)[0].tokens for p, n in zip(prompts, new, strict=True)
    ]
    loop, requests = looped(engine, prompts, new)
    finish(loop, 60)
    assert [r.tokens for r in requests] == expected
    assert loop.scheduler.preemptions >= 1
    engine.runner.cache.forget()
    assert free_of(engine) == (6, 0)


def test_the_work_of_the_host_grows_with_the_sequences_of_a_step_and_not_with_their_square(device):
    """Function calls of planning and reserving, with steps in which every sequence takes a page."""

    def calls(n):
        cache = PrefixCache(4 * n, 16, 1, 8, max_sequences=n, dtype=torch.float32, device=device)
        runner = SimpleNamespace(cache=cache, max_batch=n, share=cache.share)
        scheduler, counted = Scheduler(runner, 64 * n, True), collections.Counter()
        for i in range(n):
            scheduler.add(Request(i, [i] * 17, 40, Sampling()))

        sys.setprofile(lambda frame, event, arg: counted.update([event]))
        try:
            for _ in range(17):
                work = scheduler.plan()
                for request in work:
                    request.sequence = request.sequence or cache.allocate()
                cache.reserve({request.sequence: new for request, new in work.items()})
                cache._advanced = True
                for request in work:
                    scheduler.launched(request)
                    request.launched += 1
        finally:
            sys.setprofile(None)
        assert all(len(s.pages) == 3 for s in cache.sequences)
        return counted["call"]

    assert calls(48) < 3.2 * calls(16)


def test_a_decoding_step_calls_few_functions_for_each_sequence(monkeypatch):
    """Each costs the host 50 ns and more. Of the loop, with a device that does nothing."""

    def calls(n):
        engine = made(max_batch=n, cuda_graphs=False)
        runner, counted = engine.runner, collections.Counter()
        logits = torch.zeros(n, CONFIG["vocab_size"], device=runner.tokens.device)
        monkeypatch.setattr(runner, "_step", lambda b, *_: (runner.cache.count(), logits[:b])[1])
        monkeypatch.setattr(runner, "_prefilled", lambda laid_out: logits[: laid_out.rows])
        monkeypatch.setattr(runner.cache, "count", lambda: setattr(runner.cache, "_advanced", True))
        loop, _ = looped(engine, [[1, 2, 3]] * n, 9)
        for _ in range(3):
            loop.step()
        sys.setprofile(lambda frame, event, arg: counted.update([event]))
        try:
            chunks = loop.step()
        finally:
            sys.setprofile(None)
        assert len(chunks) == n
        return counted["call"]

    assert (calls(48) - calls(16)) / 32 <= 1, "more than `Watch.add`"


def test_pages_that_were_used_least_recently_lose_their_names_first(device):
    cache = PrefixCache(4, 16, 1, 8, max_sequences=2, dtype=torch.float32, device=device)
    names = {}
    for token in (1, 2):
        sequence = cache.allocate()
        cache.extend({sequence: 32})
        names[token] = page_names([token] * 40, 16)
        assert len(names[token]) == 2
        cache.name(sequence, names[token])
        cache.free(sequence)
    assert page_names([1] * 16 + [2] * 16, 16) == [names[1][0], page_names([1] * 16 + [2] * 16, 16)[1]]
    assert page_names([1] * 16 + [2] * 16, 16)[1] not in names[2]
    assert cache.free_pages == 4
    again = cache.share(cache.find(names[1]))  # used now
    assert (cache.free_pages, cache.unused(again.pages)) == (2, 0)
    cache.free(again)
    other = cache.allocate()
    cache.extend({other: 17})
    assert [len(cache.find(names[token])) for token in (1, 2)] == [2, 0]
    cache.extend({other: 16})
    assert [len(cache.find(names[token])) for token in (1, 2)] == [1, 0]  # the end before the beginning
    cache.forget()
    assert cache.find(names[1]) == []
    cache.free(other)
    assert cache.free_pages == 4


@pytest.mark.parametrize("prefix_cache", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_who_came_last_gives_its_pages_back_and_gets_equal_tokens_later(prefix_cache):
    """Pages for the beginning of two, and the whole of one; drawn and penalised ones."""
    engine, new = made(pages=3), 7
    prompts = [[7, 8, 9] * 4, [20, 21] * 6, [40] * 11]
    penalties = {"presence_penalty": -2.0, "frequency_penalty": -2.0}  # for new tokens, also those of the first run
    options = [{"max_new_tokens": new, "ignore_eos": True, **penalties, **how} for how in HOW[1:]]
    expected = [engine.generate(p, **how)[0].tokens for p, how in zip(prompts, options, strict=True)]
    with rooftile.AsyncEngine(engine, prefix_cache=prefix_cache) as served:
        plans = checked(served)
        streams = [served.add(p, **how) for p, how in zip(prompts, options, strict=True)]
        assert [s.result().tokens for s in streams] == expected
        stats = served.stats()
    assert stats.preemptions >= 1
    assert stats.finished["length"] == 3
    # The first one never stands still.
    first = next(r for r in plans[0] if r.order == 0)
    assert [first in plan for plan in plans[:new]] == [True] * new


@pytest.fixture(scope="module")
def crowd():
    """An engine with few pages, requests for it, and their tokens. The second one begins as the first."""
    engine, begun = made(pages=6, max_seq_len=80), LONG[1][:16]
    prompts = [begun + [3, 5, 8, 13] * 3, [*begun, *range(44)], [40] * 11]
    options = [{"max_new_tokens": 6, "ignore_eos": True, **how} for how in HOW[1:]]
    expected = [engine.generate(p, **how)[0].tokens for p, how in zip(prompts, options, strict=True)]
    return engine, [{"prompt": p, **how} for p, how in zip(prompts, options, strict=True)], expected


# Of a request, with the scheduler, after a step that has not been read.
STATES = {
    "held back": lambda r, s: r in s.waiting and not r.launched and s._found(r)[0],  # another one has its beginning
    "waiting for pages": lambda r, s: r in s.waiting and not r.launched and len(s.running) == 2,
    "between parts": lambda r, s: r.computed and not r.decoding and not r.launched,
    "decoding": lambda r, s: r.decoding and r.launched == 3,
    "at its last token": lambda r, s: r.launched == r.limit,
    "preempted": lambda r, s: r.launched and r in s.waiting,
    "computed again": lambda r, s: r in s.running and len(r.filled) > len(r.prompt),
}


@pytest.mark.parametrize(
    "victims",
    [
        {1: "held back", 0: "decoding"},
        {1: "between parts", 2: "waiting for pages"},
        {1: "preempted", 2: "at its last token"},
        {1: "computed again"},
    ],
    ids=lambda victims: ", ".join(victims.values()),
)
def test_an_abort_in_any_state_gives_back_all_and_others_get_their_tokens(victims, crowd):
    """One that was not even taken from the inbox is among them."""
    engine, asked, expected = crowd
    if {"preempted", "computed again"} & {*victims.values()}:  # the second one starts at once where its pages are found
        finish(looped(engine, [how["prompt"] for how in asked])[0])
    with rooftile.AsyncEngine(engine, step_tokens=32) as served:
        checked(served)
        loop, streams, left = served._worker.loop, [], dict(victims)
        step = loop.step

        def aborting():
            until(lambda: streams)
            events = step()
            if loop.steps == 1 and len(streams) == 3:
                streams.append(served.add(**asked[0]))
                streams[-1].abort()
            for i, state in [*left.items()]:
                if STATES[state](streams[i]._channel.request, loop.scheduler):
                    del left[i]
                    streams[i].abort()
            return events

        loop.step = aborting
        streams += served.add_all(asked)
        found = [stream.result() for stream in streams]
        assert not left
        for i, completion in enumerate(found[:3]):
            assert completion.finish_reason == ("abort" if i in victims else "length")
            assert completion.tokens == expected[i][: len(completion.tokens)]
        assert (found[3].finish_reason, found[3].tokens) == ("abort", [])
        assert served.stats().finished == {"stop": 0, "length": 3 - len(victims), "abort": 1 + len(victims), "error": 0}
        assert served.stats().pages_used == 0
    assert free_of(engine) == (6, 0)


@pytest.mark.parametrize(
    ("at", "who", "state"),
    [
        ("runner.cache.reserve", 0, "decoding"),
        ("runner._prefilled", 1, "between parts"),
        ("runner._sample", 1, "between parts"),
        ("Readback.tokens", 0, "at its last token"),
    ],
)
def test_an_error_within_a_step_gives_back_all_and_ends_those_that_were_there(at, who, state, crowd, monkeypatch):
    """Pages are taken and written to by then. A request that comes meanwhile gets its tokens from the next step on."""
    engine, asked, expected = crowd
    engine.runner.cache.forget()
    *path, name = at.split(".")
    owner = operator.attrgetter(".".join(path))(SimpleNamespace(runner=engine.runner, Readback=Readback))
    with rooftile.AsyncEngine(engine, step_tokens=32) as served:
        checked(served)
        assert served.add(**asked[2]).result().tokens == expected[2]
        streams, later, loop = [], [], served._worker.loop
        step, method = loop.step, getattr(owner, name)

        def step_that_fails():
            until(lambda: streams)
            if not later and STATES[state](streams[who]._channel.request, loop.scheduler):
                monkeypatch.setattr(owner, name, failing)
            return step()

        def failing(*args, **more):
            monkeypatch.undo()
            method(*args, **more)
            later.append(served.add(**asked[1]))
            engine.runner.cache.k.fill_(5)
            raise RuntimeError("out of memory")

        loop.step = step_that_fails
        streams += served.add_all(asked)
        for stream in streams:
            with pytest.raises(RequestError, match="out of memory"):
                stream.result()
        assert later[0].result().tokens == expected[1]  # not with the pages that the failed step has written to
        assert served.stats().finished == {"stop": 0, "length": 2, "abort": 0, "error": 3}
        assert served.stats().pages_used == 0
    assert free_of(engine) == (6, 0)


def test_continuations_that_need_more_pages_than_there_are_wait_for_each_other():
    """They share the pages of the prompt, and each needs a page of its own and then another one."""
    engine, how = made(pages=4, max_seq_len=80), {"max_new_tokens": 6, "ignore_eos": True, "temperature": 1.2}
    prompt = LONG[0][:28]
    expected = [c.tokens for c in engine.generate([prompt] * 3, seed=range(3), **how)]
    with rooftile.AsyncEngine(engine) as served:
        checked(served)
        streams = served.add(prompt, n=3, **how)
        assert [stream.result().tokens for stream in streams] == expected
        assert served.stats().preemptions >= 1
        assert served.stats().pages_used == 0
        with pytest.raises(ValueError, match="need 5 pages, and the cache has 4"):
            served.add([1] * 60, n=3, max_new_tokens=6)
        assert served.stats().waiting == 0
    assert free_of(engine) == (4, 0)


@pytest.mark.nightly  # aborts, shared beginnings and few pages have tests of their own
def test_threads_that_add_and_abort_at_random_lose_and_mix_nothing():
    """Three threads, few pages, equal beginnings, small steps, and streams that are read, aborted or abandoned."""
    engine = made(pages=6)
    prompts = [LONG[0][:18], LONG[0][:33], [*LONG[0][:16], 9], LONG[1], PROMPTS[0]]
    options = [{"max_new_tokens": 8 if len(p) < 30 else 4, "ignore_eos": True} for p in prompts]
    options[1] |= HOW[1]
    options[3] |= HOW[3]
    expected = [engine.generate(p, **how)[0].tokens for p, how in zip(prompts, options, strict=True)]
    ended = collections.Counter()
    problems = []

    def client(rng):
        try:
            for _ in range(5):
                i, what = rng.randrange(len(prompts)), rng.choice(["read", "read", "abort", "abandon"])
                stream = served.add(prompts[i], priority=rng.randrange(2), **options[i])
                tokens = []
                for chunk in stream:
                    if chunk.token >= 0:
                        tokens.append(chunk.token)
                    if what != "read" and len(tokens) >= rng.randrange(4):
                        break
                if what == "abort":
                    stream.abort()
                    found = stream.result()
                    assert found.finish_reason in ("abort", "length")
                    tokens = found.tokens
                assert tokens == expected[i][: len(tokens)], (i, what)
                ended[what] += len(tokens) == len(expected[i])
        except BaseException as error:
            problems.append(error)

    with rooftile.AsyncEngine(engine, step_tokens=30) as served:
        checked(served)
        threads = [threading.Thread(target=client, args=(random.Random(n),)) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if problems:
            raise problems[0]
        gc.collect()
        until(lambda: served.stats().running == served.stats().waiting == 0)
        stats = served.stats()
        assert sum(stats.finished.values()) == 15
        assert stats.finished["error"] == stats.pages_used == 0
        assert stats.prefix_hit_tokens > 0
        assert ended["read"] > 0
    assert free_of(engine) == (6, 0)


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
    def failing(*_):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(engine.runner, "decode", failing)
        streams = [add(served, i) for i in range(4)]
        for stream in streams:
            with pytest.raises(RequestError, match="out of memory"):
                stream.result()
    assert free_of(engine) == (9, 0)
    assert add(served, 2).result().tokens == expected[2]


def test_an_error_of_a_step_keeps_what_the_step_had_read(served, engine, expected, monkeypatch):
    """With a mask, tokens are read before the next launch: one request ends by them, and then the launch fails."""
    mask = SimpleNamespace(mask=lambda: torch.full((5,), -1, dtype=torch.int32), advance=lambda token: None)

    def failing(*_):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(engine.runner, "decode", failing)
        asked = {"prompt": PROMPTS[0], "ignore_eos": True}
        ended, masked = served.add_all([{**asked, "max_new_tokens": 1}, {**asked, "max_new_tokens": 3, "mask": mask}])
        with pytest.raises(RequestError, match="out of memory"):
            masked.result()
        until(lambda: ended._channel.ended)
    assert [chunk.token for chunk in masked] == []
    assert (ended.result().tokens, ended.result().finish_reason) == (expected[0][:1], "length")
    assert served.stats().finished == {"stop": 0, "length": 1, "abort": 0, "error": 1}


def test_an_engine_that_has_failed_says_so(monkeypatch):
    engine = made()
    served = rooftile.AsyncEngine(engine)

    def failing(*args):
        raise RuntimeError("the device is lost")

    with monkeypatch.context() as patched:
        patched.setattr(engine.runner, "decode", failing)
        patched.setattr(engine.runner, "free", failing)
        assert not served.failed
        with pytest.raises(RequestError, match="the device is lost"):
            add(served, 0).result()
        served._worker._thread.join(30)
        assert served.failed
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


def test_requests_that_come_before_a_step_is_due_are_in_it(engine, expected, monkeypatch):
    read = Pace.read

    def late(self, step, following):
        read(self, step, following)
        self._end = time.perf_counter() + 0.5

    monkeypatch.setattr(Pace, "read", late)
    with rooftile.AsyncEngine(engine) as served:
        first = add(served, 0, max_new_tokens=30)
        next(first)
        steps = served.stats().steps
        second, third = add(served, 1), add(served, 2)
        assert third.abort()
        assert third.result().tokens == []
        assert served.stats().steps == steps, "an abort waits for no step"
        next(second)
        # Its prompt is in the next step, whose tokens are read once the step behind it is launched.
        assert served.stats().steps == steps + 2
        first.abort()
        assert second.result().tokens == expected[1]
    assert free_of(engine) == (9, 0)


def test_where_all_slots_are_taken_no_step_is_put_off(engine, monkeypatch):
    asked = []

    def plan(self, prompts):
        asked.append(prompts)
        return time.perf_counter() + 10

    monkeypatch.setattr(Pace, "plan", plan)
    with rooftile.AsyncEngine(engine) as served:
        begun = time.perf_counter()
        streams = [add(served, 0, max_new_tokens=30) for _ in range(3)]
        next(streams[0])
        assert time.perf_counter() - begun < 10
        assert set(asked) == {True}  # before all had come
        streams[2].abort()
        assert streams[2].result().finish_reason == "abort"
        deadline = time.perf_counter() + 10
        while asked[-1] and time.perf_counter() < deadline:
            time.sleep(0.01)
        assert not asked[-1], "the others decode"
    assert free_of(engine) == (9, 0)


def test_a_step_of_a_split_model_is_not_put_off(engine, monkeypatch):
    """How late the other ranks launch, rank 0 doesn't see."""
    loop, _ = looped(engine, [PROMPTS[0]])
    monkeypatch.setattr(Pace, "plan", lambda self, prompts: 7.0)
    assert loop.due == 7.0
    monkeypatch.setattr(engine.runner, "ranks", object())
    assert loop.due == 0.0


def test_a_long_prompt_is_not_launched_ahead_of_the_device(engine, monkeypatch):
    launched, unread, wait = [], [], Readback._wait
    extend, reads = engine.runner.extend, []

    def counted(*args):
        launched.append(True)
        unread.append(len(launched) - len(reads))
        extend(*args)

    def waited(self):
        reads.append(True)
        wait(self)

    monkeypatch.setattr(engine.runner, "extend", counted)
    monkeypatch.setattr(Readback, "_wait", waited)
    with rooftile.AsyncEngine(engine, step_tokens=8) as served:
        served.add(list(range(1, 41)), max_new_tokens=1).result()
    assert len(launched) == 5
    assert max(unread) == 2


@pytest.mark.parametrize("deterministic", [False, True])
def test_sequences_that_are_left_move_to_the_first_slots_and_keep_their_tokens(deterministic):
    how = [
        {"temperature": 0.9, "top_k": 20, "seed": 3},
        {"repetition_penalty": 3.0},
        {"presence_penalty": 1.5, "frequency_penalty": 0.5},
        {"logit_bias": {7: 6.0, 11: 5.5}, "temperature": 0.8, "seed": 4},
    ]
    engine = made(max_batch=9, deterministic=deterministic)
    prompts = [[3 + i, 5, 8, 13] for i in range(4)]
    options = [{"max_new_tokens": 12, "ignore_eos": True, **more} for more in how]
    expected = [engine.generate(p, **more)[0].tokens for p, more in zip(prompts, options, strict=True)]
    rows, decode = [], engine.runner._decode

    def decoded(live, proposals):
        decode(live, proposals)
        rows.append(engine.runner.shape[0])

    engine.runner._decode = decoded
    with rooftile.AsyncEngine(engine) as served:
        # The first slots had sequences with other options.
        ended = [{"prompt": [90], **options[3 - i % 4], "max_new_tokens": 4} for i in range(5)]
        left = [{"prompt": p, **more} for p, more in zip(prompts, options, strict=True)]
        streams = served.add_all([*ended, *left])  # an abandoned stream would end at once
        assert [stream.result().tokens for stream in streams][5:] == expected
    assert (rows[0], rows[-1]) == (9, 4)
    assert free_of(engine) == (27, 0)


def test_a_prompt_in_parts_keeps_its_tokens_where_it_moves():
    engine = made(max_batch=4)
    prompt = list(range(1, 41))
    (alone,) = engine.generate(prompt, max_new_tokens=4, ignore_eos=True)
    loop, requests = looped(engine, [PROMPTS[0], PROMPTS[2], PROMPTS[3], prompt], [1, 1, 1, 4])
    loop.scheduler._step_tokens = 12
    slots = []
    for _ in range(20):
        if loop.busy:
            loop.step()
            slots.append(None if requests[3].sequence is None else (requests[3].sequence.slot, requests[3].decoding))
    assert (3, False) in slots
    assert (0, False) in slots, "it moved in the middle of its prompt"
    assert requests[3].tokens == alone.tokens


def test_a_group_of_cascade_is_found_again_where_its_sequences_moved(monkeypatch):
    monkeypatch.setattr(cascade, "MIN_SEQUENCES", 2)
    monkeypatch.setattr(cascade, "MIN_TOKENS", 16)
    begun = list(range(1, 21))
    prompts = [[40], *([*begun, i] for i in range(50, 52))]
    engine = made(max_batch=3, cascade=True)
    expected = [engine.generate(p, max_new_tokens=6, ignore_eos=True)[0].tokens for p in prompts]
    loop, (short, second, first) = looped(engine, prompts, [2, 6, 6])
    loop.remove(first)
    loop.step()
    first.priority = -1  # the first one of a step, in the last slot, from which it moves
    loop.add(first)
    groups, found = engine.runner._cascade.groups, []

    def recorded(live):
        found.append((groups(live), [s.slot for s in live]))
        return found[-1][0]

    monkeypatch.setattr(engine.runner._cascade, "groups", recorded)
    finish(loop)
    assert found[:2] == [(True, [2, 1]), (True, [0, 1])]
    assert [short.tokens, second.tokens, first.tokens] == [expected[0][:2], *expected[1:]]
