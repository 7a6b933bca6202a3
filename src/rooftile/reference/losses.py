"""Losses over log-probabilities, one sequence at a time, from all logits: give it float64 for the truth."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def token_logps(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None, *, temperature: float = 1.0,
    ignore_index: int = -100, softcap: float | None = None, **_: Any,
) -> Tensor:  # fmt: skip
    logits = hidden @ weight.mT
    if bias is not None:
        logits = logits + bias
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    counts = labels != ignore_index
    index = torch.where(counts, labels, 0).long()[..., None]
    return torch.log_softmax(logits / temperature, -1).gather(-1, index)[..., 0] * counts


def _sequences(*args: Any, **head: Any) -> tuple[list[Tensor], list[int]]:
    """The log-probability of each sequence, and how many tokens of it count."""
    labels = args[2]
    return list(token_logps(*args, **head).sum(-1)), (labels != head.get("ignore_index", -100)).sum(-1).tolist()


def _mean(losses: list[Tensor], like: Tensor) -> Tensor:
    return torch.stack(losses).mean() if losses else 0 * like.sum()


def _smoothed(margin: Tensor, label_smoothing: float) -> Tensor:
    return -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)


def dpo_loss(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None, *, ref_logps: Tensor | None = None,
    beta: float = 0.1, label_smoothing: float = 0.0, loss_type: str = "sigmoid", **head: Any,
) -> Tensor:  # fmt: skip
    logps, lengths = _sequences(hidden, weight, labels, bias, **head)
    n, losses = len(logps) // 2, []
    for i in range(n):
        if lengths[i] and lengths[n + i]:
            chosen, rejected = logps[i], logps[n + i]
            if ref_logps is not None:
                chosen, rejected = chosen - ref_logps[i], rejected - ref_logps[n + i]
            if loss_type == "ipo":
                margin = chosen / lengths[i] - rejected / lengths[n + i]
                losses.append((margin - 1 / (2 * beta)) ** 2)
            elif loss_type == "hinge":
                losses.append(torch.relu(1 - beta * (chosen - rejected)))
            else:
                losses.append(_smoothed(beta * (chosen - rejected), label_smoothing))
    return _mean(losses, hidden)


def orpo_loss(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None, *, beta: float = 0.1, **head: Any
) -> Tensor:
    logps, lengths = _sequences(hidden, weight, labels, bias, **head)
    n, losses = len(logps) // 2, []
    for i in range(n):
        if lengths[i] and lengths[n + i]:
            a, b = (torch.exp(logps[j] / lengths[j]) for j in (i, n + i))
            losses.append(-logsigmoid(torch.log(a / (1 - a)) - torch.log(b / (1 - b))))
    return -torch.stack(logps[:n]).sum() / max(1, sum(lengths[:n])) + beta * _mean(losses, hidden)


def simpo_loss(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None, *, beta: float = 2.0,
    gamma: float = 0.5, label_smoothing: float = 0.0, **head: Any,
) -> Tensor:  # fmt: skip
    logps, lengths = _sequences(hidden, weight, labels, bias, **head)
    n = len(logps) // 2
    losses = [
        _smoothed(beta * (logps[i] / lengths[i] - logps[n + i] / lengths[n + i]) - gamma, label_smoothing)
        for i in range(n)
        if lengths[i] and lengths[n + i]
    ]
    return _mean(losses, hidden)


def kto_loss(
    hidden: Tensor, weight: Tensor, labels: Tensor, desirable: Tensor, bias: Tensor | None = None, *,
    ref_logps: Tensor | None = None, kl: Tensor | float = 0.0, beta: float = 0.1, desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0, **head: Any,
) -> Tensor:  # fmt: skip
    logps, lengths = _sequences(hidden, weight, labels, bias, **head)
    losses, least = [], max(float(kl), 0.0)
    for i, logp in enumerate(logps):
        if lengths[i]:
            ratio = logp if ref_logps is None else logp - ref_logps[i]
            if desirable[i]:
                losses.append(desirable_weight * (1 - torch.sigmoid(beta * (ratio - least))))
            else:
                losses.append(undesirable_weight * (1 - torch.sigmoid(beta * (least - ratio))))
    return _mean(losses, hidden)


def grpo_loss(
    hidden: Tensor, weight: Tensor, labels: Tensor, advantages: Tensor, bias: Tensor | None = None, *,
    mask: Tensor | None = None, old_logps: Tensor | None = None, ref_logps: Tensor | None = None,
    importance_sampling_ratio: Tensor | None = None, beta: float = 0.0, epsilon_low: float = 0.2,
    epsilon_high: float = 0.2, delta: float | None = None, loss_type: str = "dapo",
    importance_sampling_level: str = "token", max_completion_length: int | None = None,
    num_items_in_batch: Tensor | float | None = None, temperature: float = 1.0, **head: Any,
) -> Tensor:  # fmt: skip
    logps = token_logps(hidden, weight, labels, bias, temperature=temperature, **head)
    batch, length = labels.shape
    total, means, n_all = 0 * hidden.sum(), [], 0
    for i in range(batch):
        tokens = [t for t in range(length) if labels[i, t] != head.get("ignore_index", -100)]
        tokens = [t for t in tokens if mask is None or mask[i, t]]
        ratios = [logps[i, t] - (logps.detach() if old_logps is None else old_logps)[i, t] for t in tokens]
        if importance_sampling_level == "sequence" and tokens:
            ratios = [torch.stack(ratios).mean()] * len(tokens)
        losses = []
        for t, log_ratio in zip(tokens, ratios, strict=True):
            advantage = advantages[i] if advantages.dim() == 1 else advantages[i, t]
            ratio = torch.exp(log_ratio)
            unclipped = ratio if delta is None else torch.clamp(ratio, max=delta)
            loss = -torch.minimum(
                unclipped * advantage, torch.clamp(ratio, 1 - epsilon_low, 1 + epsilon_high) * advantage
            )
            if importance_sampling_ratio is not None:
                loss = loss * importance_sampling_ratio.expand(batch, length)[i, t]
            if beta and ref_logps is not None:
                behind = ref_logps[i, t] - logps[i, t]
                loss = loss + beta * (torch.exp(behind) - behind - 1)
            losses.append(loss)
        if losses:
            total = total + torch.stack(losses).sum()
        means.append(torch.stack(losses).mean() if losses else 0 * hidden.sum())
        n_all += len(tokens)
    divisor = {
        "bnpo": max(1, n_all),
        "dr_grpo": batch * (max_completion_length or length),
        "dapo": max(1, n_all) if num_items_in_batch is None else num_items_in_batch,
    }
    return torch.stack(means).mean() if loss_type == "grpo" else total / divisor[loss_type]
