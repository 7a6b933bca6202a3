"""What the losses over a head share: its GEMM by chunks of tokens, the gradients, the arguments that say how.

    z = hidden @ weight^T + bias,   dhidden = dz @ weight,   dweight = dz^T @ hidden,   dbias = sum over tokens of dz

Each chunk's logits are written into one buffer by a GEMM, become their own gradient in place, and are multiplied into
the gradients that are asked for. The gradient of the weight is the residual of the next chunk's GEMM, which writes it
in place: a program reads the tile that it writes, and no other program does. So beside inputs and results there is one
chunk of logits.

The gradients are known in the forward but for one factor, the gradient of the loss: see primitives/loss_gradient.py.
Without a reduction that factor is a number of each token, and in float16 a gradient could underflow before a loss
scaler's factor reaches it. In both cases the backward computes the logits again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor

from rooftile import launching, library
from rooftile.ops.cross_entropy import forward
from rooftile.ops.gemm import dispatch
from rooftile.ops.gemm.column_sum import column_sum
from rooftile.primitives.loss_gradient import scaled
from rooftile.primitives.mean_of_tokens import bind_mean
from rooftile.primitives.partials import prepare_total, sum_partials

# Of a chunk's logits, unless more rows are needed. On an H100 16384 x 4096 -> 32000 took 23.0 ms with 256 MiB, 21.2
# with 512 and 20.8 with 1024, and 8192 x 4096 -> 128256 43.3, 39.1 and 38.2.
CHUNK_BYTES = 512 << 20
LEAST_ROWS = 1024  # fewer leave a GEMM with too few operations a byte of the weight: an H100's ridge is near 300
MOST_CHUNKS = 4  # where each chunk rounds the gradient of the weight
_ROWS = 128  # of a tile

Gradients = tuple[Tensor, ...]  # of hidden, weight and bias, and of what else an op learns


class How(NamedTuple):
    """What a call asks for besides the loss, as the last arguments of an op.

    Attributes:
        needs: whether hidden, weight and bias get gradients, and what else an op learns.
        chunk_bytes: 0 is the default.
        valid_rows: -1 if the host does not know.
    """

    needs: Sequence[bool]
    float32_weight_gradient: bool
    chunk_bytes: int
    valid_rows: int
    precision: str


HOW = "bool[] needs, bool float32_weight_gradient, int chunk_bytes, int valid_rows, str precision"  # in a schema


def _at_least(op: str, name: str, value: object, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{op}: {name} is {library.named(value)}, expected an int or None")
    if value < least:
        raise ValueError(f"{op}: {name} is {value}, expected {least} or more, or None")
    return min(value, 2**63 - 1)


def asked(
    op: str, learned: Sequence[Tensor | None], float32_weight_gradient: bool, chunk_bytes: int | None,
    valid_rows: int | None, precision: str,
) -> How:  # fmt: skip
    """What a call with those arguments asks for; `learned` begins with hidden, weight and bias."""
    budget = 0 if chunk_bytes is None else _at_least(op, "chunk_bytes", chunk_bytes, 1)
    valid = -1 if valid_rows is None else _at_least(op, "valid_rows", valid_rows, 0)
    if not isinstance(float32_weight_gradient, bool):
        raise TypeError(f"{op}: float32_weight_gradient is {library.named(float32_weight_gradient)}, expected a bool")
    learning = torch.is_grad_enabled()
    needs = [learning and isinstance(t, Tensor) and t.requires_grad for t in learned]
    return How(needs, float32_weight_gradient, budget, valid, precision)


def check_head(op: str, hidden: Tensor, weight: Tensor, bias: Tensor | None, prefix: str = "") -> None:
    """Raise unless they are a head's: `(..., H)`, `(V, H)` and `(V,)`. `prefix` is that of their names."""
    names = [prefix + name for name in ("hidden", "weight", "bias")]
    library.check_floating(op, **dict(zip(names, (hidden, weight, bias), strict=True)))
    if hidden.dim() == 0:
        raise ValueError(f"{op}: {names[0]} has shape (), expected at least one dimension")
    dispatch.check_dtype(op, names[1], weight, names[0], hidden)
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1] or weight.shape[0] == 0:
        raise ValueError(
            f"{op}: {names[1]} has shape {tuple(weight.shape)}, expected (V, {hidden.shape[-1]}), V of 1 or more, to "
            f"match {names[0]}'s last dimension"
        )
    if bias is None:
        return
    if bias.shape != (weight.shape[0],):
        raise ValueError(
            f"{op}: {names[2]} has shape {tuple(bias.shape)}, expected ({weight.shape[0]},) to match {names[1]}'s rows"
        )
    if bias.dtype not in (hidden.dtype, torch.float32):
        raise TypeError(
            f"{op}: {names[2]} has dtype {bias.dtype}, expected {hidden.dtype} to match {names[0]}, or torch.float32"
        )


