"""Softmax forward: three kernels, by the length of a row.

- tile: a program holds whole short rows in registers and computes one exponential for each element;
- loop: a program reads its row twice, the second time from the L2, which holds the rows in flight. The first pass keeps
  a maximum and a sum for each few elements and rescales the sum when the maximum grows (Milakov and Gimelshein 2018,
  https://arxiv.org/abs/1805.02867). The first blocks of the longest rows stay in registers;
- split: several programs share a row and exchange their maxima and sums. It serves long rows that are fewer than the
  SMs, such as the logits of a vocabulary.

Exponentials are powers of two of `(z - max z) * |scale| * log2(e)`, where z is x with the sign of the scale. The
difference is taken first, so the greatest element is exactly 1 however large it is. A maximum starts from the lowest
finite float32 instead of -inf: a row of nothing but -inf then becomes zeros, with no `-inf - -inf`. `inf - inf` is NaN
in the sum, and so in the whole row.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from rooftile import launching, library, runtime  # before Triton: runtime fixes the mode of the process
from rooftile.primitives.cta_exchange import gather, publish_pair, softmax_pairs, split
from rooftile.primitives.online_softmax import LOWEST, extend
from rooftile.primitives.rows import RowConfig, row_launcher, row_length

import triton  # isort: skip
import triton.language as tl  # isort: skip

# What forward and backward share


@triton.jit
def inside(cols, n_cols, EVEN: tl.constexpr):
    """Which columns belong to the row. EVEN: the blocks fill the row, so all of them do."""
    if EVEN:
        mask = tl.full(cols.shape, True, tl.int1)
    else:
        mask = cols < n_cols
    return mask


@triton.jit
def kept_columns(row, seq_len, n_cols):
    """How many leading columns a causal row keeps. The last row of a sequence keeps all."""
    return tl.maximum(row % seq_len + (n_cols - seq_len + 1), 0)


@triton.jit
def read_columns(kept):
    """The columns to read: rounded up to whole vectors, since a load that ends within one is not vectorized."""
    return tl.cdiv(kept, 16) * 16


@triton.jit
def narrowed(row, n_rows):
    """`row` in the width that `n_rows` needs: a 64-bit remainder takes several times as long as a 32-bit one.

    In a launch that a compiler traces, `n_rows` is a plain number, which has no dtype of its own.
    """
    return row.to((tl.zeros((), tl.int32) + n_rows).dtype)


@triton.jit
def mask_row(row, n_b, n_c, stride_ma, stride_mb, stride_mc):
    """The offset of a row's mask. Rows are indexed as (A, B, C), see `mask_layout`."""
    a = (row // n_c // n_b).to(tl.int64)
    b = (row // n_c % n_b).to(tl.int64)
    c = (row % n_c).to(tl.int64)
    return a * stride_ma + b * stride_mb + c * stride_mc


def split_config(n_cols: int, itemsize: int, target: runtime.Target) -> RowConfig | None:
    """Programs that share a row and are resident all at once; None if the row is too long for that."""
    registers = target.warp_size == 32  # AMD's compiler has no such limit
    if n_cols * itemsize <= 131072:
        c = RowConfig("split", 4096 // itemsize, 4, stages=2, per_sm=8, max_registers=64 if registers else None)
    else:
        c = RowConfig("split", 8192 // itemsize, 4, stages=2, per_sm=4, max_registers=128 if registers else None)
    return c if n_cols <= c.block_n * target.multiprocessors * c.per_sm else None


def as_float32(scale: float) -> tuple[float, float]:
    """The scale and its magnitude times log2(e); 0 and 0 if the latter is subnormal in float32.

    The device would flush it to 0, and 0 times the -inf of an element that is not kept is NaN.
    """
    factor = abs(scale) * math.log2(math.e)
    return (scale, factor) if factor >= 2.0**-126 else (0.0, 0.0)


def unrolled(n_cols: int, c: RowConfig, causal: bool) -> int:
    """How many blocks the loop kernel unrolls: 0 (a loop) if there are many, or if their number differs by row."""
    chunks = library.cdiv(n_cols, c.block_n)
    return chunks if chunks <= 8 and not causal and not c.held else 0


def mask_layout(mask: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, tuple[int, int], tuple[int, int, int, int]]:
    """The mask of an x of that shape, viewed as (A, B, C, N): the mask, the sizes B and C, and the four strides.

    Broadcast dimensions have a stride of 0. It is copied only if its leading dimensions cannot be viewed as three.
    """
    strides = [0] * (len(shape) - mask.dim())
    strides += [0 if n == 1 else stride for n, stride in zip(mask.shape, mask.stride(), strict=True)]
    dims: list[tuple[int, int]] = []
    for n, stride in zip(shape[:-1], strides[:-1], strict=True):
        if n == 1:
            continue
        if dims and dims[-1][1] == n * stride:
            dims[-1] = (dims[-1][0] * n, stride)
        else:
            dims.append((n, stride))
    if len(dims) > 3:
        return mask_layout(mask.expand(shape).contiguous(), shape)
    (_, a), (n_b, b), (n_c, c) = [(1, 0)] * (3 - len(dims)) + dims
    return mask, (n_b, n_c), (a, b, c, strides[-1])


def check(op: str, name: str, x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> None:
    """Raise unless the arguments of an op are valid; `name` is the name of its argument x."""
    library.check_floating(op, **{name: x})
    library.check_numbers(op, scale=scale)
    if not abs(scale) < 2.0**127:
        raise ValueError(f"{op}: scale is {scale}, expected a finite number below 2^127")
    if not isinstance(causal, bool):
        raise TypeError(f"{op}: causal is {library.named(causal)}, expected a bool")
    if x.dim() < 1 + causal:
        expected = "at least two dimensions (..., T, S), as causal is set" if causal else "at least one dimension"
        raise ValueError(f"{op}: {name} has shape {tuple(x.shape)}, expected {expected}")
    if mask is None:
        return
    if mask.dtype is not torch.bool:
        raise TypeError(f"{op}: mask has dtype {mask.dtype}, expected torch.bool (True keeps)")
    trailing = x.shape[x.dim() - min(mask.dim(), x.dim()) :]
    if mask.dim() > x.dim() or any(m not in (1, n) for m, n in zip(mask.shape, trailing, strict=True)):
        raise ValueError(
            f"{op}: mask has shape {tuple(mask.shape)}, expected one that broadcasts to {tuple(x.shape)}, x's shape"
        )


# The forward


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
    """z at the kept columns within `mask`, -inf elsewhere. A causal row keeps the first `kept` columns."""
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
def _inverse(total):
    """1 / total; 0 for a row that keeps nothing."""
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
    elif CHUNKS > 0:  # a short loop is unrolled, so that all its loads are in flight at once
        stop = CHUNKS * BLOCK_N
    # The PACK elements that a thread loads at once share a maximum and a sum.
    block = tl.arange(0, LANES)[:, None] * PACK + tl.arange(0, PACK)[None, :]

    held = ()
    for i in tl.static_range(HELD):
        cols = i * BLOCK_N + block
        mask = inside(cols, n_cols, EVEN)
        z = _scores(x_ptr, mask_ptr, cols, mask, kept, stride_mn, SIGN, CAUSAL, HAS_MASK, "evict_first")
        # Exact: they are x's own elements, or their negatives, or -inf.
        held += (z.to(DTYPE),)  # type: ignore[assignment]
    tops = tl.full((LANES, 1), LOWEST, tl.float32)
    sums = tl.zeros((LANES, 1), tl.float32)
    for start in tl.range(HELD * BLOCK_N, stop, BLOCK_N, num_stages=1, loop_unroll_factor=CHUNKS):
        cols = start + block
        mask = inside(cols, n_cols, EVEN)
        z = _scores(x_ptr, mask_ptr, cols, mask, kept, stride_mn, SIGN, CAUSAL, HAS_MASK, "evict_last")
        tops, sums = extend(tops, sums, z, FACTOR)
    for i in tl.static_range(HELD):
        tops, sums = extend(tops, sums, held[i].to(tl.float32), FACTOR)
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

    # A row is finished three steps after it was read: by then the other programs have published their part.
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

        # Adding zero: Triton does not pipeline a loop that carries a value unchanged over two iterations.
        z3 = z2 + 0
        z2 = z1 + 0
        z1 = z.to(DTYPE)


@functools.cache
def config(n_cols: int, itemsize: int, few: bool, target: runtime.Target) -> RowConfig:
    """Chosen on an H200 (bf16) from some ten configurations at each length. `few`: fewer rows than SMs.

    Fractions of a copy's speed: 0.97 at 1024 and 3584 columns, 1.00 at 4096 and 8192, 0.98 at 16384, 0.93 at 65536,
    0.83 at 131072, where the rows in flight no longer fit the L2.
    """
    block_n = library.power_of_two(n_cols)
    if target is runtime.INTERPRETER:
        return RowConfig("tile", block_n, num_warps=4, rows=16)
    per_warp = target.warp_size // 32
    if block_n <= 512:
        return RowConfig("tile", block_n, num_warps=4, rows=2048 // block_n)
    if block_n <= 2048:
        return RowConfig("tile", block_n, num_warps=block_n // 512)
    if few and n_cols * itemsize > 32768:
        c = split_config(n_cols, itemsize, target)
        if c is not None:
            return c
    if n_cols <= 4096:
        return RowConfig("loop", 1024 if n_cols < 4096 else 2048, num_warps=4 if n_cols < 4096 else 8)
    if n_cols * itemsize <= 65536:
        return RowConfig("loop", 4096 if n_cols <= 8192 else 8192, num_warps=16 // per_warp)
    # 1024 threads, so an SM runs one program at a time.
    held = 0 if n_cols * itemsize <= 131072 else 2 if itemsize == 2 else 3
    return RowConfig("loop", 32768 // itemsize, num_warps=32 // per_warp, held=held)


@functools.cache
def _launcher(
    dtype: torch.dtype,
    scale: float,
    causal: bool,
    has_mask: bool,
    even: bool,
    c: RowConfig,
    pack: int = 1,
    chunks: int = 0,
    splits: int = 1,
) -> launching.KernelLauncher:
    scale, factor = as_float32(scale)
    return row_launcher(
        {"tile": _tile_kernel, "loop": _loop_kernel, "split": _split_kernel}[c.kernel],
        c,
        splits,
        SIGN=(scale > 0) - (scale < 0),
        FACTOR=factor or 1.0,
        CAUSAL=causal,
        HAS_MASK=has_mask,
        EVEN=even,
        PACK=pack,
        CHUNKS=chunks,
    )


def prepare(x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Callable[..., Tensor]:
    """What gives the softmax of such an x."""
    check("softmax", "x", x, mask, scale, causal)
    n_cols = row_length(x)
    shape, strides, dtype, device = x.shape, library.contiguous_strides(x.shape), x.dtype, x.device
    start, n_words = library.start_nothing, 0
    if x.numel():
        start, n_words = _prepare_start(x, mask, n_cols, scale, causal)

    def run(x: Tensor, mask: Tensor | None, *_: object) -> Tensor:
        y = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        if n_words:
            start(x, mask, y, torch.zeros(n_words, dtype=torch.int64, device=device))
        else:
            start(x, mask, y)
        return y

    return run


def _prepare_start(
    x: Tensor, mask: Tensor | None, n_cols: int, scale: float, causal: bool
) -> tuple[Callable[..., None], int]:
    """The launch over x, mask and y, and how many words it takes through which programs share rows."""
    copies: library.Copies = {}
    shape = x.shape
    sizes, mask_strides = (1, 1), (0, 0, 0, 0)
    if mask is not None:
        read, sizes, mask_strides = mask_layout(mask, tuple(shape))
        if read is not mask:
            copies[1] = lambda mask: mask_layout(mask, tuple(shape))[0]
    rows = library.rows_of(x, copies, 0)
    n_rows = rows.shape[0]
    target = runtime.target(x.device)
    few = bool(n_rows < target.multiprocessors)  # symbolic in a traced graph; no cache may keep a symbol
    c = config(n_cols, x.element_size(), few, target)
    even = n_cols % c.block_n == 0
    mode = (x.dtype, float(scale), causal, mask is not None)
    n_words = 0
    if c.kernel == "tile":
        launcher, programs = _launcher(*mode, even, c), library.cdiv(n_rows, c.rows)
    elif c.kernel == "loop":
        # Rows that are not aligned to 16 bytes are loaded element by element.
        pack = 16 // x.element_size() if n_cols % 16 == 0 and rows.stride(0) % 16 == 0 else 1
        launcher, programs = _launcher(*mode, even, c, pack, unrolled(n_cols, c, causal)), n_rows
    else:
        splits, lanes = split("softmax", n_rows, n_cols, c.block_n, target.multiprocessors * c.per_sm)
        launcher, programs, n_words = _launcher(*mode, even, c, splits=splits), splits * lanes, n_rows * splits
    strides = (rows.stride(0), *mask_strides, n_cols)
    numbers = (n_rows, shape[-2] if causal else 1, *sizes)
    return library.copying(launching.bind(launcher, programs, strides=strides, numbers=numbers), copies), n_words


def fake(x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    check("softmax", "x", x, mask, scale, causal)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)
