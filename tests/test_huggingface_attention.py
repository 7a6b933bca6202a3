"""`attn_implementation="rooftile"`: the same tokens, logits and gradients as eager attention, in every family."""

import copy
import logging
from collections import Counter

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("triton", reason="Triton is not installed")

import transformers
from helpers import Calls, nightly_but
from tiny_models import _TINY, BY_TITLE, DEVICE, assert_same_gradients, build, error, gradients, tokens
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode

from rooftile.huggingface import attention, patch
from rooftile.huggingface.attention import register_attention
from rooftile.huggingface.small_models import inputs

TITLES = (*BY_TITLE, "gpt-oss")
_GPT_OSS = {**_TINY, "head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 2, "sliding_window": 8}
# A window that the sequences pass, where the configuration has one.
_WINDOWED = ("Mistral", "Gemma 2", "Gemma 3", "Phi-3", "Mixtral", "StarCoder2")
WINDOWS = {title: {"sliding_window": 8} for title in _WINDOWED}
WINDOWS["Qwen2-MoE"] = {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2}
GENERATING = [title for title in TITLES if title not in ("BERT", "RoBERTa")]
# A rounding more or less of float32 in each of two layers.
TOLERANCE = 5e-6


@pytest.fixture(autouse=True)
def _registered():
    register_attention()


def gpt_oss(**more):
    """With sinks, which PyTorch's own attention does not have."""
    import transformers

    config = transformers.GptOssConfig(
        vocab_size=256, pad_token_id=0, bos_token_id=1, eos_token_id=2, **_GPT_OSS | more
    )
    torch.manual_seed(0)
    with torch.device(DEVICE):
        return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def pair(title, **more):
    """The model with eager attention, and its twin with Rooftile's."""
    if title in WINDOWS:
        more = WINDOWS[title] | more
    return twins(gpt_oss(**more) if title == "gpt-oss" else build(title, **more))


def twins(eager):
    ours = copy.deepcopy(eager)
    for model, name in ((eager, "eager"), (ours, "rooftile")):
        for module in model.modules():  # set_attn_implementation does not reach T5's two halves
            if isinstance(module, transformers.PreTrainedModel):
                module.config._attn_implementation = name
    return eager, ours


def padded(n, batch, side):
    """Tokens of which the sequences but the first have fewer, and the mask that says so."""
    ids, mask = tokens(n, batch), torch.ones(batch, n, dtype=torch.long, device=DEVICE)
    for b in range(1, batch):
        gone = slice(0, 2 * b + 1) if side == "left" else slice(n - 2 * b - 1, n)
        ids[b, gone], mask[b, gone] = 0, 0
    return ids, mask


def logits(model, ids, mask):
    given = {"input_ids": ids, "attention_mask": mask}
    if model.config.is_encoder_decoder:
        given |= {"decoder_input_ids": ids, "decoder_attention_mask": mask}
    with torch.no_grad():
        return model(**given).logits


# Of the others greedy tokens show padding on the left, a training step shows it on the right.
@pytest.mark.parametrize(
    "title",
    nightly_but(
        ("Gemma 2", "DeepSeek-V3", "T5", "gpt-oss"),
        ("Llama", "Gemma 2", "Gemma 3", "DeepSeek-V3", "T5", "BERT", "GPT-2", "gpt-oss"),
    ),
)
def test_logits_of_padded_batches(title):
    eager, ours = pair(title)
    for side in ("left", "right"):
        ids, mask = padded(20, 3, side)
        there = mask.bool()
        with Calls() as record:
            found = logits(ours, ids, mask)[there]
        assert error(found, logits(eager, ids, mask)[there]) < TOLERANCE, side
        op = "attention" if title in ("BERT", "T5") else "attention_varlen"  # what is causal and has no bias
        assert {func._schema.name for func, _, _ in record.calls} == {f"rooftile::{op}"}


@pytest.mark.parametrize("title", nightly_but(("Llama", "Gemma 3", "T5"), GENERATING))
def test_greedy_tokens_of_a_padded_batch(title):
    """The prompt's token, and two steps after it."""
    eager, ours = pair(title)
    ids, mask = padded(11, 2, "left")
    options = {"attention_mask": mask, "max_new_tokens": 3, "do_sample": False, "min_new_tokens": 3}
    assert torch.equal(ours.generate(ids, **options), eager.generate(ids, **options))


@pytest.mark.parametrize(
    "title", nightly_but(("Gemma 3", "gpt-oss", "T5"), ("Llama", "Gemma 2", "Gemma 3", "gpt-oss", "DeepSeek-V3", "T5"))
)
def test_greedy_tokens_without_padding_are_decoded(title):
    eager, ours = pair(title)
    ids = tokens(11, 2)
    options = {"max_new_tokens": 5, "do_sample": False, "min_new_tokens": 5}
    with Calls() as record:
        found = ours.generate(ids, **options)
    assert torch.equal(found, eager.generate(ids, **options))
    ran = [func._schema.name for func, _, _ in record.calls]
    assert ("rooftile::decode_attention" in ran) == (not title.startswith("T5"))  # which adds a bias by position


@pytest.mark.each_once
@pytest.mark.parametrize("cache", ["static", "dynamic"])
@pytest.mark.parametrize(
    "title", nightly_but(("Llama", "Gemma 3"), ("Llama", "Granite", "Gemma 2", "Gemma 3", "gpt-oss"))
)
def test_greedy_tokens_of_a_padded_batch_are_decoded(title, cache):
    """With a static cache the tail that is not filled is masked, too; the prompt has more tokens than are decoded."""
    eager, ours = pair(title)
    ids, mask = padded(18, 3, "left")
    options = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False, "min_new_tokens": 4}
    options |= {"cache_implementation": cache, "disable_compile": True}
    with Calls() as record:
        found = ours.generate(ids, **options)
    assert torch.equal(found, eager.generate(ids, **options))
    layers = ours.config.get_text_config().num_hidden_layers
    ran = Counter(func._schema.name for func, _, _ in record.calls)
    assert ran == {"rooftile::attention_varlen": layers, "rooftile::decode_attention": 3 * layers}
    masks = [args[9] for func, args, _ in record.calls if func._schema.name == "rooftile::decode_attention"]
    assert any(m is not None and not m.all() for m in masks), "a window may have left the padding behind"


