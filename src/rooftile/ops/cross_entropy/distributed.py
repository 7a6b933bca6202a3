"""Cross entropy of DTensor logits, which may be sharded over tokens, and over the vocabulary.

Over the vocabulary each rank computes lse, the logarithm of the sum of exponentials of its own columns, and two
all-reduces of three numbers a token give that of whole rows and the logit of the target. The backward needs no
communication: it is the kernel of a whole vocabulary, which is given the lse of all columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rooftile import library
from rooftile.ops.cross_entropy import backward, forward

_IGNORED = -100


def of_columns(
    x: Tensor, target: Tensor, share: Tensor, first: int, group: Any, options: forward.Options
) -> tuple[Tensor, Tensor, Tensor]:
    """The losses of tokens from this rank's columns, and the targets and factors of `backward.op`, without gradients.

    Args:
        x: this rank's logits, which begin at class `first`.
        share: float32, what the loss of each token is multiplied by.
        group: of the ranks that have the other columns; None if there are none.
    """
    counts, own = target != options.ignore_index, target - first
    inside = (own >= 0) & (own < x.shape[-1])
    clamped = torch.where(counts, own.clamp(0, x.shape[-1] - 1), _IGNORED)
    flags = (_IGNORED, 0.0, 0.0, options.softcap, "none", "later")
    losses, factors = torch.ops.rooftile.cross_entropy(x, clamped, None, None, *flags)
    top, inverse = factors.view(*target.shape, forward.FACTORS).unbind(-1)[:2]
    lse = torch.where(counts, top - inverse.log(), 0.0)  # the factor of an ignored row is 0

    highest = lse.clone()
    sums = [torch.ones_like(lse), torch.where(inside, lse - losses, 0.0), inside.float()]
    if group is not None:
        torch.distributed.all_reduce(highest, torch.distributed.ReduceOp.MAX, group=group)
        sums[0] = (lse - highest).exp()
        together = torch.stack(sums)
        torch.distributed.all_reduce(together, group=group)
        sums = list(together)
    lse, at = highest + sums[0].log(), sums[1]

    share = torch.where(counts, share, 0.0)
    share = torch.where(counts & (sums[2] == 0), torch.nan, share)  # no rank has the class
    factors = torch.stack([lse, share * (1 + 2 * options.z_loss * lse), share, torch.zeros_like(lse)], dim=-1)
    losses = torch.where(counts, share * (lse - at + options.z_loss * lse * lse), 0.0)
    return losses, own, factors.view(-1, forward.FACTORS)


class _OverVocabulary(torch.autograd.Function):
    """The loss of each token, from this rank's columns."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, target: Tensor, share: Tensor, first: int, group: Any, options: forward.Options
    ) -> Tensor:
        losses, own, factors = of_columns(x, target, share, first, group, options)
        ctx.save_for_backward(x, own, factors)
        ctx.softcap = options.softcap
        return losses

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        x, own, factors = ctx.saved_tensors
        return backward.op(dloss.contiguous(), x, own, None, factors, ctx.softcap, False), *(None,) * 5


def part_of_vocabulary(op: str, name: str, t: Any, classes: int, dim: int) -> int:
    """The first class of this rank, where a DTensor's classes are sharded over that dimension of the mesh."""
    ranks = t.device_mesh.size(dim)
    part = library.cdiv(classes, ranks)
    if (ranks - 1) * part >= classes:
        raise ValueError(f"{op}: {name} has {classes} classes over {ranks} ranks, expected some on each")
    return t.device_mesh.get_local_rank(dim) * part


def over_vocabulary(op: str, name: str, placements: Sequence[Any], classes: int) -> int | None:
    """The dimension of the mesh over which the classes, that dimension of a tensor, are sharded, or None."""
    from torch.distributed.tensor import Shard

    over = [dim for dim, p in enumerate(placements) if isinstance(p, Shard) and p.dim == classes]
    if len(over) > 1:
        raise ValueError(f"{op}: {name} has its classes over two dimensions of the mesh, expected one")
    return over[0] if over else None


