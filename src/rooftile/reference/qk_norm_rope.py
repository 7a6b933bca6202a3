"""RMSNorm of each head of q and k, then rotary position embedding."""

from __future__ import annotations

from torch import Tensor

from rooftile.reference import rms_norm as norm
from rooftile.reference import rope as rotary


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    position_ids: Tensor | None = None,
    rotary_dim: int | None = None,
    style: str = "half",
    layout: str = "bhtd",
) -> tuple[Tensor, Tensor]:
    """The formula in q's dtype: give it float64 for the truth."""
    q = norm.rms_norm(q, q_weight, eps=eps, offset=offset)
    k = norm.rms_norm(k, k_weight, eps=eps, offset=offset)
    return rotary.rope(q, k, cos, sin, position_ids=position_ids, style=style, layout=layout)


def eager(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    position_ids: Tensor | None = None,
    rotary_dim: int | None = None,
    style: str = "half",
    layout: str = "bhtd",
) -> tuple[Tensor, Tensor]:
    """As Hugging Face's attention layers write it: Qwen3's, or with an offset Gemma 3's."""
    rounding = "llama" if offset == 0.0 else "gemma"
    q = norm.eager(q, q_weight, eps=eps, offset=offset, rounding=rounding)
    k = norm.eager(k, k_weight, eps=eps, offset=offset, rounding=rounding)
    return rotary.eager(q, k, cos, sin, position_ids=position_ids, style=style, layout=layout)
