"""The few-row mainloop for quantized weights: int8, fp8 or int4, dequantized on the way to the tensor cores.

As in skinny.py a CTA computes the transposed tile, `w[n, k] x[m, k]`: the weight has the tensor core's long side. The
packed tile streams through shared memory and is dequantized into the registers that the tensor cores read their first
operand from. With several `SLICES` it is a batch of GEMMs, one block of K each, and Triton gives each warp blocks of
its own: 16 rows of the weight then keep four warps busy, and their sums are added once, at the end.

int4 has a scale for each row and group of K. A block's GEMM is a sum over one group, and is multiplied by its scale in
float32 as it is added to the rest. A block is two groups: the low nibbles of its bytes are the first, the high nibbles
the second, so that both halves of x are contiguous too. With an odd number of groups the last block is one group, and
each of its halves half a group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile import launching, library, runtime  # before Triton: runtime fixes the mode of the process
from rooftile.ops.gemm.config import GemmConfig, Operands, Problem, Start
from rooftile.ops.gemm.epilogue import finish, sum_parts
from rooftile.primitives import pdl
from rooftile.primitives.dequantize import eight_bits_as, has_fast_conversions, int4_as
from rooftile.primitives.pdl import pdl_launch_dependents, pdl_wait, prefetch
from rooftile.primitives.quantize import writable
from rooftile.primitives.splitk import arrives_last, workspace
from rooftile.primitives.weights import scale_and_offset, unpack_pair, view_in_pairs

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def _spread(blocks, rows, inner, SLICES: tl.constexpr):
    """Three ranges as the dimensions of a tile: (SLICES, rows, inner), or (rows, inner) for one slice."""
    if SLICES == 1:
        return 0, rows[:, None], inner[None, :]
    else:
        return blocks[:, None, None], rows[None, :, None], inner[None, None, :]


@triton.jit
def _scales(scale_ptr, rows, block, GROUPS: tl.constexpr, EVEN: tl.constexpr, PAIRS: tl.constexpr):
    """The scales of a block's two groups. PAIRS: two of 16 bits are one word, the least that a pipelined load takes."""
    if PAIRS != "":
        HALF: tl.constexpr = GROUPS // 2
        if EVEN:
            words = tl.load(scale_ptr + rows * HALF + block)
        else:
            words = tl.load(scale_ptr + rows * HALF + block, mask=block < HALF, other=0)
        first, second = unpack_pair(words, PAIRS)
    else:
        at = scale_ptr + rows * GROUPS + 2 * block
        if EVEN:
            first = tl.load(at).to(tl.float32)
            second = tl.load(at + 1).to(tl.float32)
        else:
            first = tl.load(at, mask=2 * block < GROUPS, other=0.0).to(tl.float32)
            second = tl.load(at + 1, mask=2 * block + 1 < GROUPS, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def _scales_and_offsets(scale_ptr, rows, block, GROUPS: tl.constexpr, PAIRS: tl.constexpr):
    """The scales of a block's two groups, then their offsets. Of groups past the last one they are the last one's."""
    low, high = tl.minimum(2 * block, GROUPS - 1), tl.minimum(2 * block + 1, GROUPS - 1)
    first, first_offset = scale_and_offset(scale_ptr, rows, low, GROUPS, PAIRS)
    second, second_offset = scale_and_offset(scale_ptr, rows, high, GROUPS, PAIRS)
    return first, second, first_offset, second_offset


@triton.jit(do_not_specialize=["n_rows", "n_cols"])
def _weight_only_kernel(
    x_ptr, w_ptr, scale_ptr, bias_ptr, residual_ptr, out_ptr, partial_ptr, counters_ptr,
    stride_xm, stride_wn, n_rows, n_cols,
    K: tl.constexpr, GROUP: tl.constexpr, FAST_CONVERSIONS: tl.constexpr, PAIRS: tl.constexpr,
    HAS_OFFSETS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SLICES: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    # A block's bytes in a row of the weight, the number of blocks, and how many steps each part of the sum has.
    BYTES: tl.constexpr = BLOCK_K // 2 if GROUP > 0 else BLOCK_K
    BLOCKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    STEPS: tl.constexpr = (BLOCKS + SLICES - 1) // SLICES
    EACH: tl.constexpr = (STEPS + SPLIT - 1) // SPLIT
    EVEN: tl.constexpr = K % (BLOCK_K * SLICES) == 0
    ODD: tl.constexpr = GROUP > 0 and K % BLOCK_K != 0
    GROUPS: tl.constexpr = K // GROUP if GROUP > 0 else 0
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    # Neighbouring CTAs share a tile of the weight.
    row_tiles = tl.cdiv(n_rows, BLOCK_M)
    tile = tl.program_id(0) // SPLIT
    split = tl.program_id(0) % SPLIT
    m = (tile % row_tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = (tile // row_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_inside = tl.minimum(n, n_cols - 1).to(tl.int64)  # rows past the last one are clamped to it, and not stored
    block, w_rows, w_inner = _spread(tl.arange(0, SLICES), n_inside, tl.arange(0, BYTES), SLICES)
    _, x_inner, x_rows = _spread(tl.arange(0, SLICES), tl.arange(0, BYTES), m, SLICES)
    w_ptrs = w_ptr + w_rows * stride_wn + w_inner + block * BYTES
    x_ptrs = x_ptr + x_rows.to(tl.int64) * stride_xm + x_inner + block * BLOCK_K
    x_mask = x_rows < n_rows
    first_step = split * EACH
    if PREFETCH >= 0:
        pdl_launch_dependents()
        ROW_BYTES: tl.constexpr = (K // 2) if GROUP > 0 else K
        lines = tl.arange(0, triton.next_power_of_2(triton.cdiv(SLICES * BYTES, 128))) * 128
        for early in tl.static_range(PREFETCH):
            line = tl.minimum((first_step + early) * SLICES * BYTES + lines, ROW_BYTES - 1)
            prefetch(w_ptr + n_inside[:, None] * stride_wn + line[None, :])
        pdl_wait()

    if SLICES == 1:
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        acc = tl.zeros((SLICES, BLOCK_N, BLOCK_M), tl.float32)
    for step in tl.range(first_step, tl.minimum(first_step + EACH, STEPS), num_stages=STAGES):
        at = step * SLICES
        if EVEN:
            w = tl.load(w_ptrs + at * BYTES, eviction_policy="evict_first")
            x_inside = x_mask
            half = BYTES
        elif GROUP > 0:
            # Bytes of a block, and elements of each of its halves.
            half = tl.minimum(K - (at + block) * BLOCK_K, BLOCK_K) // 2
            w = tl.load(w_ptrs + at * BYTES, mask=w_inner < half, other=0, eviction_policy="evict_first")
            x_inside = x_mask & (x_inner < half)
        else:
            left = K - (at + block) * BLOCK_K
            w = tl.load(w_ptrs + at * BYTES, mask=w_inner < left, other=0.0, eviction_policy="evict_first")
            x_inside = x_mask & (x_inner < left)
        x = tl.load(x_ptrs + at * BLOCK_K, mask=x_inside, other=0.0)
        if GROUP > 0:
            if ODD:
                x_high = tl.load(x_ptrs + at * BLOCK_K + half, mask=x_inside, other=0.0)
            else:
                x_high = tl.load(x_ptrs + at * BLOCK_K + BYTES, mask=x_inside, other=0.0)
            low, high = int4_as(w, DTYPE, FAST_CONVERSIONS)
            if HAS_OFFSETS:
                scale, scale_high, offset, offset_high = _scales_and_offsets(
                    scale_ptr, w_rows, at + block, GROUPS, PAIRS
                )  # fmt: skip
                low += offset.to(DTYPE)  # exact: an integer from -23 to 22
                high += offset_high.to(DTYPE)
            else:
                scale, scale_high = _scales(scale_ptr, w_rows, at + block, GROUPS, EVEN, PAIRS)
            if ODD and not HAS_OFFSETS:
                scale_high = tl.where(half == BYTES, scale_high, scale)
            acc += tl.dot(low, x, input_precision="ieee") * scale
            acc += tl.dot(high, x_high, input_precision="ieee") * scale_high
        else:
            acc = tl.dot(eight_bits_as(w, DTYPE, FAST_CONVERSIONS), x, acc, input_precision="ieee")
    if SLICES > 1:
        acc = tl.sum(acc, axis=0)

    if SPLIT > 1:
        SIZE: tl.constexpr = BLOCK_N * BLOCK_M
        part = partial_ptr + tile.to(tl.int64) * (SPLIT * SIZE)
        part += tl.arange(0, BLOCK_N)[:, None] + tl.arange(0, BLOCK_M)[None, :] * BLOCK_N
        tl.store(part + split * SIZE, acc)
        if not arrives_last(counters_ptr + tile, SPLIT):
            return
        acc = sum_parts(part, SIZE, SPLIT, True)

    rows = m.to(tl.int64)[None, :]
    cols = n[:, None]
    if GROUP == 0:
        acc *= tl.load(scale_ptr + cols, mask=cols < n_cols).to(tl.float32)
    bias = None
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + cols, mask=cols < n_cols).to(tl.float32)
    mask = (rows < n_rows) & (cols < n_cols)
    finish(acc, acc, bias, None, residual_ptr, out_ptr, rows, cols, n_cols, n_cols, mask, "", False)


def can_implement(p: Problem, c: GemmConfig, target: runtime.Target) -> str | None:
    """Why this kernel can't compute that problem so; None where it can."""
    if p.group and c.block_k != 2 * p.group:
        return f"block_k is {c.block_k}, expected {2 * p.group}, twice the group of {p.group}"
    if c.block_n < 16 or c.block_k < 16:
        return f"the tile is {c.block_n} x {c.block_k}, expected at least 16 each"
    if target is runtime.INTERPRETER:
        return None
    if c.slices > c.num_warps and c.block_m == 1:
        # Triton 3.6 for sm_90: every such configuration computes something else, and none of two rows or more.
        return (
            f"slices is {c.slices} with num_warps={c.num_warps} and block_m=1: the compiler sums several blocks to a "
            "warp wrongly for one row"
        )
    stored = c.block_n * (c.block_k // 2 if p.group else c.block_k)
    most = max(1, c.num_stages - 1) * c.slices * (stored + c.block_m * c.block_k * p.dtype.itemsize)
    if most > target.shared_memory:
        return f"its tiles take {most} bytes of shared memory, a CTA has {target.shared_memory} on this GPU"
    return None


def prepare(o: Operands, c: GemmConfig) -> Start:
    """x (M, K), w (N, K) in int8 or fp8, or (N, K/2) in uint8, out and residual (M, N); all but x and w contiguous."""
    x, w, scale, device = o.x, o.w, o.weight_scale, o.w.device
    assert scale is not None, "the weight is quantized"
    (n_rows, k), n_cols = x.shape, w.shape[0]
    fp8, group, pairs, has_offsets = w.dtype == torch.float8_e4m3fn, 0, "", scale.dim() == 3
    if w.dtype == torch.uint8:
        group = int(k) // int(scale.shape[1])
        scale, pairs = view_in_pairs(scale)
    tiles, split = library.cdiv(n_rows, c.block_m) * library.cdiv(n_cols, c.block_n), c.split_k
    elements = c.block_n * c.block_m
    ahead = -1 if c.prefetch is None else c.prefetch
    constants = {
        "K": int(k), "GROUP": group, "FAST_CONVERSIONS": has_fast_conversions(runtime.target(device)), "PAIRS": pairs,
        "HAS_OFFSETS": has_offsets, "BLOCK_M": c.block_m, "BLOCK_N": c.block_n, "BLOCK_K": c.block_k,
        "SLICES": c.slices, "SPLIT": split, "STAGES": c.num_stages, "PREFETCH": ahead,
    }  # fmt: skip
    launcher = launching.launcher(
        _weight_only_kernel, (x, w, scale, o.bias, o.residual), constants, num_warps=c.num_warps,
        **pdl.options(ahead >= 0),
    )  # fmt: skip
    start = launching.bind(
        launcher, tiles * split, strides=(x.stride(0), w.stride(0)), numbers=(n_rows, n_cols)
    )  # fmt: skip

    def run(
        x: Tensor, w: Tensor, out: Tensor, bias: Tensor | None, residual: Tensor | None, _norm: None, _x_scale: None,
        scale: Tensor,
    ) -> None:  # fmt: skip
        partial, counters = workspace(tiles, elements, split, device)
        if fp8:
            w = writable(w)
        elif pairs:
            scale = view_in_pairs(scale)[0]
        start(x, w, scale, bias, residual, out, partial, counters)

    return run
