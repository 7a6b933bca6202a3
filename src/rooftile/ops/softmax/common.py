"""What the forward and the backward kernels share: which columns a row keeps, how a mask is walked, the checks."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from rooftile import launching, library, runtime  # before Triton: runtime fixes the mode of the process

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def inside(cols, n_cols, EVEN: tl.constexpr):
    """Which columns are the row's: all of them, where blocks fill it evenly."""
    if EVEN:
        mask = tl.full(cols.shape, True, tl.int1)
    else:
        mask = cols < n_cols
    return mask


@triton.jit
def kept_columns(row, seq_len, n_cols):
    """How many columns a causal row keeps, from the first on: the last row of a sequence keeps them all."""
    return tl.maximum(row % seq_len + (n_cols - seq_len + 1), 0)


@triton.jit
def read_columns(kept):
    """What is read so that these are: to the end of a vector, else each element would be loaded by itself."""
    return tl.cdiv(kept, 16) * 16


@triton.jit
def narrowed(row, n_rows):
    """`row` in as many bits as the number of rows needs: a remainder in 64 takes several times as long as in 32.

    Where a compiler traces the launch, `n_rows` is a plain number, which has no dtype of its own.
    """
    return row.to((tl.zeros((), tl.int32) + n_rows).dtype)


@triton.jit
def mask_row(row, n_b, n_c, stride_ma, stride_mb, stride_mc):
    """Where the mask of a row begins: rows are walked as (A, B, C), see `mask_layout`."""
    a = (row // n_c // n_b).to(tl.int64)
    b = (row // n_c % n_b).to(tl.int64)
    c = (row % n_c).to(tl.int64)
    return a * stride_ma + b * stride_mb + c * stride_mc


@dataclasses.dataclass(frozen=True, eq=False)  # a key of caches on every call: by identity
class Config:
    """Which kernel; columns of a block; warps; rows that a program of the tile kernel holds.

    `held` is how many blocks of its row a program of the loop kernel holds in registers. The rest is of the split
    kernels: `per_multiprocessor` is how many programs a multiprocessor runs at once, `max_registers` what a thread may
    have for that many to fit, `stages` how deep the loop over rows is pipelined.
    """

    kernel: str
    block_n: int
    num_warps: int
    rows: int = 1
    per_multiprocessor: int = 0
    max_registers: int | None = None
    stages: int = 1
    held: int = 0


def split_config(n_cols: int, itemsize: int, target: runtime.Target) -> Config | None:
    """Programs that share a row and fit the GPU all at once; None where a row is too long for that."""
    registers = target.warp_size == 32  # AMD's compiler takes no such limit
    if n_cols * itemsize <= 131072:
        c = Config("split", 4096 // itemsize, 4, 1, 8, 64 if registers else None, stages=2)
    else:
        c = Config("split", 8192 // itemsize, 4, 1, 4, 128 if registers else None, stages=2)
    return c if n_cols <= c.block_n * target.multiprocessors * c.per_multiprocessor else None


def row_length(x: Tensor) -> int:
    """The length of a row, by which its kernel is chosen. Where it is yet unknown, the op is left to choose each time.

    A graph with the launch in it would be for this one length.
    """
    n_cols = x.shape[-1]
    if isinstance(n_cols, torch.SymInt):
        raise launching.Untraceable("rows of a symbolic length")
    return n_cols


def as_float32(scale: float) -> tuple[float, float]:
    """The scale, and its magnitude times log2(e): 0 and 0 where the latter is no normal number of float32.

    It would be 0 on the device, and 0 times the -inf of what is not kept is NaN.
    """
    factor = abs(scale) * math.log2(math.e)
    return (scale, factor) if factor >= 2.0**-126 else (0.0, 0.0)


def unrolled(n_cols: int, c: Config, causal: bool) -> int:
    """How many blocks the loop kernel reads, where all rows have as many, and few; else 0, and its loop stays one."""
    chunks = library.cdiv(n_cols, c.block_n)
    return chunks if chunks <= 8 and not causal and not c.held else 0


def mask_layout(mask: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, tuple[int, int], tuple[int, int, int, int]]:
    """The mask of an x of that shape, seen as (A, B, C, N): a mask, the sizes B and C, and the four strides.

    Dimensions that the mask is broadcast over have a stride of 0. It is copied only where the leading dimensions can't
    be taken as three or fewer.
    """
    strides = [0] * (len(shape) - mask.dim())
    strides += [0 if n == 1 else stride for n, stride in zip(mask.shape, mask.stride(), strict=True)]
    dims: list[tuple[int, int]] = []
    for n, stride in zip(shape[:-1], strides[:-1], strict=True):
        if n == 1:
            continue
        if dims and dims[-1][1] == n * stride:
            dims[-1] = (dims[-1][0] * n, stride)
        else:
            dims.append((n, stride))
    if len(dims) > 3:
        return mask_layout(mask.expand(shape).contiguous(), shape)
    (_, a), (n_b, b), (n_c, c) = [(1, 0)] * (3 - len(dims)) + dims
    return mask, (n_b, n_c), (a, b, c, strides[-1])


def check(op: str, name: str, x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> None:
    """`name` is what the op calls x."""
    library.check_floating(op, **{name: x})
    if not isinstance(scale, (float, int)):
        raise TypeError(f"{op}: scale is a {type(scale).__name__}, expected a number")
    if not abs(scale) < 2.0**127:
        raise ValueError(f"{op}: scale is {scale}, expected a finite number below 2^127")
    if not isinstance(causal, bool):
        raise TypeError(f"{op}: causal is a {type(causal).__name__}, expected a bool")
    if x.dim() < 1 + causal:
        expected = "at least two dimensions (..., T, S), as causal is set" if causal else "at least one dimension"
        raise ValueError(f"{op}: {name} has shape {tuple(x.shape)}, expected {expected}")
    if mask is None:
        return
    if mask.dtype is not torch.bool:
        raise TypeError(f"{op}: mask has dtype {mask.dtype}, expected torch.bool (True keeps)")
    trailing = x.shape[x.dim() - min(mask.dim(), x.dim()) :]
    if mask.dim() > x.dim() or any(m not in (1, n) for m, n in zip(mask.shape, trailing, strict=True)):
        raise ValueError(
            f"{op}: mask has shape {tuple(mask.shape)}, expected one that broadcasts to {tuple(x.shape)}, x's shape"
        )
