"""A GEMM of fp8 operands with scales: per tensor, per row, or per 128 elements of K."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile.reference.quantize_tensor import BLOCK, quantize_tensor_eager

_PER = {"tensor": "tensor", "row": "row", "block": "group"}


def weight_kind(weight: Tensor, scale: Tensor) -> str:
    """What shares a scale of the weight."""
    return "tensor" if scale.numel() == 1 else "row" if scale.shape == (weight.shape[0], 1) else "block"


def _wide(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight that it stands for."""
    if weight_kind(weight, scale) == "block":
        scale = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[: weight.shape[0], : weight.shape[1]]
    return weight.to(dtype) * scale.to(dtype)


def _wide_x(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    if scale.numel() > 1 and scale.shape[-1] > 1:
        scale = scale.repeat_interleave(BLOCK, -1)[..., : x.shape[-1]]
    return x.to(dtype) * scale.to(dtype)


def fp8_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    x_scale: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    **_: object,
) -> Tensor:
    """Computed in weight_scale's dtype. An x without scales is taken as it is: what quantizing it costs is an error."""
    dtype = weight_scale.dtype
    x = x.to(dtype) if x_scale is None else _wide_x(x, x_scale, dtype)
    y = x @ _wide(weight, weight_scale, dtype).T
    y = y if bias is None else y + bias.to(dtype)
    return y if residual is None else y + residual.to(dtype)


def fp8_linear_eager(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    x_scale: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    out_dtype: str = "bfloat16",
    **_: object,
) -> Tensor:
    """As written without an fp8 GEMM: both operands are converted to the result's dtype and multiplied."""
    dtype: torch.dtype = getattr(torch, out_dtype)
    if x_scale is None:
        x, x_scale = quantize_tensor_eager(x, per=_PER[weight_kind(weight, weight_scale)])
    y = _wide_x(x, x_scale, torch.float32).to(dtype) @ _wide(weight, weight_scale, torch.float32).to(dtype).T
    y = y if bias is None else y + bias.to(dtype)
    return y if residual is None else y + residual


def quantize_weight(weight: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """A weight in float8_e4m3fn, and its scales."""
    return quantize_tensor_eager(weight, per=kind)


def quantize_x(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """An x in float8_e4m3fn, as it goes with such a weight, and its scales."""
    return quantize_tensor_eager(x, per=_PER[kind])
