"""Quantized checkpoints as they are published, against Hugging Face's model with the dequantized weights."""

import functools
import json

import numpy as np
import published_formats as formats
import pytest
import torch
from helpers import nightly_but
from test_engine import logits_of_steps, relative
from test_engine_projections import dense_of

import rooftile
from rooftile.engine.checkpoint import Checkpoint
from rooftile.engine.config import ModelConfig
from rooftile.engine.projections import Dense, Fp8, Fp8Block, Int4, Int8

transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")

TOLERANCE = 2e-5  # as in test_engine.py: float32 sums in another order
FP8_TOLERANCE = 1e-2  # an element of x between two of the format may go the other way
# Tensor cores of sm_90 add fp8 products with some 14 bits, so that there several elements do. One of the 128 of a sum
# that is 2^-3 of itself off changes a logit by 0.01, and 80 of them by 0.1. A wrong scale changes it by half or more.
FP8_TOLERANCE_OF_TENSOR_CORES = 0.1
PROMPTS = [[3, 5, 8, 13, 21, 34, 55], [9, 9, 4]]
_SIZES = {
    "vocab_size": 67, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 64, "initializer_range": 0.2,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip


def gptq(**more):
    return {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 128,
        "desc_act": False,
        "sym": True,
        "lm_head": False,
    } | more


def awq(**more):
    return {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"} | more


def compressed(form, weights, activations=None, **more):
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group},
        "ignore": ["lm_head"], "quantization_status": "compressed", "kv_cache_scheme": None,
    } | more  # fmt: skip


def weights(bits=4, kind="int", strategy="group", **more):
    return {"num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy, "dynamic": False} | more


_DYNAMIC = weights(8, "float", "token", dynamic=True)
_BLOCK = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
# By name: how a module is written, what config.json says, the projection it becomes, what x is rounded by.
FORMATS = {
    "gptq": (formats.gptq, gptq(), Int4, None),
    "gptq, groups of 32, asymmetric": (
        functools.partial(formats.gptq, group=32, sym=False), gptq(group_size=32, sym=False), Int4, None,
    ),
    "gptq v2, groups of 64, asymmetric": (
        functools.partial(formats.gptq, group=64, sym=False, v2=True),
        gptq(group_size=64, sym=False, checkpoint_format="gptq_v2"), Int4, None,
    ),
    "gptq, a group of all": (functools.partial(formats.gptq, group=-1), gptq(group_size=-1), Int4, None),
    "awq": (formats.awq, awq(), Int4, None),
    "awq, groups of 32": (functools.partial(formats.awq, group=32), awq(group_size=32, version="GEMM"), Int4, None),
    "compressed int4": (formats.packed, compressed("pack-quantized", weights(group_size=128)), Int4, None),
    "compressed int4, asymmetric": (
        functools.partial(formats.packed, group=64, symmetric=False),
        compressed("pack-quantized", weights(group_size=64, symmetric=False)), Int4, None,
    ),
    "compressed int4, channels": (
        functools.partial(formats.packed, group=-1), compressed("pack-quantized", weights(strategy="channel")), Int4,
        None,
    ),
    "compressed int8, channels": (
        formats.int8,
        compressed("int-quantized", weights(8, strategy="channel"), weights(8, strategy="token", dynamic=True)), Int8,
        None,
    ),
    "compressed int8, tensors": (
        functools.partial(formats.int8, per="tensor"), compressed("int-quantized", weights(8, strategy="tensor")), Int8,
        None,
    ),
    "compressed fp8, channels": (
        formats.fp8, compressed("float-quantized", weights(8, "float", "channel"), _DYNAMIC), Fp8, "row",
    ),
    "compressed fp8, tensors, static": (
        functools.partial(formats.fp8, per="tensor", static=True),
        compressed("float-quantized", weights(8, "float", "tensor"), weights(8, "float", "tensor")), Fp8, "row",
    ),
    "compressed fp8, blocks": (
        functools.partial(formats.fp8, per="block"),
        compressed("float-quantized", weights(8, "float", "block", block_structure=[128, 128]), _DYNAMIC), Fp8Block,
        "group",
    ),
    "fp8, tensors": (
        functools.partial(formats.fp8, per="tensor", static=True),
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}, Fp8, "row",
    ),
    "fp8, blocks": (
        functools.partial(formats.fp8, per="block", name="weight_scale_inv"), _BLOCK, Fp8Block, "group",
    ),
    "fbgemm": (formats.fp8, {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]}, Fp8, "row"),
}  # fmt: skip