def scoring(func, args):
    """Of a call of an op: its name, and the values of its mask and of its window in keys, None for none."""
    given = {a.name: value for a, value in zip(func._schema.arguments, args, strict=False)}
    window = given["window"] if "window" in given else given["left"] + 1 or None
    return func._schema.name.partition("::")[2], given.get("mask"), window


def assert_no_masks(calls, config, forwards):
    """One op without a mask, and with its layer's window, for each layer and forward."""
    ran = [scoring(func, args) for func, args, _ in calls]
    assert all(mask is None for _, mask, _ in ran)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    windows = [config.sliding_window if kind == "sliding_attention" else None for kind in kinds]
    assert Counter(window for *_, window in ran) == Counter(windows * forwards)
    return Counter(name for name, *_ in ran)


def static_cache(model, ids, allocated=False):
    """One of 40 tokens, to which ids were written."""
    config = model.config
    cache = transformers.StaticCache(config=config, max_cache_len=40)
    if allocated:
        sizes = {"num_heads": config.num_key_value_heads, "head_dim": model.model.layers[0].self_attn.head_dim}
        cache.early_initialization(batch_size=ids.shape[0], **sizes, dtype=torch.float32, device=DEVICE)
    if ids.shape[1]:
        with torch.no_grad():
            model(ids, past_key_values=cache)
    return cache


KINDS = nightly_but(("Llama", "Gemma 3"), ("Llama", "Gemma 2", "Gemma 3", "gpt-oss"))


@pytest.mark.parametrize("title", KINDS)
@pytest.mark.parametrize("chunk", [None, 18])
def test_generate_with_a_static_cache_masks_no_prompt(title, chunk):
    """Nor do a prompt's queries read keys that are not filled, in a cache that is new. In parts of 18 tokens, too."""
    eager, ours = pair(title)
    ids = tokens(20, 2)
    options = {"max_new_tokens": 3, "do_sample": False, "min_new_tokens": 3, "cache_implementation": "static"}
    options |= {"disable_compile": True, "prefill_chunk_size": chunk}
    with Calls() as record:
        found = ours.generate(ids, **options)
    assert torch.equal(found, eager.generate(ids, **options))
    prompts = [call for call in record.calls if call[1][0].shape[1] > 1 and scoring(*call[:2])[0] != "decode_attention"]
    assert all(mask is None for _, mask, _ in (scoring(*call[:2]) for call in record.calls if call[1][0].shape[1] > 1))
    assert len(prompts) == ours.config.num_hidden_layers
    if chunk is None:
        assert all(args[1].shape[1] == args[0].shape[1] == 20 for _, args, _ in prompts)


