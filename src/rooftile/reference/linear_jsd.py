"""Two heads' GEMMs, and the divergence of all their log-probabilities."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rooftile.reference import divergence


def _divergence(
    log_probabilities: Any, hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor,
    target: Tensor | None = None, bias: Tensor | None = None, teacher_bias: Tensor | None = None, *, beta: float = 0.5,
    temperature: float = 1.0, ignore_index: int = -100, reduction: str = "mean", jsd: Any = divergence.jsd, **_: Any,
) -> Tensor:  # fmt: skip
    x = log_probabilities(hidden, weight, bias, temperature)
    t = log_probabilities(teacher_hidden, teacher_weight, teacher_bias, temperature)
    losses = jsd(x, t, beta=beta, reduction="none").sum(-1)
    counts = torch.ones_like(losses, dtype=torch.bool) if target is None else target != ignore_index
    losses = torch.where(counts, losses, 0.0)
    if reduction == "none":
        return losses
    return losses.sum() / counts.sum().clamp(min=1) if reduction == "mean" else losses.sum()


def _exact(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    logits = hidden @ weight.mT
    if bias is not None:
        logits = logits + bias.to(logits.dtype)
    return torch.log_softmax(logits / temperature, -1)


def _usual(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    logits = hidden @ weight.mT
    if bias is not None:
        logits = (logits + bias).to(hidden.dtype)
    return torch.log_softmax(logits.float() / temperature, -1)


def linear_jsd(*args: Tensor, **options: Any) -> Tensor:
    """The formula in the dtype of the tensors: give it float64 for the truth."""
    return _divergence(_exact, *args, **options)


def linear_jsd_eager(*args: Tensor, **options: Any) -> Tensor:
    """As trainers have it: `nn.Linear`, and PyTorch's functions of logits in float32."""
    return _divergence(_usual, *args, jsd=divergence.jsd_eager, **options)


def linear_kl(*args: Tensor, **options: Any) -> Tensor:
    """KL(teacher || student), which `linear_jsd` is with `beta=0`."""
    return linear_jsd(*args, beta=0.0, **options)


def linear_kl_eager(*args: Tensor, **options: Any) -> Tensor:
    return linear_jsd_eager(*args, beta=0.0, **options)
