"""The epilogue of the GEMM mainloops for few and many rows, whatever the weight's format.

`sum_parts` adds the parts of a split sum, `scale_tile` applies scales that belong to the whole sum, and `finish` adds
the bias, applies the activation or the gate, adds the residual and stores. `rows` and `cols` are indices of the output,
expanded to the dimensions of its tile: `(1, M)` and `(N, 1)` where a mainloop computes the transposed tile, else
`(M, 1)` and `(1, N)`. The mainloops for one row have their own (`gemv_epilogue.py`).
"""

from __future__ import annotations

from rooftile import runtime  # noqa: F401  # before Triton: runtime fixes the mode of the process
from rooftile.primitives.activations import activate

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def sum_parts(part_ptrs, SIZE: tl.constexpr, SPLIT: tl.constexpr, UNROLL: tl.constexpr):
    """The sum of a tile's SPLIT parts, `SIZE` elements apart, in their order: whichever CTA adds them.

    UNROLL: all parts are loaded before the first is waited for, which takes the registers of as many tiles.
    """
    if UNROLL:
        acc = tl.zeros(part_ptrs.shape, tl.float32)
        for part in tl.static_range(SPLIT):
            acc += tl.load(part_ptrs + part * SIZE, cache_modifier=".cg")
    else:
        acc = tl.load(part_ptrs, cache_modifier=".cg")
        for part in tl.range(1, SPLIT, num_stages=1):
            acc += tl.load(part_ptrs + part * SIZE, cache_modifier=".cg")
    return acc


@triton.jit
def scale_tile(
    acc, x_scale_ptr, w_scale_ptr, rows, cols, stride_sm, stride_sn, X_SCALE: tl.constexpr, W_SCALE: tl.constexpr
):
    """acc times the scales that belong to the whole sum. `rows` and `cols` are in bounds."""
    if X_SCALE == "tensor":
        acc *= tl.load(x_scale_ptr)
    elif X_SCALE == "row":
        acc *= tl.load(x_scale_ptr + rows.to(tl.int64) * stride_sm)
    if W_SCALE == "tensor":
        acc *= tl.load(w_scale_ptr)
    elif W_SCALE == "row":
        acc *= tl.load(w_scale_ptr + cols.to(tl.int64) * stride_sn)
    return acc


@triton.jit
def finish(
    acc, up, bias, up_bias, residual_ptr, out_ptr, rows, cols, stride_rm, stride_om, mask,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Store `act(acc + bias) + residual`, or gated `act(acc + bias) * (up + up_bias) + residual`, rounded once.

    `bias`, `up_bias` and `residual_ptr` may be None. `rows` are 64 bits wide.
    """
    if bias is not None:
        acc += bias
        if GATED:
            up += up_bias
    if ACTIVATION != "":
        acc = activate(acc, ACTIVATION)
    if GATED:
        acc *= up
    if residual_ptr is not None:
        acc += tl.load(residual_ptr + rows * stride_rm + cols, mask=mask).to(tl.float32)
    tl.store(out_ptr + rows * stride_om + cols, acc.to(out_ptr.dtype.element_ty), mask=mask)