# The whole cache; parts before and after a window of 8 is full, some of few tokens.
@pytest.mark.each_once
@pytest.mark.parametrize("title", KINDS)
@pytest.mark.parametrize("parts", [(40,), (20, 20), (5, 2, 30), (3, 18, 17)], ids=str)
@pytest.mark.parametrize("batch", [1, 2])
def test_parts_of_a_prompt_in_a_static_cache_have_no_mask(title, parts, batch):
    ids = tokens(sum(parts), batch)
    found = []
    for model in pair(title):
        cache = static_cache(model, ids[:, :0])
        with torch.no_grad(), Calls() as record:
            found.append(torch.cat([model(part, past_key_values=cache).logits for part in ids.split(parts, 1)], dim=1))
    assert error(found[1], found[0]) < TOLERANCE
    ran = assert_no_masks(record.calls, model.config, len(parts))
    assert ("attention_varlen" in ran) == (len(parts) > 1)


@pytest.mark.parametrize("title", KINDS)
def test_a_prompt_in_a_static_cache_that_was_reset_or_allocated_has_no_mask(title):
    eager, ours = pair(title)
    ids = tokens(20, 2)
    for allocated in (False, True):
        found = []
        for model in (eager, ours):
            cache = static_cache(model, ids[:, : 0 if allocated else 9], allocated)
            cache.reset()
            with torch.no_grad(), Calls() as record:
                found.append(model(ids, past_key_values=cache).logits)
        assert error(found[1], found[0]) < TOLERANCE
        assert_no_masks(record.calls, ours.config, 1)


@pytest.mark.parametrize("title", KINDS)
def test_masks_of_later_parts(title):
    """All ones, and padding: none. Holes, or a mask of fewer tokens than there are: as eager attention does it."""
    eager, ours = pair(title)
    ids, padding = padded(30, 2, "left")
    ones = torch.ones_like(padding)
    late, holes = padding.clone(), padding.clone()
    late[1, :13], holes[1, 7] = 0, 0  # the other part's first queries are padding; row 1 has two ranges of valid keys
    for mask, is_masked in ((ones, False), (torch.nn.functional.pad(ones, (0, 10), value=1), False), (padding, False),
                            (late, False), (holes, True), (ones[:, :29], True)):  # fmt: skip
        found = []
        for model in (eager, ours):
            cache = static_cache(model, ids[:, :0])
            with torch.no_grad(), Calls() as record:
                model(ids[:, :11], past_key_values=cache, attention_mask=mask[:, :11])
                first = len(record.calls)
                found.append(model(ids[:, 11:], past_key_values=cache, attention_mask=mask).logits)
        there = (late if mask is late else ones)[:, 11:].bool()
        assert error(found[1][there], found[0][there]) < TOLERANCE
        if is_masked:
            assert any(scoring(func, args)[1] is not None for func, args, _ in record.calls[first:])
        else:
            assert_no_masks(record.calls[first:], ours.config, 1)


