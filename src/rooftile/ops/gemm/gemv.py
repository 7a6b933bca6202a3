"""One row of x: multiply and sum. The matrix unit would multiply fifteen rows of nothing; the weights are read once.

A program has `block_n` rows of the weight and walks along them `block_k` elements at a time; every thread multiplies
what it loaded and keeps its own sums, which meet at the end. Weights of 8 bits, int8 or float8_e4m3fn, and of int4 are
multiplied by x as it is; the scale of a row, or of a group, multiplies its sum.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor

from rooftile import launching, library, runtime  # before Triton: runtime fixes the mode of the process
from rooftile.ops.gemm.config import MatmulConfig, Problem
from rooftile.primitives import pdl
from rooftile.primitives.activations import activate
from rooftile.primitives.pdl import pdl_launch_dependents, pdl_wait, prefetch
from rooftile.primitives.splitk import arrives_last
from rooftile.primitives.weights import Format, add_products, in_float32, load_columns, load_scales, no_sums

import triton  # isort: skip
import triton.language as tl  # isort: skip


# Blocks of its weights that a program brings into the L2 before the kernel ahead has ended: on an H200 one took 3 to
# 8 % off the products of one row in Llama-3-8B, and four were slower than none. Nor do more pay where the kernel ahead
# leaves the memory idle: behind attention two took as long as one, four 21 us more of a step's 3932, all eight 78.
PREFETCH = 1
_REGISTERS = 1 << 16  # of a multiprocessor of NVIDIA's


@triton.jit(do_not_specialize=["n_cols"])
def _gemv_kernel(
    x_ptr,
    w_ptr,
    scale_ptr,
    out_ptr,
    bias_ptr,
    residual_ptr,
    partial_ptr,
    counters_ptr,
    stride_wn,
    n_inner,
    n_cols,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    PAIRS: tl.constexpr,
    TRICKS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    tile = tl.program_id(0) // SPLIT
    part = tl.program_id(0) % SPLIT
    cols = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.minimum(cols, n_cols - 1).to(tl.int64)  # in bounds, so that loads need no mask
    ks = tl.arange(0, BLOCK_K)
    w_ptrs = w_ptr + rows[:, None] * stride_wn + ks[None, :]
    up_ptrs = w_ptr + (rows + n_cols)[:, None] * stride_wn + ks[None, :]
    length = tl.cdiv(n_inner, SPLIT * BLOCK_K) * BLOCK_K
    start = part * length
    if PREFETCH >= 0:
        pdl_launch_dependents()
        if PREFETCH > 0:
            LINE: tl.constexpr = 128 // (w_ptr.dtype.element_ty.primitive_bitwidth // 8)
            LINES: tl.constexpr = (PREFETCH * BLOCK_K + LINE - 1) // LINE
            lines = start + tl.arange(0, triton.next_power_of_2(LINES)) * LINE
            last = tl.minimum(start + length, n_inner) - 1
            prefetch(w_ptr + rows[:, None] * stride_wn + tl.minimum(lines, last)[None, :])
        pdl_wait()

    # Asked for now: at the end a program would wait for them with nothing else under way.
    if HAS_SCALE:
        row_scale = tl.load(scale_ptr + rows).to(tl.float32)
        if GATED:
            up_scale = tl.load(scale_ptr + n_cols + rows).to(tl.float32)
    if HAS_BIAS:
        row_bias = tl.load(bias_ptr + rows).to(tl.float32)
        if GATED:
            up_bias = tl.load(bias_ptr + n_cols + rows).to(tl.float32)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + rows).to(tl.float32)

    acc = no_sums(w_ptr, BLOCK_N, BLOCK_K)
    up = no_sums(w_ptr, BLOCK_N, BLOCK_K)
    for k in tl.range(start, tl.minimum(start + length, n_inner), BLOCK_K, num_stages=STAGES):
        # All loads before the first of them is used: x is brought to the layout of w past a barrier.
        inside = k + ks < n_inner
        if EVEN_K:
            w = tl.load(w_ptrs + k, eviction_policy="evict_first")
            if GATED:
                w_up = tl.load(up_ptrs + k, eviction_policy="evict_first")
        else:
            w = tl.load(w_ptrs + k, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
            if GATED:
                w_up = tl.load(up_ptrs + k, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
        x = load_columns(x_ptr, k + ks, inside, GROUP, GROUPS, EVEN_K, "")
        scales = load_scales(scale_ptr, rows, k, GROUP, GROUPS, PAIRS, BLOCK_K)
        x = in_float32(x)
        acc = add_products(acc, w, x, scales, TRICKS)
        if GATED:
            up = add_products(up, w_up, x, scales, TRICKS)
    z = tl.sum(acc, axis=1)
    if GATED:
        z_up = tl.sum(up, axis=1)

    if SPLIT > 1:
        at = partial_ptr + tile.to(tl.int64) * (SPLIT * (1 + GATED) * BLOCK_N) + tl.arange(0, BLOCK_N)
        tl.store(at + part * BLOCK_N, z)
        if GATED:
            tl.store(at + (SPLIT + part) * BLOCK_N, z_up)
        if not arrives_last(counters_ptr + tile, SPLIT):
            return
        z = tl.zeros((BLOCK_N,), tl.float32)
        for s in tl.static_range(SPLIT):
            z += tl.load(at + s * BLOCK_N, cache_modifier=".cg")
        if GATED:
            z_up = tl.zeros((BLOCK_N,), tl.float32)
            for s in tl.static_range(SPLIT):
                z_up += tl.load(at + (SPLIT + s) * BLOCK_N, cache_modifier=".cg")

    if HAS_SCALE:
        z *= row_scale
        if GATED:
            z_up *= up_scale
    if HAS_BIAS:
        z += row_bias
        if GATED:
            z_up += up_bias
    if ACTIVATION != "":
        z = activate(z, ACTIVATION)
    if GATED:
        z *= z_up
    if HAS_RESIDUAL:
        z += residual
    tl.store(out_ptr + cols, z.to(out_ptr.dtype.element_ty), mask=cols < n_cols)


def _limit(c: MatmulConfig, programs: int, target: runtime.Target) -> int:
    """The registers that a thread may have, or 0 for as many as it takes.

    Of 32 numbers at a time those are 72 to 80 on sm_90. Where more than 72 leave a few programs to run when all others
    have ended, 72 it is: 896 programs of four warps, 18944 -> 3584, took a step of Qwen2.5-7B from 3873 to 3673 us.
    """
    threads = c.num_warps * target.warp_size
    if target.arch != "sm_90" or c.num_stages > 1 or c.block_n * c.block_k != 32 * threads:
        return 0
    more, fewer = (_REGISTERS // (each * threads) * target.multiprocessors for each in (80, 72))
    return 72 if more < programs <= fewer else 0


@functools.cache
def _plan(
    dtypes: tuple[torch.dtype | None, ...], activation: str, gated: bool, form: Format, even_k: bool,
    prefetched: int, limit: int, c: MatmulConfig,
) -> launching.KernelLauncher:  # fmt: skip
    options: dict[str, Any] = {"launch_pdl": True} if prefetched >= 0 else {}
    if limit:
        options["maxnreg"] = limit
    constants = {
        "ACTIVATION": activation,
        "GATED": gated,
        **form.constants(),
        "HAS_BIAS": dtypes[3] is not None,
        "HAS_RESIDUAL": dtypes[4] is not None,
        "EVEN_K": even_k,
        "BLOCK_N": c.block_n,
        "BLOCK_K": c.block_k,
        "SPLIT": c.split_k,
        "STAGES": c.num_stages,
        "PREFETCH": prefetched,
    }
    return launching.KernelLauncher(_gemv_kernel, constants, num_warps=c.num_warps, **options)


def _prefetched(x: Tensor) -> int:
    return PREFETCH if pdl.supported(runtime.target(x.device)) else -1


def can_implement(p: Problem, c: MatmulConfig, target: runtime.Target, numbers: int = 1) -> str | None:
    """Why this kernel can't run that problem so; None where it can. What p and c count as one are `numbers`: two in a
    byte of int4."""
    if c.pingpong or c.stream_k:
        return f"{'pingpong' if c.pingpong else 'stream_k'} is True, which kernel 'hopper' alone has"
    if p.m != 1 or p.batch != 1:
        return f"kernel 'gemv' takes one row of x, not {p.batch} x {p.m}"
    if p.x_layout != "k" or p.w_layout != "k":
        return "kernel 'gemv' takes operands that are contiguous along k"
    elements = c.block_n * c.block_k * (1 + p.gated)
    if elements // (c.num_warps * target.warp_size) > 128:
        return (
            f"block_n x block_k is {numbers * elements} elements for {c.num_warps} warps, more than {128 * numbers} a "
            "thread"
        )
    if c.num_stages > 1 and c.num_stages * elements * p.dtype.itemsize > target.shared_memory:
        return f"num_stages is {c.num_stages}: tiles of {elements} elements don't fit the shared memory"
    return None


def launch(
    x: Tensor,
    w: Tensor,
    out: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    gated: bool,
    precision: str,  # the multiply and the sum are float32's own, whatever was asked for
    c: MatmulConfig,
    scale: Tensor | None = None,
    prefetched: int | None = None,
) -> None:
    """Launch it: x (1, K), w (N, K) or (2N, K), out (1, N).

    Of 8 bits w has `scale`, (N,) or (2N,); of int4 it is (N, K / 2), has (N, groups), and is not gated. `prefetched`:
    in place of PREFETCH, -1 for a start after the kernel ahead.
    """
    n_cols, n_inner = out.shape[-1], w.shape[-1]
    tiles = library.cdiv(n_cols, c.block_n)
    partial = counters = None
    if c.split_k > 1:
        if isinstance(tiles, torch.SymInt):
            raise launching.Untraceable("counters of a symbolic number")
        partial = torch.empty(tiles * c.split_k * (1 + gated) * c.block_n, dtype=torch.float32, device=x.device)
        counters = launching.counters(tiles, x.device)
    w, scale, form = Format.of(w, scale, x.shape[-1], x.dtype)
    dtypes = (x.dtype, w.dtype, *(None if t is None else t.dtype for t in (scale, bias, residual)), out.dtype)
    prefetched = _prefetched(x) if prefetched is None else prefetched
    plain = x.dtype == w.dtype and x.element_size() == 2 and not gated and not isinstance(x, FunctionalTensor)
    limit = _limit(c, tiles * c.split_k, runtime.target(x.device)) if plain else 0
    plan = _plan(dtypes, activation, gated, form, bool(n_inner % c.block_k == 0), prefetched, limit, c)
    tensors = (x, w, scale, out, bias, residual, partial, counters)
    launching.launch(plan, tiles * c.split_k, tensors, (w.stride(-2), n_inner), (n_cols,))
