"""Kullback-Leibler and Jensen-Shannon divergences, element by element, and their reductions."""

from __future__ import annotations

import torch
from torch import Tensor


def reduced(loss: Tensor, reduction: str) -> Tensor:
    """The elements of a loss, their sum, or what PyTorch divides that by."""
    if reduction == "none":
        return loss
    total = loss.sum()
    if reduction == "batchmean":
        return total / loss.shape[0] if loss.dim() else total
    return total / loss.numel() if reduction == "mean" else total


def kl_div(input: Tensor, target: Tensor, *, reduction: str = "mean", log_target: bool = False) -> Tensor:
    """The formula in input's dtype: give it float64 for the truth."""
    if log_target:
        loss = torch.exp(target) * (target - input)
    else:
        positive = torch.where(target == 0, 1, target)  # 0 log 0 is 0; the gradient of such a target is taken as 0
        loss = torch.where(target == 0, -target.detach() * input, target * (torch.log(positive) - input))
    return reduced(loss, reduction)


def kl_div_eager(input: Tensor, target: Tensor, *, reduction: str = "mean", log_target: bool = False) -> Tensor:
    """PyTorch's own, which computes in input's dtype. Its "mean" warns, so the division is written out."""
    if reduction == "mean":
        total = torch.nn.functional.kl_div(input, target, reduction="sum", log_target=log_target)
        return total / input.numel()
    return torch.nn.functional.kl_div(input, target, reduction=reduction, log_target=log_target)


def jsd(input: Tensor, target: Tensor, *, beta: float = 0.5, reduction: str = "batchmean") -> Tensor:
    """The formula in input's dtype: give it float64 for the truth. A probability of 0 adds nothing."""
    q, p = torch.exp(input), torch.exp(target)
    if beta == 0:
        return reduced(p * (target - input), reduction)
    if beta == 1:
        return reduced(q * (input - target), reduction)
    m = beta * p + (1 - beta) * q
    log_m = torch.log(torch.where(m == 0, 1, m))
    from_p = torch.where(p == 0, 0, p * (torch.where(p == 0, 0, target) - log_m))
    from_q = torch.where(q == 0, 0, q * (torch.where(q == 0, 0, input) - log_m))
    return reduced(beta * from_p + (1 - beta) * from_q, reduction)


def jsd_eager(input: Tensor, target: Tensor, *, beta: float = 0.5, reduction: str = "batchmean") -> Tensor:
    """As trainers of distillation write it: the mixture by logsumexp, and PyTorch's kl_div of both."""
    kl_div = torch.nn.functional.kl_div
    if beta == 0:
        loss = kl_div(input, target, reduction="none", log_target=True)
    elif beta == 1:
        loss = kl_div(target, input, reduction="none", log_target=True)
    else:
        shares = torch.tensor([1 - beta, beta], dtype=input.dtype, device=input.device).log()
        log_m = torch.logsumexp(torch.stack((input + shares[0], target + shares[1])), dim=0)
        from_p = kl_div(log_m, target, reduction="none", log_target=True)
        from_q = kl_div(log_m, input, reduction="none", log_target=True)
        loss = beta * from_p + (1 - beta) * from_q
    return reduced(loss, reduction)
