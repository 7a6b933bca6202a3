"""delta of each row, which the backward of attention needs before its kernels, and the gradient of the sinks.

    delta = rowsum(dout * out) - dlse
    dsink[h] = -sum over batch and rows of exp(sink[h] - lse) * delta

The softmax's gradient subtracts delta from every dp = dout·v of its row. The log-sum-exp's own gradient joins here,
because its derivative by a score is that score's probability. A sink is one more score, whose value is zero: it gets
-delta times its probability. Bytes: dout and out are read once, delta is a float32 a row.

For the Hopper kernels, delta is stored beside lse times log2(e), in tiles that TMA copies, and dq's float32 sum and the
counter of tiles are cleared before them; after them, dq is read from that sum, scaled, and cast to its dtype and
strides. The tiles of packed sequences are where their slots are (`slots`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rooftile import library, runtime
from rooftile.launching import KernelLauncher, bind
from rooftile.ops.attention.slots import block_slots, find_block
from rooftile.primitives.partials import prepare_sum
from rooftile.primitives.scores import LOG2E

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def _delta(out, dout, dlse_ptr, index, strides, mask, HAS_DLSE: tl.constexpr):
    """rowsum(dout * out) - dlse, for the rows of that index: batch, head and row. out and dout are in float32."""
    delta = tl.sum(out * dout, axis=1)
    if HAS_DLSE:
        batch, head, row = index
        stride_b, stride_h, stride_t = strides
        dlse = dlse_ptr + batch * stride_b + head * stride_h + row.to(tl.int64) * stride_t
        delta -= tl.load(dlse, mask=mask, other=0.0).to(tl.float32)
    return delta


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
    strides = (stride_lb, stride_lh, stride_lt)
    delta = _delta(out, dout, dlse_ptr, (batch, head, row), strides, row_mask, HAS_DLSE)
    if HAS_LSE:
        lse = tl.load(lse_ptr + flat, mask=row_mask, other=float("inf"))
        # The gradient of a log-sum-exp of -inf is often NaN, and NaN times a probability of 0 is NaN.
        delta = tl.where(lse == float("-inf"), 0.0, delta)

    tl.store(delta_ptr + flat, delta, mask=row_mask)
    if SINKS:
        sink = tl.load(sinks_ptr + head).to(tl.float32)
        # Without the test, a sink of -inf over a row that sees no key gives exp2(-inf + inf) = NaN.
        share = tl.where(lse == float("-inf"), 0.0, tl.exp2((sink - lse) * LOG2E))
        tl.store(partial_ptr + (batch * n_blocks + block) * heads + head, -tl.sum(share * delta, axis=0))


@functools.cache
def _delta_launcher(
    dtypes: tuple[torch.dtype | None, ...], value_dim: int, has_lse: bool, block_m: int
) -> KernelLauncher:
    constants = {
        "N": value_dim,
        "HAS_DLSE": dtypes[2] is not None,
        "HAS_LSE": has_lse,
        "SINKS": dtypes[3] is not None,
        "BLOCK_M": block_m,
        "BLOCK_N": library.power_of_two(value_dim),
    }
    return KernelLauncher(_delta_kernel, constants, num_warps=4)


def prepare_delta(
    out: Tensor, dout: Tensor, dlse: Tensor | None, sinks: Tensor | None, dsinks: Tensor | None
) -> Callable[..., None]:
    """The launch for tensors like these, to be called with `out, dout, dlse, delta, lse, sinks, dsinks`.

    It fills delta, (B, H, T) float32 contiguous, and dsinks, (H,), if there is one. out and dout are (B, H, T,
    value_dim) and dlse (B, H, T), of any strides. Where lse is -inf, delta is 0, whatever dlse is. The sinks' gradient
    is summed in one order, the same every time.
    """
    batch, heads, n_q, value_dim = out.shape
    if batch * heads * n_q == 0:
        return lambda *tensors: None if tensors[6] is None else tensors[6].zero_()
    # In the interpreter a program costs by its operations, not by their size.
    block_m = 128 if runtime.target(out.device) is runtime.INTERPRETER else 64
    blocks = library.cdiv(n_q, block_m)
    with_sinks = dsinks is not None
    with_lse = with_sinks or dlse is not None  # else nothing depends on it
    dtypes = (out.dtype, dout.dtype, *(None if t is None else t.dtype for t in (dlse, sinks if with_sinks else None)))
    strides = (*out.stride(), *dout.stride(), *((0, 0, 0) if dlse is None else dlse.stride()))
    launcher = _delta_launcher(dtypes, value_dim, with_lse, block_m)
    start = bind(launcher, batch * heads * blocks, strides=strides, numbers=(n_q, heads))
    sum_partials = None if dsinks is None else prepare_sum(batch * blocks, heads, dsinks.dtype)

    def run(out: Tensor, dout: Tensor, dlse: Tensor | None, delta: Tensor, lse: Tensor, *of_sinks: Any) -> None:
        if sum_partials is None:
            start(out, dout, dlse, delta, lse if with_lse else None, None, None)
            return
        sinks, dsinks = of_sinks
        partial = torch.empty((batch * blocks, heads), dtype=torch.float32, device=out.device)
        start(out, dout, dlse, delta, lse, sinks, partial)
        sum_partials(partial, dsinks, None)

    return run


@triton.jit(do_not_specialize=["n_q", "heads", "sequences"], do_not_specialize_on_alignment=["starts_ptr"])
def _stats_kernel(
    out_ptr,
    dout_ptr,
    lse_ptr,
    dlse_ptr,
    stats_ptr,
    sums_ptr,
    counter_ptr,
    starts_ptr,
    stride_ob,
    stride_oh,
    stride_ot,
    stride_gb,
    stride_gh,
    stride_gt,
    stride_lb,
    stride_lh,
    stride_lt,
    n_q,
    heads,
    sequences,
    HAS_DLSE: tl.constexpr,
    HAS_SUMS: tl.constexpr,
    HAS_COUNTER: tl.constexpr,
    PACKED: tl.constexpr,
    ROWS: tl.constexpr,
    N: tl.constexpr,
    DIM: tl.constexpr,
):
    """stats, (B * H, blocks, 2, ROWS): lse times log2(e), or +inf for rows that see nothing or don't exist; delta."""
    n_blocks = n_q // ROWS + sequences if PACKED else tl.cdiv(n_q, ROWS)
    tile = tl.program_id(0).to(tl.int64)
    if HAS_COUNTER and tile == 0:
        tl.store(counter_ptr, 0)
    block = tl.program_id(0) % n_blocks
    flat = tile // n_blocks
    batch = flat // heads
    head = flat % heads
    end = n_q
    if PACKED:
        _, begin, length, block = find_block(block, starts_ptr, sequences, 0, ROWS)
        if length == 0:
            return
        row = begin + block * ROWS + tl.arange(0, ROWS)
        end = begin + length
    else:
        row = block * ROWS + tl.arange(0, ROWS)
    there = row < end
    rows = row.to(tl.int64)[:, None]
    cols = tl.arange(0, DIM)[None, :]
    mask = there[:, None] & (cols < N)

    if HAS_SUMS:  # zeros, so their order in the tile does not matter
        sums = sums_ptr + tile * (ROWS * DIM) + tl.arange(0, ROWS * DIM)
        tl.store(sums, tl.zeros([ROWS * DIM], tl.float32))

    out = tl.load(out_ptr + batch * stride_ob + head * stride_oh + rows * stride_ot + cols, mask, other=0.0)
    dout = tl.load(dout_ptr + batch * stride_gb + head * stride_gh + rows * stride_gt + cols, mask, other=0.0)
    lse = tl.load(lse_ptr + flat * n_q + row, mask=there, other=float("-inf"))
    strides = (stride_lb, stride_lh, stride_lt)
    out, dout = out.to(tl.float32), dout.to(tl.float32)
    delta = _delta(out, dout, dlse_ptr, (batch, head, row), strides, there, HAS_DLSE)
    fully_masked = lse == float("-inf")

    stats_ptr += tile * (2 * ROWS) + tl.arange(0, ROWS)
    tl.store(stats_ptr, tl.where(fully_masked, float("inf"), lse * LOG2E))
    tl.store(stats_ptr + ROWS, tl.where(fully_masked, 0.0, delta))


