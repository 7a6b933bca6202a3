"""What the backward of attention needs of each output row before it meets the keys, and the gradient of the sinks.

    delta = rowsum(dout * out) - dlse
    dsink[h] = -sum over batch and rows of exp(sink[h] - lse) * delta

The softmax's gradient takes delta off every dp = dout·v of its row. The log-sum-exp's own gradient joins here, because
its derivative by a score is that score's probability. A sink is one more score, whose value is zero: it gets -delta
times its probability. Bytes: dout and out are read once, delta is a float32 a row.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from rooftile import launching, library, runtime
from rooftile.primitives.partials import sum_partials

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit(do_not_specialize=["n_q", "heads"])
def _delta_kernel(
    out_ptr,
    dout_ptr,
    dlse_ptr,
    delta_ptr,
    lse_ptr,
    sinks_ptr,
    partial_ptr,
    stride_ob,
    stride_oh,
    stride_ot,
    stride_od,
    stride_gb,
    stride_gh,
    stride_gt,
    stride_gd,
    stride_lb,
    stride_lh,
    stride_lt,
    n_q,
    heads,
    N: tl.constexpr,
    HAS_DLSE: tl.constexpr,
    HAS_LSE: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    n_blocks = tl.cdiv(n_q, BLOCK_M)
    block = tl.program_id(0) % n_blocks
    head = ((tl.program_id(0) // n_blocks) % heads).to(tl.int64)
    batch = ((tl.program_id(0) // n_blocks) // heads).to(tl.int64)
    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = row < n_q
    rows = row.to(tl.int64)[:, None]
    cols = tl.arange(0, BLOCK_N).to(tl.int64)[None, :]
    mask = row_mask[:, None] & (cols < N)
    flat = (batch * heads + head) * n_q + row

    out_ptr += batch * stride_ob + head * stride_oh
    dout_ptr += batch * stride_gb + head * stride_gh
    out = tl.load(out_ptr + rows * stride_ot + cols * stride_od, mask=mask, other=0.0).to(tl.float32)
    dout = tl.load(dout_ptr + rows * stride_gt + cols * stride_gd, mask=mask, other=0.0).to(tl.float32)

    delta = tl.sum(out * dout, axis=1)
    if HAS_DLSE:
        dlse = dlse_ptr + batch * stride_lb + head * stride_lh + row.to(tl.int64) * stride_lt
        delta -= tl.load(dlse, mask=row_mask, other=0.0).to(tl.float32)
    if HAS_LSE:
        lse = tl.load(lse_ptr + flat, mask=row_mask, other=float("inf"))
        # The gradient of a log-sum-exp of -inf is often NaN, and what it is multiplied by is 0: that would be NaN.
        delta = tl.where(lse == float("-inf"), 0.0, delta)

    tl.store(delta_ptr + flat, delta, mask=row_mask)
    if SINKS:
        sink = tl.load(sinks_ptr + head).to(tl.float32)
        # A sink of -inf over a row that sees nothing: neither takes part.
        share = tl.where(lse == float("-inf"), 0.0, tl.exp2((sink - lse) * 1.4426950408889634))
        tl.store(partial_ptr + (batch * n_blocks + block) * heads + head, -tl.sum(share * delta, axis=0))


@functools.cache
def _plan(
    dtypes: tuple[torch.dtype | None, ...], value_dim: int, has_dlse: bool, has_lse: bool, sinks: bool, block_m: int
) -> launching.KernelLauncher:
    constants = {
        "N": value_dim,
        "HAS_DLSE": has_dlse,
        "HAS_LSE": has_lse,
        "SINKS": sinks,
        "BLOCK_M": block_m,
        "BLOCK_N": library.power_of_two(value_dim),
    }
    return launching.KernelLauncher(_delta_kernel, constants, num_warps=4)


def launch(
    out: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    delta: Tensor,
    lse: Tensor | None = None,
    sinks: Tensor | None = None,
    dsinks: Tensor | None = None,
) -> None:
    """Fill `delta`, (B, H, T) float32 contiguous, and `dsinks`, (H,), where one is given (then with `lse` and `sinks`).

    out and dout are (B, H, T, value_dim) and dlse (B, H, T), of any strides. Where lse is given and -inf, delta is 0,
    whatever dlse is. The sinks' gradient is added up in one order, the same every time.
    """
    batch, heads, n_q, value_dim = out.shape
    if delta.numel() == 0:
        if dsinks is not None:
            dsinks.zero_()
        return
    # In the interpreter a program costs by its operations, not by their size.
    block_m = 128 if runtime.target(out.device) is runtime.INTERPRETER else 64
    blocks = library.cdiv(n_q, block_m)
    partial = None
    if dsinks is not None:
        partial = torch.empty((batch * blocks, heads), dtype=torch.float32, device=out.device)
    dtypes = (
        out.dtype,
        dout.dtype,
        dlse.dtype if dlse is not None else None,
        sinks.dtype if partial is not None and sinks is not None else None,
    )
    if dlse is None and partial is None:
        lse = None  # nothing depends on it
    plan = _plan(dtypes, value_dim, dlse is not None, lse is not None, partial is not None, block_m)
    tensors = (out, dout, dlse, delta, lse, *((sinks, partial) if partial is not None else (None, None)))
    strides = (*out.stride(), *dout.stride(), *(dlse.stride() if dlse is not None else (0, 0, 0)))
    launching.launch(plan, batch * heads * blocks, tensors, strides, (n_q, heads))
    if partial is not None and dsinks is not None:
        sum_partials(partial, dsinks)
