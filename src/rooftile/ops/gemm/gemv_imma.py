"""One row of x and a weight of 8 or 4 bits on the integer matrix unit, behind a norm or not, gated or not.

    z = (x @ weight^T) * scale + bias + residual,   or of rms_norm(x),   or act(g) * u of z = [g | u]

How it is multiplied `primitives/digits.py` says. With a norm x is multiplied by the norm's weight first, and sums by
the reciprocal root of the mean square: each program finds the sum of its part of x as it makes the digits, and that
which adds the parts of K adds those. A gated program has rows of the gate and the same of up.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from rooftile import launching, library  # before Triton: runtime fixes the mode of the process
from rooftile.ops.gemm.weight_only_config import WeightOnlyConfig
from rooftile.primitives.activations import activate
from rooftile.primitives.digits import (
    first_weights,
    in_pairs_of_rows,
    pairs_apart,
    prefetch_steps,
    sum_products,
    tile_rows,
)
from rooftile.primitives.pdl import pdl_launch_dependents, pdl_wait
from rooftile.primitives.splitk import arrives_last
from rooftile.primitives.weights import in_pairs

import triton.experimental.gluon.language as gl  # isort: skip
from triton.experimental import gluon  # isort: skip


@gluon.jit
def _of_weight(row, first, n_cols, GATED: gl.constexpr):
    """Which rows of the weight a tile's are; what is past the last one is in bounds, and not stored."""
    if GATED:
        pair, second = in_pairs_of_rows(row)
        return gl.minimum(first + pair, n_cols - 1) + second * n_cols
    else:
        return gl.minimum(first + row, n_cols - 1)


@gluon.jit(do_not_specialize=["n_cols"])
def _gemv_imma_kernel(
    x_ptr,
    norm_ptr,
    w_ptr,
    scale_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    partial_ptr,
    counters_ptr,
    stride_wn,
    n_cols,
    K: gl.constexpr,
    EPS: gl.constexpr,
    OFFSET: gl.constexpr,
    ACTIVATION: gl.constexpr,
    HAS_NORM: gl.constexpr,
    GATED: gl.constexpr,
    GROUP: gl.constexpr,
    PAIRS: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr,
    BLOCK_N: gl.constexpr,
    SLICES: gl.constexpr,
    SPLIT: gl.constexpr,
    AHEAD: gl.constexpr,
    PREFETCH: gl.constexpr,
):
    COLS: gl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    tile = gl.program_id(0) // SPLIT
    split = gl.program_id(0) % SPLIT
    loaded, summed = tile_rows(BLOCK_N, SLICES)
    loaded = _of_weight(loaded, tile * COLS, n_cols, GATED)
    rows = loaded, _of_weight(summed, tile * COLS, n_cols, GATED)

    if PREFETCH >= 0 and HAS_NORM:
        pdl_launch_dependents()
    coming = first_weights(w_ptr, rows, split, K, GROUP, SLICES, SPLIT, AHEAD, stride_wn)
    if PREFETCH > 0:
        prefetch_steps(w_ptr, loaded, split, K, GROUP, SLICES, SPLIT, AHEAD, PREFETCH, stride_wn)
    if PREFETCH >= 0:
        pdl_wait()

    # Asked for now: at the end a program would wait for them with nothing else under way.
    col = tile * COLS + gl.arange(0, COLS, layout=flat)
    row = gl.minimum(col, n_cols - 1)
    if GROUP == 0:
        row_scale = gl.load(scale_ptr + row).to(gl.float32)
        if GATED:
            up_scale = gl.load(scale_ptr + n_cols + row).to(gl.float32)
    if HAS_BIAS:
        row_bias = gl.load(bias_ptr + row).to(gl.float32)
        if GATED:
            up_bias = gl.load(bias_ptr + n_cols + row).to(gl.float32)
    if HAS_RESIDUAL:
        residual = gl.load(residual_ptr + row).to(gl.float32)
    z, total = sum_products(
        x_ptr, norm_ptr, w_ptr, scale_ptr, rows, coming, split, K, GROUP, PAIRS, HAS_NORM, OFFSET, SLICES, SPLIT,
        AHEAD, stride_wn,
    )  # fmt: skip
    # What stands behind a product without a norm may be a gated one, of few programs that stay long: started while this
    # one's are under way, they come to lie where there is room, several on one multiprocessor and none on another. In
    # Llama-3-8B's step with int4 that cost 530 us of 2070; to start it when this one has ended, 110 of 1650.
    if PREFETCH >= 0 and not HAS_NORM:
        pdl_launch_dependents()
    if GATED:
        z, z_up = pairs_apart(z, COLS, flat)
    else:
        z = gl.convert_layout(z, flat)

    if SPLIT > 1:
        # The parts' sums, and behind those of all programs their sums of squares.
        sums = partial_ptr + tile.to(gl.int64) * (SPLIT * BLOCK_N) + gl.arange(0, COLS, layout=flat)
        totals = partial_ptr + gl.num_programs(0).to(gl.int64) * BLOCK_N + tile.to(gl.int64) * SPLIT
        gl.store(sums + split * BLOCK_N, z)
        if GATED:
            gl.store(sums + split * BLOCK_N + COLS, z_up)
        if HAS_NORM:
            gl.store(totals + split, total)
        if not arrives_last(counters_ptr + tile, SPLIT):
            return
        z = gl.zeros([COLS], gl.float32, layout=flat)
        if GATED:
            z_up = gl.zeros([COLS], gl.float32, layout=flat)
        total = 0.0
        for s in gl.static_range(SPLIT):
            z += gl.load(sums + s * BLOCK_N, cache_modifier=".cg")
            if GATED:
                z_up += gl.load(sums + s * BLOCK_N + COLS, cache_modifier=".cg")
            if HAS_NORM:
                total += gl.load(totals + s, cache_modifier=".cg")

    if HAS_NORM:
        rstd = gl.rsqrt(total / K + EPS)
        z *= rstd
        if GATED:
            z_up *= rstd
    if GROUP == 0:
        z *= row_scale
        if GATED:
            z_up *= up_scale
    if HAS_BIAS:
        z += row_bias
        if GATED:
            z_up += up_bias
    if GATED:
        z = activate(z, ACTIVATION) * z_up
    if HAS_RESIDUAL:
        z += residual
    gl.store(out_ptr + col, z.to(out_ptr.dtype.element_ty), mask=col < n_cols)


