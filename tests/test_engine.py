"""The engine against Hugging Face's models, and what generation promises: who runs, what comes out, what goes back."""

import contextlib
import copy

import pytest
import torch
from helpers import BF16, nightly_but
from tokenizers import Tokenizer, decoders, models

import rooftile
from rooftile import runtime
from rooftile.engine import engine as engine_

transformers = pytest.importorskip("transformers")

_SIZES = {
    "vocab_size": 131,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FAMILIES = {
    "Llama": ("LlamaConfig", {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}),
    "Llama 3.1": ("LlamaConfig", {"rope_parameters": _LLAMA3, "tie_word_embeddings": True}),
    "Granite": (
        "GraniteConfig",
        {
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.25,
            "residual_multiplier": 0.22,
            "logits_scaling": 6.0,
            "rms_norm_eps": 0.1,  # one that is seen, for it is divided by the square of the residual's multiplier
        },
    ),
    "Granite code": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "Qwen2.5": ("Qwen2Config", {}),
    "Qwen3": ("Qwen3Config", {"head_dim": 16}),
    "Mistral": ("MistralConfig", {"sliding_window": 7}),
    "SmolLM3": (
        "SmolLM3Config",
        {"num_hidden_layers": 2, "no_rope_layers": [1, 0], "use_sliding_window": True, "sliding_window": 7},
    ),
    "Phi-3": (
        "Phi3Config",
        {
            "sliding_window": 7,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.75},
        },
    ),
    "Phi-3, long": (
        "Phi3Config",
        {
            "original_max_position_embeddings": 96,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0, 1.1, 1.3, 1.7, 2.0, 2.5, 3.0, 4.0],
                "long_factor": [2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0],
            },
        },
    ),
    "Gemma 2": (
        "Gemma2Config",
        {
            "num_hidden_layers": 2,
            "head_dim": 24,
            "sliding_window": 7,
            "query_pre_attn_scalar": 4,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 2.0,
            "tie_word_embeddings": True,
        },
    ),
    "Gemma 3": (
        "Gemma3TextConfig",
        {
            "num_hidden_layers": 3,
            "head_dim": 24,
            "sliding_window": 7,
            "sliding_window_pattern": 3,
            "query_pre_attn_scalar": 4,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "OLMo 2": ("Olmo2Config", {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_bias": True}),
}
# Layers of float32 products in other orders; through 64 tokens, whose keys carry their own roundings.
TOLERANCE = 2e-5
PROMPTS = [[3, 5, 8, 13, 21, 34, 55, 89, 23, 42, 7], [9, 9, 4], [100, 2, 64, 17, 31, 5, 77]]


def built(family, **more):
    """Hugging Face's model with random biases and norms, where models start from zeros and ones."""
    name, sizes = FAMILIES[family]
    config = getattr(transformers, name)(**_SIZES | sizes | more)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def saved(model, folder, tokenizer=False):
    model.save_pretrained(folder)
    if tokenizer:
        tokenizer = Tokenizer(models.BPE(vocab={chr(32 + i): i for i in range(131)}, merges=[]))
        tokenizer.decoder = decoders.Fuse()
        tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def llama():
    return built("Llama")


@pytest.fixture(scope="module")
def engine(llama, tmp_path_factory):
    folder = saved(llama, tmp_path_factory.mktemp("llama"))
    return rooftile.Engine.from_pretrained(
        folder, dtype=torch.float32, max_batch=3, max_seq_len=96, page_size=16, progress=False
    )


@contextlib.contextmanager
def logits_of_steps(engine):
    """What each step of decoding computes."""
    decoder, steps = engine.runner.decoder, []

    def decode(ids, **options):
        steps.append(type(decoder).decode(decoder, ids, **options))
        return steps[-1]

    decoder.decode = decode
    try:
        yield steps
    finally:
        del decoder.decode


def relative(actual, expected):
    return float((actual.cpu() - expected).norm() / expected.norm())


def free_of(engine):
    return engine.runner.cache.free_pages, len(engine.runner.cache.sequences)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_greedy_tokens_are_those_of_hugging_face(family, tmp_path, device):
    """Of prompts of unequal lengths and of 64 tokens behind each (in the interpreter 4, or 23 into a third page), in
    the company of the other. Nightly, `test_generate.py` compares 64 tokens in the interpreter, too."""
    prompts, new = PROMPTS[:2], 64 if device.type == "cuda" else 23 if family == "Llama" else 4
    model = built(family)
    engine = rooftile.Engine.from_pretrained(
        saved(model, tmp_path), dtype=torch.float32, max_batch=2, max_seq_len=80, page_size=16, device=device,
        cuda_graphs=False, progress=False,
    )  # fmt: skip
    for actual, prompt in zip(engine.logits(prompts), prompts, strict=True):
        assert relative(actual, model(torch.tensor([prompt])).logits[0].detach()) < TOLERANCE
    with logits_of_steps(engine) as steps:
        completions = engine.generate(prompts, max_new_tokens=new, ignore_eos=True)
    assert len(steps) == new - 1
    for row, (completion, prompt) in enumerate(zip(completions, prompts, strict=True)):
        with torch.no_grad():
            expected = model(torch.tensor([prompt + completion.tokens])).logits[0, len(prompt) - 1 : -1]
        assert completion.tokens == expected.argmax(-1).tolist()
        assert relative(torch.stack([step[row] for step in steps]), expected[1:]) < TOLERANCE


def assert_as_near_as_hugging_face(model, folder, prompts, device, new):
    """In 16 bits: as near to the model in float32 as Hugging Face's own code is, but for chance: a bit more or less in
    some of 20 roundings. The checkpoint is loaded, because `model.to` would round the frequencies of RoPE, too."""
    engine = rooftile.Engine.from_pretrained(
        saved(model, folder), dtype=model.dtype, max_batch=2, page_size=16, device=device, cuda_graphs=False,
        progress=False,
    )  # fmt: skip
    model, exact = (
        transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").to(device)
        for dtype in (model.dtype, torch.float32)
    )

    def logits_of(which, prompt):
        with torch.no_grad():
            return which(torch.tensor([prompt], device=device)).logits[0].float().cpu()

    def check(ours, prompt, rows):
        expected = logits_of(exact, prompt)[rows]
        assert relative(ours.float(), expected) < 1.5 * relative(logits_of(model, prompt)[rows], expected)

    for prompt, logits in zip(prompts, engine.logits(prompts), strict=True):
        check(logits, prompt, slice(None))
    for batch in (prompts[:1], prompts):
        with logits_of_steps(engine) as steps:
            completions = engine.generate(batch, max_new_tokens=new, ignore_eos=True)
        for row, c in enumerate(completions):
            check(torch.stack([s[row] for s in steps]), c.prompt + c.tokens, slice(len(c.prompt), -1))
    return engine


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.nightly)])
def test_norm_weights_plus_one_are_not_rounded(dtype, tmp_path, device):
    """Gemma's, as in Hugging Face's code. The embedding's scale is rounded to the weights' dtype, as there."""
    model = built("Gemma 2", initializer_range=0.1, hidden_size=48).to(dtype)
    decoder = assert_as_near_as_hugging_face(model, tmp_path, [PROMPTS[0], PROMPTS[2] * 3], device, 6).runner.decoder
    assert decoder.weights.norm.dtype == torch.float32
    assert decoder.embedding_scale == torch.tensor(48**0.5).to(dtype).item() != 48**0.5


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("family", "head_dim"), [("SmolLM3", 128), ("OLMo 2", 128), ("Phi-3", 96), ("Gemma 2", 256), ("Gemma 3", 256)]
)
def test_heads_of_published_sizes(family, head_dim, tmp_path, device):
    """In bfloat16, with prompts of several tiles."""
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 4 * head_dim, "intermediate_size": 512}
    more = {} if family in ("SmolLM3", "OLMo 2", "Phi-3") else {"head_dim": head_dim}
    model = built(family, **sizes, **more, max_position_embeddings=512, initializer_range=0.05).to(BF16)
    prompts = [[(7 * i) % 131 for i in range(150)], [(5 * i + 3) % 131 for i in range(40)]]
    assert_as_near_as_hugging_face(model, tmp_path, prompts, device, 8)


