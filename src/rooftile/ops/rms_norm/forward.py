"""RMSNorm forward: three kernels, by the length of a row (figures in bf16 on an H200, as parts of a copy's speed).

- tile: a program holds whole rows in registers: up to 1024 columns (0.96), and 3584 (0.95);
- loop: a program reads its row twice, the second time out of the L2, which holds the rows in flight: up to 32768
  columns (4096 to 16384: 0.99, a hundredth or two ahead of tile);
- split: a row is held by several programs, which exchange their sums: longer rows (65536 and 131072 columns: 0.87. The
  loop falls to 0.83 and 0.70 there: the rows in flight no longer fit the L2).
"""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor

from rooftile import launching, library, runtime  # before Triton: runtime fixes the mode of the process
from rooftile.ops.rms_norm.common import check, scale
from rooftile.primitives.exchange import gather, publish, resident, split, sum_words

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit(do_not_specialize=["n_rows"])
def _tile_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    u_ptr,
    stride_xm,
    stride_rm,
    n_rows,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    N: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    CAST_FIRST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    rows = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    mask = (rows < n_rows) & (cols < N)

    u = tl.load(x_ptr + rows * stride_xm + cols, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + rows * stride_rm + cols, mask=mask, other=0.0).to(tl.float32)
        u = (u + residual).to(u_ptr.dtype.element_ty)
        tl.store(u_ptr + rows * N + cols, u, mask=mask)
        u = u.to(tl.float32)
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)

    y = u * tl.rsqrt(tl.sum(u * u, axis=1, keep_dims=True) / N + EPS)
    if HAS_WEIGHT:
        y = scale(y, weight, OFFSET, y_ptr.dtype.element_ty, CAST_FIRST)

    tl.store(y_ptr + rows * N + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n_rows"])
def _loop_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    u_ptr,
    stride_xm,
    stride_rm,
    n_rows,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    N: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    CAST_FIRST: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride_xm
    y_ptr += row * N
    if HAS_RESIDUAL:
        residual_ptr += row * stride_rm
        u_ptr += row * N
    block = tl.arange(0, BLOCK_N)

    # Not pipelined: through shared memory, as Triton would have it, it took a fifth longer on an H200.
    squares = tl.zeros((BLOCK_N,), tl.float32)
    for start in tl.range(0, N, BLOCK_N, num_stages=1):
        cols = start + block
        u = tl.load(x_ptr + cols, mask=cols < N, other=0.0, eviction_policy="evict_last").to(tl.float32)
        if HAS_RESIDUAL:
            residual = tl.load(residual_ptr + cols, mask=cols < N, other=0.0, eviction_policy="evict_first")
            u = (u + residual.to(tl.float32)).to(u_ptr.dtype.element_ty)
            tl.store(u_ptr + cols, u, mask=cols < N)
            u = u.to(tl.float32)
        squares += u * u
    rstd = tl.rsqrt(tl.sum(squares, axis=0) / N + EPS)
    if HAS_RESIDUAL:
        tl.debug_barrier()  # what is read below was written above, by other threads perhaps
        x_ptr = u_ptr

    for start in tl.range(0, N, BLOCK_N, num_stages=1):
        cols = start + block
        y = tl.load(x_ptr + cols, mask=cols < N, other=0.0, eviction_policy="evict_first").to(tl.float32) * rstd
        if HAS_WEIGHT:
            weight = tl.load(weight_ptr + cols, mask=cols < N, other=0.0, eviction_policy="evict_last").to(tl.float32)
            y = scale(y, weight, OFFSET, y_ptr.dtype.element_ty, CAST_FIRST)
        tl.store(y_ptr + cols, y.to(y_ptr.dtype.element_ty), mask=cols < N, cache_modifier=".cs")


@triton.jit(do_not_specialize=["n_rows"])
def _split_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    u_ptr,
    words_ptr,
    stride_xm,
    stride_rm,
    n_rows,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    N: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    CAST_FIRST: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    STAGES: tl.constexpr,
):
    DTYPE: tl.constexpr = y_ptr.dtype.element_ty
    split = tl.program_id(0) % SPLITS
    first = tl.program_id(0) // SPLITS
    step = tl.num_programs(0) // SPLITS
    cols = split * BLOCK_N + tl.arange(0, BLOCK_N)
    col_mask = cols < N
    splits = tl.arange(0, BLOCK_S)
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + cols, mask=col_mask, other=0.0)

    # A row is finished three steps after it was read, so that the others' sums have come by then.
    u1 = tl.zeros((BLOCK_N,), DTYPE)
    u2 = tl.zeros((BLOCK_N,), DTYPE)
    u3 = tl.zeros((BLOCK_N,), DTYPE)
    for r in tl.range(first, n_rows + 3 * step, step, num_stages=STAGES):
        row = r.to(tl.int64)
        mask = col_mask & (row < n_rows)
        done = row - 3 * step
        word_mask = (done >= 0) & (splits < SPLITS)
        words = tl.load(words_ptr + done * SPLITS + splits, mask=word_mask, other=-1, volatile=True)

        u = tl.load(x_ptr + row * stride_xm + cols, mask=mask, other=0.0, eviction_policy="evict_first")
        if HAS_RESIDUAL:
            residual = tl.load(
                residual_ptr + row * stride_rm + cols, mask=mask, other=0.0, eviction_policy="evict_first"
            )
            u = (u.to(tl.float32) + residual.to(tl.float32)).to(DTYPE)
            tl.store(u_ptr + row * N + cols, u, mask=mask)
        squares = u.to(tl.float32) * u.to(tl.float32)
        publish(words_ptr + row * SPLITS + split, tl.sum(squares, axis=0), row < n_rows)

        if done >= 0:
            words = gather(words, words_ptr + done * SPLITS + splits, word_mask)
            y = u3.to(tl.float32) * tl.rsqrt(sum_words(words, word_mask) / N + EPS)
            if HAS_WEIGHT:
                y = scale(y, weight.to(tl.float32), OFFSET, DTYPE, CAST_FIRST)
            tl.store(y_ptr + done * N + cols, y.to(DTYPE), mask=col_mask)

        # Adding zero: Triton does not pipeline a loop that hands a value on over two iterations as it is.
        u3 = u2 + 0
        u2 = u1 + 0
        u1 = u


