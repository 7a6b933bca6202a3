"""The Kullback-Leibler divergence, element by element, and its reductions."""

from __future__ import annotations

import torch
from torch import Tensor


def kl_div(input: Tensor, target: Tensor, *, reduction: str = "mean", log_target: bool = False) -> Tensor:
    """The formula in input's dtype: give it float64 for the truth."""
    if log_target:
        loss = torch.exp(target) * (target - input)
    else:
        positive = torch.where(target == 0, 1, target)  # 0 log 0 is 0; the gradient of such a target is taken as 0
        loss = torch.where(target == 0, -target.detach() * input, target * (torch.log(positive) - input))
    if reduction == "none":
        return loss
    total = loss.sum()
    if reduction == "batchmean":
        return total / input.shape[0] if input.dim() else total
    return total / input.numel() if reduction == "mean" else total


def eager(input: Tensor, target: Tensor, *, reduction: str = "mean", log_target: bool = False) -> Tensor:
    """PyTorch's own, which computes in input's dtype. Its "mean" warns, so the division is written out."""
    if reduction == "mean":
        total = torch.nn.functional.kl_div(input, target, reduction="sum", log_target=log_target)
        return total / input.numel()
    return torch.nn.functional.kl_div(input, target, reduction=reduction, log_target=log_target)
