"""Sampling options of requests in the engine: what each does to the tokens, beside requests without them."""

import dataclasses
import pickle
import re
import types
from pathlib import Path

import pytest
import torch

import rooftile
from rooftile.engine.sampling import Sampling
from rooftile.reference import sample as reference

SIZES = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 131,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
PROMPTS = [[3, 5, 8, 13, 21], [9, 9, 4], [100, 2, 64, 17], [50]]
NEW = 4


class Only:
    """Allows some tokens, by how many were drawn."""

    def __init__(self, *allowed, vocab=131):
        self.allowed, self.vocab, self.drawn = allowed, vocab, []

    def mask(self):
        flags = torch.zeros(1, self.vocab, dtype=torch.bool)
        flags[0, list(self.allowed[len(self.drawn) % len(self.allowed)])] = True
        zero = torch.zeros(1, -(-self.vocab // 32), dtype=torch.int32)
        return reference.mark_seen_(zero, flags.nonzero()[:, 1], flags.nonzero()[:, 0])[0]

    def advance(self, token):
        self.drawn.append(token)


@pytest.fixture(scope="module")
def engine():
    return rooftile.Engine.from_config(SIZES, dtype=torch.float32, max_batch=4, max_seq_len=32, page_size=16)


def generated(engine, which, new=NEW, **options):
    return engine.generate([PROMPTS[i] for i in which], max_new_tokens=new, ignore_eos=True, **options)


def by_the_formula(engine, prompt, how, found):
    """What the formula draws in float64 in the place of each of the tokens found, from the logits of all before it."""
    every = engine.logits([[*prompt, *found]])[0].double().cpu()
    drawn = []
    for i in range(len(found)):
        tokens, logits = found[:i], every[len(prompt) + i - 1][None]
        counts = torch.bincount(torch.tensor(tokens, dtype=torch.int64), minlength=131)[None]
        bias = torch.zeros(1, 131, dtype=torch.float64)
        for token, value in (how.logit_bias or {}).items():
            bias[0, token] = value
        seen = torch.zeros(1, 5, dtype=torch.int32)
        ids = torch.tensor([*prompt, *tokens])
        given = {
            "counts": counts,
            "logit_bias": bias,
            "seen": reference.mark_seen_(seen, ids, torch.zeros_like(ids)),
            "positions": torch.tensor([len(prompt) + len(tokens)]),
        }
        names = (
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
        )
        numbers = {name: getattr(how, name) for name in names}
        drawn.append(int(reference.sample(logits, seeds=how.seed, **numbers, **given)[0]))
    return drawn


SEVERAL = [
    {"frequency_penalty": 2.0},
    pytest.param({"presence_penalty": 2.0, "repetition_penalty": 1.3}, marks=pytest.mark.nightly),
    pytest.param({"frequency_penalty": -1.5, "temperature": 0.8, "top_p": 0.95, "seed": 3}, marks=pytest.mark.nightly),
    {"logit_bias": {7: 4.0, 8: 3.5, 50: -100}, "presence_penalty": 1.0, "temperature": 1.0, "seed": 5},
]


@pytest.mark.parametrize("options", SEVERAL, ids=lambda o: " ".join(o))
def test_options_change_tokens_as_the_formula_says(options, engine):
    plain = {n: v for n, v in options.items() if n in ("temperature", "top_p", "repetition_penalty", "seed")}
    every, new = range(len(PROMPTS)), 6  # a prompt whose tokens do not repeat has no penalties
    found = [c.tokens for c in generated(engine, every, new, **options)]
    assert all(len(tokens) == new for tokens in found)
    how = Sampling(**options)
    assert found == [by_the_formula(engine, p, how, tokens) for p, tokens in zip(PROMPTS, found, strict=True)]
    assert found != [c.tokens for c in generated(engine, every, new, **plain)]


def steps(engine, hows, which):
    """Tokens of prompts that run together, each with its own options."""
    runner = engine.runner
    sequences = runner.prefill([PROMPTS[i] for i in which], [hows[i] for i in which])
    found = {i: [int(runner.tokens[s.slot])] for i, s in zip(which, sequences, strict=True)}
    for _ in range(NEW - 1):
        runner.decode()
        for i, s in zip(which, sequences, strict=True):
            found[i].append(int(runner.tokens[s.slot]))
    for s in sequences:
        runner.free(s)
    return found


def test_requests_with_and_without_options_do_not_affect_each_other(engine):
    hows = [
        Sampling(),
        Sampling(frequency_penalty=1.5, presence_penalty=0.5, temperature=0.9, seed=4),
        Sampling(temperature=0.9, top_k=20, seed=3),
        Sampling(logit_bias={5: 6.0, 6: 5.0}, frequency_penalty=0.7),
    ]
    together = steps(engine, hows, [0, 1, 2, 3])
    assert steps(engine, hows, [3, 0, 1, 2]) == together  # in slots that others had
    for i in range(4):
        assert steps(engine, hows, [i]) == {i: together[i]}
    for i in (1, 3):
        assert by_the_formula(engine, PROMPTS[i], hows[i], together[i]) == together[i]
    assert not engine.runner.options.live(4)


def test_a_mask_restricts_each_token_of_its_prompt_alone(engine):
    masks = [Only((3, 4), (70, 71, 130), (5,)), None, Only((0,), (1, 2)), None]
    plain = generated(engine, [0, 1, 2, 3], temperature=0.8, seed=1)
    found = generated(engine, [0, 1, 2, 3], temperature=0.8, seed=1, mask=masks)
    for i in (1, 3):
        assert found[i].tokens == plain[i].tokens
    for i in (0, 2):
        assert masks[i].drawn == found[i].tokens
        assert all(t in masks[i].allowed[n % len(masks[i].allowed)] for n, t in enumerate(found[i].tokens))
    assert generated(engine, [0, 1, 2, 3], temperature=0.8, seed=1) == plain


@pytest.mark.parametrize(
    ("wrong", "kind", "message"),
    [
        (torch.zeros(5, dtype=torch.int32), ValueError, "allows no token"),
        (torch.tensor([0, 0, 0, 0, -8], dtype=torch.int32), ValueError, "allows no token"),  # only past the vocabulary
        (torch.ones(4, dtype=torch.int32), ValueError, r"has shape \(4,\), expected \(5,\)"),
        (torch.ones(5), TypeError, "torch.float32 on cpu, expected int32 on the CPU"),
        ([1] * 5, TypeError, "list, expected int32 on the CPU"),
    ],
)
def test_a_wrong_mask_ends_its_request(wrong, kind, message, engine):
    mask = Only((3, 4))
    mask.mask = lambda: wrong
    with pytest.raises(kind, match=f"mask: {message}"):
        generated(engine, [0], mask=mask)
    assert not engine.runner.cache.sequences


def test_what_a_mask_raises_ends_its_request_alone(engine):
    def failing(token):
        raise RuntimeError("no way on")

    mask = Only((3,))
    mask.advance = failing
    expected = generated(engine, [1])[0]
    with rooftile.AsyncEngine(engine) as several:
        wrong = several.add(PROMPTS[0], max_new_tokens=NEW, mask=mask)
        right = several.add(PROMPTS[1], max_new_tokens=NEW, ignore_eos=True)
        restricted = several.add(PROMPTS[2], max_new_tokens=4, ignore_eos=True, mask=Only((8,), (9,)))
        assert right.result().tokens == expected.tokens
        assert restricted.result().tokens == [8, 9, 8, 9]
        with pytest.raises(rooftile.engine.RequestError, match="no way on"):
            wrong.result()
    assert not engine.runner.cache.sequences


def test_a_grammar_restricts_a_text_to_its_end():
    pytest.importorskip("llguidance")
    pytest.importorskip("pydantic")
    from llguidance import LLMatcher

    from rooftile.serve.guided import Grammars

    path = Path(rooftile.__file__).parent / "byte_model"
    model = rooftile.Engine.from_pretrained(path, dtype=torch.float32, max_batch=2, max_seq_len=32, progress=False)
    grammars = Grammars(model.tokenizer, model.config.vocab, model.config.eos)
    masks = [grammars.compile(LLMatcher.grammar_from_regex(regex)).copy() for regex in ("[0-9]{3}", "(yes|no)!")]
    one, other = model.generate(["def f(", "x ="], max_new_tokens=9, mask=masks)
    assert re.fullmatch("[0-9]{3}", one.text)
    assert other.text in ("yes!", "no!")
    assert (one.finish_reason, other.finish_reason) == ("stop", "stop")


def test_penalties_count_what_was_generated_before_pages_were_given_back(engine):
    """Few pages: sequences give way, and go on with the counts that they had."""
    how = {"frequency_penalty": 1.5, "presence_penalty": 0.3}
    few = rooftile.Engine.from_config(SIZES, dtype=torch.float32, max_batch=4, max_seq_len=32, page_size=16, pages=3)
    prompts = [p + [1] * (14 - len(p)) for p in PROMPTS]
    expected = [engine.generate(p, max_new_tokens=NEW, ignore_eos=True, **how)[0].tokens for p in prompts]
    with rooftile.AsyncEngine(few, prefix_cache=False) as several:
        streams = [several.add(p, max_new_tokens=NEW, ignore_eos=True, **how) for p in prompts]
        assert [s.result().tokens for s in streams] == expected
        assert several.stats().preemptions > 0


def test_the_most_likely_tokens_of_each_step(engine):
    """Of the model's logits, whatever the options; as many as each request asks for."""
    options = {"logit_bias": {7: 50.0}, "temperature": 1.0, "logprobs": True}
    one, other = generated(engine, [0, 1], top_logprobs=5, **options)
    assert [len(top) for top in one.top_logprobs] == [5] * NEW
    assert one.tokens == [7] * NEW
    for n in (0, 3):
        logits = engine.logits([[*PROMPTS[0], *one.tokens[:n]]])[0][-1]
        expected = torch.log_softmax(logits.double(), -1).topk(5)
        assert [t for t, _ in one.top_logprobs[n]] == expected.indices.tolist()
        assert [p for _, p in one.top_logprobs[n]] == pytest.approx(expected.values.tolist(), abs=1e-5)
    assert other.tokens == generated(engine, [1], **options)[0].tokens
    assert generated(engine, [0], **options)[0].top_logprobs is None
    chunks = list(engine.generate(PROMPTS[1], max_new_tokens=3, top_logprobs=1, stream=True, ignore_eos=True))
    assert [c.top_logprobs[0][0] for c in chunks] == [c.token for c in chunks]
    with rooftile.AsyncEngine(engine) as several:
        streams = [several.add(PROMPTS[i], max_new_tokens=3, top_logprobs=k) for i, k in enumerate((20, 0, 2))]
        assert [[len(c.top_logprobs or ()) for c in s] for s in streams] == [[20] * 3, [0] * 3, [2] * 3]


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"presence_penalty": 2.1}, ValueError, "presence_penalty is 2.1, expected -2 to 2"),
        ({"frequency_penalty": float("nan")}, ValueError, "frequency_penalty is nan, expected -2 to 2"),
        ({"frequency_penalty": "1"}, TypeError, "frequency_penalty is '1', expected a number"),
        ({"logit_bias": [1.0]}, TypeError, r"logit_bias is \[1.0\], expected numbers by token ids"),
        ({"logit_bias": {"5": 1.0}}, TypeError, "logit_bias has '5', expected token ids"),
        ({"logit_bias": {5: "1"}}, TypeError, "logit_bias of token 5 is '1', expected a number"),
        ({"logit_bias": {5: float("inf")}}, ValueError, "logit_bias of token 5 is inf, expected a finite number"),
        ({"logit_bias": {5: float("nan")}}, ValueError, "logit_bias of token 5 is nan, expected a finite number"),
        ({"logit_bias": {131: 1.0}}, ValueError, "logit_bias has the token 131, expected 0 to 130"),
        ({"logit_bias": {-1: 1.0}}, ValueError, "logit_bias has the token -1, expected 0 to 130"),
        ({"top_logprobs": 21}, ValueError, "top_logprobs is 21, expected 0 to 20"),
        ({"top_logprobs": -1}, ValueError, "top_logprobs is -1, expected 0 to 20"),
        ({"top_logprobs": True}, TypeError, "top_logprobs is True, expected an integer"),
        ({"mask": "[a-z]"}, (TypeError, ValueError), "mask"),
    ],
)
def test_wrong_options(options, kind, message, engine):
    with pytest.raises(kind, match=message):
        generated(engine, [0], **options)
    with pytest.raises(kind, match=message), rooftile.AsyncEngine(engine) as several:
        several.add(PROMPTS[0], **options)


