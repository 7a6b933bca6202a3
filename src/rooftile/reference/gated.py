"""The activation of a gated MLP, `y = act(gate) * up`; packed, `gate_up = [gate | up]`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

APPROXIMATE = {"gelu": "none", "gelu_tanh": "tanh"}  # what torch.nn.functional.gelu calls them


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """The formula in gate's dtype: pass float64 for the exact result."""
    return gate * torch.sigmoid(gate) * up


def silu_mul_eager(gate: Tensor, up: Tensor) -> Tensor:
    """As Hugging Face's MLPs write it: `act_fn(gate_proj(x)) * up_proj(x)`."""
    return torch.nn.functional.silu(gate) * up


def silu_mul_packed(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return silu_mul(gate, up)


def silu_mul_packed_eager(gate_up: Tensor) -> Tensor:
    """As Phi-3 and GLM write it; they keep the same order, gate first."""
    gate, up = gate_up.chunk(2, dim=-1)
    return up * torch.nn.functional.silu(gate)


def gelu_mul(gate: Tensor, up: Tensor, *, activation: str = "gelu") -> Tensor:
    """The formula in gate's dtype: pass float64 for the exact result."""
    if activation == "gelu_tanh":
        return gate / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up
    return gate / 2 * torch.erfc(-gate / math.sqrt(2)) * up


def gelu_mul_eager(gate: Tensor, up: Tensor, *, activation: str = "gelu") -> Tensor:
    """As Gemma's MLP and ModernBERT's write it: `act_fn(gate_proj(x)) * up_proj(x)`."""
    return torch.nn.functional.gelu(gate, approximate=APPROXIMATE[activation]) * up


def gelu_mul_packed(gate_up: Tensor, *, activation: str = "gelu") -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return gelu_mul(gate, up, activation=activation)


def gelu_mul_packed_eager(gate_up: Tensor, *, activation: str = "gelu") -> Tensor:
    """As ModernBERT writes it, gate first (which it calls input)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.gelu(gate, approximate=APPROXIMATE[activation]) * up
