"""`linear` and `gated_linear`: a GEMM with the weight of nn.Linear and what follows it, and their gradients.

    z = x @ weight^T + bias,   out = act(z) + residual,   or gated: [g | u] = z, out = act(g) * u
    dx = dz @ weight,   dweight = dz^T @ x,   dbias = sum over rows of dz,   dresidual = dy

Where a gradient is wanted, an activation's argument z is written, in x's dtype, and the activation is an op of its own:
its backward needs z, and computing it again would be one more GEMM.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rooftile import library
from rooftile.ops.bias_activation import bias_gelu, bias_silu
from rooftile.ops.gated import gelu_mul_packed, silu_mul_packed
from rooftile.ops.gemm import dispatch
from rooftile.ops.gemm.column_sum import activate_add, column_sum
from rooftile.ops.gemm.config import Activation, GemmConfig, Invariant, Operands, Precision, Start
from rooftile.ops.gemm.dispatch import as_rows, transposed
from rooftile.primitives.activations import check_activation


def _check(
    op: str, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str, gated: bool,
    precision: str,
) -> tuple[int, ...]:  # fmt: skip
    """The shape of the result."""
    library.check_floating(op, x=x, weight=weight, bias=bias, residual=residual)
    dispatch.check_precision(op, precision)
    if activation or gated:
        check_activation(op, activation)
    if x.dim() == 0:
        raise ValueError(f"{op}: x has shape (), expected at least one dimension")
    dispatch.check_dtype(op, "weight", weight, "x", x)
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        rows = "2N" if gated else "N"
        raise ValueError(
            f"{op}: weight has shape {tuple(weight.shape)}, expected ({rows}, {x.shape[-1]}) to match x's last "
            "dimension"
        )
    if gated and weight.shape[0] % 2:
        raise ValueError(f"{op}: weight has {weight.shape[0]} rows, expected an even number: [gate | up]")
    dispatch.check_bias(op, bias, x, weight.shape[0])
    shape = (*x.shape[:-1], weight.shape[0] // 2 if gated else weight.shape[0])
    dispatch.check_residual(op, residual, shape, x.dtype, "x")
    return shape


def _prepare(
    op: str, gated: bool, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str,
    precision: str, config: Sequence[int],
) -> Callable[..., Tensor]:  # fmt: skip
    dispatch.refuse_symbols(*x.shape, *weight.shape)
    shape = _check(op, x, weight, bias, residual, activation, gated, precision)
    strides, dtype, device = library.contiguous_strides(shape), x.dtype, x.device
    start: Start = library.start_nothing
    if math.prod(shape):
        copies: library.Copies = {}
        rows = dispatch.rows_of(x, copies, 0)
        o = Operands(
            rows, weight, dispatch.like(x, (rows.shape[0], shape[-1])), dispatch.contiguous(bias, copies, 3),
            None if residual is None else library.rows_of(residual, copies, 4),
            activation=activation, gated=gated, precision=precision,
        )  # fmt: skip
        start = dispatch.bind(op, o, config)
        start = library.copying(start, copies)

    def run(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, *_: object) -> Tensor:
        out = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        start(x, weight, out, bias, residual, None, None, None)
        return out

    return run


def _fake(
    op: str, gated: bool, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str,
    precision: str, config: Sequence[int],
) -> Tensor:  # fmt: skip
    shape = _check(op, x, weight, bias, residual, activation, gated, precision)
    return torch.empty(shape, dtype=x.dtype, device=x.device)


def _gradients(
    dy: Tensor, x: Tensor | None, weight: Tensor | None, bias: Tensor | None, precision: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for them; one that is not asked for is empty."""
    op, n = "linear_backward", dy.shape[-1]
    library.check_floating(op, dy=dy, x=x, weight=weight, bias=bias)
    if x is not None and x.shape[:-1] != dy.shape[:-1]:
        raise ValueError(
            f"{op}: x has shape {tuple(x.shape)}, expected {tuple(dy.shape[:-1])} before the last dimension"
        )
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.shape[0] != n:
            raise ValueError(f"{op}: {name} has shape {tuple(tensor.shape)}, expected {n} as its first dimension")

    def memory(shape: tuple[int, ...] | None, dtype: torch.dtype) -> Tensor:
        return torch.empty((0,) if shape is None else shape, dtype=dtype, device=dy.device)

    return (
        memory(None if weight is None else (*dy.shape[:-1], weight.shape[1]), dy.dtype),
        memory(None if x is None else (n, x.shape[-1]), dy.dtype),
        memory(None if bias is None else (n,), dy.dtype if bias is None else bias.dtype),
    )


