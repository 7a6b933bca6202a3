"""Rows of an embedding table: y = scale * weight[ids], scaled in float32 and rounded once.

Bytes: the ids and the selected rows are read, and all outputs are written. Several programs copy one row, a block of
columns each, so that at one token a row of 8 KB is spread over several SMs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from rooftile import launching, library, runtime  # before Triton: runtime fixes the mode of the process
from rooftile.primitives import pdl
from rooftile.primitives.pdl import pdl_launch_dependents, pdl_wait
from rooftile.primitives.tiles import tile_of, tiles

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit(do_not_specialize=["n_tokens", "n_rows"])
def _embedding_kernel(
    ids_ptr,
    weight_ptr,
    y_ptr,
    stride_i,
    stride_wv,
    stride_wn,
    n_tokens,
    n_rows,
    N: tl.constexpr,
    SCALE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        pdl_launch_dependents()
        pdl_wait()
    tokens, _, cols = tile_of(tl.program_id(0), N, ROWS, BLOCK_N)
    mask = (tokens < n_tokens) & (cols < N)

    ids = tl.load(ids_ptr + tokens * stride_i, mask=tokens < n_tokens, other=-1).to(tl.int64)
    known = (ids >= 0) & (ids < n_rows)
    row_ptrs = weight_ptr + ids * stride_wv + cols.to(tl.int64) * stride_wn
    y = tl.load(row_ptrs, mask=mask & known, other=float("nan"))

    if SCALE != 1.0:
        y = (y.to(tl.float32) * SCALE).to(y_ptr.dtype.element_ty)

    tl.store(y_ptr + tokens * N + cols, y, mask=mask)


@dataclasses.dataclass(frozen=True, eq=False)  # a cache key on every call: hashed by identity
class EmbeddingConfig:
    """Tokens and columns of a program, and its warps."""

    rows: int
    block_n: int
    num_warps: int


@functools.cache
def config(n_cols: int, target: runtime.Target) -> EmbeddingConfig:
    """16 elements a thread, two 16-byte loads in 16 bits. A program takes several short rows."""
    whole = library.power_of_two(n_cols)
    if target is runtime.INTERPRETER:
        return EmbeddingConfig(16, min(4096, whole), num_warps=4)
    block_n = min(2048, whole)
    return EmbeddingConfig(max(1, 512 // block_n), block_n, max(1, block_n // (16 * target.warp_size)))


@functools.cache
def _launcher(
    n_cols: int, dtypes: tuple[torch.dtype, torch.dtype], scale: float, early: bool, c: EmbeddingConfig
) -> launching.KernelLauncher:
    constants = {"N": n_cols, "SCALE": scale, "ROWS": c.rows, "BLOCK_N": c.block_n, "EARLY": early}
    return launching.KernelLauncher(_embedding_kernel, constants, num_warps=c.num_warps, **pdl.options(early))


def _output(ids: Tensor, weight: Tensor, scale: float) -> Tensor:
    """Memory for the result, after all checks."""
    if ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"embedding: ids has dtype {ids.dtype}, expected int32 or int64")
    library.check_floating("embedding", weight=weight)
    if weight.dim() != 2:
        raise ValueError(f"embedding: weight has shape {tuple(weight.shape)}, expected two dimensions (V, H)")
    library.check_numbers("embedding", scale=scale)
    if not math.isfinite(scale):
        raise ValueError(f"embedding: scale is {scale}, expected a finite number")
    return torch.empty((*ids.shape, weight.shape[1]), dtype=weight.dtype, device=weight.device)


def _check_values(ids: Tensor, n_rows: int) -> None:
    """Raise ValueError for ids outside the table, if they are on the CPU."""
    if ids.device.type == "cpu" and ids.numel():
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= n_rows:
            worst = low if low < 0 else high
            raise ValueError(f"embedding: ids holds {worst}, expected 0 to {n_rows - 1}, the rows of weight")


def _prepare(ids: Tensor, weight: Tensor, scale: float) -> Callable[..., Tensor]:
    shape = _output(ids, weight, scale).shape
    _check_values(ids, weight.shape[0])
    strides, dtype, device = library.contiguous_strides(shape), weight.dtype, weight.device
    start = library.start_nothing
    if ids.numel() and weight.shape[1]:
        flat = ids.reshape(-1)
        n_tokens, n_cols = flat.shape[0], int(weight.shape[1])
        c = config(n_cols, runtime.target(device))
        start = launching.bind(
            _launcher(n_cols, (ids.dtype, dtype), float(scale), pdl.early(ids), c),
            tiles(n_tokens, n_cols, c.rows, c.block_n),
            strides=(flat.stride(0), *weight.stride()),
            numbers=(n_tokens, weight.shape[0]),
        )
        if ids.dim() != 1 and not ids.is_contiguous():
            start = library.copying(start, {0: lambda ids: ids.reshape(-1)})

    def run(ids: Tensor, weight: Tensor, _: float) -> Tensor:
        y = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        start(ids, weight, y)
        return y

    return run


_op = library.define(
    "embedding(Tensor ids, Tensor weight, float scale) -> Tensor",
    prepare=_prepare,
    fake=_output,
)


def embedding(ids: Tensor, weight: Tensor, *, scale: float = 1.0) -> Tensor:
    """`scale * weight[ids]`: rows of an embedding table, for inference.

    Args:
        ids: any shape, int32 or int64, any strides.
        weight: `(V, H)`, float32, float16 or bfloat16, any strides.
        scale: multiplies the rows in float32, before the one rounding; compiled into the kernel.

    Returns:
        `(*ids.shape, H)` of weight's dtype, contiguous. An id on the device that is outside the table gives a row of
        NaN; nothing outside the table is read. Ids on the CPU are checked and copied to weight's device, which a CUDA
        graph cannot capture.

    Raises:
        ValueError: ids on the CPU are outside the table; weight has not two dimensions, or requires grad (to train, use
            `torch.nn.functional.embedding`); the scale is not finite; devices differ or are the CPU without the
            interpreter.
        TypeError: a dtype is not one of those named.
    """
    library.check_tensors("embedding", ids=ids, weight=weight)
    if ids.device.type == "cpu" and weight.device.type == "cuda":
        if not torch.compiler.is_compiling() and ids.dtype in (torch.int32, torch.int64) and weight.dim() == 2:
            _check_values(ids, weight.shape[0])
        ids = ids.to(weight.device)
    return _op(ids, weight, scale)
