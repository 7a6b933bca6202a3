"""Cross entropy of DTensor logits, which may be sharded over tokens, and over the vocabulary.

Over the vocabulary each rank reads its own columns once: the kernel of a whole vocabulary gives their maximum, the sum
of exponentials to that base, the logit of the target if it is there, and what label smoothing and statistics need. Two
all-reduces, of the maximum and of three or more sums of each token, give those of whole rows. They stay apart: the loss
is `(maximum - logit of the target) + log(sum of exponentials)` as in the kernel, since the logarithm of the sum over
all classes would have a rounding error that is more than a small loss. The backward needs no communication: it is the
kernel of a whole vocabulary, which is given the factors of whole rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rooftile import library, sharding
from rooftile.ops.cross_entropy import backward, forward

_NAME = "cross_entropy_of_columns"
_LAST = 2**62  # after any class


def _options(ignore_index: int, smooths: bool, softcap: float, stats: bool, temperature: float) -> forward.Options:
    return forward.Options(ignore_index, float(smooths), 0.0, softcap, "none", "none", stats, temperature)


def _shapes(target: Tensor, stats: bool) -> list[tuple[Sequence[int], torch.dtype]]:
    n = target.numel() if stats else 0
    return [((target.numel(), forward.FACTORS), torch.float32), ((n,), torch.float32), ((n,), torch.int64)]


def _prepare(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    smooths: bool,
    softcap: float,
    stats: bool,
    temperature: float,
) -> Callable[..., tuple[Tensor, ...]]:
    _fake(logits, target, weight, ignore_index, smooths, softcap, stats, temperature)
    shapes, device = _shapes(target, stats), logits.device
    start = library.start_nothing
    if target.numel():
        start = forward.bind_rows(
            logits, target, weight, None, _options(ignore_index, smooths, softcap, stats, temperature), part=True
        )

    def run(logits: Tensor, target: Tensor, weight: Tensor | None, *_: Any) -> tuple[Tensor, ...]:
        sums, entropy, argmax = (torch.empty(shape, dtype=dtype, device=device) for shape, dtype in shapes)
        last = (None, entropy, argmax) if stats else (None,) * 3
        start(logits, target, weight, None, None, None, None, sums, *last)
        return sums, entropy, argmax

    return run


def _fake(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    smooths: bool,
    softcap: float,
    stats: bool,
    temperature: float,
) -> tuple[Tensor, ...]:
    forward.check(logits, target, weight, None, _options(ignore_index, smooths, softcap, stats, temperature))
    return tuple(torch.empty(shape, dtype=dtype, device=logits.device) for shape, dtype in _shapes(target, stats))


_op = library.define(
    f"{_NAME}(Tensor logits, Tensor target, Tensor? weight, int ignore_index, bool smooths, float softcap, bool stats, "
    "float temperature) -> (Tensor, Tensor, Tensor)",
    prepare=_prepare,
    fake=_fake,
    called=lambda args: "cross_entropy",
)


@dataclasses.dataclass(frozen=True)
class Columns:
    """The columns that a rank has.

    Attributes:
        first: the class of the first.
        classes: how many there are on all ranks.
        group: of the ranks that have the others; None if there are none.
        weight: of all classes.
    """

    first: int
    classes: int
    group: Any
    weight: Tensor | None

    def of_weight(self, n: int) -> Tensor | None:
        """The weights of this rank's classes."""
        return None if self.weight is None else self.weight[self.first : self.first + n]


class Tokens(NamedTuple):
    """What the ranks find together.

    Attributes:
        losses: of tokens, without gradients.
        target: relative to the first column.
        factors: for `backward.op`.
        stats: log-probability, entropy and argmax of each token; empty unless they are asked for.
    """

    losses: Tensor
    target: Tensor
    factors: Tensor
    stats: tuple[Tensor, ...]


