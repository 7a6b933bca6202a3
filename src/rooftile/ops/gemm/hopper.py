"""The product for sm_90: copies by the tensor memory accelerator, warpgroup instructions, persistent programs.

The kernel is in `hopper_kernel.py`; here is what it is compiled for, what it takes, and how it is launched. block_n
counts columns of the output: a gated product has as many gate rows and as many up rows of w in a tile. num_warps are
the warps that multiply, 4, 8 or 12; one more copies. With pingpong a tile belongs to 4 of 8.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor

from rooftile import launching, library, runtime
from rooftile.ops.gemm.config import MatmulConfig, Problem
from rooftile.ops.gemm.hopper_kernel import product
from rooftile.ops.gemm.hopper_tiling import Tiling

import triton.experimental.gluon.language as gl  # isort: skip
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor  # isort: skip

_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
# What a kernel of 8, 12 or 16 warps is compiled for; the warps that multiply then take what the one that copies leaves.
_REGISTERS = {1: 168, 2: 168, 3: 128}


@functools.cache
def _tiling(c: MatmulConfig, x_k: bool, w_k: bool, gated: bool, activation: str, limit: int) -> Tiling:
    """What the kernel is compiled for. The output is written by 64 columns at a time, of two at once if both fit."""
    consumers = max(1, c.num_warps // 4)
    rows = c.block_m // (1 if c.pingpong else consumers)
    chunk = min(64, c.block_n & -c.block_n, c.block_k)  # a part of every sum

    def tiling(out_buffers: int) -> Tiling:
        return Tiling(
            rows, c.block_n, c.block_k, chunk, consumers, c.num_stages, out_buffers, c.group_m, c.split_k,
            x_k, w_k, gated, activation, c.pingpong, c.stream_k,
        )  # fmt: skip

    return tiling(2) if tiling(2).shared_memory <= limit else tiling(1)


def can_implement(p: Problem, c: MatmulConfig, target: runtime.Target) -> str | None:
    """Why this kernel can't run that problem so; None where it can."""
    if target.arch != "sm_90":
        return f"kernel 'hopper' is for sm_90, not {target.arch}"
    if p.dtype not in _DTYPES:
        return f"kernel 'hopper' takes float16 and bfloat16, not {p.dtype}"
    if p.batch != 1:
        return f"kernel 'hopper' takes one product at a time, not a batch of {p.batch}"
    if p.x_layout not in ("k", "m") or p.w_layout not in ("k", "n"):
        return "kernel 'hopper' takes operands that are contiguous along one dimension"
    if not (p.x_aligned and p.w_aligned and p.out_aligned) or p.n * p.dtype.itemsize % 16:
        return "kernel 'hopper' takes operands and an output whose rows begin at multiples of 16 bytes"
    if not 0 < min(p.m, p.n, p.k) <= max(p.m, p.n, p.k) < 2**31:
        return f"kernel 'hopper' takes sizes from 1 to 2^31 - 1, not {p.m}, {p.n}, {p.k}"
    if c.pingpong and c.num_warps != 8:
        return f"num_warps is {c.num_warps}: kernel 'hopper' takes 8 with pingpong"
    warps = 4 if c.pingpong else c.num_warps  # of a tile
    if c.num_warps not in (4, 8, 12) or c.block_m * 4 // warps not in (64, 128):
        return f"block_m is {c.block_m}: kernel 'hopper' takes 64 or 128 rows for every 4 of 4, 8 or 12 warps"
    if not 32 <= c.block_n <= 256 or not 32 <= c.block_k <= 128:
        return f"the tile is {c.block_n} x {c.block_k}: kernel 'hopper' takes 32 to 256 columns, and 32 to 128 a step"
    between = c.block_n & (c.block_n - 1) != 0  # powers of two: pieces of w, and several sums
    if between and c.block_k == 128 and p.w_layout == "k":
        return f"block_k is 128, expected 32 or 64 with {c.block_n} columns and a weight that is contiguous along k"
    if between and c.stream_k:  # this, and what follows, spilled registers when it was compiled
        return f"stream_k is True, expected False with {c.block_n} columns"
    if between and c.num_warps == 12 and (p.gated or c.split_k > 1):
        return f"num_warps is 12, expected 4 or 8 with {c.block_n} columns and a gate or split_k"
    steps = library.cdiv(p.k, c.block_k)
    if c.split_k > steps:
        return f"split_k is {c.split_k}: there are {steps} steps of {c.block_k}"
    if c.stream_k and c.split_k > 1:
        return f"split_k is {c.split_k}, expected 1 with stream_k"
    if c.stream_k and steps * 2 * target.multiprocessors >= 2**31:
        return f"stream_k is True: the sum has {steps} steps of {c.block_k}, too many to count"
    t = _tiling(c, True, True, p.gated, "", target.shared_memory)
    most = 160 if c.num_warps < 12 and not p.gated and c.split_k == 1 else 128
    if t.thread_sums > most:
        return f"the tile has {t.thread_sums} sums for each thread of {warps} warps, expected at most {most}"
    if c.pingpong and c.num_stages <= t.chunks:  # one consumer holds the slots of its residual while the other runs
        return f"num_stages is {c.num_stages}: expected more than {t.chunks} with pingpong"
    shared = t.shared_memory
    if shared > target.shared_memory:
        return f"num_stages is {c.num_stages}: {shared} bytes of tiles, expected at most {target.shared_memory}"
    return None