def rounded(model, quantize, tokens=None):
    """The model with weights as the engine keeps them, and for fp8 what they multiply, too, of those tokens."""
    model = copy.deepcopy(model)
    for name, layer in model.named_modules():
        if not isinstance(layer, torch.nn.Linear):
            continue
        weight = layer.weight.detach()
        if quantize == "fp8":
            layer.weight.data = by_row_in_fp8(weight)
            layer.register_forward_pre_hook(lambda _, args: (by_row_in_fp8(args[0], tokens), *args[1:]))
        elif quantize == "int8" or name == "lm_head":
            q, scale = rooftile.quantize_int8(weight)
            layer.weight.data = q * scale[:, None]
        else:
            group = 64 if weight.shape[1] % 64 == 0 else 32
            packed, scale = rooftile.quantize_int4(weight, group)
            layer.weight.data = rooftile.unpack_int4(packed, group) * scale.repeat_interleave(group, dim=1)
    return model


def by_row_in_fp8(x, tokens=None):
    scale = x.abs().amax(-1, keepdim=True) / 448
    y = (x / scale).to(torch.float8_e4m3fn).float() * scale
    return y if tokens is None else torch.cat((y[:, :tokens], x[:, tokens:]), 1)


@pytest.mark.parametrize("quantize", nightly_but(("fp8",), ("fp8", "int8", "int4")))
def test_quantized_weights(quantize, llama, tmp_path, device):
    """Against Hugging Face's model with the same roundings, in prompts and in single tokens.

    In fp8 an element between two of the format may go the other way by the last bit of float32. Hopper's tensor cores
    keep some 14 bits of a sum of fp8 products: there it happens at most tokens, and changes a few of 32 elements by up
    to 1/16, in each of two layers. So a GPU's results tell only whether the weights are the right ones.
    """
    engine = rooftile.Engine.from_pretrained(
        saved(llama, tmp_path), dtype=torch.float32, quantize=quantize, max_batch=3, max_seq_len=48, page_size=16,
        device=device, cuda_graphs=False, progress=False,
    )  # fmt: skip
    exact = quantize != "fp8" or device.type == "cpu"
    model, most = rounded(llama, quantize), 0.25 if not exact else 1e-2 if quantize == "fp8" else TOLERANCE
    with logits_of_steps(engine) as steps:
        completions = engine.generate(PROMPTS, max_new_tokens=4, ignore_eos=True)
    for row, completion in enumerate(completions):
        expected = model_logits(model, completion.prompt + completion.tokens)
        assert relative(engine.logits(completion.prompt)[0], expected[: len(completion.prompt)]) < most
        assert relative(torch.stack([s[row] for s in steps]), expected[len(completion.prompt) : -1]) < most
    assert not exact or relative(engine.logits(PROMPTS[0])[0], model_logits(llama, PROMPTS[0])) > most
    # A sequence alone: what its steps multiply is not rounded.
    with logits_of_steps(engine) as steps:
        tokens, prompt = engine.generate(PROMPTS[0], max_new_tokens=6, ignore_eos=True)[0].tokens, PROMPTS[0]
    expected = model_logits(rounded(llama, quantize, len(prompt)), prompt + tokens)[len(prompt) : -1]
    assert relative(torch.cat(steps), expected) < most
    expected = model_logits(model, prompt + tokens)[len(prompt) : -1]
    assert not exact or (relative(torch.cat(steps), expected) < most) == (quantize != "fp8")


