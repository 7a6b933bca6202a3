"""The fused head: cross entropy of `hidden @ weight^T + bias`, by chunks of tokens, without all logits in memory.

    z = hidden @ weight^T + bias,   loss = cross_entropy(z, target)

With a LoRA adapter of the head z has `low @ up^T` besides, of as many columns as it has ranks: a second GEMM adds it to
a chunk's logits, and from their gradient two more make those of low and up.

head.py has the walk over chunks and the gradients. Of each chunk's logits the kernel of ops/cross_entropy computes the
losses, and writes their gradient over them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor

from rooftile import library, sharding
from rooftile.ops.cross_entropy import Reduction, TokenStats, forward
from rooftile.ops.fused_head import distributed as sharded
from rooftile.ops.fused_head import head
from rooftile.ops.fused_head.head import Gradients, How
from rooftile.ops.gemm import dispatch
from rooftile.ops.gemm.config import Precision
from rooftile.primitives.loss_gradient import gradient_when

_NAME = "linear_cross_entropy"
_PLACES = (0, 1, 3, 6, 7)  # of hidden, weight, bias, low and up among the op's arguments
_TENSORS = 8
_STATS = (torch.float32, torch.float32, torch.int64)


def _split(args: Sequence[Any]) -> tuple[forward.Options, How]:
    n = len(dataclasses.fields(forward.Options))
    return forward.Options(*args[:n]), How(*args[n:])


def _check_adapter(op: str, hidden: Tensor, weight: Tensor, low: Tensor | None, up: Tensor | None) -> None:
    if low is None or up is None:
        if low is not up:
            raise ValueError(f"{op}: one of low and up is None, expected both or neither")
        return
    for name, t in (("adapter's low", low), ("adapter's up", up)):
        library.check_floating(op, **{name: t})
        dispatch.check_dtype(op, name, t, "hidden", hidden)
    if low.dim() == 0 or low.shape[:-1] != hidden.shape[:-1] or low.shape[-1] == 0:
        expected = ", ".join((*map(str, hidden.shape[:-1]), "R"))
        raise ValueError(
            f"{op}: adapter's low has shape {tuple(low.shape)}, expected ({expected}), R of 1 or more, to match "
            "hidden's leading dimensions"
        )
    if up.shape != (weight.shape[0], low.shape[-1]):
        raise ValueError(
            f"{op}: adapter's up has shape {tuple(up.shape)}, expected ({weight.shape[0]}, {low.shape[-1]}) to match "
            "weight's rows and low's last dimension"
        )


def _check(
    op: str, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, class_weight: Tensor | None,
    token_weights: Tensor | None, low: Tensor | None, up: Tensor | None, options: forward.Options, how: How,
) -> None:  # fmt: skip
    head.check_head(op, hidden, weight, bias)
    _check_adapter(op, hidden, weight, low, up)
    library.check_floating(op, class_weight=class_weight, token_weights=token_weights)
    classes = weight.shape[0]
    if class_weight is not None and class_weight.shape != (classes,):
        raise ValueError(
            f"{op}: class_weight has shape {tuple(class_weight.shape)}, expected ({classes},) to match weight's rows"
        )
    head.check_classes(op, "target", target, hidden)
    head.check_tokens(op, "token_weights", token_weights, hidden)
    forward.check_options(op, options)
    head.check_temperature(op, options.temperature)
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


_losses_of_rows = library.Prepared(_prepare_rows)


class _Adapter:
    """`low @ up^T`, and the gradients of low and up.

    Args:
        low: of tokens in one dimension.
        needs: whether low and up get gradients.
    """

    def __init__(
        self, op: str, low: Tensor, up: Tensor, tokens: head.ValidTokens, how: How, needs: Sequence[bool]
    ) -> None:
        self.op, self.low, self.up, self.tokens, self.how = op, low, up, tokens, how
        self.dlow, self.dup = head.empty_gradients(low, up, needs=needs)
        if tokens.lost is not None and needs[0]:
            self.dlow.copy_(tokens.lost[:, None])
        # In float32 over the chunks, which costs little: it has as many columns as ranks.
        how = how._replace(float32_weight_gradient=True)
        self.of_up = head.WeightGradient(self.dup, how) if needs[1] else None

    def add_to(self, z: Tensor, rows: slice | Tensor) -> None:
        dispatch.gemm(self.op, self.low[rows], self.up, z, residual=z, precision=self.how.precision)

    def differentiate(self, dz: Tensor, rows: slice | Tensor) -> None:
        if self.dlow.numel():
            part = self.dlow[rows] if isinstance(rows, slice) else torch.empty_like(self.low[: len(dz)])
            dispatch.gemm(self.op, dz, self.up.mT, part, precision=self.how.precision)
            if isinstance(rows, Tensor):
                self.dlow.index_copy_(0, rows, part)
        if self.of_up is not None:
            self.of_up.add(self.op, dz, self.low[rows])

    def gradients(self) -> Gradients:
        if self.of_up is not None and self.of_up.empty:
            self.dup.zero_()
        elif self.of_up is not None:
            self.of_up.finish()
        if self.tokens.lost is not None:
            self.dup += self.tokens.lost.sum()  # NaN if a token was lost
        return self.dlow, self.dup


def _walk(
    op: str, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, class_weight: Tensor | None,
    token_weights: Tensor | None, low: Tensor | None, up: Tensor | None, scales: Tensor | None,
    options: forward.Options, how: How,
) -> tuple[list[Tensor], Gradients]:  # fmt: skip
    """The losses of all tokens, the statistics if asked for, and the gradients if `options.gradient` is "now".

    Args:
        hidden, target, token_weights, low, scales: of tokens in one dimension.
        token_weights: what "mean" divides by the sum of.
        scales: what the losses of the tokens are multiplied by.
    """
    device, ignored, n_cols = hidden.device, options.ignore_index, weight.shape[0]
    tokens = head.ValidTokens(target, ignored, how)
    found = [torch.empty(tokens.n, dtype=torch.float32, device=device)]
    if options.stats:
        found += [torch.empty(tokens.n, dtype=dtype, device=device) for dtype in _STATS]
    divisor = head.Divisor(target, class_weight, token_weights, n_cols, ignored)
    now = options.gradient == "now"
    inverse = divisor.apply(None) if now and options.reduction == "mean" else None
    flags = dataclasses.astuple(options)
    adapter = None
    if low is not None and up is not None:
        adapter = _Adapter(op, low, up, tokens, how, [now and need for need in how.needs[3:]])

    def differentiate(z: Tensor, part: slice, rows: slice | Tensor) -> None:
        stats: list[Tensor | None] = [t[part] for t in found[1:]]
        scale = None if scales is None else scales[rows]
        if adapter is not None:
            adapter.add_to(z, rows)
        _losses_of_rows(z, target[rows], class_weight, scale, inverse, found[0][part], *stats or [None] * 3, *flags)
        if adapter is not None:
            adapter.differentiate(z, rows)

    row_bytes = head.logits_row_bytes(hidden, n_cols)
    gradients = head.walk(op, hidden, weight, bias, tokens, how, row_bytes, differentiate, gradients=now)
    of_adapter = (hidden.new_empty(0), hidden.new_empty(0)) if adapter is None else adapter.gradients()
    return [tokens.restored(t) for t in found], (*gradients, *of_adapter)


def _flat(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.reshape(-1).contiguous()


def _contiguous(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.contiguous()


def _rows(t: Tensor | None) -> Tensor | None:
    return None if t is None else dispatch.as_rows(t)


def _fake(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, class_weight: Tensor | None,
    token_weights: Tensor | None, low: Tensor | None, up: Tensor | None, *args: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    options, how = _split(args)
    _check(_NAME, hidden, weight, target, bias, class_weight, token_weights, low, up, options, how)
    device = hidden.device
    needs = how.needs if options.gradient == "now" else (False,) * len(_PLACES)
    stats = [torch.empty(target.shape if options.stats else (0,), dtype=dtype, device=device) for dtype in _STATS]
    loss = torch.empty(target.shape if options.reduction == "none" else (), dtype=torch.float32, device=device)
    return (loss, *head.empty_gradients(hidden, weight, bias, low, up, needs=needs), *stats)


def _launch(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, class_weight: Tensor | None,
    token_weights: Tensor | None, low: Tensor | None, up: Tensor | None, *args: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    head.refuse_tracing(hidden)
    options, how = _split(args)
    _check(_NAME, hidden, weight, target, bias, class_weight, token_weights, low, up, options, how)
    if not target.numel():
        results = _fake(hidden, weight, target, bias, class_weight, token_weights, low, up, *args)
        for t in results:
            t.zero_()
        return results
    leading = target.shape
    target, tokens, class_weight = target.reshape(-1).contiguous(), _flat(token_weights), _contiguous(class_weight)
    row_options = options if options.gradient == "now" else dataclasses.replace(options, gradient="none")
    found, gradients = _walk(
        _NAME, dispatch.as_rows(hidden), weight, target, _contiguous(bias), class_weight, tokens, _rows(low), up,
        tokens, row_options, how,
    )  # fmt: skip
    losses, *stats = found
    dhidden, dweight, dbias, dlow, dup = gradients
    if how.needs[0] and options.gradient == "now":
        dhidden = head.shaped(dhidden, hidden.shape)
    if low is not None and how.needs[3] and options.gradient == "now":
        dlow = head.shaped(dlow, low.shape)
    stats = [t.view(leading) for t in stats] or [torch.empty(0, dtype=dtype, device=hidden.device) for dtype in _STATS]
    divisor = head.Divisor(target, class_weight, tokens, weight.shape[0], options.ignore_index)
    loss = head.reduced(losses, options.reduction, leading, divisor)
    return (loss, dhidden, dweight, dbias, dlow, dup, *stats)


def _fake_backward(
    dloss: Tensor, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, class_weight: Tensor | None,
    token_weights: Tensor | None, low: Tensor | None, up: Tensor | None, *args: Any,
) -> Gradients:  # fmt: skip
    options, how = _split(args)
    op = f"{_NAME}_backward"
    head.check_dloss(op, dloss, target, options.reduction)
    _check(op, hidden, weight, target, bias, class_weight, token_weights, low, up, options, how)
    return tuple(head.empty_gradients(hidden, weight, bias, low, up, needs=how.needs))


def _launch_backward(
    dloss: Tensor, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, class_weight: Tensor | None,
    token_weights: Tensor | None, low: Tensor | None, up: Tensor | None, *args: Any,
) -> Gradients:  # fmt: skip
    head.refuse_tracing(hidden)
    options, how = _split(args)
    op = f"{_NAME}_backward"
    head.check_dloss(op, dloss, target, options.reduction)
    _check(op, hidden, weight, target, bias, class_weight, token_weights, low, up, options, how)
    if not target.numel():
        results = _fake_backward(dloss, hidden, weight, target, bias, class_weight, token_weights, low, up, *args)
        for t in results:
            t.zero_()
        return results
    tokens = _flat(token_weights)
    scales = head.row_scales(dloss, target.numel())
    scales = scales if tokens is None else scales * tokens.float()
    options = dataclasses.replace(options, gradient="now", stats=False)
    _, (dhidden, dweight, dbias, dlow, dup) = _walk(
        op, dispatch.as_rows(hidden), weight, target.reshape(-1).contiguous(), _contiguous(bias),
        _contiguous(class_weight), tokens, _rows(low), up, scales, options, how,
    )  # fmt: skip
    dhidden = dhidden.view(hidden.shape) if how.needs[0] else dhidden
    return dhidden, dweight, dbias, dlow.view(low.shape) if low is not None and how.needs[3] else dlow, dup


def _check_gradients(inputs: tuple[Any, ...]) -> None:
    for name, tensor in (("class_weight", inputs[4]), ("token_weights", inputs[5])):
        if tensor is not None and tensor.requires_grad:
            raise ValueError(f"{_NAME}: {name} requires grad, but gets no gradient; pass {name}.detach()")


def _save(ctx, inputs, outputs) -> None:
    options, _ = _split(inputs[_TENSORS:])
    head.save(ctx, _NAME, inputs, outputs, _PLACES, _TENSORS, options.gradient)


def _backward(ctx, dloss: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    return head.backward(ctx, _backward_op, dloss)


_SCHEMA = (
    "Tensor hidden, Tensor weight, Tensor target, Tensor? bias, Tensor? class_weight, Tensor? token_weights, "
    "Tensor? low, Tensor? up, "
    "int ignore_index, float label_smoothing, float z_loss, float softcap, str reduction, str gradient, bool stats, "
    f"float temperature, {head.HOW}"
)

_backward_op = library.define(
    f"{_NAME}_backward(Tensor dloss, {_SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    launch=_launch_backward,
    fake=_fake_backward,
)
_op = library.define(
    f"{_NAME}({_SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    launch=_launch,
    fake=_fake,
    autograd=library.Autograd(_save, _backward, _check_gradients),
)


def _two(given: object) -> tuple[Tensor, Tensor] | tuple[None, None]:
    if given is None:
        return None, None
    if not isinstance(given, tuple) or len(given) != 2:
        raise TypeError(f"{_NAME}: adapter is {library.named(given)}, expected a tuple of two tensors or None")
    library.check_tensors(_NAME, **dict(zip(("adapter's low", "adapter's up"), given, strict=True)))
    return given


@overload
def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, *, class_weight: Tensor | None = None,
    token_weights: Tensor | None = None, adapter: tuple[Tensor, Tensor] | None = None,
    ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0,
    softcap: float | None = None, temperature: float = 1.0, reduction: Reduction = "mean",
    chunk_bytes: int | None = None, valid_rows: int | None = None, float32_weight_gradient: bool = False,
    precision: Precision = "ieee",
    return_stats: Literal[False] = False,
) -> Tensor: ...  # fmt: skip


@overload
def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, *, class_weight: Tensor | None = None,
    token_weights: Tensor | None = None, adapter: tuple[Tensor, Tensor] | None = None,
    ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0,
    softcap: float | None = None, temperature: float = 1.0, reduction: Reduction = "mean",
    chunk_bytes: int | None = None, valid_rows: int | None = None, float32_weight_gradient: bool = False,
    precision: Precision = "ieee",
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
    adapter: tuple[Tensor, Tensor] | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    temperature: float = 1.0,
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
        adapter: `(low, up)` of hidden's dtype, `(..., R)` and `(V, R)`: `low @ up^T` is added to the logits, and both
            get gradients. For LoRA on the head they are `x @ lora_a^T` and `scale * lora_b`. The sums of up's gradient
            over the chunks are float32.
        temperature: divides the logits, after the soft cap: 1e-30 or more. Each value is compiled into its own kernel.
        chunk_bytes: the memory of a chunk's logits, at least a token's. By default 512 MiB or 1024 tokens, whichever is
            more, and, where each chunk rounds the gradient of the weight, at least a quarter of the tokens: 0.5 GiB at
            8192 tokens and 128256 classes in bfloat16.
        valid_rows: how many targets at most are not `ignore_index`, if the host knows it. Then only so many tokens are
            multiplied. By default all are: the host does not wait for the device to count. If more targets count, the
            losses of the tokens beyond, and so a reduced loss, are NaN, and so are the gradients of these tokens, of
            weight and of bias.
        float32_weight_gradient: add up the gradient of a 16-bit weight over the chunks in float32, `4 V H` bytes more,
            and round it once. By default it is rounded after each chunk.
        precision: of float32 operands, as in `matmul`.
        return_stats: also return `TokenStats`: log-probability, entropy and argmax of each token.

    With DTensor the rows of weight may be sharded over ranks, and tokens over others, with all of these options except
    an adapter. The loss and the statistics are DTensor.

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
    library.check_tensors(_NAME, hidden=hidden)
    library.check_int64(_NAME, ignore_index=ignore_index)
    low, up = _two(adapter)
    if dispatch.autocast_dtype(hidden) is not None:
        hidden, weight, bias, low, up = dispatch.autocast(hidden, weight, bias, low, up)  # type: ignore[assignment]
    how = head.asked(
        _NAME, (hidden, weight, bias, low, up), float32_weight_gradient, chunk_bytes, valid_rows, precision
    )
    gradient = gradient_when(any(how.needs), reduction, hidden.dtype, in_graphs=True)
    if sharding.is_distributed(hidden, weight):
        if adapter is not None:
            raise ValueError(f"{_NAME}: adapter is given, expected None with DTensor")
        cap = 0.0 if softcap is None else softcap
        options = forward.Options(
            ignore_index, label_smoothing, z_loss, cap, reduction, gradient, return_stats, temperature
        )
        tensors = hidden, weight, target, bias, class_weight, token_weights
        _check(_NAME, *tensors, None, None, options, how)
        _check_gradients(tensors)
        loss, *stats = sharded.linear_cross_entropy(*tensors, options, how)
        return (loss, TokenStats(*stats)) if return_stats else loss
    loss, _, _, _, _, _, *stats = _op(
        hidden, weight, target, bias, class_weight, token_weights, low, up, ignore_index, label_smoothing, z_loss,
        0.0 if softcap is None else softcap, reduction, gradient, return_stats, temperature, *how,
    )  # fmt: skip
    return (loss, TokenStats(*stats)) if return_stats else loss
