"""What Gluon kernels share: names that differ between Triton's versions, rings of shared memory, tensor descriptors.

A ring has STAGES slots in shared memory, which are the pipeline stages. A producer warp fills them with tiles, and
consumer warpgroups read them. Each slot has two mbarriers, ready (full) and free (empty). Both sides walk the ring with
a slot and a parity bit that flips whenever the slot wraps to 0. A consumer waits for its current parity. The
producer waits for the opposite one, which a newly initialized barrier counts as completed, so its first round waits for
nothing. The parity tells a round from the one before it alone, so neither side may get two rounds ahead.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rooftile.launching import Descriptor  # before Triton: runtime fixes the mode of the process
from rooftile.primitives.paging import page_step

import triton.experimental.gluon.language as gl  # isort: skip
from triton._C.libtriton import ir  # isort: skip
from triton.experimental import gluon  # isort: skip
from triton.experimental.gluon.language._core import builtin  # isort: skip
from triton.experimental.gluon.language.nvidia.hopper import tma  # isort: skip

_RAGGED = gl.constexpr(1 << 30)  # more than the tokens of any tensor

# Triton 3.9 renamed these. The old names of the copies still exist there, and raise.
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
_HAS_REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def view_as(memory, shape: gl.constexpr, like):
    """The same shared memory with another shape, and the dtype and layout of `like`: shared memory or a descriptor."""
    if _HAS_REINTERPRET:
        return memory.reinterpret(like.dtype, shape, like.layout)
    else:
        return memory._reinterpret(like.dtype, shape, like.layout)


@gluon.jit
def keep_loads_before(number):
    """The number, behind a warp barrier across which ptxas moves no load.

    Without it ptxas sinks loads that were issued ahead, for later steps, down to where they are used.
    """
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1; bar.warp.sync 0xffffffff;", "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def load_tile(desc, at, bar, memory):
    """Start the TMA copy of the tile at `at` into shared memory; `bar` counts its bytes."""
    SHAPE: gl.constexpr = desc.block_type.shape
    async_load(desc, at, bar, view_as(memory, SHAPE, desc))


@gluon.jit
def store_tile(desc, at, memory):
    """Start the TMA copy of a tile from shared memory to `at`."""
    SHAPE: gl.constexpr = desc.block_type.shape
    async_store(desc, at, view_as(memory, SHAPE, desc))


@builtin
def _start_add(desc, at, memory, _semantic=None):
    """Gluon has no name for it in Triton 3.6."""
    at = _semantic._convert_to_ir_values(at, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, at, memory.handle)


@gluon.jit
def add_tile(desc, at, memory):
    """As `store_tile`, but the tile is added to what is there, atomically element by element."""
    SHAPE: gl.constexpr = desc.block_type.shape
    _start_add(desc, at, view_as(memory, SHAPE, desc))


@gluon.jit
def next_slot(slot, parity, STAGES: gl.constexpr):
    """The slot after this one, and its parity."""
    slot += 1
    wraps = slot == STAGES
    return gl.where(wraps, 0, slot), gl.where(wraps, parity ^ 1, parity)


@gluon.jit
def split_columns(acc, PARTS: gl.constexpr):
    """The columns of acc in PARTS equal parts. They are registers of their own: nothing moves."""
    if PARTS == 1:
        return (acc,)
    else:
        halves = acc.reshape([acc.shape[0], 2, acc.shape[1] // 2]).permute(0, 2, 1)
        low, high = halves.split()
        return split_columns(low, PARTS // 2) + split_columns(high, PARTS // 2)


def is_describable(t: Tensor) -> bool:
    """Whether a TMA descriptor can describe t: a last stride of 1, base and other strides multiples of 16 bytes."""
    strides, size = t.stride(), t.element_size()
    return (
        strides[-1] == 1
        and t.data_ptr() % 16 == 0
        and all(n == 1 or (d > 0 and d * size % 16 == 0) for n, d in zip(t.shape[:-1], strides[:-1], strict=True))
    )


def describe(t: Tensor, block: tuple[int, ...], layout: Any) -> Descriptor:
    """The TMA descriptor, but for the address, of tensors like t with tiles of `block`, in a Gluon shared layout.

    Loads outside of the tensor give zeros, and stores there are dropped.
    """
    any_stride = t.shape[-1] + -t.shape[-1] % 16  # the stride of a dimension of size 1 is arbitrary
    strides = [d if n > 1 else any_stride for n, d in zip(t.shape[:-1], t.stride()[:-1], strict=True)]
    return Descriptor(tuple(t.shape), (*strides, 1), block, layout)


def _ragged(
    positions: int, heads: int, dim: int, strides: tuple[int, ...], block: tuple[int, int], layout: Any
) -> Descriptor:
    """`describe_packed`, of sequences that may end at so many positions, a stride of tokens apart."""
    _, stride_h, stride_t, _ = strides
    shape = (_RAGGED.value + 1, positions + 1, heads, _RAGGED.value, dim)
    return Descriptor(shape, ((1 << 34) - stride_t, stride_t, stride_h, stride_t, 1), (1, 1, 1, *block), layout)


def describe_packed(t: Tensor, block: tuple[int, int], layout: Any) -> Descriptor:
    """As `describe`, of packed sequences (1, heads, tokens, dim) with tiles (tokens, dim), at `packed_at`.

    Loads past a sequence's end give zeros, whatever the next sequence has there, and stores past it are dropped. For
    this the tokens are a dimension that ends after 2^30, in which a sequence is moved back by the dimension before it
    and by the first one. With s the stride of tokens in elements, and addresses modulo 2^64 elements:

        2^30 (2^34 - s) + end s + (2^30 - n + row) s = (end - n + row) s

    (Triton's `triton.tools.ragged_tma` does the same.) The layout is of rank 5.
    """
    _, heads, tokens, dim = t.shape
    return _ragged(tokens, heads, dim, describe(t, (1, 1, *block), layout).strides, block, layout)


@gluon.jit
def packed_at(end, n, head, row, col=0):
    """Where TMA finds the rows from `row` on, and the columns from `col` on, of the sequence of n tokens that ends
    before token `end`."""
    return _RAGGED, end, head, _RAGGED - n + row, col


def describe_pages(t: Tensor, block: tuple[int, int], layout: Any) -> Descriptor:
    """As `describe_packed`, of pages (pages, heads, page, dim) that have a `primitives.paging.page_step`.

    The n first tokens of page p are the sequence that ends before token p * page_step + n.
    """
    pages, heads, page, dim = t.shape
    return _ragged(pages * page_step(t) + page, heads, dim, describe(t, (1, 1, *block), layout).strides, block, layout)
