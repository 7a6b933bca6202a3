"""A deterministic engine gives a prompt the same tokens and log-probabilities, bit for bit, in any company."""

import random

import pytest
import torch

import rooftile
from rooftile import runtime
from rooftile.engine.model import Decoder
from rooftile.engine.projections import Projection
from rooftile.engine.runner import Runner
from rooftile.ops.attention import attention_paged
from rooftile.ops.attention.problem import Problem as Attention
from rooftile.ops.attention.problem import Scoring, choose_forward, choose_invariant
from rooftile.ops.gemm import choose
from rooftile.ops.gemm.config import Problem

CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 131,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}
FAMILIES = {
    "llama": {},
    "qwen3": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "sliding_window": 9, "num_hidden_layers": 2, "attn_logit_softcapping": 1.5},
}
BEGINNING = [(7 * t) % 131 for t in range(66)]
# Of the first, keys are more than one block of attention has; the next two need another page for their new tokens.
PROMPTS = [[*BEGINNING, 5], [*BEGINNING[:31], 9], [8] * 32, [50]]
# Greedy ones, and such as are drawn, penalised, biased.
HOW = [
    {},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "seed": 3, "repetition_penalty": 1.4},
    {},
    {"temperature": 1.1, "min_p": 0.02, "logit_bias": {7: 1.5}, "frequency_penalty": 0.3, "seed": 9},
]
NEW = {"max_new_tokens": 2, "ignore_eos": True, "logprobs": True}


def made(family="llama", **more):
    options = {"max_batch": 4, "max_seq_len": 96, "page_size": 16, "deterministic": True, **more}
    return rooftile.Engine.from_config(CONFIG | {"model_type": family} | FAMILIES[family], **options)


def of(completion):
    return completion.prompt, completion.tokens, completion.logprobs


def alone(engine):
    """Each prompt, by itself."""
    return [of(engine.generate(p, **NEW, **how)[0]) for p, how in zip(PROMPTS, HOW, strict=True)]


def together(engine):
    """Greedy prompts in one batch."""
    return [of(c) for c in engine.generate([PROMPTS[i] for i in (2, 0)], **NEW)][::-1]


def in_company(engine, order, **options):
    """What those requests get, and what they cost; who comes later may go first."""
    with rooftile.AsyncEngine(engine, **options) as served:
        streams = [(i, served.add(PROMPTS[i], priority=i % 2, **NEW, **HOW[i])) for i in order]
        return [(i, of(stream.result())) for i, stream in streams], served.stats()


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"dtype": torch.bfloat16}),
        pytest.param("qwen3", {"dtype": torch.float32}, marks=pytest.mark.nightly),
        pytest.param("gemma2", {"dtype": torch.bfloat16}, marks=pytest.mark.nightly),
        pytest.param("llama", {"dtype": torch.bfloat16, "kv_dtype": torch.int8}, marks=pytest.mark.nightly),
        pytest.param("llama", {"dtype": torch.bfloat16, "quantize": "fp8"}, marks=pytest.mark.nightly),
        pytest.param("llama", {"dtype": torch.bfloat16, "quantize": "int8"}, marks=pytest.mark.nightly),
        pytest.param("llama", {"dtype": torch.bfloat16, "quantize": "int4"}, marks=pytest.mark.nightly),
    ],
)
def test_a_request_gets_the_same_bits_in_any_company(family, options, device):
    """Batches, orders of arrival, parts of prompts, shared beginnings, and preemption."""
    options = {**options, "device": device}
    engine = made(family, **options)
    expected = alone(engine)
    assert together(engine) == [expected[0], expected[2]]
    rng, hits, preemptions = random.Random(0), 0, 0
    for more, served in (
        ({}, {"step_tokens": 17}),
        ({"max_batch": 3, "pages": 5}, {"step_tokens": 40, "prefix_cache": False}),
    ):
        order = [*range(len(PROMPTS)), 1]
        rng.shuffle(order)
        found, stats = in_company(made(family, **options, **more), order, **served)
        assert found == [(i, expected[i]) for i, _ in found]
        hits, preemptions = hits + stats.prefix_hit_tokens, preemptions + stats.preemptions
    assert hits
    assert preemptions


def differing(engine):
    """What is not as it is alone: in a batch, beside a request that is drawn, and behind tokens of a prompt."""
    expected = [of(engine.generate(PROMPTS[i], **NEW)[0]) for i in (0, 2)]
    last = [(tokens[-1:], logprobs[-1:]) for _, tokens, logprobs in expected]
    continued = [engine.generate([*p, *t[:-1]], **NEW | {"max_new_tokens": 1})[0] for p, t, _ in expected]
    company = dict(in_company(engine, [3, 0], step_tokens=100)[0])[0]
    return {
        *["batch"] * (together(engine) != expected),
        *["company"] * (company != expected[0]),
        *["prompt"] * ([(c.tokens, c.logprobs) for c in continued] != last),
    }