def model_of(name="LlamaConfig", **more):
    torch.manual_seed(0)
    config = getattr(transformers, name)(**_SIZES | more)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def engine_of(folder, device=None, **options):
    return rooftile.Engine.from_pretrained(
        folder, **{"dtype": torch.float32, "max_batch": 2, "max_seq_len": 48, "page_size": 16, "device": device,
        "cuda_graphs": False, "progress": False} | options,
    )  # fmt: skip


def round_inputs(model, per):
    """x of quantized layers in e4m3, with a scale for each row, or for 128 of its elements."""

    def rounded(_, args):
        x = args[0]
        groups = x if per == "row" else torch.nn.functional.pad(x, (0, -x.shape[-1] % 128)).unflatten(-1, (-1, 128))
        scale = groups.abs().amax(-1, keepdim=True) / 448
        y = (groups / scale).to(torch.float8_e4m3fn).float() * scale
        return (y if per == "row" else y.flatten(-2)[..., : x.shape[-1]], *args[1:])

    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) and name != "lm_head":
            layer.register_forward_pre_hook(rounded)


def assert_holds(engine, model, kind):
    """The numbers are those of the checkpoint."""
    layer, of = engine.weights.layers[0], model.model.layers[0]
    for made, parts in (
        (layer.qkv, (of.self_attn.q_proj, of.self_attn.k_proj, of.self_attn.v_proj)),
        (layer.o, (of.self_attn.o_proj,)),
        (layer.gate_up, (of.mlp.gate_proj, of.mlp.up_proj)),
        (layer.down, (of.mlp.down_proj,)),
    ):
        assert type(made) is kind
        assert torch.equal(dense_of(made).cpu(), torch.cat([p.weight for p in parts]))
    assert type(engine.weights.lm_head) is Dense


@pytest.mark.parametrize("dtype", nightly_but([torch.bfloat16], [torch.float32, torch.bfloat16, torch.float16]))
@pytest.mark.parametrize("name", FORMATS)
def test_the_weights_of_a_published_checkpoint(name, dtype, tmp_path, device):
    """Exactly, whatever dtype the hidden states have."""
    form, config, kind, _ = FORMATS[name]
    model = model_of()
    assert_holds(engine_of(formats.save(model, tmp_path, form, config), device, dtype=dtype), model, kind)


# The others become projections of the same layouts.
RUN = ("gptq", "awq, groups of 32", "fp8, tensors", "fp8, blocks")


def assert_near(found, expected, rounding):
    rounded = FP8_TOLERANCE if found.device.type == "cpu" else FP8_TOLERANCE_OF_TENSOR_CORES
    assert relative(found, expected) < (TOLERANCE if rounding is None else rounded)


@pytest.mark.parametrize("name", nightly_but(RUN, FORMATS))
def test_a_published_checkpoint(name, tmp_path, device):
    """Logits and tokens are those of the dequantized model."""
    form, config, _, rounding = FORMATS[name]
    model = model_of()
    engine = engine_of(formats.save(model, tmp_path, form, config), device)
    if rounding is not None:
        round_inputs(model, rounding)
    for prompt, logits in zip(PROMPTS, engine.logits(PROMPTS), strict=True):
        assert_near(logits, model(torch.tensor([prompt])).logits[0].detach(), rounding)
    with logits_of_steps(engine) as steps:
        completions = engine.generate(PROMPTS, max_new_tokens=3, ignore_eos=True)
    for row, c in enumerate(completions):
        with torch.no_grad():
            expected = model(torch.tensor([c.prompt + c.tokens])).logits[0, len(c.prompt) - 1 : -1]
        assert_near(torch.stack([s[row] for s in steps]), expected[1:], rounding)
        if rounding is None:
            assert c.tokens == expected.argmax(-1).tolist()


