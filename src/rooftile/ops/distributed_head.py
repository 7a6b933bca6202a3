"""`linear_cross_entropy` of DTensor: the head's classes over ranks, tokens over others.

Each rank multiplies its rows of the head, by chunks of tokens as ops/fused_head.py does. Of a chunk's logits the ranks
share what ops/cross_entropy/distributed.py says, and each writes the gradient of its own columns over them. The
gradient of hidden is a partial sum over the ranks of the head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rooftile import library
from rooftile.ops import fused_head
from rooftile.ops.cross_entropy import backward, distributed, forward
from rooftile.ops.fused_head import How
from rooftile.ops.gemm import dispatch

_NAME = "linear_cross_entropy"


class _Head(torch.autograd.Function):
    """The loss of each token, or with a reduction the sum of this rank's; each is multiplied by its share."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, share: Tensor, first: int,
        group: Any, options: forward.Options, how: How,
    ) -> Tensor:  # fmt: skip
        ctx.now, ctx.args = options.gradient == "now", (first, group, options, how)
        losses, grads = _walk(hidden, weight, bias, target, share, *ctx.args, gradients=ctx.now)
        loss = losses.sum() if options.reduction != "none" else losses
        ctx.save_for_backward(*(grads if ctx.now else (hidden, weight, bias, target, share)))
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.now:
            grads = [t * dloss.to(t.dtype) for t in ctx.saved_tensors]
        else:
            hidden, weight, bias, target, share = ctx.saved_tensors
            grads = list(_walk(hidden, weight, bias, target, share * dloss, *ctx.args, gradients=True)[1])
        needs = ctx.needs_input_grad[:3]
        return *(grad if need else None for grad, need in zip(grads, needs, strict=True)), *(None,) * 6


def _walk(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, share: Tensor, first: int, group: Any,
    options: forward.Options, how: How, *, gradients: bool,
) -> tuple[Tensor, fused_head.Gradients]:  # fmt: skip
    losses = torch.empty(target.shape, dtype=torch.float32, device=hidden.device)
    one = torch.ones((), dtype=torch.float32, device=hidden.device)

    def differentiate(z: Tensor, part: slice, rows: slice | Tensor) -> None:
        losses[part], own, factors = distributed.of_columns(z, target[rows], share[rows], first, group, options)
        if gradients:
            z.copy_(backward.op(one, z, own, None, factors, options.softcap, False))

    row_bytes = fused_head.logits_row_bytes(hidden, weight.shape[0])
    grads = fused_head.walk(_NAME, hidden, weight, bias, None, how, row_bytes, differentiate, gradients=gradients)
    return losses, grads


def linear_cross_entropy(
    hidden: Any, weight: Any, target: Any, bias: Any, class_weight: Tensor | None, token_weights: Any,
    options: forward.Options, how: How,
) -> Tensor:  # fmt: skip
    """The loss as a DTensor: replicated, or with "none" sharded as the tokens are.

    Args:
        hidden, weight: DTensor. Others may be DTensor, or plain, which counts as replicated.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    if not (isinstance(hidden, DTensor) and isinstance(weight, DTensor)):
        raise TypeError(f"{_NAME}: hidden or weight is a plain tensor, expected both to be DTensor or neither")
    if options.stats or class_weight is not None or options.label_smoothing or how.valid_rows >= 0:
        raise ValueError(
            f"{_NAME}: weight is a DTensor, expected no return_stats, class_weight, label_smoothing or valid_rows"
        )
    if token_weights is not None and token_weights.requires_grad:
        raise ValueError(f"{_NAME}: token_weights requires grad, but gets no gradient; pass token_weights.detach()")
    fused_head.check_head(_NAME, hidden, weight, bias)
    fused_head.check_classes(_NAME, "target", target, hidden)
    fused_head.check_tokens(_NAME, "token_weights", token_weights, hidden)
    forward.check_options(_NAME, options)
    mesh = weight.device_mesh
    over = distributed.over_vocabulary(_NAME, "weight", weight.placements, 0)
    columns = [Shard(0) if dim == over else Replicate() for dim in range(mesh.ndim)]
    tokens = [
        p if type(p) is Shard and p.dim < hidden.dim() - 1 and dim != over else Replicate()
        for dim, p in enumerate(hidden.placements)
    ]
    of_hidden = [Partial() if dim == over else p for dim, p in enumerate(tokens)]
    of_weight = [Partial() if isinstance(p, Shard) else columns[dim] for dim, p in enumerate(tokens)]
    x = distributed.localized(hidden, mesh, tokens, of_hidden)
    target, token_weights = (distributed.localized(t, mesh, tokens) for t in (target, token_weights))
    first = 0 if over is None else distributed.part_of_vocabulary(_NAME, "weight", weight, weight.shape[0], over)
    group = None if over is None else mesh.get_group(over)
    own, bias = (distributed.localized(t, mesh, columns, of_weight) for t in (weight, bias))

    share = distributed.share_of_tokens(target, None, token_weights, options)
    if options.reduction == "mean":
        total = distributed.total_over(share, mesh, tokens).to_local()
        share = share * torch.where(total == 0, 0.0, 1 / total)
    rows, share = dispatch.as_rows(x), share.reshape(-1)
    loss = _Head.apply(rows, own, bias, target.reshape(-1), share, first, group, options, how)
    if options.reduction == "none":
        shape = torch.Size(hidden.shape[:-1])
        strides = library.contiguous_strides(shape)
        return DTensor.from_local(loss.view(target.shape), mesh, tokens, run_check=False, shape=shape, stride=strides)
    return distributed.total_over(loss, mesh, tokens)
