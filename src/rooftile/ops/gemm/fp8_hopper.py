"""fp8_linear on Hopper: programs that stay, and tiles that the tensor memory accelerator brings.

As many programs as multiprocessors walk the tiles, so that a tile's first loads are under way while the one before is
stored. The tensor maps are made on the host, at each launch.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from rooftile import launching, library, runtime  # before Triton: runtime fixes the mode of the process
from rooftile.ops.gemm import fp8_common as common
from rooftile.ops.gemm.config import MatmulConfig, Operands, Problem
from rooftile.ops.gemm.fp8_common import (
    Key,
    exchange,
    multiply,
    scaled,
    store,
    tile_of,
    w_scales,
    x_scales,
)

import triton  # isort: skip
import triton.language as tl  # isort: skip
from triton.tools.tensor_descriptor import TensorDescriptor  # isort: skip


@triton.jit(do_not_specialize=["n_rows"])
def _hopper_kernel(
    x_desc,
    w_desc,
    x_ptr,
    sx_ptr,
    sw_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    partial_ptr,
    counter_ptr,
    stride_sxm,
    stride_sxk,
    stride_swn,
    stride_swk,
    n_rows,
    N: tl.constexpr,
    K: tl.constexpr,
    X_SCALE: tl.constexpr,
    W_SCALE: tl.constexpr,
    FAST: tl.constexpr,
    APART: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    SHARE: tl.constexpr = (STEPS + SPLIT - 1) // SPLIT
    PARTS: tl.constexpr = X_SCALE == "group" or W_SCALE == "block"
    tiles = tl.cdiv(n_rows, BLOCK_M) * ((N + BLOCK_N - 1) // BLOCK_N)

    for index in tl.range(tl.program_id(0), tiles * SPLIT, tl.num_programs(0), flatten=SPLIT == 1):
        tile = index // SPLIT
        part = index % SPLIT
        tile_m, tile_n = tile_of(tile, n_rows, N, GROUP_M, BLOCK_M, BLOCK_N)
        rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        inner_rows = tl.minimum(rows, n_rows - 1)
        inner_cols = tl.minimum(cols, N - 1)

        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for i in range(SHARE):
            first = (part * SHARE + i) * BLOCK_K  # past K the tensor maps give zeros
            x = x_desc.load([tile_m * BLOCK_M, first])
            w = w_desc.load([tile_n * BLOCK_N, first]).T
            if PARTS:
                product = tl.dot(x, w)
                k = tl.minimum(first, K - 1)
                if X_SCALE == "group":
                    product *= x_scales(sx_ptr, stride_sxm, stride_sxk, inner_rows, k, X_SCALE)[:, None]
                if W_SCALE == "block":
                    sw = w_scales(sw_ptr, stride_swn, stride_swk, tile_n * BLOCK_N, inner_cols, k, W_SCALE, BLOCK_N)
                    product *= sw if BLOCK_N <= 128 else sw[None, :]
                acc += product
            else:
                acc = multiply(x, w, acc, FAST, APART, BLOCK_K)

        mask = (rows[:, None] < n_rows) & (cols[None, :] < N)
        at = rows.to(tl.int64)[:, None] * N + cols[None, :]
        last = True
        if SPLIT > 1:
            size = n_rows.to(tl.int64) * N
            last, acc = exchange(acc, partial_ptr, counter_ptr + tile, part, at, mask, size, SPLIT)
        if last:
            scales = (sx_ptr, sw_ptr, stride_sxm, stride_swn)
            z = scaled(acc, x_ptr, bias_ptr, scales, inner_rows, inner_cols, X_SCALE, W_SCALE, True)
            store(z, residual_ptr, out_ptr, at, mask)


@functools.lru_cache(1024)
def _plan(key: Key, c: MatmulConfig) -> launching.KernelLauncher:
    constants = {**common.constants(key, c), "GROUP_M": c.group_m}
    return launching.KernelLauncher(_hopper_kernel, constants, num_warps=c.num_warps, num_stages=c.num_stages)


def can_implement(p: Problem, c: MatmulConfig, target: runtime.Target) -> str | None:
    """Why this kernel can't do it, or None."""
    if target is not runtime.INTERPRETER and target.arch != "sm_90":
        return f"the kernel is for sm_90, and the device is {target.arch}"
    if not p.aligned or p.k % 16:
        return "x's and the weight's rows are not contiguous and at multiples of 16 bytes"
    if max(c.block_m, c.block_n) > 256 or c.block_m < 64:
        return f"block_m is {c.block_m} and block_n {c.block_n}, expected 64 to 256 and at most 256"
    if c.block_n & (c.block_n - 1):
        return f"block_n is {c.block_n}, expected a power of two"
    return common.can_implement(p, c)


@functools.lru_cache(1024)
def _resident(c: MatmulConfig, target: runtime.Target) -> int:
    """Programs that the chip holds: two a multiprocessor, if they are of four warps and their stages fit."""
    stages = c.num_stages * c.block_k * (c.block_m + c.block_n)
    two = c.num_warps <= 4 and 2 * (stages + 12_288) <= target.shared_memory
    return (2 if two else 1) * target.multiprocessors


def _launch(
    plan: launching.KernelLauncher, programs: int, args: tuple[Any, ...], tensors: tuple[Tensor | None, ...]
) -> None:
    """As `launching.launch`, for arguments among which are tensor maps."""
    key = None
    if runtime.MODE is runtime.Mode.GPU and not any(t is not None and t.data_ptr() & 15 for t in tensors):
        numbers = tuple(a for a in args if isinstance(a, int))[:-1]
        device = tensors[0].get_device()  # type: ignore[union-attr]
        key = (device, numbers)
        compiled = plan.compiled.get(key)
        if compiled is not None:
            return launching._start(compiled, programs, device, (*args, *plan.values))
    compiled = plan.kernel[(programs,)](*args, **plan.constants, **plan.options)
    if key is not None:
        plan.compiled[key] = compiled
    return None


def launch(o: Operands, c: MatmulConfig) -> None:
    m, n, k = o.x.shape[0], int(o.w.shape[0]), int(o.w.shape[1])
    tiles = library.cdiv(m, c.block_m) * library.cdiv(n, c.block_n)
    partial, counter = common.split_memory(o, tiles, c)
    plan = _plan(common.plan_key(o), c)
    maps = (
        TensorDescriptor(o.x, [m, k], [o.x.stride(0), 1], [c.block_m, c.block_k]),
        TensorDescriptor(o.w, [n, k], [o.w.stride(0), 1], [c.block_n, c.block_k]),
    )
    tensors = (o.x, o.x_scale, o.weight_scale, o.bias, o.residual, o.out, partial, counter)
    programs = min(tiles * c.split_k, _resident(c, runtime.target(o.x.device)))
    _launch(plan, programs, (*maps, *tensors, *common.scale_strides(o), m), tensors)
