"""Few rows of x, up to 64: the weights get the matrix unit's side of 64, so that little of it is idle.

A tile is `block_n` rows of the weight and all rows of x (`block_m`, padded), and is computed transposed,
`w[n, k] x[m, k]`: the weights stream through shared memory once, x comes out of the L2. Where tiles are fewer than the
GPU holds, `split_k` programs share the sum of one; the last to come adds their parts in order.

On GPUs that have it the tensor memory accelerator does the loads. Equal shares of all tiles' sums, whatever part of a
tile that is (stream-K), were slower on an H200 by 2 to 8 % than the best split: what the last wave leaves idle is less
than what the partial sums cost.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from rooftile import launching, library, runtime  # before Triton: runtime fixes the mode of the process
from rooftile.ops.gemm.config import MatmulConfig, Problem
from rooftile.primitives import pdl
from rooftile.primitives.activations import activate
from rooftile.primitives.pdl import pdl_launch_dependents, pdl_wait, prefetch
from rooftile.primitives.splitk import arrives_last

import triton  # isort: skip
import triton.language as tl  # isort: skip
from triton.tools.tensor_descriptor import TensorDescriptor  # isort: skip

# Blocks of its weights that a program brings into the L2 before the kernel ahead has ended: as in row.py.
PREFETCH = 1


@triton.jit
def _weights(
    w, row, k, n_end, n_inner, stride_wn, TMA: tl.constexpr, EVEN_K: tl.constexpr, N: tl.constexpr, K: tl.constexpr
):
    """The tile of the weight from that row and k on."""
    if TMA:
        tile = w.load([row, k])
    else:
        # Rows past the last are those of the last again, in bounds, so that loads need no mask; they are not stored.
        rows = tl.minimum(row + tl.arange(0, N), n_end - 1).to(tl.int64)
        ks = k + tl.arange(0, K)
        pointers = w + rows[:, None] * stride_wn + ks[None, :]
        if EVEN_K:
            tile = tl.load(pointers, eviction_policy="evict_first")
        else:
            tile = tl.load(pointers, mask=(ks < n_inner)[None, :], other=0.0, eviction_policy="evict_first")
    return tile


@triton.jit
def _rows_of_x(
    x, k, n_rows, n_inner, stride_xm, TMA: tl.constexpr, EVEN_K: tl.constexpr, M: tl.constexpr, K: tl.constexpr
):
    """x from k on, transposed."""
    if TMA:
        tile = x.load([0, k]).T
    else:
        rows = tl.minimum(tl.arange(0, M), n_rows - 1).to(tl.int64)
        ks = k + tl.arange(0, K)
        pointers = x + rows[None, :] * stride_xm + ks[:, None]
        if EVEN_K:
            tile = tl.load(pointers)
        else:
            tile = tl.load(pointers, mask=(ks < n_inner)[:, None], other=0.0)
    return tile


@triton.jit
def _prefetch_weights(w_ptr, row, k, n_cols, n_inner, stride_wn, N: tl.constexpr, K: tl.constexpr):
    """Bring one block of the weight into the L2."""
    LINE: tl.constexpr = 128 // (w_ptr.dtype.element_ty.primitive_bitwidth // 8)
    rows = tl.minimum(row + tl.arange(0, N), n_cols - 1).to(tl.int64)
    ks = tl.minimum(k + tl.arange(0, (K + LINE - 1) // LINE) * LINE, n_inner - 1)
    prefetch(w_ptr + rows[:, None] * stride_wn + ks[None, :])


@triton.jit(do_not_specialize=["n_rows", "n_cols"])
def _skinny_kernel(
    x,
    w,
    w_ptr,
    out_ptr,
    bias_ptr,
    residual_ptr,
    partial_ptr,
    counters_ptr,
    stride_xm,
    stride_wn,
    stride_om,
    stride_rm,
    n_inner,
    n_rows,
    n_cols,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCHED: tl.constexpr,
):
    tile = tl.program_id(0) // SPLIT
    part = tl.program_id(0) % SPLIT
    row = tile * BLOCK_N
    length = tl.cdiv(n_inner, SPLIT * BLOCK_K) * BLOCK_K
    start = part * length
    if PREFETCHED >= 0:
        pdl_launch_dependents()
        for b in tl.static_range(PREFETCHED):
            _prefetch_weights(w_ptr, row, start + b * BLOCK_K, n_cols, n_inner, stride_wn, BLOCK_N, BLOCK_K)
        pdl_wait()

    cols = row + tl.arange(0, BLOCK_N)
    # Asked for now: at the end a program would wait for it with nothing else under way.
    if HAS_BIAS:
        bias = tl.load(bias_ptr + cols, mask=cols < n_cols).to(tl.float32)
        if GATED:
            up_bias = tl.load(bias_ptr + n_cols + cols, mask=cols < n_cols).to(tl.float32)

    z = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    z_up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for k in tl.range(start, tl.minimum(start + length, n_inner), BLOCK_K, num_stages=STAGES):
        w_tile = _weights(w, row, k, n_cols, n_inner, stride_wn, TMA, EVEN_K, BLOCK_N, BLOCK_K)
        x_tile = _rows_of_x(x, k, n_rows, n_inner, stride_xm, TMA, EVEN_K, BLOCK_M, BLOCK_K)
        z = tl.dot(w_tile, x_tile, z, input_precision=PRECISION)
        if GATED:
            w_tile = _weights(w, n_cols + row, k, 2 * n_cols, n_inner, stride_wn, TMA, EVEN_K, BLOCK_N, BLOCK_K)
            z_up = tl.dot(w_tile, x_tile, z_up, input_precision=PRECISION)

    if SPLIT > 1:
        SIZE: tl.constexpr = BLOCK_N * BLOCK_M
        at = partial_ptr + tile.to(tl.int64) * (SPLIT * (1 + GATED) * SIZE)
        at += tl.arange(0, BLOCK_N)[:, None] + tl.arange(0, BLOCK_M)[None, :] * BLOCK_N
        tl.store(at + part * SIZE, z)
        if GATED:
            tl.store(at + (SPLIT + part) * SIZE, z_up)
        if not arrives_last(counters_ptr + tile, SPLIT):
            return
        z = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for s in tl.static_range(SPLIT):
            z += tl.load(at + s * SIZE, cache_modifier=".cg")
        if GATED:
            z_up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for s in tl.static_range(SPLIT):
                z_up += tl.load(at + (SPLIT + s) * SIZE, cache_modifier=".cg")

    rows = tl.arange(0, BLOCK_M)[None, :].to(tl.int64)
    mask = (rows < n_rows) & (cols < n_cols)[:, None]
    if HAS_BIAS:
        z += bias[:, None]
        if GATED:
            z_up += up_bias[:, None]
    if ACTIVATION != "":
        z = activate(z, ACTIVATION)
    if GATED:
        z *= z_up
    if HAS_RESIDUAL:
        z += tl.load(residual_ptr + rows * stride_rm + cols[:, None], mask=mask).to(tl.float32)
    tl.store(out_ptr + rows * stride_om + cols[:, None], z.to(out_ptr.dtype.element_ty), mask=mask)


@functools.cache
def _plan(
    dtypes: tuple[torch.dtype | None, ...],
    activation: str,
    gated: bool,
    precision: str,
    tma: bool,
    even_k: bool,
    prefetched: int,
    c: MatmulConfig,
) -> launching.KernelLauncher:
    constants = {
        "ACTIVATION": activation,
        "GATED": gated,
        "HAS_BIAS": dtypes[2] is not None,
        "HAS_RESIDUAL": dtypes[3] is not None,
        "PRECISION": precision,
        "TMA": tma,
        "EVEN_K": even_k,
        "BLOCK_M": c.block_m,
        "BLOCK_N": c.block_n,
        "BLOCK_K": c.block_k,
        "SPLIT": c.split_k,
        "STAGES": c.num_stages,
        "PREFETCHED": prefetched,
    }
    options = {"launch_pdl": True} if prefetched >= 0 else {}
    return launching.KernelLauncher(_skinny_kernel, constants, num_warps=c.num_warps, **options)


def can_implement(p: Problem, c: MatmulConfig, target: runtime.Target) -> str | None:
    """Why this kernel can't run that problem so; None where it can."""
    if c.pingpong or c.stream_k:
        return f"{'pingpong' if c.pingpong else 'stream_k'} is True, which kernel 'hopper' alone has"
    if p.m > c.block_m or p.batch != 1:
        return f"block_m is {c.block_m}: kernel 'skinny' takes all rows of x at once, not {p.batch} x {p.m}"
    if p.x_layout != "k" or p.w_layout != "k":
        return "kernel 'skinny' takes operands that are contiguous along k"
    if c.block_m < 16 or c.block_n < 16 or c.block_k < 16:
        return f"the matrix unit takes no tile of {c.block_m} x {c.block_n} x {c.block_k}"
    shared = c.num_stages * (c.block_n * (1 + p.gated) + c.block_m) * c.block_k * p.dtype.itemsize
    if shared > target.shared_memory:
        return f"num_stages is {c.num_stages}: {shared} bytes of tiles, expected at most {target.shared_memory}"
    if c.block_n * c.block_m * (1 + p.gated) // (c.num_warps * target.warp_size) > 128:
        return f"the tile has more than 128 sums for each thread of {c.num_warps} warps"
    return None


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
    """Launch it: x (M, K), w (N, K) or (2N, K), out (M, N)."""
    (n_rows, n_inner), n_cols = x.shape, out.shape[-1]
    tiles = library.cdiv(n_cols, c.block_n)
    partial = counters = None
    if c.split_k > 1:
        if isinstance(tiles, torch.SymInt):
            raise launching.Untraceable("counters of a symbolic number")
        size = c.split_k * (1 + gated) * c.block_n * c.block_m
        partial = torch.empty(tiles * size, dtype=torch.float32, device=x.device)
        counters = launching.counters(tiles, x.device)
    target = runtime.target(x.device)
    early = pdl.supported(target)
    operands: tuple[Tensor | TensorDescriptor, Tensor | TensorDescriptor] = x, w
    tma = False
    if early and x.element_size() == 2:
        described = (
            launching.matrix_descriptor(x, c.block_m, c.block_k),
            launching.matrix_descriptor(w, c.block_n, c.block_k),
        )
        if described[0] is not None and described[1] is not None:
            operands, tma = (described[0], described[1]), True
    dtypes = (
        x.dtype,
        out.dtype,
        bias.dtype if bias is not None else None,
        residual.dtype if residual is not None else None,
    )
    even_k = n_inner % c.block_k == 0
    plan = _plan(dtypes, activation, gated, precision, tma, even_k, PREFETCH if early else -1, c)
    tensors = (*operands, w, out, bias, residual, partial, counters)
    strides = (x.stride(0), w.stride(0), out.stride(0), residual.stride(0) if residual is not None else 0, n_inner)
    launching.launch(plan, tiles * c.split_k, tensors, strides, (n_rows, n_cols))
