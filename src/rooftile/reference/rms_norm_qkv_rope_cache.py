"""RMSNorm, the GEMM of q, k and v, RoPE, and the write of new keys and values into a cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from rooftile.reference import kv_cache, rms_norm_linear


def rms_norm_qkv_rope_cache(
    x: Tensor,
    norm_weight: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    starts: Tensor,
    *,
    bias: Tensor | None = None,
    weight_scale: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    layout: str = "bhtd",
    cache_layout: str = "bthd",
    product: Callable[..., Tensor] = rms_norm_linear.rms_norm_linear,
    rope_and_cache: Callable[..., tuple[Tensor, ...]] = kv_cache.rope_and_cache,
    **options: Any,
) -> tuple[Tensor, ...]:
    """The caches afterwards, and the rotated q. Nothing is written in place."""
    qkv = product(x, norm_weight, weight, bias, weight_scale, eps=eps, offset=offset)
    heads, head_dim = k_cache.shape[cache_layout.index("h")], k_cache.shape[3]
    by_head = qkv.unflatten(-1, (-1, head_dim))
    by_head = by_head.transpose(1, 2) if layout == "bhtd" else by_head
    h = layout.index("h")
    q, k, v = by_head.split((by_head.shape[h] - 2 * heads, heads, heads), dim=h)
    k_cache, v_cache, *_, q = rope_and_cache(
        q, k, v, cos, sin, k_cache, v_cache, starts, layout=layout, cache_layout=cache_layout, **options
    )
    return k_cache, v_cache, q


def eager(*args: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """As Hugging Face's models and caches have it."""
    return rms_norm_qkv_rope_cache(
        *args, product=rms_norm_linear.eager, rope_and_cache=kv_cache.rope_and_cache_eager, **options
    )