@pytest.mark.parametrize("family", ["OLMo 2", pytest.param("Gemma 2", marks=pytest.mark.nightly)])
def test_quantized_weights_of_layers_whose_results_are_normalized(family, tmp_path, device):
    """In int8, of prompts, of two sequences and of one."""
    model = built(family, tie_word_embeddings=False)  # a tied embedding is not rounded
    engine = rooftile.Engine.from_pretrained(
        saved(model, tmp_path), dtype=torch.float32, quantize="int8", max_batch=2, max_seq_len=48, page_size=16,
        device=device, cuda_graphs=False, progress=False,
    )  # fmt: skip
    model = rounded(model, "int8")
    for prompts in (PROMPTS[:2], PROMPTS[:1]):
        with logits_of_steps(engine) as steps:
            completions = engine.generate(prompts, max_new_tokens=3, ignore_eos=True)
        for row, completion in enumerate(completions):
            expected = model_logits(model, completion.prompt + completion.tokens)[len(completion.prompt) - 1 : -1]
            assert completion.tokens == expected.argmax(-1).tolist()
            assert relative(torch.stack([s[row] for s in steps]), expected[1:]) < TOLERANCE


@pytest.mark.gpu
def test_int8_logits_of_a_vocabulary_that_is_no_multiple_of_16_bytes(tmp_path, device):
    """Granite 3's: rows of the logits begin at multiples of 2 bytes, and many rows are dequantized in parts."""
    sizes = {"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 512}
    sizes["initializer_range"] = 0.02  # scores that bfloat16's roundings do not turn into other weights
    model = built("Granite code", vocab_size=49155, **sizes)
    engine = rooftile.Engine.from_pretrained(
        saved(model, tmp_path), dtype=BF16, quantize="int8", max_batch=1, max_seq_len=256, page_size=16, device=device,
        cuda_graphs=False, progress=False,
    )  # fmt: skip
    prompt = [(7 * i) % 131 for i in range(128)] + [49154] * 32
    model = rounded(model, "int8").to(device)
    with torch.no_grad():
        expected = model(torch.tensor([prompt], device=device)).logits[0].cpu()
    assert relative(engine.logits(prompt)[0], expected) < 0.05


def model_logits(model, prompt):
    with torch.no_grad():
        return model(torch.tensor([prompt])).logits[0]


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.int8])
def test_a_cache_of_8_bits(kv_dtype, llama, tmp_path, device):
    engine = rooftile.Engine.from_pretrained(
        saved(llama, tmp_path), dtype=torch.float32, kv_dtype=kv_dtype, max_batch=1, max_seq_len=32, page_size=16,
        device=device, cuda_graphs=False, progress=False,
    )  # fmt: skip
    with logits_of_steps(engine) as steps:
        tokens = engine.generate(PROMPTS[0], max_new_tokens=6, ignore_eos=True)[0].tokens
    expected = model_logits(llama, PROMPTS[0] + tokens)[len(PROMPTS[0]) : -1]
    assert 0 < relative(torch.cat(steps), expected) < 0.1


