"""The runner: slots that are not side by side, what is given back when a kernel raises, graphs, what is recompiled."""

import json

import pytest
import torch
from helpers import interpreted

import rooftile
from rooftile import PagedKVCache, launching
from rooftile.engine.runner import Numbers, Sampling

pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 131,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
PROMPTS = [[3, 5, 8, 13, 21], [9, 9, 4], [100, 2, 64, 17, 31, 5, 77], [50]]
# Greedy, drawn, penalised, and both.
HOW = [
    Sampling(),
    Sampling(temperature=0.9, top_k=20, seed=3),
    Sampling(repetition_penalty=1.4),
    Sampling(temperature=1.1, min_p=0.02, repetition_penalty=1.2, seed=9),
]


def made(family="llama", **more):
    config = {"model_type": family, **SIZES, **more.pop("config", {})}
    options = {"dtype": torch.float32, "max_batch": 4, "max_seq_len": 32, "page_size": 16, **more}
    return rooftile.Engine.from_config(config, **options)


def free_of(engine):
    return engine.runner.cache.free_pages, len(engine.runner.cache.sequences)


@pytest.fixture(scope="module")
def engine():
    return made()


def tokens_of(runner, which, steps=2):
    """New tokens of those prompts, side by side."""
    sequences = runner.prefill([PROMPTS[i] for i in which], [HOW[i] for i in which])
    found = {i: [int(runner.tokens[s.slot])] for i, s in zip(which, sequences, strict=True)}
    for _ in range(steps):
        runner.decode()
        for i, s in zip(which, sequences, strict=True):
            found[i].append(int(runner.tokens[s.slot]))
    for s in sequences:
        runner.free(s)
    return found


def test_sequences_that_are_sampled_in_different_ways_share_a_step(engine):
    together = tokens_of(engine.runner, [0, 1, 2, 3])
    assert tokens_of(engine.runner, [3, 1, 0, 2]) == together
    for i in range(4):
        assert tokens_of(engine.runner, [i]) == {i: together[i]}


def test_slots_that_are_free_between_others(engine):
    runner = engine.runner
    expected = tokens_of(runner, [2])[2]
    sequences = runner.prefill(PROMPTS, [HOW[2]] * 4)
    for s in (sequences[0], sequences[1], sequences[3]):
        runner.free(s)
    found = [int(runner.tokens[2])]
    for _ in range(2):
        runner.decode()
        found.append(int(runner.tokens[2]))
    runner.free(sequences[2])
    assert found == expected


def test_sequences_that_have_ended_do_not_move(engine):
    """Those that no step has any more, though their last tokens are not read yet, and those that have no room."""
    runner = engine.runner
    *others, ended, last = runner.prefill(PROMPTS, HOW)
    token = int(runner.tokens[3])
    runner.compact([*others, ended])
    assert (ended.slot, last.slot) == (2, 3), "others have the slots before them"
    for s in others:
        runner.free(s)
    runner.compact([ended])
    assert (ended.slot, last.slot) == (2, 0)
    assert int(runner.tokens[0]) == token
    for s in (ended, last):
        runner.free(s)


def test_each_slot_has_its_own_sampling(engine):
    """Those that live among them, and in slots that others had."""
    runner = engine.runner
    sequences = runner.prefill(PROMPTS, HOW)
    runner.free(sequences[1])
    runner.prefill([PROMPTS[0]], [HOW[2]])
    for slot, how in enumerate([HOW[0], HOW[2], HOW[2], HOW[3]]):
        given = {name: float(x[slot]) for name, x in runner._of_slots.of.items()}
        given["seed"] = given.pop("seeds")
        assert given == pytest.approx({name: getattr(how, name) for name in given})
    for s in runner.cache.sequences:
        runner.free(s)


def test_numbers_of_some_rows_are_set_and_the_others_stay(device):
    numbers, drawn = Numbers(3, device), Sampling(0.5, 7, 0.9, 0.1, 1.5, -(2**63), -1.0, 2.0)
    numbers.send(dict.fromkeys(range(3), drawn))
    numbers.send({1: Sampling(seed=5)})
    found = {name: row.tolist() for name, row in numbers.of.items()}
    for name, row in found.items():
        for i, how in enumerate([drawn, Sampling(seed=5), drawn]):
            assert row[i] == pytest.approx(how.seed if name == "seeds" else getattr(how, name)), name


def test_the_device_begins_with_prompts_before_it_is_told_of_their_sequences(engine, monkeypatch):
    runner, cache, seen = engine.runner, engine.runner.cache, []
    before = [x.clone() for x in (cache.lengths, cache.page_table)]
    prefill = runner.decoder.prefill

    def told(*args):
        assert [s.length for s in cache.sequences] == [len(p) for p in PROMPTS]
        seen.append([x.clone() for x in (cache.lengths, cache.page_table)])
        return prefill(*args)

    with monkeypatch.context() as patched:
        patched.setattr(runner.decoder, "prefill", told)
        sequences = runner.prefill(PROMPTS, HOW)
    assert all(torch.equal(x, y) for x, y in zip(seen[0], before, strict=True))
    assert cache.lengths.tolist() == [len(p) for p in PROMPTS]
    for s in sequences:
        assert cache.page_table[s.slot, : len(s.pages)].tolist() == s.pages
        runner.free(s)
    assert not cache.lengths.any()


