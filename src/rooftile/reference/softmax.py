"""Softmax of scaled scores over the last dimension, causal or masked or neither."""

from __future__ import annotations

import torch
from torch import Tensor


def kept(x: Tensor, causal: bool, mask: Tensor | None) -> Tensor | None:
    """Which elements take part, of a shape that broadcasts to x's; None for all."""
    if not causal:
        return mask
    t, s = x.shape[-2:]
    lower = torch.ones(t, s, dtype=torch.bool, device=x.device).tril(s - t)
    return lower if mask is None else lower & mask


def softmax(x: Tensor, *, scale: float = 1.0, causal: bool = False, mask: Tensor | None = None) -> Tensor:
    """The formula in x's dtype: give it float64 for the truth. A row of which nothing is kept is zeros."""
    scores = x * scale
    keep = kept(x, causal, mask)
    if keep is not None:
        scores = scores.masked_fill(~keep, -torch.inf)
    # The lowest finite number stands for the maximum of a row that has none: exp(-inf) is 0, exp(-inf + inf) is not.
    top = scores.detach().amax(-1, keepdim=True).clamp(min=torch.finfo(x.dtype).min)
    exp = torch.exp(scores - top)
    total = exp.sum(-1, keepdim=True)
    return exp / torch.where(total == 0, 1, total)


def eager(x: Tensor, *, scale: float = 1.0, causal: bool = False, mask: Tensor | None = None) -> Tensor:
    """As attention is written in models' own code: scores scaled, filled where they are not kept, then the softmax."""
    scores = x if scale == 1.0 else x * scale
    keep = kept(x, causal, mask)
    if keep is not None:
        scores = scores.masked_fill(~keep, torch.finfo(x.dtype).min)
    return torch.softmax(scores, dim=-1)