@pytest.mark.nightly  # requests in any order: test_async_engine.py
def test_sequences_join_and_leave_while_others_decode(engine):
    """Five prompts, three slots: tokens are those of each alone, and all is given back."""
    prompts = [*PROMPTS, [50, 60], [70] * 20]
    before = free_of(engine)
    together = engine.generate(prompts, max_new_tokens=6)
    assert [c.prompt for c in together] == prompts
    assert [c.tokens for c in together] == [engine.generate(p, max_new_tokens=6)[0].tokens for p in prompts]
    assert free_of(engine) == before


def test_sequences_wait_for_pages(llama, tmp_path, device):
    """Pages for one at a time, though there are slots for two."""
    engine = rooftile.Engine.from_pretrained(
        saved(llama, tmp_path), dtype=torch.float32, max_batch=2, max_seq_len=32, page_size=16, pages=2, device=device,
        progress=False,
    )  # fmt: skip
    pieces = list(engine.generate([[5] * 14, [6] * 14], max_new_tokens=6, stream=True, ignore_eos=True))
    assert [p.index for p in pieces] == [0] * 6 + [1] * 6
    assert free_of(engine) == (2, 0)
    with pytest.raises(ValueError, match="prompt 1 has 14 tokens, and max_new_tokens is 19: more than max_seq_len, 32"):
        engine.generate([[5], [6] * 14], max_new_tokens=19)


