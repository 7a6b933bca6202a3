"""Cross entropy backward, in one of two ways.

- The forward has written the gradient for a loss whose own gradient is 1. It is multiplied by the true one, in place:
  the buffer belongs to the graph alone. Programs read that one number and end at once where it is 1, as it is where the
  loss itself is differentiated.
- Otherwise (no reduction, or float16) the gradient is computed from the logits and from four numbers a row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from rooftile import launching, library, runtime  # before Triton: runtime fixes the mode of the process
from rooftile.ops.cross_entropy.forward import (
    FACTORS,
    STRIDE,
    capped,
    class_weights,
    logits_gradient,
    row_offset,
    rows_layout,
)
from rooftile.primitives.rows import RowConfig, row_launcher, row_length

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def _scale_kernel(dlogits_ptr, dloss_ptr, n, BLOCK_N: tl.constexpr):
    factor = tl.load(dloss_ptr).to(tl.float32)
    if factor != 1.0:
        first = tl.program_id(0).to(tl.int64) * BLOCK_N
        for start in tl.range(first, n, tl.num_programs(0) * BLOCK_N, num_stages=1):
            cols = start + tl.arange(0, BLOCK_N)
            dx = tl.load(dlogits_ptr + cols, mask=cols < n, other=0.0).to(tl.float32)
            tl.store(dlogits_ptr + cols, (dx * factor).to(dlogits_ptr.dtype.element_ty), mask=cols < n)


@triton.jit(do_not_specialize=["n_inner"])
def _rows_kernel(
    dloss_ptr,
    logits_ptr,
    target_ptr,
    weight_ptr,
    factors_ptr,
    dlogits_ptr,
    stride_xo,
    stride_xi,
    n_cols,
    n_inner,
    SOFTCAP: tl.constexpr,
    SMOOTHS: tl.constexpr,
    REDUCES: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    blocks = tl.cdiv(n_cols, BLOCK_N)
    index = tl.program_id(0) // blocks
    row = index.to(tl.int64)
    cols = (tl.program_id(0) % blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = cols < n_cols

    dloss = tl.load(dloss_ptr if REDUCES else dloss_ptr + row).to(tl.float32)
    target = tl.load(target_ptr + row)
    factors_ptr += row * STRIDE
    top = tl.load(factors_ptr)
    factor = tl.load(factors_ptr + 1)
    at_target = tl.load(factors_ptr + 2)
    counts = (factor != 0.0) | (at_target != 0.0)  # an ignored row is not read
    logits_ptr += row_offset(index, n_inner, stride_xo, stride_xi)
    x = tl.load(logits_ptr + cols, mask=inside & counts, other=float("-inf"), eviction_policy="evict_first")

    smoothing = None
    weight = None
    if SMOOTHS:
        smoothing = dloss * tl.load(factors_ptr + 3)
        weight = class_weights(weight_ptr, cols, inside, HAS_WEIGHT)
    x = capped(x.to(tl.float32), SOFTCAP)
    dx = logits_gradient(x, cols, target, top, dloss * factor, dloss * at_target, smoothing, weight, SOFTCAP)
    tl.store(dlogits_ptr + row * n_cols + cols, dx.to(dlogits_ptr.dtype.element_ty), mask=inside)


@functools.cache
def config(n_cols: int, itemsize: int, target: runtime.Target) -> RowConfig:
    """Tiles of 8 KB, of a row or of the whole gradient."""
    if target is runtime.INTERPRETER:
        return RowConfig("tile", min(8192, library.power_of_two(n_cols)), num_warps=4)
    block_n = max(128, min(8192 // itemsize, library.power_of_two(n_cols)))
    warps = max(1, block_n * itemsize // 1024) * 32 // target.warp_size
    return RowConfig("tile", block_n, num_warps=max(1, warps), per_sm=8)


@functools.cache
def _scale_launcher(dtype: torch.dtype, dloss_dtype: torch.dtype, c: RowConfig) -> launching.KernelLauncher:
    return row_launcher(_scale_kernel, c)


@functools.cache
def _rows_launcher(
    dtypes: tuple[torch.dtype | None, ...], softcap: float, smooths: bool, reduces: bool, c: RowConfig
) -> launching.KernelLauncher:
    flags = {"SMOOTHS": smooths, "REDUCES": reduces, "HAS_WEIGHT": dtypes[-1] is not None}
    return row_launcher(_rows_kernel, c, SOFTCAP=softcap, **flags)


def prepare_scale(dlogits: Tensor, dloss: Tensor, loss: Tensor) -> Callable[..., None]:
    """What multiplies such a gradient by dloss, in place."""
    fake_scale(dlogits, dloss, loss)
    start = library.start_nothing
    n = dlogits.numel()
    if n:
        target = runtime.target(dlogits.device)
        c = config(65536, dlogits.element_size(), target)
        programs = min(library.cdiv(n, c.block_n), target.multiprocessors * c.per_sm)
        start = launching.bind(_scale_launcher(dlogits.dtype, dloss.dtype, c), programs, strides=(n,))

    def run(dlogits: Tensor, dloss: Tensor, loss: Tensor) -> None:
        start(dlogits, dloss)

    return run


def fake_scale(dlogits: Tensor, dloss: Tensor, loss: Tensor) -> None:
    library.check_floating("cross_entropy_backward", dlogits=dlogits, dloss=dloss)
    if not dlogits.is_contiguous():
        raise ValueError("cross_entropy_backward: dlogits is not contiguous, as the forward wrote it")
    if dloss.dim():
        raise ValueError(f"cross_entropy_backward: dloss has shape {tuple(dloss.shape)}, expected ()")


def prepare_rows(
    dloss: Tensor,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    factors: Tensor,
    softcap: float,
    smooths: bool,
) -> Callable[..., Tensor]:
    """What gives the gradient of logits, for a gradient of the loss or of each row's."""
    fake_rows(dloss, logits, target, weight, factors, softcap, smooths)
    n_cols = row_length(logits)
    shape, strides, dtype, device = logits.shape, library.contiguous_strides(logits.shape), logits.dtype, logits.device
    start = library.start_nothing
    if logits.numel():
        copies: library.Copies = {}
        rows = rows_layout(logits, copies, 1)
        for place, tensor in ((0, dloss), (2, target), (3, weight)):
            library.contiguous_of(tensor, copies, place)
        c = config(n_cols, logits.element_size(), runtime.target(device))
        dtypes = (dtype, dloss.dtype, target.dtype, None if weight is None else weight.dtype)
        launcher = _rows_launcher(dtypes, float(softcap), smooths, dloss.dim() < target.dim(), c)
        layout = (rows.stride_outer, rows.stride_inner, n_cols)
        programs = rows.n * library.cdiv(n_cols, c.block_n)
        start = launching.bind(launcher, programs, strides=layout, numbers=(rows.inner,))
        start = library.copying(start, copies)

    def run(
        dloss: Tensor, logits: Tensor, target: Tensor, weight: Tensor | None, factors: Tensor, *_: object
    ) -> Tensor:
        dlogits = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        start(dloss, logits, target, weight, factors, dlogits)
        return dlogits

    return run


def fake_rows(
    dloss: Tensor,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    factors: Tensor,
    softcap: float,
    smooths: bool,
) -> Tensor:
    op = "cross_entropy_rows_backward"
    library.check_floating(op, dloss=dloss, logits=logits)
    if dloss.dim() and dloss.shape != target.shape:
        raise ValueError(
            f"{op}: dloss has shape {tuple(dloss.shape)}, expected () or {tuple(target.shape)} to match target"
        )
    if factors.shape != (target.numel(), FACTORS):
        raise ValueError(
            f"{op}: factors has shape {tuple(factors.shape)}, expected {(target.numel(), FACTORS)}, from the forward"
        )
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


# The loss is an argument so that a second derivative, which its graph leads to, is an error and not a silent zero.
scale_op = library.define(
    "cross_entropy_backward(Tensor(a!) dlogits, Tensor dloss, Tensor loss) -> ()",
    prepare=prepare_scale,
    fake=fake_scale,
)
rows_op = library.define(
    "cross_entropy_rows_backward(Tensor dloss, Tensor logits, Tensor target, Tensor? weight, Tensor factors, "
    "float softcap, bool smooths) -> Tensor",
    prepare=prepare_rows,
    fake=fake_rows,
)
