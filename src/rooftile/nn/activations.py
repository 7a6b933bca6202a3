"""Activations: gated, and with a bias."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rooftile.ops.bias_activation import bias_gelu, bias_silu
from rooftile.ops.gated import gelu_mul, gelu_mul_packed, silu_mul, silu_mul_packed
from rooftile.primitives.activations import Approximate, gelu_name


class SiluMul(nn.Module):
    """SwiGLU's activation, `silu(gate) * up`, of two tensors or of one that holds `[gate | up]`."""

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        """`rooftile.silu_mul(gate, up)`, or `rooftile.silu_mul_packed(gate)` where up is not given."""
        return silu_mul_packed(gate) if up is None else silu_mul(gate, up)


class GeluMul(nn.Module):
    """GeGLU's activation, `gelu(gate) * up`, of two tensors or of one that holds `[gate | up]`.

    Args:
        approximate: `"none"` (exact) or `"tanh"`, as in `torch.nn.GELU`.
    """

    def __init__(self, approximate: Approximate = "none") -> None:
        super().__init__()
        gelu_name("GeluMul", approximate)
        self.approximate: Approximate = approximate

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        """`rooftile.gelu_mul(gate, up)`, or `rooftile.gelu_mul_packed(gate)` where up is not given."""
        if up is None:
            return gelu_mul_packed(gate, approximate=self.approximate)
        return gelu_mul(gate, up, approximate=self.approximate)

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}"


class _Bias(nn.Module):
    """A bias that is added to what a product without one gives; named as `torch.nn.Linear` names its own."""

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

    Its state is the `bias` of the `torch.nn.Linear` in front of it, whose product then goes without one.

    Args:
        features: the last dimension of the input.
        approximate: `"none"` (exact) or `"tanh"`, as in `torch.nn.GELU`.
    """

    def __init__(
        self,
        features: int,
        approximate: Approximate = "none",
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(features, device=device, dtype=dtype)
        gelu_name("BiasGELU", approximate)
        self.approximate: Approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        """`(..., features)` to the same shape."""
        return bias_gelu(x, self.bias, approximate=self.approximate)

    def extra_repr(self) -> str:
        return f"{self.features}, approximate={self.approximate!r}"


class BiasSiLU(_Bias):
    """`rooftile.bias_silu` with its bias, of shape `(features,)`: `silu(x + bias)`. See `BiasGELU`."""

    def forward(self, x: Tensor) -> Tensor:
        """`(..., features)` to the same shape."""
        return bias_silu(x, self.bias)
