"""The engine inside of the caller's modes: autocast, inference mode, a default device, another stream."""

import contextlib

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("triton", reason="Triton is not installed")

import rooftile
from rooftile import runtime
from rooftile.engine import runner

DEVICE = runtime.default_device()
CONFIG = {
    "model_type": "llama",
    "vocab_size": 131,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}
PROMPTS = [[3, 5, 8, 13, 21], [9, 9, 4]]


def made(config=None, **more):
    return rooftile.Engine.from_config(
        CONFIG | (config or {}), **{"dtype": torch.float32, "max_batch": 2, "max_seq_len": 64} | more
    )


def tokens(engine, n=3, **more):
    return [c.tokens for c in engine.generate(PROMPTS, max_new_tokens=n, **more)]


@pytest.fixture(scope="module")
def expected():
    return tokens(made())


@contextlib.contextmanager
def default_device(device):
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("quantize", [None, "fp8", pytest.param("int8", marks=pytest.mark.nightly)])
def test_autocast_of_another_dtype_changes_nothing(quantize):
    engine = made(quantize=quantize)
    plain = tokens(engine), engine.logits(PROMPTS)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        under = tokens(engine), engine.logits(PROMPTS)
        assert torch.is_autocast_enabled(DEVICE.type)
    assert under[0] == plain[0]
    assert all(torch.equal(a, b) for a, b in zip(under[1], plain[1], strict=True))


def test_an_engine_made_under_autocast_is_the_same(expected):
    with torch.autocast(DEVICE.type, torch.bfloat16):
        engine = made()
    assert tokens(engine) == expected


@pytest.mark.parametrize("outside", [False, True], ids=["made inside, used outside", "made outside, used inside"])
def test_inference_mode_around_one_part_alone(outside, expected):
    with torch.inference_mode(not outside):
        engine = made()
    with torch.inference_mode(outside):
        assert tokens(engine) == expected
        first = next(engine.generate(PROMPTS, max_new_tokens=3, stream=True))
    assert first.token == expected[0][0]
    logits = engine.logits(PROMPTS)[0]
    assert not logits.is_inference()
    assert not logits.requires_grad


def test_a_stream_of_tokens_may_cross_the_border_of_inference_mode(expected):
    engine = made()
    chunks = engine.generate(PROMPTS, max_new_tokens=3, stream=True)
    with torch.inference_mode():
        found = [next(chunks)]
    found += chunks
    assert [[c.token for c in found if c.index == i] for i in range(2)] == expected


@pytest.mark.parametrize("cache", ["KVCache", "PagedKVCache"])
def test_a_cache_made_under_inference_mode_is_good_outside(cache):
    sizes = {"KVCache": (2, 16, 1, 16), "PagedKVCache": (4, 16, 1, 16)}[cache]
    with torch.inference_mode():
        made = getattr(rooftile, cache)(*sizes, **({"max_sequences": 2} if cache == "PagedKVCache" else {}))
    if cache == "PagedKVCache":
        made.allocate(), made.allocate()
    made.extend(3)
    k = torch.ones(2, 3, 1, 16, dtype=torch.bfloat16, device=DEVICE)
    made.append(0, k, k)
    assert made.lengths.tolist() == [3, 3]


@pytest.mark.skipif(DEVICE.type != "cpu", reason="everything on the host is to say so; on a GPU see below")
@pytest.mark.parametrize("quantize", [pytest.param(None, marks=pytest.mark.nightly), "int4"])
def test_what_is_the_hosts_stays_on_the_host_under_a_default_device(quantize, tmp_path):
    plain = made(quantize=quantize)
    options = {"temperature": 0.7, "repetition_penalty": 1.2, "seed": 3}
    expected = [tokens(plain), tokens(plain, **options)]
    with default_device("meta"):
        engine = made(quantize=quantize)
        assert [tokens(engine), tokens(engine, **options)] == expected
        assert engine.logits(PROMPTS)[0].device == DEVICE