def share_of_tokens(
    target: Tensor, weight: Tensor | None, token_weights: Tensor | None, options: forward.Options
) -> Tensor:
    """What "mean" adds up of each token to divide by, in float32."""
    counts = target != options.ignore_index
    share = counts.float() if token_weights is None else torch.where(counts, token_weights.float(), 0.0)
    return share if weight is None else share * weight.float()[target.clamp(0, weight.shape[0] - 1)]


def total_over(share: Tensor, mesh: Any, tokens: Sequence[Any]) -> Any:
    """The sum over the ranks that tokens are sharded over."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    sums = [Partial() if isinstance(p, Shard) else p for p in tokens]
    return DTensor.from_local(share.sum(), mesh, sums, run_check=False).redistribute(mesh, [Replicate()] * mesh.ndim)


def localized(t: Any, mesh: Any, where: Sequence[Any], grads: Sequence[Any] | None = None) -> Any:
    """This rank's part of a tensor with those placements; one that is plain counts as replicated.

    `grads` are the placements of its gradient, by default the same.
    """
    from torch.distributed.tensor import DTensor, Replicate

    if t is None:
        return None
    if not isinstance(t, DTensor):
        t = DTensor.from_local(t, mesh, [Replicate()] * mesh.ndim, run_check=False)
    if tuple(t.placements) != tuple(where):
        t = t.redistribute(mesh, where)
    return t.to_local(grad_placements=where if grads is None else grads)


def cross_entropy(
    plain: Any, logits: Any, target: Tensor, weight: Tensor | None, token_weights: Tensor | None,
    options: forward.Options,
) -> Tensor:  # fmt: skip
    """The loss as a DTensor: replicated, or with "none" sharded as the tokens are.

    Args:
        plain: `rooftile.cross_entropy`, for ranks that have whole rows.
        logits: a DTensor. Other tensors may be DTensor, or plain, which counts as replicated.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    if options.stats:
        raise ValueError("cross_entropy: return_stats is True, expected False for DTensor logits")
    mesh, last = logits.device_mesh, logits.dim() - 1
    forward.check(logits, target, weight, token_weights, options)
    for name, tensor in (("weight", weight), ("token_weights", token_weights)):
        if tensor is not None and tensor.requires_grad:
            raise ValueError(f"cross_entropy: {name} requires grad, but gets no gradient; pass {name}.detach()")
    placements = [p if type(p) is Shard else Replicate() for p in logits.placements]
    over = over_vocabulary("cross_entropy", "logits", placements, last)
    if over is not None and (weight is not None or options.label_smoothing):
        raise ValueError("cross_entropy: logits has its classes over ranks, expected no weight or label_smoothing")
    tokens = [Replicate() if dim == over else p for dim, p in enumerate(placements)]
    x = localized(logits, mesh, placements)
    target, token_weights = localized(target, mesh, tokens), localized(token_weights, mesh, tokens)
    weight = localized(weight, mesh, [Replicate()] * mesh.ndim)
    if over is not None:
        first, group = (
            part_of_vocabulary("cross_entropy", "logits", logits, logits.shape[-1], over),
            mesh.get_group(over),
        )
        share = share_of_tokens(target, None, token_weights, options)
        losses = _OverVocabulary.apply(x, target, share, first, group, options)
    else:
        losses = plain(
            x, target, weight=weight, token_weights=token_weights, ignore_index=options.ignore_index,
            label_smoothing=options.label_smoothing, z_loss=options.z_loss, softcap=options.softcap or None,
            reduction="none",
        )  # fmt: skip
    if options.reduction == "none":
        shape = torch.Size(logits.shape[:-1])
        strides = library.contiguous_strides(shape)
        return DTensor.from_local(losses, mesh, tokens, run_check=False, shape=shape, stride=strides)
    if options.reduction == "mean":
        total = total_over(share_of_tokens(target, weight, token_weights, options), mesh, tokens).to_local()
        losses = losses * torch.where(total == 0, 0.0, 1 / total)
    return total_over(losses, mesh, tokens)
