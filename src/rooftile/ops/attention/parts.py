"""What the portable kernels of attention share: which keys are seen, rows in memory, packed sequences."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from rooftile import library, runtime  # noqa: F401  # before Triton: runtime fixes the mode of the process
from rooftile.launching import KernelLauncher, bind

import triton  # isort: skip
import triton.language as tl  # isort: skip


def has_unit_rows(t: Tensor) -> bool:
    """Whether the last stride is 1, as the kernels take it."""
    return t.stride(-1) == 1 or t.shape[-1] == 1


@triton.jit
def first_key(p_first, left, HAS_LEFT: tl.constexpr):
    """The first key that any query sees of those from position p_first on."""
    if HAS_LEFT:
        return tl.maximum(p_first - left, 0)
    else:
        return p_first * 0


@triton.jit
def end_key(p_last, n_k, right, HAS_RIGHT: tl.constexpr):
    """One past the last key that any query sees of those up to position p_last."""
    if HAS_RIGHT:
        return tl.maximum(tl.minimum(p_last + right + 1, n_k), 0)
    else:
        return n_k


@triton.jit
def is_seen(p, cols, n_k, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """Whether the queries at positions p see the keys cols; both broadcast to the tile."""
    seen = cols < n_k
    if HAS_RIGHT:
        seen &= cols <= p + right
    if HAS_LEFT:
        seen &= cols >= p - left
    return seen


@triton.jit
def load_rows(
    ptr, rows, inside, stride, D: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr
):
    """Columns FIRST to FIRST + BLOCK of rows (R, 1), zeros past D; with MASKED, only of rows that are `inside`."""
    cols = FIRST + tl.arange(0, BLOCK)[None, :]
    ptrs = ptr + rows.to(tl.int64) * stride + cols
    if D < FIRST + BLOCK:
        if MASKED:
            tile = tl.load(ptrs, mask=inside & (cols < D), other=0.0)
        else:
            tile = tl.load(ptrs, mask=cols < D, other=0.0)
    elif MASKED:
        tile = tl.load(ptrs, mask=inside, other=0.0)
    else:
        tile = tl.load(ptrs)
    return tile


@triton.jit
def store_rows(ptr, tile, rows, inside, stride, D: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr):
    """Round a tile and store it to columns FIRST to FIRST + BLOCK of the rows (R, 1) that are `inside`."""
    cols = FIRST + tl.arange(0, BLOCK)[None, :]
    mask = inside
    if D < FIRST + BLOCK:
        mask &= cols < D
    tl.store(ptr + rows.to(tl.int64) * stride + cols, tile.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def sequence_range(starts_ptr, index, total):
    """Where a packed sequence begins and how long it is: clamped to [0, total]."""
    begin = tl.minimum(tl.maximum(tl.load(starts_ptr + index), 0), total)
    end = tl.minimum(tl.maximum(tl.load(starts_ptr + index + 1), begin), total)
    return begin, end - begin


@triton.jit
def rasterize(program, together, batch_heads, blocks):
    """A program's head, of those of all batch entries, and block.

    The blocks of `together` heads take turns, so that what they walk over stays in the L2. Blocks of a low index start
    first in all of them.
    """
    first = program // (together * blocks) * together
    width = tl.minimum(together, batch_heads - first)
    rest = program - first * blocks
    block = rest // width
    return first + rest - block * width, block


@triton.jit(do_not_specialize=["sequences", "longest", "heads", "total"])
def _zero_uncovered_kernel(
    x_ptr,
    lse_ptr,
    starts_ptr,
    stride_xh,
    stride_xt,
    sequences,
    longest,
    heads,
    total,
    HAS_LSE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Program i clears from the end of what sequence i - 1 covers to the start of sequence i."""
    index = tl.program_id(0)
    lo = 0
    if index > 0:
        begin, length = sequence_range(starts_ptr, index - 1, total)
        lo = begin + tl.minimum(length, longest)
    hi = total
    if index < sequences:
        hi, _ = sequence_range(starts_ptr, index, total)

    cols = tl.arange(0, BLOCK_D)[None, :]
    zeros = tl.zeros((BLOCK_T, BLOCK_D), x_ptr.dtype.element_ty)
    nothing = tl.full((BLOCK_T, 1), float("-inf"), tl.float32)
    for start in tl.range(lo, hi, BLOCK_T, num_stages=1):
        rows = (start + tl.arange(0, BLOCK_T))[:, None]
        ptrs = x_ptr + rows.to(tl.int64) * stride_xt + cols
        lse_ptrs = lse_ptr + rows
        for _ in tl.range(0, heads, num_stages=1):
            tl.store(ptrs, zeros, mask=(rows < hi) & (cols < D))
            ptrs += stride_xh
            if HAS_LSE:
                tl.store(lse_ptrs, nothing, mask=rows < hi)
                lse_ptrs += total


@functools.cache
def _zero_uncovered(dtype: torch.dtype, has_lse: bool, dim: int) -> KernelLauncher:
    constants = {"HAS_LSE": has_lse, "D": dim, "BLOCK_D": library.power_of_two(dim), "BLOCK_T": 16}
    return KernelLauncher(_zero_uncovered_kernel, constants, num_warps=4)


def prepare_zero_uncovered(x: Tensor, has_lse: bool, starts: Tensor, longest: int) -> Callable[..., None]:
    """The launch for tensors like these, to be called with `x, lse, starts`; without lse, give x twice.

    It writes zeros to the rows of x (1, heads, tokens, dim) that no sequence covers, and -inf to lse (1, heads,
    tokens): rows before the first sequence, after the last, and past the longest. Where sequences cover all tokens it
    finds none. It is launched before the kernel that writes the other rows.
    """
    if x.numel() == 0:
        return library.start_nothing
    _, heads, total, dim = x.shape
    sequences = starts.shape[0] - 1
    launcher = _zero_uncovered(x.dtype, has_lse, dim)
    return bind(launcher, sequences + 1, strides=x.stride()[1:3], numbers=(sequences, longest, heads, total))
