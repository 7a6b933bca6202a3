"""fp8_linear on Hopper with its sums in float32: warpgroups that take turns to multiply and to add.

The kernel is in `promoted_kernel.py`; here is what it is compiled for, what it takes, and how it is launched. It is
`MatmulConfig`'s kernel `"hopper"` with `pingpong`. num_warps are the warps that multiply; one more copies.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor

from rooftile import launching, library, runtime  # before Triton: runtime fixes the mode of the process
from rooftile.ops.gemm import fp8_common as common
from rooftile.ops.gemm.config import MatmulConfig, Operands, Problem
from rooftile.ops.gemm.fp8_common import WScale, XScale
from rooftile.ops.gemm.fp8_promoted_kernel import promoted
from rooftile.quantize import BLOCK

import triton.experimental.gluon.language as gl  # isort: skip
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor  # isort: skip

_DTYPES = {
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float32: gl.float32,
}
# What a kernel of 12 or 16 warps is compiled for; the warps that multiply then take what the one that copies leaves.
_REGISTERS = {2: 168, 3: 128}
_BARRIERS = 512  # bytes of shared memory, at most, for barriers, what warps hand each other, and alignment
Order = Literal["", "turns", "late"]
_ORDER: Order = ""
_ROWS = 64  # of x, for each four warps


@dataclasses.dataclass(frozen=True)
class Tiling:
    """All that the kernel is compiled for but the dtypes: one constant of it.

    Args:
        cols: columns of the output in a tile.
        chunk: columns that are written at a time, 128 bytes of each row.
        out_buffers: chunks of one consumer that are being written at the same time.
        order: how consumers keep apart, see the kernel.
    """

    cols: int
    chunk: int
    consumers: int
    stages: int
    out_buffers: int
    group_m: int
    x_scale: XScale
    w_scale: WScale
    order: Order
    rows: int = _ROWS
    block_k: int = BLOCK

    @property
    def tile_rows(self) -> int:
        return self.rows * self.consumers

    @property
    def half(self) -> int:
        """Columns of a partial sum."""
        return min(self.cols, BLOCK)

    @property
    def halves(self) -> int:
        return self.cols // self.half

    @property
    def x_ring(self) -> list[int]:
        return [self.stages * self.consumers, self.rows, self.block_k]

    @property
    def w_ring(self) -> list[int]:
        return [self.stages * self.halves, self.half, self.block_k]

    @property
    def out_ring(self) -> list[int]:
        return [self.consumers * self.out_buffers, self.rows, self.chunk]

    @property
    def acc(self) -> gl.NVMMADistributedLayout:
        """Half of a consumer's sum in its registers."""
        return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, self.half, 32])

    @property
    def part(self) -> gl.NVMMADistributedLayout:
        """A chunk of it."""
        return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, self.chunk, 32])

    def shared_memory(self, out_size: int) -> int:
        """Bytes, or a few more."""
        ring = self.stages * (self.tile_rows + self.cols) * self.block_k
        return ring + self.consumers * self.out_buffers * self.rows * self.chunk * out_size + _BARRIERS


