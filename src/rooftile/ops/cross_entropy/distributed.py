"""Cross entropy of DTensor logits, which may be sharded over tokens, and over the vocabulary.

Over the vocabulary each rank computes lse, the logarithm of the sum of exponentials of its own columns, and two
all-reduces of three numbers a token give that of whole rows and the logit of the target. The backward needs no
communication: it is the kernel of a whole vocabulary, which is given the lse of all columns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rooftile import library
from rooftile.ops.cross_entropy import backward, forward

_IGNORED = -100


class _OverVocabulary(torch.autograd.Function):
    """The loss of each token, from this rank's columns, which begin at class `first`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, target: Tensor, token_weights: Tensor | None, first: int, group: Any,
        options: forward.Options,
    ) -> Tensor:  # fmt: skip
        counts, own = target != options.ignore_index, target - first
        inside = (own >= 0) & (own < x.shape[-1])
        clamped = torch.where(counts, own.clamp(0, x.shape[-1] - 1), _IGNORED)
        flags = (_IGNORED, 0.0, 0.0, options.softcap, "none", "later")
        losses, factors = torch.ops.rooftile.cross_entropy(x, clamped, None, None, *flags)
        top, inverse = factors.view(*target.shape, forward.FACTORS).unbind(-1)[:2]
        lse = torch.where(counts, top - inverse.log(), 0.0)  # the factor of an ignored row is 0

        highest = lse.clone()
        torch.distributed.all_reduce(highest, torch.distributed.ReduceOp.MAX, group=group)
        sums = torch.stack([(lse - highest).exp(), torch.where(inside, lse - losses, 0.0), inside.float()])
        torch.distributed.all_reduce(sums, group=group)
        lse, at = highest + sums[0].log(), sums[1]

        share = counts.float() if token_weights is None else torch.where(counts, token_weights.float(), 0.0)
        share = torch.where(counts & (sums[2] == 0), torch.nan, share)  # no rank has the class
        ctx.save_for_backward(x, own, lse, share)
        ctx.z_loss, ctx.softcap = options.z_loss, options.softcap
        return torch.where(counts, share * (lse - at + options.z_loss * lse * lse), 0.0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        x, own, lse, share = ctx.saved_tensors
        factors = torch.stack([lse, share * (1 + 2 * ctx.z_loss * lse), share, torch.zeros_like(lse)], dim=-1)
        dloss, factors = dloss.contiguous(), factors.view(-1, forward.FACTORS)
        return backward.op(dloss, x, own, None, factors, ctx.softcap, False), *(None,) * 5


def _part_of_vocabulary(logits: Any, dim: int) -> int:
    """The first class of this rank, where the vocabulary is sharded over that dimension of the mesh."""
    ranks, classes = logits.device_mesh.size(dim), logits.shape[-1]
    part = library.cdiv(classes, ranks)
    if (ranks - 1) * part >= classes:
        raise ValueError(f"cross_entropy: logits has {classes} classes over {ranks} ranks, expected some on each")
    return logits.device_mesh.get_local_rank(dim) * part


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
    over = [dim for dim, p in enumerate(placements) if isinstance(p, Shard) and p.dim == last]
    if len(over) > 1:
        raise ValueError("cross_entropy: logits has its classes over two dimensions of the mesh, expected one")
    if over and (weight is not None or options.label_smoothing):
        raise ValueError("cross_entropy: logits has its classes over ranks, expected no weight or label_smoothing")
    tokens = [Replicate() if dim in over else p for dim, p in enumerate(placements)]
    whole = [Replicate()] * mesh.ndim

    def local(t: Any, where: list[Any]) -> Any:
        if t is None:
            return None
        t = t if isinstance(t, DTensor) else DTensor.from_local(t, mesh, whole, run_check=False)
        return t.redistribute(mesh, where).to_local(grad_placements=where)

    x, target_, token_weights, weight = (
        local(t, where)
        for t, where in ((logits, placements), (target, tokens), (token_weights, tokens), (weight, whole))
    )
    if over:
        first, group = _part_of_vocabulary(logits, over[0]), mesh.get_group(over[0])
        losses = _OverVocabulary.apply(x, target_, token_weights, first, group, options)
    else:
        losses = plain(
            x, target_, weight=weight, token_weights=token_weights, ignore_index=options.ignore_index,
            label_smoothing=options.label_smoothing, z_loss=options.z_loss, softcap=options.softcap or None,
            reduction="none",
        )  # fmt: skip

    def distributed(t: Tensor) -> Any:
        shape = torch.Size(logits.shape[:-1])
        return DTensor.from_local(
            t, mesh, tokens, run_check=False, shape=shape, stride=library.contiguous_strides(shape)
        )

    if options.reduction == "none":
        return distributed(losses)
    if options.reduction == "mean":
        counts = target_ != options.ignore_index
        shares = counts.float() if token_weights is None else torch.where(counts, token_weights.float(), 0.0)
        if weight is not None:
            shares = shares * weight.float()[target_.clamp(0, logits.shape[-1] - 1)]
        total = distributed(shares).sum().redistribute(mesh, whole).to_local()
        losses = losses * torch.where(total == 0, 0.0, 1 / total)
    return distributed(losses).sum().redistribute(mesh, whole)