def _prepare_backward(
    dy: Tensor, x: Tensor | None, weight: Tensor | None, bias: Tensor | None, precision: str
) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    op = "linear_backward"
    dispatch.refuse_symbols(*dy.shape)
    memory = [
        (g.shape, library.contiguous_strides(g.shape), g.dtype) for g in _gradients(dy, x, weight, bias, precision)
    ]
    dx_shape, dw_shape = memory[0][0], memory[1][0]
    device, of_dx, of_dw = dy.device, library.start_nothing, library.start_nothing
    if weight is not None and dx_shape.numel():
        rows = dx_shape[:-1].numel(), dx_shape[-1]
        of_dx = dispatch.bind_views(op, dy, weight, (as_rows, lambda w: w.mT), rows, dy.dtype, precision)
    if x is not None and dw_shape.numel():
        of_dw = dispatch.bind_views(op, dy, x, (transposed, transposed), dw_shape, dy.dtype, precision)

    def run(
        dy: Tensor, x: Tensor | None, weight: Tensor | None, bias: Tensor | None, _: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        dx, dw, db = (torch.empty_strided(s, t, dtype=dtype, device=device) for s, t, dtype in memory)
        of_dx(dy, weight, dx, None, None, None, None, None)
        of_dw(dy, x, dw, None, None, None, None, None)
        if bias is not None:
            column_sum(as_rows(dy), db)
        return dx, dw, db

    return run


_backward_op = library.define(
    "linear_backward(Tensor dy, Tensor? x, Tensor? weight, Tensor? bias, str precision) -> (Tensor, Tensor, Tensor)",
    prepare=_prepare_backward,
    fake=_gradients,
)


def _check_derivative(inputs: tuple[Any, ...]) -> None:
    """The gradient of the residual does not need an activation's argument; the others do."""
    if inputs[4] and any(t is not None and t.requires_grad for t in inputs[:3]):
        raise ValueError(
            "linear: activation is given, which this op does not differentiate; call rooftile.linear, which does"
        )


def _save(ctx, inputs, output) -> None:
    """Of x, weight and bias each is kept where a gradient needs it: a frozen weight keeps no x."""
    x, weight, bias = inputs[:3]
    needs_dx, needs_dw, needs_db = ctx.needs_input_grad[1:4]
    ctx.precision = inputs[5]
    ctx.save_for_backward(x if needs_dw else None, weight if needs_dx else None, bias if needs_db else None)


def _backward(ctx, dy: Tensor | None) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad[1:]
    grads: list[Tensor | None] = [None] * len(needs)
    if dy is not None:
        if any(needs[:3]):
            found = _backward_op(dy, *ctx.saved_tensors, ctx.precision)
            grads[:3] = (g if need else None for g, need in zip(found, needs[:3], strict=True))
        grads[3] = dy if needs[3] else None
    return tuple(grads)


linear_op = library.define(
    "linear(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, str activation, str precision, int[] config) "
    "-> Tensor",
    prepare=lambda *args: _prepare("linear", False, *args),
    fake=lambda *args: _fake("linear", False, *args),
    autograd=library.Autograd(_save, _backward, _check_derivative),
)


def _prepare_gated(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Callable[..., Tensor]:
    run = _prepare("gated_linear", True, x, weight, bias, None, *rest)
    return lambda x, weight, bias, *_: run(x, weight, bias, None)


gated_op = library.define(
    "gated_linear(Tensor x, Tensor weight, Tensor? bias, str activation, str precision, int[] config) -> Tensor",
    prepare=_prepare_gated,
    fake=lambda x, weight, bias, *rest: _fake("gated_linear", True, x, weight, bias, None, *rest),
)


def _prepare_activate_add(z: Tensor, residual: Tensor, activation: str) -> Callable[..., Tensor]:
    def run(z: Tensor, residual: Tensor, activation: str) -> Tensor:
        out = torch.empty(residual.shape, dtype=z.dtype, device=z.device)
        if out.numel():
            activate_add(as_rows(z), library.as_rows(residual), as_rows(out), activation)
        return out

    return run


def _save_activate_add(ctx, inputs, output) -> None:
    z, _, ctx.activation = inputs
    ctx.save_for_backward(z if ctx.needs_input_grad[1] else None)


def _backward_activate_add(ctx, dy: Tensor | None) -> tuple[Tensor | None, ...]:
    (z,) = ctx.saved_tensors
    if dy is None:
        return None, None, None
    dz = None
    if z is not None:
        dz = torch.ops.rooftile.bias_activation_backward(dy, z, None, ctx.activation, True, False)[0]
    return dz, dy if ctx.needs_input_grad[2] else None, None


_activate_add_op = library.define(
    "activate_add(Tensor z, Tensor residual, str activation) -> Tensor",
    prepare=_prepare_activate_add,
    fake=lambda z, residual, activation: torch.empty(residual.shape, dtype=z.dtype, device=z.device),
    autograd=library.Autograd(_save_activate_add, _backward_activate_add),
)


def activated(z: Tensor, activation: Any, residual: Tensor | None = None) -> Tensor:
    """`act(z) + residual`, an op of its own."""
    if residual is not None:
        return _activate_add_op(z, residual, activation)
    return bias_silu(z) if activation == "silu" else bias_gelu(z, activation=activation)


def gate(z: Tensor, activation: Any) -> Tensor:
    """`act(g) * u` of `[g | u] = z`, an op of its own."""
    if activation == "silu":
        return silu_mul_packed(z)
    return gelu_mul_packed(z, activation=activation)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Activation | None = None,
    residual: Tensor | None = None,
    precision: Precision = "ieee",
    config: GemmConfig | Invariant | None = None,
) -> Tensor:
    """`act(x @ weight^T + bias) + residual` in one kernel, with float32 sums, rounded once.

    Args:
        x: `(..., K)`, float32, float16 or bfloat16. Any strides; copied only where the leading dimensions can't be
            taken as one.
        weight: `(N, K)` of x's dtype, as `torch.nn.Linear` keeps it. Any strides.
        bias: `(N,)`, of x's dtype or float32.
        activation: `"silu"`, `"gelu"` or `"gelu_tanh"`. Where a gradient is wanted, its argument is rounded to x's
            dtype, kept for the backward, and the activation is a second kernel.
        residual: `(..., N)` of x's dtype, added last.
        precision, config: as in `matmul`; config may also be "invariant": one kernel, tile and order of the sum for
            any number of rows, so that a row of the result has the same bits whatever the other rows of x are, and
            however many. It is slower. On another model of GPU the bits may be others.

    Returns:
        `(..., N)` in x's dtype, contiguous. Under `torch.autocast` all tensors are cast to its dtype first, as those of
        `torch.nn.functional.linear` are.

    Raises:
        ValueError: the weight, bias or residual has not the shape above, activation or precision is another word, the
            configuration can't be launched (the field and the reason are named), a device is the CPU without the
            interpreter, or devices differ.
        TypeError: dtypes differ, or are not one of the three.
    """
    if dispatch.autocast_dtype(x) is not None:
        x, weight, bias, residual = dispatch.autocast(x, weight, bias, residual)  # type: ignore[assignment]
    how = () if config is None else dispatch.encoded("linear", config, invariant=True)
    if activation is not None and dispatch.will_differentiate(x, weight, bias):
        library.check_tensors("linear", x=x, weight=weight)
        _check("linear", x, weight, bias, residual, activation, False, precision)
        return activated(linear_op(x, weight, bias, None, "", precision, how), activation, residual)
    return linear_op(x, weight, bias, residual, activation or "", precision, how)


def gated_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Activation = "silu",
    precision: Precision = "ieee",
    config: GemmConfig | Invariant | None = None,
) -> Tensor:
    """`act(g) * u` of `[g | u] = x @ weight^T + bias`, in one kernel: the 2N columns of g and u are never written.

    Args:
        x: `(..., K)`, float32, float16 or bfloat16.
        weight: `(2N, K)` of x's dtype: the rows of the gate first, then those of up, as
            `torch.cat((gate_proj.weight, up_proj.weight))`.
        bias: `(2N,)`, of x's dtype or float32.
        activation: the gate's; where a gradient is wanted, g and u are rounded to x's dtype and kept.
        precision: as in `matmul`.
        config: as in `matmul`; `block_n` counts columns of the output, for each of which there are two sums. Or
            "invariant", as in `linear`.

    Returns:
        `(..., N)` in x's dtype, contiguous. Under `torch.autocast` as `linear`.

    Raises:
        ValueError: as `linear`, or the weight has an odd number of rows.
        TypeError: as `linear`.
    """
    if dispatch.autocast_dtype(x) is not None:
        x, weight, bias = dispatch.autocast(x, weight, bias)  # type: ignore[assignment]
    how = () if config is None else dispatch.encoded("gated_linear", config, invariant=True)
    if dispatch.will_differentiate(x, weight, bias):
        library.check_tensors("gated_linear", x=x, weight=weight)
        _check("gated_linear", x, weight, bias, None, activation, True, precision)
        return gate(linear_op(x, weight, bias, None, "", precision, how), activation)
    return gated_op(x, weight, bias, activation, precision, how)
