"""Rooftile: LLM kernels in Triton that run at the roofline of the GPU.

The names below are the whole public surface. Each is imported at its first use, so that `import rooftile` is quick,
works where Triton is not installed, and leaves TRITON_INTERPRET to be decided until a kernel is asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from rooftile import nn as nn
    from rooftile.engine import Completion as Completion
    from rooftile.engine import Engine as Engine
    from rooftile.engine import KVCache as KVCache
    from rooftile.engine import PagedKVCache as PagedKVCache
    from rooftile.engine import PagedSequence as PagedSequence
    from rooftile.engine import Piece as Piece
    from rooftile.huggingface import PatchHandle as PatchHandle
    from rooftile.huggingface import patch as patch
    from rooftile.huggingface import register_attention as register_attention
    from rooftile.ops.add_rms_norm import add_rms_norm as add_rms_norm
    from rooftile.ops.attention import AttentionConfig as AttentionConfig
    from rooftile.ops.attention import attention as attention
    from rooftile.ops.attention import attention_varlen as attention_varlen
    from rooftile.ops.bias_activation import bias_gelu as bias_gelu
    from rooftile.ops.bias_activation import bias_silu as bias_silu
    from rooftile.ops.decode_attention import DecodeConfig as DecodeConfig
    from rooftile.ops.decode_attention import decode_attention as decode_attention
    from rooftile.ops.embedding import embedding as embedding
    from rooftile.ops.fp8_linear import fp8_linear as fp8_linear
    from rooftile.ops.gated import gelu_mul as gelu_mul
    from rooftile.ops.gated import gelu_mul_packed as gelu_mul_packed
    from rooftile.ops.gated import silu_mul as silu_mul
    from rooftile.ops.gated import silu_mul_packed as silu_mul_packed
    from rooftile.ops.kv_cache import append_kv as append_kv
    from rooftile.ops.kv_cache import rope_and_cache as rope_and_cache
    from rooftile.ops.layer_norm import layer_norm as layer_norm
    from rooftile.ops.matmul import MatmulConfig as MatmulConfig
    from rooftile.ops.matmul import gated_linear as gated_linear
    from rooftile.ops.matmul import linear as linear
    from rooftile.ops.matmul import matmul as matmul
    from rooftile.ops.qk_norm_rope import qk_norm_rope as qk_norm_rope
    from rooftile.ops.quantize_tensor import quantize_tensor as quantize_tensor
    from rooftile.ops.rms_norm import rms_norm as rms_norm
    from rooftile.ops.rms_norm_linear import rms_norm_gated_linear as rms_norm_gated_linear
    from rooftile.ops.rms_norm_linear import rms_norm_linear as rms_norm_linear
    from rooftile.ops.rms_norm_qkv_rope_cache import rms_norm_qkv_rope_cache as rms_norm_qkv_rope_cache
    from rooftile.ops.rope import rope as rope
    from rooftile.ops.rope import rope_ as rope_
    from rooftile.ops.sample import mark_seen_ as mark_seen_
    from rooftile.ops.sample import sample as sample
    from rooftile.ops.sample import sample_ as sample_
    from rooftile.ops.softmax import softmax as softmax
    from rooftile.ops.weight_only import WeightOnlyConfig as WeightOnlyConfig
    from rooftile.ops.weight_only import fp8_weight_linear as fp8_weight_linear
    from rooftile.ops.weight_only import int4_linear as int4_linear
    from rooftile.ops.weight_only import int8_linear as int8_linear
    from rooftile.ops.weight_only import pack_int4 as pack_int4
    from rooftile.ops.weight_only import quantize_int4 as quantize_int4
    from rooftile.ops.weight_only import quantize_int8 as quantize_int8
    from rooftile.ops.weight_only import unpack_int4 as unpack_int4
    from rooftile.quantize import Quantize as Quantize

_HOME = {
    "Completion": "rooftile.engine",
    "Engine": "rooftile.engine",
    "KVCache": "rooftile.engine",
    "PagedKVCache": "rooftile.engine",
    "PagedSequence": "rooftile.engine",
    "Piece": "rooftile.engine",
    "PatchHandle": "rooftile.huggingface",
    "patch": "rooftile.huggingface",
    "register_attention": "rooftile.huggingface",
    "add_rms_norm": "rooftile.ops.add_rms_norm",
    "AttentionConfig": "rooftile.ops.attention",
    "attention": "rooftile.ops.attention",
    "attention_varlen": "rooftile.ops.attention",
    "bias_gelu": "rooftile.ops.bias_activation",
    "bias_silu": "rooftile.ops.bias_activation",
    "DecodeConfig": "rooftile.ops.decode_attention",
    "decode_attention": "rooftile.ops.decode_attention",
    "embedding": "rooftile.ops.embedding",
    "fp8_linear": "rooftile.ops.fp8_linear",
    "gelu_mul": "rooftile.ops.gated",
    "gelu_mul_packed": "rooftile.ops.gated",
    "silu_mul": "rooftile.ops.gated",
    "silu_mul_packed": "rooftile.ops.gated",
    "append_kv": "rooftile.ops.kv_cache",
    "rope_and_cache": "rooftile.ops.kv_cache",
    "layer_norm": "rooftile.ops.layer_norm",
    "MatmulConfig": "rooftile.ops.matmul",
    "gated_linear": "rooftile.ops.matmul",
    "linear": "rooftile.ops.matmul",
    "matmul": "rooftile.ops.matmul",
    "qk_norm_rope": "rooftile.ops.qk_norm_rope",
    "quantize_tensor": "rooftile.ops.quantize_tensor",
    "rms_norm": "rooftile.ops.rms_norm",
    "rms_norm_gated_linear": "rooftile.ops.rms_norm_linear",
    "rms_norm_linear": "rooftile.ops.rms_norm_linear",
    "rms_norm_qkv_rope_cache": "rooftile.ops.rms_norm_qkv_rope_cache",
    "rope": "rooftile.ops.rope",
    "rope_": "rooftile.ops.rope",
    "mark_seen_": "rooftile.ops.sample",
    "sample": "rooftile.ops.sample",
    "sample_": "rooftile.ops.sample",
    "softmax": "rooftile.ops.softmax",
    "WeightOnlyConfig": "rooftile.ops.weight_only",
    "fp8_weight_linear": "rooftile.ops.weight_only",
    "int4_linear": "rooftile.ops.weight_only",
    "int8_linear": "rooftile.ops.weight_only",
    "pack_int4": "rooftile.ops.weight_only",
    "quantize_int4": "rooftile.ops.weight_only",
    "quantize_int8": "rooftile.ops.weight_only",
    "unpack_int4": "rooftile.ops.weight_only",
    "Quantize": "rooftile.quantize",
}

__all__ = [*sorted(_HOME), "__version__", "nn"]


def __getattr__(name: str) -> Any:
    if name == "nn":
        return importlib.import_module("rooftile.nn")
    if name not in _HOME:
        raise AttributeError(f"module 'rooftile' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
