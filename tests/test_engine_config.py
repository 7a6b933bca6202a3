"""ModelConfig of published models and of what is not computed; rotary tables against transformers' own."""

import dataclasses
import json
import sys

import pytest
import torch

from rooftile.engine.config import ModelConfig
from rooftile.engine.runner import Runner
from rooftile.engine.weights import random as random_weights

transformers = pytest.importorskip("transformers")

# As their config.json files have them, but for what no model reads.
LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
    "eos_token_id": 128001, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 14336, "max_position_embeddings": 8192, "model_type": "llama", "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "rope_scaling": None, "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "use_cache": True, "vocab_size": 128256,
}  # fmt: skip
LLAMA_3_1_SCALING = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}  # fmt: skip
LLAMA_3_1_8B = LLAMA_3_8B | {
    "eos_token_id": [128001, 128008, 128009], "max_position_embeddings": 131072, "rope_scaling": LLAMA_3_1_SCALING
}  # fmt: skip
GRANITE_3_1_8B = {
    "architectures": ["GraniteForCausalLM"], "attention_bias": False, "attention_multiplier": 0.0078125,
    "bos_token_id": 0, "embedding_multiplier": 12.0, "eos_token_id": 0, "hidden_act": "silu", "hidden_size": 4096,
    "initializer_range": 0.02, "intermediate_size": 12800, "logits_scaling": 16.0, "max_position_embeddings": 131072,
    "mlp_bias": False, "model_type": "granite", "num_attention_heads": 32, "num_hidden_layers": 40,
    "num_key_value_heads": 8, "residual_multiplier": 0.22, "rms_norm_eps": 1e-05, "rope_scaling": None,
    "rope_theta": 10000000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "vocab_size": 49155,
}  # fmt: skip
GRANITE_8B_CODE = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": True, "bos_token_id": 0, "eos_token_id": 0,
    "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 4096,
    "mlp_bias": True, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 36,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000000,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "vocab_size": 49152,
}  # fmt: skip
QWEN2_5_7B = {
    "architectures": ["Qwen2ForCausalLM"], "bos_token_id": 151643, "eos_token_id": 151643, "hidden_act": "silu",
    "hidden_size": 3584, "intermediate_size": 18944, "max_position_embeddings": 131072, "max_window_layers": 28,
    "model_type": "qwen2", "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 131072, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "use_mrope": False, "use_sliding_window": False, "vocab_size": 152064,
}  # fmt: skip
QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "bos_token_id": 151643, "eos_token_id": 151645,
    "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 12288,
    "max_position_embeddings": 40960, "max_window_layers": 36, "model_type": "qwen3", "num_attention_heads": 32,
    "num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
