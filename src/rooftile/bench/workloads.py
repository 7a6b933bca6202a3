"""Models by name or from a Hugging Face `config.json`: the GEMMs of their layers, and the bytes that a step reads."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from rooftile.engine.config import ModelConfig
    from rooftile.engine.weights import Weights

RANDOM = "random"  # weights that are drawn, and no checkpoint's


@dataclasses.dataclass(frozen=True)
class GemmShape:
    """One linear layer, x (M, k) times a weight (n, k) transposed.

    `gated` marks a pair of projections, gate and up; n counts the rows of both.
    """

    name: str
    n: int
    k: int
    bias: bool = False
    gated: bool = False


def _sizes(
    hidden: int, intermediate: int, heads: int, kv_heads: int, vocab: int, model_type: str = "llama", **more: Any
) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        **more,
    }


def _context(layers: int, positions: int, theta: float, **more: Any) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "max_position_embeddings": positions,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        **more,
    }


# What `config.json` of the published models says.
MODELS: dict[str, dict[str, Any]] = {
    "llama-3-8b": _sizes(4096, 14336, 32, 8, 128256, **_context(32, 8192, 5e5, rms_norm_eps=1e-5)),
    "granite-8b-code": _sizes(
        4096, 14336, 32, 8, 49152, **_context(36, 4096, 1e4, rms_norm_eps=1e-5),
        attention_bias=True, mlp_bias=True, tie_word_embeddings=True,
    ),
    "qwen2.5-7b": _sizes(3584, 18944, 28, 4, 152064, "qwen2", **_context(28, 32768, 1e6)),
    "llama-3.2-1b": _sizes(
        2048, 8192, 32, 8, 128256, head_dim=64, tie_word_embeddings=True,
        **_context(16, 131072, 5e5, rms_norm_eps=1e-5),
    ),
    "qwen3-0.6b": _sizes(
        1024, 3072, 16, 8, 151936, "qwen3", head_dim=128, tie_word_embeddings=True,
        **_context(28, 40960, 1e6, rms_norm_eps=1e-6),
    ),
    "qwen3-4b": _sizes(
        2560, 9728, 32, 8, 151936, "qwen3", head_dim=128, tie_word_embeddings=True,
        **_context(36, 40960, 1e6, rms_norm_eps=1e-6),
    ),
    "tiny": _sizes(64, 160, 4, 2, 256, "qwen2", num_hidden_layers=2),
}  # fmt: skip
# Also those with only the sizes that a layer's GEMMs need.
LAYERS: dict[str, dict[str, Any]] = MODELS | {
    "qwen3-8b": _sizes(4096, 12288, 32, 8, 151936, "qwen3", head_dim=128),
    "llama-3-70b": _sizes(8192, 28672, 64, 8, 128256),
}

# Trained by `rooftile bench training steps`.
TRAINED: dict[str, dict[str, Any]] = {
    **{name: MODELS[name] for name in ("llama-3.2-1b", "qwen3-0.6b", "llama-3-8b")},
    "gemma-3-1b": _sizes(
        1152, 6912, 4, 1, 262144, "gemma3_text", head_dim=256, query_pre_attn_scalar=256, sliding_window=512,
        num_hidden_layers=26, tie_word_embeddings=True,
    ),
    "tiny": _sizes(64, 160, 4, 2, 256, "llama", num_hidden_layers=2),
}  # fmt: skip

LAYER = ("qkv", "o", "gate_up", "up", "down")  # of one layer; a model has one lm_head

# Sizes that make a layer another than the one below, and the least that does.
_OTHER = {
    "num_local_experts": (2, "its feed-forward is a mixture of experts"),
    "num_experts": (2, "its feed-forward is a mixture of experts"),
    "n_routed_experts": (1, "its feed-forward is a mixture of experts"),
    "kv_lora_rank": (1, "its keys and values are projected through a latent"),
}

_QKV_BIAS = ("qwen2", "starcoder2", "gpt_neox", "phi", "opt", "bloom")
_ALL_BIAS = ("starcoder2", "gpt_neox", "phi", "opt", "bloom")
_NOT_GATED = ("starcoder2", "gpt_neox", "phi", "opt", "bloom", "falcon", "nemotron", "gptj")


def gemm_shapes(config: Mapping[str, Any]) -> list[GemmShape]:
    """The GEMMs of a configuration: qkv, o, gate_up (or up), down and lm_head.

    Raises:
        ValueError: a size is missing, or its layers differ: a mixture of experts, or latent attention.
    """
    if "hidden_size" not in config and isinstance(config.get("text_config"), dict):
        config = config["text_config"]
    for name, (least, what) in _OTHER.items():
        if isinstance(config.get(name), int) and config[name] >= least:
            raise ValueError(f"the configuration has {name} {config[name]}: {what}, of other GEMMs; give --shape")
    needed = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    if missing := [name for name in needed if not isinstance(config.get(name), int) or config[name] < 1]:
        raise ValueError(f"the configuration has no {', '.join(missing)}")
    model = str(config.get("model_type", ""))
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or hidden // heads
    attention_bias = bool(config.get("attention_bias", model in _ALL_BIAS))
    mlp_bias = bool(config.get("mlp_bias", model in _ALL_BIAS))
    qkv_bias = attention_bias or model in _QKV_BIAS
    if model in _NOT_GATED:
        up = GemmShape("up", inner, hidden, mlp_bias)
    else:
        up = GemmShape("gate_up", 2 * inner, hidden, mlp_bias, gated=True)
    return [
        GemmShape("qkv", (heads + 2 * kv_heads) * head_dim, hidden, qkv_bias),
        GemmShape("o", hidden, heads * head_dim, attention_bias),
        up,
        GemmShape("down", hidden, inner, mlp_bias),
        GemmShape("lm_head", config["vocab_size"], hidden),
    ]


def read(name: str, known: Mapping[str, dict[str, Any]], layers: int | None = None) -> tuple[str, dict[str, Any]]:
    """A short name and the configuration, for a known name, a `config.json` or a folder that holds one.

    `layers` cuts a model that has more.

    Raises:
        ValueError: it is none of these, or the file can't be read or holds no JSON object.
    """
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if name in known:
        title, values = name, dict(known[name])
    elif path.is_file():
        title = path.resolve().parent.name if path.name == "config.json" else path.stem
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"{path}: no JSON can be read: {error}") from None
        if not isinstance(values, dict):
            raise ValueError(f"{path}: holds a {type(values).__name__}, expected an object")
    else:
        raise ValueError(f"model is {name!r}, expected {', '.join(known)}, a config.json or a folder that holds one")
    if layers is not None and layers < (values.get("num_hidden_layers") or layers + 1):
        title += f"-{layers}-layers"
        values["num_hidden_layers"] = layers
        if values.get("layer_types"):
            values["layer_types"] = values["layer_types"][:layers]
    return title, values


def step_bytes(config: ModelConfig, weights: Weights, lengths: Sequence[float], cache_dtype: torch.dtype) -> float:
    """The least bytes that a decoding step reads: the weights, and the keys and values of sequences of that length."""
    seen = sum(n if window is None else min(n, window) for window in config.windows for n in lengths)
    return weights.nbytes + 2 * config.kv_heads * config.head_dim * cache_dtype.itemsize * seen


def load(name: str) -> tuple[str, list[GemmShape]]:
    """A short name and the GEMMs, for what `read` takes.

    Raises:
        ValueError: it takes none of that name, or the configuration is not one that `gemm_shapes` takes.
    """
    title, config = read(name, LAYERS)
    try:
        return title, gemm_shapes(config)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
