"""`linear_cross_entropy` of DTensor: the head's classes over ranks, tokens over others.

Each rank multiplies its rows of the head, by chunks of tokens as head.py does. Of a chunk's logits the ranks share what
ops/cross_entropy/distributed.py says, and each writes the gradient of its own columns over them. The gradient of hidden
is a partial sum over the ranks of the head.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from rooftile import sharding
from rooftile.ops.cross_entropy import backward, distributed, forward
from rooftile.ops.cross_entropy.distributed import Columns
from rooftile.ops.fused_head import head
from rooftile.ops.fused_head.head import How
from rooftile.ops.gemm import dispatch
from rooftile.primitives.loss_gradient import scaled

_NAME = "linear_cross_entropy"
_STATS = (torch.float32, torch.float32, torch.int64)


class _Head(torch.autograd.Function):
    """The loss of each token, or with a reduction the sum of this rank's, each times its share; and the statistics."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, share: Tensor, columns: Columns,
        options: forward.Options, how: How,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        ctx.now, ctx.args = options.gradient == "now", (columns, options, how)
        (losses, *stats), grads = _walk(hidden, weight, bias, target, share, *ctx.args, gradients=ctx.now)
        ctx.save_for_backward(*(grads if ctx.now else (hidden, weight, bias, target, share)))
        ctx.mark_non_differentiable(*stats)
        return losses if options.reduction == "none" else losses.sum(), *stats

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dloss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad[:3]
        if ctx.now:
            pairs = zip(ctx.saved_tensors, needs, strict=True)
            grads = [scaled(t, dloss) if need else t for t, need in pairs]
        else:
            hidden, weight, bias, target, share = ctx.saved_tensors
            columns, options, how = ctx.args
            options = dataclasses.replace(options, stats=False)
            args = columns, options, how._replace(needs=needs)
            grads = list(_walk(hidden, weight, bias, target, share * dloss, *args, gradients=True)[1])
        return *(grad if need else None for grad, need in zip(grads, needs, strict=True)), *(None,) * 5


def _walk(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, share: Tensor, columns: Columns,
    options: forward.Options, how: How, *, gradients: bool,
) -> tuple[list[Tensor], head.Gradients]:  # fmt: skip
    """The losses of all tokens and the statistics if asked for; and the gradients of this rank's columns."""
    tokens = head.ValidTokens(target, options.ignore_index, how)
    dtypes = (torch.float32, *_STATS * options.stats)
    found = [torch.empty(tokens.n, dtype=dtype, device=hidden.device) for dtype in dtypes]
    one = torch.ones((), dtype=torch.float32, device=hidden.device)
    smooths, part = options.label_smoothing > 0, columns.of_weight(weight.shape[0])

    def differentiate(z: Tensor, part_of_tokens: slice, rows: slice | Tensor) -> None:
        here = distributed.of_columns(z, target[rows], share[rows], columns, options)
        for whole, t in zip(found, (here.losses, *here.stats), strict=True):
            whole[part_of_tokens] = t
        if gradients:
            backward.over_logits(one, z, here.target, part, here.factors, options.softcap, smooths, options.temperature)

    row_bytes = head.logits_row_bytes(hidden, weight.shape[0])
    grads = head.walk(_NAME, hidden, weight, bias, tokens, how, row_bytes, differentiate, gradients=gradients)
    return [tokens.restored(t) for t in found], grads


def linear_cross_entropy(
    hidden: Any, weight: Any, target: Any, bias: Any, class_weight: Tensor | None, token_weights: Any,
    options: forward.Options, how: How,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The loss as a DTensor, replicated, or with "none" sharded as the tokens are; and the statistics, sharded so.

    The arguments have been checked.

    Args:
        hidden, weight: DTensor. Others may be DTensor, or plain, which counts as replicated.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    if not (isinstance(hidden, DTensor) and isinstance(weight, DTensor)):
        names = ("hidden", "weight") if isinstance(hidden, DTensor) else ("weight", "hidden")
        raise TypeError(
            f"{_NAME}: {names[0]} is a DTensor and {names[1]} a plain tensor, expected both to be DTensor or neither; "
            f"{sharding.GATHERED}"
        )
    mesh = weight.device_mesh
    over = distributed.over_vocabulary(_NAME, "weight", weight.placements, 0)
    columns = [Shard(0) if dim == over else Replicate() for dim in range(mesh.ndim)]
    tokens = [
        p if type(p) is Shard and p.dim < hidden.dim() - 1 and dim != over else Replicate()
        for dim, p in enumerate(hidden.placements)
    ]
    of_hidden = [Partial() if dim == over else p for dim, p in enumerate(tokens)]
    of_weight = [Partial() if isinstance(p, Shard) else columns[dim] for dim, p in enumerate(tokens)]
    x = sharding.localized(hidden, mesh, tokens, of_hidden)
    target, token_weights = (sharding.localized(t, mesh, tokens) for t in (target, token_weights))
    first = 0 if over is None else distributed.part_of_vocabulary(_NAME, "weight", weight, weight.shape[0], over)
    group = None if over is None else mesh.get_group(over)
    class_weight = sharding.localized(class_weight, mesh, [Replicate()] * mesh.ndim)
    shared = Columns(first, weight.shape[0], group, class_weight)
    own, bias = (sharding.localized(t, mesh, columns, of_weight) for t in (weight, bias))

    share = distributed.share_of_tokens(target, None, token_weights, options)
    if options.reduction == "mean":
        each = distributed.share_of_tokens(target, class_weight, token_weights, options)
        total = sharding.total_over(each, mesh, tokens).to_local()
        share = share * torch.where(total == 0, 0.0, 1 / total)
    rows, share = dispatch.as_rows(x), share.reshape(-1)
    loss, *stats = _Head.apply(rows, own, bias, target.reshape(-1), share, shared, options, how)
    shape, local = hidden.shape[:-1], target.shape
    whole = [sharding.assembled(t.view(local), mesh, tokens, shape) for t in stats]
    if options.reduction == "none":
        return sharding.assembled(loss.view(local), mesh, tokens, shape), *whole
    return sharding.total_over(loss, mesh, tokens), *whole