LEAST_TEMPERATURE = 1e-30  # logits of 1e8 over it are finite in float32


def check_temperature(op: str, temperature: float) -> None:
    library.check_numbers(op, temperature=temperature)
    if not LEAST_TEMPERATURE <= temperature < math.inf:
        raise ValueError(
            f"{op}: temperature is {temperature}, expected a finite number of {LEAST_TEMPERATURE:g} or more"
        )


def check_tokens(op: str, name: str, tensor: Tensor | None, hidden: Tensor) -> None:
    """Raise unless it has a number for each token."""
    leading = tuple(hidden.shape[:-1])
    if tensor is not None and tuple(tensor.shape) != leading:
        raise ValueError(
            f"{op}: {name} has shape {tuple(tensor.shape)}, expected {leading} to match hidden's leading dimensions"
        )


def check_classes(op: str, name: str, target: Tensor, hidden: Tensor) -> None:
    """Raise unless it has the index of a class for each token."""
    if target.dtype not in forward.TARGETS:
        raise TypeError(f"{op}: {name} has dtype {target.dtype}, expected int64 or int32, the indices of classes")
    check_tokens(op, name, target, hidden)


# The walk over chunks


def refuse_tracing(hidden: Tensor) -> None:
    """In a compiled graph the op stays whole."""
    if isinstance(hidden, FunctionalTensor):
        raise launching.Untraceable("a number of launches that depends on the number of tokens")


