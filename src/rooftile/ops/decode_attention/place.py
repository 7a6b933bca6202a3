"""Where the keys of a block lie: in a sequence of the cache, in a page of it, or each in a page of its own."""

from __future__ import annotations

from rooftile import runtime  # noqa: F401  # before Triton: runtime fixes the mode of the process
from rooftile.primitives.pdl import prefetch

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def _page(pointers, PTX: tl.constexpr):
    """Numbers of pages. As a load of Triton's it would be pipelined as well, and keys and values half as deep.

    What is read before the wait, which is by Triton's load on an NVIDIA GPU, goes past the L1: there it would be found
    again after the wait, as it was before.
    """
    if PTX:
        page = tl.inline_asm_elementwise(
            "ld.global.b32 $0, [$1];", "=r,l", [pointers], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        page = tl.load(pointers, cache_modifier=".cg")
    return page


@triton.jit
def home_of(
    pages_ptr,
    seq,
    block,
    key,
    n_keys,
    n_pages,
    stride_pb,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PTX: tl.constexpr,
):
    """What holds a block's keys: the sequence, or the block's page, or the page of each key.

    A page that there is, whatever the table says; the table is not read past the last key.
    """
    if PAGE == 0:
        home = seq.to(tl.int64)
    else:
        token = block * BLOCK_N
        if PAGE < BLOCK_N:
            token += key
        token = tl.maximum(tl.minimum(token, n_keys - 1), 0)
        page = _page(pages_ptr + seq.to(tl.int64) * stride_pb + token // PAGE, PTX)
        home = tl.minimum(tl.maximum(page, 0), n_pages - 1).to(tl.int64)
    return home


@triton.jit
def place_in(block, key, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Where a block's first key is in its sequence or page; or where each is, of a block in several pages."""
    token = block * BLOCK_N
    if PAGE > 0 and PAGE < BLOCK_N:
        token += key
    if PAGE > 0:
        token %= PAGE
    return token.to(tl.int64)


@triton.jit
def _lines_of(c_ptr, offsets, D: tl.constexpr, LINES: tl.constexpr):
    """Bring rows of D numbers into the L2, each LINES lines of 128 bytes."""
    PER_LINE: tl.constexpr = 128 // (c_ptr.dtype.element_ty.primitive_bitwidth // 8)
    cols = tl.minimum(tl.arange(0, LINES) * PER_LINE, D - 1)
    prefetch(c_ptr + (offsets[:, None] + cols[None, :]))


@triton.jit
def bring_ahead(
    k_ptr,
    v_ptr,
    pages_ptr,
    stride_kb,
    stride_kh,
    stride_vb,
    stride_vh,
    stride_pb,
    part,
    n_pages,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TILES: tl.constexpr,
    PAGE: tl.constexpr,
    STRIDE_KT: tl.constexpr,
    STRIDE_VT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    AHEAD: tl.constexpr,
    K_LINES: tl.constexpr,
    V_LINES: tl.constexpr,
):
    """Bring the first blocks of a part into the L2 while the kernel before still ends.

    The part is a guess, by lengths that the kernel before may still write, as it may the page table, which is read
    here. Wrong ones cost a prefetch: they are clamped as ever, and all is read again afterwards. What the kernel
    before still writes into the cache it writes into the same L2.
    """
    seq, within, n_keys, first_block, low, high, _, _, _, _, _ = part
    head = (within // TILES).to(tl.int64)
    key = tl.arange(0, BLOCK_N)
    for i in tl.static_range(AHEAD):
        if low + i < high:
            block = first_block + low + i
            # Not by PTX: two pure instructions with one address might be taken for one, and that address is read again.
            home = home_of(pages_ptr, seq, block, key, n_keys, n_pages, stride_pb, PAGE, BLOCK_N, False)
            token = tl.maximum(tl.minimum(block * BLOCK_N + key, n_keys - 1), 0)
            if PAGE > 0:
                token %= PAGE
            token = token.to(tl.int64)
            _lines_of(k_ptr, head * stride_kh + home * stride_kb + token * STRIDE_KT, HEAD_DIM, K_LINES)
            _lines_of(v_ptr, head * stride_vh + home * stride_vb + token * STRIDE_VT, VALUE_DIM, V_LINES)
