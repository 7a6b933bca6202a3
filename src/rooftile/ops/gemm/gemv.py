"""GEMV: one row of x, on the FMA units. For a tensor core, x would be padded to 16 rows.

    z = x @ weight^T, or rms_norm(x) @ weight^T;   then an epilogue:
    "linear"    out = act(z * scale + bias) + residual
    "gated"     out = act(g) * u + residual,   [g | u] = z * scale + bias
    "qkv"       q, k, v = z * scale + bias;    q and k are rotated, k and v written into the cache

It is bound by the bytes of the weight, which are read once. A CTA has `block_n` rows of the weight (gated: as many of
the gate and of up; qkv: pairs of rows that RoPE rotates together) and walks along them, `block_k` columns at a time.
Each thread multiplies what it loaded and keeps partial sums in registers, which are reduced across threads once, at the
end. x and the norm's weight are read by every CTA, from the L2 or its own L1: a few kilobytes. The sum of x's squares
is taken beside the products.

Weights are dense, int8, float8_e4m3fn or int4 (`primitives/weights.py`). x is not rounded; the scale of a row or of a
group multiplies its sum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor

from rooftile import launching, library, runtime  # before Triton: runtime fixes the mode of the process
from rooftile.ops.gemm.config import GemmConfig, Operands, Problem, Start
from rooftile.ops.gemm.gemv_epilogue import (
    CONSTANTS,
    NO_QKV,
    QkvOutput,
    load_angles_of,
    rotate_and_store,
    scale_and_shift,
)
from rooftile.primitives import pdl
from rooftile.primitives.activations import activate
from rooftile.primitives.paging import locate_tokens
from rooftile.primitives.pdl import pdl_launch_dependents, pdl_wait, prefetch
from rooftile.primitives.weights import Format, add_products, in_float32, load_columns, load_scales, zero_sums

import triton  # isort: skip
import triton.language as tl  # isort: skip

# Blocks of its weight rows that a CTA prefetches into the L2 before the previous kernel has ended; -1: it is launched
# after that. One took 3 to 8 % off GEMVs of Llama-3-8B on an H200, four were slower than none. More pay no better where
# the previous kernel leaves the memory idle: after attention two took as long as one, four 21 us more of a step's 3932,
# all eight 78.
PREFETCH = 1
# Behind a norm the gated kernel is launched late: early it took 200 us more of Llama-3-8B's decoding step, 4391 us. Its
# thousands of CTAs fill the GPU while the previous GEMV still has most of its weights to read.
NORM_GATED_PREFETCH = -1
STYLES = ("half",)  # of RoPE
_REGISTERS = 1 << 16  # of an SM of an NVIDIA GPU


@triton.jit
def _load_step(
    w_ptrs, other_ptrs, scale_ptr, rows, other_rows, x_ptr, norm_ptr, k, step, n_inner, TWO: tl.constexpr,
    HAS_NORM: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, PAIRS: tl.constexpr, HAS_OFFSETS: tl.constexpr,
    EVEN_K: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """What is multiplied from stored column k on: rows of the weight (TWO: both sets) with their groups' scales, x, and
    the norm's weight.

    All loads come before the first use: x changes its layout to the weight's, which takes a barrier.
    """
    ks = k + tl.arange(0, BLOCK_K)
    inside = ks < n_inner
    POLICY: tl.constexpr = "evict_last" if HAS_NORM else ""
    if EVEN_K:
        w = tl.load(w_ptrs + step, eviction_policy="evict_first")
        other = w
        if TWO:
            other = tl.load(other_ptrs + step, eviction_policy="evict_first")
    else:
        w = tl.load(w_ptrs + step, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
        other = w
        if TWO:
            other = tl.load(other_ptrs + step, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
    x = load_columns(x_ptr, ks, inside, GROUP, GROUPS, EVEN_K, POLICY)
    norm = x
    if HAS_NORM:
        norm = load_columns(norm_ptr, ks, inside, GROUP, GROUPS, EVEN_K, POLICY)
    scales = load_scales(scale_ptr, rows, k, GROUP, GROUPS, PAIRS, HAS_OFFSETS, BLOCK_K)
    other_scales = scales
    if TWO:
        other_scales = load_scales(scale_ptr, other_rows, k, GROUP, GROUPS, PAIRS, HAS_OFFSETS, BLOCK_K)
    return (w, scales), (other, other_scales), x, norm


@triton.jit
def _normed(x, norm, OFFSET: tl.constexpr):
    """x times the norm's weight, and x's squares."""
    x = x.to(tl.float32)
    return x * (norm.to(tl.float32) + OFFSET), x * x


@triton.jit
def _add_step(
    acc, other_acc, squares, w, other, x, norm, OFFSET: tl.constexpr, TWO: tl.constexpr, HAS_NORM: tl.constexpr,
    FAST_CONVERSIONS: tl.constexpr,
):  # fmt: skip
    """The sums with the products of what `_load_step` gave, and with the squares of x."""
    if HAS_NORM:
        first, more = _normed(x[0], norm[0], OFFSET)
        squares += more
        if len(x) == 1:
            y = (first,)
        else:
            second, more = _normed(x[1], norm[1], OFFSET)
            squares += more
            y = first, second  # type: ignore[assignment]  # of another length
    else:
        y = in_float32(x)
    acc = add_products(acc, w[0], y, w[1], FAST_CONVERSIONS)
    if TWO:
        other_acc = add_products(other_acc, other[0], y, other[1], FAST_CONVERSIONS)
    return acc, other_acc, squares


@triton.jit(do_not_specialize=["n_cols", "capacity", "n_pages", "n_angles"])
def gemv_kernel(
    x_ptr, norm_ptr, w_ptr, scale_ptr, bias_ptr, residual_ptr, out_ptr,
    k_cache_ptr, v_cache_ptr, cos_ptr, sin_ptr, starts_ptr, counts_ptr, table_ptr,
    stride_wn, stride_wk,
    stride_kcb, stride_kch, stride_kct, stride_vcb, stride_vch, stride_vct, stride_ct, stride_st,
    n_inner, n_cols, capacity, n_pages, n_angles,
    EPILOGUE: tl.constexpr, EPS: tl.constexpr, OFFSET: tl.constexpr, ACTIVATION: tl.constexpr, HAS_NORM: tl.constexpr,
    HAS_SCALE: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, PAIRS: tl.constexpr, HAS_OFFSETS: tl.constexpr,
    FAST_CONVERSIONS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, APART: tl.constexpr, PAGE: tl.constexpr, HAS_COUNTS: tl.constexpr,
    BY_POSITION: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
):  # fmt: skip
    TWO: tl.constexpr = EPILOGUE != "linear"  # sets of the weight's rows
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows are in bounds, so that their loads need no mask.
    if EPILOGUE == "qkv":
        N_PAIRS: tl.constexpr = (Q_HEADS + 2 * KV_HEADS) * (HEAD_DIM // 2)
        inside = cols < N_PAIRS
        pair = tl.minimum(cols, N_PAIRS - 1)
        head = pair // (HEAD_DIM // 2)
        first = pair % (HEAD_DIM // 2)
        rows = (head * HEAD_DIM + first).to(tl.int64)
        other_rows = rows + APART
    else:
        rows = tl.minimum(cols, n_cols - 1).to(tl.int64)
        other_rows = rows + n_cols
    block = tl.arange(0, BLOCK_K)
    if HAS_NORM:  # then the weight may have any layout
        block = block.to(tl.int64)
    w_ptrs = w_ptr + rows[:, None] * stride_wn + block[None, :] * stride_wk
    other_ptrs = w_ptr + other_rows[:, None] * stride_wn + block[None, :] * stride_wk

    if PREFETCH >= 0:
        pdl_launch_dependents()
        LINE: tl.constexpr = 128 // (w_ptr.dtype.element_ty.primitive_bitwidth // 8)
        lines = tl.arange(0, (BLOCK_K + LINE - 1) // LINE) * LINE
        for b in tl.static_range(PREFETCH):
            at = tl.minimum(lines + b * BLOCK_K, n_inner - 1)[None, :]
            prefetch(w_ptr + rows[:, None] * stride_wn + at)
            if EPILOGUE == "qkv":
                prefetch(w_ptr + other_rows[:, None] * stride_wn + at)
        pdl_wait()

    # Loaded now: at the end a CTA would wait for them with no other load in flight.
    scale, other_scale, bias, other_bias = 0.0, 0.0, 0.0, 0.0
    if HAS_SCALE:
        scale = tl.load(scale_ptr + rows).to(tl.float32)
        if TWO:
            other_scale = tl.load(scale_ptr + other_rows).to(tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + rows).to(tl.float32)
        if TWO:
            other_bias = tl.load(bias_ptr + other_rows).to(tl.float32)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + rows).to(tl.float32)

    acc = zero_sums(w_ptr, BLOCK_N, BLOCK_K)
    other_acc = zero_sums(w_ptr, BLOCK_N, BLOCK_K)
    squares = tl.zeros((BLOCK_K,), tl.float32)
    FIRST: tl.constexpr = BLOCK_K if EPILOGUE == "qkv" else 0
    if EPILOGUE == "qkv":
        # The first step's loads, then those that locate the token, which depend on one another, then all others.
        w, other, x, norm = _load_step(
            w_ptrs, other_ptrs, scale_ptr, rows, other_rows, x_ptr, norm_ptr, 0, 0, n_inner, TWO, HAS_NORM, GROUP,
            GROUPS, PAIRS, HAS_OFFSETS, EVEN_K, BLOCK_K,
        )  # fmt: skip
        exists, position, page, line, written = locate_tokens(
            starts_ptr, counts_ptr, table_ptr, 0, 0, tl.zeros((1,), tl.int64), 1, capacity, n_pages, HAS_COUNTS, PAGE
        )
        cos, sin = load_angles_of(
            cos_ptr, sin_ptr, exists, position, first, stride_ct, stride_st, n_angles, BY_POSITION
        )  # fmt: skip
        acc, other_acc, squares = _add_step(
            acc, other_acc, squares, w, other, x, norm, OFFSET, TWO, HAS_NORM, FAST_CONVERSIONS
        )  # fmt: skip
    for k in tl.range(FIRST, n_inner, BLOCK_K, num_stages=STAGES):
        step = k
        if HAS_NORM:
            step = k.to(tl.int64) * stride_wk
        w, other, x, norm = _load_step(
            w_ptrs, other_ptrs, scale_ptr, rows, other_rows, x_ptr, norm_ptr, k, step, n_inner, TWO, HAS_NORM, GROUP,
            GROUPS, PAIRS, HAS_OFFSETS, EVEN_K, BLOCK_K,
        )  # fmt: skip
        acc, other_acc, squares = _add_step(
            acc, other_acc, squares, w, other, x, norm, OFFSET, TWO, HAS_NORM, FAST_CONVERSIONS
        )  # fmt: skip

    rstd = 1.0
    if HAS_NORM:
        n = n_inner if GROUP == 0 else 2 * n_inner  # elements of x
        rstd = tl.rsqrt(tl.sum(squares, axis=0) / n + EPS)
    if EPILOGUE == "qkv":
        # One reduction for both rows of a pair: each goes through shared memory.
        z = tl.sum(tl.permute(tl.join(acc, other_acc), (2, 0, 1)), axis=2)
        z, other_z = tl.split(tl.permute(z, (1, 0)))
    else:
        z = tl.sum(acc, axis=1)
        if TWO:
            other_z = tl.sum(other_acc, axis=1)
    # q, k and v are rounded before they are rotated, too.
    ROUNDED: tl.constexpr = out_ptr.dtype.element_ty if EPILOGUE == "qkv" else tl.float32
    z = scale_and_shift(z, rstd, scale, bias, HAS_NORM, HAS_SCALE, HAS_BIAS, ROUNDED)
    if TWO:
        other_z = scale_and_shift(other_z, rstd, other_scale, other_bias, HAS_NORM, HAS_SCALE, HAS_BIAS, ROUNDED)
    if EPILOGUE == "qkv":
        rotate_and_store(
            z, other_z, cos, sin, out_ptr, k_cache_ptr, v_cache_ptr, head, first, inside, exists, page, line, written,
            stride_kcb, stride_kch, stride_kct, stride_vcb, stride_vch, stride_vct, Q_HEADS, KV_HEADS, HEAD_DIM, APART,
        )  # fmt: skip
    else:
        if ACTIVATION != "":
            z = activate(z, ACTIVATION)
        if TWO:
            z *= other_z
        if HAS_RESIDUAL:
            z += residual
        tl.store(out_ptr + cols, z.to(out_ptr.dtype.element_ty), mask=cols < n_cols)


def can_implement(p: Problem, c: GemmConfig, target: runtime.Target) -> str | None:
    """Why this kernel can't compute that problem so; None where it can. After a norm the weight may have any layout."""
    if p.m != 1 or p.batch != 1:
        return f"kernel 'gemv' takes one row of x, not {p.batch} x {p.m} (batch x rows)"
    if c.split_k > 1:
        return f"split_k is {c.split_k}, expected 1: kernel 'gemv' sums whole rows"
    if p.x_layout != "k" or (p.w_layout != "k" and not p.norm):
        return "kernel 'gemv' takes operands that are contiguous along k"
    in_a_byte = 2 if p.weight == "int4" else 1
    if in_a_byte == 2 and c.block_k < 32:
        return f"block_k is {c.block_k}, expected at least 32 for a weight of 4 bits"
    elements = c.block_n * c.block_k * (1 + p.gated)
    if elements // (c.num_warps * target.warp_size) > 128 * in_a_byte:
        return f"block_n x block_k is {elements} elements for {c.num_warps} warps, more than {128 * in_a_byte} a thread"
    if c.num_stages > 1 and c.num_stages * elements * p.dtype.itemsize > target.shared_memory:
        return f"num_stages is {c.num_stages}: tiles of {elements} elements don't fit the shared memory"
    return None