MISTRAL_7B = {
    "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mistral",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "vocab_size": 32000,
}  # fmt: skip
SMOLLM3_3B = {
    "architectures": ["SmolLM3ForCausalLM"], "attention_bias": False, "bos_token_id": 128000, "eos_token_id": 128012,
    "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 11008,
    "layer_types": ["full_attention"] * 36, "max_position_embeddings": 65536, "max_window_layers": 28,
    "mlp_bias": False, "model_type": "smollm3", "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9,
    "num_attention_heads": 16, "num_hidden_layers": 36, "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 5000000.0, "sliding_window": None, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "use_sliding_window": False, "vocab_size": 128256,
}  # fmt: skip
OLMO_2_7B = {
    "architectures": ["Olmo2ForCausalLM"], "attention_bias": False, "eos_token_id": 100257, "hidden_act": "silu",
    "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 11008, "max_position_embeddings": 4096,
    "model_type": "olmo2", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
    "pad_token_id": 100277, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 500000,
    "tie_word_embeddings": False, "torch_dtype": "float32", "vocab_size": 100352,
}  # fmt: skip
PHI_3_MINI_4K = {
    "architectures": ["Phi3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1,
    "embd_pdrop": 0.0, "eos_token_id": 32000, "hidden_act": "silu", "hidden_size": 3072, "initializer_range": 0.02,
    "intermediate_size": 8192, "max_position_embeddings": 4096, "model_type": "phi3", "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 32, "original_max_position_embeddings": 4096,
    "pad_token_id": 32000, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000.0,
    "sliding_window": 2047, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 32064,
}  # fmt: skip
# Its factors are other numbers.
PHI_4_MINI = PHI_3_MINI_4K | {
    "eos_token_id": 199999, "bos_token_id": 199999, "pad_token_id": 199999, "max_position_embeddings": 131072,
    "num_attention_heads": 24, "num_key_value_heads": 8, "partial_rotary_factor": 0.75, "sliding_window": 262144,
    "rope_scaling": {"long_factor": [2.0] * 48, "short_factor": [1.0] * 48, "type": "longrope"},
    "tie_word_embeddings": True, "vocab_size": 200064,
}  # fmt: skip
GEMMA_2_9B = {
    "architectures": ["Gemma2ForCausalLM"], "attention_bias": False, "attn_logit_softcapping": 50.0,
    "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": 1, "final_logit_softcapping": 30.0,
    "head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 3584,
    "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 8192, "model_type": "gemma2",
    "num_attention_heads": 16, "num_hidden_layers": 42, "num_key_value_heads": 8, "pad_token_id": 0,
    "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "sliding_window": 4096,
    "sliding_window_size": 4096, "torch_dtype": "bfloat16", "vocab_size": 256000,
}  # fmt: skip
GEMMA_3_1B = {
    "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attn_logit_softcapping": None, "bos_token_id": 2,
    "cache_implementation": "hybrid", "eos_token_id": [1, 106], "final_logit_softcapping": None, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "initializer_range": 0.02,
    "intermediate_size": 6912, "max_position_embeddings": 32768, "model_type": "gemma3_text", "num_attention_heads": 4,
    "num_hidden_layers": 26, "num_key_value_heads": 1, "pad_token_id": 0, "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000,
    "sliding_window": 512, "sliding_window_pattern": 6, "torch_dtype": "bfloat16", "vocab_size": 262144,
}  # fmt: skip
GEMMA_3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999, "eoi_token_index": 256000,
    "eos_token_id": [1, 106], "image_token_index": 262144, "initializer_range": 0.02, "mm_tokens_per_image": 256,
    "model_type": "gemma3", "torch_dtype": "bfloat16",
    "text_config": {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}  # fmt: skip

# What each says beside what all of them have.
_COMMON = {
    "hidden": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "intermediate": 14336, "layers": 32,
    "qkv_bias": False, "o_bias": False, "mlp_bias": False, "qk_norm": False, "whole_qk_norm": False, "packed": False,
    "norm_offset": 0.0, "activation": "silu", "attention_softcap": None, "logits_softcap": None, "multimodal": False,
    "input_norms": True, "output_norms": False, "windows": None, "tied": False, "attention_scale": 128**-0.5,
    "embedding_scale": 1.0, "logits_scale": 1.0, "norm_eps": 1e-5,
    "torch_dtype": torch.bfloat16, "initializer_range": 0.02,
}  # fmt: skip
PUBLISHED = {
    "Llama-3-8B": (LLAMA_3_8B, {"family": "llama", "vocab": 128256, "max_positions": 8192, "eos": (128001,)}),
    "Llama-3.1-8B": (
        LLAMA_3_1_8B,
        {"family": "llama", "vocab": 128256, "max_positions": 131072, "eos": (128001, 128008, 128009)},
    ),
    "Granite-3.1-8B": (
        GRANITE_3_1_8B,
        {
            "family": "granite", "vocab": 49155, "layers": 40, "intermediate": 12800, "tied": True, "bos": 0,
            "attention_scale": 1 / 128, "embedding_scale": 12 / 0.22, "logits_scale": 1 / 16,
            "norm_eps": 1e-5 / 0.22**2, "head_norm_eps": 1e-5,
        },
    ),
    "Granite-8B-code": (
        GRANITE_8B_CODE,
        {"family": "llama", "layers": 36, "qkv_bias": True, "o_bias": True, "mlp_bias": True, "tied": True},
    ),
    "Qwen2.5-7B": (
        QWEN2_5_7B,
        {
            "family": "qwen2", "hidden": 3584, "heads": 28, "kv_heads": 4, "layers": 28, "intermediate": 18944,
            "qkv_bias": True, "norm_eps": 1e-6, "vocab": 152064,
        },
    ),
    "Qwen3-8B": (
        QWEN3_8B,
        {"family": "qwen3", "layers": 36, "intermediate": 12288, "qk_norm": True, "norm_eps": 1e-6, "eos": (151645,)},
    ),
    "Mistral-7B-v0.1": (MISTRAL_7B, {"family": "mistral", "windows": 4096, "vocab": 32000, "eos": (2,), "bos": 1}),
    "SmolLM3-3B": (
        SMOLLM3_3B,
        {
            "family": "smollm3", "hidden": 2048, "heads": 16, "kv_heads": 4, "layers": 36, "intermediate": 11008,
            "vocab": 128256, "tied": True, "norm_eps": 1e-6, "eos": (128012,), "max_positions": 65536,
        },
    ),
}  # fmt: skip

PUBLISHED["OLMo-2-7B"] = (
    OLMO_2_7B,
    {
        "family": "olmo2", "kv_heads": 32, "intermediate": 11008, "vocab": 100352, "norm_eps": 1e-6, "eos": (100257,),
        "bos": None, "input_norms": False, "output_norms": True, "whole_qk_norm": True, "torch_dtype": torch.float32,
    },
)  # fmt: skip

PUBLISHED["Phi-3-mini-4k"] = (
    PHI_3_MINI_4K,
    {
        "family": "phi3", "hidden": 3072, "kv_heads": 32, "head_dim": 96, "intermediate": 8192, "vocab": 32064,
        "eos": (32000,), "windows": 2047, "attention_scale": 96**-0.5, "packed": True,
    },
)  # fmt: skip
PUBLISHED["Phi-4-mini"] = (
    PHI_4_MINI,
    {
        "family": "phi3", "hidden": 3072, "heads": 24, "kv_heads": 8, "intermediate": 8192, "vocab": 200064,
        "eos": (199999,), "windows": 262144, "tied": True, "packed": True, "max_positions": 131072,
    },
)  # fmt: skip

_GEMMA = {
    "head_dim": 256, "tied": True, "input_norms": True, "output_norms": True, "norm_offset": 1.0,
    "activation": "gelu_tanh", "norm_eps": 1e-6, "attention_scale": 1 / 16, "bos": 2,
}  # fmt: skip
PUBLISHED["Gemma-2-9B"] = (
    GEMMA_2_9B,
    _GEMMA
    | {
        "family": "gemma2", "hidden": 3584, "heads": 16, "layers": 42, "vocab": 256000, "eos": (1,),
        "embedding_scale": 3584**0.5, "attention_softcap": 50.0, "logits_softcap": 30.0,
        "windows": (4096, None) * 21,
    },
)  # fmt: skip
PUBLISHED["Gemma-3-1B"] = (
    GEMMA_3_1B,
    _GEMMA
    | {
        "family": "gemma3_text", "hidden": 1152, "heads": 4, "kv_heads": 1, "layers": 26, "intermediate": 6912,
        "vocab": 262144, "eos": (1, 106), "embedding_scale": 1152**0.5, "qk_norm": True,
        "windows": ((512,) * 5 + (None,)) * 4 + (512,) * 2,
    },
)  # fmt: skip
PUBLISHED["Gemma-3-4B"] = (
    GEMMA_3_4B,
    _GEMMA
    | {
        "family": "gemma3_text", "hidden": 2560, "heads": 8, "kv_heads": 4, "layers": 34, "intermediate": 10240,
        "vocab": 262208, "eos": (1, 106), "embedding_scale": 2560**0.5, "qk_norm": True, "multimodal": True,
        "windows": ((1024,) * 5 + (None,)) * 5 + (1024,) * 4, "max_positions": 131072,
    },
)  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models(name):
    published, said = PUBLISHED[name]
    config = ModelConfig.from_hf(published)
    expected = _COMMON | said
    if not isinstance(expected["windows"], tuple):
        expected["windows"] = (expected["windows"],) * expected["layers"]
    for field, value in expected.items():
        found = getattr(config, field)
        assert found == (pytest.approx(value, rel=1e-12) if isinstance(value, float) else value), field
    # Their own classes, whatever transformers calls its fields today.
    again = ModelConfig.from_hf(transformers.CONFIG_MAPPING[published["model_type"]].from_dict(dict(published)))
    assert dataclasses.replace(again, source="config") == config
    hash(config)


def test_two_bases_of_rope():
    config = ModelConfig.from_hf(GEMMA_3_4B)
    local, whole = config.rotaries[0], config.rotaries[5]
    assert config.rotaries == ((local,) * 5 + (whole,)) * 5 + (local,) * 4
    assert local.inv_freq[1] == pytest.approx(1e4 ** (-1 / 128), rel=1e-6)
    assert whole.inv_freq[1] == pytest.approx(1e6 ** (-1 / 128) / 8, rel=1e-6)
    assert config.rotary is local


def test_layers_without_rope():
    config = ModelConfig.from_hf(SMOLLM3_3B)
    assert [r.kind for r in config.rotaries] == ["default", "default", "default", "none"] * 9
    cos, sin = config.rotaries[3].tables(5)
    assert torch.equal(cos, torch.ones(5, 128))
    assert not sin.any()
    again = ModelConfig.from_hf({k: v for k, v in SMOLLM3_3B.items() if k != "no_rope_layers"})
    assert again.rotaries == config.rotaries


def test_files(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_8B))
    config = ModelConfig.from_hf(tmp_path)
    assert config == ModelConfig.from_hf(str(tmp_path / "config.json"))
    assert dataclasses.replace(config, source="config") == ModelConfig.from_hf(LLAMA_3_8B)
    assert config.source == str(tmp_path / "config.json")
    # As Llama-3-8B-Instruct has it: a turn's end is an end too.
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [128001, 128009]}))
    assert ModelConfig.from_hf(tmp_path).eos == (128001, 128009)
    (tmp_path / "config.json").write_text('{"model_type": "llama", ')
    with pytest.raises(ValueError, match=r"config\.json: no JSON"):
        ModelConfig.from_hf(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"config\.json: holds a list, expected an object"):
        ModelConfig.from_hf(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"absent.json: no such file, expected a model's config.json or the"):
        ModelConfig.from_hf(tmp_path / "absent.json")
    with pytest.raises(TypeError, match=r"config is a int, expected a path, a dict"):
        ModelConfig.from_hf(3)