def test_the_host_does_not_wait_for_the_length_of_a_static_cache():
    class Reads(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            assert func is not torch.ops.aten._local_scalar_dense.default
            return func(*args, **(kwargs or {}))

    with Reads():
        mask = attention.attention_mask(2, 20, 48, q_offset=torch.tensor(11, device=DEVICE))
        assert attention.attention_mask(2, 20, 48, attention_mask=mask) is mask  # once more, in the model's forward
    assert mask.tolist() == [[[0, 20, 20, 40, 40], [0, 31, 48, 79, 96]]]


def test_later_parts_that_the_kernels_lack():
    """float64: PyTorch's attention, with a mask of the keys that are filled."""
    eager, ours = pair("Gemma 3")
    padding = padded(31, 2, "left")[1]
    for mask in (None, padding):
        found = []
        for model in (eager.double(), ours.double()):
            cache = static_cache(model, tokens(11, 2))
            with torch.no_grad():
                found.append(model(tokens(20, 2), past_key_values=cache, attention_mask=mask).logits)
        assert error(found[1], found[0]) < TOLERANCE  # the model's own softmax is in float32


def test_a_prompt_of_a_decoder_with_a_bias_in_a_static_cache():
    """The bias is as wide as the cache."""
    eager, ours = pair("T5")
    options = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, "cache_implementation": "static"}
    options |= {"disable_compile": True, "decoder_input_ids": tokens(7, 2)}
    assert torch.equal(ours.generate(tokens(20, 2), **options), eager.generate(tokens(20, 2), **options))


# In an allocated cache the host knows the length of layers with a window, and the device that of the others.
@pytest.mark.parametrize(
    ("title", "past"),
    [
        ("Gemma 3", 0),
        pytest.param("Gemma 2", 11, marks=pytest.mark.nightly),
        pytest.param("gpt-oss", None, marks=pytest.mark.nightly),
        pytest.param("Llama", None, marks=pytest.mark.nightly),
        pytest.param("Llama", 11, marks=pytest.mark.nightly),
    ],
)
def test_a_graph_of_a_prompt_in_a_static_cache_has_no_mask(title, past):
    """In a cache of that many tokens; None is one without memory."""
    eager, ours = pair(title)
    ids, before = tokens(20, 2), tokens(past or 0, 2)
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(ours.forward, fullgraph=True, backend=aot_autograd(fw_compiler=keep))
    with torch.no_grad():
        expected = eager(ids, past_key_values=static_cache(eager, before, past is not None)).logits
        found = compiled(ids, past_key_values=static_cache(ours, before, past is not None)).logits
    assert error(found, expected) < TOLERANCE
    (graph,) = graphs
    ops = [(n.target, n.args, None) for n in graph.graph.nodes if getattr(n.target, "namespace", "") == "rooftile"]
    assert_no_masks(ops, ours.config, 1)


def test_masks_of_padding_and_of_one_token_are_decoded_and_others_are_not():
    """A prompt of few tokens with padding; several tokens with a mask that says all; a mask that is added."""
    eager, ours = pair("Llama")
    seen = torch.rand(2, 1, 5, 5, generator=torch.Generator().manual_seed(3)).to(DEVICE) < 0.6
    seen |= torch.eye(5, dtype=torch.bool, device=DEVICE)
    added = torch.zeros((), device=DEVICE).where(seen, torch.finfo(torch.float32).min)
    ids, padding = padded(5, 2, "left")
    for mask, op in ((padding, "decode_attention"), (seen, "attention"), (added, "attention")):
        there = padding.bool() if mask is padding else torch.ones_like(padding).bool()
        with Calls() as record:
            found = logits(ours, ids, mask)
        assert error(found[there], logits(eager, ids, added if mask is seen else mask)[there]) < TOLERANCE
        assert {func._schema.name for func, _, _ in record.calls} == {f"rooftile::{op}"}


