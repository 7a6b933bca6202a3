"""Prompts of a forward pass: how they are laid out, that it makes no difference, and what they cost."""

import pytest
import torch
from helpers import interpreted, nightly_but

import rooftile
from rooftile import launching
from rooftile.engine import prompt_graphs
from rooftile.engine import prompts as laid_out
from rooftile.engine.prompt_graphs import PromptGraphs
from rooftile.engine.runner import Sampling

pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 131,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
FAMILIES = {
    "llama": {},
    "mistral": {"sliding_window": 7},
    "qwen3": {"head_dim": 8},
    "olmo2": {},
    "phi3": {"partial_rotary_factor": 0.5, "pad_token_id": 0},
    "gemma3_text": {"head_dim": 8, "sliding_window": 7, "sliding_window_pattern": 2, "final_logit_softcapping": 2.0},
}
ABOUT_EQUAL = [[(7 * i + 5 * t) % 131 for t in range(n)] for i, n in enumerate((29, 26, 29))]
UNEQUAL = [*ABOUT_EQUAL, [50, 3]]


def made(family="llama", **more):
    config = {"model_type": family, **SIZES, **FAMILIES[family], **more.pop("config", {})}
    options = {"dtype": torch.float32, "max_batch": 5, "max_seq_len": 32, "page_size": 16, **more}
    return rooftile.Engine.from_config(config, **options)


