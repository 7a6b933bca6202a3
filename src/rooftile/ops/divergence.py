"""Divergences of a distribution from another, element by element and then summed: Kullback-Leibler and Jensen-Shannon.

`input` is a log-probability x, whose distribution is q = exp(x); `target` has the distribution p, and log p = t.

    kl_div  l = p * (t - x)              target is p, with 0 * log(0) = 0, or t
    jsd     l = beta * p * (t - log m) + (1 - beta) * q * (x - log m),    m = beta * p + (1 - beta) * q

The gradients are

    kl_div  dx = -p                      dp = t + 1 - x,    dt = p * (t - x + 1)
    jsd     dx = (1 - beta) * q * (x - log m)               dt = beta * p * (t - log m)

and for jsd, whose ends beta = 0 and 1 are defined as KL(p || q) and KL(q || p), those of the latter.

Bytes: a reduction reads input and target and writes some partial sums; "none" writes an element for each. kl_div's
backward reads target and writes dinput: four tensors in all, whatever the loss is multiplied by. jsd's gradient needs
input as well, so where only input needs one the forward writes it (primitives/loss_gradient.py): three tensors.

A reduction is deterministic. Each program adds some tiles in float32, and a last program adds the programs' sums in a
fixed order.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from rooftile import launching, library, runtime  # before Triton: runtime fixes the mode of the process
from rooftile.primitives.divergence_terms import terms
from rooftile.primitives.loss_gradient import GRADIENTS, gradient_when, scaled
from rooftile.primitives.partials import prepare_total
from rooftile.primitives.rows import RowConfig, row_launcher

import triton  # isort: skip
import triton.language as tl  # isort: skip

Reduction = Literal["mean", "none", "sum", "batchmean"]
REDUCTIONS: tuple[str, ...] = get_args(Reduction)
KINDS = ("kl", "kl_log", "jsd")  # kl_div of probabilities, and of log-probabilities; jsd
_SHARE = 16  # tiles that a program of a long sum adds: of a billion elements 16384 sums remain


@triton.jit
def _tile_of(tile, n_cols, BLOCK_N: tl.constexpr):
    """The row and the columns of a tile."""
    blocks = tl.cdiv(n_cols, BLOCK_N)
    return (tile // blocks).to(tl.int64), (tile % blocks).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)


@triton.jit(do_not_specialize=["n_rows", "scale"])
def _forward_kernel(
    input_ptr,
    target_ptr,
    out_ptr,
    dinput_ptr,
    stride_xm,
    stride_tm,
    n_cols,
    n_rows,
    scale,
    KIND: tl.constexpr,
    BETA: tl.constexpr,
    REDUCES: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    acc = tl.zeros((BLOCK_N,), tl.float32)
    for tile in tl.range(tl.program_id(0), n_rows * tl.cdiv(n_cols, BLOCK_N), tl.num_programs(0), num_stages=1):
        row, cols = _tile_of(tile, n_cols, BLOCK_N)
        mask = cols < n_cols

        x = tl.load(input_ptr + row * stride_xm + cols, mask=mask, other=0.0, eviction_policy="evict_first")
        t = tl.load(target_ptr + row * stride_tm + cols, mask=mask, other=0.0)

        loss, dx, _ = terms(x.to(tl.float32), t.to(tl.float32), KIND, BETA, False)

        if REDUCES:
            acc += loss  # 0 beyond the row, where x and t are both 0
        else:
            tl.store(out_ptr + row * n_cols + cols, loss.to(out_ptr.dtype.element_ty), mask=mask)
        if GRADIENT:
            tl.store(dinput_ptr + row * n_cols + cols, (scale * dx).to(dinput_ptr.dtype.element_ty), mask=mask)
    if REDUCES:
        tl.store(out_ptr + tl.program_id(0), tl.sum(acc, axis=0))


@triton.jit(do_not_specialize=["scale"])
def _backward_kernel(
    dloss_ptr,
    input_ptr,
    target_ptr,
    dinput_ptr,
    dtarget_ptr,
    stride_dm,
    stride_xm,
    stride_tm,
    n_cols,
    scale,
    KIND: tl.constexpr,
    BETA: tl.constexpr,
    REDUCES: tl.constexpr,
    HAS_INPUT: tl.constexpr,
    NEEDS_DINPUT: tl.constexpr,
    NEEDS_DTARGET: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row, cols = _tile_of(tl.program_id(0), n_cols, BLOCK_N)
    mask = cols < n_cols

    if REDUCES:
        dloss = tl.load(dloss_ptr).to(tl.float32) * scale
    else:
        dloss = tl.load(dloss_ptr + row * stride_dm + cols, mask=mask, other=0.0).to(tl.float32)
    t = tl.load(target_ptr + row * stride_tm + cols, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
    x = t  # kl_div's dinput does not depend on it
    if HAS_INPUT:
        x = tl.load(input_ptr + row * stride_xm + cols, mask=mask, other=0.0, eviction_policy="evict_first")
        x = x.to(tl.float32)

    _, dx, dt = terms(x, t, KIND, BETA, NEEDS_DTARGET)

    if NEEDS_DINPUT:
        tl.store(dinput_ptr + row * n_cols + cols, (dloss * dx).to(dinput_ptr.dtype.element_ty), mask=mask)
    if NEEDS_DTARGET:
        tl.store(dtarget_ptr + row * n_cols + cols, (dloss * dt).to(dtarget_ptr.dtype.element_ty), mask=mask)


@functools.cache
def config(itemsize: int, adds_only: bool, target: runtime.Target) -> RowConfig:
    """Tiles of at most 16 elements of each tensor to a thread, which are loaded at once. `adds_only`: an element is not
    written for each that is read."""
    if target is runtime.INTERPRETER:
        return RowConfig("tile", 4096, num_warps=4)
    wide = adds_only and target.warp_size == 32  # on gfx942 it would spill 20 bytes
    return RowConfig("tile", 4096 if wide else 8192 // itemsize, num_warps=8 * 32 // target.warp_size, per_sm=8)


@functools.cache
def _launcher(
    dtype: torch.dtype, kind: str, beta: float, reduces: bool, gradient: bool, c: RowConfig
) -> launching.KernelLauncher:
    return row_launcher(_forward_kernel, c, KIND=kind, BETA=beta, REDUCES=reduces, GRADIENT=gradient)


@functools.cache
def _backward_launcher(
    dtype: torch.dtype, kind: str, beta: float, flags: tuple[bool, bool, bool, bool], c: RowConfig
) -> launching.KernelLauncher:
    names = ("REDUCES", "HAS_INPUT", "NEEDS_DINPUT", "NEEDS_DTARGET")
    more: dict[str, Any] = {"KIND": kind, "BETA": beta, **dict(zip(names, flags, strict=True))}
    return row_launcher(_backward_kernel, c, **more)


def _check(op: str, input: Tensor, target: Tensor, reduction: str) -> None:
    library.check_floating(op, input=input)
    library.check_same(op, "target", target, "input", input)
    if reduction not in REDUCTIONS:
        raise ValueError(f"{op}: reduction is {reduction!r}, expected one of {', '.join(REDUCTIONS)}")


def _divisor(input: Tensor, reduction: str) -> int:
    """What the sum is divided by."""
    if reduction == "batchmean":
        return input.shape[0] if input.dim() else 1
    return input.numel() if reduction == "mean" else 1


def _refuse_symbols(x: Tensor) -> None:
    """A launch has the number of elements in it: with a symbolic one the op stays whole in the graph."""
    if any(isinstance(n, torch.SymInt) for n in x.shape):
        raise launching.Untraceable("a symbolic shape")


def _rows(tensors: dict[int, Tensor], copies: library.Copies) -> tuple[int, int, tuple[int, ...]]:
    """Rows, columns and row strides of tensors of one shape, by their places in a launch.

    Contiguous tensors are one long row: no tile of it but the last has columns to spare.
    """
    if all(t.is_contiguous() for t in tensors.values()):
        n = next(iter(tensors.values())).numel()
        return 1, n, (n,) * len(tensors)
    rows = [library.rows_of(t, copies, place) for place, t in tensors.items()]
    return rows[0].shape[0], rows[0].shape[1], tuple(r.stride(0) for r in rows)


def _prepare(
    input: Tensor, target: Tensor, reduction: str, kind: str, beta: float, gradient: bool
) -> Callable[..., Any]:
    """What gives the loss of such an input and target, and for jsd the gradient of input, which is empty unless it is
    asked for."""
    _refuse_symbols(input)
    reduces = reduction != "none"
    dtype, device = input.dtype, input.device
    shape, dinput_shape = () if reduces else input.shape, input.shape if gradient else (0,)
    strides, dinput_strides = library.contiguous_strides(shape), library.contiguous_strides(dinput_shape)
    start: Callable[..., None] = library.start_nothing
    divisor, programs = _divisor(input, reduction), 0
    if input.numel():
        copies: library.Copies = {}
        n_rows, n_cols, row_strides = _rows({0: input, 1: target}, copies)
        gpu = runtime.target(device)
        c = config(input.element_size(), reduces and not gradient, gpu)
        tiles = n_rows * library.cdiv(n_cols, c.block_n)
        # Enough to fill the GPU; each of a long sum's has `_SHARE` tiles.
        programs = max(library.cdiv(tiles, _SHARE), min(tiles, gpu.multiprocessors * c.per_sm)) if reduces else tiles
        launcher = _launcher(dtype, kind, beta, reduces, gradient, c)
        start = launching.bind(launcher, programs, strides=(*row_strides, n_cols), numbers=(n_rows, 1 / divisor))
        start = library.copying(start, copies)
    add_up = prepare_total(programs, 1 / divisor if programs else 1.0, dtype) if reduces else library.start_nothing
    of_nothing = math.nan if reduces and not divisor else 0.0  # PyTorch's mean of no elements is NaN

    def run(input: Tensor, target: Tensor, *_: object) -> Any:
        loss = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        dinput = None
        if kind == "jsd":
            dinput = torch.empty_strided(dinput_shape, dinput_strides, dtype=dtype, device=device)
        written = dinput if gradient else None
        if not programs:
            loss.fill_(of_nothing)
        elif reduces:
            partial = torch.empty_strided((programs,), (1,), dtype=torch.float32, device=device)
            start(input, target, partial, written)
            add_up(partial, loss)
        else:
            start(input, target, loss, written)
        return loss if dinput is None else (loss, dinput)

    return run


def _prepare_backward(
    dloss: Tensor,
    input: Tensor | None,
    target: Tensor,
    reduction: str,
    kind: str,
    beta: float,
    needs: tuple[bool, bool],
) -> Callable[..., tuple[Tensor, Tensor]]:
    """What gives dinput and dtarget; a gradient that is not needed is empty."""
    _refuse_symbols(target)
    shapes = tuple(target.shape if needed else (0,) for needed in needs)
    strides = tuple(map(library.contiguous_strides, shapes))
    dtype, device = target.dtype, target.device
    reduces = reduction != "none"
    start = library.start_nothing
    if target.numel() and any(needs):
        copies: library.Copies = {}
        read = {2: target} if input is None else {1: input, 2: target}
        n_rows, n_cols, row_strides = _rows(read if reduces else {0: dloss, **read}, copies)
        stride_d = (0,) if reduces else row_strides[:1]
        stride_x = (0,) if input is None else row_strides[-2:-1]
        c = config(target.element_size(), False, runtime.target(device))
        launcher = _backward_launcher(dtype, kind, beta, (reduces, input is not None, *needs), c)
        start = launching.bind(
            launcher,
            n_rows * library.cdiv(n_cols, c.block_n),
            strides=(*stride_d, *stride_x, row_strides[-1], n_cols),
            numbers=(1 / _divisor(target, reduction),),
        )
        start = library.copying(start, copies)

    def run(dloss: Tensor, input: Tensor | None, target: Tensor, *_: object) -> tuple[Tensor, Tensor]:
        dinput = torch.empty_strided(shapes[0], strides[0], dtype=dtype, device=device)
        dtarget = torch.empty_strided(shapes[1], strides[1], dtype=dtype, device=device)
        start(dloss, input, target, dinput if needs[0] else None, dtarget if needs[1] else None)
        return dinput, dtarget

    return run


def _empty(input: Tensor, reduction: str) -> Tensor:
    return torch.empty(input.shape if reduction == "none" else (), dtype=input.dtype, device=input.device)


def _empty_gradients(
    op: str, dloss: Tensor, input: Tensor | None, target: Tensor, reduction: str, needs: tuple[bool, bool]
) -> tuple[Tensor, Tensor]:
    """Memory for the gradients, once the arguments of a backward have been checked."""
    _check(op, target if input is None else input, target, reduction)
    expected = target.shape if reduction == "none" else torch.Size(())
    if dloss.shape != expected:
        raise ValueError(f"{op}: dloss has shape {tuple(dloss.shape)}, expected {tuple(expected)}")
    first, second = (
        torch.empty(target.shape if needed else (0,), dtype=target.dtype, device=target.device) for needed in needs
    )
    return first, second


def _asked_for(grads: tuple[Tensor, Tensor], needs: tuple[bool, bool]) -> tuple[Tensor | None, ...]:
    return tuple(grad if needed else None for grad, needed in zip(grads, needs, strict=True))


# Kullback-Leibler. input is None in the backward unless target needs a gradient: it is then not kept in memory.


def _fake_kl(input: Tensor, target: Tensor, reduction: str, log_target: bool) -> Tensor:
    _check("kl_div", input, target, reduction)
    if not isinstance(log_target, bool):
        raise TypeError(f"kl_div: log_target is {library.named(log_target)}, expected a bool")
    return _empty(input, reduction)


def prepare_kl(input: Tensor, target: Tensor, reduction: str, log_target: bool) -> Callable[..., Tensor]:
    _fake_kl(input, target, reduction, log_target)
    return _prepare(input, target, reduction, "kl_log" if log_target else "kl", 0.0, False)


def _fake_kl_backward(
    dloss: Tensor,
    input: Tensor | None,
    target: Tensor,
    reduction: str,
    log_target: bool,
    needs_dinput: bool,
    needs_dtarget: bool,
) -> tuple[Tensor, Tensor]:
    if needs_dtarget and input is None:
        raise ValueError("kl_div_backward: input is None, expected a tensor, as needs_dtarget is set")
    return _empty_gradients("kl_div_backward", dloss, input, target, reduction, (needs_dinput, needs_dtarget))


def prepare_kl_backward(
    dloss: Tensor, input: Tensor | None, target: Tensor, reduction: str, log_target: bool, *needs: bool
) -> Callable[..., tuple[Tensor, Tensor]]:
    _fake_kl_backward(dloss, input, target, reduction, log_target, *needs)
    kind = "kl_log" if log_target else "kl"
    return _prepare_backward(dloss, input, target, reduction, kind, 0.0, (needs[0], needs[1]))


_kl_backward_op = library.define(
    "kl_div_backward(Tensor dloss, Tensor? input, Tensor target, str reduction, bool log_target, "
    "bool needs_dinput, bool needs_dtarget) -> (Tensor, Tensor)",
    prepare=prepare_kl_backward,
    fake=_fake_kl_backward,
)


def _save_kl(ctx, inputs, output) -> None:
    input, target, ctx.reduction, ctx.log_target = inputs
    ctx.save_for_backward(input if ctx.needs_input_grad[2] else None, target)


def _backward_kl(ctx, dloss: Tensor | None) -> tuple[Tensor | None, ...]:
    if dloss is None:
        return (None,) * 4
    needs = ctx.needs_input_grad[1:3]
    grads = _kl_backward_op(dloss, *ctx.saved_tensors, ctx.reduction, ctx.log_target, *needs)
    return *_asked_for(grads, needs), None, None


_kl_op = library.define(
    "kl_div(Tensor input, Tensor target, str reduction, bool log_target) -> Tensor",
    prepare=prepare_kl,
    fake=_fake_kl,
    autograd=library.Autograd(_save_kl, _backward_kl),
)


def kl_div(input: Tensor, target: Tensor, *, reduction: Reduction = "mean", log_target: bool = False) -> Tensor:
    """The Kullback-Leibler divergence, as `torch.nn.functional.kl_div` computes it, in float32 and rounded once.

    Each element of the loss is `target * (log(target) - input)`, with 0 * log(0) = 0; with `log_target` it is
    `exp(target) * (target - input)`. As in PyTorch, `input` comes first and is the distribution that is compared with
    `target`: the divergence is KL(target || exp(input)).

    Args:
        input: log-probabilities of any shape, float32, float16 or bfloat16. Any strides; copied only if the leading
            dimensions cannot be viewed as one, or if the last stride is not 1.
        target: probabilities, or with `log_target` log-probabilities, of input's shape and dtype. It is not broadcast.
        reduction: "none" leaves the elements as they are; "sum" adds them; "batchmean" divides their sum by the size
            of the first dimension, which is the mathematical definition; "mean" divides it by the number of elements.
        log_target: whether `target` holds log-probabilities. With -inf for a target or an input the loss is NaN, as
            PyTorch's: `0 * inf` is not resolved.

    Returns:
        The loss, in input's dtype: of input's shape and contiguous with "none", else without dimensions. A reduction is
        deterministic. Of no elements a sum is 0, and a mean is NaN.

        Gradients flow to input, and to target if it requires one. At a target of 0 the gradient of the target is 0,
        where PyTorch's is NaN and the true one is infinite. Only target is kept for the backward, and input if target
        requires a gradient.

    Raises:
        ValueError: the shapes differ, reduction is none of the four, a device is the CPU without the interpreter, or
            devices differ.
        TypeError: a dtype is not one of the three, or the dtypes differ.
    """
    return _kl_op(input, target, reduction, log_target)


# Jensen-Shannon


def _fake_jsd(input: Tensor, target: Tensor, beta: float, reduction: str, gradient: str) -> tuple[Tensor, Tensor]:
    _check("jsd", input, target, reduction)
    if isinstance(beta, bool) or not isinstance(beta, (float, int)):
        raise TypeError(f"jsd: beta is {library.named(beta)}, expected a number")
    if not 0 <= beta <= 1:
        raise ValueError(f"jsd: beta is {beta}, expected a number from 0 to 1")
    if gradient not in GRADIENTS or (gradient == "now" and reduction == "none"):
        raise ValueError(
            f"jsd: gradient is {gradient!r}, expected one of {', '.join(GRADIENTS)}, not 'now' with 'none'"
        )
    dinput = torch.empty(input.shape if gradient == "now" else (0,), dtype=input.dtype, device=input.device)
    return _empty(input, reduction), dinput


def prepare_jsd(
    input: Tensor, target: Tensor, beta: float, reduction: str, gradient: str
) -> Callable[..., tuple[Tensor, Tensor]]:
    _fake_jsd(input, target, beta, reduction, gradient)
    return _prepare(input, target, reduction, "jsd", float(beta), gradient == "now")


def _fake_jsd_backward(
    dloss: Tensor,
    input: Tensor,
    target: Tensor,
    beta: float,
    reduction: str,
    needs_dinput: bool,
    needs_dtarget: bool,
) -> tuple[Tensor, Tensor]:
    return _empty_gradients("jsd_backward", dloss, input, target, reduction, (needs_dinput, needs_dtarget))


def prepare_jsd_backward(
    dloss: Tensor, input: Tensor, target: Tensor, beta: float, reduction: str, *needs: bool
) -> Callable[..., tuple[Tensor, Tensor]]:
    _fake_jsd_backward(dloss, input, target, beta, reduction, *needs)
    return _prepare_backward(dloss, input, target, reduction, "jsd", float(beta), (needs[0], needs[1]))


_jsd_backward_op = library.define(
    "jsd_backward(Tensor dloss, Tensor input, Tensor target, float beta, str reduction, "
    "bool needs_dinput, bool needs_dtarget) -> (Tensor, Tensor)",
    prepare=prepare_jsd_backward,
    fake=_fake_jsd_backward,
)


def _save_jsd(ctx, inputs, outputs) -> None:
    input, target, ctx.beta, ctx.reduction, gradient = inputs
    if gradient == "none":
        raise ValueError("jsd: gradient is 'none', expected 'now' or 'later' for tensors that need one")
    if gradient == "now" and ctx.needs_input_grad[2]:
        raise ValueError("jsd: gradient is 'now', expected 'later', as target needs a gradient")
    ctx.now = gradient == "now"
    if not ctx.now:  # see `scaled`
        ctx.mark_non_differentiable(outputs[1])
    ctx.save_for_backward(*(outputs[1:] if ctx.now else (input, target)))


def _backward_jsd(ctx, dloss: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if dloss is None:
        return (None,) * 5
    if ctx.now:
        (dinput,) = ctx.saved_tensors
        return scaled(dinput, dloss), None, None, None, None
    needs = ctx.needs_input_grad[1:3]
    grads = _jsd_backward_op(dloss, *ctx.saved_tensors, ctx.beta, ctx.reduction, *needs)
    return *_asked_for(grads, needs), None, None, None


_jsd_op = library.define(
    "jsd(Tensor input, Tensor target, float beta, str reduction, str gradient) -> (Tensor, Tensor)",
    prepare=prepare_jsd,
    fake=_fake_jsd,
    autograd=library.Autograd(_save_jsd, _backward_jsd),
)


def jsd(input: Tensor, target: Tensor, *, beta: float = 0.5, reduction: Reduction = "batchmean") -> Tensor:
    """The generalised Jensen-Shannon divergence of two distributions, in float32 and rounded once.

        beta * KL(p || m) + (1 - beta) * KL(q || m),   m = beta * p + (1 - beta) * q,   p = exp(target), q = exp(input)

    element by element (Lin 1991; for distillation Agarwal et al. 2023, https://arxiv.org/abs/2306.13649). With beta = 0
    it is KL(p || q), with beta = 1 it is KL(q || p), as distillation libraries have it; the formula would give 0.

    Args:
        input: the student's log-probabilities, of any shape, float32, float16 or bfloat16. Any strides; copied only if
            the leading dimensions cannot be viewed as one, or if the last stride is not 1.
        target: the teacher's log-probabilities, of input's shape and dtype. It is not broadcast.
        beta: from 0 to 1, the part of the teacher in the mixture. Each value is compiled into its own kernels.
        reduction: as in `kl_div`.

    Returns:
        The loss, in input's dtype: of input's shape and contiguous with "none", else without dimensions. A reduction is
        deterministic. Of no elements a sum is 0, and a mean is NaN.

        A probability of 0 (-inf) adds nothing, and its gradient is 0, for beta between 0 and 1. At its ends `0 * inf`
        is NaN, as in `kl_div`.

        Gradients flow to both. Where only input needs one, with a reduction and in float32 or bfloat16, the forward
        writes it, and keeps neither input nor target. The backward multiplies it by the gradient of the loss, at the
        cost of another pass unless that is 1.

    Raises:
        ValueError: the shapes differ, beta is not from 0 to 1, reduction is none of the four, a device is the CPU
            without the interpreter, or devices differ.
        TypeError: a dtype is not one of the three, the dtypes differ, or beta is no number.
    """
    learns, moves = (isinstance(t, Tensor) and t.requires_grad for t in (input, target))
    gradient = (
        gradient_when(learns or moves, "none" if moves else reduction, input.dtype) if learns or moves else "none"
    )
    return _jsd_op(input, target, beta, reduction, gradient)[0]