@pytest.mark.nightly
def test_beams_and_several_tokens_a_step():
    eager, ours = pair("Gemma 3")
    ids, options = tokens(11, 1), {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    assert torch.equal(ours.generate(ids, num_beams=2, **options), eager.generate(ids, num_beams=2, **options))
    with Calls() as record:
        found = ours.generate(ids, assistant_model=eager, **options)
    assert torch.equal(found, eager.generate(ids, **options))
    assert any(1 < args[0].shape[1] < 11 for _, args, _ in record.calls)


@pytest.mark.parametrize("title", nightly_but(("gpt-oss",), ("Llama", "Gemma 3", "gpt-oss")))
def test_a_prompt_in_two_parts(title):
    """More than one new token against a cache: causal at the end of the keys, of which a window's layer has the last.

    The padding ends in the first part, within the last keys of a window, or in the second part.
    """
    eager, ours = pair(title)
    ids = tokens(30, 2)
    for n_padding in (0, 2, 8, 14):
        mask = torch.ones(2, 30, dtype=torch.long, device=DEVICE)
        mask[1, :n_padding] = 0
        found = []
        for model in (eager, ours):
            with torch.no_grad(), Calls() as record:
                first = model(ids[:, :11], attention_mask=mask[:, :11], use_cache=True)
                n_first = len(record.calls)
                given = {"past_key_values": first.past_key_values, "attention_mask": mask, "use_cache": True}
                found.append(model(ids[:, 11:], **given).logits)
        there = mask[:, 11:].bool()
        assert error(found[1][there], found[0][there]) < TOLERANCE
        ran = assert_no_masks(record.calls[n_first:], ours.config, 1)
        assert ("attention_varlen" in ran) == (n_padding > 0)


# Of each kind of mask, scale, bias and cache one or two. The rest of each family trains in test_patch.py.
@pytest.mark.parametrize(
    "title",
    nightly_but(("Llama", "Gemma 2", "Gemma 3", "DeepSeek-V3", "T5", "BERT", "GPT-2", "OPT", "gpt-oss"), TITLES),
)
def test_a_training_step(title):
    eager, ours = pair(title)
    ids, mask = padded(20, 2, "right")
    found = []
    for model in (eager, ours):
        model.zero_grad()
        given = inputs(model, ids)[0]
        if not model.config.is_encoder_decoder:
            given["attention_mask"] = mask
            given["labels"] = given["labels"].masked_fill(mask == 0, -100)
        out = model(**given)
        out.loss.backward()
        found.append((out.loss.detach(), gradients(model)))
    assert error(found[1][0], found[0][0]) < TOLERANCE
    assert_same_gradients(found[1][1], found[0][1])


def test_gradient_checkpointing():
    found = []
    for model in pair("Gemma 2"):
        ids, mask = padded(20, 2, "right")
        model.train()
        if found:
            model.gradient_checkpointing_enable()
        given = {"attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100), "use_cache": False}
        with Calls() as record:
            model(input_ids=ids, **given).loss.backward()
        found.append(gradients(model))
    assert_same_gradients(found[1], found[0])
    ran = Counter(func._schema.name for func, _, _ in record.calls)
    assert ran["rooftile::attention_varlen"] == 4  # two layers, twice


def packed():
    """Tokens of two sequences, 25 and 15, and what says so: their places, and where they start."""
    places = torch.cat((torch.arange(25), torch.arange(15)))[None].to(DEVICE)
    starts = torch.tensor([0, 25, 40], dtype=torch.int32, device=DEVICE)
    lengths = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 25, "max_length_k": 25}
    return tokens(40, 1), {"position_ids": places}, lengths


def one_by_one(model, ids):
    with torch.no_grad():
        return torch.cat((model(ids[:, :25]).logits, model(ids[:, 25:]).logits), dim=1)


def test_sequences_that_are_packed():
    eager, ours = pair("Mistral", attention_dropout=1e-7)  # so little that nothing falls out
    ids, places, lengths = packed()
    expected = one_by_one(eager, ids)
    with torch.no_grad():
        with Calls() as record:
            by_place = ours(ids, **places, use_cache=False).logits
            by_starts = ours(ids, **places, **lengths).logits
        in_training = ours.train()(ids, **places, **lengths).logits  # by PyTorch's attention
    for found in (by_place, by_starts, in_training):
        assert error(found, expected) < TOLERANCE
    assert {func._schema.name for func, _, _ in record.calls} == {"rooftile::attention_varlen"}


@pytest.mark.parametrize("title", ["Llama", "Gemma 3", "Qwen2-MoE"])
def test_rows_of_packed_sequences(title):
    """Each row holds other sequences. Gemma 3 has layers with a window and without; Qwen2-MoE's window is a mask."""
    eager, ours = pair(title)
    lengths = ((7, 13), (11, 4, 5))
    ids = tokens(20, 2)
    places = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths]).to(DEVICE)
    expected = [[eager(part[None]).logits[0] for part in row.split(n)] for row, n in zip(ids, lengths, strict=True)]
    flat = torch.cat([part for row in expected for part in row])
    with torch.no_grad(), Calls() as record:
        found = ours(ids, position_ids=places, use_cache=False).logits
    assert error(found.flatten(0, 1), flat) < TOLERANCE
    ops = {func._schema.name.partition("::")[2] for func, _, _ in record.calls}
    assert ops == ({"attention", "attention_varlen"} if title == "Qwen2-MoE" else {"attention_varlen"})
    ours.train()
    for module in ours.modules():
        module.attention_dropout = 1e-7  # PyTorch's attention, with a mask of all of it
    dropped = ours(ids, position_ids=places, use_cache=False).logits
    assert error(dropped.flatten(0, 1), flat) < TOLERANCE


