"""The fused head: cross entropy of `hidden @ weight^T + bias`, by chunks of tokens, without all logits in memory.

    z = hidden @ weight^T + bias,   loss = cross_entropy(z, target)
    dhidden = dz @ weight,   dweight = dz^T @ hidden,   dbias = sum over tokens of dz

Each chunk's logits are written into one buffer by a GEMM, become their own gradient in place, and are multiplied into
the gradients that are asked for, all in the forward. The gradient of the weight is the residual of the next chunk's
GEMM, which writes it in place: a program reads the tile that it writes, and no other program does. So beside inputs and
results there is one chunk of logits.

The gradients are known in the forward but for one factor, the gradient of the loss: see primitives/loss_gradient.py.
Without a reduction that factor is a number of each token, and in float16 a gradient could underflow before a loss
scaler's factor reaches it. In both cases the backward computes the logits again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor

from rooftile import launching, library
from rooftile.ops.cross_entropy import Reduction, TokenStats, forward
from rooftile.ops.gemm import dispatch
from rooftile.ops.gemm.column_sum import column_sum
from rooftile.ops.gemm.config import Precision
from rooftile.primitives.loss_gradient import scaled
from rooftile.primitives.partials import prepare_total, sum_partials

_NAME = "linear_cross_entropy"
CHUNK_BYTES = 256 << 20  # of a chunk's logits, unless more rows are needed
LEAST_ROWS = 1024  # fewer leave a GEMM with too few operations a byte of the weight: an H100's ridge is near 300
MOST_CHUNKS = 4  # where each chunk rounds the gradient of the weight
_ROWS = 128  # of a tile

Gradients = tuple[Tensor, Tensor, Tensor]


@dataclasses.dataclass(frozen=True)
class How:
    """What a call asks for besides the loss, as the op's arguments after the loss's.

    Attributes:
        needs: whether hidden, weight and bias get gradients.
        chunk_bytes: 0 is the default.
        valid_rows: -1 if the host does not know.
    """

    needs: Sequence[bool]
    float32_weight_gradient: bool
    chunk_bytes: int
    valid_rows: int
    precision: str


def _split(args: Sequence[Any]) -> tuple[forward.Options, How]:
    n = len(dataclasses.fields(forward.Options))
    return forward.Options(*args[:n]), How(*args[n:])


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


def _check(
    op: str, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, class_weight: Tensor | None,
    token_weights: Tensor | None, options: forward.Options, how: How,
) -> None:  # fmt: skip
    library.check_floating(
        op, hidden=hidden, weight=weight, bias=bias, class_weight=class_weight, token_weights=token_weights
    )
    if hidden.dim() == 0:
        raise ValueError(f"{op}: hidden has shape (), expected at least one dimension")
    dispatch.check_dtype(op, "weight", weight, "hidden", hidden)
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1] or weight.shape[0] == 0:
        raise ValueError(
            f"{op}: weight has shape {tuple(weight.shape)}, expected (V, {hidden.shape[-1]}), V of 1 or more, to match "
            "hidden's last dimension"
        )
    classes, leading = weight.shape[0], tuple(hidden.shape[:-1])
    for name, tensor in (("bias", bias), ("class_weight", class_weight)):
        if tensor is not None and tensor.shape != (classes,):
            raise ValueError(
                f"{op}: {name} has shape {tuple(tensor.shape)}, expected ({classes},) to match weight's rows"
            )
    if bias is not None and bias.dtype not in (hidden.dtype, torch.float32):
        raise TypeError(f"{op}: bias has dtype {bias.dtype}, expected {hidden.dtype} to match hidden, or torch.float32")
    if target.dtype not in forward.TARGETS:
        raise TypeError(f"{op}: target has dtype {target.dtype}, expected int64 or int32, the indices of classes")
    for name, tensor in (("target", target), ("token_weights", token_weights)):
        if tensor is not None and tuple(tensor.shape) != leading:
            raise ValueError(
                f"{op}: {name} has shape {tuple(tensor.shape)}, expected {leading} to match hidden's leading dimensions"
            )
    forward.check_options(op, options)
    dispatch.check_precision(op, how.precision)


def _prepare_rows(
    logits: Tensor, target: Tensor, weight: Tensor | None, token_weights: Tensor | None, inverse: Tensor | None,
    losses: Tensor, logprobs: Tensor | None, entropy: Tensor | None, argmax: Tensor | None, *args: Any,
) -> Callable[..., None]:  # fmt: skip
    options = forward.Options(*args)
    start = forward.bind_rows(
        logits, target, weight, token_weights, options, in_place=options.gradient == "now"
    )  # fmt: skip

    def run(
        logits: Tensor, target: Tensor, weight: Tensor | None, token_weights: Tensor | None, inverse: Tensor | None,
        losses: Tensor, logprobs: Tensor | None, entropy: Tensor | None, argmax: Tensor | None, *_: Any,
    ) -> None:  # fmt: skip
        start(logits, target, weight, token_weights, inverse, losses, None, None, logprobs, entropy, argmax)

    return run


def _prepare_mean(
    target: Tensor, weight: Tensor | None, token_weights: Tensor | None, losses: Tensor | None, out: Tensor,
    n_cols: int, ignore_index: int,
) -> Callable[..., None]:  # fmt: skip
    start = forward.bind_mean(target, weight, token_weights, losses is not None, n_cols, ignore_index)
    return lambda target, weight, token_weights, losses, out, *_: start(target, weight, token_weights, losses, out)


_losses_of_rows = library.Prepared(_prepare_rows)
_mean = library.Prepared(_prepare_mean)
_add_up = library.Prepared(lambda losses, loss: prepare_total(losses.numel(), 1.0, torch.float32))


class _WeightGradient:
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


def _valid_first(target: Tensor, options: forward.Options, how: How) -> Tensor | None:
    """The indices of the tokens that count, in their order; None for all of them."""
    if how.valid_rows < 0 or how.valid_rows >= target.numel():
        return None
    return torch.argsort(target == options.ignore_index, stable=True)[: how.valid_rows]


def _restored(rows: Tensor, order: Tensor | None, target: Tensor, ignore_index: int) -> Tensor:
    """The numbers of all tokens, from those of the tokens in `order`.

    Of the others they are 0 (-1 of an index) where the token is ignored, and NaN where it was dropped by mistake.
    """
    if order is None:
        return rows
    if rows.dtype is torch.int64:
        every = rows.new_full(target.shape, -1)
    else:
        every = rows.new_full(target.shape, torch.nan).masked_fill_(target == ignore_index, 0.0)
    return every.index_copy_(0, order, rows)


def _empty_gradients(hidden: Tensor, weight: Tensor, bias: Tensor | None, needs: Sequence[bool]) -> list[Tensor]:
    pairs = zip((hidden, weight, bias), needs, strict=True)
    return [
        torch.empty(t.shape if need else (0,), dtype=t.dtype, device=t.device) if t is not None else hidden.new_empty(0)
        for t, need in pairs
    ]


def _walk(
    op: str, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, class_weight: Tensor | None,
    token_weights: Tensor | None, scales: Tensor | None, options: forward.Options, how: How,
) -> tuple[list[Tensor], Gradients]:  # fmt: skip
    """The losses of all tokens, the statistics if asked for, and the gradients if `options.gradient` is "now".

    Args:
        hidden, target, token_weights, scales: of tokens in one dimension.
        token_weights: what "mean" divides by the sum of.
        scales: what the losses of the tokens are multiplied by.
    """
    device, dtype, ignored = hidden.device, hidden.dtype, options.ignore_index
    n_cols, now = weight.shape[0], options.gradient == "now"
    needs = [now and need for need in how.needs]
    n_tokens = hidden.shape[0]
    order = _valid_first(target, options, how)
    n_rows = n_tokens if order is None else int(order.shape[0])

    found = [torch.empty(n_rows, dtype=torch.float32, device=device)]
    if options.stats:
        found += [torch.empty(n_rows, dtype=t, device=device) for t in (torch.float32, torch.float32, torch.int64)]
    dhidden, dweight, dbias = _empty_gradients(hidden, weight, bias, needs)
    if order is not None:
        dhidden.zero_()
    of_weight = _WeightGradient(dweight, how) if needs[1] else None

    # A row begins at a multiple of 32 bytes, which TMA and vectors need, whatever the number of classes.
    stride = library.cdiv(n_cols, 16) * 16
    rounds = of_weight is not None and of_weight.acc.dtype is not torch.float32
    size = chunk_rows(n_rows, stride * dtype.itemsize, how.chunk_bytes, rounds)
    starts = range(0, n_rows, max(1, size))
    sums = torch.empty((len(starts), n_cols), dtype=torch.float32, device=device) if needs[2] else None
    buffer = torch.empty((size, stride), dtype=dtype, device=device)[:, :n_cols]
    inverse = None
    if options.reduction == "mean" and now and n_rows:
        inverse = torch.empty((), dtype=torch.float32, device=device)
        _mean(target, class_weight, token_weights, None, inverse, n_cols, ignored)
    flags = dataclasses.astuple(options)

    for i, first in enumerate(starts):
        part = slice(first, min(first + size, n_rows))
        index = None if order is None else order[part]
        rows = part if index is None else index
        x, y, z = hidden[rows], target[rows], buffer[: part.stop - first]
        dispatch.gemm(op, x, weight, z, bias, precision=how.precision)
        stats: list[Tensor | None] = [t[part] for t in found[1:]]
        stats = stats or [None] * 3
        scale = None if scales is None else scales[rows]
        _losses_of_rows(z, y, class_weight, scale, inverse, found[0][part], *stats, *flags)
        if needs[0]:
            dx = dhidden[part] if index is None else torch.empty(x.shape, dtype=dtype, device=device)
            dispatch.gemm(op, z, weight.mT, dx, precision=how.precision)
            if index is not None:
                dhidden.index_copy_(0, index, dx)
        if of_weight is not None:
            of_weight.add(op, z, x)
        if sums is not None:
            column_sum(z, sums[i])

    if of_weight is not None:
        of_weight.finish()
    if sums is not None:
        sum_partials(sums, dbias)
    return [_restored(t, order, target, ignored) for t in found], (dhidden, dweight, dbias)


def _flat(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.reshape(-1).contiguous()


def _contiguous(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.contiguous()


Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def _fake(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, class_weight: Tensor | None,
    token_weights: Tensor | None, *args: Any,
) -> Outputs:  # fmt: skip
    options, how = _split(args)
    _check(_NAME, hidden, weight, target, bias, class_weight, token_weights, options, how)
    device = hidden.device
    needs = how.needs if options.gradient == "now" else (False,) * 3
    stats = [
        torch.empty(target.shape if options.stats else (0,), dtype=dtype, device=device)
        for dtype in (torch.float32, torch.float32, torch.int64)
    ]
    loss = torch.empty(target.shape if options.reduction == "none" else (), dtype=torch.float32, device=device)
    return (loss, *_empty_gradients(hidden, weight, bias, needs), *stats)  # type: ignore[return-value]


def _launch(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, class_weight: Tensor | None,
    token_weights: Tensor | None, *args: Any,
) -> Outputs:  # fmt: skip
    if isinstance(hidden, FunctionalTensor):
        raise launching.Untraceable("a number of launches that depends on the number of tokens")
    options, how = _split(args)
    _check(_NAME, hidden, weight, target, bias, class_weight, token_weights, options, how)
    if not target.numel() or how.valid_rows == 0:
        results = _fake(hidden, weight, target, bias, class_weight, token_weights, *args)
        for t in results:
            t.zero_()
        if target.numel():
            flat = target.reshape(-1)
            losses = torch.where(flat == options.ignore_index, 0.0, torch.nan)
            results[0].copy_(losses.view(target.shape) if options.reduction == "none" else losses.sum())
            results[6].fill_(-1)
        return results
    leading = target.shape
    target, tokens, class_weight = target.reshape(-1).contiguous(), _flat(token_weights), _contiguous(class_weight)
    row_options = options if options.gradient == "now" else dataclasses.replace(options, gradient="none")
    found, gradients = _walk(
        _NAME,
        dispatch.as_rows(hidden),
        weight,
        target,
        _contiguous(bias),
        class_weight,
        tokens,
        tokens,
        row_options,
        how,
    )
    losses, *stats = found
    if options.reduction == "none":
        loss = losses.view(leading)
    else:
        loss = torch.empty((), dtype=torch.float32, device=hidden.device)
        if options.reduction == "mean":
            _mean(target, class_weight, tokens, losses, loss, weight.shape[0], options.ignore_index)
        else:
            _add_up(losses, loss)
    dhidden, dweight, dbias = gradients
    if how.needs[0] and options.gradient == "now":
        dhidden = dhidden.view(hidden.shape)
    stats = [t.view(leading) for t in stats] or [
        torch.empty(0, dtype=dtype, device=hidden.device) for dtype in (torch.float32, torch.float32, torch.int64)
    ]
    return (loss, dhidden, dweight, dbias, *stats)  # type: ignore[return-value]


def _check_dloss(dloss: Tensor, target: Tensor, options: forward.Options) -> None:
    op = f"{_NAME}_backward"
    library.check_floating(op, dloss=dloss)
    expected = tuple(target.shape) if options.reduction == "none" else ()
    if tuple(dloss.shape) != expected:
        raise ValueError(f"{op}: dloss has shape {tuple(dloss.shape)}, expected {expected} to match the loss")


def _fake_backward(
    dloss: Tensor, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, class_weight: Tensor | None,
    token_weights: Tensor | None, *args: Any,
) -> Gradients:  # fmt: skip
    options, how = _split(args)
    _check_dloss(dloss, target, options)
    _check(f"{_NAME}_backward", hidden, weight, target, bias, class_weight, token_weights, options, how)
    return tuple(_empty_gradients(hidden, weight, bias, how.needs))  # type: ignore[return-value]


def _launch_backward(
    dloss: Tensor, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, class_weight: Tensor | None,
    token_weights: Tensor | None, *args: Any,
) -> Gradients:  # fmt: skip
    if isinstance(hidden, FunctionalTensor):
        raise launching.Untraceable("a number of launches that depends on the number of tokens")
    options, how = _split(args)
    _check_dloss(dloss, target, options)
    _check(f"{_NAME}_backward", hidden, weight, target, bias, class_weight, token_weights, options, how)
    if not target.numel() or how.valid_rows == 0:
        results = _fake_backward(dloss, hidden, weight, target, bias, class_weight, token_weights, *args)
        for t in results:
            t.zero_()
        return results
    tokens = _flat(token_weights)
    scales = dloss.reshape(-1).float()
    scales = scales.expand(target.numel()).contiguous() if tokens is None else scales * tokens.float()
    options = dataclasses.replace(options, gradient="now", stats=False)
    _, (dhidden, dweight, dbias) = _walk(
        f"{_NAME}_backward", dispatch.as_rows(hidden), weight, target.reshape(-1).contiguous(), _contiguous(bias),
        _contiguous(class_weight), tokens, scales, options, how,
    )  # fmt: skip
    return dhidden.view(hidden.shape) if how.needs[0] else dhidden, dweight, dbias


def _check_gradients(inputs: tuple[Any, ...]) -> None:
    for name, tensor in (("class_weight", inputs[4]), ("token_weights", inputs[5])):
        if tensor is not None and tensor.requires_grad:
            raise ValueError(f"{_NAME}: {name} requires grad, but gets no gradient; pass {name}.detach()")


_PLACES = (0, 1, 3)  # of hidden, weight and bias among the op's arguments


def _save(ctx, inputs, outputs) -> None:
    options, how = _split(inputs[6:])
    needs = [bool(ctx.needs_input_grad[1 + i]) for i in _PLACES]
    if options.gradient == "none":
        raise ValueError(f"{_NAME}: gradient is 'none', expected 'now' or 'later' for inputs that need one")
    if options.gradient == "now" and any(need and not given for need, given in zip(needs, how.needs, strict=True)):
        raise ValueError(f"{_NAME}: needs is {list(how.needs)}, expected {needs}, as inputs need gradients")
    ctx.mark_non_differentiable(*outputs[1:])
    ctx.now, ctx.needs = options.gradient == "now", needs
    if ctx.now:
        ctx.save_for_backward(*outputs[:4])
    else:
        ctx.save_for_backward(*inputs[:6])
        ctx.args = (*dataclasses.astuple(options), needs, *dataclasses.astuple(how)[1:])


def _backward(ctx, dloss: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    grads: list[Tensor | None] = [None] * 18
    if dloss is None:
        return tuple(grads)
    if ctx.now:
        loss, *found = ctx.saved_tensors
        found = [scaled(t, dloss, loss) if need else t for t, need in zip(found, ctx.needs, strict=True)]
    else:
        found = _backward_op(dloss, *ctx.saved_tensors, *ctx.args)
    for place, t, need in zip(_PLACES, found, ctx.needs, strict=True):
        grads[place] = t if need else None
    return tuple(grads)


_TENSORS = "Tensor hidden, Tensor weight, Tensor target, Tensor? bias, Tensor? class_weight, Tensor? token_weights"
_NUMBERS = (
    "int ignore_index, float label_smoothing, float z_loss, float softcap, str reduction, str gradient, bool stats, "
    "bool[] needs, bool float32_weight_gradient, int chunk_bytes, int valid_rows, str precision"
)

_backward_op = library.define(
    f"{_NAME}_backward(Tensor dloss, {_TENSORS}, {_NUMBERS}) -> (Tensor, Tensor, Tensor)",
    launch=_launch_backward,
    fake=_fake_backward,
)
_op = library.define(
    f"{_NAME}({_TENSORS}, {_NUMBERS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    launch=_launch,
    fake=_fake,
    autograd=library.Autograd(_save, _backward, _check_gradients),
)


def _at_least(name: str, value: object, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{_NAME}: {name} is {library.named(value)}, expected an int or None")
    if value < least:
        raise ValueError(f"{_NAME}: {name} is {value}, expected {least} or more, or None")
    return value


@overload
def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, *, class_weight: Tensor | None = None,
    token_weights: Tensor | None = None, ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0,
    softcap: float | None = None, reduction: Reduction = "mean", chunk_bytes: int | None = None,
    valid_rows: int | None = None, float32_weight_gradient: bool = False, precision: Precision = "ieee",
    return_stats: Literal[False] = False,
) -> Tensor: ...  # fmt: skip


@overload
def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, *, class_weight: Tensor | None = None,
    token_weights: Tensor | None = None, ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0,
    softcap: float | None = None, reduction: Reduction = "mean", chunk_bytes: int | None = None,
    valid_rows: int | None = None, float32_weight_gradient: bool = False, precision: Precision = "ieee",
    return_stats: Literal[True],
) -> tuple[Tensor, TokenStats]: ...  # fmt: skip


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    class_weight: Tensor | None = None,
    token_weights: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: Reduction = "mean",
    chunk_bytes: int | None = None,
    valid_rows: int | None = None,
    float32_weight_gradient: bool = False,
    precision: Precision = "ieee",
    return_stats: bool = False,
) -> Tensor | tuple[Tensor, TokenStats]:
    """`cross_entropy(hidden @ weight^T + bias, target)`, of which only a chunk of the logits is in memory at a time.

    The logits have float32 sums and are rounded to hidden's dtype; the loss is computed from them in float32.

    Args:
        hidden: `(..., H)`, float32, float16 or bfloat16: the last hidden states.
        weight: `(V, H)` of hidden's dtype, as `torch.nn.Linear` keeps the head's.
        target: `(...)`, int64 or int32, the index of each token's class.
        bias: `(V,)`, of hidden's dtype or float32.
        class_weight, token_weights, ignore_index, label_smoothing, z_loss, softcap, reduction: as in `cross_entropy`,
            whose `weight` is `class_weight` here.
        chunk_bytes: the memory of a chunk's logits, at least a token's. By default 256 MiB or 1024 tokens, whichever is
            more, and, where each chunk rounds the gradient of the weight, at least a quarter of the tokens: 0.5 GiB at
            8192 tokens and 128256 classes in bfloat16.
        valid_rows: how many targets at most are not `ignore_index`, if the host knows it. Then only so many tokens are
            multiplied. By default all are: the host does not wait for the device to count. If more targets count, the
            losses of the tokens beyond, and so a reduced loss, are NaN.
        float32_weight_gradient: add up the gradient of a 16-bit weight over the chunks in float32, `4 V H` bytes more,
            and round it once. By default it is rounded after each chunk.
        precision: of float32 operands, as in `matmul`.
        return_stats: also return `TokenStats`: log-probability, entropy and argmax of each token.

    Returns:
        The loss in float32: without dimensions, or `(...)` with "none". With `return_stats`, the loss and the
        statistics, which have no gradients; `-linear_cross_entropy(..., reduction="none")` is a log-probability that
        has one. Under `torch.autocast` hidden, weight and bias are cast to its dtype first.

        With a reduction, in float32 and bfloat16, the forward computes the gradients that are asked for, and the
        backward multiplies them in place by the gradient of the loss, at the cost of another pass unless that is 1.
        With "none" and in float16 the backward computes the logits again.

    Raises:
        ValueError: a shape does not match; a number is out of range; weights of classes or tokens require grad;
            reduction or precision is another word; a device is the CPU without the interpreter, or devices differ.
        TypeError: a dtype is none of those named, or dtypes differ.
    """
    if dispatch.autocast_dtype(hidden) is not None:
        hidden, weight, bias = dispatch.autocast(hidden, weight, bias)  # type: ignore[assignment]
    budget = 0 if chunk_bytes is None else _at_least("chunk_bytes", chunk_bytes, 1)
    valid = -1 if valid_rows is None else _at_least("valid_rows", valid_rows, 0)
    if not isinstance(float32_weight_gradient, bool):
        raise TypeError(
            f"{_NAME}: float32_weight_gradient is {library.named(float32_weight_gradient)}, expected a bool"
        )
    learning = torch.is_grad_enabled()
    needs = [learning and isinstance(t, Tensor) and t.requires_grad for t in (hidden, weight, bias)]
    gradient = "none"
    if any(needs):
        gradient = "later" if reduction == "none" or hidden.dtype is torch.float16 else "now"
    loss, _, _, _, *stats = _op(
        hidden, weight, target, bias, class_weight, token_weights, ignore_index, label_smoothing, z_loss,
        0.0 if softcap is None else softcap, reduction, gradient, return_stats,
        needs, float32_weight_gradient, budget, valid, precision,
    )  # fmt: skip
    return (loss, TokenStats(*stats)) if return_stats else loss