@dataclasses.dataclass(frozen=True, eq=False)  # a key of caches on every call: by identity
class Config:
    """Which kernel; rows a program of the tile kernel holds; columns of a block; warps.

    For the split kernel: programs a multiprocessor, and the registers a thread may have for that many to fit.
    """

    kernel: str
    block_n: int
    num_warps: int
    rows: int = 1
    per_multiprocessor: int = 0
    max_registers: int | None = None
    stages: int = 1


@functools.cache
def config(n_cols: int, itemsize: int, target: runtime.Target) -> Config:
    """Chosen on an H200 (bf16) from some hundred configurations of each kernel at the lengths named above."""
    block_n = library.power_of_two(n_cols)
    if target is runtime.INTERPRETER:
        return Config("tile", block_n, num_warps=4, rows=16)
    if block_n <= 1024:
        return Config("tile", block_n, num_warps=4, rows=2048 // block_n)
    if 3072 < n_cols < 4096:  # 3584: a loop's last block would be half empty
        return Config("tile", block_n, num_warps=8)
    if n_cols * itemsize <= 65536:
        longest = {1536: (512, 4), 3072: (1024, 4), 4096: (2048, 8), 8192: (4096, 16)}
        block, warps = next((longest[n] for n in longest if n_cols <= n), (8192, 16))
        return Config("loop", block, num_warps=warps * 32 // target.warp_size)
    registers = target.warp_size == 32  # AMD's compiler takes no such limit
    if n_cols * itemsize <= 131072:
        return Config("split", 4096 // itemsize, 4, 1, 8, 64 if registers else None, stages=2)
    return Config("split", 8192 // itemsize, 4, 1, 4, 128 if registers else None, stages=2)


@functools.cache
def _plan(
    n_cols: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    residual: bool,
    eps: float,
    offset: float,
    cast_first: bool,
    c: Config,
    splits: int,
) -> launching.Plan:
    flags = {
        "EPS": eps,
        "OFFSET": offset,
        "N": n_cols,
        "HAS_RESIDUAL": residual,
        "HAS_WEIGHT": weight_dtype is not None,
        "CAST_FIRST": cast_first,
    }
    if c.kernel == "tile":
        return launching.Plan(_tile_kernel, {**flags, "ROWS": c.rows, "BLOCK_N": c.block_n}, num_warps=c.num_warps)
    if c.kernel == "loop":
        return launching.Plan(_loop_kernel, {**flags, "BLOCK_N": c.block_n}, num_warps=c.num_warps)
    sizes = {"SPLITS": splits, "BLOCK_N": c.block_n, "BLOCK_S": library.power_of_two(splits), "STAGES": c.stages}
    return launching.Plan(_split_kernel, {**flags, **sizes}, num_warps=c.num_warps, **resident(c.max_registers))


def launch(
    op: str, x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, offset: float, rounding: str
) -> tuple[Tensor, Tensor | None]:
    """y, and u where there is a residual."""
    check(op, x, residual, weight, eps, offset, rounding)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    u = torch.empty(x.shape, dtype=x.dtype, device=x.device) if residual is not None else None
    if x.numel() == 0:
        return y, u
    has_residual = residual is not None
    x = library.as_rows(x)
    residual = library.as_rows(residual) if residual is not None else None
    weight_dtype = None
    if weight is not None:
        weight, weight_dtype = weight.contiguous(), weight.dtype
    n_rows, n_cols = x.shape[0], int(x.shape[1])
    target = runtime.target(x.device)
    c = config(n_cols, x.element_size(), target)
    cast_first = rounding == "llama"
    strides = (x.stride(0), 0 if residual is None else residual.stride(0))
    if c.kernel == "split":
        programs = target.multiprocessors * c.per_multiprocessor
        splits, lanes = split(op, n_rows, n_cols, c.block_n, programs)
        words = torch.zeros(n_rows * splits, dtype=torch.int32, device=x.device)
        plan = _plan(n_cols, x.dtype, weight_dtype, has_residual, eps, offset, cast_first, c, splits)
        tensors = (x, residual, weight, y, u, words)
        launching.launch(plan, splits * lanes, tensors, strides, (n_rows,))
    else:
        plan = _plan(n_cols, x.dtype, weight_dtype, has_residual, eps, offset, cast_first, c, 1)
        programs = library.cdiv(n_rows, c.rows)
        launching.launch(plan, programs, (x, residual, weight, y, u), strides, (n_rows,))
    return y, u
