"""RMSNorm, `y = x / sqrt(mean(x^2) + eps) * (weight + offset)`."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(
    x: Tensor, weight: Tensor | None = None, *, eps: float = 1e-6, offset: float = 0.0, rounding: str = "llama"
) -> Tensor:
    """The formula in x's dtype: give it float64 for the truth. `rounding` is a matter of narrower types."""
    xhat = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return xhat if weight is None else xhat * (weight + offset)


def eager(
    x: Tensor, weight: Tensor | None = None, *, eps: float = 1e-6, offset: float = 0.0, rounding: str = "llama"
) -> Tensor:
    """As Hugging Face's models write it: LlamaRMSNorm (rounding "llama") or GemmaRMSNorm ("gemma", "none")."""
    dtype = x.dtype
    x = x.to(torch.float32)
    xhat = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    if weight is None:
        return xhat.to(dtype)
    if rounding == "llama":
        weight = weight if offset == 0.0 else weight + offset
        return weight * xhat.to(dtype)
    return (xhat * (weight.float() + offset)).to(dtype)
