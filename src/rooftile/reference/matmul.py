"""Products: `matmul`, and `linear` and `gated_linear` with what follows them."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def _act(z: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return z * torch.sigmoid(z)
    if activation == "gelu_tanh":
        return z / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
    return z / 2 * torch.erfc(-z / math.sqrt(2))


def _act_eager(z: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return torch.nn.functional.silu(z)
    return torch.nn.functional.gelu(z, approximate="tanh" if activation == "gelu_tanh" else "none")


def matmul(a: Tensor, b: Tensor, **_: object) -> Tensor:
    """The GEMM in a's dtype; float64 inputs give the ground truth."""
    return a @ b


def matmul_eager(a: Tensor, b: Tensor, **_: object) -> Tensor:
    return torch.matmul(a, b)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
    **_: object,
) -> Tensor:
    z = x @ weight.mT
    z = z if bias is None else z + bias
    z = z if activation is None else _act(z, activation)
    return z if residual is None else z + residual


def linear_eager(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
    **_: object,
) -> Tensor:
    """As a model without the fusion runs it: a kernel, and a rounding, for each step."""
    z = torch.nn.functional.linear(x, weight, None if bias is None else bias.to(x.dtype))
    z = z if activation is None else _act_eager(z, activation)
    return z if residual is None else z + residual


def gated_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str = "silu", **_: object
) -> Tensor:
    gate, up = linear(x, weight, bias).chunk(2, dim=-1)
    return _act(gate, activation) * up


def gated_linear_eager(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str = "silu", **_: object
) -> Tensor:
    """As Phi-3 writes it: one projection for gate and up, `up * act_fn(gate)`."""
    gate, up = linear_eager(x, weight, bias).chunk(2, dim=-1)
    return up * _act_eager(gate, activation)
