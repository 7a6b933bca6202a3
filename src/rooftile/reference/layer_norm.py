"""LayerNorm, `y = (x - mean) / sqrt(var + eps) * weight + bias`."""

from __future__ import annotations

import torch
from torch import Tensor


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5) -> Tensor:
    """The formula in x's dtype: give it float64 for the truth."""
    centred = x - x.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def eager(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5) -> Tensor:
    """As models call it: `torch.nn.LayerNorm`; in float32, as autocast does, where a vector's dtype is not x's."""
    vectors = [v for v in (weight, bias) if v is not None]
    if all(v.dtype == x.dtype for v in vectors):
        return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)
    weight, bias = (None if v is None else v.float() for v in (weight, bias))
    return torch.nn.functional.layer_norm(x.float(), x.shape[-1:], weight, bias, eps).to(x.dtype)
