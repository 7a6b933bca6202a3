"""The Kullback-Leibler divergence of a distribution from another, as `torch.nn.functional.kl_div` computes it.

    l = target * (log(target) - input),       0 * log(0) = 0          (log_target=False)
    l = exp(target) * (target - input)                                (log_target=True)

for each element, then summed, averaged, or left as it is. `input` is a log-probability. The gradients are

    dinput  = -dl * target                    or  -dl * exp(target)
    dtarget = dl * (log(target) + 1 - input)  or  dl * exp(target) * (target - input + 1)

Bytes: the forward reads input and target; a reduction writes a few partial sums, "none" writes an element for each. The
backward of a reduction reads target and writes dinput. It reads input only for dtarget, which it writes only if it is
asked for.

A reduction is deterministic. Each program adds some tiles in float32, and a last program adds the programs' sums in a
fixed order.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor

from rooftile import launching, library, runtime  # before Triton: runtime fixes the mode of the process
from rooftile.primitives.partials import prepare_total
from rooftile.primitives.rows import RowConfig, row_launcher

import triton  # isort: skip
import triton.language as tl  # isort: skip

Reduction = Literal["mean", "none", "sum", "batchmean"]
REDUCTIONS: tuple[str, ...] = get_args(Reduction)
_SHARE = 16  # tiles that a program of a long sum adds: of a billion elements 16384 sums remain


@triton.jit
def _tile_of(tile, n_cols, BLOCK_N: tl.constexpr):
    """The row and the columns of a tile."""
    blocks = tl.cdiv(n_cols, BLOCK_N)
    return (tile // blocks).to(tl.int64), (tile % blocks).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)


@triton.jit(do_not_specialize=["n_rows"])
def _forward_kernel(
    input_ptr,
    target_ptr,
    out_ptr,
    stride_xm,
    stride_tm,
    n_cols,
    n_rows,
    LOG_TARGET: tl.constexpr,
    REDUCES: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    acc = tl.zeros((BLOCK_N,), tl.float32)
    for tile in tl.range(tl.program_id(0), n_rows * tl.cdiv(n_cols, BLOCK_N), tl.num_programs(0), num_stages=1):
        row, cols = _tile_of(tile, n_cols, BLOCK_N)
        mask = cols < n_cols

        x = tl.load(input_ptr + row * stride_xm + cols, mask=mask, other=0.0, eviction_policy="evict_first")
        t = tl.load(target_ptr + row * stride_tm + cols, mask=mask, other=0.0)
        x = x.to(tl.float32)
        t = t.to(tl.float32)

        if LOG_TARGET:
            loss = tl.exp(t) * (t - x)  # 0 beyond the row, where both are 0
        else:
            loss = tl.where(t == 0.0, 0.0, t * tl.log(t)) - t * x

        if REDUCES:
            acc += loss
        else:
            tl.store(out_ptr + row * n_cols + cols, loss.to(out_ptr.dtype.element_ty), mask=mask)
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
    LOG_TARGET: tl.constexpr,
    REDUCES: tl.constexpr,
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
    if NEEDS_DTARGET:
        x = tl.load(input_ptr + row * stride_xm + cols, mask=mask, other=0.0, eviction_policy="evict_first")
        x = x.to(tl.float32)

    if LOG_TARGET:
        p = tl.exp(t)
    else:
        p = t
    if NEEDS_DINPUT:
        dinput = -dloss * p
        tl.store(dinput_ptr + row * n_cols + cols, dinput.to(dinput_ptr.dtype.element_ty), mask=mask)
    if NEEDS_DTARGET:
        if LOG_TARGET:
            dtarget = dloss * p * (t - x + 1.0)
        else:
            dtarget = tl.where(t == 0.0, 0.0, dloss * (tl.log(t) + 1.0 - x))
        tl.store(dtarget_ptr + row * n_cols + cols, dtarget.to(dtarget_ptr.dtype.element_ty), mask=mask)


@functools.cache
def config(itemsize: int, reduces: bool, target: runtime.Target) -> RowConfig:
    """Tiles of at most 16 elements of each tensor to a thread, which are loaded at once."""
    if target is runtime.INTERPRETER:
        return RowConfig("tile", 4096, num_warps=4)
    return RowConfig("tile", 4096 if reduces else 8192 // itemsize, num_warps=8 * 32 // target.warp_size, per_sm=8)


@functools.cache
def _launcher(dtype: torch.dtype, log_target: bool, reduces: bool, c: RowConfig) -> launching.KernelLauncher:
    return row_launcher(_forward_kernel, c, LOG_TARGET=log_target, REDUCES=reduces)


@functools.cache
def _backward_launcher(
    dtype: torch.dtype, log_target: bool, reduces: bool, needs: tuple[bool, bool], c: RowConfig
) -> launching.KernelLauncher:
    more = {"LOG_TARGET": log_target, "REDUCES": reduces, "NEEDS_DINPUT": needs[0], "NEEDS_DTARGET": needs[1]}
    return row_launcher(_backward_kernel, c, **more)


def check(op: str, input: Tensor, target: Tensor, reduction: str, log_target: bool) -> None:
    library.check_floating(op, input=input)
    library.check_same(op, "target", target, "input", input)
    if reduction not in REDUCTIONS:
        raise ValueError(f"{op}: reduction is {reduction!r}, expected one of {', '.join(REDUCTIONS)}")
    if not isinstance(log_target, bool):
        raise TypeError(f"{op}: log_target is {library.named(log_target)}, expected a bool")


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


def prepare(input: Tensor, target: Tensor, reduction: str, log_target: bool) -> Callable[..., Tensor]:
    """What gives the loss of such an input and target."""
    check("kl_div", input, target, reduction, log_target)
    _refuse_symbols(input)
    reduces = reduction != "none"
    dtype, device = input.dtype, input.device
    shape = () if reduces else input.shape
    strides = library.contiguous_strides(shape)
    if not input.numel():
        return functools.partial(_empty_loss, shape, math.nan if not _divisor(input, reduction) else 0.0)
    copies: library.Copies = {}
    n_rows, n_cols, row_strides = _rows({0: input, 1: target}, copies)
    gpu = runtime.target(device)
    c = config(input.element_size(), reduces, gpu)
    tiles = n_rows * library.cdiv(n_cols, c.block_n)
    # Enough to fill the GPU; each of a long sum's has `_SHARE` tiles.
    programs = max(library.cdiv(tiles, _SHARE), min(tiles, gpu.multiprocessors * c.per_sm)) if reduces else tiles
    launcher = _launcher(dtype, log_target, reduces, c)
    start = launching.bind(launcher, programs, strides=(*row_strides, n_cols), numbers=(n_rows,))
    start = library.copying(start, copies)
    add_up = prepare_total(programs, 1 / _divisor(input, reduction), dtype) if reduces else library.start_nothing

    def run(input: Tensor, target: Tensor, *_: object) -> Tensor:
        loss = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        if reduces:
            partial = torch.empty_strided((programs,), (1,), dtype=torch.float32, device=device)
            start(input, target, partial)
            add_up(partial, loss)
        else:
            start(input, target, loss)
        return loss

    return run


def _empty_loss(shape: tuple[int, ...], value: float, input: Tensor, *_: object) -> Tensor:
    """Of no elements: a sum is 0, and a mean NaN, as PyTorch's."""
    return torch.full(shape, value, dtype=input.dtype, device=input.device)


