"""The demo's models: Hugging Face models built from configuration, with random weights drawn from a seed.

`TINY` runs in seconds in Triton's interpreter. `REAL` has the widths, heads and depth of a published model (named in
the entry), over a vocabulary of bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rooftile.huggingface.random_model import random_model

BYTES = 256
MASK = 3  # a byte that no text holds, as the token of a masked place
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
_TINY = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, **_HEADS}
# Every expert is chosen: a near tie between two could otherwise fall either way, and no bound would hold.
_EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}


@dataclasses.dataclass(frozen=True)
class Model:
    """A transformers configuration class, and its arguments in the two sizes; `shape` names the real one."""

    title: str
    config: str
    tiny: Mapping[str, Any]
    real: Mapping[str, Any]
    shape: str

    def build(self, *, real: bool, dtype: torch.dtype, device: torch.device, seed: int = 0) -> nn.Module:
        """The model in evaluation mode, with normal weights of the configuration's own standard deviation."""
        import transformers

        arguments = {"vocab_size": BYTES, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        config = getattr(transformers, self.config)(**arguments, **(self.real if real else self.tiny))
        return random_model(config, dtype=dtype, device=device, seed=seed)


def _like(title: str, prefix: str, shape: str, real: Mapping[str, Any], **tiny: Any) -> Model:
    return Model(title, f"{prefix}Config", {**_TINY, **tiny}, real, shape)


def _shape(hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        **more,
    }


def _t5(hidden: int, ffn: int, head: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "d_model": hidden,
        "d_ff": ffn,
        "d_kv": head,
        "num_layers": layers,
        "num_heads": heads,
        "decoder_start_token_id": 0,
    }


MODELS = (
    _like("Llama", "Llama", "Llama-3.2-1B", _shape(2048, 8192, 16, 32, 8, head_dim=64)),
    _like("Qwen2", "Qwen2", "Qwen2.5-1.5B", _shape(1536, 8960, 28, 12, 2)),
    _like("Qwen3", "Qwen3", "Qwen3-1.7B", _shape(2048, 6144, 28, 16, 8, head_dim=128), head_dim=16),
    _like("Mistral", "Mistral", "Mistral-7B", _shape(4096, 14336, 32, 32, 8, head_dim=128)),
    _like(
        "Granite",
        "Granite",
        "Granite-3.1-2B",
        _shape(
            2048,
            8192,
            40,
            32,
            8,
            residual_multiplier=0.22,
            attention_multiplier=0.015625,
            embedding_multiplier=12.0,
            logits_scaling=8.0,
        ),
        residual_multiplier=0.22,
        attention_multiplier=0.25,
        embedding_multiplier=12.0,
        logits_scaling=8.0,
    ),
    _like("Gemma", "Gemma", "Gemma-2B", _shape(2048, 16384, 18, 8, 1, head_dim=256), head_dim=16),
    _like(
        "DeepSeek-V3",
        "DeepseekV3",
        "DeepSeek-V3, cut to 4 layers and 4 experts",
        _shape(7168, 18432, 4, 128, 128, **_EXPERTS, moe_intermediate_size=2048),
        **_EXPERTS,
        num_key_value_heads=4,
        moe_intermediate_size=32,
        q_lora_rank=32,
        kv_lora_rank=16,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=16,
    ),
    _like(
        "Gemma 2",
        "Gemma2",
        "Gemma-2-2B",
        _shape(2304, 9216, 26, 8, 4, head_dim=256, query_pre_attn_scalar=256),
        head_dim=16,
        query_pre_attn_scalar=16,
    ),
    _like(
        "Gemma 3",
        "Gemma3Text",
        "Gemma-3-1B",
        _shape(1152, 6912, 26, 4, 1, head_dim=256, query_pre_attn_scalar=256, sliding_window=512),
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
    ),
    Model("T5", "T5Config", _t5(64, 160, 16, 2, 4), _t5(1024, 4096, 64, 24, 16), "T5-large"),
    Model(
        "T5 v1.1",
        "T5Config",
        {**_t5(64, 160, 16, 2, 4), "feed_forward_proj": "gated-gelu"},
        {**_t5(1024, 2816, 64, 24, 16), "feed_forward_proj": "gated-gelu"},
        "T5-v1.1-large",
    ),
    Model(
        "GPT-2",
        "GPT2Config",
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_inner": 160},
        {"n_embd": 1600, "n_layer": 48, "n_head": 25, "n_positions": 2048},
        "GPT-2-XL",
    ),
    Model(
        "BERT",
        "BertConfig",
        {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4},
        {
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "max_position_embeddings": 2048,
        },
        "BERT-large",
    ),
)

# The other families of `rooftile.patch`, in the tiny size alone.
_ENCODER = {name: size for name, size in _TINY.items() if name != "num_key_value_heads"}
_MOE = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 4}
_OPT = {**_ENCODER, "ffn_dim": 160, "word_embed_proj_dim": 64, "activation_function": "gelu"}
MORE = (
    Model("Phi-3", "Phi3Config", _TINY, {}, ""),
    Model("SmolLM3", "SmolLM3Config", _TINY, {}, ""),
    Model("OLMo2", "Olmo2Config", _TINY, {}, ""),
    Model("GPT-NeoX", "GPTNeoXConfig", {**_ENCODER, "partial_rotary_factor": 0.5}, {}, ""),
    Model("StarCoder2", "Starcoder2Config", _TINY, {}, ""),
    Model("OPT", "OPTConfig", _OPT, {}, ""),
    Model("RoBERTa", "RobertaConfig", _ENCODER, {}, ""),
    Model("Mixtral", "MixtralConfig", {**_TINY, "num_local_experts": 4, "num_experts_per_tok": 4}, {}, ""),
    Model("Qwen2-MoE", "Qwen2MoeConfig", {**_TINY, **_MOE, "shared_expert_intermediate_size": 32}, {}, ""),
    Model("Qwen3-MoE", "Qwen3MoeConfig", {**_TINY, **_MOE, "head_dim": 16}, {}, ""),
)
BY_TITLE = {model.title: model for model in (*MODELS, *MORE)}


def inputs(model: nn.Module, tokens: Tensor) -> tuple[dict[str, Any], Tensor]:
    """The model's arguments for those tokens, and the tokens that its first logits predict.

    A decoder predicts each token from those before it; an encoder-decoder reads one half and writes the other; a masked
    language model reads all but every fifth token, and predicts those (the labels of the others are -100).
    """
    config: Any = model.config
    if config.is_encoder_decoder:
        half = tokens.shape[1] // 2
        labels = tokens[:, half:].contiguous()
        return {"input_ids": tokens[:, :half], "labels": labels}, labels
    if type(model).__name__.endswith("ForMaskedLM"):
        masked = torch.arange(tokens.shape[1], device=tokens.device) % 5 == 2
        labels = tokens.masked_fill(~masked, -100)
        return {"input_ids": tokens.masked_fill(masked, MASK), "labels": labels}, labels
    return {"input_ids": tokens, "labels": tokens, "use_cache": False}, tokens[:, 1:]