@pytest.fixture
def small(llama, device, monkeypatch):
    """Makes an engine of random weights, and the list of its calls' schedulers."""

    def make(**more):
        options = {"dtype": torch.float32, "max_batch": 3, "max_seq_len": 96, "page_size": 16, "device": device, **more}
        engine, schedulers = rooftile.Engine.from_config(llama.config, **options), []
        scheduler = engine._scheduler
        monkeypatch.setattr(engine, "_scheduler", lambda: schedulers.append(scheduler()) or schedulers[-1])
        return engine, schedulers

    return make


@pytest.mark.parametrize("how", [{}, {"temperature": 0.9, "seed": 5, "presence_penalty": 1.5}])
def test_a_cache_too_small_for_all_prompts_at_once_gives_the_tokens_of_a_large_one(how, small):
    """Each has a page for its prompt, and there are pages for the whole of one and a part of another."""
    prompts = [[10 * i + t for t in range(12)] for i in range(3)]
    found, preemptions = [], []
    for pages in (6, 3):
        engine, schedulers = small(pages=pages)
        completions = engine.generate(prompts, max_new_tokens=7, ignore_eos=True, **how)
        found.append([c.tokens for c in completions])
        preemptions.append(schedulers[0].preemptions)
        assert free_of(engine) == (pages, 0)
    assert found[0] == found[1]
    assert preemptions[0] == 0 < preemptions[1]


def test_pages_that_prompts_of_a_call_begin_with_are_computed_once(small):
    """Those of that call alone: weights may change before the next."""
    engine, schedulers = small()
    begun = [(7 * t) % 131 for t in range(40)]
    prompts = [[*begun, 3, 4, 5], [*begun, 9], [6] * 5]
    for _ in range(2):
        found = [c.tokens[0] for c in engine.generate(prompts, max_new_tokens=1, ignore_eos=True)]
        assert found == [logits[-1].argmax().item() for logits in engine.logits(prompts)]
        with torch.no_grad():
            engine.weights.embedding.copy_(engine.weights.embedding.flip(0))
    assert [s.prefix_hit_tokens for s in schedulers] == [32, 32]
    assert schedulers[0].prefix_query_tokens == sum(map(len, prompts))


def test_a_long_prompt_is_computed_beside_one_that_decodes(small, monkeypatch):
    """13 of its tokens in each step, in which the other one gets a token."""
    engine, _ = small()
    prompts = [[9, 9, 4], [(5 * t) % 131 for t in range(60)]]
    whole = [c.tokens for c in engine.generate(prompts, max_new_tokens=8, ignore_eos=True)]
    monkeypatch.setattr(engine_, "STEP_TOKENS", 16)
    pieces = list(engine.generate(prompts, max_new_tokens=8, stream=True, ignore_eos=True))
    assert [p.index for p in pieces][:6] == [0, 0, 0, 0, 0, 1]
    assert [[p.token for p in pieces if p.index == i] for i in range(2)] == whole


def test_pieces_make_the_completion(engine):
    options = {"temperature": 0.8, "seed": 3, "logprobs": True, "ignore_eos": True}
    completions = engine.generate(PROMPTS, max_new_tokens=3, **options)
    pieces = list(engine.generate(PROMPTS, max_new_tokens=3, stream=True, **options))
    for i, completion in enumerate(completions):
        mine = [p for p in pieces if p.index == i]
        assert [p.token for p in mine] == completion.tokens
        assert [p.logprob for p in mine] == completion.logprobs
        assert [p.finish_reason for p in mine] == [None] * 2 + ["length"]
    assert completions[0].text is None


def test_log_probabilities(engine, llama):
    completion = engine.generate(PROMPTS[0], max_new_tokens=4, temperature=1.5, logprobs=True, ignore_eos=True)[0]
    logits = model_logits(llama, PROMPTS[0] + completion.tokens)[len(PROMPTS[0]) - 1 : -1]
    expected = logits.log_softmax(-1).gather(-1, torch.tensor(completion.tokens)[:, None])[:, 0]
    assert torch.allclose(torch.tensor(completion.logprobs), expected, atol=1e-4)


