"""Small Hugging Face models of the families that `patch` knows, with random weights: for the demo, benchmarks, tests.

They run in seconds in Triton's interpreter. The vocabulary is the bytes.
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
    """A transformers configuration class and its arguments."""

    title: str
    config: str
    sizes: Mapping[str, Any]

    def build(self, *, dtype: torch.dtype, device: torch.device, seed: int = 0) -> nn.Module:
        """The model in evaluation mode, with normal weights of the configuration's own standard deviation."""
        import transformers

        arguments = {"vocab_size": BYTES, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        config = getattr(transformers, self.config)(**arguments, **self.sizes)
        return random_model(config, dtype=dtype, device=device, seed=seed)


def _t5(**more: Any) -> dict[str, Any]:
    sizes = {"d_model": 64, "d_ff": 160, "d_kv": 16, "num_layers": 2, "num_heads": 4}
    return {**sizes, "decoder_start_token_id": 0, **more}


_GEMMA_2 = {**_TINY, "head_dim": 16, "query_pre_attn_scalar": 16}
_DEEPSEEK = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
_GRANITE = {
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.25,
    "embedding_multiplier": 12.0,
    "logits_scaling": 8.0,
}
_ENCODER = {name: size for name, size in _TINY.items() if name != "num_key_value_heads"}
MODELS = (
    Model("Llama", "LlamaConfig", _TINY),
    Model("Qwen2", "Qwen2Config", _TINY),
    Model("Qwen3", "Qwen3Config", {**_TINY, "head_dim": 16}),
    Model("Mistral", "MistralConfig", _TINY),
    Model("Granite", "GraniteConfig", {**_TINY, **_GRANITE}),
    Model("Gemma", "GemmaConfig", {**_TINY, "head_dim": 16}),
    Model("DeepSeek-V3", "DeepseekV3Config", {**_TINY, **_EXPERTS, **_DEEPSEEK}),
    Model("Gemma 2", "Gemma2Config", _GEMMA_2),
    Model(
        "Gemma 3",
        "Gemma3TextConfig",
        {**_GEMMA_2, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    Model("T5", "T5Config", _t5()),
    Model("T5 v1.1", "T5Config", _t5(feed_forward_proj="gated-gelu")),
    Model("GPT-2", "GPT2Config", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_inner": 160}),
    Model("BERT", "BertConfig", _ENCODER),
)

# The other families of `rooftile.patch`.
_MOE = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 4}
_OPT = {**_ENCODER, "ffn_dim": 160, "word_embed_proj_dim": 64, "activation_function": "gelu"}
MORE = (
    Model("Phi-3", "Phi3Config", _TINY),
    Model("SmolLM3", "SmolLM3Config", _TINY),
    Model("OLMo2", "Olmo2Config", _TINY),
    Model("GPT-NeoX", "GPTNeoXConfig", {**_ENCODER, "partial_rotary_factor": 0.5}),
    Model("StarCoder2", "Starcoder2Config", _TINY),
    Model("OPT", "OPTConfig", _OPT),
    Model("RoBERTa", "RobertaConfig", _ENCODER),
    Model("Mixtral", "MixtralConfig", {**_TINY, "num_local_experts": 4, "num_experts_per_tok": 4}),
    Model("Qwen2-MoE", "Qwen2MoeConfig", {**_TINY, **_MOE, "shared_expert_intermediate_size": 32}),
    Model("Qwen3-MoE", "Qwen3MoeConfig", {**_TINY, **_MOE, "head_dim": 16}),
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
