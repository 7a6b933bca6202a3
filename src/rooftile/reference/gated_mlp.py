"""`gated_mlp`: the MLP of a Llama."""

from __future__ import annotations

from torch import Tensor

from rooftile.reference.matmul import gated_linear, gated_linear_eager, linear, linear_eager


def gated_mlp(
    x: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    activation: str = "silu",
    **_: object,
) -> Tensor:
    return linear(gated_linear(x, gate_up_weight, gate_up_bias, activation=activation), down_weight, down_bias)


def gated_mlp_eager(
    x: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    activation: str = "silu",
    **_: object,
) -> Tensor:
    """As Phi-3 writes it, with one projection for gate and up."""
    h = gated_linear_eager(x, gate_up_weight, gate_up_bias, activation=activation)
    return linear_eager(h, down_weight, down_bias)
