"""Few rows of x, up to 64: the product of swapped operands, its x scaled by the norm's weight on the way.

A tile is `block_n` rows of the weight and all rows of x (`block_m`, padded), computed transposed, `w[n, k] x[m, k]`, as
in the plain product (`matmul/skinny.py`). A step multiplies its part of x by the norm's weight in float32 and rounds it
for the matrix unit; squares are added up beside that, and what they say of a row, its rstd, scales the sums at the end.
Where `split_k` programs share a tile, each writes the squares of its part behind its partial sums. A gated tile has
`block_n` rows of the gate and as many of up, which are multiplied by the same part of x.

float16 would overflow where x times the norm's weight passes 65504, which the norm of x may be far from: a row's part
is brought near 1 by a power of two first, and its products are scaled back.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from rooftile import launching, library, runtime  # before Triton: runtime fixes the mode of the process
from rooftile.ops.gemm import skinny as product
from rooftile.ops.gemm.config import MatmulConfig, Problem
from rooftile.primitives import pdl
from rooftile.primitives.activations import activate
from rooftile.primitives.pdl import pdl_launch_dependents, pdl_wait, prefetch
from rooftile.primitives.splitk import arrives_last

import triton  # isort: skip
import triton.language as tl  # isort: skip
from triton.tools.tensor_descriptor import TensorDescriptor  # isort: skip

# Blocks of its weights that a program brings into the L2 before the kernel ahead has ended; -1: it is started after it.
PREFETCH = 1
# Whether the tensor memory accelerator loads the weights, where there is one.
TMA = True


@triton.jit
def _weights(
    w, row, k, n_cols, n_inner, stride_wn, stride_wk, TMA: tl.constexpr, EVEN_K: tl.constexpr,
    N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """The tile of the weight from that row and k on."""
    if TMA:
        tile = w.load([row, k])
    else:
        # Rows past the last are those of the last again, in bounds, so that loads need no mask; they are not stored.
        rows = tl.minimum(row + tl.arange(0, N), n_cols - 1).to(tl.int64)
        ks = k + tl.arange(0, K)
        pointers = w + rows[:, None] * stride_wn + ks.to(tl.int64)[None, :] * stride_wk
        if EVEN_K:
            tile = tl.load(pointers, eviction_policy="evict_first")
        else:
            tile = tl.load(pointers, mask=(ks < n_inner)[None, :], other=0.0, eviction_policy="evict_first")
    return tile


@triton.jit
def _rows_of_x(
    x, k, n_rows, n_inner, stride_xm, TMA: tl.constexpr, EVEN_K: tl.constexpr, M: tl.constexpr, K: tl.constexpr
):
    """x from k on; zeros past its last row, which no memory is asked for."""
    if TMA:
        tile = x.load([0, k])
    else:
        rows = tl.arange(0, M)
        ks = k + tl.arange(0, K)
        inside = (rows < n_rows)[:, None]
        if not EVEN_K:
            inside &= (ks < n_inner)[None, :]
        tile = tl.load(x + rows.to(tl.int64)[:, None] * stride_xm + ks[None, :], mask=inside, other=0.0)
    return tile


@triton.jit
def _prefetch_weights(w_ptr, row, k, n_cols, n_inner, stride_wn, N: tl.constexpr, K: tl.constexpr):
    """Bring one block of the weight, contiguous along k, into the L2."""
    LINE: tl.constexpr = 128 // (w_ptr.dtype.element_ty.primitive_bitwidth // 8)
    rows = tl.minimum(row + tl.arange(0, N), n_cols - 1).to(tl.int64)
    ks = tl.minimum(k + tl.arange(0, (K + LINE - 1) // LINE) * LINE, n_inner - 1)
    prefetch(w_ptr + rows[:, None] * stride_wn + ks[None, :])


@triton.jit
def _norm_weight(norm_ptr, k, n_inner, OFFSET: tl.constexpr, EVEN_K: tl.constexpr, K: tl.constexpr):
    """What x from k on is multiplied by, but rstd; past the end anything."""
    if EVEN_K:
        scale = tl.load(norm_ptr + tl.minimum(k, n_inner - K) + tl.arange(0, K))
    else:
        ks = k + tl.arange(0, K)
        scale = tl.load(norm_ptr + ks, mask=ks < n_inner, other=0.0)
    return scale.to(tl.float32) + OFFSET


@triton.jit
def _near_one(x):
    """Each row times the power of two that brings its largest number to between 1 and 2, and what undoes that."""
    largest = tl.max(tl.abs(x), axis=1)
    # A float32's exponent is the eight bits after its sign; a NaN's or an infinity's is 255.
    exponent = tl.minimum(largest.to(tl.int32, bitcast=True) >> 23, 253)
    down = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return x * down[:, None], (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["n_rows", "n_cols"])
def _skinny_kernel(
    x,
    w,
    x_ptr,
    norm_ptr,
    w_ptr,
    out_ptr,
    bias_ptr,
    partial_ptr,
    counters_ptr,
    stride_xm,
    stride_wn,
    stride_wk,
    n_inner,
    n_rows,
    n_cols,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TMA: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCHED: tl.constexpr,
):
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
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

    rows = tl.arange(0, BLOCK_M)
    cols = row + tl.arange(0, BLOCK_N)
    # Asked for now: at the end a program would wait for it with nothing else under way.
    if HAS_BIAS:
        bias = tl.load(bias_ptr + cols, mask=cols < n_cols).to(tl.float32)
        if GATED:
            up_bias = tl.load(bias_ptr + n_cols + cols, mask=cols < n_cols).to(tl.float32)

    # Squares are added up in groups as long as what a thread loads at once, so that no thread waits for another.
    VECTOR: tl.constexpr = 128 // DTYPE.primitive_bitwidth
    squares = tl.zeros((BLOCK_M, BLOCK_K // VECTOR), tl.float32)
    z = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    z_up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    next_scale = _norm_weight(norm_ptr, start, n_inner, OFFSET, EVEN_K, BLOCK_K)
    for k in tl.range(start, tl.minimum(start + length, n_inner), BLOCK_K, num_stages=STAGES):
        w_tile = _weights(w, row, k, n_cols, n_inner, stride_wn, stride_wk, TMA, EVEN_K, BLOCK_N, BLOCK_K)
        x_tile = _rows_of_x(x, k, n_rows, n_inner, stride_xm, TMA, EVEN_K, BLOCK_M, BLOCK_K).to(tl.float32)
        scale = next_scale  # loaded a step ahead, as Triton's pipeline leaves loads of so few bytes alone
        next_scale = _norm_weight(norm_ptr, k + BLOCK_K, n_inner, OFFSET, EVEN_K, BLOCK_K)
        squares += tl.sum((x_tile * x_tile).reshape(BLOCK_M, BLOCK_K // VECTOR, VECTOR), axis=2)
        x_tile *= scale[None, :]
        if DTYPE is tl.float16:
            x_tile, back = _near_one(x_tile)
        multiplied = x_tile.to(DTYPE).T
        if DTYPE is tl.float16:
            z += tl.dot(w_tile, multiplied) * back[None, :]
        else:
            z = tl.dot(w_tile, multiplied, z, input_precision="ieee")
        if GATED:
            w_tile = _weights(
                w, n_cols + row, k, 2 * n_cols, n_inner, stride_wn, stride_wk, TMA, EVEN_K, BLOCK_N, BLOCK_K
            )
            if DTYPE is tl.float16:
                z_up += tl.dot(w_tile, multiplied) * back[None, :]
            else:
                z_up = tl.dot(w_tile, multiplied, z_up, input_precision="ieee")
    total = tl.sum(squares, axis=1)

    if SPLIT > 1:
        SIZE: tl.constexpr = BLOCK_N * BLOCK_M
        SUMS: tl.constexpr = (1 + GATED) * SIZE
        behind = partial_ptr + tile.to(tl.int64) * (SPLIT * (SUMS + BLOCK_M)) + SPLIT * SUMS + rows
        at = partial_ptr + tile.to(tl.int64) * (SPLIT * (SUMS + BLOCK_M))
        at += tl.arange(0, BLOCK_N)[:, None] + rows[None, :] * BLOCK_N
        tl.store(at + part * SIZE, z)
        if GATED:
            tl.store(at + (SPLIT + part) * SIZE, z_up)
        tl.store(behind + part * BLOCK_M, total)
        if not arrives_last(counters_ptr + tile, SPLIT):
            return
        z = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        for s in tl.static_range(SPLIT):
            z += tl.load(at + s * SIZE, cache_modifier=".cg")
            total += tl.load(behind + s * BLOCK_M, cache_modifier=".cg")
        if GATED:
            z_up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for s in tl.static_range(SPLIT):
                z_up += tl.load(at + (SPLIT + s) * SIZE, cache_modifier=".cg")

    rstd = tl.rsqrt(total / n_inner + EPS)[None, :]
    z *= rstd
    if HAS_BIAS:
        z += bias[:, None]
    if GATED:
        z_up *= rstd
        if HAS_BIAS:
            z_up += up_bias[:, None]
        z = activate(z, ACTIVATION) * z_up
    mask = (rows < n_rows)[None, :] & (cols < n_cols)[:, None]
    tl.store(out_ptr + rows.to(tl.int64)[None, :] * n_cols + cols[:, None], z.to(DTYPE), mask=mask)


@functools.cache
def _plan(
    dtypes: tuple[torch.dtype | None, ...], eps: float, offset: float, activation: str, tma: bool, even_k: bool,
    prefetched: int, c: MatmulConfig,
) -> launching.KernelLauncher:  # fmt: skip
    constants = {
        "EPS": eps,
        "OFFSET": offset,
        "ACTIVATION": activation,
        "GATED": activation != "",
        "HAS_BIAS": dtypes[-1] is not None,
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
    """Why this kernel can't run that problem so; None where it can. Any layout of the weight is taken."""
    reason = product.can_implement(p, c, target)
    if reason is None and c.block_m * c.block_k // (c.num_warps * target.warp_size) > 128:
        return f"block_m x block_k is {c.block_m * c.block_k} elements for {c.num_warps} warps, more than 128 a thread"
    if reason is None and target.arch == "sm_100" and p.gated and c.block_n >= 64 and c.num_stages > 1:
        # Triton 3.6 fails an assertion of its pipeliner, in bfloat16; 32 rows go to another instruction.
        return (
            f"block_n is {c.block_n} with num_stages={c.num_stages}: the compiler fails for sm_100, expected 32, or 1"
        )
    # Beside the tiles that are on their way lies the one of x that is multiplied.
    shared = (c.num_stages * (c.block_n * (1 + p.gated) + c.block_m) + c.block_m) * c.block_k * p.dtype.itemsize
    if reason is None and shared > target.shared_memory:
        return f"num_stages is {c.num_stages}: {shared} bytes of tiles, expected at most {target.shared_memory}"
    return reason