@functools.cache
def _layout(rows: int, cols: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([rows, cols], _DTYPES[dtype])


def _described(t: Tensor, block: list[int]) -> TensorDescriptor:
    """t, whose last dimension is contiguous, as the accelerator has to know it. Outside of it, it reads zeros."""
    n_rows, n_cols = t.shape
    stride = t.stride(0) if n_rows > 1 else library.cdiv(n_cols, 8) * 8  # of a single row it may be anything
    return TensorDescriptor(t, [n_rows, n_cols], [stride, 1], block, _layout(block[0], block[1], t.dtype))


def _is_describable(t: Tensor) -> bool:
    return t.stride(1) == 1 and t.stride(0) > 0 and (t.data_ptr() | t.stride(0) * t.element_size()) % 16 == 0


def _along_k(t: Tensor) -> bool:
    return t.stride(1) == 1 or t.shape[1] == 1


@functools.cache
def _plan(
    t: Tiling, dtype: torch.dtype, bias_dtype: torch.dtype | None, has_residual: bool
) -> launching.KernelLauncher:
    return launching.KernelLauncher(product, {"T": t}, num_warps=4, maxnreg=_REGISTERS[t.consumers])


def launch(
    x: Tensor,
    w: Tensor,
    out: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    gated: bool,
    precision: str,
    c: MatmulConfig,
) -> None:
    """Launch it: x (M, K), w (N, K) or (2N, K), out (M, N). A residual whose rows are not aligned is copied."""
    if isinstance(x, FunctionalTensor):
        raise launching.Untraceable("descriptors of tensors")
    target = runtime.target(x.device)
    x_k, w_k = _along_k(x), _along_k(w)
    t = _tiling(c, x_k, w_k, gated, activation, target.shared_memory)
    tiles = library.cdiv(out.shape[0], t.tile_rows) * library.cdiv(out.shape[1], t.cols)
    if residual is not None and not _is_describable(residual):
        residual = residual.clone(memory_format=torch.contiguous_format)
    units = tiles * c.split_k * (library.cdiv(x.shape[1], t.block_k) if t.stream else 1)
    programs = min(target.multiprocessors, units)
    partial = counters = None
    if t.partial:
        kept = 2 * programs if t.stream else units
        size = kept * t.tile_rows * t.cols * t.halves
        partial = torch.empty(size, dtype=torch.float32, device=x.device)
        counters = launching.counters(tiles * t.sharing, x.device)
    args = (
        _described(x if x_k else x.T, t.x_block),
        _described(w if w_k else w.T, t.w_block),
        _described(out, t.out_block),
        None if residual is None else _described(residual, t.out_block),
        bias,
        partial,
        counters,
        t,
    )
    plan = _plan(t, x.dtype, None if bias is None else bias.dtype, residual is not None)
    device = x.get_device()
    compiled = plan.compiled.get(device)
    if compiled is not None:
        launching._start(compiled, programs, device, args)
        return
    compiled = product[(programs,)](*args, **plan.options)
    if runtime.MODE is runtime.Mode.GPU:
        plan.compiled[device] = compiled
