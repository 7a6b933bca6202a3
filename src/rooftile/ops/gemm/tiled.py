"""Any product: any sizes, any strides of x and of the weight, batches, on any GPU.

A program has one tile of the output, and a part of its sum. Rows past the last are those of the last again, so that
loads need no mask; an operand that is contiguous along its rows is masked instead, where its last tile is not full, as
repeated rows would not be loaded as vectors.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from rooftile import launching, library, runtime  # before Triton: runtime fixes the mode of the process
from rooftile.ops.gemm.config import MatmulConfig, Problem
from rooftile.primitives.activations import activate
from rooftile.primitives.splitk import arrives_last

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def _known(n, DIVISIBLE: tl.constexpr):
    """n, of which the compiler then knows whether 16 divides it: masks up to n are those of whole vectors."""
    return n // 16 * 16 if DIVISIBLE else n


@triton.jit
def _grouped(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """The tile's row and column: GROUP_M tiles of rows are walked before the next column, so both stay in the L2."""
    width = GROUP_M * tiles_n
    first = tile // width * GROUP_M
    size = tl.minimum(tiles_m - first, GROUP_M)
    return first + tile % width % size, tile % width // size


@triton.jit
def _edge(index, n, EDGE: tl.constexpr):
    """The rows of an operand that a tile loads."""
    return tl.minimum(index, n - 1) if EDGE == "clamp" else index


@triton.jit
def _load(ptr, inside, in_sum, MASK: tl.constexpr, EVEN_K: tl.constexpr):
    """A tile of an operand, zero where its rows (`inside`) or the sum (`in_sum`) end, where that is asked."""
    if MASK and not EVEN_K:
        tile = tl.load(ptr, mask=inside & in_sum, other=0.0)
    elif MASK:
        tile = tl.load(ptr, mask=inside, other=0.0)
    elif not EVEN_K:
        tile = tl.load(ptr, mask=in_sum, other=0.0)
    else:
        tile = tl.load(ptr)
    return tile