def test_modules_that_are_not_quantized_and_biases(tmp_path, device):
    """`modules_to_not_convert` names a layer's MLP; the biases of q, k and v are read."""
    model = model_of("Qwen2Config")
    skipped = ("lm_head", "down_proj", "gate_proj", "up_proj")
    folder = formats.save(model, tmp_path, formats.awq, awq(modules_to_not_convert=["mlp"]), skipped)
    config = json.loads((folder / "config.json").read_text())
    for names in (["model.layers.0.mlp"], ["gate_proj", "up_proj", "down_proj"], [r"model\.layers\.\d+\.mlp"]):
        config["quantization_config"]["modules_to_not_convert"] = names
        (folder / "config.json").write_text(json.dumps(config))
        layer, of = engine_of(folder, device).weights.layers[0], model.model.layers[0]
        assert [type(p) for p in layer.projections] == [Int4, Int4, Dense, Dense]
        attention = of.self_attn
        biases = [p.bias for p in (attention.q_proj, attention.k_proj, attention.v_proj)]
        assert torch.equal(layer.qkv.bias.cpu(), torch.cat(biases))
        assert torch.equal(layer.down.weight.cpu(), of.mlp.down_proj.weight)
        assert torch.equal(dense_of(layer.o).cpu(), attention.o_proj.weight)


def test_patterns_of_compressed_tensors(tmp_path, device):
    """Groups of modules in formats of their own, `re:` patterns, and a quantized lm_head."""

    def form(n, k):  # down has the only 256 columns
        return formats.packed(n, k, group=64) if k == 256 else formats.fp8(n, k)

    config = compressed("mixed-precision", None)
    config["config_groups"] = {
        "group_0": {"targets": ["re:.*down_proj$"], "weights": weights(group_size=64), "format": "pack-quantized"},
        "group_1": {"targets": ["Linear"], "weights": weights(8, "float", "channel"), "format": "float-quantized"},
    }
    config["ignore"] = ["re:.*o_proj"]
    model = model_of()
    layer = (engine := engine_of(formats.save(model, tmp_path, form, config, ("o_proj",)), device)).weights.layers[0]
    assert [type(p) for p in layer.projections] == [Fp8, Dense, Fp8, Int4]
    assert torch.equal(dense_of(layer.down).cpu(), model.model.layers[0].mlp.down_proj.weight)
    assert torch.equal(dense_of(engine.weights.lm_head).cpu(), model.lm_head.weight)


def test_packed_projections_and_tied_embeddings(tmp_path, device):
    """Phi-3's q, k and v are one tensor already; a tied lm_head is the embedding."""
    model = model_of("Phi3Config", tie_word_embeddings=True)
    weights = engine_of(formats.save(model, tmp_path, formats.gptq, gptq()), device).weights
    assert torch.equal(dense_of(weights.layers[0].qkv).cpu(), model.model.layers[0].self_attn.qkv_proj.weight)
    assert weights.lm_head.weight is weights.embedding


def test_scales_keep_the_checkpoints_dtype(tmp_path, device):
    """They are read each step: in 16 bits where the checkpoint has 16, and nothing is rounded."""
    folder = formats.save(model_of(), tmp_path, formats.awq, awq())
    for dtype in (torch.bfloat16, torch.float32):
        down = engine_of(folder, device, dtype=dtype).weights.layers[0].down
        assert down.scale.dtype == torch.float16
        assert down.nbytes == 128 * 256 // 2 + 128 * 2 * 4


_Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("file", "form", "settings"),
    [
        ("quantize_config.json", formats.gptq, {"bits": 4, "group_size": 128, "desc_act": False, "sym": True}),
        ("quant_config.json", formats.awq, {"w_bit": 4, "q_group_size": 128, "zero_point": True, "version": "GEMM"}),
    ],
)
def test_settings_in_a_file_of_their_own(file, form, settings, tmp_path, device):
    model = model_of()
    formats.save(model, tmp_path, form, None)
    (tmp_path / file).write_text(json.dumps(settings))
    assert_holds(engine_of(tmp_path, device), model, Int4)