@functools.cache
def _tiling(c: MatmulConfig, x_scale: XScale, w_scale: WScale, out_size: int, order: Order, limit: int) -> Tiling:
    """What the kernel is compiled for. The output is written by two chunks at once if both fit."""
    chunk = min(128 // out_size, c.block_n, BLOCK)

    def tiling(out_buffers: int) -> Tiling:
        return Tiling(c.block_n, chunk, c.num_warps // 4, c.num_stages, out_buffers, c.group_m, x_scale, w_scale, order)

    return tiling(2) if tiling(2).shared_memory(out_size) <= limit else tiling(1)


def can_implement(p: Problem, c: MatmulConfig, target: runtime.Target) -> str | None:
    """Why this kernel can't do it, or None."""
    if target.arch != "sm_90":
        return f"kernel 'hopper' with pingpong is for sm_90, and the device is {target.arch}"
    if not p.aligned or p.k % 16 or p.n * p.out_size % 16:
        return "rows of x, of the weight or of the result are not contiguous and at multiples of 16 bytes"
    if max(p.m, p.n, p.k) >= 2**31:
        return f"kernel 'hopper' takes sizes below 2^31, not {p.m}, {p.n}, {p.k}"
    if c.num_warps not in (8, 12) or c.block_m != _ROWS * (c.num_warps // 4):
        return f"block_m is {c.block_m} and num_warps {c.num_warps}, expected 8 and {_ROWS} rows for each 4 of them"
    if c.block_k != BLOCK or c.split_k != 1:
        return f"block_k is {c.block_k} and split_k {c.split_k}, expected {BLOCK} and 1 with pingpong"
    # 64 columns gave wrong sums on an H200, and others on a second run.
    if c.block_n not in (128, 256) or c.block_n * (c.num_warps // 4) > 512:
        return f"block_n is {c.block_n}, expected 128 or 256, and with 12 warps 128"
    shared = _tiling(c, "row", "row", p.out_size, _ORDER, target.shared_memory).shared_memory(p.out_size)
    if shared > target.shared_memory:
        return f"num_stages is {c.num_stages}: {shared} bytes of tiles, expected at most {target.shared_memory}"
    return None


@functools.cache
def _layout(rows: int, cols: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([rows, cols], _DTYPES[dtype])


def _described(t: Tensor, block: list[int]) -> TensorDescriptor:
    """t as the accelerator has to know it. Outside of it, it reads zeros, and writes nothing."""
    return TensorDescriptor(t, list(t.shape), [t.stride(0), 1], block, _layout(block[0], block[1], t.dtype))


@functools.cache
def _plan(
    t: Tiling, out_dtype: torch.dtype, bias_dtype: torch.dtype | None, residual: bool
) -> launching.KernelLauncher:
    return launching.KernelLauncher(promoted, {"T": t}, num_warps=4, maxnreg=_REGISTERS[t.consumers])


def launch(o: Operands, c: MatmulConfig, order: Order = _ORDER) -> None:
    if isinstance(o.x, FunctionalTensor):
        raise launching.Untraceable("descriptors of tensors")
    target = runtime.target(o.x.device)
    t = _tiling(c, o.x_kind, o.w_kind, o.out.element_size(), order, target.shared_memory)
    tiles = library.cdiv(o.out.shape[0], t.tile_rows) * library.cdiv(o.out.shape[1], t.cols)
    programs = min(target.multiprocessors, tiles)
    assert o.x_scale is not None
    assert o.weight_scale is not None
    if o.w_kind == "row" and o.weight_scale.stride(0) != 1:
        o.weight_scale = o.weight_scale.contiguous()
    if max(common.scale_strides(o)) >= 2**31:  # of a view into something huge
        o.x_scale, o.weight_scale = o.x_scale.contiguous(), o.weight_scale.contiguous()
    args = (
        _described(o.x, t.x_ring[1:]),
        _described(o.w, t.w_ring[1:]),
        _described(o.out, t.out_ring[1:]),
        o.x_scale,
        o.weight_scale,
        o.bias,
        o.residual,
        *common.scale_strides(o),
        t,
    )
    plan = _plan(t, o.out.dtype, None if o.bias is None else o.bias.dtype, o.residual is not None)
    device = o.x.get_device()
    # What Triton compiles for, of what is left: whether these are aligned.
    key = (device, *(0 if t is None else t.data_ptr() % 16 for t in (o.weight_scale, o.bias, o.residual)))
    compiled = plan.compiled.get(key)
    if compiled is not None:
        launching._start(compiled, programs, device, args)
        return
    compiled = promoted[(programs,)](*args, **plan.options)
    if runtime.MODE is runtime.Mode.GPU:
        plan.compiled[key] = compiled
