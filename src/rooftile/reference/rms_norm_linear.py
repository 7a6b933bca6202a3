"""RMSNorm, then a linear layer, plain or gated."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile.reference import matmul, weight_only
from rooftile.reference import rms_norm as norm


def _wide(weight: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The weight that one of 8 or 4 bits stands for."""
    if scale is None:
        return weight
    if weight.dtype == torch.uint8:
        return weight_only.dequantize(weight, scale, dtype)
    return (weight.to(scale.dtype) * scale.reshape(-1, 1)).to(dtype)


def rms_norm_linear(
    x: Tensor,
    norm_weight: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    weight_scale: Tensor | None = None,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    **_: object,
) -> Tensor:
    """The formula in x's dtype: give it float64 for the truth."""
    out = norm.rms_norm(x, norm_weight, eps=eps, offset=offset) @ _wide(weight, weight_scale, x.dtype).mT
    return out if bias is None else out + bias


def eager(
    x: Tensor,
    norm_weight: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    weight_scale: Tensor | None = None,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    **_: object,
) -> Tensor:
    """As Hugging Face's models write it: LlamaRMSNorm, or with an offset GemmaRMSNorm, and nn.Linear."""
    normed = norm.eager(x, norm_weight, eps=eps, offset=offset, rounding="gemma" if offset else "llama")
    weight = _wide(weight, weight_scale, x.dtype)
    return torch.nn.functional.linear(normed.to(weight.dtype), weight, None if bias is None else bias.to(x.dtype))


def rms_norm_gated_linear(
    x: Tensor,
    norm_weight: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    weight_scale: Tensor | None = None,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    activation: str = "silu",
    **_: object,
) -> Tensor:
    """The formula in x's dtype: give it float64 for the truth."""
    normed = norm.rms_norm(x, norm_weight, eps=eps, offset=offset)
    return matmul.gated_linear(normed, _wide(weight, weight_scale, x.dtype), bias, activation=activation)


def gated_eager(
    x: Tensor,
    norm_weight: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    weight_scale: Tensor | None = None,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    activation: str = "silu",
    **_: object,
) -> Tensor:
    """As Phi-3 writes it: the norm, one projection for gate and up, `up * act_fn(gate)`."""
    normed = norm.eager(x, norm_weight, eps=eps, offset=offset, rounding="gemma" if offset else "llama")
    weight = _wide(weight, weight_scale, x.dtype)
    return matmul.gated_linear_eager(normed.to(weight.dtype), weight, bias, activation=activation)
