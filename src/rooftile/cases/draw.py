"""Drawing inputs: standard normal tensors from a given generator, and RoPE's tables of cos and sin."""

from __future__ import annotations

import torch
from torch import Tensor


def normal(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Tensor:
    """A standard normal tensor of that dtype; on the meta device, without values."""
    if device.type == "meta":
        return torch.empty(shape, dtype=dtype, device=device)
    # Drawn in float32, so that a seed gives the same input in every dtype.
    return torch.randn(shape, dtype=torch.float32, device=device, generator=generator).to(dtype)


def integers(high: int, shape: tuple[int, ...], device: torch.device, generator: torch.Generator) -> Tensor:
    """A uniform int64 tensor of values from 0 to high - 1."""
    if device.type == "meta":
        return torch.empty(shape, dtype=torch.int64, device=device)
    return torch.randint(high, shape, device=device, generator=generator)


def angles(
    positions: Tensor, rotary: int, dtype: torch.dtype, *, interleaved: bool = False, theta: float = 10000.0
) -> tuple[Tensor, Tensor]:
    """cos and sin of `position * theta^(-2i / rotary)`, of shape `(*positions.shape, rotary)`: each angle occurs twice.

    The two are half the table apart, as in Llama, or (interleaved) adjacent, as in Cohere.
    """
    exponents = torch.arange(0, rotary, 2, device=positions.device, dtype=torch.float32) / rotary
    angle = positions[..., None].to(torch.float32) * theta**-exponents
    angle = angle.repeat_interleave(2, dim=-1) if interleaved else torch.cat((angle, angle), dim=-1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotary_dim(cos: Tensor) -> int | None:
    """How many elements of a head those tables turn; None for what is no tensor, which the op rejects."""
    return cos.shape[-1] if isinstance(cos, Tensor) else None
