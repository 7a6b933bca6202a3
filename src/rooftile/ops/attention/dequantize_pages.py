"""Dequantizes the pages of sequences to 16 bits for the Hopper kernel, whose wgmma reads k and v from shared memory as
TMA put them there.

    k16 = round(float32(k) * k_scale),   v16 = round(float32(v) * v_scale),   to q's dtype

The copies are pages, too, of COPY tokens. Those of a sequence are together, so their table counts up. A program
dequantizes a block of tokens of one head of one sequence, and ends at once where no query sees a key.

Each element is read once and written once, 3 bytes for each of 8 bits. `problem.saves_dequantizing` says when that is
less than the Hopper kernel saves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rooftile import library, runtime  # before Triton: runtime fixes the mode of the process
from rooftile.launching import bind, launcher
from rooftile.ops.attention.parts import first_key, sequence_range
from rooftile.primitives.dequantize import as_float32, has_fast_conversions
from rooftile.primitives.paging import page_of, scale_kind, scale_strides, token_in_page

import triton  # isort: skip
import triton.language as tl  # isort: skip

if TYPE_CHECKING:
    from rooftile.ops.attention.problem import Inputs, Problem

COPY = 256  # tokens of a page of the copies: as many keys as a block has at most, so that one TMA copy takes a block
# Bytes of the copies of k and v. They are held during a call, by each CUDA graph for good, and their size follows the
# width of the page table, not the lengths: 262144 tokens of 8 heads of 128, an eightieth of an H100's memory.
MOST_BYTES = 1 << 30
_TILE = 8192  # elements of k, and of v, of a program: each thread has four loads of 16 bytes of each under way
_WARPS = 4


@triton.jit
def _load_scale(ptr, head, page, at, inside, stride_sp, stride_st, stride_sh, KIND: tl.constexpr):
    """The scale of each token, as a column, or of all; 0 for tokens that are not `inside`."""
    if KIND == "token":
        ptrs = ptr + head * stride_sh + page * stride_sp + at * stride_st
        return tl.load(ptrs, mask=inside, other=0.0)[:, None]
    elif KIND == "head":
        return tl.load(ptr + head * stride_sh)
    else:
        return 1.0


@triton.jit
def _scaled(w, scale, KIND: tl.constexpr, FAST_CONVERSIONS: tl.constexpr):
    y = as_float32(w, FAST_CONVERSIONS)
    if KIND != "":
        y *= scale
    return y


@triton.jit(do_not_specialize=["heads", "n_q", "capacity", "n_pages", "n_blocks", "copies", "left"])
def dequantize_pages_kernel(
    k_ptr, v_ptr, k16_ptr, v16_ptr, table_ptr, pages_ptr, lengths_ptr, starts_ptr, k_scale_ptr, v_scale_ptr,
    stride_kp, stride_kh, stride_kt, stride_vp, stride_vh, stride_vt,
    stride_ksp, stride_kst, stride_ksh, stride_vsp, stride_vst, stride_vsh, stride_pb,
    heads, n_q, capacity, n_pages, n_blocks, copies, left,
    K_SCALES: tl.constexpr, V_SCALES: tl.constexpr, HAS_LEFT: tl.constexpr, FAST_CONVERSIONS: tl.constexpr,
    PAGE: tl.constexpr, COPY: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """COPY and `copies` are the tokens of a page of the copies, and how many a sequence has."""
    head = tl.program_id(0) % heads
    rest = tl.program_id(0) // heads
    seq = rest // n_blocks
    block = rest % n_blocks
    start = block * BLOCK_T
    copy = seq * copies + start // COPY
    if (head == 0) & (start % COPY == 0):
        tl.store(table_ptr + copy, copy)

    # Keys before the first query's window are not read. Blocks of keys that begin there are, so their copies are zeros.
    _, n_q = sequence_range(starts_ptr, seq, n_q)
    n_k = tl.minimum(tl.maximum(tl.load(lengths_ptr + seq), 0), capacity)
    first = first_key(n_k - n_q, left, HAS_LEFT)
    if (n_q == 0) | (start >= n_k) | (start < first // COPY * COPY):
        return

    token = tl.arange(0, BLOCK_T)
    page = page_of(pages_ptr, seq, block, token, n_k, n_pages, stride_pb, PAGE, BLOCK_T, False)
    at = token_in_page(block, token, PAGE, BLOCK_T)
    if PAGE >= BLOCK_T:
        at += token
    exists = start + token < n_k
    inside = exists & (start + token >= first)
    cols = tl.arange(0, BLOCK_D)[None, :]
    mask = exists[:, None]
    read = inside[:, None]
    if D < BLOCK_D:
        mask &= cols < D
        read &= cols < D
    head = head.to(tl.int64)
    k = tl.load(k_ptr + head * stride_kh + (page * stride_kp + at * stride_kt)[:, None] + cols, mask=read, other=0.0)
    v = tl.load(v_ptr + head * stride_vh + (page * stride_vp + at * stride_vt)[:, None] + cols, mask=read, other=0.0)
    k_scale = _load_scale(k_scale_ptr, head, page, at, inside, stride_ksp, stride_kst, stride_ksh, K_SCALES)
    v_scale = _load_scale(v_scale_ptr, head, page, at, inside, stride_vsp, stride_vst, stride_vsh, V_SCALES)

    k = _scaled(k, k_scale, K_SCALES, FAST_CONVERSIONS)
    v = _scaled(v, v_scale, V_SCALES, FAST_CONVERSIONS)

    to = ((copy.to(tl.int64) * heads + head) * COPY + start % COPY + token)[:, None] * D + cols
    tl.store(k16_ptr + to, k.to(k16_ptr.dtype.element_ty), mask=mask)
    tl.store(v16_ptr + to, v.to(v16_ptr.dtype.element_ty), mask=mask)


def _copies(capacity: int) -> int:
    """Pages of the copies of a sequence."""
    return library.cdiv(capacity, COPY)


def nbytes(p: Problem) -> int:
    """Bytes of the copies of k and v."""
    return p.batch * _copies(p.n_k) * COPY * p.kv_heads * (p.head_dim + p.value_dim) * p.dtype.itemsize


def describe_copies(x: Inputs) -> tuple[Tensor, Tensor]:
    """A tensor as the copies of k and of v are, and one as their table is, without memory."""
    sequences, copies = x.sequences, _copies(x.longest_k)
    shape = sequences * copies, x.k.shape[1], COPY, x.k.shape[3]
    return (
        torch.empty(shape, dtype=x.q.dtype, device="meta"),
        torch.empty((sequences, copies), dtype=torch.int32, device="meta"),
    )


def prepare(
    x: Inputs, page_table: Tensor, k_scale: Tensor | None, v_scale: Tensor | None, cache_layout: str
) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """The launch, to be called with `k, v, page_table, lengths, starts, k_scale, v_scale`.

    x has k and v as (pages, heads, page, dim) of one head dimension. Lengths are (sequences,) int32, and starts
    (sequences + 1,) int32 of the queries. The result is the copies of k and v and their table, as `describe_copies`
    says. In the page of the first token that a query sees, those before it are zeros. Other tokens that no query sees,
    such as those past a length, are not written.
    """
    target = runtime.target(x.q.device)
    pages, heads, page, dim = x.k.shape
    like, like_table = describe_copies(x)
    block_d = max(16, library.power_of_two(dim))
    block_t = min(128, max(16, _TILE // block_d))
    constants = {
        "K_SCALES": scale_kind(k_scale),
        "V_SCALES": scale_kind(v_scale),
        "HAS_LEFT": x.scoring.left >= 0,
        "FAST_CONVERSIONS": has_fast_conversions(target),
        "PAGE": page,
        "COPY": COPY,
        "D": dim,
        "BLOCK_D": block_d,
        "BLOCK_T": block_t,
    }
    strides = (
        *x.k.stride()[:3],
        *x.v.stride()[:3],
        *scale_strides(k_scale, cache_layout),
        *scale_strides(v_scale, cache_layout),
        page_table.stride(0),
    )
    n_blocks = library.cdiv(x.longest_k, block_t)
    numbers = (heads, x.q.shape[2], x.longest_k, pages, n_blocks, like_table.shape[1], x.scoring.left)
    found = launcher(dequantize_pages_kernel, (like, x.k, k_scale, v_scale), constants, num_warps=_WARPS)
    start = bind(found, x.sequences * n_blocks * heads, strides=strides, numbers=numbers)
    shape, shape_of_table, dtype = like.shape, like_table.shape, x.q.dtype

    def run(
        k: Tensor, v: Tensor, page_table: Tensor, lengths: Tensor, starts: Tensor, k_scale: Tensor | None,
        v_scale: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        k16, v16 = (torch.empty(shape, dtype=dtype, device=k.device) for _ in range(2))
        table = torch.empty(shape_of_table, dtype=torch.int32, device=k.device)
        start(k, v, k16, v16, table, page_table, lengths, starts, k_scale, v_scale)
        return k16, v16, table

    return run