def chunk_rows(n_rows: int, row_bytes: int, chunk_bytes: int, rounds: bool) -> int:
    """How many tokens a chunk has; the last one may have fewer.

    Args:
        row_bytes: of a token's logits.
        chunk_bytes: the budget; 0 is the default.
        rounds: whether each chunk rounds the gradient of the weight.
    """
    if chunk_bytes:
        rows = max(1, chunk_bytes // row_bytes)
    else:
        rows = max(LEAST_ROWS, CHUNK_BYTES // row_bytes, library.cdiv(n_rows, MOST_CHUNKS) if rounds else 0)
    if rows >= n_rows:
        return n_rows
    # Whole tiles, in chunks of about one size; they also keep the addresses of chunks aligned.
    if rows >= _ROWS:
        rows = rows // _ROWS * _ROWS if chunk_bytes or not rounds else library.cdiv(rows, _ROWS) * _ROWS
    even = library.cdiv(n_rows, library.cdiv(n_rows, rows))
    return min(rows, library.cdiv(even, _ROWS) * _ROWS)


def logits_row_bytes(hidden: Tensor, n_cols: int) -> int:
    """The bytes of a token's logits in `logits_buffer`."""
    return library.cdiv(n_cols, 16) * 16 * hidden.element_size()


def logits_buffer(n_rows: int, like: Tensor, n_cols: int) -> Tensor:
    """Memory for the logits of so many tokens, of like's dtype.

    A row begins at a multiple of 32 bytes, which TMA and vectors need, whatever the number of classes.
    """
    stride = library.cdiv(n_cols, 16) * 16
    return torch.empty((n_rows, stride), dtype=like.dtype, device=like.device)[:, :n_cols]


class WeightGradient:
    """`sum over chunks of dz^T @ hidden`, each chunk added to what is there, in the weight's dtype or in float32."""

    def __init__(self, total: Tensor, how: How) -> None:
        self.total = total
        wide = how.float32_weight_gradient and total.dtype is not torch.float32
        self.acc = torch.empty(total.shape, dtype=torch.float32, device=total.device) if wide else total
        self.precision = how.precision
        self.empty = True

    def add(self, op: str, dz: Tensor, hidden: Tensor) -> None:
        residual = None if self.empty else self.acc
        dispatch.gemm(op, dz.mT, hidden.mT, self.acc, residual=residual, precision=self.precision)
        self.empty = False

    def finish(self) -> None:
        if self.acc is not self.total:
            self.total.copy_(self.acc)


class ValidTokens:
    """Which tokens are multiplied: those that count, of which there are `How.valid_rows` or fewer, or all.

    Attributes:
        order: the indices of those that are multiplied, in their order; None for all of them.
        n: how many they are.
        lost: of each token 0, or NaN if it counts but is not multiplied; None where all are multiplied.
    """

    def __init__(self, target: Tensor, ignore_index: int, how: How) -> None:
        self.order = self.lost = None
        self.n = target.numel()
        if not 0 <= how.valid_rows < self.n:
            return
        ignored = target == ignore_index
        self.n = how.valid_rows
        self.order = torch.argsort(ignored, stable=True)[: self.n]
        every = torch.full(target.shape, torch.nan, dtype=torch.float32, device=target.device)
        self.lost = every.masked_fill_(ignored, 0.0).index_fill_(0, self.order, 0.0)

    def restored(self, rows: Tensor) -> Tensor:
        """The numbers of all tokens, from those of the tokens that are multiplied; of the others `lost`, or -1."""
        if self.order is None or self.lost is None:
            return rows
        every = self.lost.clone() if rows.is_floating_point() else rows.new_full(self.lost.shape, -1)
        return every.index_copy_(0, self.order, rows)


def empty_gradients(hidden: Tensor, *others: Tensor | None, needs: Sequence[bool]) -> list[Tensor]:
    """Memory for the gradients of hidden and of the others."""
    pairs = zip((hidden, *others), needs, strict=True)
    return [
        torch.empty(t.shape if need else (0,), dtype=t.dtype, device=t.device) if t is not None else hidden.new_empty(0)
        for t, need in pairs
    ]


def walk(
    op: str, hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: ValidTokens, how: How, row_bytes: int,
    differentiate: Callable[[Tensor, slice, slice | Tensor], None], *, gradients: bool,
) -> Gradients:  # fmt: skip
    """The gradients of hidden, weight and bias, those that are needed, by chunks of tokens.

    Where a token was lost, its gradient and those of weight and bias are NaN.

    Args:
        hidden: of tokens in one dimension.
        row_bytes: of a token in a chunk.
        differentiate: is called with a chunk's logits, with its part of the tokens to multiply, and with the indices of
            its tokens. It computes losses, and where `gradients` are asked for, writes the logits' gradient over them.
    """
    device, dtype, n_cols = hidden.device, hidden.dtype, weight.shape[0]
    needs = [gradients and need for need in how.needs[:3]]
    order, lost = tokens.order, tokens.lost
    dhidden, dweight, dbias = empty_gradients(hidden, weight, bias, needs=needs)
    if lost is not None and needs[0]:
        dhidden.copy_(lost[:, None])
    of_weight = WeightGradient(dweight, how) if needs[1] else None

    rounds = of_weight is not None and of_weight.acc.dtype is not torch.float32
    size = chunk_rows(tokens.n, row_bytes, how.chunk_bytes, rounds)
    starts = range(0, tokens.n, max(1, size))
    sums = torch.empty((len(starts), n_cols), dtype=torch.float32, device=device) if needs[2] else None
    buffer = logits_buffer(size, hidden, n_cols)

    for i, first in enumerate(starts):
        part = slice(first, min(first + size, tokens.n))
        index = None if order is None else order[part]
        rows = part if index is None else index
        x, z = hidden[rows], buffer[: part.stop - first]
        dispatch.gemm(op, x, weight, z, bias, precision=how.precision)
        differentiate(z, part, rows)
        if needs[0]:
            dx = dhidden[part] if index is None else torch.empty(x.shape, dtype=dtype, device=device)
            dispatch.gemm(op, z, weight.mT, dx, precision=how.precision)
            if index is not None:
                dhidden.index_copy_(0, index, dx)
        if lost is not None and first == 0 and gradients:
            z[0] += lost.sum()  # NaN reaches every element of the other gradients
        if of_weight is not None:
            of_weight.add(op, z, x)
        if sums is not None:
            column_sum(z, sums[i])

    if not starts:
        for t in (dweight, dbias):
            t.fill_(0.0) if lost is None else t.copy_(lost.sum())
        return dhidden, dweight, dbias
    if of_weight is not None:
        of_weight.finish()
    if sums is not None:
        sum_partials(sums, dbias)
    return dhidden, dweight, dbias


def _prepare_mean(
    target: Tensor, weight: Tensor | None, token_weights: Tensor | None, losses: Tensor | None, out: Tensor,
    n_cols: int, ignore_index: int,
) -> Callable[..., None]:  # fmt: skip
    start = bind_mean(target, weight, token_weights, losses is not None, n_cols, ignore_index)
    return lambda target, weight, token_weights, losses, out, *_: start(target, weight, token_weights, losses, out)


_mean = library.Prepared(_prepare_mean)
_add_up = library.Prepared(lambda losses, loss: prepare_total(losses.numel(), 1.0, torch.float32))


class Divisor(NamedTuple):
    """What "mean" divides by: the weights of the tokens that count."""

    target: Tensor
    class_weight: Tensor | None
    token_weights: Tensor | None
    n_cols: int
    ignore_index: int

    def apply(self, losses: Tensor | None) -> Tensor:
        """The mean of the losses, or, without them, one over the divisor; 0 where that is 0."""
        out = torch.empty((), dtype=torch.float32, device=self.target.device)
        _mean(*self[:3], losses, out, *self[3:])
        return out


def shaped(result: Tensor, shape: Sequence[int]) -> Tensor:
    """A result of an op in that shape, and no view: one that leaves an autograd function can't be written in place."""
    return torch.ops.aten._unsafe_view(result, shape)


def reduced(losses: Tensor, reduction: str, shape: Sequence[int], divisor: Divisor) -> Tensor:
    """The losses of tokens in that shape, or their sum or mean."""
    if reduction == "none":
        return shaped(losses, shape)
    if reduction == "mean":
        return divisor.apply(losses)
    loss = torch.empty((), dtype=torch.float32, device=losses.device)
    _add_up(losses, loss)
    return loss


def row_scales(dloss: Tensor, n_tokens: int) -> Tensor:
    """The gradient of the loss as a float32 number for each token."""
    return dloss.reshape(-1).float().expand(n_tokens).contiguous()


# Autograd. The ops return the loss, the gradients of hidden, weight, bias and what else they learn, and what has none.


def check_dloss(op: str, dloss: Tensor, target: Tensor, reduction: str) -> None:
    library.check_floating(op, dloss=dloss)
    expected = tuple(target.shape) if reduction == "none" else ()
    if tuple(dloss.shape) != expected:
        raise ValueError(f"{op}: dloss has shape {tuple(dloss.shape)}, expected {expected} to match the loss")


def save(
    ctx: Any, op: str, inputs: tuple[Any, ...], outputs: tuple[Tensor, ...], places: Sequence[int], n_tensors: int,
    gradient: str,
) -> None:  # fmt: skip
    """Keep what the backward needs.

    Args:
        places: of hidden, weight, bias and what else is learned among the inputs.
        n_tensors: the first inputs are so many tensors; the last ones are those of `How`.
        gradient: one of `loss_gradient.GRADIENTS`.
    """
    needs = [bool(ctx.needs_input_grad[1 + i]) for i in places]
    n_how = len(How._fields)
    given = inputs[-n_how]
    if gradient == "none":
        raise ValueError(f"{op}: gradient is 'none', expected 'now' or 'later' for inputs that need one")
    if gradient == "now" and any(need and not known for need, known in zip(needs, given, strict=True)):
        raise ValueError(f"{op}: needs is {list(given)}, expected {needs}, as inputs need gradients")
    ctx.now, ctx.needs, ctx.places = gradient == "now", needs, places
    n = 1 + len(places)
    ctx.mark_non_differentiable(*outputs[n if ctx.now else 1 :])  # see `scaled`
    ctx.save_for_backward(*(outputs[1:n] if ctx.now else inputs[:n_tensors]))
    ctx.args = (*inputs[n_tensors:-n_how], needs, *inputs[1 - n_how :])


def backward(ctx: Any, backward_op: Callable[..., Gradients], dloss: Tensor | None) -> tuple[Tensor | None, ...]:
    grads: list[Tensor | None] = [None] * (len(ctx.needs_input_grad) - 1)
    if dloss is None:
        return tuple(grads)
    if ctx.now:
        pairs = zip(ctx.saved_tensors, ctx.needs, strict=True)
        found = [scaled(t, dloss) if need else t for t, need in pairs]
    else:
        found = list(backward_op(dloss, *ctx.saved_tensors, *ctx.args))
    for place, t, need in zip(ctx.places, found, ctx.needs, strict=True):
        grads[place] = t if need else None
    return tuple(grads)