@pytest.mark.parametrize(
    ("form", "config", "name", "zeros"),
    [
        (formats.gptq, gptq(), "bias", torch.zeros(256).half()),
        (
            formats.int8, compressed("int-quantized", weights(8, strategy="channel")), "weight_zero_point",
            torch.zeros(256, 1, dtype=torch.int8),
        ),
        (
            formats.packed, compressed("pack-quantized", weights(group_size=128)), "weight_zero_point",
            torch.zeros(256, 1, dtype=torch.int8),
        ),
    ],
)  # fmt: skip
def test_zeros_that_old_versions_write(form, config, name, zeros, tmp_path, device):
    """A bias that the model has not, and zero points of symmetric weights."""
    folder = formats.save(model_of(), tmp_path, form, config)
    path = folder / "model.safetensors"
    state = safetensors_torch.load_file(path)
    safetensors_torch.save_file(state | {f"{_Q}.{name}": zeros}, path)
    assert engine_of(folder, device).weights.layers[0].qkv.bias is None
    safetensors_torch.save_file(state | {f"{_Q}.{name}": zeros + 1}, path)
    with pytest.raises(ValueError, match=rf"q_proj.{name} is not zero, expected none"):
        engine_of(folder, device)


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method is 'bitsandbytes', expected 'gptq' or 'awq' or"),
        ({"bits": 4}, "quant_method is None"),
        (gptq(bits=8), "bits is 8, expected 4"),
        (gptq(group_size=16), "group_size is 16, expected -1, 32, 64 or a multiple of 128"),
        (gptq(checkpoint_format="marlin"), "checkpoint_format is 'marlin', expected 'gptq' or 'gptq_v2'"),
        (gptq(dynamic={"+:.*down.*": {"bits": 8}}), "dynamic has '\\+:.*', expected -:"),
        (awq(version="gemv"), "version is 'gemv', expected 'gemm'"),
        (awq(format="gemv_fast"), "format is 'gemv_fast', expected 'gemm'"),
        (_BLOCK | {"weight_block_size": [64, 64]}, r"weight_block_size is \[64, 64\], expected \[128, 128\] or null"),
        (_BLOCK | {"fmt": "e5m2"}, "fmt is 'e5m2', expected 'e4m3'"),
        (_BLOCK | {"modules_to_not_convert": ["(", "a"]}, "modules_to_not_convert has '\\(', which is no regular exp"),
        (compressed("marlin-24", weights()), "format is 'marlin-24', expected 'pack-quantized' or"),
        (compressed("pack-quantized", weights(8)), "group_0: weights: num_bits is 8, expected 4 for format 'pack-"),
        (compressed("int-quantized", weights(8, strategy="group")), "strategy is 'group', expected 'tensor' or 'chan"),
        (
            compressed("int-quantized", weights(8, strategy="channel", symmetric=False)),
            "symmetric is False, expected true for weights of 8 bits, whose kernels have no zero points",
        ),
        (compressed("nvfp4-pack-quantized", weights(4, "float")), "format is 'nvfp4-pack-quantized'"),
        (
            compressed("pack-quantized", weights(), sparsity_config={"format": "sparse-24-bitmask"}),
            "sparsity_config: format is 'sparse-24-bitmask', expected 'dense'",
        ),
    ],
)
def test_what_is_not_read_is_named(quantization, message):
    fields = transformers.LlamaConfig(**_SIZES).to_dict() | {"quantization_config": quantization}
    with pytest.raises(ValueError, match=f"config: quantization_config.*{message}"):
        ModelConfig.from_hf(fields)


def test_quantize_and_random_weights_are_refused(tmp_path, device):
    folder = formats.save(model_of(), tmp_path, formats.gptq, gptq())
    with pytest.raises(
        ValueError, match=r"quantize is 'int8', expected None: the checkpoint is quantized already \(gpt"
    ):
        engine_of(folder, device, quantize="int8")
    with pytest.raises(ValueError, match=r"has a quantization_config .*, expected none for random weights"):
        rooftile.Engine.from_config(folder, device=device)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({f"{_Q}.qweight": None}, f"{_Q}.qweight absent, expected by"),
        ({f"{_Q}.g_idx": None}, f"{_Q}.g_idx absent, expected by"),
        ({f"{_Q}.qweight": torch.zeros(16, 100, dtype=torch.int32)}, r"has shape \(16, 100\), expected \(16, 256\)"),
        ({f"{_Q}.scales": torch.zeros(2, 256).half()}, r"scales has shape \(2, 256\), expected \(1, 256\)"),
        ({f"{_Q}.qzeros": torch.zeros(1, 32)}, "qzeros has dtype F32, expected I32"),
        (
            {f"{_Q}.qzeros": torch.zeros(1, 32, dtype=torch.int32)},
            "sym is true, but .* zero points from 1 to 1, expect",
        ),
        ({f"{_Q}.weight": torch.zeros(256, 128)}, f"{_Q}.weight has no place in the model"),
        ({f"{_Q}.g_idx": torch.arange(128, dtype=torch.int32) % 7}, "desc_act is true, and groups have other numbers"),
    ],
)
def test_what_is_wrong_with_a_checkpoint_is_named(change, message, tmp_path, device):
    folder = formats.save(model_of(), tmp_path, formats.gptq, gptq(desc_act=True))
    path = folder / "model.safetensors"
    state = {n: t for n, t in (safetensors_torch.load_file(path) | change).items() if t is not None}
    safetensors_torch.save_file(state, path)
    with pytest.raises(ValueError, match=message):
        engine_of(folder, device)


