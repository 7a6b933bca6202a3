"""Softmax forward: three kernels, by the length of a row.

- tile: a program holds whole rows in registers, and takes one exponential of each element: short rows;
- loop: a program reads its row twice, the second time out of the L2, which holds the rows in flight. The first time it
  keeps a maximum and a sum for each few elements, mended where the maximum grows (Milakov and Gimelshein 2018,
  https://arxiv.org/abs/1805.02867). Of the longest rows it holds the first blocks in registers;
- split: a row is held by several programs, which exchange their maxima and sums: long rows, fewer than the GPU has
  multiprocessors, such as the logits of a vocabulary.

Exponentials are powers of two of `(z - max z) * |scale| * log2(e)`, where z is x with the scale's sign: the
difference comes first, so that the greatest element is exactly 1 however large it is. A maximum starts from the lowest
finite number instead of -inf, so that a row of nothing but -inf has zeros and no -inf less -inf; inf less inf is NaN
in the sum, and so in the row.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from rooftile import launching, library, runtime  # before Triton: runtime fixes the mode of the process
from rooftile.ops.softmax.common import (
    Config,
    as_float32,
    check,
    inside,
    kept_columns,
    mask_layout,
    mask_row,
    narrowed,
    read_columns,
    row_length,
    split_config,
    unrolled,
)
from rooftile.primitives.cta_exchange import gather, publish_pair, resident, softmax_pairs, split

import triton  # isort: skip
import triton.language as tl  # isort: skip

LOWEST = tl.constexpr(torch.finfo(torch.float32).min)


@triton.jit
def _scores(
    x_ptr,
    mask_ptr,
    cols,
    mask,
    kept,
    stride_mn,
    SIGN: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_MASK: tl.constexpr,
    POLICY: tl.constexpr,
):
    """z at the columns inside `mask` that are kept, -inf at the others. A causal row keeps the first `kept` columns."""
    if CAUSAL:
        keep = mask & (cols < kept)
        mask &= cols < read_columns(kept)
    else:
        keep = mask
    z = tl.load(x_ptr + cols, mask=mask, other=0.0, eviction_policy=POLICY).to(tl.float32)
    if HAS_MASK:
        keep &= tl.load(mask_ptr + cols.to(tl.int64) * stride_mn, mask=mask, other=0).to(tl.int1)
    if SIGN < 0:
        z = -z
    if SIGN == 0:
        z = z * 0.0  # 0, or NaN where x is not finite
    return tl.where(keep, z, float("-inf"))


@triton.jit
def _extend(tops, sums, z, FACTOR: tl.constexpr):
    """The maxima and sums with one more block in them."""
    new = tl.maximum(tops, tl.max(z, axis=1, keep_dims=True))
    sums = sums * tl.exp2((tops - new) * FACTOR) + tl.sum(tl.exp2((z - new) * FACTOR), axis=1, keep_dims=True)
    return new, sums


@triton.jit
def _inverse(total):
    """1 / total; 0 for the sum of a row that keeps nothing."""
    return tl.where(total == 0.0, 0.0, 1.0 / total)


@triton.jit(do_not_specialize=["n_rows", "seq_len", "n_b", "n_c"])
def _tile_kernel(
    x_ptr,
    mask_ptr,
    y_ptr,
    stride_xm,
    stride_ma,
    stride_mb,
    stride_mc,
    stride_mn,
    n_cols,
    n_rows,
    seq_len,
    n_b,
    n_c,
    SIGN: tl.constexpr,
    FACTOR: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_MASK: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    rows = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    mask = (rows < n_rows) & inside(cols, n_cols, EVEN)
    index = narrowed(rows, n_rows)
    kept = n_cols
    if CAUSAL:
        kept = kept_columns(index, seq_len, n_cols)
    x_ptr += rows * stride_xm
    if HAS_MASK:
        mask_ptr += mask_row(index, n_b, n_c, stride_ma, stride_mb, stride_mc)

    z = _scores(x_ptr, mask_ptr, cols, mask, kept, stride_mn, SIGN, CAUSAL, HAS_MASK, "evict_first")

    top = tl.maximum(tl.max(z, axis=1, keep_dims=True), LOWEST)
    y = tl.exp2((z - top) * FACTOR)
    y *= _inverse(tl.sum(y, axis=1, keep_dims=True))

    tl.store(y_ptr + rows * n_cols + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n_rows", "seq_len", "n_b", "n_c"])
def _loop_kernel(
    x_ptr,
    mask_ptr,
    y_ptr,
    stride_xm,
    stride_ma,
    stride_mb,
    stride_mc,
    stride_mn,
    n_cols,
    n_rows,
    seq_len,
    n_b,
    n_c,
    SIGN: tl.constexpr,
    FACTOR: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_MASK: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PACK: tl.constexpr,
    CHUNKS: tl.constexpr,
    HELD: tl.constexpr,
):
    DTYPE: tl.constexpr = y_ptr.dtype.element_ty
    LANES: tl.constexpr = BLOCK_N // PACK
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride_xm
    y_ptr += row * n_cols
    index = narrowed(row, n_rows)
    if HAS_MASK:
        mask_ptr += mask_row(index, n_b, n_c, stride_ma, stride_mb, stride_mc)
    kept = n_cols
    stop = n_cols
    if CAUSAL:
        kept = kept_columns(index, seq_len, n_cols)
        stop = kept
    elif CHUNKS > 0:  # a short loop is unrolled: all that it loads is on its way at once
        stop = CHUNKS * BLOCK_N
    # The PACK elements that a thread loads at once share a maximum and a sum.
    block = tl.arange(0, LANES)[:, None] * PACK + tl.arange(0, PACK)[None, :]

    held = ()
    for i in tl.static_range(HELD):
        cols = i * BLOCK_N + block
        mask = inside(cols, n_cols, EVEN)
        z = _scores(x_ptr, mask_ptr, cols, mask, kept, stride_mn, SIGN, CAUSAL, HAS_MASK, "evict_first")
        # Exact: they are x's own numbers, or their negatives, or -inf.
        held += (z.to(DTYPE),)  # type: ignore[assignment]
    tops = tl.full((LANES, 1), LOWEST, tl.float32)
    sums = tl.zeros((LANES, 1), tl.float32)
    for start in tl.range(HELD * BLOCK_N, stop, BLOCK_N, num_stages=1, loop_unroll_factor=CHUNKS):
        cols = start + block
        mask = inside(cols, n_cols, EVEN)
        z = _scores(x_ptr, mask_ptr, cols, mask, kept, stride_mn, SIGN, CAUSAL, HAS_MASK, "evict_last")
        tops, sums = _extend(tops, sums, z, FACTOR)
    for i in tl.static_range(HELD):
        tops, sums = _extend(tops, sums, held[i].to(tl.float32), FACTOR)
    top = tl.max(tops)
    inverse = _inverse(tl.sum(sums * tl.exp2((tops - top) * FACTOR)))

    for start in tl.range(HELD * BLOCK_N, stop, BLOCK_N, num_stages=1, loop_unroll_factor=CHUNKS):
        cols = start + block
        mask = inside(cols, n_cols, EVEN)
        z = _scores(x_ptr, mask_ptr, cols, mask, kept, stride_mn, SIGN, CAUSAL, HAS_MASK, "evict_first")
        y = tl.exp2((z - top) * FACTOR) * inverse
        tl.store(y_ptr + cols, y.to(DTYPE), mask=mask, cache_modifier=".cs")
    for i in tl.static_range(HELD):
        cols = i * BLOCK_N + block
        y = tl.exp2((held[i].to(tl.float32) - top) * FACTOR) * inverse
        tl.store(y_ptr + cols, y.to(DTYPE), mask=inside(cols, n_cols, EVEN), cache_modifier=".cs")
    if CAUSAL:
        zeros = tl.zeros((LANES, PACK), tl.float32) * inverse  # NaN in a row of NaN
        written = tl.maximum(tl.cdiv(kept, BLOCK_N), HELD) * BLOCK_N
        for start in tl.range(written, n_cols, BLOCK_N, num_stages=1):
            cols = start + block
            tl.store(y_ptr + cols, zeros.to(DTYPE), mask=cols < n_cols, cache_modifier=".cs")


@triton.jit(do_not_specialize=["n_rows", "seq_len", "n_b", "n_c"])
def _split_kernel(
    x_ptr,
    mask_ptr,
    y_ptr,
    words_ptr,
    stride_xm,
    stride_ma,
    stride_mb,
    stride_mc,
    stride_mn,
    n_cols,
    n_rows,
    seq_len,
    n_b,
    n_c,
    SIGN: tl.constexpr,
    FACTOR: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_MASK: tl.constexpr,
    EVEN: tl.constexpr,
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
    splits = tl.arange(0, BLOCK_S)
    mask = inside(cols, n_cols, EVEN)

    # A row is finished three steps after it was read, so that the others' maxima and sums have come by then.
    z1 = tl.zeros((BLOCK_N,), DTYPE)
    z2 = tl.zeros((BLOCK_N,), DTYPE)
    z3 = tl.zeros((BLOCK_N,), DTYPE)
    for r in tl.range(first, n_rows + 3 * step, step, num_stages=STAGES):
        row = r.to(tl.int64)
        done = row - 3 * step
        word_mask = (done >= 0) & (splits < SPLITS)
        words = tl.load(words_ptr + done * SPLITS + splits, mask=word_mask, other=-1, volatile=True)

        index = narrowed(row, n_rows)
        kept = n_cols
        if CAUSAL:
            kept = kept_columns(index, seq_len, n_cols)
        row_x_ptr = x_ptr + row * stride_xm
        row_mask_ptr = mask_ptr
        if HAS_MASK:
            row_mask_ptr += mask_row(index, n_b, n_c, stride_ma, stride_mb, stride_mc)
        now = mask & (row < n_rows)
        z = _scores(row_x_ptr, row_mask_ptr, cols, now, kept, stride_mn, SIGN, CAUSAL, HAS_MASK, "evict_first")
        top = tl.maximum(tl.max(z, axis=0), LOWEST)
        total = tl.sum(tl.exp2((z - top) * FACTOR), axis=0)
        publish_pair(words_ptr + row * SPLITS + split, top, total, row < n_rows)

        if done >= 0:
            words = gather(words, words_ptr + done * SPLITS + splits, word_mask)
            top, total = softmax_pairs(words, word_mask, FACTOR)
            y = tl.exp2((z3.to(tl.float32) - top) * FACTOR) * _inverse(total)
            tl.store(y_ptr + done * n_cols + cols, y.to(DTYPE), mask=mask)

        # Adding zero: Triton does not pipeline a loop that hands a value on over two iterations as it is.
        z3 = z2 + 0
        z2 = z1 + 0
        z1 = z.to(DTYPE)


@functools.cache
def config(n_cols: int, itemsize: int, few: bool, target: runtime.Target) -> Config:
    """Chosen on an H200 (bf16) from some ten configurations at each length. `few`: fewer rows than multiprocessors.

    Parts of a copy's speed: 0.97 at 1024 and 3584 columns, 1.00 at 4096 and 8192, 0.98 at 16384, 0.93 at 65536, 0.83 at
    131072, where the rows in flight no longer fit the L2.
    """
    block_n = library.power_of_two(n_cols)
    if target is runtime.INTERPRETER:
        return Config("tile", block_n, num_warps=4, rows=16)
    per_warp = target.warp_size // 32
    if block_n <= 512:
        return Config("tile", block_n, num_warps=4, rows=2048 // block_n)
    if block_n <= 2048:
        return Config("tile", block_n, num_warps=block_n // 512)
    if few and n_cols * itemsize > 32768:
        c = split_config(n_cols, itemsize, target)
        if c is not None:
            return c
    if n_cols <= 4096:
        return Config("loop", 1024 if n_cols < 4096 else 2048, num_warps=4 if n_cols < 4096 else 8)
    if n_cols * itemsize <= 65536:
        return Config("loop", 4096 if n_cols <= 8192 else 8192, num_warps=16 // per_warp)
    # A thousand threads: a multiprocessor runs one program at a time.
    held = 0 if n_cols * itemsize <= 131072 else 2 if itemsize == 2 else 3
    return Config("loop", 32768 // itemsize, num_warps=32 // per_warp, held=held)


@functools.cache
def _plan(
    dtype: torch.dtype,
    scale: float,
    causal: bool,
    has_mask: bool,
    even: bool,
    c: Config,
    pack: int = 1,
    chunks: int = 0,
    splits: int = 1,
) -> launching.KernelLauncher:
    scale, factor = as_float32(scale)
    flags = {
        "SIGN": (scale > 0) - (scale < 0),
        "FACTOR": factor or 1.0,
        "CAUSAL": causal,
        "HAS_MASK": has_mask,
        "EVEN": even,
    }
    if c.kernel == "tile":
        return launching.KernelLauncher(
            _tile_kernel, {**flags, "ROWS": c.rows, "BLOCK_N": c.block_n}, num_warps=c.num_warps
        )
    if c.kernel == "loop":
        sizes = {"BLOCK_N": c.block_n, "PACK": pack, "CHUNKS": chunks, "HELD": c.held}
        return launching.KernelLauncher(_loop_kernel, {**flags, **sizes}, num_warps=c.num_warps)
    sizes = {"SPLITS": splits, "BLOCK_N": c.block_n, "BLOCK_S": library.power_of_two(splits), "STAGES": c.stages}
    return launching.KernelLauncher(
        _split_kernel, {**flags, **sizes}, num_warps=c.num_warps, **resident(c.max_registers)
    )


def launch(x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    y = fake(x, mask, scale, causal)
    n_cols = row_length(x)
    if x.numel() == 0:
        return y
    seq_len = x.shape[-2] if causal else 1
    sizes, mask_strides = (1, 1), (0, 0, 0, 0)
    if mask is not None:
        mask, sizes, mask_strides = mask_layout(mask, tuple(x.shape))
    x = library.as_rows(x)
    n_rows = x.shape[0]
    target = runtime.target(x.device)
    few = bool(n_rows < target.multiprocessors)  # a symbol while a graph is traced, which no cache may keep
    c = config(n_cols, x.element_size(), few, target)
    strides = (x.stride(0), *mask_strides, n_cols)
    numbers = (n_rows, seq_len, *sizes)
    even = n_cols % c.block_n == 0
    mode = (x.dtype, float(scale), causal, mask is not None)
    if c.kernel == "tile":
        plan, programs = _plan(*mode, even, c), library.cdiv(n_rows, c.rows)
        launching.launch(plan, programs, (x, mask, y), strides, numbers)
    elif c.kernel == "loop":
        # Rows that are not aligned to 16 bytes are loaded one element at a time.
        pack = 16 // x.element_size() if n_cols % 16 == 0 and x.stride(0) % 16 == 0 else 1
        chunks = unrolled(n_cols, c, causal)
        plan = _plan(*mode, even, c, pack, chunks)
        launching.launch(plan, n_rows, (x, mask, y), strides, numbers)
    else:
        splits, lanes = split("softmax", n_rows, n_cols, c.block_n, target.multiprocessors * c.per_multiprocessor)
        words = torch.zeros(n_rows * splits, dtype=torch.int64, device=x.device)
        plan = _plan(*mode, even, c, splits=splits)
        launching.launch(plan, splits * lanes, (x, mask, y, words), strides, numbers)
    return y


def fake(x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    check("softmax", "x", x, mask, scale, causal)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)
