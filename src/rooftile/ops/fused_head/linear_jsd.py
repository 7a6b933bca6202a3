"""Distillation at the head: the divergence of a teacher's distributions from a student's, without all logits in memory.

    x = log_softmax((hidden @ weight^T + bias) / T),   t = log_softmax((teacher_hidden @ teacher_weight^T + ...) / T)
    loss = sum over classes of l(x, t),   dz = (dl/dx - exp(x) * sum over classes of dl/dx) / T

of each token, with the terms l of primitives/divergence_terms.py. head.py has the walk over chunks and the gradients of
hidden, weight and bias. Of each chunk there are two buffers, the logits of the student and those of the teacher, and
one kernel, which writes the gradient over the former.

A program has one row of both, and reads it twice for losses: for the logarithms of the sums of exponentials, and for
the terms. The gradient needs the sum of the derivatives, so it takes a third pass. That of Kullback-Leibler's terms is
-1, and there the second pass writes the gradient. The second pass goes from the last block to the first, so that what
was read last, and is most likely still in the L2, comes first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from rooftile import launching, library, runtime  # before Triton: runtime fixes the mode of the process
from rooftile.ops.fused_head import head
from rooftile.ops.fused_head.head import Gradients, How
from rooftile.ops.gemm import dispatch
from rooftile.ops.gemm.config import Precision
from rooftile.primitives.divergence_terms import terms
from rooftile.primitives.loss_gradient import GRADIENTS, gradient_when
from rooftile.primitives.online_softmax import LOWEST, extend
from rooftile.primitives.rows import RowConfig, row_launcher

import triton  # isort: skip
import triton.language as tl  # isort: skip

Reduction = Literal["mean", "sum", "none"]
REDUCTIONS: tuple[str, ...] = get_args(Reduction)
KINDS = ("jsd", "kl")
LOG2E = tl.constexpr(1.4426950408889634)
_PLACES = (0, 1, 5)  # of hidden, weight and bias among the op's arguments
_TENSORS = 7  # its first arguments


@triton.jit
def _normalizer(tops, sums, counts):
    """A row's maximum, and the logarithm of the sum of exponentials to its base, from those of its lanes."""
    top = tl.max(tops)
    return tl.where(counts, top, 0.0), tl.where(counts, tl.log(tl.sum(sums * tl.exp2((tops - top) * LOG2E))), 0.0)


@triton.jit
def _scaled(ptr, cols, mask, inverse_temperature, OTHER: tl.constexpr):
    return tl.load(ptr + cols, mask=mask, other=OTHER).to(tl.float32) * inverse_temperature


@triton.jit
def _log_probability(ptr, cols, mask, inverse_temperature, top, log_sum):
    """The maximum is subtracted first: near it, where probabilities are, nothing is lost."""
    return (_scaled(ptr, cols, mask, inverse_temperature, 0.0) - top) - log_sum


