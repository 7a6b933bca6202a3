"""silu_mul with a quantised result, for the matrix product that follows: gate and up are read, and a byte written.

Two kernels: a tile, of whole rows where a row has a scale of its own, else of any part of them; and for rows too long
for registers a loop that computes the row twice, the second time out of the L2, once its scale is known.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor

from rooftile import launching, library, runtime  # before Triton: runtime fixes the mode of the process
from rooftile.primitives import quantize
from rooftile.primitives.activations import silu
from rooftile.primitives.quantize import divide, magnitude, rounded, scale_of
from rooftile.quantize import Quantize

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit(do_not_specialize=["n_rows"])
def _tile_kernel(
    gate_ptr,
    up_ptr,
    y_ptr,
    scale_ptr,
    stride_gm,
    stride_um,
    n_rows,
    N: tl.constexpr,
    FORMAT: tl.constexpr,
    SPAN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    BLOCKS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    rows = ((tl.program_id(0) // BLOCKS).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    first = (tl.program_id(0) % BLOCKS) * BLOCK_N
    cols = first + tl.arange(0, BLOCK_N)[None, :]
    mask = (rows < n_rows) & (cols < N)

    gate = tl.load(gate_ptr + rows * stride_gm + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + rows * stride_um + cols, mask=mask, other=0.0).to(tl.float32)

    y = divide(silu(gate) * up, scale_ptr, rows, rows < n_rows, first, None, N, SPAN, FORMAT)

    tl.store(y_ptr + rows * N + cols, rounded(y, FORMAT, SPAN > 0, y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _part(gate_ptr, up_ptr, cols, N: tl.constexpr, EVICTION: tl.constexpr):
    """Those columns of a row's float32 result."""
    gate = tl.load(gate_ptr + cols, mask=cols < N, other=0.0, eviction_policy=EVICTION).to(tl.float32)
    up = tl.load(up_ptr + cols, mask=cols < N, other=0.0, eviction_policy=EVICTION).to(tl.float32)
    return silu(gate) * up


@triton.jit
def _loop_kernel(
    gate_ptr,
    up_ptr,
    y_ptr,
    scale_ptr,
    stride_gm,
    stride_um,
    N: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    gate_ptr += row * stride_gm
    up_ptr += row * stride_um
    block = tl.arange(0, BLOCK_N)

    most = tl.zeros((BLOCK_N,), tl.int32)
    for start in tl.range(0, N, BLOCK_N, num_stages=1):
        most = tl.maximum(most, magnitude(_part(gate_ptr, up_ptr, start + block, N, "evict_last")))
    scale = scale_of(tl.max(most, axis=0), FORMAT)
    tl.store(scale_ptr + row, scale)

    inverse = 1.0 / scale
    for start in tl.range(0, N, BLOCK_N, num_stages=1):
        cols = start + block
        y = _part(gate_ptr, up_ptr, cols, N, "evict_first") * inverse
        tl.store(y_ptr + row * N + cols, rounded(y, FORMAT, True, y_ptr.dtype.element_ty), mask=cols < N)


@dataclasses.dataclass(frozen=True, eq=False)  # a key of caches on every call: by identity
class Config:
    """Which kernel; columns of a block; warps; rows that a program of the tile kernel holds."""

    kernel: str
    block_n: int
    num_warps: int
    rows: int = 1


@functools.cache
def config(n_cols: int, itemsize: int, span: int, target: runtime.Target) -> Config:
    """On an H200 (bf16) 1.01 to 1.04 of a copy's speed at 8192 x 14336 with each kind of scale: the whole row in a tile
    where it has a scale of its own, tiles as the unquantised forward's otherwise. The loop has 0.71, at 8192 x 18944.
    """
    whole = max(library.power_of_two(n_cols), span)
    if target is runtime.INTERPRETER:
        return Config("tile", max(min(4096, whole), span), num_warps=4, rows=16)
    if span * itemsize > 32768:
        return Config("loop", 4096, num_warps=16 * 32 // target.warp_size)
    block_n = max(min(2048, whole), span)
    return Config("tile", block_n, min(32, max(8, block_n // 512)) * 32 // target.warp_size, max(1, 2048 // block_n))


@functools.cache
def _plan(n_cols: int, input_dtype: torch.dtype, dtype: str, span: int, c: Config) -> launching.KernelLauncher:
    constants = {"N": n_cols, "FORMAT": dtype}
    if c.kernel == "loop":
        return launching.KernelLauncher(_loop_kernel, {**constants, "BLOCK_N": c.block_n}, num_warps=c.num_warps)
    tile = {"SPAN": span, "ROWS": c.rows, "BLOCK_N": c.block_n}
    return launching.KernelLauncher(_tile_kernel, {**constants, **tile}, num_warps=c.num_warps)


def _fake(
    gate: Tensor, up: Tensor, scale: Tensor | None, dtype: str, per: str, group_size: int
) -> tuple[Tensor, Tensor]:
    library.check_floating("silu_mul_quantized", gate=gate)
    if gate.dim() == 0:
        raise ValueError("silu_mul_quantized: gate has shape (), expected at least one dimension")
    library.check_same("silu_mul_quantized", "up", up, "gate", gate)
    return quantize.empty(gate, dtype, per, group_size)


def _launch(
    gate: Tensor, up: Tensor, scale: Tensor | None, dtype: str, per: str, group_size: int
) -> tuple[Tensor, Tensor]:
    y, scales = _fake(gate, up, scale, dtype, per, group_size)
    if y.numel() == 0:
        return y, scales.fill_(2.0**-126)  # rows of no elements have a scale all the same
    gate, up = library.as_rows(gate), library.as_rows(up)
    n_rows, n_cols = gate.shape[0], int(gate.shape[1])
    span = quantize.span(n_cols, per, group_size)
    c = config(n_cols, gate.element_size(), span, runtime.target(gate.device))
    plan = _plan(n_cols, gate.dtype, dtype, span, c)
    tensors = (gate, up, quantize.writable(y), scales if scale is None else scale)
    strides = (gate.stride(0), up.stride(0))
    if c.kernel == "loop":
        launching.launch(plan, n_rows, tensors, strides)
    else:
        programs = library.cdiv(n_rows, c.rows) * library.cdiv(n_cols, c.block_n)
        launching.launch(plan, programs, tensors, strides, (n_rows,))
    return y, scales


_SCHEMA = (
    "silu_mul_quantized(Tensor gate, Tensor up, Tensor? scale, str dtype, str per, int group_size) -> (Tensor, Tensor)"
)
_op = library.define(_SCHEMA, launch=_launch, fake=_fake, autograd=quantize.refuse_gradients(_SCHEMA))


def silu_mul(gate: Tensor, up: Tensor, q: Quantize) -> tuple[Tensor, Tensor]:
    y, scales = _op(gate, up, q.scale, q.dtype_name, q.per, q.group_size)
    return y, scales if q.scale is None else q.scale
