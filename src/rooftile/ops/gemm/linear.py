"""`linear` and `gated_linear`: a product with the weight of nn.Linear and what follows it, and their gradients.

    z = x @ weight^T + bias,   out = act(z) + residual,   or gated: [g | u] = z, out = act(g) * u
    dz = dy * act'(z),   dx = dz @ weight,   dweight = dz^T @ x,   dbias = sum over rows of dz,   dresidual = dy

Where a gradient will be asked for, an activation's argument z is written, in x's dtype, and the activation is a kernel
of its own: the backward needs z, and to compute it again would be a product more.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from rooftile import library
from rooftile.ops.bias_activation import bias_gelu, bias_silu
from rooftile.ops.gated import gelu_mul_packed, silu_mul_packed
from rooftile.ops.gemm.column_sum import activate_add, column_sum
from rooftile.ops.gemm.common import (
    as_rows,
    autocast,
    check_dtype,
    check_precision,
    encoded,
    product,
    refuse_symbols,
)
from rooftile.ops.gemm.config import Activation, MatmulConfig, Precision
from rooftile.primitives.activations import check_activation


def _check(
    op: str, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str, gated: bool
) -> tuple[int, ...]:
    """The shape of the result."""
    library.check_floating(op, x=x, weight=weight, bias=bias, residual=residual)
    if activation or gated:
        check_activation(op, activation)
    if x.dim() == 0:
        raise ValueError(f"{op}: x has shape (), expected at least one dimension")
    check_dtype(op, "weight", weight, "x", x)
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        rows = "2N" if gated else "N"
        raise ValueError(
            f"{op}: weight has shape {tuple(weight.shape)}, expected ({rows}, {x.shape[-1]}) to match x's last "
            "dimension"
        )
    if gated and weight.shape[0] % 2:
        raise ValueError(f"{op}: weight has {weight.shape[0]} rows, expected an even number: [gate | up]")
    if bias is not None:
        if bias.shape != weight.shape[:1]:
            raise ValueError(
                f"{op}: bias has shape {tuple(bias.shape)}, expected ({weight.shape[0]},) to match the weight's rows"
            )
        if bias.dtype not in (x.dtype, torch.float32):
            raise TypeError(f"{op}: bias has dtype {bias.dtype}, expected {x.dtype} to match x, or torch.float32")
    shape = (*x.shape[:-1], weight.shape[0] // 2 if gated else weight.shape[0])
    if residual is not None:
        if residual.shape != shape:
            raise ValueError(
                f"{op}: residual has shape {tuple(residual.shape)}, expected {tuple(shape)} to match the result"
            )
        check_dtype(op, "residual", residual, "x", x)
    return shape


def _allocate(x: Tensor, weight: Tensor, shape: tuple[int, ...], keep: bool) -> tuple[Tensor, Tensor]:
    """Memory for the result and for z, which is empty where it is not kept."""
    z_shape = (*x.shape[:-1], weight.shape[0]) if keep else (0,)
    return tuple(torch.empty(s, dtype=x.dtype, device=x.device) for s in (shape, z_shape))  # type: ignore[return-value]


def _activated(z: Tensor, activation: Any, gated: bool) -> Tensor:
    if activation == "silu":
        return silu_mul_packed(z) if gated else bias_silu(z)
    return gelu_mul_packed(z, activation=activation) if gated else bias_gelu(z, activation=activation)


def _apply(
    op: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    gated: bool,
    precision: str,
    config: str,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    refuse_symbols(*x.shape, *weight.shape)
    shape = _check(op, x, weight, bias, residual, activation, gated)
    check_precision(op, precision)
    keep = keep and activation != ""
    if math.prod(shape) == 0:
        return _allocate(x, weight, shape, keep)
    rows = as_rows(x)
    bias = None if bias is None else bias.contiguous()
    if keep and residual is None:  # the activation's kernel has memory of its own for the result
        z = _allocate(x, weight, (0,), keep)[1]
        product(op, rows, weight, z.view(-1, weight.shape[0]), bias, precision=precision, config=config)
        return _activated(z, activation, gated), z
    out, z = _allocate(x, weight, shape, keep)
    if residual is not None:
        residual = library.as_rows(residual)
    if not keep:
        product(op, rows, weight, out.view(-1, shape[-1]), bias, residual,
                activation=activation, gated=gated, precision=precision, config=config)  # fmt: skip
        return out, z
    assert residual is not None
    flat = z.view(-1, weight.shape[0])
    product(op, rows, weight, flat, bias, precision=precision, config=config)
    activate_add(flat, residual, out.view(flat.shape), activation)
    return out, z


def _slopes(dy: Tensor, z: Tensor, activation: str, gated: bool) -> Tensor:
    """dz, by the backward of the activation's own op."""
    ops = torch.ops.rooftile
    if not gated:
        return ops.bias_activation_backward(dy, z, None, activation, True, False)[0]
    if activation == "silu":
        return ops.silu_mul_packed_backward(dy, z, activation)
    return ops.gelu_mul_packed_backward(dy, z, activation)


