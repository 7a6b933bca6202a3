"""Rows of an embedding table: y = scale * weight[ids], scaled in float32 and rounded once.

Bytes: the ids and the selected rows are read, and all outputs are written. Several programs copy one row, a block of
columns each, so that at one token a row of 8 KB is spread over several SMs.

The gradient of the table, with the ids sorted so that equal ids are adjacent (stable, so the order is always the same):

    dweight[v] = scale * sum of dy[t] over the tokens t with ids[t] = v; 0 for a row that no token names

Bytes: dy is read, and each row of dweight is written once. One launch does both: one program for each place in the
sorted ids sums the run of equal ids that starts there, and further programs write the zeros. Programs at other places
return at once, so the grid depends on shapes alone. A run is split every `PIECE` places: half of a batch may be one
padding id. The float32 sums of the pieces of such a run are added by a second kernel, in order.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rooftile import launching, library, runtime  # before Triton: runtime fixes the mode of the process
from rooftile.primitives import pdl
from rooftile.primitives.pdl import pdl_launch_dependents, pdl_wait
from rooftile.primitives.rows import row_length
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


@triton.jit
def _count_below(sorted_ptr, values, n_tokens, n_bits):
    """How many of the sorted ids are less than each value. `n_tokens` is below 2^n_bits."""
    count = tl.zeros_like(values)
    for bit in tl.range(0, n_bits, num_stages=1):
        more = count + (1 << (n_bits - 1 - bit))
        inside = more <= n_tokens
        below = tl.load(sorted_ptr + more - 1, mask=inside, other=0) < values
        count = tl.where(inside & below, more, count)
    return count


@triton.jit(do_not_specialize=["n_tokens", "n_bits", "n_rows", "padding"])
def _dweight_kernel(
    dy_ptr,
    sorted_ptr,
    order_ptr,
    dweight_ptr,
    partial_ptr,
    stride_dym,
    n_tokens,
    n_bits,
    n_rows,
    padding,
    N: tl.constexpr,
    SCALE: tl.constexpr,
    TOKENS: tl.constexpr,
    PIECE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The first programs sum pieces of runs, one place of the sorted ids and one block of columns each. Others write
    zeros to the rows of dweight that no token names."""
    BLOCKS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    block = tl.program_id(0) % BLOCKS
    cols = (block * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    place = tl.program_id(0) // BLOCKS
    if place >= n_tokens:
        rows = (place - n_tokens).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        first = _count_below(sorted_ptr, rows, n_tokens, n_bits)
        named = tl.load(sorted_ptr + first, mask=first < n_tokens, other=-1) == rows
        zero = ((rows < n_rows) & (~named | (rows == padding)))[:, None]
        zeros = tl.zeros((ROWS, BLOCK_N), dweight_ptr.dtype.element_ty)
        tl.store(dweight_ptr + rows[:, None] * N + cols, zeros, mask=zero & (cols < N))
        return

    row = tl.load(sorted_ptr + place).to(tl.int64)
    starts = row != tl.load(sorted_ptr + place - 1, mask=place > 0, other=-1)
    wanted = (row >= 0) & (row < n_rows) & (row != padding)
    if wanted & (starts | (place % PIECE == 0)):
        limit = tl.minimum((place // PIECE + 1) * PIECE, n_tokens)
        places = place + tl.arange(0, PIECE)
        same = tl.load(sorted_ptr + places, mask=places < limit, other=-1) == row
        end = place + tl.sum(same.to(tl.int32), axis=0)

        acc = tl.zeros((TOKENS, BLOCK_N), tl.float32)
        for start in tl.range(place, end, TOKENS, num_stages=1):
            at = (start + tl.arange(0, TOKENS))[:, None]
            tokens = tl.load(order_ptr + at, mask=at < end, other=0)
            dy = tl.load(dy_ptr + tokens * stride_dym + cols, mask=(at < end) & (cols < N), other=0.0)
            acc += dy.to(tl.float32)
        total = tl.sum(acc, axis=0, keep_dims=True)

        goes_on = (end == limit) & (tl.load(sorted_ptr + end, mask=end < n_tokens, other=-1) == row)
        if starts & ~goes_on:
            dweight = (total * SCALE).to(dweight_ptr.dtype.element_ty)
            tl.store(dweight_ptr + row * N + cols, dweight, mask=cols < N)
        else:
            # Of the pieces of split runs, one may start at the chunk's first place, and one inside the chunk.
            slot = (place // PIECE * 2 + (place % PIECE != 0)).to(tl.int64)
            tl.store(partial_ptr + slot * N + cols, total, mask=cols < N)


@triton.jit(do_not_specialize=["n_tokens", "n_rows", "padding"])
def _add_pieces_kernel(
    partial_ptr,
    sorted_ptr,
    dweight_ptr,
    n_tokens,
    n_rows,
    padding,
    N: tl.constexpr,
    SCALE: tl.constexpr,
    TOKENS: tl.constexpr,
    PIECE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """A program for each boundary of chunks of `PIECE` places and each block of columns. It adds the pieces of the run
    that crosses the boundary, if that run started in the chunk before it."""
    BLOCKS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    chunk = tl.program_id(0) // BLOCKS
    cols = ((tl.program_id(0) % BLOCKS) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    n_chunks = (n_tokens + PIECE - 1) // PIECE
    first = chunk * PIECE
    row = tl.load(sorted_ptr + first + PIECE - 1).to(tl.int64)
    crosses = tl.load(sorted_ptr + first + PIECE) == row
    inside = tl.load(sorted_ptr + first) != row
    starts = inside | (tl.load(sorted_ptr + first - 1, mask=first > 0, other=-1) != row)
    wanted = (row >= 0) & (row < n_rows) & (row != padding)
    if wanted & crosses & starts:
        slot = (chunk * 2 + inside).to(tl.int64)
        total = tl.load(partial_ptr + slot * N + cols, mask=cols < N, other=0.0)
        acc = tl.zeros((TOKENS, BLOCK_N), tl.float32)
        chunk += 1
        while tl.load(sorted_ptr + chunk * PIECE, mask=chunk < n_chunks, other=-1) == row:
            chunks = (chunk + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
            same = tl.load(sorted_ptr + chunks * PIECE, mask=chunks < n_chunks, other=-1) == row
            acc += tl.load(partial_ptr + chunks * 2 * N + cols, mask=same & (cols < N), other=0.0)
            chunk += TOKENS
        total += tl.sum(acc, axis=0, keep_dims=True)
        tl.store(dweight_ptr + row * N + cols, (total * SCALE).to(dweight_ptr.dtype.element_ty), mask=cols < N)


@dataclasses.dataclass(frozen=True, eq=False)  # a cache key on every call: hashed by identity
class EmbeddingConfig:
    """Tokens and columns of a program, and its warps."""

    rows: int
    block_n: int
    num_warps: int


@dataclasses.dataclass(frozen=True, eq=False)
class DweightConfig:
    """Tokens of a step of a sum, the most tokens of one program, rows of zeros of a program, columns and warps."""

    tokens: int
    piece: int
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
def dweight_config(n_cols: int, target: runtime.Target) -> DweightConfig:
    """Not measured. A run is short in text: most of a step's four tokens are of one run or none."""
    whole = library.power_of_two(n_cols)
    if target is runtime.INTERPRETER:
        return DweightConfig(tokens=4, piece=8, rows=16, block_n=min(4096, whole), num_warps=4)
    block_n = min(2048, whole)
    warps = max(1, block_n // (16 * target.warp_size))
    return DweightConfig(tokens=4, piece=64, rows=8, block_n=block_n, num_warps=warps)


@functools.cache
def _launcher(
    n_cols: int, dtypes: tuple[torch.dtype, torch.dtype], scale: float, early: bool, c: EmbeddingConfig
) -> launching.KernelLauncher:
    constants = {"N": n_cols, "SCALE": scale, "ROWS": c.rows, "BLOCK_N": c.block_n, "EARLY": early}
    return launching.KernelLauncher(_embedding_kernel, constants, num_warps=c.num_warps, **pdl.options(early))


@functools.cache
def _dweight_launchers(
    n_cols: int, dtypes: tuple[torch.dtype, torch.dtype], scale: float, c: DweightConfig
) -> tuple[launching.KernelLauncher, launching.KernelLauncher]:
    constants = {"N": n_cols, "SCALE": scale, "TOKENS": c.tokens, "PIECE": c.piece, "BLOCK_N": c.block_n}
    both = {"N": n_cols, "SCALE": scale, "TOKENS": c.tokens, "PIECE": c.piece, "ROWS": c.rows, "BLOCK_N": c.block_n}
    return (
        launching.KernelLauncher(_dweight_kernel, both, num_warps=c.num_warps),
        launching.KernelLauncher(_add_pieces_kernel, constants, num_warps=c.num_warps),
    )


def _output(ids: Tensor, weight: Tensor, scale: float, padding_idx: int | None) -> Tensor:
    """Memory for the result, after all checks."""
    if ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"embedding: ids has dtype {ids.dtype}, expected int32 or int64")
    library.check_floating("embedding", weight=weight)
    if weight.dim() != 2:
        raise ValueError(f"embedding: weight has shape {tuple(weight.shape)}, expected two dimensions (V, H)")
    library.check_numbers("embedding", scale=scale)
    if not math.isfinite(scale):
        raise ValueError(f"embedding: scale is {scale}, expected a finite number")
    if padding_idx is not None and not 0 <= padding_idx < weight.shape[0]:
        raise ValueError(
            f"embedding: padding_idx is {padding_idx}, expected None or 0 to {weight.shape[0] - 1}, a row of weight"
        )
    return torch.empty((*ids.shape, weight.shape[1]), dtype=weight.dtype, device=weight.device)


def _check_values(ids: Tensor, n_rows: int) -> None:
    """Raise ValueError for ids outside the table, if they are on the CPU."""
    if ids.device.type == "cpu" and ids.numel():
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= n_rows:
            worst = low if low < 0 else high
            raise ValueError(f"embedding: ids holds {worst}, expected 0 to {n_rows - 1}, the rows of weight")


def _prepare(ids: Tensor, weight: Tensor, scale: float, padding_idx: int | None) -> Callable[..., Tensor]:
    shape = _output(ids, weight, scale, padding_idx).shape
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

    def run(ids: Tensor, weight: Tensor, *_: Any) -> Tensor:
        y = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        start(ids, weight, y)
        return y

    return run


def _dweight(dy: Tensor, ids: Tensor, n_rows: int, scale: float, padding_idx: int | None) -> Tensor:
    """Memory for the gradient, after all checks."""
    if dy.dim() == 0 or dy.shape[:-1] != ids.shape:
        raise ValueError(
            f"embedding_backward: dy has shape {tuple(dy.shape)}, expected {library.shown((*ids.shape, 'H'))} to match "
            "ids"
        )
    library.check_floating("embedding_backward", dy=dy)
    return torch.empty((n_rows, dy.shape[-1]), dtype=dy.dtype, device=dy.device)


def _prepare_backward(
    dy: Tensor, ids: Tensor, n_rows: int, scale: float, padding_idx: int | None
) -> Callable[..., Tensor]:
    shape, dtype, device = _dweight(dy, ids, n_rows, scale, padding_idx).shape, dy.dtype, dy.device
    strides = library.contiguous_strides(shape)
    n_tokens, n_cols = ids.numel(), row_length(dy)
    if not n_tokens or not n_rows or not n_cols:
        return lambda *_: torch.empty_strided(shape, strides, dtype=dtype, device=device).zero_()

    copies: library.Copies = {}
    dy_rows = library.rows_of(dy, copies, 0)
    c = dweight_config(n_cols, runtime.target(device))
    sums, adds = _dweight_launchers(n_cols, (dtype, ids.dtype), float(scale), c)
    blocks, n_chunks = library.cdiv(n_cols, c.block_n), library.cdiv(n_tokens, c.piece)
    padding = -1 if padding_idx is None else padding_idx
    start = launching.bind(
        sums,
        (n_tokens + library.cdiv(n_rows, c.rows)) * blocks,
        strides=(dy_rows.stride(0),),
        numbers=(n_tokens, int(n_tokens).bit_length(), n_rows, padding),
    )
    start = library.copying(start, copies)
    add_pieces = library.start_nothing
    if n_chunks > 1:
        add_pieces = launching.bind(adds, (n_chunks - 1) * blocks, numbers=(n_tokens, n_rows, padding))

    def run(dy: Tensor, ids: Tensor, *_: Any) -> Tensor:
        dweight = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        partial = torch.empty_strided((2 * n_chunks, n_cols), (n_cols, 1), dtype=torch.float32, device=device)
        ordered, order = torch.sort(ids.reshape(-1), stable=True)
        start(dy, ordered, order, dweight, partial)
        add_pieces(partial, ordered, dweight)
        return dweight

    return run


_backward_op = library.define(
    "embedding_backward(Tensor dy, Tensor ids, SymInt n_rows, float scale, int? padding_idx) -> Tensor",
    prepare=_prepare_backward,
    fake=_dweight,
)


def _save(ctx, inputs, output) -> None:
    ids, weight, ctx.scale, ctx.padding_idx = inputs
    ctx.n_rows = weight.shape[0]
    ctx.save_for_backward(ids)


def _backward(ctx, dy: Tensor | None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return None, None, None, None
    return None, _backward_op(dy, *ctx.saved_tensors, ctx.n_rows, ctx.scale, ctx.padding_idx), None, None


_op = library.define(
    "embedding(Tensor ids, Tensor weight, float scale, int? padding_idx) -> Tensor",
    prepare=_prepare,
    fake=_output,
    autograd=library.Autograd(_save, _backward),
    rows=library.Rows(("ids",), lambda ids, *_: range(ids.dim())),
)


def embedding(ids: Tensor, weight: Tensor, *, scale: float = 1.0, padding_idx: int | None = None) -> Tensor:
    """`scale * weight[ids]`: rows of an embedding table.

    The gradient of row v of the table is `scale` times the sum of dy over the tokens with id v, added in float32 in a
    fixed order and rounded once. It is dense, `(V, H)`, with zeros in the rows that no token names.

    Args:
        ids: any shape, int32 or int64, any strides.
        weight: `(V, H)`, float32, float16 or bfloat16, any strides.
        scale: multiplies the rows in float32, before the one rounding; compiled into the kernel.
        padding_idx: a row, 0 to V - 1, whose gradient is zero, as of `torch.nn.functional.embedding`.

    Returns:
        `(*ids.shape, H)` of weight's dtype, contiguous. An id on the device that is outside the table gives a row of
        NaN, and its dy is in no gradient; nothing outside the table is read. Ids on the CPU are checked and copied to
        weight's device, which a CUDA graph cannot capture.

    Raises:
        ValueError: ids on the CPU are outside the table; weight has not two dimensions; the scale is not finite;
            padding_idx is outside the table; devices differ or are the CPU without the interpreter.
        TypeError: a dtype is not one of those named; padding_idx is not an int.
    """
    library.check_tensors("embedding", ids=ids, weight=weight)
    # Here: the op's schema takes True for 1.
    if isinstance(padding_idx, bool) or not (padding_idx is None or isinstance(padding_idx, int)):
        raise TypeError(f"embedding: padding_idx is {library.named(padding_idx)}, expected an int or None")
    if ids.device.type == "cpu" and weight.device.type == "cuda":
        if not torch.compiler.is_compiling() and ids.dtype in (torch.int32, torch.int64) and weight.dim() == 2:
            _check_values(ids, weight.shape[0])
        ids = ids.to(weight.device)
    return _op(ids, weight, scale, padding_idx)
