"""The residual add and the RMSNorm after it, `u = x + residual`, `y = rms_norm(u)`."""

from __future__ import annotations

from torch import Tensor

from rooftile.reference import rms_norm as norm


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    rounding: str = "llama",
) -> tuple[Tensor, Tensor]:
    u = x + residual
    return norm.rms_norm(u, weight, eps=eps, offset=offset, rounding=rounding), u


def eager(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    rounding: str = "llama",
) -> tuple[Tensor, Tensor]:
    """As Hugging Face's decoder layers write it, with the model's own norm."""
    u = residual + x
    return norm.eager(u, weight, eps=eps, offset=offset, rounding=rounding), u