def remap_positions_for_packed_sequence(mask_function, position_ids):
    """As transformers' function of this name from 5.23 on."""

    def inner_mask(batch_idx, head_idx, q_idx, kv_idx):
        return mask_function(batch_idx, head_idx, position_ids[batch_idx, q_idx], position_ids[batch_idx, kv_idx])

    inner_mask.__module__ = "transformers.masking_utils"
    return inner_mask


@pytest.mark.parametrize("first", [True, False], ids=["packing-first", "packing-last"])
@pytest.mark.parametrize("window", [None, 8])
def test_packed_sequences_whose_positions_are_remapped_are_found(window, first):
    """The packing comes first in transformers 5.23, and last from 5.24 on."""
    from transformers import masking_utils

    places = torch.tensor([[0, 1, 0, 1]], device=DEVICE)
    sequences = torch.tensor([[0, 0, 1, 1]], device=DEVICE)
    packing = masking_utils.packed_sequence_mask_function(sequences)
    for rule in (masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function):
        inner = rule if window is None else masking_utils.and_masks(masking_utils.sliding_window_overlay(window), rule)
        remapped = remap_positions_for_packed_sequence(inner, places)
        both = (packing, remapped) if first else (remapped, packing)
        found = attention._sequences(masking_utils.and_masks(*both), window)
        assert found is (sequences if rule is masking_utils.causal_mask_function else None)


def test_masks_that_only_look_packed_are_kept_whole():
    """A rule of the model's own, besides."""
    from transformers import masking_utils

    sequences = torch.tensor([[0, 0, 1, 1]], device=DEVICE)
    packing = masking_utils.packed_sequence_mask_function(sequences)
    causal = masking_utils.causal_mask_function
    windowed = masking_utils.sliding_window_causal_mask_function(2)
    both = masking_utils.and_masks
    assert torch.equal(attention._sequences(both(causal, packing), None), sequences)
    assert torch.equal(attention._sequences(both(windowed, packing), 2), sequences)
    for function, window in (
        (causal, None),
        (both(causal, lambda b, h, q, k: q >= 0), None),
        (both(windowed, packing), None),
        (both(windowed, packing), 3),
        (both(causal, packing), 2),
        (both(both(causal, lambda b, h, q, k: q >= 0), packing), None),
        (masking_utils.or_masks(both(causal, packing), packing), None),
    ):
        assert attention._sequences(function, window) is None


def test_a_mask_of_three_dimensions_is_refused_unless_it_is_of_starts():
    starts = torch.tensor([[[0, 2, 2], [0, 2, 4]]], dtype=torch.int32, device=DEVICE)
    given = {"batch_size": 1, "q_length": 2, "kv_length": 4}
    assert attention.attention_mask(attention_mask=starts, **given) is starts
    for wrong in (torch.ones(1, 2, 4, dtype=torch.bool, device=DEVICE), starts.expand(2, -1, -1), starts.long()):
        with pytest.raises(ValueError, match=r"attention_mask is .*, expected \(batch, keys\)"):
            attention.attention_mask(attention_mask=wrong, **given)


def test_attention_is_found_behind_the_decorator_of_a_renamed_argument():
    from transformers.utils.deprecation import deprecate_kwarg

    model, _ = pair("Llama")
    cls = type(model.model.layers[0].self_attn)
    renamed = type("Renamed", (cls,), {"forward": deprecate_kwarg("old", "9.0.0", new_name="new")(cls.forward)})
    assert attention.attends_by_name(renamed(model.config, 0))
    assert not attention.attends_by_name(model.model.layers[0])


