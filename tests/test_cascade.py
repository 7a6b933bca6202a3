"""Decoding with a group: the pages that all sequences begin with are read for several of them at once."""

import pytest
import torch

import rooftile
from rooftile import runtime
from rooftile.engine import cascade as module
from rooftile.engine.cascade import Cascade, common_pages
from rooftile.engine.paged_cache import PagedSequence
from rooftile.engine.runner import Sampling

CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 64,
    "max_position_embeddings": 96,
    "initializer_range": 0.3,
}
BEGINNING = [(7 * t * t + 3) % 64 for t in range(38)]  # two pages, and a part of the third
ENDS = [[5, 9, 7], [10, 61, 31], [50] * 12, [37]]


@pytest.fixture(autouse=True)
def groups(monkeypatch):
    """Groups from two sequences and a page on; for each step, whether it had one."""
    found = []
    stock = Cascade.groups
    monkeypatch.setattr(module, "MIN_SEQUENCES", 2)
    monkeypatch.setattr(module, "MIN_TOKENS", 16)
    monkeypatch.setattr(Cascade, "groups", lambda self, live: found.append(stock(self, live)) or found[-1])
    return found


def made(**more):
    options = {"dtype": torch.float32, "max_batch": 4, "max_seq_len": 96, "page_size": 16, "cascade": True, **more}
    config = CONFIG | options.pop("config", {})
    return rooftile.Engine.from_config(config, **options)


@pytest.fixture(scope="module")
def engine():
    return made()


@pytest.fixture(scope="module")
def plain():
    return made(cascade=False)


class Running:
    """Sequences of a runner, by name, with their tokens."""

    def __init__(self, engine):
        self.runner, self.live, self.tokens = engine.runner, {}, {}

    def start(self, name, prompt, pages=()):
        """A sequence that shares pages, which hold the beginning of its prompt."""
        sequence = self.runner.share(pages)
        rest = prompt[len(pages) * self.runner.cache.page_size :]
        self.runner.extend({sequence: rest}, {sequence: (prompt, Sampling(), ())})
        self.live[name], self.tokens[name] = sequence, [int(self.runner.tokens[sequence.slot])]
        return sequence

    def step(self, n=1):
        for _ in range(n):
            # The step of a prompt loses the newest tokens of slots that are not in it.
            newest = {s.slot: self.tokens[name][-1] for name, s in self.live.items()}
            for slot, token in newest.items():
                self.runner.tokens[slot] = token
            self.runner.decode()
            for name, s in self.live.items():
                self.tokens[name].append(int(self.runner.tokens[s.slot]))

    def end(self, *names):
        for name in names or list(self.live):
            self.runner.free(self.live.pop(name))
        return self.tokens


def joining_and_leaving(engine):
    """Sequences of one beginning come and go, one of them the first, and one with another beginning."""
    running = Running(engine)
    pages = running.start(0, BEGINNING + ENDS[0]).pages[:2]
    running.step()
    running.start(1, BEGINNING + ENDS[1], pages)
    running.step(2)
    running.start(2, BEGINNING + ENDS[2], pages)
    running.step()
    running.end(0)
    running.step()
    running.start(3, ENDS[3] * 3)
    running.step()
    running.end(3)
    running.start(4, BEGINNING[:16] + ENDS[0], pages[:1])
    running.step()
    return running.end()


def test_sequences_that_join_and_leave_a_group_get_the_same_tokens(engine, plain, groups):
    found = joining_and_leaving(engine)
    assert groups == [False] + [True] * 4 + [False, True]
    assert found == joining_and_leaving(plain)


@pytest.mark.parametrize(
    "more",
    [
        {"kv_dtype": torch.int8},
        {"max_batch": 3},
        {"config": {"model_type": "gemma2", "head_dim": 16, "sliding_window": 9, "num_hidden_layers": 2}},
    ],
    ids=["int8", "three slots", "windows"],
)
def test_logits_of_a_step_with_a_group(more, groups):
    """Also of caches in 8 bits, of batches without a factor of 16, and beside layers whose window begins later."""
    engine = made(**more)
    runner = engine.runner
    running = Running(engine)
    pages = running.start(0, BEGINNING + ENDS[0]).pages[:2]
    for i in range(1, engine.max_batch):
        running.start(i, BEGINNING + ENDS[i], pages)
    runner.cache.reserve(1)
    b = engine.max_batch
    ids = torch.arange(b, dtype=torch.int32, device=runner.tokens.device)
    runner.cache.advance()
    expected = runner.decoder.decode(ids)
    assert runner._cascade.groups(runner.cache.sequences)
    found = runner.decoder.decode(ids, cascade=runner._cascade)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    running.end()