def test_a_checkpoint_is_read_under_a_default_device(tmp_path):
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**CONFIG))
    model.save_pretrained(tmp_path)
    load = {"dtype": torch.float32, "max_batch": 2, "max_seq_len": 64, "progress": False}
    expected = tokens(rooftile.Engine.from_pretrained(tmp_path, **load))
    with default_device("meta" if DEVICE.type == "cpu" else DEVICE):
        assert tokens(rooftile.Engine.from_pretrained(tmp_path, **load)) == expected


@pytest.mark.gpu
def test_the_default_device_may_be_the_gpu(expected):
    with default_device("cuda"):
        engine = made()
        assert tokens(engine) == expected
        assert len(tokens(engine, temperature=0.7, repetition_penalty=1.2)) == 2


def test_integers_of_numpy_are_integers(expected):
    engine = made()
    for prompts in ([[np.int64(t) for t in p] for p in PROMPTS], [np.array(p) for p in PROMPTS]):
        assert [c.tokens for c in engine.generate(prompts, max_new_tokens=np.int64(3), seed=np.int32(0))] == expected
    alone = engine.generate([np.int64(t) for t in PROMPTS[0]], max_new_tokens=3)
    assert alone[0].prompt == PROMPTS[0]
    assert all(type(t) is int for t in alone[0].prompt)
    stopped = engine.generate(PROMPTS[0], max_new_tokens=3, stop=np.int64(expected[0][0]))[0]
    assert (stopped.tokens, stopped.finish_reason) == (expected[0][:1], "stop")


@pytest.mark.parametrize("what", [1.5, "3", True, np.float64(2)])
def test_max_new_tokens_of_another_type_is_a_type_error(what):
    with pytest.raises(TypeError, match="max_new_tokens"):
        made().generate(PROMPTS, max_new_tokens=what)


@pytest.mark.parametrize("prompt", [[1.5], [True], [np.bool_(True)], [np.float32(1)], [[1, 2.0]]])
def test_tokens_of_another_type_are_a_type_error(prompt):
    with pytest.raises(TypeError, match="prompt"):
        made().generate(prompt, max_new_tokens=1)


class Stream:
    """What the engine asks of a CUDA stream."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def wait_stream(self, other):
        self.log.append((self.name, other.name))


def test_each_step_waits_for_the_stream_of_the_step_before():
    log = []
    a, b = Stream("a", log), Stream("b", log)
    current = [a]
    order = runner.StreamOrder(lambda: current[0])
    for stream in (a, a, b, b, a):
        current[0] = stream
        order.enter()
    assert log == [("b", "a"), ("a", "b")]


@pytest.mark.gpu
def test_a_stream_of_tokens_may_be_stepped_on_several_streams(expected):
    engine = made()
    n, slow = 24, torch.empty(1 << 28, device=DEVICE)
    plain = tokens(engine, n)
    streams = [torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.default_stream()]
    for _ in range(3):
        chunks, found, step = engine.generate(PROMPTS, max_new_tokens=n, stream=True), [], 0
        while True:
            with torch.cuda.stream(streams[step % 3]):
                slow.random_()  # so that this stream is behind the next
                chunk = next(chunks, None)
            if chunk is None:
                break
            found.append(chunk)
            step += 1
        assert [[c.token for c in found if c.index == i] for i in range(2)] == plain


def test_a_prompt_of_one_token_is_multiplied_as_it_is_in_fp8():
    """`generate` and `logits` agree: with one slot, nothing of a prompt of one token is rounded to fp8."""
    engine = made(quantize="fp8", max_batch=1)
    for token in (3, 17, 99):
        logprob = engine.generate([token], max_new_tokens=1, logprobs=True)[0]
        logits = engine.logits([[token]])[0][0]
        expected = logits.log_softmax(-1)[logprob.tokens[0]]
        assert logprob.tokens[0] == int(logits.argmax())
        assert abs(logprob.logprobs[0] - float(expected)) < 1e-5