@pytest.mark.parametrize("family", nightly_but(("mistral",), FAMILIES))
def test_prompts_together_give_the_logits_of_each_alone(family, device):
    """Whatever is behind them: another prompt, or padding."""
    runner = made(family, device=device, cuda_graphs=False).runner
    sequences = runner._allocated(UNEQUAL)
    together = runner._mixed(dict(zip(sequences, UNEQUAL, strict=True)), [s.slot for s in sequences])
    runner._free_all(sequences)
    alone = torch.stack([runner.logits([p])[0][-1] for p in UNEQUAL])
    torch.testing.assert_close(together[: len(UNEQUAL)], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("prompts", [pytest.param(ABOUT_EQUAL, marks=pytest.mark.nightly), UNEQUAL])
def test_tokens_behind_prompts_are_those_of_the_logits(prompts, device):
    """The first, and the next, which sees what the prompts left in the cache."""
    engine = made(device=device, cuda_graphs=False)
    tokens = [c.tokens for c in engine.generate(prompts, max_new_tokens=2, ignore_eos=True)]
    both = [[*p, first] for p, (first, _) in zip(prompts, tokens, strict=True)]
    assert tokens == [x[-2:].argmax(dim=-1).tolist() for x in engine.logits(both)]


@pytest.mark.parametrize("part", [1, 3])
def test_logits_in_parts_are_those_of_whole_prompts(part, device):
    """By decoding, and by steps of prompts; the newest tokens of live sequences stay."""
    engine = made(device=device, cuda_graphs=False)
    runner = engine.runner
    live = runner.prefill([[9, 8]], [Sampling()])
    newest, free = runner.tokens.clone(), runner.cache.free_pages
    prompts = [[1, 2, 3, 4, 5], [6], [7, 8, 9]]
    for found, expected in zip(engine.logits(prompts, part=part), engine.logits(prompts), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(runner.tokens, newest)
    assert (runner.cache.free_pages, runner.cache.sequences) == (free, live)
    with pytest.raises(ValueError, match="part is 0"):
        engine.logits(prompts, part=0)


@pytest.mark.each_once
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("prompts", [ABOUT_EQUAL, UNEQUAL])
def test_prompts_are_written_to_their_pages_and_nowhere_else(prompts, kv_dtype, device):
    """Beside a sequence that was there before, and behind one that has gone."""
    engine = made(kv_dtype=kv_dtype, device=device, cuda_graphs=False)
    runner, cache = engine.runner, engine.runner.cache
    gone, _ = runner.prefill([[1] * 20, [2] * 3], [Sampling()] * 2)
    runner.free(gone)
    memory = (cache.k, cache.v, *(cache._scales or ()))
    for x in memory:
        x.fill_(77)
    sequences = runner.prefill(prompts, [Sampling()] * len(prompts))
    for x in memory:
        written = (x != 77).flatten(3).any(-1).any(0) if x.dim() == 5 else (x != 77).any(-1).any(0)
        expected = torch.zeros_like(written)
        for s, prompt in zip(sequences, prompts, strict=True):
            for page, first in zip(s.pages, range(0, len(prompt), 16), strict=True):
                expected[page, : len(prompt) - first] = True
        assert torch.equal(written, expected)


@interpreted
@pytest.mark.parametrize("prompts", [ABOUT_EQUAL, UNEQUAL])
def test_a_layer_appends_all_prompts_by_one_launch(prompts, monkeypatch):
    launched = []

    def looked_at(launch, *args):
        launched.append(launch.launcher.kernel.fn.__name__)
        call(launch, *args)

    call, runner = launching.Launch.__call__, made().runner
    monkeypatch.setattr(launching.Launch, "__call__", looked_at)
    runner.prefill(prompts, [Sampling()] * len(prompts))
    assert launched.count("append_kernel") == SIZES["num_hidden_layers"]


class Recorded:
    """What stands for a CUDA graph: a step that is run again, and whose result is written where the first one was."""

    def __init__(self, step):
        self.step, self.result = step, step()

    def replay(self):
        self.result.copy_(self.step())


class SerialGraphs:
    def record(self, step):
        graph = Recorded(step)
        graph.result.fill_(float("nan"))  # a capture computes nothing
        return graph, graph.result


def graphed(engine):
    """The engine, as if there were graphs on its device."""
    runner = engine.runner
    runner._of_prompts = PromptGraphs(runner.decoder, SerialGraphs())
    return engine


def test_sampling_for_other_prompts_is_refused(device):
    runner = made(device=device, cuda_graphs=False).runner
    with pytest.raises(ValueError, match="sampling is given for 1 prompts, expected one for each of 2"):
        runner.prefill([[1], [2]], [Sampling()])
    with pytest.raises(ValueError, match="there are no prompts"):
        runner.prefill([], [])
    assert runner.cache.sequences == []


def test_a_shape_is_recorded_the_second_time_and_replayed_from_then_on(device, monkeypatch):
    """With other prompts, in other slots and pages."""
    engine, plain = graphed(made(device=device, cuda_graphs=False)), made(device=device, cuda_graphs=False)
    done = []
    monkeypatch.setattr(Recorded, "replay", lambda self, replay=Recorded.replay: (done.append(self), replay(self)))
    for i in range(4):
        if i == 2:
            engine.runner.prefill([[5] * 20], [Sampling()])  # which keeps a slot and pages
        prompt = [(11 * i + 3 * t) % 131 for t in range(20 + 3 * i)]
        found, expected = (
            e.generate(prompt, max_new_tokens=2, logprobs=True, ignore_eos=True)[0] for e in (engine, plain)
        )
        assert found.tokens == expected.tokens
        assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
        assert len(done) == (0, 1, 3, 4)[i]
    assert len(set(done)) == 1


def test_mixed_steps_are_recorded_too(device, monkeypatch):
    """Steps of one shape with other tokens, slots and pages; their logits are in one memory."""
    options = {"device": device, "cuda_graphs": False, "config": {"num_hidden_layers": 1}}
    engine, asked = graphed(made(**options)), [[(11 * i + 3 * t) % 131 for t in range(15)] for i in range(3)]
    expected = [made(**options).generate(p, max_new_tokens=3, ignore_eos=True)[0].tokens for p in asked]
    done = []
    monkeypatch.setattr(Recorded, "replay", lambda self, replay=Recorded.replay: (done.append(self), replay(self)))
    with rooftile.AsyncEngine(engine, step_tokens=9, prefix_cache=False) as served:
        streams = [served.add(p, max_new_tokens=3, ignore_eos=True) for p in asked * 2]
        assert [s.result().tokens for s in streams] == expected * 2
    recorded = {shape: found[2] for shape, found in engine.runner._of_prompts._graphs.items()}
    assert any(newest and rows for newest, _, rows, _ in recorded), "no step was mixed"
    assert len({logits.data_ptr() for logits in recorded.values() if len(logits)}) == 1
    assert len(done) > len(recorded)


def test_the_graph_that_was_not_used_for_longest_is_forgotten(device, monkeypatch):
    monkeypatch.setattr(prompt_graphs, "KEPT", 2)
    engine = graphed(made(device=device, max_seq_len=48, cuda_graphs=False, config={"num_hidden_layers": 1}))
    kept = engine.runner._of_prompts._graphs
    for lengths in [(3,)] * 2, [(44, 10)] * 2, [(3,)], [(44, 43, 42)] * 2, [(44, 10)]:
        for each in lengths:
            engine.generate([[n] * n for n in each], max_new_tokens=1)
    # Newest tokens, tokens, rows and parts; (0, 64, 5, 4) was forgotten, and begins anew.
    assert list(kept) == [(0, 4, 5, 4), (0, 192, 5, 4)]


def test_without_memory_for_a_graph_prompts_are_launched(device, monkeypatch):
    engine = graphed(made(device=device, cuda_graphs=False))
    asked = []

    def failing(self, step):
        asked.append(step())
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(SerialGraphs, "record", failing)
    results = [engine.generate(UNEQUAL[0], max_new_tokens=2) for _ in range(4)]
    assert len(asked) == 1
    assert results == results[:1] * 4


def test_what_is_not_a_small_batch_is_never_recorded(device, monkeypatch):
    monkeypatch.setattr(laid_out, "GRAPH_TOKENS", 64)
    engine = graphed(made(device=device, cuda_graphs=False, config={"num_hidden_layers": 1}))
    for _ in range(2):
        engine.generate(UNEQUAL, max_new_tokens=1)
        engine.logits(UNEQUAL[0])
    assert not engine.runner._of_prompts._graphs


def test_after_a_capture_that_failed_all_is_given_back_and_the_next_works(device, monkeypatch):
    engine = graphed(made(device=device, cuda_graphs=False))
    expected, free = engine.generate(UNEQUAL[0], max_new_tokens=2), engine.runner.cache.free_pages

    def failing(self, step):
        step()
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(SerialGraphs, "record", failing)
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.generate(UNEQUAL[0], max_new_tokens=2)
    assert (engine.runner.cache.free_pages, engine.runner.cache.sequences) == (free, [])
    assert [engine.generate(UNEQUAL[0], max_new_tokens=2) for _ in range(2)] == [expected] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_of_prompts_give_what_plain_launches_give(family, device):
    """Bit-identical, in logits, tokens and log-probabilities: for prompts alone and together, of other lengths in the
    same shape, in slots and pages that others have left, between steps of decoding."""
    config = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "max_position_embeddings": 512}
    options = {"dtype": torch.bfloat16, "max_seq_len": 256, "page_size": 16, "device": device, "config": config}
    runners = [made(family, cuda_graphs=graphs, **options).runner for graphs in (True, False)]
    logits, asked = ([], []), []
    for runner, kept in zip(runners, logits, strict=True):
        forward = runner._mixed
        runner._mixed = lambda *args, f=forward, k=kept: k.append(f(*args).clone()) or k[-1]
    prefill = runners[0].decoder.prefill
    runners[0].decoder.prefill = lambda prompts, inputs: asked.append(prompts.shape) or prefill(prompts, inputs)
    how = [Sampling(), Sampling(temperature=0.9, top_p=0.9, repetition_penalty=1.2, seed=5), Sampling()]
    live = [[], []]
    for i in range(6):
        for lengths in ([120 - 3 * i], [56, 60 - i % 4], [200, 7, 31 + i]):
            prompts = [[(11 * i + 7 * j + 3 * t) % 131 for t in range(n)] for j, n in enumerate(lengths)]
            for runner, sequences in zip(runners, live, strict=True):
                if len(sequences) + len(prompts) > 5:
                    for s in sequences[::2]:
                        runner.free(s)
                    sequences[:] = sequences[1::2]
                sequences += runner.prefill(prompts, how[: len(prompts)])
                runner.decode()
            slots = [s.slot for s in live[0]]
            assert slots == [s.slot for s in live[1]]
            begun = slots[-len(prompts) :]  # rows of other slots have no meaning
            assert torch.equal(logits[0][-1][begun], logits[1][-1][begun])
            assert runners[0].tokens[slots].tolist() == runners[1].tokens[slots].tolist()
            assert torch.equal(runners[0].logprobs[slots], runners[1].logprobs[slots])
    # Once as they were, once recorded, then replayed.
    shapes = {(0, 128, 5, 4), (0, 256, 5, 4)}
    assert {shape: asked.count(shape) for shape in asked} == dict.fromkeys(shapes, 2)
    assert set(runners[0]._of_prompts._graphs) == shapes


@pytest.mark.gpu
def test_after_a_capture_on_the_gpu_that_failed_all_is_given_back_and_the_next_works(device, monkeypatch):
    engine = made(device=device)
    expected, free = engine.generate(UNEQUAL[0], max_new_tokens=2), engine.runner.cache.free_pages
    stream, decoder = torch.cuda.current_stream(), engine.runner.decoder

    def failing(x):
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("out of memory")
        return type(decoder)._logits(decoder, x)

    with monkeypatch.context() as patched:
        patched.setattr(decoder, "_logits", failing)
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.generate(UNEQUAL[0], max_new_tokens=2)
    assert (engine.runner.cache.free_pages, engine.runner.cache.sequences) == (free, [])
    assert torch.cuda.current_stream() == stream
    assert [engine.generate(UNEQUAL[0], max_new_tokens=2) for _ in range(2)] == [expected] * 2
    assert list(engine.runner._of_prompts._graphs) == [(0, 32, 5, 4)]
