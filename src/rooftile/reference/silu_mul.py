"""SwiGLU's activation, `y = silu(gate) * up` with `silu(g) = g * sigmoid(g)`; packed, `gate_up = [gate | up]`."""

from __future__ import annotations

import torch
from torch import Tensor


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """The formula in gate's dtype: give it float64 for the truth."""
    return gate * torch.sigmoid(gate) * up


def eager(gate: Tensor, up: Tensor) -> Tensor:
    """As Hugging Face's MLPs write it: `act_fn(gate_proj(x)) * up_proj(x)`."""
    return torch.nn.functional.silu(gate) * up


def silu_mul_packed(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return silu_mul(gate, up)


def packed_eager(gate_up: Tensor) -> Tensor:
    """As Phi-3 and GLM write it; they keep the same order, gate first."""
    gate, up = gate_up.chunk(2, dim=-1)
    return up * torch.nn.functional.silu(gate)
