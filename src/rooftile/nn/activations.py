"""Activations: gated, and with a bias."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rooftile.ops.bias_activation import bias_gelu, bias_silu
from rooftile.ops.gated import gelu_mul, gelu_mul_packed, silu_mul, silu_mul_packed
from rooftile.primitives.activations import GELUS, Gelu, check_activation


class SiluMul(nn.Module):
    """SwiGLU's activation, `silu(gate) * up`, of two tensors or of one that holds `[gate | up]`."""

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        """`rooftile.silu_mul(gate, up)`, or `rooftile.silu_mul_packed(gate)` without up."""
        return silu_mul_packed(gate) if up is None else silu_mul(gate, up)


class GeluMul(nn.Module):
    """GeGLU's activation, `gelu(gate) * up`, of two tensors or of one that holds `[gate | up]`.

    Args:
        activation: `"gelu"` (exact) or `"gelu_tanh"`.
    """

    def __init__(self, activation: Gelu = "gelu") -> None:
        super().__init__()
        check_activation("GeluMul", activation, GELUS)
        self.activation: Gelu = activation

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        """`rooftile.gelu_mul(gate, up)`, or `rooftile.gelu_mul_packed(gate)` without up."""
        if up is None:
            return gelu_mul_packed(gate, activation=self.activation)
        return gelu_mul(gate, up, activation=self.activation)

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}"


class _Bias(nn.Module):
    """The bias of a linear layer that has none, under the name that `torch.nn.Linear` gives it."""

    def __init__(
        self, features: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.features = features
        self.bias = nn.Parameter(torch.empty(features, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the bias to zero."""
        nn.init.zeros_(self.bias)

    def extra_repr(self) -> str:
        return str(self.features)


class BiasGELU(_Bias):
    """`rooftile.bias_gelu` with its bias, of shape `(features,)`: `gelu(x + bias)`.

    Its state is the `bias` of the `torch.nn.Linear` before it, which then has none.

    Args:
        features: the last dimension of the input.
        activation: `"gelu"` (exact) or `"gelu_tanh"`.
    """

    def __init__(
        self,
        features: int,
        activation: Gelu = "gelu",
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(features, device=device, dtype=dtype)
        check_activation("BiasGELU", activation, GELUS)
        self.activation: Gelu = activation

    def forward(self, x: Tensor) -> Tensor:
        """`(..., features)` to the same shape."""
        return bias_gelu(x, self.bias, activation=self.activation)

    def extra_repr(self) -> str:
        return f"{self.features}, activation={self.activation!r}"


class BiasSiLU(_Bias):
    """`rooftile.bias_silu` with its bias, of shape `(features,)`: `silu(x + bias)`. See `BiasGELU`."""

    def forward(self, x: Tensor) -> Tensor:
        """`(..., features)` to the same shape."""
        return bias_silu(x, self.bias)