def test_a_prompt_that_the_device_cannot_be_told_of_takes_nothing(engine, monkeypatch):
    before, expected = free_of(engine), engine.generate(PROMPTS[0], max_new_tokens=3, ignore_eos=True)

    def failing():
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(engine.runner.cache, "count", failing)
        with pytest.raises(KeyboardInterrupt):
            engine.runner.prefill(PROMPTS, HOW)
    assert free_of(engine) == before
    assert not engine.runner.cache.lengths.any()
    assert engine.generate(PROMPTS[0], max_new_tokens=3, ignore_eos=True) == expected


def test_what_is_deferred_is_told_in_its_order_also_where_something_fails(device):
    cache = PagedKVCache(6, 16, 1, 8, max_sequences=3, layers=2, dtype=torch.float32, device=device)
    a = cache.allocate()
    cache.extend({a: 20})
    k, v = torch.randn(2, 3, 20, 1, 8, device=device)
    for layer in range(2):
        cache.append(layer, k, v)
    sequences = []

    @cache.deferred()
    def steps():
        b = cache.fork(a)
        cache.extend({b: 1})  # which copies the page that they share
        cache.free(a)
        c = cache.allocate()
        cache.extend({c: 3, b: 2})
        sequences.extend((b, c))
        assert (b.length, c.length, cache.lengths.tolist()) == (23, 3, [20, 0, 0])
        with cache.deferred():
            pass

    with pytest.raises(RuntimeError, match=r"PagedKVCache.deferred: is active already"):
        steps()
    assert cache.lengths.tolist() == [3, 23, 0]
    assert cache.starts.tolist() == [0, 21, 0]
    assert cache.counts.tolist() == [3, 2, 0]
    for sequence in sequences:
        row = cache.page_table[sequence.slot].tolist()
        assert row == sequence.pages + [-1] * (len(row) - len(sequence.pages))
    for layer in range(2):
        held = cache.k[layer, sequences[0].pages].flatten(0, 1)[:20]
        assert torch.equal(held, k[0])


@pytest.mark.parametrize("where", ["prefill", "decode"])
def test_what_a_failing_step_took_is_given_back(where, engine, monkeypatch):
    before, expected = free_of(engine), engine.generate(PROMPTS[0], max_new_tokens=3, ignore_eos=True)

    def failing(*args, **options):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(engine.runner.decoder, where, failing)
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.generate(PROMPTS, max_new_tokens=3)
    assert free_of(engine) == before
    assert engine.generate(PROMPTS[0], max_new_tokens=3, ignore_eos=True) == expected


@pytest.mark.parametrize(
    ("more", "error", "message"),
    [
        ({"page_size": 17}, ValueError, "page_size is 17, expected one of 16"),
        ({"pages": 0}, ValueError, "pages is 0, expected a positive integer"),
        ({"kv_dtype": torch.int32}, TypeError, "kv_dtype is torch.int32, expected torch.bfloat16"),
    ],
)
def test_a_cache_that_cannot_be_is_refused_before_weights_are_loaded(more, error, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SIZES}))
    with pytest.raises(error, match=message):  # and not that there are no weights
        rooftile.Engine.from_pretrained(tmp_path, **more)


@interpreted
@pytest.mark.parametrize(("family", "quantize"), [("llama", None), ("qwen3", "fp8"), ("qwen2", "int4")])
def test_kernels_are_not_specialized_on_what_changes_from_step_to_step(family, quantize, monkeypatch):
    """A kernel that is remembered by its strides would go on with the number that it was compiled for."""
    specialized, call = set(), launching.Launch.__call__

    def looked_at(launch, *given):
        kernel, first = launch.launcher.kernel, launch.n_tensors + len(launch.strides)
        given_names = zip(kernel.arg_names[first:], launch.numbers, strict=False)
        names = [name for name, number in given_names if not isinstance(number, float)]  # never specialized on
        spared = kernel.kwargs.get("do_not_specialize") or ()
        specialized.update((kernel.fn.__name__, name) for name in names if name not in spared)
        call(launch, *given)

    engine = made(family, config={"head_dim": 8} if family == "qwen3" else {}, quantize=quantize, max_batch=2)
    monkeypatch.setattr(launching.Launch, "__call__", looked_at)
    engine.generate(PROMPTS[:2], max_new_tokens=2, temperature=0.7, repetition_penalty=1.1, ignore_eos=True)
    engine.generate(PROMPTS[0], max_new_tokens=2, ignore_eos=True)
    assert not specialized


@pytest.mark.gpu
def test_graphs_give_what_plain_launches_give(device):
    """Bit-identical, with sequences that live while a graph is recorded, that join, and that leave."""
    engines = [made(device=device, cuda_graphs=graphs, config={"num_hidden_layers": 2}) for graphs in (True, False)]
    for options in ({}, {"temperature": 0.9, "top_p": 0.9, "repetition_penalty": 1.2, "seed": list(range(7))}):
        prompts = [*PROMPTS, [7] * 11, [8, 9], [1] * 3]
        first, second = (
            e.generate(prompts, max_new_tokens=17, logprobs=True, ignore_eos=True, **options) for e in engines
        )
        assert first == second
    assert engines[0].runner._graphs
    assert not engines[1].runner._graphs
