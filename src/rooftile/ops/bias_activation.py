"""The activation of an MLP behind the bias of its first projection: `y = act(x + bias)`.

    bias_gelu    act(z) = z * Phi(z), or its tanh form      GPT-2 (tanh), BERT, ViT, Whisper, Falcon
    bias_silu    act(z) = z * sigmoid(z)

The sum is float32: where PyTorch's own pair of kernels rounds x + bias to x's dtype, writes it and reads it again, here
it stays in a register. Bytes: x read, y written, the bias once; the backward reads dy and x and writes dx:

    dx = dy * act'(x + bias)
    dbias = sum over rows of dx

dbias is summed in float32 by a grid that stays on the chip, and reduced in a fixed order: the result is the same on
every run. Where nobody asks for it, the backward is elementwise as the forward is.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor

from rooftile import launching, library, runtime  # before Triton: runtime fixes the mode of the process
from rooftile.primitives.activations import ACTIVATIONS, Approximate, activate, activate_with_slope, gelu_name
from rooftile.primitives.partials import accumulate, sum_partials

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def _tile(N: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr):
    """This program's rows and columns; neighbours take neighbouring columns."""
    BLOCKS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    rows = (tl.program_id(0) // BLOCKS).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = (tl.program_id(0) % BLOCKS) * BLOCK_N + tl.arange(0, BLOCK_N)
    return rows[:, None], cols[None, :]


@triton.jit(do_not_specialize=["n_rows"])
def _forward_kernel(
    x_ptr,
    bias_ptr,
    y_ptr,
    stride_xm,
    n_rows,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    rows, cols = _tile(N, ROWS, BLOCK_N)
    mask = (rows < n_rows) & (cols < N)

    z = tl.load(x_ptr + rows * stride_xm + cols, mask=mask, eviction_policy="evict_first").to(tl.float32)
    if HAS_BIAS:
        z += tl.load(bias_ptr + cols, mask=cols < N).to(tl.float32)

    y = activate(z, ACTIVATION)

    tl.store(y_ptr + rows * N + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n_rows"])
def _dx_kernel(
    dy_ptr,
    x_ptr,
    bias_ptr,
    dx_ptr,
    stride_dym,
    stride_xm,
    n_rows,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    rows, cols = _tile(N, ROWS, BLOCK_N)
    mask = (rows < n_rows) & (cols < N)

    dy = tl.load(dy_ptr + rows * stride_dym + cols, mask=mask, eviction_policy="evict_first").to(tl.float32)
    z = tl.load(x_ptr + rows * stride_xm + cols, mask=mask, eviction_policy="evict_first").to(tl.float32)
    if HAS_BIAS:
        z += tl.load(bias_ptr + cols, mask=cols < N).to(tl.float32)

    _, slope = activate_with_slope(z, ACTIVATION)
    dx = dy * slope

    tl.store(dx_ptr + rows * N + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)


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
    """A program has its columns, and every so many-th tile of rows; neighbours have neighbouring columns."""
    BLOCKS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    lane = tl.program_id(0) // BLOCKS
    step = tl.num_programs(0) // BLOCKS * ROWS
    cols = ((tl.program_id(0) % BLOCKS) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    col_mask = cols < N
    bias = tl.load(bias_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)
    # A sum for every row of the tile: they are added up when all rows are through.
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


@dataclasses.dataclass(frozen=True, eq=False)  # a key of caches on every call: by identity
class Config:
    """The tile of a program of an elementwise kernel, and its warps. Its rows share the bias's columns."""

    rows: int
    block_n: int
    num_warps: int


@dataclasses.dataclass(frozen=True, eq=False)
class DbiasConfig:
    """The tile of a step of a program, its warps, stages and programs a multiprocessor.

    A multiprocessor has more than one only where each has that many `steps`: their partial sums are to be read again.
    """

    rows: int
    block_n: int
    num_warps: int
    stages: int
    per_multiprocessor: int
    steps: int


@functools.cache
def config(n_cols: int, target: runtime.Target) -> Config:
    """On an H200 (bf16) 0.98 of a copy's speed at 8192 x 14336, and within 1 % of the best of eighteen elsewhere."""
    if target is runtime.INTERPRETER:
        return Config(rows=16, block_n=min(4096, library.power_of_two(n_cols)), num_warps=4)
    block_n = min(256, library.power_of_two(n_cols))
    return Config(rows=2048 // block_n, block_n=block_n, num_warps=4)


@functools.cache
def dbias_config(activation: str, n_cols: int, itemsize: int, target: runtime.Target) -> DbiasConfig:
    """Two stages keep a tile of dy and x in shared memory; three, or one, took 2 to 6 % longer on an H200 (bf16).

    At 8192 x 14336, in parts of a copy's speed: gelu and silu 0.94; gelu's tanh form 0.94 in larger tiles and fewer
    programs, and 0.74 in those of the others.
    """
    if target is runtime.INTERPRETER:
        block_n = min(4096, library.power_of_two(n_cols))
        return DbiasConfig(rows=16, block_n=block_n, num_warps=4, stages=1, per_multiprocessor=1, steps=1)
    block_n = min(2048 // itemsize, library.power_of_two(n_cols))
    tile, programs = (8192, 4) if activation == "gelu_tanh" else (4096, 8)
    return DbiasConfig(
        rows=tile // itemsize // block_n, block_n=block_n, num_warps=4, stages=2, per_multiprocessor=programs, steps=4
    )


def _dtypes(x: Tensor, bias: Tensor | None) -> tuple[torch.dtype, torch.dtype | None]:
    return x.dtype, None if bias is None else bias.dtype


@functools.cache
def _plan(
    activation: str, n_cols: int, dtypes: tuple[torch.dtype, torch.dtype | None], dx: bool, c: Config
) -> launching.KernelLauncher:
    constants = {
        "ACTIVATION": activation,
        "HAS_BIAS": dtypes[1] is not None,
        "N": n_cols,
        "ROWS": c.rows,
        "BLOCK_N": c.block_n,
    }
    return launching.KernelLauncher(_dx_kernel if dx else _forward_kernel, constants, num_warps=c.num_warps)


@functools.cache
def _dbias_plan(
    activation: str, n_cols: int, dtypes: tuple[torch.dtype, torch.dtype | None], needs_dx: bool, c: DbiasConfig
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


def _programs(n_rows: int, n_cols: int, c: Config) -> int:
    return library.cdiv(n_rows, c.rows) * library.cdiv(n_cols, c.block_n)


def _dbias_programs(n_rows: int, n_cols: int, d: DbiasConfig, target: runtime.Target) -> tuple[int, int]:
    """Blocks of columns, and programs that share the rows of each."""
    blocks = library.cdiv(n_cols, d.block_n)
    one_each = max(1, target.multiprocessors // blocks)
    all_resident = max(1, target.multiprocessors * d.per_multiprocessor // blocks)
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
        raise TypeError(f"{op}: bias has dtype {bias.dtype}, expected {x.dtype} to match x, or torch.float32")


def _output(op: str, x: Tensor, bias: Tensor | None) -> Tensor:
    _check(op, x, bias)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _apply(op: str, activation: str, x: Tensor, bias: Tensor | None) -> Tensor:
    y = _output(op, x, bias)
    if y.numel() == 0:
        return y
    x = library.as_rows(x)
    bias = None if bias is None else bias.contiguous()
    n_rows, n_cols = x.shape[0], int(x.shape[1])
    c = config(n_cols, runtime.target(x.device))
    plan = _plan(activation, n_cols, _dtypes(x, bias), False, c)
    launching.launch(plan, _programs(n_rows, n_cols, c), (x, bias, y), (x.stride(0),), (n_rows,))
    return y


def _differentiate(
    dy: Tensor, x: Tensor, bias: Tensor | None, activation: str, needs_dx: bool, needs_dbias: bool
) -> tuple[Tensor, Tensor]:
    """dx and dbias; one that is not needed comes back empty."""
    dx, dbias = _gradients(dy, x, bias, activation, needs_dx, needs_dbias)
    if x.numel() == 0:
        return dx, dbias.zero_()
    dy, x = library.as_rows(dy), library.as_rows(x)
    bias = None if bias is None else bias.contiguous()
    n_rows, n_cols = x.shape[0], int(x.shape[1])
    target = runtime.target(x.device)
    strides = (dy.stride(0), x.stride(0))
    if not needs_dbias:
        if needs_dx:
            c = config(n_cols, target)
            plan = _plan(activation, n_cols, _dtypes(x, bias), True, c)
            launching.launch(plan, _programs(n_rows, n_cols, c), (dy, x, bias, dx), strides, (n_rows,))
        return dx, dbias
    d = dbias_config(activation, n_cols, x.element_size(), target)
    blocks, lanes = _dbias_programs(n_rows, n_cols, d, target)
    partial = torch.empty((lanes, n_cols), dtype=torch.float32, device=x.device)
    plan = _dbias_plan(activation, n_cols, _dtypes(x, bias), needs_dx, d)
    launching.launch(plan, blocks * lanes, (dy, x, bias, dx, partial), strides, (n_rows,))
    sum_partials(partial, dbias)
    return dx, dbias


def _gradients(
    dy: Tensor, x: Tensor, bias: Tensor | None, activation: str, needs_dx: bool, needs_dbias: bool
) -> tuple[Tensor, Tensor]:
    """Memory for them."""
    op = "bias_activation_backward"
    if activation not in ACTIVATIONS:
        raise ValueError(f"{op}: activation is {activation!r}, expected one of {', '.join(ACTIVATIONS)}")
    if needs_dbias and bias is None:
        raise ValueError(f"{op}: needs_dbias is True, expected False where bias is None")
    _check(op, x, bias)
    library.check_same(op, "dy", dy, "x", x)
    dx = torch.empty(x.shape if needs_dx else (0,), dtype=x.dtype, device=x.device)
    dtype = x.dtype if bias is None else bias.dtype
    return dx, torch.empty((x.shape[-1] if needs_dbias else 0,), dtype=dtype, device=x.device)


_backward_op = library.define(
    "bias_activation_backward(Tensor dy, Tensor x, Tensor? bias, str activation, bool needs_dx, bool needs_dbias) "
    "-> (Tensor, Tensor)",
    launch=_differentiate,
    fake=_gradients,
)


def _backward(ctx, dy: Tensor | None) -> tuple[Tensor | None, ...]:
    rest = (None,) * (len(ctx.needs_input_grad) - 3)  # the key set, x and bias come first
    if dy is None:
        return None, None, *rest
    needs_dx, needs_dbias = ctx.needs_input_grad[1:3]
    dx, dbias = _backward_op(dy, *ctx.saved_tensors, ctx.activation, needs_dx, needs_dbias)
    return dx if needs_dx else None, dbias if needs_dbias else None, *rest


def _save_silu(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)
    ctx.activation = "silu"


_silu_op = library.define(
    "bias_silu(Tensor x, Tensor? bias) -> Tensor",
    launch=lambda x, bias: _apply("bias_silu", "silu", x, bias),
    fake=lambda x, bias: _output("bias_silu", x, bias),
    autograd=library.Autograd(_save_silu, _backward),
)


def _fake_gelu(x: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    gelu_name("bias_gelu", approximate)
    return _output("bias_gelu", x, bias)


def _save_gelu(ctx, inputs, output) -> None:
    x, bias, approximate = inputs
    ctx.save_for_backward(x, bias)
    ctx.activation = gelu_name("bias_gelu", approximate)


_gelu_op = library.define(
    "bias_gelu(Tensor x, Tensor? bias, str approximate) -> Tensor",
    launch=lambda x, bias, approximate: _apply("bias_gelu", gelu_name("bias_gelu", approximate), x, bias),
    fake=_fake_gelu,
    autograd=library.Autograd(_save_gelu, _backward),
)


def bias_gelu(x: Tensor, bias: Tensor | None = None, *, approximate: Approximate = "none") -> Tensor:
    """`y = gelu(x + bias)`, computed in float32 and rounded once (Hendrycks and Gimpel 2016, arXiv:1606.08415).

    Args:
        x: `(..., N)`, float32, float16 or bfloat16. Any strides; copied only where the leading dimensions can't be
            taken as one, or the last stride is not 1.
        bias: `(N,)`, of x's dtype or float32; None for gelu alone.
        approximate: as in `torch.nn.functional.gelu`. `"none"`: `gelu(z) = z * Phi(z)`, with Phi the distribution of a
            standard normal number. `"tanh"`: `z / 2 * (1 + tanh(sqrt(2 / pi) * (z + 0.044715 * z^3)))`.

    Returns:
        y with the shape and dtype of x, contiguous.

    Raises:
        ValueError: the bias's shape is not x's last dimension, approximate is another word, a device is the CPU without
            the interpreter, or devices differ.
        TypeError: a dtype is not one of those.
    """
    return _gelu_op(x, bias, approximate)


def bias_silu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """`y = z * sigmoid(z)` of `z = x + bias`, computed in float32 and rounded once.

    Arguments, result and errors are those of `bias_gelu`.
    """
    return _silu_op(x, bias)
