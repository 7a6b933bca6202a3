"""Cross entropy of logits with target classes, term by term."""

from __future__ import annotations

import torch
from torch import Tensor


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    token_weights: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
) -> Tensor:
    """The formula in the dtype of the logits: give it float64 for the truth."""
    classes = logits.shape[-1]
    x = softcap * torch.tanh(logits / softcap) if softcap else logits
    weight = x.new_ones(classes) if weight is None else weight.to(x.dtype)
    counts = target != ignore_index
    at = torch.where(counts, target, 0).long()
    # An ignored row has no part in the graph, whatever it holds.
    x = torch.where(counts[..., None], x, 0)
    log_p = torch.log_softmax(x, -1)
    lse = torch.logsumexp(x, -1)
    own = weight[at]
    loss = -(1 - label_smoothing) * own * log_p.gather(-1, at[..., None])[..., 0]
    if label_smoothing:
        loss = loss - label_smoothing / classes * (weight * log_p).sum(-1)
    loss = loss + z_loss * lse.square()
    scale = counts.to(x.dtype) if token_weights is None else torch.where(counts, token_weights.to(x.dtype), 0)
    loss = torch.where(counts, loss * scale, 0)
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    divisor = (own * scale).sum()
    return loss.sum() / torch.where(divisor == 0, torch.inf, divisor)


def eager(
    logits: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    token_weights: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
) -> Tensor:
    """As models' own code has it: PyTorch's loss over logits in float32, with what it lacks around it."""
    x = logits if logits.dtype == torch.float64 else logits.float()
    x = softcap * torch.tanh(x / softcap) if softcap else x
    x, flat = x.reshape(-1, x.shape[-1]), target.reshape(-1).long()
    weight = weight if weight is None else weight.to(x.dtype)

    def loss_of(reduction: str) -> Tensor:
        return torch.nn.functional.cross_entropy(
            x, flat, weight, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction=reduction
        )

    if token_weights is None and not z_loss and reduction != "none":
        return loss_of(reduction)
    counts = flat != ignore_index
    scale = counts.to(x.dtype)
    if token_weights is not None:
        scale = torch.where(counts, token_weights.reshape(-1).to(x.dtype), 0)
    loss = scale * (loss_of("none") + z_loss * torch.logsumexp(x, -1).square())
    if reduction == "none":
        return loss.view(target.shape)
    if reduction == "sum":
        return loss.sum()
    own = scale if weight is None else scale * weight[torch.where(counts, flat, 0)]
    return loss.sum() / own.sum()