@triton.jit(do_not_specialize=["n_q", "heads", "scale", "sequences"], do_not_specialize_on_alignment=["starts_ptr"])
def _finish_kernel(
    sums_ptr,
    dq_ptr,
    starts_ptr,
    stride_b,
    stride_h,
    stride_t,
    n_q,
    heads,
    scale,
    sequences,
    PACKED: tl.constexpr,
    ROWS: tl.constexpr,
    N: tl.constexpr,
    DIM: tl.constexpr,
):
    """One of the two tiles of 64 x 64 of dq that a block of queries has."""
    n_blocks = n_q // ROWS + sequences if PACKED else tl.cdiv(n_q, ROWS)
    program = tl.program_id(0).to(tl.int64)
    tile = program // 2
    part = program % 2
    flat = tile // n_blocks
    end = n_q
    if PACKED:
        _, begin, length, block = find_block((tile % n_blocks).to(tl.int32), starts_ptr, sequences, 0, ROWS)
        if length == 0:
            return
        row = begin + block * ROWS + (part // (DIM // 64)) * 64 + tl.arange(0, 64)
        end = begin + length
    else:
        row = (tile % n_blocks) * ROWS + (part // (DIM // 64)) * 64 + tl.arange(0, 64)
    cols = (part % (DIM // 64)) * 64 + tl.arange(0, 64)

    sums = tl.load(sums_ptr + program * 4096 + tl.arange(0, 4096))
    # The sum has the order of the accumulator's registers (`_add_dq`): row // 16 (the warp), column // 8, row % 8,
    # column % 8 // 2, row % 16 // 8, column % 2.
    dq = sums.reshape(4, 8, 8, 4, 2, 2).permute(0, 4, 2, 1, 3, 5).reshape(64, 64) * scale

    dq_ptr += (flat // heads) * stride_b + (flat % heads) * stride_h
    mask = (row[:, None] < end) & (cols[None, :] < N)
    tl.store(dq_ptr + row[:, None] * stride_t + cols[None, :], dq.to(dq_ptr.dtype.element_ty), mask)


def row_blocks(n_q: int, rows: int, packed: int) -> int:
    """Blocks of a head's rows in stats and dq's sum. `packed` is how many sequences they are, or 0."""
    return block_slots(n_q, rows, packed) if packed else library.cdiv(n_q, rows)


@functools.cache
def _stats_launcher(
    dtypes: tuple[torch.dtype | None, ...],
    has_sums: bool,
    has_counter: bool,
    packed: bool,
    rows: int,
    head_dim: int,
    dim: int,
) -> KernelLauncher:
    constants = {
        "HAS_DLSE": dtypes[2] is not None,
        "HAS_SUMS": has_sums,
        "HAS_COUNTER": has_counter,
        "PACKED": packed,
        "ROWS": rows,
        "N": head_dim,
        "DIM": dim,
    }
    return KernelLauncher(_stats_kernel, constants, num_warps=4)


def prepare_stats(
    out: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    has_sums: bool,
    has_counter: bool,
    rows: int,
    dim: int,
    packed: int = 0,
) -> Callable[..., None]:
    """The launch for tensors like these, to be called with `out, dout, lse, dlse, stats, sums, counter, starts`.

    It fills stats, and clears dq's sum and the counter of dk's and dv's tiles, if there are any. out and dout are (B,
    H, T, D) with a last stride of 1; dim is D, padded, and rows are those of a tile. `packed` is how many sequences
    they are, or 0.
    """
    batch, heads, n_q, head_dim = out.shape
    dtypes = (out.dtype, dout.dtype, None if dlse is None else dlse.dtype)
    strides = (*out.stride()[:3], *dout.stride()[:3], *((0, 0, 0) if dlse is None else dlse.stride()))
    launcher = _stats_launcher(dtypes, has_sums, has_counter, packed > 0, rows, head_dim, dim)
    return bind(launcher, batch * heads * row_blocks(n_q, rows, packed), strides=strides, numbers=(n_q, heads, packed))


@functools.cache
def _finish_launcher(dtype: torch.dtype, packed: bool, rows: int, head_dim: int, dim: int) -> KernelLauncher:
    constants = {"PACKED": packed, "ROWS": rows, "N": head_dim, "DIM": dim}
    return KernelLauncher(_finish_kernel, constants, num_warps=4)


def prepare_finish(dq: Tensor, scale: float, rows: int, dim: int, packed: int = 0) -> Callable[..., None]:
    """The launch for dq (B, H, T, D) with a last stride of 1, to be called with `sums, dq, starts`: dq out of its sum.

    The other arguments are as in `prepare_stats`.
    """
    batch, heads, n_q, head_dim = dq.shape
    programs = 2 * batch * heads * row_blocks(n_q, rows, packed)
    launcher = _finish_launcher(dq.dtype, packed > 0, rows, head_dim, dim)
    return bind(launcher, programs, strides=dq.stride()[:3], numbers=(n_q, heads, scale, packed))
