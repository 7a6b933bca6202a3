"""One step of AdamW (Loshchilov and Hutter 2019), in the dtypes of what it is given; all results are new tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def adamw_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    max_exp_avg_sq: Tensor | None = None,
    master: Tensor | None = None,
    *,
    lr: float,
    step: int,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    maximize: bool = False,
) -> tuple[Tensor, ...]:
    """param, exp_avg and exp_avg_sq after the step, then max_exp_avg_sq and master where they are given."""
    grad = -grad if maximize else grad
    exp_avg = beta1 * exp_avg + (1 - beta1) * grad
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * grad * grad
    largest = exp_avg_sq
    more = []
    if max_exp_avg_sq is not None:
        largest = torch.maximum(max_exp_avg_sq, exp_avg_sq)
        more.append(largest)
    exact = param if master is None else master
    exact = exact * (1 - lr * weight_decay)
    exact = exact - lr / (1 - beta1**step) * exp_avg / ((largest / (1 - beta2**step)).sqrt() + eps)
    if master is not None:
        more.append(exact)
    return exact.to(param.dtype), exp_avg, exp_avg_sq, *more