def test_windows_of_layers():
    qwen = QWEN2_5_7B | {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 26}
    assert ModelConfig.from_hf(qwen).windows == (None,) * 26 + (512,) * 2
    kinds = ["full_attention", "sliding_attention"] * 14
    assert ModelConfig.from_hf(qwen | {"layer_types": kinds}).windows == (None, 512) * 14
    assert ModelConfig.from_hf(MISTRAL_7B | {"sliding_window": None}).windows == (None,) * 32
    # Fields that a family does not have say nothing.
    assert ModelConfig.from_hf(LLAMA_3_8B | {"sliding_window": 16}).windows == (None,) * 32


@pytest.mark.parametrize(
    ("config", "changed", "message"),
    [
        (LLAMA_3_8B, {"model_type": "mixtral"}, r"config: model_type is 'mixtral', expected one of llama, gran"),
        (LLAMA_3_8B, {"model_type": None}, r"model_type is None, expected one of"),
        (LLAMA_3_8B, {"architectures": ["LlamaModel"]}, r"architectures is \['LlamaModel'\], expected LlamaForC"),
        (LLAMA_3_8B, {"hidden_act": "gelu"}, r"hidden_act is 'gelu', expected silu"),
        (
            LLAMA_3_8B,
            {"quantization_config": {"quant_method": "hqq", "bits": 4}},
            r"quantization_config: quant_method is 'hqq', expected 'gptq' or 'awq' or 'compressed-tensors'",
        ),
        (LLAMA_3_8B, {"hidden_size": "many"}, r"config: transformers does not take it: .*hidden_size"),
        (LLAMA_3_8B, {"num_hidden_layers": 0}, r"num_hidden_layers is 0, expected a positive integer"),
        (LLAMA_3_8B, {"num_key_value_heads": 5}, r"num_key_value_heads is 5, expected a divisor of 32 attention heads"),
        # transformers 5.23 refuses it first.
        (LLAMA_3_8B, {"head_dim": 7}, r"head_dim is 7, expected an even number|even rotary .* got `head_dim`=7"),
        (LLAMA_3_8B, {"eos_token_id": ["end"]}, r"eos_token_id"),
        (LLAMA_3_8B, {"partial_rotary_factor": 0.5}, r"partial_rotary_factor is 0.5, expected 1"),
        (
            LLAMA_3_8B,
            {"rope_scaling": {"rope_type": "proportional", "factor": 2.0}},
            r"rope_type is 'proportional', expected one of default, linear, llama3, yarn, dynamic, longrope",
        ),
        (LLAMA_3_8B, {"rope_scaling": {"rope_type": "linear"}}, r"transformers does not take it: .*factor"),
        (LLAMA_3_8B, {"rope_scaling": {"type": "linear", "factor": 0.0}}, r"whose frequencies are not finite"),
        (LLAMA_3_8B, {"rope_theta": -1.0}, r"rope_theta is -1.0, expected a positive number"),
        (LLAMA_3_8B, {"layer_types": ["chunked_attention"] * 32}, r"layer_types"),
        (GRANITE_3_1_8B, {"residual_multiplier": 0.0}, r"residual_multiplier is 0.0, expected a positive number"),
        (GRANITE_3_1_8B, {"logits_scaling": 0}, r"logits_scaling is 0, expected a positive number"),
        (MISTRAL_7B, {"sliding_window": -3}, r"sliding_window is -3, expected a positive integer, or null"),
        (PHI_3_MINI_4K, {"partial_rotary_factor": 0.1}, r"partial_rotary_factor is 0.1, expected an even number of th"),
        (PHI_3_MINI_4K, {"rope_scaling": {"type": "linear", "factor": 2.0}}, r"(?s)not take it: .*longrope.* linear"),
        (GEMMA_2_9B, {"hidden_activation": "gelu"}, r"hidden_activation is 'gelu', expected gelu_pytorch_tanh"),
        (GEMMA_2_9B, {"use_bidirectional_attention": True}, r"use_bidirectional_attention is true, expected false"),
        (GEMMA_2_9B, {"final_logit_softcapping": -1.0}, r"final_logit_softcapping is -1.0, expected a positive number"),
        (GEMMA_3_1B, {"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping is 50.0, expected null for gemma3_"),
        (GEMMA_3_1B, {"sliding_window": None}, r"layer_types has sliding_attention, expected a sliding_window"),
        (GEMMA_3_4B, {"text_config": None}, r"text_config is None, expected an object"),
        (GEMMA_3_4B, {"text_config": {"hidden_size": 64}}, r"intermediate_size is absent, expected an integer"),
        (SMOLLM3_3B, {"no_rope_layers": [1, 2] * 18}, r"no_rope_layers is \[1, 2, .*expected a 0 or 1 for each of 36"),
        (QWEN2_5_7B, {"layer_types": ["full_attention"] * 3}, r"layer_types"),
        (QWEN2_5_7B, {"layer_types": ["sliding_attention"] * 28}, r"layer_types has sliding_attention, expected a sl"),
        (QWEN2_5_7B, {"layer_types": ["linear_attention"] * 28}, r"layer_types has 'linear_attention', expected full"),
    ],
)  # fmt: skip
def test_what_is_not_computed_is_named(config, changed, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf(config | changed)


def test_transformers_is_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"which is not installed, .*: pip install '\.\[hf\]'"):
        ModelConfig.from_hf(LLAMA_3_8B)


@pytest.mark.parametrize("name", ["hidden_size", "num_hidden_layers", "vocab_size"])
def test_a_size_that_is_absent_is_not_made_up(name):
    with pytest.raises(ValueError, match=f"{name} is absent, expected an integer"):
        ModelConfig.from_hf({field: value for field, value in LLAMA_3_8B.items() if field != name})


_TINY = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 32, "max_position_embeddings": 600,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 150}