def of_columns(x: Tensor, target: Tensor, share: Tensor, columns: Columns, options: forward.Options) -> Tokens:
    """The losses of tokens from this rank's columns.

    Args:
        share: float32, what the loss of each token is multiplied by.
    """
    smoothing, classes = options.label_smoothing, columns.classes
    counts, own = target != options.ignore_index, target - columns.first
    n, ignored, smooths = x.shape[-1], options.ignore_index - columns.first, smoothing > 0
    part = columns.of_weight(n) if smooths else None
    found, entropy, argmax = _op(x, own, part, ignored, smooths, options.softcap, options.stats, options.temperature)
    top, total, at, weighted = found.view(*target.shape, forward.FACTORS).unbind(-1)

    highest = top.clone()
    _all_reduce(highest, "MAX", columns)
    here = total * (top - highest).exp()
    sums = [here, at, ((own >= 0) & (own < n)).float()]
    if smooths:
        sums.append(weighted)
    if options.stats:
        # Of the exponentials times their exponents, which the entropy of these columns alone was computed from.
        slopes = here * (total.log() - entropy.view(target.shape) + (top - highest))
        sums.append(torch.where(here == 0, 0.0, slopes))
    together = torch.stack(sums)
    _all_reduce(together, "SUM", columns)
    total, at, known = together[:3]
    log_total = total.log()
    lse, surprise = highest + log_total, (highest - at) + log_total

    at_target: Any = 1.0 - smoothing
    if columns.weight is not None:
        at_target = at_target * columns.weight.float()[target.clamp(0, classes - 1)]
    at_target = torch.where(known > 0, at_target, torch.nan)
    losses, along, each = at_target * surprise, at_target, smoothing / classes
    if smooths:
        mass = classes if columns.weight is None else columns.weight.float().sum()
        losses = losses + each * (mass * lse - together[3])
        along = along + each * mass
    if options.z_loss:
        losses = losses + options.z_loss * lse * lse
        along = along + 2 * options.z_loss * lse
    share = torch.where(counts, share, 0.0)
    factors = torch.stack([highest, share * along / total, share * at_target, share * each], dim=-1)
    factors = torch.where(counts[..., None], factors, 0.0).view(-1, forward.FACTORS)

    stats: tuple[Tensor, ...] = ()
    if options.stats:
        surprise = torch.where(known > 0, surprise, torch.nan)
        best = torch.where(top == highest, argmax.view(target.shape) + columns.first, _LAST)
        _all_reduce(best, "MIN", columns)
        stats = (
            torch.where(counts, -surprise, 0.0),
            torch.where(counts, log_total - together[-1] / total, 0.0),
            torch.where(counts, best.clamp(max=classes - 1), -1),
        )
    return Tokens(torch.where(counts, share * losses, 0.0), own, factors, stats)


def _all_reduce(x: Tensor, op: str, columns: Columns) -> None:
    if columns.group is not None:
        torch.distributed.all_reduce(x, getattr(torch.distributed.ReduceOp, op), group=columns.group)


class _OverVocabulary(torch.autograd.Function):
    """The loss of each token, from this rank's columns, and the statistics."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, target: Tensor, share: Tensor, columns: Columns, options: forward.Options
    ) -> tuple[Tensor, ...]:
        found = of_columns(x, target, share, columns, options)
        ctx.save_for_backward(x, found.target, columns.of_weight(x.shape[-1]), found.factors)
        ctx.softcap, ctx.smooths = options.softcap, options.label_smoothing > 0
        ctx.mark_non_differentiable(*found.stats)
        return found.losses, *found.stats

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dloss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, own, weight, factors = ctx.saved_tensors
        return backward.op(dloss.contiguous(), x, own, weight, factors, ctx.softcap, ctx.smooths), *(None,) * 4


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


def cross_entropy(
    plain: Any, logits: Any, target: Tensor, weight: Tensor | None, token_weights: Tensor | None,
    options: forward.Options,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The loss as a DTensor, replicated, or with "none" sharded as the tokens are; and the statistics, sharded so.

    Args:
        plain: `rooftile.cross_entropy`, for ranks that have whole rows.
        logits: a DTensor. Other tensors may be DTensor, or plain, which counts as replicated.
    """
    from torch.distributed.tensor import Replicate, Shard

    mesh, last = logits.device_mesh, logits.dim() - 1
    forward.check(logits, target, weight, token_weights, options)
    for name, tensor in (("weight", weight), ("token_weights", token_weights)):
        if tensor is not None and tensor.requires_grad:
            raise ValueError(f"cross_entropy: {name} requires grad, but gets no gradient; pass {name}.detach()")
    placements = [p if type(p) is Shard else Replicate() for p in logits.placements]
    over = over_vocabulary("cross_entropy", "logits", placements, last)
    tokens = [Replicate() if dim == over else p for dim, p in enumerate(placements)]
    x = sharding.localized(logits, mesh, placements)
    target, token_weights = sharding.localized(target, mesh, tokens), sharding.localized(token_weights, mesh, tokens)
    weight = sharding.localized(weight, mesh, [Replicate()] * mesh.ndim)
    if over is not None:
        classes = logits.shape[-1]
        first = part_of_vocabulary("cross_entropy", "logits", logits, classes, over)
        share = share_of_tokens(target, None, token_weights, options)
        columns = Columns(first, classes, mesh.get_group(over), weight)
        losses, *stats = _OverVocabulary.apply(x, target, share, columns, options)
    else:
        found = plain(
            x, target, weight=weight, token_weights=token_weights, ignore_index=options.ignore_index,
            label_smoothing=options.label_smoothing, z_loss=options.z_loss, softcap=options.softcap or None,
            reduction="none", return_stats=options.stats,
        )  # fmt: skip
        losses, stats = found if options.stats else (found, ())
    whole = [sharding.assembled(t, mesh, tokens, logits.shape[:-1]) for t in stats]
    if options.reduction == "none":
        return sharding.assembled(losses, mesh, tokens, logits.shape[:-1]), *whole
    if options.reduction == "mean":
        total = sharding.total_over(share_of_tokens(target, weight, token_weights, options), mesh, tokens).to_local()
        losses = losses * torch.where(total == 0, 0.0, 1 / total)
    return sharding.total_over(losses, mesh, tokens), *whole