@functools.cache
def _plan(
    k: int, group: int, dtypes: tuple[torch.dtype | None, ...], eps: float, offset: float, activation: str, pairs: str,
    c: WeightOnlyConfig,
) -> launching.KernelLauncher:  # fmt: skip
    constants = {
        "K": k,
        "EPS": eps,
        "OFFSET": offset,
        "ACTIVATION": activation,
        "HAS_NORM": dtypes[1] is not None,
        "GATED": activation != "",
        "GROUP": group,
        "PAIRS": pairs,
        "HAS_BIAS": dtypes[4] is not None,
        "HAS_RESIDUAL": dtypes[5] is not None,
        "BLOCK_N": c.block_n,
        "SLICES": c.slices,
        "SPLIT": c.split_k,
        "AHEAD": c.num_stages - 1,
        "PREFETCH": c.prefetch,
    }
    return launching.KernelLauncher(
        _gemv_imma_kernel, constants, num_warps=c.num_warps, **options(c, group, activation != "")
    )


def options(c: WeightOnlyConfig, group: int, gated: bool) -> dict[str, Any]:
    """Of a plan: an early launch, and how many registers a thread may have."""
    # Two programs of eight warps have room on a multiprocessor with 128. Where warps have 16 rows and all steps the
    # assembler would take up to 178, but for a gate of int8; elsewhere it takes fewer, and with a limit spills a few.
    limit = {"maxnreg": 128} if c.slices == 1 and c.num_warps <= 8 and (group or not gated) else {}
    return {**limit, **({"launch_pdl": True} if c.prefetch >= 0 else {})}


def launch(
    x: Tensor, w: Tensor, scale: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor,
    c: WeightOnlyConfig, norm_weight: Tensor | None = None, eps: float = 0.0, offset: float = 0.0, activation: str = "",
) -> None:  # fmt: skip
    """Launch it: x (1, K), w int8 (N, K) or uint8 (N, K/2), out and residual (1, N); all but w are contiguous. With an
    activation it is gated, and w has 2N rows."""
    k, n_cols = x.shape[1], out.shape[-1]
    group, pairs = 0, ""
    dtypes = tuple(None if t is None else t.dtype for t in (x, norm_weight, w, scale, bias, residual, out))
    if w.dtype == torch.uint8:
        group = int(k) // int(scale.shape[1])
        scale, pairs = in_pairs(scale)
        w = w.view(torch.int8)
    tiles = library.cdiv(n_cols, c.block_n // (2 if activation else 1))
    partial = counters = None
    if c.split_k > 1:
        partial = torch.empty(tiles * c.split_k * (c.block_n + 1), dtype=torch.float32, device=x.device)
        counters = launching.counters(tiles, x.device)
    plan = _plan(int(k), group, dtypes, eps, offset, activation, pairs, c)
    tensors = (x, norm_weight, w, scale, bias, residual, out, partial, counters)
    launching.launch(plan, tiles * c.split_k, tensors, (w.stride(0),), (n_cols,))