class TestRotary:
    @pytest.mark.parametrize(
        "settings",
        [
            {"rope_theta": 10000.0},
            {"rope_theta": 500000.0, "rope_scaling": LLAMA_3_1_SCALING | {"original_max_position_embeddings": 256}},
            {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 2.5}},
            {"rope_theta": 10000.0, "rope_scaling": YARN},
            {"rope_scaling": YARN | {"attention_factor": 1.5, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False}},
            {"rope_theta": 10000.0, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
            {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1000.0}},
            {"rope_parameters": LLAMA_3_1_SCALING | {"rope_theta": 1e6}, "head_dim": 80},
        ],
    )
    def test_transformers_tables(self, settings):
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        described = _TINY | settings
        module = LlamaRotaryEmbedding(transformers.LlamaConfig.from_dict(dict(described)))
        cos, sin = module(torch.zeros(1), torch.arange(600)[None])
        ours = ModelConfig.from_hf(described).rotary.tables(600)
        assert ours[0].shape == (600, described.get("head_dim", 32))
        assert all(t.dtype == torch.float32 for t in ours)
        # One rounding of cos and sin, which PyTorch computes otherwise where a row is not a multiple of a vector.
        for actual, expected in zip(ours, (cos[0], sin[0]), strict=True):
            torch.testing.assert_close(actual, expected, rtol=0, atol=2e-7)

    @pytest.mark.parametrize("family", ["granite", "qwen2", "qwen3", "mistral"])
    def test_of_every_family(self, family):
        config = ModelConfig.from_hf(_TINY | {"model_type": family, "rope_theta": 1e4, "head_dim": 32})
        scaled = ModelConfig.from_hf(
            _TINY | {"model_type": family, "rope_theta": 1e4, "head_dim": 32, "rope_scaling": YARN}
        )
        assert config.rotary.inv_freq[:2] == pytest.approx((1.0, 1e4 ** (-1 / 16)), rel=1e-6)
        assert scaled.rotary.kind == "yarn"
        assert scaled.rotary.inv_freq[-1] == pytest.approx(config.rotary.inv_freq[-1] / 4, rel=1e-6)

    def test_a_part_of_each_head_and_short_factors_up_to_the_trained_length(self):
        from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

        scaling = {"type": "longrope", "short_factor": [1.0 + i / 4 for i in range(48)], "long_factor": [3.0] * 48}
        described = PHI_4_MINI | {"rope_scaling": scaling}
        module = Phi3RotaryEmbedding(transformers.Phi3Config.from_dict(dict(described)))
        rotary = ModelConfig.from_hf(described).rotary
        ours = rotary.tables(600)
        assert ours[0].shape == (600, 96)
        for actual, expected in zip(ours, module(torch.zeros(1), torch.arange(600)[None]), strict=True):
            torch.testing.assert_close(actual, expected[0], rtol=0, atol=2e-7)
        with pytest.raises(ValueError, match=r"'longrope', whose frequencies are fixed for the first 4096 positions"):
            rotary.tables(4097)

    def test_dynamic_frequencies_are_fixed_up_to_the_models_length(self):
        described = {"rope_theta": 1e4, "rope_scaling": {"type": "dynamic", "factor": 2.0}}
        config = ModelConfig.from_hf(_TINY | described)
        assert torch.equal(config.rotary.tables(600)[0], ModelConfig.from_hf(_TINY).rotary.tables(600)[0])
        with pytest.raises(
            ValueError, match=r"'dynamic', whose frequencies are fixed for the first 600 .* expected at most 600"
        ):
            config.rotary.tables(601)


def test_sizes_are_computed_without_pytorchs_decompositions():
    """On the meta device: the first operation that PyTorch has in Python imports its compiler, which takes seconds."""
    config = ModelConfig.from_hf(LLAMA_3_8B | {"num_hidden_layers": 1})
    called = set()
    sys.setprofile(lambda frame, event, _: called.add(frame.f_code.co_filename))
    try:
        weights = random_weights(config, device="meta")
        Runner(config, weights, max_batch=2, max_seq_len=32)
    finally:
        sys.setprofile(None)
    assert weights.nbytes > 2**29
    assert not [name for name in called if "torch/_refs" in name or "torch/_compile" in name]