def any_order(k, size):
    """Groups of columns that are anywhere, the same for all modules of k columns."""
    return np.random.default_rng(k).permutation(np.arange(k) // size)


@pytest.mark.parametrize("form", nightly_but(["gptq"], ["gptq", "compressed"]))
def test_act_order(form, tmp_path, device):
    """Columns are stored group by group, and those of x are put into that order, of one row and of several."""
    written = functools.partial(formats.gptq if form == "gptq" else formats.packed, group=32, order=any_order)
    config = gptq(group_size=32, desc_act=True)
    if form != "gptq":
        config = compressed("pack-quantized", weights(group_size=32, actorder="group"))
    model = model_of()
    engine = engine_of(formats.save(model, tmp_path, written, config), device)
    down = engine.weights.layers[0].down
    assert torch.equal(dense_of(down).cpu(), model.model.layers[0].mlp.down_proj.weight[:, down.order.cpu()])
    for prompts in (PROMPTS, PROMPTS[:1]):
        for c in engine.generate(prompts, max_new_tokens=2, ignore_eos=True, logprobs=True):
            with torch.no_grad():
                expected = model(torch.tensor([c.prompt + c.tokens])).logits[0, len(c.prompt) - 1 : -1]
            chosen = expected.log_softmax(-1).max(-1)
            assert c.tokens == chosen.indices.tolist()
            torch.testing.assert_close(torch.tensor(c.logprobs), chosen.values, rtol=1e-4, atol=1e-4)


def test_act_order_whatever_the_default_device_is(tmp_path):
    written = functools.partial(formats.gptq, group=32, order=any_order)
    folder = formats.save(model_of(), tmp_path, written, gptq(group_size=32, desc_act=True))
    config = ModelConfig.from_hf(folder)
    orders = config.published.orders_of(Checkpoint(folder))
    with torch.device("meta"):
        again = config.published.orders_of(Checkpoint(folder))
    assert orders
    assert all(torch.equal(order, again[name]) for name, order in orders.items())


def test_act_order_of_projections_of_one_gemm_is_the_same(tmp_path, device):
    written = functools.partial(formats.gptq, group=32, order=any_order)
    folder = formats.save(model_of(), tmp_path, written, gptq(group_size=32, desc_act=True))
    path = folder / "model.safetensors"
    state = safetensors_torch.load_file(path)
    state[f"{_Q}.g_idx"] = state[f"{_Q}.g_idx"].flip(0).contiguous()
    safetensors_torch.save_file(state, path)
    with pytest.raises(ValueError, match=r"desc_act is true, and .*q_proj and .*k_proj have other groups of columns"):
        engine_of(folder, device)


def test_projections_of_one_gemm_have_one_format(tmp_path, device):
    """Of q, k and v; and blocks of 128 rows must not span two of them."""
    config = awq(modules_to_not_convert=["k_proj"])
    folder = formats.save(model_of(), tmp_path / "a", formats.awq, config, ("lm_head", "k_proj"))
    with pytest.raises(ValueError, match=r"q_proj is quantized, the other is not: .*q_proj and .*k_proj are one GEMM"):
        engine_of(folder, device)
    form = functools.partial(formats.fp8, per="block", name="weight_scale_inv")
    folder = formats.save(model_of(head_dim=32), tmp_path / "b", form, _BLOCK)
    with pytest.raises(ValueError, match=r"k_proj has 64 rows, expected a multiple of 128: it shares a GEMM"):
        engine_of(folder, device)
    with pytest.raises(ValueError, match=r"q_proj has 128 columns, expected a multiple of the group of 256"):
        engine_of(formats.save(model_of(), tmp_path / "c", formats.gptq, gptq(group_size=256)), device)