def test_a_window_that_reaches_both_ways():
    """An encoder's: packed, and padded."""
    sizes = {name: size for name, size in _TINY.items() if name != "num_key_value_heads"}
    config = transformers.ModernBertConfig(
        **sizes, local_attention=8, global_attn_every_n_layers=2, vocab_size=256, attention_dropout=1e-7,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(DEVICE):
        eager, ours = twins(transformers.AutoModelForMaskedLM.from_config(config).eval())
    ids, mask = padded(20, 2, "right")
    there = mask.bool()
    assert error(logits(ours, ids, mask)[there], logits(eager, ids, mask)[there]) < TOLERANCE
    ids, places, lengths = packed()
    expected = one_by_one(eager, ids)
    for training in (False, True):
        with torch.no_grad():
            assert error(ours.train(training)(ids, **places, **lengths).logits, expected) < TOLERANCE


def test_a_mask_of_ones_own():
    eager, ours = pair("Llama")
    ids = tokens(12, 2)
    seen = torch.rand(2, 1, 12, 12, generator=torch.Generator().manual_seed(3)).to(DEVICE) < 0.5
    seen |= torch.eye(12, dtype=torch.bool, device=DEVICE)
    added = torch.zeros((), device=DEVICE).where(seen, torch.finfo(torch.float32).min)
    with torch.no_grad():
        expected = eager(ids, attention_mask=added).logits
        assert error(ours(ids, attention_mask=added).logits, expected) < TOLERANCE
        assert error(ours(ids, attention_mask=seen).logits, expected) < TOLERANCE


@pytest.mark.parametrize("title", ["Llama", "Gemma 2", "gpt-oss"])
def test_dropout_is_left_to_others(title):
    eager, ours = pair(title, attention_dropout=1e-6)  # so little that nothing falls out
    for n in (12, 20):  # more tokens than decode_attention takes have no mask
        ids, mask = padded(n, 2, "left")
        found = [model.train()(ids, attention_mask=mask).logits[mask.bool()] for model in (eager, ours)]
        assert error(found[1], found[0]) < TOLERANCE


@pytest.mark.parametrize("of_config", [False, True], ids=["of the call", "of the configuration"])
def test_weights_that_are_not_returned_are_warned_of(of_config, caplog):
    model = build("Llama")
    model.config._attn_implementation = "eager"
    model.config.output_attentions = of_config
    logging.Logger.warning_once.cache_clear()
    with caplog.at_level("WARNING"), patch(model, attention=True), torch.no_grad():
        model(tokens(4, 1))
        assert ("does not support output_attentions=True" in caplog.text) == of_config
        model(tokens(4, 1), output_attentions=True)
    assert caplog.text.count("does not support output_attentions=True") == 1


def test_a_mask_with_holes_is_not_made_square():
    ids, mask = padded(20, 3, "left")
    mask[0, 9] = 0
    eager, ours = pair("Mistral")
    with Calls() as record:
        found = logits(ours, ids, mask)
    masks = [args[3] for _, args, _ in record.calls]
    assert [tuple(m.shape) for m in masks] == [(3, 1, 1, 20)] * 2
    assert error(found[mask.bool()], logits(eager, ids, mask)[mask.bool()]) < TOLERANCE


# With windows all but Llama; with a soft cap Gemma 2, and with sinks gpt-oss.
@pytest.mark.parametrize("title", nightly_but(("Gemma 2", "gpt-oss"), ("Llama", "Gemma 2", "Gemma 3", "gpt-oss")))
@pytest.mark.parametrize("cache", [False, True], ids=["no-cache", "static"])
def test_padding_on_either_side_is_no_mask(title, cache):
    """Of a row that is all padding the attention is zeros, and nothing of it is in the others."""
    eager, ours = pair(title)
    ids, mask = tokens(20, 6), torch.ones(6, 20, dtype=torch.long, device=DEVICE)
    # Behind a row that ends early and one of nothing, rows that start late: padding of two rows is longer than a row.
    mask[1, :3], mask[2, 5:], mask[3, :7], mask[3, 18:], mask[4], mask[5, :7] = 0, 0, 0, 0, 0, 0
    there, found = mask.bool(), []
    for model in (eager, ours):
        options = {"past_key_values": static_cache(model, ids[:, :0])} if cache else {"use_cache": False}
        with torch.no_grad(), Calls() as record:
            found.append(model(ids, attention_mask=mask, **options).logits)
    assert error(found[1][there], found[0][there]) < TOLERANCE
    assert assert_no_masks(record.calls, ours.config, 1).keys() == {"attention_varlen"}
    for func, args, _ in record.calls:
        out = func(*args)[0].unflatten(0, (6, 20))
        assert not out[~there].any()
        assert out[there].any(-1).all()


@pytest.mark.parametrize("title", nightly_but(("Gemma 2",), ("Llama", "Gemma 2", "gpt-oss")))
def test_gradients_of_a_batch_padded_on_the_left(title):
    found = []
    ids, mask = padded(20, 3, "left")
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, 1:][mask[:, :-1] == 0] = -100  # padding would predict them
    for model in pair(title):
        with Calls() as record:
            model(ids, attention_mask=mask, labels=labels, use_cache=False).loss.backward()
        found.append(gradients(model))
    assert_same_gradients(found[1], found[0])
    assert Counter(func._schema.name for func, _, _ in record.calls) == {
        "rooftile::attention_varlen": 2, "rooftile::attention_backward": 2
    }  # fmt: skip