def _register_limit(weight: torch.dtype, block: int, c: GemmConfig, programs: int, target: runtime.Target) -> int:
    """The registers that a thread may have; 0 for no limit. `block` is the elements of a step.

    On sm_90 a kernel takes 72 to 80 registers with 32 elements of 16 bits a thread, and up to 72 with 64 of int8. The
    limit is 72, or 64 for int8, where all CTAs fit in one wave with it, and a few would be left for a second wave
    without. In 16 bits, with 896 CTAs of four warps, 18944 -> 3584, that took a step of Qwen2.5-7B from 3873 to 3673
    us. In int8 it keeps the 1024 CTAs of 14336 -> 4096 in one wave.
    """
    threads = c.num_warps * target.warp_size
    elements, most, least = (64, 72, 64) if weight == torch.int8 else (32, 80, 72)
    if target.arch != "sm_90" or c.num_stages > 1 or weight.itemsize > 2 or block != elements * threads:
        return 0
    more, fewer = (_REGISTERS // (each * threads) * target.multiprocessors for each in (most, least))
    return least if more < programs <= fewer else 0


def _prefetched(o: Operands, c: GemmConfig, is_qkv: bool) -> int:
    """The blocks that a CTA prefetches, or -1 for an ordinary launch."""
    if c.prefetch is not None:
        return c.prefetch
    along_k = o.w.stride(-1) == 1 or o.w.shape[-1] == 1  # a line that is prefetched lies along k
    if not along_k or not (pdl.early(o.x) if is_qkv else pdl.supported(runtime.target(o.w.device))):
        return -1
    return NORM_GATED_PREFETCH if o.gated and o.norm_weight is not None else PREFETCH


def prepare(o: Operands, c: GemmConfig, qkv: QkvOutput = NO_QKV) -> Start:
    """For one row of x, `(1, K)`.

    With `qkv` out is q, `(1, 1, Hq, D)`, and `c` is that of the linear kernel: half of its rows make a CTA's pairs. The
    start then takes `qkv.tensors` after its other arguments.
    """
    x, k, dtype = o.x, o.x.shape[-1], o.x.dtype
    is_qkv = qkv is not NO_QKV
    epilogue = "qkv" if is_qkv else "gated" if o.gated else "linear"
    n_cols = o.w.shape[-2] // 2 if is_qkv else o.out.shape[-1]
    block_n = c.block_n // 2 if is_qkv else c.block_n
    n_inner = o.w.shape[-1]
    block_k = c.block_k // 2 if o.w.dtype == torch.uint8 else c.block_k
    programs = library.cdiv(n_cols, block_n)
    limit = 0
    is_plain = epilogue == "linear" and o.norm_weight is None and o.w.dtype in (dtype, torch.int8)
    if is_plain and not isinstance(x, FunctionalTensor):
        limit = _register_limit(o.w.dtype, block_n * block_k, c, programs, runtime.target(o.w.device))
    w, scale, form = Format.of(o.w, o.weight_scale, k, dtype)
    tensors = (x, o.norm_weight, w, scale, o.bias, o.residual, o.out, *qkv.tensors)
    prefetched = _prefetched(o, c, is_qkv)
    constants = {
        "EPILOGUE": epilogue, "EPS": o.eps, "OFFSET": o.offset, "ACTIVATION": o.activation,
        "HAS_NORM": o.norm_weight is not None, **form.constants(), "HAS_BIAS": o.bias is not None,
        "HAS_RESIDUAL": o.residual is not None, **dict(zip(CONSTANTS, qkv.constants, strict=True)),
        "EVEN_K": n_inner % block_k == 0, "BLOCK_N": block_n, "BLOCK_K": block_k, "STAGES": c.num_stages,
        "PREFETCH": prefetched,
    }  # fmt: skip
    options: dict[str, Any] = {"maxnreg": limit} if limit else {}
    launcher = launching.launcher(
        gemv_kernel, tensors, constants, num_warps=c.num_warps, **options, **pdl.options(prefetched >= 0)
    )
    strides = (w.stride(-2), w.stride(-1), *qkv.strides, n_inner)
    start = launching.bind(launcher, programs, strides=strides, numbers=(n_cols, *qkv.sizes))
    is_read_as_it_is = w is o.w and scale is o.weight_scale

    def run(
        x: Tensor, w: Tensor, out: Tensor, bias: Tensor | None, residual: Tensor | None, norm_weight: Tensor | None,
        x_scale: Tensor | None, weight_scale: Tensor | None, *of_qkv: Tensor | None,
    ) -> None:  # fmt: skip
        if not is_read_as_it_is:
            w, weight_scale, _ = Format.of(w, weight_scale, k, dtype)
        start(x, norm_weight, w, weight_scale, bias, residual, out, *(of_qkv or NO_QKV.tensors))

    return run