def test_tokens_depend_on_the_seed_and_not_on_the_company(engine):
    options = {"temperature": 1.2, "top_p": 0.95, "ignore_eos": True}
    alone = [engine.generate(p, max_new_tokens=3, seed=7, **options)[0].tokens for p in PROMPTS]
    assert [c.tokens for c in engine.generate(PROMPTS, max_new_tokens=3, seed=7, **options)] == alone
    seeds = engine.generate([PROMPTS[0]] * 3, max_new_tokens=3, seed=[7, 8, 9], **options)
    assert seeds[0].tokens == alone[0]
    assert len({tuple(c.tokens) for c in seeds}) == 3


def test_a_token_is_drawn_at_the_position_that_it_gets(llama, tmp_path):
    engine = rooftile.Engine.from_pretrained(
        saved(llama, tmp_path), dtype=torch.float32, max_batch=1, max_seq_len=32, cuda_graphs=False, progress=False
    )
    with logits_of_steps(engine) as steps:
        tokens = engine.generate(PROMPTS[0], max_new_tokens=4, temperature=1.2, seed=7, ignore_eos=True)[0].tokens
    assert len(steps) == len(tokens) - 1
    for i, logits in enumerate(steps, start=1):
        assert rooftile.sample(logits, temperature=1.2, seeds=7, positions=len(PROMPTS[0]) + i)[0].tolist() == [
            tokens[i]
        ]


def test_repetition_penalty_holds_prompt_and_new_tokens(engine):
    """So high that no token comes twice."""
    tokens = engine.generate(PROMPTS[0], max_new_tokens=5, repetition_penalty=1e6, ignore_eos=True)[0].tokens
    assert len({*tokens, *PROMPTS[0]}) == 5 + len(PROMPTS[0])
    # The slot's next sequence knows nothing of it.
    assert engine.generate(PROMPTS[0], max_new_tokens=5, repetition_penalty=1e6, ignore_eos=True)[0].tokens == tokens


def test_it_stops_where_it_is_told(engine):
    plain = engine.generate(PROMPTS[0], max_new_tokens=5, ignore_eos=True)[0].tokens
    stopped = engine.generate(PROMPTS[0], max_new_tokens=5, stop=plain[3], ignore_eos=True)[0]
    at = plain.index(plain[3])
    assert (stopped.tokens, stopped.finish_reason) == (plain[: at + 1], "stop")
    assert free_of(engine) == (18, 0)


def test_an_iterator_that_is_closed_gives_all_back(engine):
    before = free_of(engine)
    pieces = engine.generate(PROMPTS, max_new_tokens=8, stream=True, ignore_eos=True)
    next(pieces)
    with pytest.raises(RuntimeError, match="another call generates"):
        engine.generate([1, 2], max_new_tokens=3)
    pieces.close()
    assert free_of(engine) == before
    assert len(engine.generate([1, 2], max_new_tokens=3, ignore_eos=True)[0].tokens) == 3


def test_text(llama, tmp_path, device):
    """Text in and out, in one piece or as it comes, and cut at a string that lies over several tokens."""
    folder = saved(llama, tmp_path, tokenizer=True)
    engine = rooftile.Engine.from_pretrained(
        folder, dtype=torch.float32, max_batch=2, max_seq_len=64, page_size=16, device=device, progress=False
    )
    whole = engine.generate("roof", max_new_tokens=6, ignore_eos=True)[0]
    assert whole.prompt == engine.tokenizer.encode("roof").ids
    assert whole.text == engine.tokenizer.decode(whole.tokens)
    stop = whole.text[3:5]
    cut = engine.generate("roof", max_new_tokens=6, stop=stop, ignore_eos=True)[0]
    assert (cut.text, cut.finish_reason) == (whole.text[: whole.text.index(stop)], "stop")
    pieces = list(engine.generate("roof", max_new_tokens=6, stop=stop, ignore_eos=True, stream=True))
    assert "".join(p.text for p in pieces) == cut.text
    assert [p.token for p in pieces] == cut.tokens


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": []}, "there is no prompt"),
        ({"prompts": [[]]}, "prompt 0 is empty"),
        ({"prompts": [[1], [131]]}, "prompt 1 has the token 131, expected 0 to 130"),
        ({"prompts": "text"}, "the engine has no tokenizer"),
        ({"prompts": [1], "stop": "x", "max_new_tokens": 4}, "the engine has no tokenizer"),
        ({"prompts": [1], "max_new_tokens": 0}, "max_new_tokens is 0, expected a positive integer"),
        ({"prompts": [1], "max_new_tokens": 96}, "prompt 0 has 1 token, and max_new_tokens is 96"),
        ({"prompts": [1], "temperature": -1.0}, "temperature is -1.0, expected 0"),
        ({"prompts": [1], "top_p": 0.0}, "top_p is 0.0, expected more than 0"),
        ({"prompts": [1], "seed": [1, 2]}, "seed has 2 numbers, expected one, or 1"),
    ],
)
def test_what_cannot_be_generated(engine, arguments, message):
    with pytest.raises(ValueError, match=message):
        engine.generate(**arguments)
    assert free_of(engine) == (18, 0)