def test_padding_that_ends_before_the_queries():
    """A later part that is all padding on the right; the end of the filled keys is on the device."""
    mask = torch.ones(2, 40, dtype=torch.bool, device=DEVICE)
    mask[1, 11:] = False
    starts = attention.attention_mask(2, 20, 48, q_offset=torch.tensor(20, device=DEVICE), attention_mask=mask)
    rows = [0, 0, 0, 20, 20, 20, 20, 20, 20, 40, 40], [0, 0, 0, 40, 40, 48, 48, 48, 59, 59, 96]
    assert starts.tolist() == [list(rows)]


def test_torch_compile_takes_it_whole():
    eager, ours = pair("Gemma 2")
    ids, mask = padded(20, 2, "left")
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(ids, mask):
        return ours(ids, attention_mask=mask, use_cache=False).logits

    with torch.no_grad():
        found = step(ids, mask)[mask.bool()]
    assert error(found, logits(eager, ids, mask)[mask.bool()]) < TOLERANCE


def test_from_pretrained(tmp_path):
    model = build("Llama")
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="rooftile").to(DEVICE)
    ids, mask = padded(12, 2, "left")
    with Calls() as record:
        found = logits(loaded, ids, mask)
    assert record.calls
    assert error(found[mask.bool()], logits(model, ids, mask)[mask.bool()]) < TOLERANCE


class TestSwitch:
    def test_it_sets_the_instance_and_takes_it_back(self):
        model = build("Llama")
        other = copy.deepcopy(model)
        before = model.config._attn_implementation
        ids, mask = padded(12, 2, "left")
        expected = logits(model, ids, mask)
        switch = attention.Switch(model)
        assert len(switch.names) == 2
        assert model.config._attn_implementation == "rooftile"
        assert other.config._attn_implementation == before
        assert error(logits(model, ids, mask)[mask.bool()], expected[mask.bool()]) < TOLERANCE
        switch.undo()
        assert model.config._attn_implementation == before
        assert torch.equal(logits(model, ids, mask), expected)

    def test_what_was_set_since_stays(self):
        model = build("Llama")
        switch = attention.Switch(model)
        model.set_attn_implementation("eager")
        switch.undo()
        assert model.config._attn_implementation == "eager"

    @pytest.mark.parametrize("title", ["Llama", "Gemma 2", "BERT", "T5"])
    def test_patch_sets_it_beside_the_rest(self, title):
        model = build(title)
        ids, mask = padded(20, 2, "right")  # more tokens than decode_attention takes
        expected = logits(model, ids, mask)
        before = model.config._attn_implementation
        with patch(model, attention=True) as handle:
            assert handle.replaced["attention"] == len(handle.modules["attention"]) == (6 if title == "T5" else 2)
            with Calls() as record:
                found = logits(model, ids, mask)
            assert error(found[mask.bool()], expected[mask.bool()]) < TOLERANCE
            names = {func._schema.name for func, _, _ in record.calls}
            op = "attention" if title in ("BERT", "T5") else "attention_varlen"
            assert f"rooftile::{op}" in names
            assert len(names) > 1
        assert model.config._attn_implementation == before
        assert torch.equal(logits(model, ids, mask), expected)
