"""The activation after a projection's bias, `y = act(x + bias)`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rooftile.reference.gated import APPROXIMATE


def bias_gelu(x: Tensor, bias: Tensor | None = None, *, activation: str = "gelu") -> Tensor:
    """The formula in x's dtype: pass float64 for the exact result."""
    z = x if bias is None else x + bias
    if activation == "gelu_tanh":
        return z / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
    return z / 2 * torch.erfc(-z / math.sqrt(2))


def bias_gelu_eager(x: Tensor, bias: Tensor | None = None, *, activation: str = "gelu") -> Tensor:
    """As a model without the fusion runs it: the sum is rounded to x's dtype, written and read again."""
    return torch.nn.functional.gelu(_sum(x, bias), approximate=APPROXIMATE[activation])


def bias_silu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    z = x if bias is None else x + bias
    return z * torch.sigmoid(z)


def bias_silu_eager(x: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.nn.functional.silu(_sum(x, bias))


def _sum(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias.to(x.dtype)