@triton.jit
def _finish(
    acc,
    up,
    rows,
    cols,
    bias_ptr,
    residual_ptr,
    out_ptr,
    stride_rm,
    stride_om,
    n_rows,
    n_cols,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """Bias, activation, gate and residual of the sums of a tile, in float32, and the store."""
    rows, cols = rows.to(tl.int64)[:, None], cols[None, :]
    mask = (rows < n_rows) & (cols < n_cols)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
        if GATED:
            up += tl.load(bias_ptr + n_cols + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
    if ACTIVATION != "":
        acc = activate(acc, ACTIVATION)
    if GATED:
        acc *= up
    if HAS_RESIDUAL:
        acc += tl.load(residual_ptr + rows * stride_rm + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + rows * stride_om + cols, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n_rows", "n_cols", "n_sum"])
def _tiled_kernel(
    x_ptr,
    w_ptr,
    out_ptr,
    bias_ptr,
    residual_ptr,
    partial_ptr,
    counter_ptr,
    stride_xb,
    stride_xm,
    stride_xk,
    stride_wb,
    stride_wn,
    stride_wk,
    stride_rb,
    stride_rm,
    stride_ob,
    stride_om,
    n_rows,
    n_cols,
    n_sum,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PRECISION: tl.constexpr,
    X_EDGE: tl.constexpr,
    W_EDGE: tl.constexpr,
    M16: tl.constexpr,
    N16: tl.constexpr,
    K16: tl.constexpr,
    EVEN_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    tile = tl.program_id(0) // SPLIT
    part = tl.program_id(0) % SPLIT
    n_rows, n_cols, n_sum = _known(n_rows, M16), _known(n_cols, N16), _known(n_sum, K16)
    tiles_m, tiles_n = tl.cdiv(n_rows, BLOCK_M), tl.cdiv(n_cols, BLOCK_N)
    batch = (tile // (tiles_m * tiles_n)).to(tl.int64)
    tile_m, tile_n = _grouped(tile % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP_M)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    length = tl.cdiv(tl.cdiv(n_sum, BLOCK_K), SPLIT) * BLOCK_K
    start = part * length
    stop = tl.minimum(start + length, n_sum)

    ks = tl.arange(0, BLOCK_K)
    sum_index = (start + ks).to(tl.int64)
    step = tl.full((), BLOCK_K, tl.int64)
    x_rows = _edge(rows, n_rows, X_EDGE).to(tl.int64)
    w_rows = _edge(cols, n_cols, W_EDGE).to(tl.int64)
    x_inside, w_inside = (rows < n_rows)[:, None], (cols < n_cols)[None, :]
    x_ptrs = x_ptr + batch * stride_xb + x_rows[:, None] * stride_xm + sum_index[None, :] * stride_xk
    w_ptrs = w_ptr + batch * stride_wb + w_rows[None, :] * stride_wn + sum_index[:, None] * stride_wk
    if GATED:
        up_ptrs = w_ptrs + n_cols.to(tl.int64) * stride_wn

    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if GATED:
        up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in tl.range(start, stop, BLOCK_K, num_stages=STAGES):
        in_sum = ks < n_sum - k
        x = _load(x_ptrs, x_inside, in_sum[None, :], X_EDGE == "mask", EVEN_K)
        w = _load(w_ptrs, w_inside, in_sum[:, None], W_EDGE == "mask", EVEN_K)
        acc = tl.dot(x, w, acc, input_precision=PRECISION)
        if GATED:
            w = _load(up_ptrs, w_inside, in_sum[:, None], W_EDGE == "mask", EVEN_K)
            up = tl.dot(x, w, up, input_precision=PRECISION)
            up_ptrs += step * stride_wk
        x_ptrs += step * stride_xk
        w_ptrs += step * stride_wk

    if not GATED:
        up = acc
    if SPLIT > 1:
        SIZE: tl.constexpr = BLOCK_M * BLOCK_N
        inner = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        partial_ptrs = partial_ptr + tile.to(tl.int64) * (SPLIT * (1 + GATED) * SIZE) + inner
        tl.store(partial_ptrs + part * SIZE, acc)
        if GATED:
            tl.store(partial_ptrs + (SPLIT + part) * SIZE, up)
        if not arrives_last(counter_ptr + tile, SPLIT):
            return
        acc = tl.load(partial_ptrs, cache_modifier=".cg")
        for s in tl.range(1, SPLIT, num_stages=1):
            acc += tl.load(partial_ptrs + s * SIZE, cache_modifier=".cg")
        up = acc
        if GATED:
            up = tl.load(partial_ptrs + SPLIT * SIZE, cache_modifier=".cg")
            for s in tl.range(1, SPLIT, num_stages=1):
                up += tl.load(partial_ptrs + (SPLIT + s) * SIZE, cache_modifier=".cg")

    _finish(
        acc,
        up,
        rows,
        cols,
        bias_ptr,
        residual_ptr + batch * stride_rb if HAS_RESIDUAL else residual_ptr,
        out_ptr + batch * stride_ob,
        stride_rm,
        stride_om,
        n_rows,
        n_cols,
        ACTIVATION,
        GATED,
        HAS_BIAS,
        HAS_RESIDUAL,
    )


@functools.cache
def _plan(
    dtypes: tuple[torch.dtype | None, ...],
    activation: str,
    gated: bool,
    precision: str,
    edges: tuple[str, str],
    divisible: tuple[bool, bool, bool],
    even_k: bool,
    c: MatmulConfig,
) -> launching.KernelLauncher:
    constants = {
        "ACTIVATION": activation,
        "GATED": gated,
        "HAS_BIAS": dtypes[2] is not None,
        "HAS_RESIDUAL": dtypes[3] is not None,
        "PRECISION": precision,
        "X_EDGE": edges[0],
        "W_EDGE": edges[1],
        "M16": divisible[0],
        "N16": divisible[1],
        "K16": divisible[2],
        "EVEN_K": even_k,
        "GROUP_M": c.group_m,
        "SPLIT": c.split_k,
        "BLOCK_M": c.block_m,
        "BLOCK_N": c.block_n,
        "BLOCK_K": c.block_k,
        "STAGES": c.num_stages,
    }
    return launching.KernelLauncher(_tiled_kernel, constants, num_warps=c.num_warps)


def shared_memory(p: Problem, c: MatmulConfig) -> int:
    """Bytes of shared memory of a program: the tiles on their way, and a few for what says that they have come."""
    tiles = (c.block_m + c.block_n * (1 + p.gated)) * c.block_k * p.dtype.itemsize
    return c.num_stages * tiles + 64


def can_implement(p: Problem, c: MatmulConfig, target: runtime.Target) -> str | None:
    """Why this kernel can't run that problem so; None where it can."""
    for name in ("block_m", "block_n", "block_k"):
        if getattr(c, name) < 16:
            return f"{name} is {getattr(c, name)}, expected at least 16: the matrix unit takes no smaller tile"
    if c.pingpong or c.stream_k:
        return f"{'pingpong' if c.pingpong else 'stream_k'} is True, which kernel 'hopper' alone has"
    if c.num_warps * target.warp_size > target.max_threads:
        most = target.max_threads // target.warp_size
        return f"num_warps is {c.num_warps}, expected at most {most}"
    sums = c.block_m * c.block_n * (1 + p.gated) // (c.num_warps * target.warp_size)
    if sums > 256:
        return f"block_m x block_n has {sums} sums for each thread of {c.num_warps} warps, expected at most 256"
    needed = shared_memory(p, c)
    if needed > target.shared_memory:
        return (
            f"num_stages is {c.num_stages}: tiles take {needed} bytes of shared memory, expected at most "
            f"{target.shared_memory}"
        )
    if p.precision == "tf32" and p.dtype == torch.float32 and target.arch.startswith("gfx9") and target.arch < "gfx942":
        return f"precision is 'tf32', which {target.arch} has not"
    return None


def _edges(stride: int, other: int, n: int, block: int) -> str:
    """How an operand's last rows are kept in bounds: rows are contiguous where their stride is 1 and k's is not."""
    if stride != 1 or other == 1:
        return "clamp"
    return "none" if n % block == 0 else "mask"


def launch(
    x: Tensor,
    w: Tensor,
    out: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    gated: bool,
    precision: str,
    c: MatmulConfig,
) -> None:
    """Launch it: x (B, M, K), w (B, N, K) or (B, 2N, K); out and residual (B, M, N), last stride 1; or no B."""
    (m, n), k = out.shape[-2:], x.shape[-1]
    batch = out.shape[0] if out.dim() == 3 else 1
    tiles = batch * library.cdiv(m, c.block_m) * library.cdiv(n, c.block_n)
    partial = counter = None
    if c.split_k > 1:
        shape = (tiles, 1 + gated, c.split_k, c.block_m, c.block_n)
        partial = torch.empty(shape, dtype=torch.float32, device=x.device)
        counter = launching.counters(tiles, x.device)
    x_edge = _edges(x.stride(-2), x.stride(-1), m, c.block_m)
    # With a gate the rows of the second half begin at n: nothing of it is read by vectors that a mask would cut.
    w_edge = _edges(w.stride(-2), w.stride(-1), n, c.block_n)
    even_k = bool(k % c.block_k == 0)
    divisible = (x_edge == "mask" and m % 16 == 0, n % 16 == 0, not even_k and k % 16 == 0)
    dtypes = (
        x.dtype,
        out.dtype,
        None if bias is None else bias.dtype,
        None if residual is None else residual.dtype,
    )
    plan = _plan(dtypes, activation, gated, precision, (x_edge, w_edge), divisible, even_k, c)
    strides = (*_strides(x), *_strides(w), *(_strides(residual)[:2] if residual is not None else (0, 0)))
    tensors = (x, w, out, bias, residual, partial, counter)
    launching.launch(plan, tiles * c.split_k, tensors, (*strides, *_strides(out)[:2]), (m, n, k))


def _strides(t: Tensor) -> tuple[int, int, int]:
    """Of batch, row and column; 0 for a batch that is not there."""
    return (t.stride(0) if t.dim() == 3 else 0, t.stride(-2), t.stride(-1))