def test_beginnings_shorter_than_a_page_make_no_group(engine, groups):
    running = Running(engine)
    for i, end in enumerate(ENDS):
        running.start(i, BEGINNING[:15] + end)
    running.step()
    running.end()
    assert groups == [False]


def test_a_page_that_another_sequence_took_over_is_not_read(engine, plain, groups):
    """A sequence gives its pages back, and comes again with other pages and other tokens, in the same slot."""

    def run(engine):
        running = Running(engine)
        pages = running.start(0, BEGINNING + ENDS[0]).pages[:2]
        running.start(1, BEGINNING + ENDS[1], pages)
        running.step(2)
        running.end(0, 1)
        pages = running.start(2, ENDS[2] * 4 + ENDS[0]).pages[:3]
        running.start(3, ENDS[2] * 4 + ENDS[1], pages)
        running.step(2)
        return running.end()

    assert run(engine) == run(plain)
    assert groups == [True] * 4


def test_an_engine_that_runs_out_of_pages(engine, plain, groups):
    """A request is aborted, and others are preempted and computed again."""

    def run(engine):
        with rooftile.AsyncEngine(engine) as served:
            served.add(BEGINNING, max_new_tokens=1).result()
            streams = [served.add(BEGINNING + end * 2, max_new_tokens=7, ignore_eos=True) for end in ENDS[:2]]
            served.add([*BEGINNING, 3], max_new_tokens=40, ignore_eos=True).close()
            return [s.result().tokens for s in streams], served.stats().preemptions

    found, preemptions = run(made(pages=5))
    assert preemptions
    assert any(groups)
    assert found == run(plain)[0]


def test_common_pages_are_full_and_shared_by_all():
    def of(*lists, length=64):
        return common_pages([PagedSequence(i, length, list(pages)) for i, pages in enumerate(lists)], 16)

    assert of([7, 3, 5, 1], [7, 3, 5, 2], [7, 3, 5, 0]) == 3
    assert of([7, 3, 5, 1], [7, 3, 4, 1], [7, 9, 5, 1]) == 1
    assert of([7, 3, 5, 1], [6, 3, 5, 1]) == 0
    assert of([7, 3, 5, 1], [7, 3, 5, 1], length=63) == 3


def test_the_pages_are_looked_at_only_where_the_sequences_change(engine, monkeypatch):
    calls = []
    stock = module.common_pages
    monkeypatch.setattr(module, "common_pages", lambda *args: calls.append(args) or stock(*args))
    running = Running(engine)
    pages = running.start(0, BEGINNING + ENDS[0]).pages[:2]
    running.start(1, BEGINNING + ENDS[1], pages)
    running.step(3)
    assert len(calls) == 1
    running.end(0)
    running.start(2, BEGINNING + ENDS[2], pages)
    running.step(2)
    running.end()
    assert len(calls) == 2


def test_a_step_without_sequences_and_without_a_group(device):
    """What a graph is captured from before there are any: its logits have no meaning, and nothing raises."""
    runner = made(device=device).runner
    runner.cache.reserve({})
    logits = runner._step(4, True, False, grouped=True)
    assert not logits.isnan().any()
    assert not runner.cache.lengths.any()


def test_small_groups_are_left_alone(engine, monkeypatch, groups):
    running = Running(engine)
    pages = running.start(0, BEGINNING + ENDS[0]).pages[:2]
    running.start(1, BEGINNING + ENDS[1], pages)
    for name, least in (("MIN_SEQUENCES", 3), ("MIN_TOKENS", 33)):
        with monkeypatch.context() as patched:
            patched.setattr(module, name, least)
            runner_cascade = Cascade(running.runner.cache)
            assert not runner_cascade.groups(running.runner.cache.sequences)
    assert Cascade(running.runner.cache).groups(running.runner.cache.sequences)
    assert [Cascade(running.runner.cache).may_group(b) for b in (1, 2, 4)] == [False, True, True]
    monkeypatch.setattr(module, "MIN_TOKENS", 97)  # over max_seq_len
    assert not Cascade(running.runner.cache).may_group(4)
    running.end()


def test_a_deterministic_engine_has_no_groups():
    with pytest.raises(ValueError, match="deterministic and cascade"):
        made(deterministic=True)


@pytest.mark.gpu
@pytest.mark.skipif(runtime.MODE is not runtime.Mode.GPU, reason="graphs need a GPU")
def test_one_graph_serves_groups_of_any_pages(groups):
    engine, eager = made(), made(cuda_graphs=False)
    assert joining_and_leaving(engine) == joining_and_leaving(eager)
    assert any(groups)
