"""Linear layers with weights of 8 or 4 bits: dequantized, then multiplied."""

from __future__ import annotations

import torch
from torch import Tensor


def unpack(packed: Tensor, group: int) -> Tensor:
    """The elements of a packed weight, block by block: low nibbles, then high ones, each stored plus 8."""
    blocks = packed.split(group, dim=1)  # two groups each; a last one of half as many bytes is one group
    halves = [half for block in blocks for half in (block & 15, block >> 4)]
    return torch.cat([packed[:, :0], *halves], dim=1).to(torch.int8) - 8


def _plus(out: Tensor, *terms: Tensor | None) -> Tensor:
    """With what there is of those added, one after another."""
    for term in terms:
        out = out if term is None else out + term
    return out


def int8_linear(
    x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """The formula in x's dtype: give it float64 for the truth."""
    return _plus((x @ weight.to(x.dtype).T) * weight_scale.reshape(-1), bias, residual)


def int8_linear_eager(
    x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """As it is written without a kernel for it: the weight dequantized to x's dtype, then a linear layer."""
    dequantized = weight.to(x.dtype) * weight_scale.to(x.dtype).reshape(-1, 1)
    return _plus(torch.nn.functional.linear(x, dequantized, None if bias is None else bias.to(x.dtype)), residual)


# A weight in float8_e4m3fn is dequantized as one in int8 is.
fp8_weight_linear = int8_linear
fp8_weight_linear_eager = int8_linear_eager


def dequantize(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight that a packed one stands for. Scales of `(N, groups, 2)` have offsets beside them."""
    group = 2 * packed.shape[1] // scale.shape[1]
    q, by_group = unpack(packed, group).to(dtype), scale.to(dtype).repeat_interleave(group, dim=1)
    return q * by_group if scale.dim() == 2 else (q + by_group[..., 1]) * by_group[..., 0]


def int4_linear(
    x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """The formula in x's dtype: give it float64 for the truth."""
    return _plus(x @ dequantize(weight, weight_scale, x.dtype).T, bias, residual)


def int4_linear_eager(
    x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """As it is written without a kernel for it: the weight dequantized to x's dtype, then a linear layer."""
    bias = None if bias is None else bias.to(x.dtype)
    return _plus(torch.nn.functional.linear(x, dequantize(weight, weight_scale, x.dtype), bias), residual)