def launch(
    x: Tensor, norm_weight: Tensor, w: Tensor, out: Tensor, bias: Tensor | None, eps: float, offset: float,
    c: MatmulConfig, activation: str = "",
) -> None:  # fmt: skip
    """Launch it: x (M, K) with a last stride of 1, w (N, K), or gated, with an activation, (2N, K), out (M, N)."""
    (n_rows, n_inner), n_cols = x.shape, out.shape[-1]
    tiles = library.cdiv(n_cols, c.block_n)
    partial = counters = None
    if c.split_k > 1:
        size = c.split_k * (c.block_n * (2 if activation else 1) + 1) * c.block_m
        partial = torch.empty(tiles * size, dtype=torch.float32, device=x.device)
        counters = launching.counters(tiles, x.device)
    supported = pdl.supported(runtime.target(x.device))
    operands: tuple[Tensor | TensorDescriptor, Tensor | TensorDescriptor] = x, w
    tma = False
    if TMA and supported and x.element_size() == 2:
        described = (
            launching.matrix_descriptor(x, c.block_m, c.block_k),
            launching.matrix_descriptor(w, c.block_n, c.block_k),
        )
        if described[0] is not None and described[1] is not None:
            operands, tma = (described[0], described[1]), True
    early = supported and (w.stride(1) == 1 or n_inner == 1)  # a prefetch is of lines along k
    dtypes = (x.dtype, norm_weight.dtype, bias.dtype if bias is not None else None)
    plan = _plan(dtypes, eps, offset, activation, tma, n_inner % c.block_k == 0, PREFETCH if early else -1, c)
    tensors = (*operands, x, norm_weight, w, out, bias, partial, counters)
    launching.launch(plan, tiles * c.split_k, tensors, (x.stride(0), *w.stride(), n_inner), (n_rows, n_cols))