def test_misspelled_arguments_are_recognized(engine, llama):
    for call, said in (
        (lambda: engine.generate([1], max_tokens=5), r"Engine.generate: max_tokens .*; did you mean max_new_tokens\?"),
        (lambda: engine.generate([1], zzz=5), "Engine.generate: zzz is no argument; expected one of prompts, max"),
        (
            lambda: rooftile.Engine.from_config(llama.config, max_sequence_len=8),
            r"Engine.from_config: max_sequence_len .*; did you mean max_seq_len\?",
        ),
        (lambda: rooftile.Engine.from_pretrained("absent", quantized="fp8"), "did you mean quantize"),
        (
            lambda: rooftile.AsyncEngine.from_pretrained("absent", max_wating=3),
            r"AsyncEngine.from_pretrained: max_wating is no argument; did you mean max_waiting",
        ),
        (
            lambda: rooftile.AsyncEngine.from_pretrained("absent", quantized="fp8"),
            "did you mean quantize",
        ),
        (
            lambda: rooftile.AsyncEngine.from_config(llama.config, zzz=8),
            "AsyncEngine.from_config: zzz .*; expected one of config, max_waiting, .*, warm_up, dtype, .*seed$",
        ),
    ):
        with pytest.raises(TypeError, match=said):
            call()
    with rooftile.AsyncEngine(engine) as requests:
        for name, said in (
            ("max_tokens", r"max_new_tokens\?"),
            ("masks", r"did you mean mask\?"),
            ("zzz", "expected one of temperature, .*, request_id"),
        ):
            with pytest.raises(TypeError, match=f"^add: {name} is no argument; .*{said}$"):
                requests.add([1], **{name: 5})


def test_without_a_limit_there_are_as_many_new_tokens_as_there_is_room_for(engine, llama):
    """In a sequence and in the cache. Where there is room for none, a limit is refused as any other."""
    room = engine.max_seq_len - 91
    assert len(engine.generate([1] * 91, ignore_eos=True)[0].tokens) == room < 128
    with pytest.raises(ValueError, match="has 96 tokens, and max_new_tokens is 1: more than max_seq_len, 96"):
        engine.generate([1] * 96)
    small = rooftile.Engine.from_config(
        llama.config,
        max_batch=1,
        max_seq_len=96,
        page_size=16,
        pages=1,
        dtype=torch.float32,
        device=engine.weights.embedding.device,
    )
    assert len(small.generate([1] * 12, ignore_eos=True)[0].tokens) == 5
    with rooftile.AsyncEngine(small) as requests:
        assert len(requests.add([1] * 12, ignore_eos=True).result().tokens) == 5