def _check_backward(
    dy: Tensor, x: Tensor | None, weight: Tensor | None, bias: Tensor | None, z: Tensor | None, activation: str
) -> int:
    """How many columns dz has."""
    op = "linear_backward"
    library.check_floating(op, dy=dy, x=x, weight=weight, bias=bias, z=z)
    if activation:
        check_activation(op, activation)
        if z is None:
            raise ValueError(f"{op}: z is None, expected what the activation was taken of")
    n = dy.shape[-1] if z is None else z.shape[-1]
    for name, tensor, leading in (("x", x, dy.shape[:-1]), ("z", z, dy.shape[:-1])):
        if tensor is not None and tensor.shape[:-1] != leading:
            raise ValueError(f"{op}: {name} has shape {tuple(tensor.shape)}, expected {tuple(leading)} before the last")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.shape[0] != n:
            raise ValueError(f"{op}: {name} has shape {tuple(tensor.shape)}, expected {n} as its first dimension")
    return n


def _gradients(
    dy: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    z: Tensor | None,
    activation: str,
    gated: bool,
    precision: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for them; one that is not asked for is empty."""
    n = _check_backward(dy, x, weight, bias, z, activation)

    def memory(shape: tuple[int, ...] | None, dtype: torch.dtype) -> Tensor:
        return torch.empty((0,) if shape is None else shape, dtype=dtype, device=dy.device)

    return (
        memory(None if weight is None else (*dy.shape[:-1], weight.shape[1]), dy.dtype),
        memory(None if x is None else (n, x.shape[-1]), dy.dtype),
        memory(None if bias is None else (n,), dy.dtype if bias is None else bias.dtype),
    )


def _differentiate(
    dy: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    z: Tensor | None,
    activation: str,
    gated: bool,
    precision: str,
) -> tuple[Tensor, Tensor, Tensor]:
    op = "linear_backward"
    refuse_symbols(*dy.shape)
    dx, dw, db = _gradients(dy, x, weight, bias, z, activation, gated, precision)
    dz = as_rows(dy if z is None else _slopes(dy, z, activation, gated))
    if weight is not None and dx.numel():
        product(op, dz, weight.mT, as_rows(dx), precision=precision)
    if x is not None and dw.numel():
        product(op, dz.mT, as_rows(x).mT, dw, precision=precision)
    if bias is not None:
        column_sum(dz, db)
    return dx, dw, db


_backward_op = library.define(
    "linear_backward(Tensor dy, Tensor? x, Tensor? weight, Tensor? bias, Tensor? z, str activation, bool gated, "
    "str precision) -> (Tensor, Tensor, Tensor)",
    launch=_differentiate,
    fake=_gradients,
)


def _save(ctx, inputs, outputs, *, gated: bool) -> None:
    """Of x, weight and bias each is kept where a gradient needs it: a frozen weight keeps no x."""
    x, weight, bias = inputs[:3]
    needs_dx, needs_dw, needs_db = ctx.needs_input_grad[1:4]
    z = outputs[1]
    ctx.gated = gated
    ctx.activation, ctx.precision = (inputs[3], "ieee") if gated else inputs[4:6]
    needs_z = bool(ctx.activation) and (needs_dx or needs_dw or needs_db)
    if not needs_z:  # else its edge is what a derivative of the derivative finds, and is refused by
        ctx.mark_non_differentiable(z)
    ctx.save_for_backward(
        x if needs_dw else None,
        weight if needs_dx else None,
        bias if needs_db else None,
        z if needs_z else None,
    )


def _backward(ctx, dy: Tensor | None, dz: Tensor | None) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad[1:]
    grads: list[Tensor | None] = [None] * len(needs)
    *saved, z = ctx.saved_tensors
    found = []
    if dy is not None and any(needs[:3]):
        found.append(_backward_op(dy, *saved, z, ctx.activation, ctx.gated, ctx.precision))
    if dz is not None and ctx.activation:  # the op's own callers may use z too
        found.append(_backward_op(dz, *saved, None, "", False, ctx.precision))
    if found:
        sums = found[0] if len(found) == 1 else [a + b for a, b in zip(*found, strict=True)]
        grads[:3] = (g if need else None for g, need in zip(sums, needs[:3], strict=True))
    if not ctx.gated and needs[3]:
        grads[3] = dy
    return tuple(grads)


def _check_kept(op: str, inputs: tuple[Any, ...], activation: str, keep: bool) -> None:
    """The gradients of x, weight and bias need z; that of the residual does not."""
    if activation and not keep and any(t is not None and t.requires_grad for t in inputs[:3]):
        raise ValueError(f"{op}: keep is False, expected True where an activation is to be differentiated")


def _launch_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    precision: str,
    config: str,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    return _apply("linear", x, weight, bias, residual, activation, False, precision, config, keep)


def _fake_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    precision: str,
    config: str,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    shape = _check("linear", x, weight, bias, residual, activation, False)
    check_precision("linear", precision)
    return _allocate(x, weight, shape, keep and activation != "")


linear_op = library.define(
    "linear(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, str activation, str precision, str config, "
    "bool keep) -> (Tensor, Tensor)",
    launch=_launch_linear,
    fake=_fake_linear,
    autograd=library.Autograd(
        lambda ctx, inputs, outputs: _save(ctx, inputs, outputs, gated=False),
        _backward,
        lambda inputs: _check_kept("linear", inputs, inputs[4], inputs[7]),
    ),
)


def _launch_gated(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, config: str, keep: bool
) -> tuple[Tensor, Tensor]:
    return _apply("gated_linear", x, weight, bias, None, activation, True, "ieee", config, keep)


def _fake_gated(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, config: str, keep: bool
) -> tuple[Tensor, Tensor]:
    shape = _check("gated_linear", x, weight, bias, None, activation, True)
    return _allocate(x, weight, shape, keep)


gated_linear_op = library.define(
    "gated_linear(Tensor x, Tensor weight, Tensor? bias, str activation, str config, bool keep) -> (Tensor, Tensor)",
    launch=_launch_gated,
    fake=_fake_gated,
    autograd=library.Autograd(
        lambda ctx, inputs, outputs: _save(ctx, inputs, outputs, gated=True),
        _backward,
        lambda inputs: _check_kept("gated_linear", inputs, inputs[3], inputs[5]),
    ),
)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Activation | None = None,
    residual: Tensor | None = None,
    precision: Precision = "ieee",
    config: MatmulConfig | None = None,
) -> Tensor:
    """`act(x @ weight^T + bias) + residual` in one kernel, with float32 sums, rounded once.

    Args:
        x: `(..., K)`, float32, float16 or bfloat16. Any strides; copied only where the leading dimensions can't be
            taken as one.
        weight: `(N, K)` of x's dtype, as `torch.nn.Linear` keeps it. Any strides.
        bias: `(N,)`, of x's dtype or float32.
        activation: `"silu"`, `"gelu"` or `"gelu_tanh"`. Where gradients will be asked for, its argument is rounded to
            x's dtype, kept for the backward, and the activation computed by a second kernel.
        residual: `(..., N)` of x's dtype, added last.
        precision, config: as in `matmul`.

    Returns:
        `(..., N)` in x's dtype, contiguous. Under `torch.autocast` all tensors are cast to its dtype first, as those of
        `torch.nn.functional.linear` are.

    Raises:
        ValueError: the weight, bias or residual has not the shape above, activation or precision is another word, the
            configuration can't be launched (the field and the reason are named), a device is the CPU without the
            interpreter, or devices differ.
        TypeError: dtypes differ, or are not one of the three.
    """
    x, weight, bias, residual = autocast(x, weight, bias, residual)  # type: ignore[assignment]
    keep = activation is not None and will_differentiate(x, weight, bias)
    return linear_op(x, weight, bias, residual, activation or "", precision, encoded("linear", config), keep)[0]


def gated_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Activation = "silu",
    config: MatmulConfig | None = None,
) -> Tensor:
    """`act(g) * u` of `[g | u] = x @ weight^T + bias`, in one kernel: the 2N columns of g and u are never written.

    Args:
        x: `(..., K)`, float32, float16 or bfloat16.
        weight: `(2N, K)` of x's dtype: the rows of the gate first, then those of up, as
            `torch.cat((gate_proj.weight, up_proj.weight))`.
        bias: `(2N,)`, of x's dtype or float32.
        activation: the gate's; where gradients will be asked for, g and u are rounded to x's dtype and kept.
        config: as in `matmul`; `block_n` counts columns of the output, for each of which there are two sums.

    Returns:
        `(..., N)` in x's dtype, contiguous. Under `torch.autocast` as `linear`.

    Raises:
        As `linear`; a weight of an odd number of rows is a ValueError.
    """
    x, weight, bias = autocast(x, weight, bias)  # type: ignore[assignment]
    keep = will_differentiate(x, weight, bias)
    return gated_linear_op(x, weight, bias, activation, encoded("gated_linear", config), keep)[0]


def will_differentiate(*tensors: Tensor | None) -> bool:
    if not torch.is_grad_enabled():
        return False
    return any(isinstance(t, Tensor) and t.requires_grad for t in tensors)
