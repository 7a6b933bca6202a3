"""Rows of packed tensors that no sequence covers are zeros: before the first, after the last, past the longest.

Launched before the kernel that writes the others. In a call with whole sequences it finds nothing to write.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from rooftile import launching, library, runtime  # noqa: F401  # before Triton: runtime fixes the mode of the process
from rooftile.ops.attention.forward_kernel import sequence

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit(do_not_specialize=["sequences", "longest", "heads", "total"])
def _gaps_kernel(
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
    """Program i clears from the end of what sequence i - 1 covers to the beginning of sequence i."""
    index = tl.program_id(0)
    lo = 0
    if index > 0:
        begin, length = sequence(starts_ptr, index - 1, total)
        lo = begin + tl.minimum(length, longest)
    hi = total
    if index < sequences:
        hi, _ = sequence(starts_ptr, index, total)

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
def _plan(dtype: torch.dtype, has_lse: bool, dim: int) -> launching.KernelLauncher:
    constants = {"HAS_LSE": has_lse, "D": dim, "BLOCK_D": library.power_of_two(dim), "BLOCK_T": 16}
    return launching.KernelLauncher(_gaps_kernel, constants, num_warps=4)


def clear(x: Tensor, lse: Tensor | None, starts: Tensor, longest: int) -> None:
    """Zeros in the rows of x (1, heads, tokens, dim) that no sequence covers, and -inf in lse (1, heads, tokens)."""
    if x.numel() == 0:
        return
    _, heads, total, dim = x.shape
    sequences = starts.shape[0] - 1
    plan = _plan(x.dtype, lse is not None, dim)
    tensors = (x, lse if lse is not None else x, starts)
    launching.launch(plan, sequences + 1, tensors, x.stride()[1:3], (sequences, longest, heads, total))
