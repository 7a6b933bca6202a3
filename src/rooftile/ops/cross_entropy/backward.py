"""Cross entropy backward where the forward has not written the gradient: from the logits and four numbers a row."""

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


@triton.jit(do_not_specialize=["n_inner"])
def _kernel(
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
    SCALE: tl.constexpr,
    SMOOTHS: tl.constexpr,
    REDUCES: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    IN_PLACE: tl.constexpr,
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
    x = capped(x.to(tl.float32), SOFTCAP, SCALE)
    dx = logits_gradient(x, cols, target, top, dloss * factor, dloss * at_target, smoothing, weight, SOFTCAP, SCALE)
    # In place, no other program reads or writes the tile.
    dlogits_ptr = logits_ptr if IN_PLACE else dlogits_ptr + row * n_cols
    tl.store(dlogits_ptr + cols, dx.to(logits_ptr.dtype.element_ty), mask=inside)


@functools.cache
def config(n_cols: int, itemsize: int, target: runtime.Target) -> RowConfig:
    """Tiles of 8 KB."""
    if target is runtime.INTERPRETER:
        return RowConfig("tile", min(8192, library.power_of_two(n_cols)), num_warps=4)
    block_n = max(128, min(8192 // itemsize, library.power_of_two(n_cols)))
    warps = max(1, block_n * itemsize // 1024) * 32 // target.warp_size
    return RowConfig("tile", block_n, num_warps=max(1, warps))


@functools.cache
def _launcher(
    dtypes: tuple[torch.dtype | None, ...], softcap: float, temperature: float, smooths: bool, reduces: bool,
    in_place: bool, c: RowConfig,
) -> launching.KernelLauncher:  # fmt: skip
    flags = {"SMOOTHS": smooths, "REDUCES": reduces, "HAS_WEIGHT": dtypes[-1] is not None, "IN_PLACE": in_place}
    return row_launcher(_kernel, c, rounds_products=temperature != 1.0, SOFTCAP=softcap, SCALE=1 / temperature, **flags)


def _bind(
    dloss: Tensor, logits: Tensor, target: Tensor, weight: Tensor | None, softcap: float, smooths: bool, *,
    in_place: bool, temperature: float = 1.0,
) -> Callable[..., None]:  # fmt: skip
    """The launch over dloss, logits, target, weight, factors and the gradient; None for that in place of the logits."""
    n_cols = row_length(logits)
    if not logits.numel():
        return library.start_nothing
    copies: library.Copies = {}
    rows = rows_layout(logits, copies, 1)
    assert not (in_place and copies), "the rows of logits that are written in place lie two strides apart"
    for place, tensor in ((0, dloss), (2, target), (3, weight)):
        library.contiguous_of(tensor, copies, place)
    c = config(n_cols, logits.element_size(), runtime.target(logits.device))
    dtypes = (logits.dtype, dloss.dtype, target.dtype, None if weight is None else weight.dtype)
    reduces = dloss.dim() < target.dim()
    launcher = _launcher(dtypes, float(softcap), temperature, smooths, reduces, in_place, c)
    layout = (rows.stride_outer, rows.stride_inner, n_cols)
    programs = rows.n * library.cdiv(n_cols, c.block_n)
    start = launching.bind(launcher, programs, strides=layout, numbers=(rows.inner,))
    return library.copying(start, copies)


def prepare(
    dloss: Tensor,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    factors: Tensor,
    softcap: float,
    smooths: bool,
) -> Callable[..., Tensor]:
    """What gives the gradient of logits, for a gradient of the loss or of each row's."""
    fake(dloss, logits, target, weight, factors, softcap, smooths)
    shape, strides, dtype, device = logits.shape, library.contiguous_strides(logits.shape), logits.dtype, logits.device
    start = _bind(dloss, logits, target, weight, softcap, smooths, in_place=False)

    def run(
        dloss: Tensor, logits: Tensor, target: Tensor, weight: Tensor | None, factors: Tensor, *_: object
    ) -> Tensor:
        dlogits = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        start(dloss, logits, target, weight, factors, dlogits)
        return dlogits

    return run


def fake(
    dloss: Tensor,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    factors: Tensor,
    softcap: float,
    smooths: bool,
) -> Tensor:
    name = "cross_entropy_backward"
    library.check_floating(name, dloss=dloss, logits=logits)
    if dloss.dim() and dloss.shape != target.shape:
        raise ValueError(
            f"{name}: dloss has shape {tuple(dloss.shape)}, expected () or {tuple(target.shape)} to match target"
        )
    if factors.shape != (target.numel(), FACTORS):
        raise ValueError(
            f"{name}: factors has shape {tuple(factors.shape)}, expected {(target.numel(), FACTORS)}, from the forward"
        )
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


op = library.define(
    "cross_entropy_backward(Tensor dloss, Tensor logits, Tensor target, Tensor? weight, Tensor factors, "
    "float softcap, bool smooths) -> Tensor",
    prepare=prepare,
    fake=fake,
)


def _prepare_in_place(
    dloss: Tensor, logits: Tensor, target: Tensor, weight: Tensor | None, factors: Tensor, softcap: float,
    smooths: bool, temperature: float,
) -> Callable[..., None]:  # fmt: skip
    start = _bind(dloss, logits, target, weight, softcap, smooths, in_place=True, temperature=temperature)
    return lambda dloss, logits, target, weight, factors, *_: start(dloss, logits, target, weight, factors, None)


# The same over the logits, for other ops: (dloss, logits, target, weight, factors, softcap, smooths,
# temperature).
over_logits = library.Prepared(_prepare_in_place)