@triton.jit
def _store_gradient(logits_ptr, cols, inside, mask, x, dx, total, scale):
    """The gradient of the logits over them; 0 where the row does not count."""
    dz = scale * (dx - tl.exp(x) * total)
    tl.store(logits_ptr + cols, tl.where(mask, dz, 0.0).to(logits_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["ignore_index", "inverse_temperature"])
def _row_kernel(
    logits_ptr,
    teacher_ptr,
    target_ptr,
    scale_ptr,
    inverse_ptr,
    loss_ptr,
    stride_xm,
    stride_tm,
    n_cols,
    ignore_index,
    inverse_temperature,
    BETA: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    MEAN: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PACK: tl.constexpr,
):
    LANES: tl.constexpr = BLOCK_N // PACK
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_xm
    teacher_ptr += row * stride_tm
    # The PACK elements that a thread loads at once share a maximum and a sum.
    block = tl.arange(0, LANES)[:, None] * PACK + tl.arange(0, PACK)[None, :]

    counts = tl.load(target_ptr + row) != ignore_index
    read = tl.where(counts, n_cols, 0)
    scale = tl.where(counts, 1.0, 0.0)
    if HAS_SCALE:
        scale *= tl.load(scale_ptr + row, mask=counts, other=0.0)
    if MEAN:
        scale = tl.where(counts, scale * tl.load(inverse_ptr), 0.0)

    x_tops = tl.full((LANES, 1), LOWEST, tl.float32)
    t_tops = x_tops
    x_sums = tl.zeros((LANES, 1), tl.float32)
    t_sums = x_sums
    for start in tl.range(0, read, BLOCK_N, num_stages=1):
        cols = start + block
        x = _scaled(logits_ptr, cols, cols < n_cols, inverse_temperature, float("-inf"))
        t = _scaled(teacher_ptr, cols, cols < n_cols, inverse_temperature, float("-inf"))
        x_tops, x_sums = extend(x_tops, x_sums, x, LOG2E)
        t_tops, t_sums = extend(t_tops, t_sums, t, LOG2E)
    x_top, x_log = _normalizer(x_tops, x_sums, counts)
    t_top, t_log = _normalizer(t_tops, t_sums, counts)

    ONE_PASS: tl.constexpr = GRADIENT and BETA == 0.0
    losses = tl.zeros((LANES, PACK), tl.float32)
    slopes = losses
    blocks = tl.cdiv(n_cols if ONE_PASS else read, BLOCK_N)
    for i in tl.range(0, blocks, num_stages=1):
        cols = (blocks - 1 - i) * BLOCK_N + block
        inside = cols < n_cols
        mask = inside & counts
        x = _log_probability(logits_ptr, cols, mask, inverse_temperature, x_top, x_log)
        t = _log_probability(teacher_ptr, cols, mask, inverse_temperature, t_top, t_log)
        loss, dx, _ = terms(x, t, "jsd", BETA, False)
        losses += tl.where(mask, loss, 0.0)
        if ONE_PASS:
            _store_gradient(logits_ptr, cols, inside, mask, x, dx, -1.0, scale * inverse_temperature)
        elif GRADIENT:
            slopes += tl.where(mask, dx, 0.0)
    tl.store(loss_ptr + row, tl.where(counts, tl.sum(losses), 0.0))

    if GRADIENT and not ONE_PASS:
        total = tl.sum(slopes)
        for start in tl.range(0, n_cols, BLOCK_N, num_stages=1):
            cols = start + block
            inside = cols < n_cols
            mask = inside & counts
            x = _log_probability(logits_ptr, cols, mask, inverse_temperature, x_top, x_log)
            t = _log_probability(teacher_ptr, cols, mask, inverse_temperature, t_top, t_log)
            _, dx, _ = terms(x, t, "jsd", BETA, False)
            _store_gradient(logits_ptr, cols, inside, mask, x, dx, total, scale * inverse_temperature)


@functools.cache
def config(n_cols: int, target: runtime.Target) -> RowConfig:
    """Blocks of 16 elements of each tensor a thread."""
    whole = library.power_of_two(n_cols)
    if target is runtime.INTERPRETER:
        return RowConfig("loop", min(whole, 8192), num_warps=4)
    block_n = max(min(whole, 4096), 256)
    return RowConfig("loop", block_n, num_warps=max(1, block_n // 16 // target.warp_size))


class Tensors(NamedTuple):
    """The op's first arguments."""

    hidden: Tensor
    weight: Tensor
    teacher_hidden: Tensor
    teacher_weight: Tensor
    target: Tensor
    bias: Tensor | None
    teacher_bias: Tensor | None


class Options(NamedTuple):
    """What a call asks for, as the op's arguments after its tensors."""

    kind: str
    beta: float
    temperature: float
    ignore_index: int
    reduction: str
    gradient: str


@functools.cache
def _launcher(
    dtypes: tuple[torch.dtype, ...], beta: float, has_scale: bool, mean: bool, gradient: bool, pack: int, c: RowConfig
) -> launching.KernelLauncher:
    flags = {"HAS_SCALE": has_scale, "MEAN": mean, "GRADIENT": gradient}
    return row_launcher(_row_kernel, c, rounds_products=True, BETA=float(beta), PACK=pack, **flags)


def bind_rows(
    logits: Tensor, teacher: Tensor, target: Tensor, scale: Tensor | None, inverse: Tensor | None, losses: Tensor,
    beta: float, temperature: float, ignore_index: int, gradient: bool,
) -> Callable[..., None]:  # fmt: skip
    """The launch over the rows of logits, of which there is at least one; it is called with the same arguments.

    Args:
        scale: what the gradient of each row is multiplied by.
        inverse: one number that all of them are multiplied by.
        gradient: whether the gradient takes the place of the logits.
    """
    n_cols = logits.shape[1]
    c = config(n_cols, runtime.target(logits.device))
    interpreted = runtime.MODE is runtime.Mode.INTERPRETER
    pack = 1 if interpreted or n_cols % 16 else 16 // max(logits.element_size(), teacher.element_size())
    dtypes = (logits.dtype, teacher.dtype, target.dtype)
    launcher = _launcher(dtypes, beta, scale is not None, inverse is not None, gradient, pack, c)
    strides = (logits.stride(0), teacher.stride(0), n_cols)
    start = launching.bind(launcher, logits.shape[0], strides=strides, numbers=(ignore_index, 1 / temperature))
    return lambda logits, teacher, target, scale, inverse, losses, *_: start(
        logits, teacher, target, scale, inverse, losses
    )


_losses_of_rows = library.Prepared(bind_rows)


def _divisor(tensors: Tensors, o: Options) -> head.Divisor:
    target = tensors.target.reshape(-1).contiguous()
    return head.Divisor(target, None, None, tensors.weight.shape[0], o.ignore_index)


def _walk(op: str, tensors: Tensors, scales: Tensor | None, o: Options, how: How) -> tuple[Tensor, Gradients]:
    """The losses of all tokens, and if `o.gradient` is "now", the gradients, times `scales` of the tokens."""
    _, weight, _, teacher_weight, _, *biases = tensors
    n_cols, now = weight.shape[0], o.gradient == "now"
    hidden, teacher_hidden = dispatch.as_rows(tensors.hidden), dispatch.as_rows(tensors.teacher_hidden)
    target = tensors.target.reshape(-1).contiguous()
    bias, teacher_bias = (None if b is None else b.contiguous() for b in biases)
    tokens = head.ValidTokens(target, o.ignore_index, how)
    losses = torch.empty(tokens.n, dtype=torch.float32, device=hidden.device)
    inverse = _divisor(tensors, o).apply(None) if now and o.reduction == "mean" else None
    teacher: list[Tensor] = []

    def differentiate(z: Tensor, part: slice, rows: slice | Tensor) -> None:
        if not teacher:  # the first chunk is as large as any
            teacher.append(head.logits_buffer(z.shape[0], teacher_hidden, n_cols))
        t = teacher[0][: z.shape[0]]
        dispatch.gemm(op, teacher_hidden[rows], teacher_weight, t, teacher_bias, precision=how.precision)
        scale = None if scales is None else scales[rows]
        _losses_of_rows(z, t, target[rows], scale, inverse, losses[part], o.beta, o.temperature, o.ignore_index, now)

    row_bytes = sum(head.logits_row_bytes(h, n_cols) for h in (hidden, teacher_hidden))
    gradients = head.walk(op, hidden, weight, bias, tokens, how, row_bytes, differentiate, gradients=now)
    return tokens.restored(losses), gradients


def _split(args: Sequence[Any]) -> tuple[Tensors, Options, How]:
    end = _TENSORS + len(Options._fields)
    return Tensors(*args[:_TENSORS]), Options(*args[_TENSORS:end]), How(*args[end:])


def _check(tensors: Tensors, o: Options, how: How, suffix: str = "") -> None:
    hidden, weight, teacher_hidden, teacher_weight, target, bias, teacher_bias = tensors
    if o.kind not in KINDS:
        raise ValueError(f"linear_jsd: kind is {o.kind!r}, expected one of {', '.join(KINDS)}")
    op = f"linear_{o.kind}{suffix}"
    head.check_head(op, hidden, weight, bias)
    head.check_head(op, teacher_hidden, teacher_weight, teacher_bias, "teacher_")
    if teacher_hidden.shape[:-1] != hidden.shape[:-1]:
        expected = library.shown((*hidden.shape[:-1], "H"))
        raise ValueError(
            f"{op}: teacher_hidden has shape {tuple(teacher_hidden.shape)}, expected {expected} to match hidden's "
            "leading dimensions"
        )
    if teacher_weight.shape[0] != weight.shape[0]:
        raise ValueError(
            f"{op}: teacher_weight has {teacher_weight.shape[0]} rows, expected {weight.shape[0]} to match weight's, "
            "one a class"
        )
    head.check_classes(op, "target", target, hidden)
    library.check_numbers(op, beta=o.beta)
    if not 0 <= o.beta <= 1:
        raise ValueError(f"{op}: beta is {o.beta}, expected a number from 0 to 1")
    head.check_temperature(op, o.temperature)
    if o.reduction not in REDUCTIONS:
        raise ValueError(f"{op}: reduction is {o.reduction!r}, expected one of {', '.join(REDUCTIONS)}")
    if o.gradient not in GRADIENTS or (o.gradient == "now" and o.reduction == "none"):
        raise ValueError(
            f"{op}: gradient is {o.gradient!r}, expected one of {', '.join(GRADIENTS)}, not 'now' with 'none'"
        )
    dispatch.check_precision(op, how.precision)


def _fake(*args: Any) -> tuple[Tensor, ...]:
    tensors, o, how = _split(args)
    _check(tensors, o, how)
    hidden, target = tensors.hidden, tensors.target
    needs = how.needs if o.gradient == "now" else (False,) * 3
    loss = torch.empty(target.shape if o.reduction == "none" else (), dtype=torch.float32, device=hidden.device)
    return (loss, *head.empty_gradients(hidden, tensors.weight, tensors.bias, needs=needs))


def _launch(*args: Any) -> tuple[Tensor, ...]:
    tensors, o, how = _split(args)
    hidden, target = tensors.hidden, tensors.target
    head.refuse_tracing(hidden)
    _check(tensors, o, how)
    if not target.numel():
        results = _fake(*args)
        for t in results:
            t.zero_()
        return results
    losses, (dhidden, *rest) = _walk(f"linear_{o.kind}", tensors, None, o, how)
    if how.needs[0] and o.gradient == "now":
        dhidden = head.shaped(dhidden, hidden.shape)
    return (head.reduced(losses, o.reduction, target.shape, _divisor(tensors, o)), dhidden, *rest)


def _check_backward(dloss: Tensor, tensors: Tensors, o: Options, how: How) -> str:
    op = f"linear_{o.kind}_backward"
    _check(tensors, o, how, suffix="_backward")
    head.check_dloss(op, dloss, tensors.target, o.reduction)
    return op


def _fake_backward(dloss: Tensor, *args: Any) -> Gradients:
    tensors, o, how = _split(args)
    _check_backward(dloss, tensors, o, how)
    return tuple(head.empty_gradients(tensors.hidden, tensors.weight, tensors.bias, needs=how.needs))


def _launch_backward(dloss: Tensor, *args: Any) -> Gradients:
    tensors, o, how = _split(args)
    hidden, target = tensors.hidden, tensors.target
    head.refuse_tracing(hidden)
    op = _check_backward(dloss, tensors, o, how)
    if not target.numel():
        results = _fake_backward(dloss, *args)
        for t in results:
            t.zero_()
        return results
    scales = head.row_scales(dloss, target.numel())
    _, (dhidden, dweight, dbias) = _walk(op, tensors, scales, o._replace(gradient="now"), how)
    return dhidden.view(hidden.shape) if how.needs[0] else dhidden, dweight, dbias


def _check_gradients(inputs: tuple[Any, ...]) -> None:
    for name, place in (("teacher_hidden", 2), ("teacher_weight", 3), ("teacher_bias", 6)):
        tensor = inputs[place]
        if tensor is not None and tensor.requires_grad:
            kind = inputs[_TENSORS]
            raise ValueError(f"linear_{kind}: {name} requires grad, but gets no gradient; pass {name}.detach()")


def _save(ctx, inputs, outputs) -> None:
    _, o, _ = _split(inputs)
    head.save(ctx, f"linear_{o.kind}", inputs, outputs, _PLACES, _TENSORS, o.gradient)


def _backward(ctx, dloss: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    return head.backward(ctx, _backward_op, dloss)


_SCHEMA = (
    "Tensor hidden, Tensor weight, Tensor teacher_hidden, Tensor teacher_weight, Tensor target, Tensor? bias, "
    "Tensor? teacher_bias, str kind, float beta, float temperature, int ignore_index, str reduction, str gradient, "
    f"{head.HOW}"
)

_backward_op = library.define(
    f"linear_jsd_backward(Tensor dloss, {_SCHEMA}) -> (Tensor, Tensor, Tensor)",
    launch=_launch_backward,
    fake=_fake_backward,
    called=lambda args: f"linear_{args[1 + _TENSORS]}_backward",
)
_op = library.define(
    f"linear_jsd({_SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor)",
    launch=_launch,
    fake=_fake,
    autograd=library.Autograd(_save, _backward, _check_gradients),
    called=lambda args: f"linear_{args[_TENSORS]}",
)


Head = tuple[Tensor, Tensor, Tensor | None]  # hidden states, weight and bias


def _divergence(
    kind: str, student: Head, teacher: Head, target: Tensor | None, beta: float, temperature: float,
    ignore_index: int, reduction: str, chunk_bytes: int | None, valid_rows: int | None,
    float32_weight_gradient: bool, precision: str,
) -> Tensor:  # fmt: skip
    op = f"linear_{kind}"
    library.check_tensors(op, hidden=student[0])
    library.check_int64(op, ignore_index=ignore_index)
    if dispatch.autocast_dtype(student[0]) is not None:
        student, teacher = dispatch.autocast(*student), dispatch.autocast(*teacher)  # type: ignore[assignment]
    hidden, weight, bias = student
    teacher_hidden, teacher_weight, teacher_bias = teacher
    if target is None:  # no token is ignored
        target = torch.full(hidden.shape[:-1], 1 if ignore_index == 0 else 0, dtype=torch.int32, device=hidden.device)
    how = head.asked(op, (hidden, weight, bias), float32_weight_gradient, chunk_bytes, valid_rows, precision)
    gradient = gradient_when(any(how.needs), reduction, hidden.dtype, in_graphs=True)
    return _op(
        hidden, weight, teacher_hidden, teacher_weight, target, bias, teacher_bias, kind, beta, temperature,
        ignore_index, reduction, gradient, *how,
    )[0]  # fmt: skip


def linear_jsd(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    target: Tensor | None = None,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    chunk_bytes: int | None = None,
    valid_rows: int | None = None,
    float32_weight_gradient: bool = False,
    precision: Precision = "ieee",
) -> Tensor:
    """The generalised Jensen-Shannon divergence of a teacher's distributions from a student's, by chunks of tokens.

        beta * KL(p || m) + (1 - beta) * KL(q || m),   m = beta * p + (1 - beta) * q
        q = softmax((hidden @ weight^T + bias) / temperature),   p likewise, of the teacher

    of each token, a sum over classes: `jsd` of the log-probabilities, of which a chunk is in memory at a time
    (Agarwal et al. 2023, https://arxiv.org/abs/2306.13649). The logits have float32 sums and are rounded to the hidden
    states' dtype; all else is computed in float32.

    Args:
        hidden: `(..., H)`, float32, float16 or bfloat16: the student's last hidden states.
        weight: `(V, H)` of hidden's dtype: the student's head.
        teacher_hidden: `(..., G)`, of hidden's leading dimensions; G and the dtype may be others.
        teacher_weight: `(V, G)` of teacher_hidden's dtype. Of a vocabulary that is padded to another length, pass the
            rows that both have: `teacher_weight[:V]`.
        target: `(...)`, int64 or int32, the labels: a token whose label is `ignore_index` is not read. Other values do
            not matter. None ignores no token.
        bias, teacher_bias: `(V,)`, of the hidden states' dtype or float32.
        beta: from 0 to 1, the part of the teacher in the mixture. As in `jsd`, 0 is KL(p || q) and 1 is KL(q || p).
            Each value is compiled into its own kernel.
        temperature: divides the logits of both, 1e-30 or more. The loss is not multiplied by its square, which would
            keep the gradients' size (Hinton et al. 2015, https://arxiv.org/abs/1503.02531).
        ignore_index: the label of tokens that do not count. Their loss and gradient are 0.
        reduction: "mean" divides the sum over tokens by the number of those that count, "sum" does not; "none" leaves
            the loss of each token. If no token counts, all are 0.
        chunk_bytes: the memory of a chunk's logits, the student's and the teacher's, at least a token's. By default as
            in `linear_cross_entropy`.
        valid_rows, float32_weight_gradient, precision: as in `linear_cross_entropy`.

    Returns:
        The loss in float32: without dimensions, or `(...)` with "none". Under `torch.autocast` hidden states, weights
        and biases are cast to its dtype first.

        Gradients flow to hidden, weight and bias, each only if it is asked for; when they are computed, and what they
        cost, is as in `linear_cross_entropy`. The teacher gets none. A logit of -inf makes the loss NaN where beta is 0
        or 1, as in `kl_div`.

    Raises:
        ValueError: a shape does not match; a number is out of range; a tensor of the teacher requires grad; reduction
            or precision is another word; a device is the CPU without the interpreter, or devices differ.
        TypeError: a dtype is none of those named, or dtypes differ.
    """
    return _divergence(
        "jsd", (hidden, weight, bias), (teacher_hidden, teacher_weight, teacher_bias), target, beta, temperature,
        ignore_index, reduction, chunk_bytes, valid_rows, float32_weight_gradient, precision,
    )  # fmt: skip


def linear_kl(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    target: Tensor | None = None,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    *,
    temperature: float = 1.0,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    chunk_bytes: int | None = None,
    valid_rows: int | None = None,
    float32_weight_gradient: bool = False,
    precision: Precision = "ieee",
) -> Tensor:
    """The Kullback-Leibler divergence KL(teacher || student) at the head, by chunks of tokens.

        sum over classes of p * (log p - log q)

    of each token: `linear_jsd` with `beta=0`, whose arguments it has. The divergence the other way round,
    KL(student || teacher), is `linear_jsd` with `beta=1`.
    """
    return _divergence(
        "kl", (hidden, weight, bias), (teacher_hidden, teacher_weight, teacher_bias), target, 0.0, temperature,
        ignore_index, reduction, chunk_bytes, valid_rows, float32_weight_gradient, precision,
    )  # fmt: skip
