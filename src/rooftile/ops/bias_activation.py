"""The activation of an MLP after the bias of its first projection: `y = act(x + bias)`.

    bias_gelu    act(z) = z * Phi(z), or its tanh form      GPT-2 (tanh), BERT, ViT, Whisper, Falcon
    bias_silu    act(z) = z * sigmoid(z)

The sum stays in a float32 register; PyTorch's pair of kernels rounds x + bias to x's dtype, writes it and reads it
again. Bytes: the forward reads x and the bias and writes y; the backward reads dy and x and writes dx:

    dx = dy * act'(x + bias)
    dbias = sum over rows of dx

Each program of a persistent grid sums dbias in float32. The partial sums are added in a fixed order, so the result is
the same on every run. If dbias is not needed, the backward is elementwise like the forward.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rooftile import launching, library, runtime  # before Triton: runtime fixes the mode of the process
from rooftile.primitives.activations import GELUS, Gelu, activate, activate_with_slope, check_activation
from rooftile.primitives.partials import accumulate, prepare_sum
from rooftile.primitives.tiles import tile_of, tiles

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit(do_not_specialize=["n_rows"])
def _elementwise_kernel(
    x_ptr,
    bias_ptr,
    dy_ptr,
    out_ptr,
    stride_xm,
    stride_dym,
    n_rows,
    ACTIVATION: tl.constexpr,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The forward; with dy the backward to x."""
    rows, _, cols = tile_of(tl.program_id(0), N, ROWS, BLOCK_N)
    mask = (rows < n_rows) & (cols < N)

    if dy_ptr is not None:
        dy = tl.load(dy_ptr + rows * stride_dym + cols, mask=mask, eviction_policy="evict_first").to(tl.float32)
    z = tl.load(x_ptr + rows * stride_xm + cols, mask=mask, eviction_policy="evict_first").to(tl.float32)
    if bias_ptr is not None:
        z += tl.load(bias_ptr + cols, mask=cols < N).to(tl.float32)

    if dy_ptr is not None:
        _, slope = activate_with_slope(z, ACTIVATION)
        out = dy * slope
    else:
        out = activate(z, ACTIVATION)

    tl.store(out_ptr + rows * N + cols, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n_rows"])
def _dbias_kernel(
    dy_ptr,
    x_ptr,
    bias_ptr,
    dx_ptr,
    partial_ptr,
    stride_dym,
    stride_xm,
    n_rows,
    ACTIVATION: tl.constexpr,
    N: tl.constexpr,
    NEEDS_DX: tl.constexpr,
    COMPENSATED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A program takes a block of columns and strides over tiles of rows; adjacent programs take adjacent columns."""
    BLOCKS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    lane = tl.program_id(0) // BLOCKS
    step = tl.num_programs(0) // BLOCKS * ROWS
    cols = ((tl.program_id(0) % BLOCKS) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    col_mask = cols < N
    bias = tl.load(bias_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)
    # One sum for each row of the tile; they are added after the last tile.
    dbias = tl.zeros((ROWS, BLOCK_N), tl.float32)
    lost = tl.zeros((ROWS, BLOCK_N), tl.float32)

    for start in tl.range(lane * ROWS, n_rows, step, num_stages=STAGES):
        rows = (start.to(tl.int64) + tl.arange(0, ROWS))[:, None]
        mask = (rows < n_rows) & col_mask
        dy = tl.load(dy_ptr + rows * stride_dym + cols, mask=mask, other=0.0, eviction_policy="evict_first")
        x = tl.load(x_ptr + rows * stride_xm + cols, mask=mask, other=0.0, eviction_policy="evict_first")

        _, slope = activate_with_slope(x.to(tl.float32) + bias, ACTIVATION)
        dx = dy.to(tl.float32) * slope

        if NEEDS_DX:
            tl.store(dx_ptr + rows * N + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        dbias, lost = accumulate(dbias, lost, dx, COMPENSATED)

    partial = tl.sum(dbias, axis=0, keep_dims=True)
    tl.store(partial_ptr + lane.to(tl.int64) * N + cols, partial, mask=col_mask)


@dataclasses.dataclass(frozen=True, eq=False)  # a cache key on every call: hashed by identity
class BiasActivationConfig:
    """The tile of a program of an elementwise kernel, and its warps."""

    rows: int
    block_n: int
    num_warps: int


@dataclasses.dataclass(frozen=True, eq=False)
class DbiasConfig:
    """The tile of a step of a program, its warps and its pipeline stages.

    An SM has at most `per_sm` programs, and more than one only if each has `steps` tiles: their partial sums are read
    again.
    """

    rows: int
    block_n: int
    num_warps: int
    stages: int
    per_sm: int
    steps: int


@functools.cache
def config(n_cols: int, target: runtime.Target) -> BiasActivationConfig:
    """On an H200 (bf16) 0.98 of a copy's speed at 8192 x 14336, and within 1 % of the best of eighteen elsewhere."""
    if target is runtime.INTERPRETER:
        return BiasActivationConfig(rows=16, block_n=min(4096, library.power_of_two(n_cols)), num_warps=4)
    block_n = min(256, library.power_of_two(n_cols))
    return BiasActivationConfig(rows=2048 // block_n, block_n=block_n, num_warps=4)


@functools.cache
def dbias_config(activation: str, n_cols: int, itemsize: int, target: runtime.Target) -> DbiasConfig:
    """Two stages keep a tile of dy and x in shared memory; three or one took 2 to 6 % longer on an H200 (bf16).

    Fractions of a copy's speed at 8192 x 14336: gelu and silu 0.94; gelu_tanh 0.94 with larger tiles and fewer
    programs, and 0.74 with the tiles of the others.
    """
    if target is runtime.INTERPRETER:
        block_n = min(4096, library.power_of_two(n_cols))
        return DbiasConfig(rows=16, block_n=block_n, num_warps=4, stages=1, per_sm=1, steps=1)
    block_n = min(2048 // itemsize, library.power_of_two(n_cols))
    tile, programs = (8192, 4) if activation == "gelu_tanh" else (4096, 8)
    return DbiasConfig(
        rows=tile // itemsize // block_n, block_n=block_n, num_warps=4, stages=2, per_sm=programs, steps=4
    )


Dtypes = tuple[torch.dtype, torch.dtype | None]  # of x and bias


@functools.cache
def _launcher(
    activation: str, n_cols: int, dtypes: Dtypes, dx: bool, c: BiasActivationConfig
) -> launching.KernelLauncher:
    constants = {"ACTIVATION": activation, "N": n_cols, "ROWS": c.rows, "BLOCK_N": c.block_n}
    return launching.KernelLauncher(_elementwise_kernel, constants, num_warps=c.num_warps)


@functools.cache
def _dbias_launcher(
    activation: str, n_cols: int, dtypes: Dtypes, needs_dx: bool, c: DbiasConfig
) -> launching.KernelLauncher:
    constants = {
        "ACTIVATION": activation,
        "N": n_cols,
        "NEEDS_DX": needs_dx,
        "COMPENSATED": dtypes[0] is torch.float32,
        "ROWS": c.rows,
        "BLOCK_N": c.block_n,
        "STAGES": c.stages,
    }
    return launching.KernelLauncher(_dbias_kernel, constants, num_warps=c.num_warps)


def _dbias_programs(n_rows: int, n_cols: int, d: DbiasConfig, target: runtime.Target) -> tuple[int, int]:
    """Blocks of columns, and programs that share the rows of each block."""
    blocks = library.cdiv(n_cols, d.block_n)
    one_each = max(1, target.multiprocessors // blocks)
    all_resident = max(1, target.multiprocessors * d.per_sm // blocks)
    lanes = min(all_resident, max(one_each, library.cdiv(n_rows, d.rows * d.steps)))
    return blocks, min(lanes, library.cdiv(n_rows, d.rows))


def _check(op: str, x: Tensor, bias: Tensor | None) -> None:
    library.check_floating(op, x=x, bias=bias)
    if x.dim() == 0:
        raise ValueError(f"{op}: x has shape (), expected at least one dimension")
    if bias is None:
        return
    if bias.shape != x.shape[-1:]:
        raise ValueError(
            f"{op}: bias has shape {tuple(bias.shape)}, expected ({x.shape[-1]},) to match x's last dimension"
        )
    if bias.dtype not in (x.dtype, torch.float32):
        raise TypeError(f"{op}: bias has dtype {bias.dtype}, expected {library.or_float32(x)}")


def _start(activation: str, x: Tensor, bias: Tensor | None, dy: Tensor | None = None) -> Callable[..., None]:
    """The launch over x, bias, dy or None, and y or dx."""
    if x.numel() == 0:
        return library.start_nothing
    copies: library.Copies = {}
    rows = library.rows_of(x, copies, 0)
    library.contiguous_of(bias, copies, 1)
    stride_dym = 0 if dy is None else library.rows_of(dy, copies, 2).stride(0)
    n_rows, n_cols = rows.shape[0], int(rows.shape[1])
    c = config(n_cols, runtime.target(x.device))
    launcher = _launcher(activation, n_cols, (x.dtype, None if bias is None else bias.dtype), dy is not None, c)
    programs = tiles(n_rows, n_cols, c.rows, c.block_n)
    start = launching.bind(launcher, programs, strides=(rows.stride(0), stride_dym), numbers=(n_rows,))
    return library.copying(start, copies)


def _fake(op: str, x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    check_activation(op, activation, ("silu",) if op.startswith("bias_silu") else GELUS)
    _check(op, x, bias)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _prepare(op: str, x: Tensor, bias: Tensor | None, activation: str) -> Callable[..., Tensor]:
    _fake(op, x, bias, activation)
    start = _start(activation, x, bias)
    shape, strides, dtype, device = x.shape, library.contiguous_strides(x.shape), x.dtype, x.device

    def run(x: Tensor, bias: Tensor | None, _: str) -> Tensor:
        y = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        start(x, bias, None, y)
        return y

    return run


def _fake_backward(
    dy: Tensor, x: Tensor, bias: Tensor | None, activation: str, needs_dx: bool, needs_dbias: bool
) -> tuple[Tensor, Tensor]:
    """Memory for dx and dbias; a gradient that is not needed is empty."""
    op = "bias_activation_backward"
    check_activation(op, activation)
    if needs_dbias and bias is None:
        raise ValueError(f"{op}: needs_dbias is True, expected False where bias is None")
    _check(op, x, bias)
    library.check_same(op, "dy", dy, "x", x)
    dx = torch.empty(x.shape if needs_dx else (0,), dtype=x.dtype, device=x.device)
    dtype = x.dtype if bias is None else bias.dtype
    return dx, torch.empty((x.shape[-1] if needs_dbias else 0,), dtype=dtype, device=x.device)


def _prepare_backward(
    dy: Tensor, x: Tensor, bias: Tensor | None, activation: str, needs_dx: bool, needs_dbias: bool
) -> Callable[..., tuple[Tensor, Tensor]]:
    shapes = tuple(grad.shape for grad in _fake_backward(dy, x, bias, activation, needs_dx, needs_dbias))
    strides = tuple(map(library.contiguous_strides, shapes))
    dtype, dbias_dtype, device = x.dtype, x.dtype if bias is None else bias.dtype, x.device
    sums = _prepare_dbias(dy, x, bias, activation, needs_dx) if bias is not None and needs_dbias and x.numel() else None
    start = _start(activation, x, bias, dy) if sums is None and needs_dx else library.start_nothing

    def run(dy: Tensor, x: Tensor, bias: Tensor | None, *_: Any) -> tuple[Tensor, Tensor]:
        dx = torch.empty_strided(shapes[0], strides[0], dtype=dtype, device=device)
        dbias = torch.empty_strided(shapes[1], strides[1], dtype=dbias_dtype, device=device)
        if sums is not None:
            sums(dy, x, bias, dx, dbias)
            return dx, dbias
        start(x, bias, dy, dx)
        return dx, dbias.zero_() if needs_dbias else dbias

    return run


def _prepare_dbias(dy: Tensor, x: Tensor, bias: Tensor, activation: str, needs_dx: bool) -> Callable[..., None]:
    """The launches over dy, x, bias, dx and dbias."""
    copies: library.Copies = {}
    dy_rows, rows = library.rows_of(dy, copies, 0), library.rows_of(x, copies, 1)
    library.contiguous_of(bias, copies, 2)
    n_rows, n_cols, target = rows.shape[0], int(rows.shape[1]), runtime.target(x.device)
    d = dbias_config(activation, n_cols, x.element_size(), target)
    blocks, lanes = _dbias_programs(n_rows, n_cols, d, target)
    launcher = _dbias_launcher(activation, n_cols, (x.dtype, bias.dtype), needs_dx, d)
    strides, device = (dy_rows.stride(0), rows.stride(0)), x.device
    start = library.copying(launching.bind(launcher, blocks * lanes, strides=strides, numbers=(n_rows,)), copies)
    add_up = prepare_sum(lanes, n_cols, bias.dtype)

    def run(dy: Tensor, x: Tensor, bias: Tensor, dx: Tensor, dbias: Tensor) -> None:
        partial = torch.empty_strided((lanes, n_cols), (n_cols, 1), dtype=torch.float32, device=device)
        start(dy, x, bias, dx, partial)
        add_up(partial, dbias, None)

    return run


_backward_op = library.define(
    "bias_activation_backward(Tensor dy, Tensor x, Tensor? bias, str activation, bool needs_dx, bool needs_dbias) "
    "-> (Tensor, Tensor)",
    prepare=_prepare_backward,
    fake=_fake_backward,
)


def _save(ctx, inputs, output) -> None:
    x, bias, ctx.activation = inputs
    ctx.save_for_backward(x, bias)


def _backward(ctx, dy: Tensor | None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return None, None, None
    needs_dx, needs_dbias = ctx.needs_input_grad[1:3]
    dx, dbias = _backward_op(dy, *ctx.saved_tensors, ctx.activation, needs_dx, needs_dbias)
    return dx if needs_dx else None, dbias if needs_dbias else None, None


def _define(op: str) -> Callable[..., Tensor]:
    return library.define(
        f"{op}(Tensor x, Tensor? bias, str activation) -> Tensor",
        prepare=functools.partial(_prepare, op),
        fake=functools.partial(_fake, op),
        autograd=library.Autograd(_save, _backward),
        rows=library.Rows(("x",)),
    )


_silu, _gelu = _define("bias_silu"), _define("bias_gelu")


def bias_gelu(x: Tensor, bias: Tensor | None = None, *, activation: Gelu = "gelu") -> Tensor:
    """`y = gelu(x + bias)`, computed in float32 and rounded once (Hendrycks and Gimpel 2016, arXiv:1606.08415).

    Args:
        x: `(..., N)`, float32, float16 or bfloat16. Any strides; copied only if the leading dimensions cannot be viewed
            as one, or if the last stride is not 1.
        bias: `(N,)`, of x's dtype or float32; None for gelu alone.
        activation: `"gelu"`: `gelu(z) = z * Phi(z)`, with Phi the standard normal distribution. `"gelu_tanh"`:
            `z / 2 * (1 + tanh(sqrt(2 / pi) * (z + 0.044715 * z^3)))`.

    Returns:
        y with the shape and dtype of x, contiguous.

    Raises:
        ValueError: the bias's shape is not `(N,)`, the activation is another word, devices differ, or a device is the
            CPU without the interpreter.
        TypeError: a dtype is not one of those.
    """
    return _gelu(x, bias, activation)


def bias_silu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """`y = z * sigmoid(z)` of `z = x + bias`, computed in float32 and rounded once.

    Arguments, result and errors are those of `bias_gelu`.
    """
    return _silu(x, bias, "silu")