def test_biases_are_those_of_the_call():
    """The caller may change them while the request waits, and other ranks get them pickled."""
    given = {3: 1.5}
    sampling = Sampling(logit_bias=types.MappingProxyType(given))
    given[10**6] = 2.0
    assert pickle.loads(pickle.dumps(sampling)).logit_bias == {3: 1.5}


def test_plain_options_are_those_of_the_graphs():
    assert all(Sampling(**o).plain for o in ({}, {"temperature": 1.0}, {"repetition_penalty": 1.2, "logit_bias": {}}))
    names = {
        "presence_penalty": 0.1,
        "frequency_penalty": -0.1,
        "logit_bias": {1: 0.5},
        "mask": Only((1,)),
        "top_logprobs": 1,
    }
    assert names.keys() <= {field.name for field in dataclasses.fields(Sampling)}
    assert not any(Sampling(**{name: value}).plain for name, value in names.items())


@pytest.mark.gpu
def test_graphs_give_what_plain_launches_give_with_options(device):
    """Bit-identical; requests without options go on by graphs once the others have ended."""
    engines = [
        rooftile.Engine.from_config(
            SIZES, dtype=torch.float32, max_batch=4, max_seq_len=32, page_size=16, device=device, cuda_graphs=graphs
        )
        for graphs in (True, False)
    ]
    hows = [
        Sampling(),
        Sampling(frequency_penalty=1.5, temperature=0.9, seed=4, top_logprobs=3),
        Sampling(temperature=0.9, seed=3),
        Sampling(logit_bias={5: 6.0}, presence_penalty=0.7),
    ]
    first, second = (steps(e, hows, [0, 1, 2, 3]) for e in engines)
    assert first == second
    for i in range(4):
        assert by_the_formula(engines[0], PROMPTS[i], hows[i], first[i]) == first[i]
    assert any(key[:2] == (4, None) for key in engines[0].runner._graphs)
    expected = [generated(e, [0, 1], temperature=0.7) for e in engines]
    assert expected[0] == expected[1]
