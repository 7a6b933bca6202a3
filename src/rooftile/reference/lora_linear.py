"""`lora_linear`: a linear layer with a LoRA adapter."""

from __future__ import annotations

import torch
from torch import Tensor


def lora_linear(
    x: Tensor,
    weight: Tensor,
    lora_a: Tensor,
    lora_b: Tensor,
    bias: Tensor | None = None,
    *,
    scale: float = 1.0,
    lora_input: Tensor | None = None,
    **_: object,
) -> Tensor:
    out = x @ weight.mT + scale * ((x if lora_input is None else lora_input) @ lora_a.mT) @ lora_b.mT
    return out if bias is None else out + bias


def lora_linear_eager(
    x: Tensor,
    weight: Tensor,
    lora_a: Tensor,
    lora_b: Tensor,
    bias: Tensor | None = None,
    *,
    scale: float = 1.0,
    lora_input: Tensor | None = None,
    **_: object,
) -> Tensor:
    """As PEFT's layer writes it: `result + lora_B(lora_A(dropout(x))) * scaling`."""
    linear = torch.nn.functional.linear
    result = linear(x, weight, None if bias is None else bias.to(x.dtype))
    return result + linear(linear(x if lora_input is None else lora_input, lora_a), lora_b) * scale