@pytest.mark.nightly  # a test of the test above
@pytest.mark.parametrize(
    ("owner", "name", "changed", "expected"),
    [
        (Projection, "invariant", lambda self: self, "batch"),
        (Runner, "_greedily", lambda self, slots: all(self._sampling[i].greedy for i in slots), "company"),
        (Decoder, "_attend_newest", None, "prompt"),
    ],
    ids=["gemms", "sampling", "attention"],
)
def test_each_choice_by_rows_would_show(owner, name, changed, expected, monkeypatch, device):
    engine = made(dtype=torch.bfloat16, device=device)
    if name == "invariant":
        assert differing(engine) == set()
    if changed is None:
        chosen = Decoder._attend_newest

        def changed(self, *args):
            self._deterministic = False
            try:
                return chosen(self, *args)
            finally:
                self._deterministic = True

    monkeypatch.setattr(owner, name, changed)
    assert expected in differing(made(dtype=torch.bfloat16, device=device))


def test_speculation_changes_no_bit(device):
    """Proposals are computed beside the newest token: a batch of more rows."""
    options = {"dtype": torch.bfloat16, "device": device}
    expected = [of(c) for c in made(**options).generate(PROMPTS[:2], **NEW)]
    engine = made(**options, speculate=rooftile.NGram(tokens=2, min_match=1))
    assert [of(c) for c in engine.generate(PROMPTS[:2], **NEW)] == expected


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_what_is_chosen_does_not_depend_on_the_rows(arch):
    target, rows = runtime.TARGETS[arch], (1, 2, 16, 64, 65, 512, 8192)
    for n, k in ((6144, 4096), (4096, 14336), (131, 100)):
        for more in (
            {"dtype": torch.bfloat16},
            {"dtype": torch.float32},
            {"dtype": torch.bfloat16, "gated": True},
            {"dtype": torch.bfloat16, "weight": "int8"},
            {"dtype": torch.float8_e4m3fn, "weight": "fp8", "out_dtype": torch.bfloat16},
        ):
            if arch == "sm_80" and "out_dtype" in more:
                continue
            problems = [Problem(m, n, k, **more, x_aligned=m == 1 or k % 8 == 0) for m in rows]
            (c,) = {choose.choose_invariant(p, target) for p in problems}
            assert [choose.can_implement(p, c, target) for p in problems] == [None] * len(rows)
            if n == 6144:
                assert len({choose.choose(p, target) for p in problems}) > 1
    found = [
        Attention(
            b, 32, 8, n, 4096, 128, 128, torch.bfloat16, Scoring(1.0, right=0), packed=True, tokens=b * n, page=64
        )
        for b, n in ((1, 1), (64, 1), (1, 512), (4, 4096))
    ]
    assert len({choose_invariant(p, target) for p in found}) == 1
    assert len({choose_forward(p, target) for p in found}) > 1


def test_a_row_of_a_gemm_and_a_query_have_their_bits_alone(device):
    """Also where scores are capped, and whichever tile a query is in."""
    torch.manual_seed(0)
    x, w = (torch.randn(n, 96, device=device).bfloat16() for n in (70, 32))
    for f in (rooftile.linear, rooftile.gated_linear):
        whole = f(x, w, config="invariant")
        assert torch.equal(whole[67:68], f(x[67:68], w, config="invariant"))
    scaled = rooftile.quantize_int8(w)
    whole = rooftile.int8_linear(x, *scaled, config="invariant")
    assert torch.equal(whole[67:], rooftile.int8_linear(x[67:], *scaled, config="invariant"))

    k, v = (torch.randn(6, 16, 1, 16, device=device).bfloat16() for _ in range(2))
    q = torch.randn(90, 2, 16, device=device).bfloat16()
    pages = torch.tensor([[4, 0, 2, 5, 1, 3]], dtype=torch.int32, device=device)

    def attended(first, last, out=None):
        ends, length = ([[0, last - first], [last]][i] for i in range(2))
        numbers = [torch.tensor(x, dtype=torch.int32, device=device) for x in (length, ends)]
        options = {"softcap": 2.0, "window": 70, "config": "invariant", "out": out}
        return attention_paged(q[first:last], k, v, pages, *numbers, **options)

    whole, parts = attended(0, 90), torch.empty_like(q)
    for first, last in ((0, 70), (70, 89), (89, 90)):
        assert attended(first, last, parts[first:last]).data_ptr() == parts[first:last].data_ptr()
    assert torch.equal(parts, whole)
    with pytest.raises(ValueError, match=r"out is torch\.bfloat16 of shape"):
        attended(0, 3, parts)
    with pytest.raises(TypeError, match="'invariant' or None"):
        rooftile.linear(x, w, config="any")
