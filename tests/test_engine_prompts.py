"""Prompts of a forward pass: how they are laid out, that it makes no difference, and what they cost."""

import pytest
import torch

import rooftile
from rooftile import launching, runtime
from rooftile.engine import prompts as laid_out
from rooftile.engine.prompts import GRAPH_TOKENS, padded_length
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
FAMILIES = {"llama": {}, "mistral": {"sliding_window": 7}, "qwen3": {"head_dim": 8}}
# With room for 32 tokens each a batch of 3 x 32 of which an eighth is padding; packed with another that is short.
ABOUT_EQUAL = [[(7 * i + 5 * t) % 131 for t in range(n)] for i, n in enumerate((29, 26, 29))]
UNEQUAL = [*ABOUT_EQUAL, [50, 3]]


def test_the_prompts_below_are_padded_and_packed():
    assert [padded_length([len(p) for p in prompts], 32) for prompts in (ABOUT_EQUAL, UNEQUAL)] == [32, None]


def made(family="llama", **more):
    config = {"model_type": family, **SIZES, **FAMILIES[family]}
    options = {"dtype": torch.float32, "max_batch": 5, "max_seq_len": 32, "page_size": 16, **more}
    return rooftile.Engine.from_config(config, **options)


@pytest.mark.parametrize(
    ("lengths", "length"),
    [
        ([512], 512),
        ([1], 64),
        ([65], 128),
        ([1000], 1024),
        ([1025], 1152),
        ([2048], 2048),
        ([2049], 2049),  # no graph is kept for it
        ([512] * 4, 512),
        ([512, 450], 512),  # 62 of 1024
        ([512, 384], 512),  # 128: an eighth
        ([512, 383], None),
        ([60, 60], 64),
        ([50, 50], 50),  # too much padding, and none is needed
        ([512, 512, 512, 512, 512], 512),
        ([512, 512, 512, 512, 511], None),
        ([390], 400),
    ],
)
def test_what_prompts_are_padded_to(lengths, length):
    assert padded_length(lengths, 400 if length == 400 else 8192) == length
    assert length is None or length == max(lengths) or len(lengths) * length <= GRAPH_TOKENS


@pytest.mark.parametrize("family", FAMILIES)
def test_padded_and_packed_prompts_give_the_logits_of_each_alone(family, monkeypatch, device):
    engine = made(family, device=device)
    alone = [engine.logits(p)[0] for p in UNEQUAL]
    padded, packed = engine.logits(ABOUT_EQUAL), engine.logits(UNEQUAL)
    # Those of a batch of one are padded, too.
    monkeypatch.setattr(laid_out, "padded_length", lambda lengths, capacity: None)
    for found in (alone[:3], padded, packed):
        for x, y in zip(found, engine.logits(UNEQUAL), strict=False):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("prompts", [ABOUT_EQUAL, UNEQUAL])
def test_tokens_behind_prompts_are_those_of_the_logits(prompts, device):
    """The first, and the next, which sees what the prompts left in the cache."""
    engine = made(device=device, cuda_graphs=False)
    tokens = [c.tokens for c in engine.generate(prompts, 2, ignore_eos=True)]
    both = [[*p, first] for p, (first, _) in zip(prompts, tokens, strict=True)]
    assert tokens == [x[-2:].argmax(dim=-1).tolist() for x in engine.logits(both)]


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


@pytest.mark.skipif(runtime.MODE is not runtime.Mode.INTERPRETER, reason="launches are looked at on the CPU")
@pytest.mark.parametrize("prompts", [ABOUT_EQUAL, UNEQUAL])
def test_a_layer_appends_all_prompts_by_one_launch(prompts, monkeypatch):
    launched = []

    def looked_at(plan, *args):
        launched.append(plan.kernel.fn.__name__)
        launch(plan, *args)

    launch, runner = launching.launch, made().runner
    monkeypatch.setattr(launching, "launch", looked_at)
    runner.prefill(prompts, [Sampling()] * len(prompts))
    assert launched.count("append_kernel") == SIZES["num_hidden_layers"]
