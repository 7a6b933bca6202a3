"""RMSNorm, then a linear layer."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile.reference import rms_norm as norm


def rms_norm_linear(
    x: Tensor,
    norm_weight: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    **_: object,
) -> Tensor:
    """The formula in x's dtype: give it float64 for the truth."""
    out = norm.rms_norm(x, norm_weight, eps=eps, offset=offset) @ weight.mT
    return out if bias is None else out + bias


def eager(
    x: Tensor,
    norm_weight: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    **_: object,
) -> Tensor:
    """As Hugging Face's models write it: LlamaRMSNorm, or with an offset GemmaRMSNorm, and nn.Linear."""
    normed = norm.eager(x, norm_weight, eps=eps, offset=offset, rounding="gemma" if offset else "llama")
    return torch.nn.functional.linear(normed.to(weight.dtype), weight, None if bias is None else bias.to(x.dtype))
