"""SwiGLU's activation: `y = silu(gate) * up`, with `silu(g) = g * sigmoid(g)` (Shazeer 2020, https://arxiv.org/abs/2002.05202).

gate and up are two tensors, or the two halves of one packed tensor `[gate | up]`, as a fused gate-and-up projection
writes it. Bytes: two tensors read, one written; the backward reads dy, gate and up, recomputes the sigmoid and writes
two:

    dup = dy * silu(gate)
    dgate = dy * up * sigmoid(gate) * (1 + gate * (1 - sigmoid(gate)))
"""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor

from rooftile import launching, library, runtime  # before Triton: runtime fixes the mode of the process

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def _tile(N: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr):
    """This program's rows and columns. Neighbours take neighbouring columns: on an H200 4 % faster than rows."""
    BLOCKS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    rows = (tl.program_id(0) // BLOCKS).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = (tl.program_id(0) % BLOCKS) * BLOCK_N + tl.arange(0, BLOCK_N)
    return rows[:, None], cols[None, :]


@triton.jit(do_not_specialize=["n_rows"])
def _forward_kernel(
    gate_ptr,
    up_ptr,
    y_ptr,
    stride_gm,
    stride_um,
    n_rows,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    rows, cols = _tile(N, ROWS, BLOCK_N)
    mask = (rows < n_rows) & (cols < N)

    gate = tl.load(gate_ptr + rows * stride_gm + cols, mask=mask).to(tl.float32)
    up = tl.load(up_ptr + rows * stride_um + cols, mask=mask).to(tl.float32)

    y = gate * tl.sigmoid(gate) * up

    tl.store(y_ptr + rows * N + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n_rows"])
def _backward_kernel(
    dy_ptr,
    gate_ptr,
    up_ptr,
    dgate_ptr,
    dup_ptr,
    stride_dym,
    stride_gm,
    stride_um,
    stride_dm,
    n_rows,
    N: tl.constexpr,
    NEEDS_DGATE: tl.constexpr,
    NEEDS_DUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    rows, cols = _tile(N, ROWS, BLOCK_N)
    mask = (rows < n_rows) & (cols < N)

    dy = tl.load(dy_ptr + rows * stride_dym + cols, mask=mask).to(tl.float32)
    gate = tl.load(gate_ptr + rows * stride_gm + cols, mask=mask).to(tl.float32)
    if NEEDS_DGATE:
        up = tl.load(up_ptr + rows * stride_um + cols, mask=mask).to(tl.float32)

    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    if NEEDS_DUP:
        dup = dy * silu
        tl.store(dup_ptr + rows * stride_dm + cols, dup.to(dup_ptr.dtype.element_ty), mask=mask)
    if NEEDS_DGATE:
        dgate = dy * up * (sigmoid + silu * (1 - sigmoid))
        tl.store(dgate_ptr + rows * stride_dm + cols, dgate.to(dgate_ptr.dtype.element_ty), mask=mask)


@dataclasses.dataclass(frozen=True, eq=False)  # a key of caches on every call: by identity
class Config:
    """The tile of a program, and its warps."""

    rows: int
    block_n: int
    num_warps: int


@functools.cache
def config(n_cols: int, target: runtime.Target) -> Config:
    if target is runtime.INTERPRETER:
        return Config(rows=16, block_n=min(4096, library.power_of_two(n_cols)), num_warps=4)
    block_n = min(2048, library.power_of_two(n_cols))
    return Config(rows=2048 // block_n, block_n=block_n, num_warps=8)


@functools.cache
def _plan(n_cols: int, dtype: torch.dtype, c: Config) -> launching.Plan:
    constants = {"N": n_cols, "ROWS": c.rows, "BLOCK_N": c.block_n}
    return launching.Plan(_forward_kernel, constants, num_warps=c.num_warps)


@functools.cache
def _backward_plan(n_cols: int, dtype: torch.dtype, needs: tuple[bool, bool], c: Config) -> launching.Plan:
    constants = {"N": n_cols, "NEEDS_DGATE": needs[0], "NEEDS_DUP": needs[1], "ROWS": c.rows, "BLOCK_N": c.block_n}
    return launching.Plan(_backward_kernel, constants, num_warps=c.num_warps)


def _programs(n_rows: int, n_cols: int, c: Config) -> int:
    return library.cdiv(n_rows, c.rows) * library.cdiv(n_cols, c.block_n)


def _forward(gate: Tensor, up: Tensor, y: Tensor) -> Tensor:
    n_rows, n_cols = gate.shape[0], int(gate.shape[1])
    c = config(n_cols, runtime.target(gate.device))
    plan = _plan(n_cols, gate.dtype, c)
    strides = (gate.stride(0), up.stride(0))
    launching.launch(plan, _programs(n_rows, n_cols, c), (gate, up, y), strides, (n_rows,))
    return y


def _backward(dy: Tensor, gate: Tensor, up: Tensor, dgate: Tensor | None, dup: Tensor | None) -> None:
    """dgate and dup are (rows, N) with one row stride; one that is None is not computed."""
    some = dup if dgate is None else dgate
    if some is None:
        return
    n_rows, n_cols = gate.shape[0], int(gate.shape[1])
    c = config(n_cols, runtime.target(gate.device))
    plan = _backward_plan(n_cols, gate.dtype, (dgate is not None, dup is not None), c)
    strides = (dy.stride(0), gate.stride(0), up.stride(0), some.stride(0))
    launching.launch(plan, _programs(n_rows, n_cols, c), (dy, gate, up, dgate, dup), strides, (n_rows,))


# Separate gate and up


def _check(gate: Tensor, up: Tensor, op: str = "silu_mul") -> None:
    library.check_floating(op, gate=gate)
    if gate.dim() == 0:
        raise ValueError(f"{op}: gate has shape (), expected at least one dimension")
    library.check_same(op, "up", up, "gate", gate)


def _launch(gate: Tensor, up: Tensor) -> Tensor:
    _check(gate, up)
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    return _forward(library.as_rows(gate), library.as_rows(up), y) if y.numel() else y


def _fake(gate: Tensor, up: Tensor) -> Tensor:
    _check(gate, up)
    return torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)


def _launch_backward(dy: Tensor, gate: Tensor, up: Tensor, needs_dgate: bool, needs_dup: bool) -> tuple[Tensor, Tensor]:
    dgate, dup = _fake_backward(dy, gate, up, needs_dgate, needs_dup)
    if gate.numel():
        n = gate.shape[-1]
        _backward(
            library.as_rows(dy),
            library.as_rows(gate),
            library.as_rows(up),
            dgate.view(-1, n) if needs_dgate else None,
            dup.view(-1, n) if needs_dup else None,
        )
    return dgate, dup


def _fake_backward(dy: Tensor, gate: Tensor, up: Tensor, needs_dgate: bool, needs_dup: bool) -> tuple[Tensor, Tensor]:
    """One that is not needed comes back empty."""
    _check(gate, up, "silu_mul_backward")
    library.check_same("silu_mul_backward", "dy", dy, "gate", gate)
    return (
        torch.empty(gate.shape if needs_dgate else (0,), dtype=gate.dtype, device=gate.device),
        torch.empty(gate.shape if needs_dup else (0,), dtype=gate.dtype, device=gate.device),
    )


_backward_op = library.define(
    "silu_mul_backward(Tensor dy, Tensor gate, Tensor up, bool needs_dgate, bool needs_dup) -> (Tensor, Tensor)",
    launch=_launch_backward,
    fake=_fake_backward,
)


def _gradients(ctx, dy: Tensor | None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return None, None
    needs_dgate, needs_dup = ctx.needs_input_grad[1:3]
    dgate, dup = _backward_op(dy, *ctx.saved_tensors, needs_dgate, needs_dup)
    return dgate if needs_dgate else None, dup if needs_dup else None


_op = library.define(
    "silu_mul(Tensor gate, Tensor up) -> Tensor",
    launch=_launch,
    fake=_fake,
    autograd=library.Autograd(lambda ctx, inputs, output: ctx.save_for_backward(*inputs), _gradients),
)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """`y = gate * sigmoid(gate) * up`, computed in float32 and rounded once.

    Args:
        gate: `(..., N)`, float32, float16 or bfloat16. Any strides; copied only where the leading dimensions can't be
            taken as one, or the last stride is not 1.
        up: the shape and dtype of gate.

    Returns:
        y with the shape and dtype of gate, contiguous.

    Raises:
        ValueError: shapes or devices differ, or a device is the CPU without the interpreter.
        TypeError: dtypes differ, or are not one of the three.
    """
    return _op(gate, up)


# One packed tensor


def _check_packed(gate_up: Tensor) -> None:
    library.check_floating("silu_mul_packed", gate_up=gate_up)
    if gate_up.dim() == 0 or gate_up.shape[-1] % 2:
        raise ValueError(
            f"silu_mul_packed: gate_up has shape {tuple(gate_up.shape)}, expected an even last dimension [gate | up]"
        )


def _launch_packed(gate_up: Tensor) -> Tensor:
    y = _fake_packed(gate_up)
    if y.numel() == 0:
        return y
    gate, up = library.as_rows(gate_up).chunk(2, dim=1)
    return _forward(gate, up, y)


def _fake_packed(gate_up: Tensor) -> Tensor:
    _check_packed(gate_up)
    shape = (*gate_up.shape[:-1], gate_up.shape[-1] // 2)
    return torch.empty(shape, dtype=gate_up.dtype, device=gate_up.device)


def _launch_packed_backward(dy: Tensor, gate_up: Tensor) -> Tensor:
    grad = _fake_packed_backward(dy, gate_up)
    if grad.numel():
        gate, up = library.as_rows(gate_up).chunk(2, dim=1)
        _backward(library.as_rows(dy), gate, up, *grad.view(-1, grad.shape[-1]).chunk(2, dim=1))
    return grad


def _fake_packed_backward(dy: Tensor, gate_up: Tensor) -> Tensor:
    half = gate_up.narrow(-1, 0, gate_up.shape[-1] // 2)
    library.check_same("silu_mul_packed_backward", "dy", dy, "a half of gate_up", half)
    return torch.empty(gate_up.shape, dtype=gate_up.dtype, device=gate_up.device)


_packed_backward_op = library.define(
    "silu_mul_packed_backward(Tensor dy, Tensor gate_up) -> Tensor",
    launch=_launch_packed_backward,
    fake=_fake_packed_backward,
)

_packed_op = library.define(
    "silu_mul_packed(Tensor gate_up) -> Tensor",
    launch=_launch_packed,
    fake=_fake_packed,
    autograd=library.Autograd(
        lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
        lambda ctx, dy: (None if dy is None else _packed_backward_op(dy, *ctx.saved_tensors),),
    ),
)


def silu_mul_packed(gate_up: Tensor) -> Tensor:
    """`silu_mul(gate, up)` over one tensor that holds both: `gate_up = [gate | up]` along the last dimension.

    Args:
        gate_up: `(..., 2N)`, float32, float16 or bfloat16.

    Returns:
        y of shape `(..., N)`, gate_up's dtype, contiguous. The gradient is one packed tensor.

    Raises:
        ValueError: the last dimension is odd, or the device is the CPU without the interpreter.
        TypeError: the dtype is not one of the three.
    """
    return _packed_op(gate_up)