def fake(input: Tensor, target: Tensor, reduction: str, log_target: bool) -> Tensor:
    check("kl_div", input, target, reduction, log_target)
    return torch.empty(input.shape if reduction == "none" else (), dtype=input.dtype, device=input.device)


def prepare_backward(
    dloss: Tensor,
    input: Tensor | None,
    target: Tensor,
    reduction: str,
    log_target: bool,
    needs_dinput: bool,
    needs_dtarget: bool,
) -> Callable[..., tuple[Tensor, Tensor]]:
    """What gives dinput and dtarget; a gradient that is not needed is empty."""
    found = fake_backward(dloss, input, target, reduction, log_target, needs_dinput, needs_dtarget)
    _refuse_symbols(target)
    shapes = tuple(grad.shape for grad in found)
    strides = tuple(map(library.contiguous_strides, shapes))
    dtype, device = target.dtype, target.device
    reduces = reduction != "none"
    start = library.start_nothing
    if target.numel() and (needs_dinput or needs_dtarget):
        copies: library.Copies = {}
        read = {2: target} if input is None else {1: input, 2: target}
        n_rows, n_cols, row_strides = _rows(read if reduces else {0: dloss, **read}, copies)
        stride_d = (0,) if reduces else row_strides[:1]
        stride_x = (0,) if input is None else row_strides[-2:-1]
        c = config(target.element_size(), False, runtime.target(device))
        launcher = _backward_launcher(dtype, log_target, reduces, (needs_dinput, needs_dtarget), c)
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
        start(dloss, input, target, dinput if needs_dinput else None, dtarget if needs_dtarget else None)
        return dinput, dtarget

    return run


def fake_backward(
    dloss: Tensor,
    input: Tensor | None,
    target: Tensor,
    reduction: str,
    log_target: bool,
    needs_dinput: bool,
    needs_dtarget: bool,
) -> tuple[Tensor, Tensor]:
    check("kl_div_backward", target, target, reduction, log_target)
    if needs_dtarget and input is None:
        raise ValueError("kl_div_backward: input is None, expected a tensor, as needs_dtarget is set")
    if input is not None:
        library.check_same("kl_div_backward", "input", input, "target", target)
    expected = target.shape if reduction == "none" else torch.Size(())
    if dloss.shape != expected:
        raise ValueError(f"kl_div_backward: dloss has shape {tuple(dloss.shape)}, expected {tuple(expected)}")
    return (
        torch.empty(target.shape if needs_dinput else (0,), dtype=target.dtype, device=target.device),
        torch.empty(target.shape if needs_dtarget else (0,), dtype=target.dtype, device=target.device),
    )


# input is None unless target needs a gradient: the forward's input is then not kept in memory.
_backward_op = library.define(
    "kl_div_backward(Tensor dloss, Tensor? input, Tensor target, str reduction, bool log_target, "
    "bool needs_dinput, bool needs_dtarget) -> (Tensor, Tensor)",
    prepare=prepare_backward,
    fake=fake_backward,
)


def _save(ctx, inputs, output) -> None:
    input, target, ctx.reduction, ctx.log_target = inputs
    ctx.save_for_backward(input if ctx.needs_input_grad[2] else None, target)


def _backward(ctx, dloss: Tensor | None) -> tuple[Tensor | None, ...]:
    if dloss is None:
        return (None,) * 4
    input, target = ctx.saved_tensors
    needs = ctx.needs_input_grad[1:3]
    grads = _backward_op(dloss, input, target, ctx.reduction, ctx.log_target, *needs)
    return *(grad if needed else None for grad, needed in zip(grads, needs, strict=True)), None, None


_op = library.define(
    "kl_div(Tensor input, Tensor target, str reduction, bool log_target) -> Tensor",
    prepare=prepare,
    fake=fake,
    autograd=library.Autograd(_save, _backward),
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
    return _op(input, target, reduction, log_target)