def test_prompts_of_any_kind(engine):
    """Lists, tensors and arrays; what is neither is refused by name."""
    tokens = engine.generate(PROMPTS[0], max_new_tokens=2)[0].tokens
    for prompts in (torch.tensor(PROMPTS[0]), torch.tensor([PROMPTS[0]]), [torch.tensor(PROMPTS[0]).numpy()]):
        assert engine.generate(prompts, max_new_tokens=2)[0].tokens == tokens
    for wrong, said in ((None, "prompts is None"), ([1.5], "prompt 0 is 1.5"), (b"abc", "prompts is b'abc'")):
        with pytest.raises(TypeError, match=said):
            engine.generate(wrong, max_new_tokens=2)
    with pytest.raises(TypeError, match="seed is None, expected an integer"):
        engine.generate([1], max_new_tokens=2, seed=None)
    with pytest.raises(TypeError, match=r"stop is 3\.5, expected strings and token ids"):
        engine.generate([1], max_new_tokens=2, stop=3.5)
    with pytest.raises(ValueError, match="stop has the token 131, expected 0 to 130"):
        engine.generate([1], max_new_tokens=2, stop=131)
    with pytest.raises(ValueError, match="there are 4 prompts, expected at most max_batch, 3"):
        engine.logits([[1]] * 4)
    assert "llama, 2 layers of 32, dense weights" in repr(engine)


@pytest.mark.parametrize(
    ("more", "error", "message"),
    [
        ({"max_seq_len": 129}, ValueError, "max_seq_len is 129, expected at most the model's 128"),
        ({"max_batch": 0}, ValueError, "max_batch is 0, expected a positive integer"),
        (
            {"dtype": torch.int32},
            TypeError,
            r"dtype is torch.int32, expected torch.float32, torch.float16 or torch.bfloat16",
        ),
    ],
)
def test_what_cannot_be_built(llama, more, error, message):
    with pytest.raises(error, match=message):
        rooftile.Engine.from_config(llama.config, **more)


def test_without_a_gpu_it_says_what_to_set(llama, monkeypatch):
    monkeypatch.setattr(runtime, "MODE", runtime.Mode.GPU)
    monkeypatch.setattr(runtime, "accelerator", lambda: None)
    said = r"\(to run on the CPU, slowly, set TRITON_INTERPRET=1 in the environment before Python starts\)"
    with pytest.raises(RuntimeError, match=f"no GPU was found, and Rooftile's kernels need one {said}"):
        rooftile.Engine.from_config(llama.config)
    with pytest.raises(ValueError, match=f"Engine: device is cpu, expected a GPU, of which there is none {said}"):
        rooftile.Engine.from_config(llama.config, device="cpu")


@pytest.mark.parametrize("named", ["cuda", "cuda:3", "xpu", "graphics", 3])
def test_devices_that_are_not_there_are_refused_by_name(llama, named, monkeypatch):
    monkeypatch.setattr(runtime, "accelerator", lambda: None)
    monkeypatch.setattr(runtime, "MODE", runtime.Mode.INTERPRETER)
    said = f": device is {named}, expected cpu in this process, whose mode is interpreter"
    with pytest.raises(ValueError, match=f"^Engine{said}"):
        rooftile.Engine.from_config(llama.config, device=named)
    with pytest.raises(ValueError, match=f"^KVCache{said}"):
        rooftile.KVCache(1, 8, 1, 16, device=named)
    monkeypatch.setattr(runtime, "MODE", runtime.Mode.GPU)
    monkeypatch.setattr(runtime, "accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    if named != "cuda":
        with pytest.raises(ValueError, match=f"device is {named}, expected a GPU: cuda:0 to cuda:1"):
            rooftile.Engine.from_config(llama.config, device=named)


def test_a_path_is_for_from_pretrained_which_takes_a_folder(tmp_path):
    with pytest.raises(
        TypeError, match=r"Engine: weights and runner are absent; Engine.from_pretrained\(folder\) loads"
    ):
        rooftile.Engine(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"config.json is a file; expected a checkpoint's folder, the id"):
        rooftile.Engine.from_pretrained(tmp_path / "config.json")


@pytest.mark.parametrize("dtype", [torch.float16, BF16])
def test_random_weights(llama, dtype, device):
    """The same from the same seed, and finite through the model."""
    first, again, other = (
        rooftile.Engine.from_config(llama.config, dtype=dtype, seed=s, max_seq_len=32, device=device) for s in (0, 0, 1)
    )
    logits = [e.logits([PROMPTS[0]])[0] for e in (first, again, other)]
    assert torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[0], logits[2])
    assert logits[0].isfinite().all()
