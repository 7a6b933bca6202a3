"""A residual add and the RMSNorm after it, in one pass: `u = x + residual`, `y = rms_norm(u)`.

It reads two tensors and writes two; the unfused pair reads three and writes two. The kernels are those of
`ops/rms_norm/`, with the residual enabled. Both outputs carry gradients, and x and residual receive the same one:

    dx = dresidual = du + (the derivative of rms_norm at u, applied to dy)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import overload

import torch
from torch import Tensor

from rooftile import library
from rooftile.ops.rms_norm import backward, forward
from rooftile.ops.rms_norm.forward import Rounding, check
from rooftile.quantize import Quantize, check_quantize


def _prepare(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float, rounding: str
) -> Callable[..., tuple[Tensor, Tensor]]:
    start = forward.prepare("add_rms_norm", x, residual, weight, eps, offset, rounding)
    shape, strides, dtype, device = x.shape, library.contiguous_strides(x.shape), x.dtype, x.device

    def run(x: Tensor, residual: Tensor, weight: Tensor | None, *_: object) -> tuple[Tensor, Tensor]:
        y = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        u = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        start(x, residual, weight, y, u, None)
        return y, u

    return run


def _fake(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float, rounding: str
) -> tuple[Tensor, Tensor]:
    check("add_rms_norm", x, residual, weight, eps, offset, rounding)
    return (
        torch.empty(x.shape, dtype=x.dtype, device=x.device),
        torch.empty(x.shape, dtype=x.dtype, device=x.device),
    )


def _save(ctx, inputs, outputs) -> None:
    _, _, weight, *ctx.mode = inputs
    ctx.save_for_backward(outputs[1], weight)


def _backward(ctx, dy: Tensor | None, du: Tensor | None) -> tuple[Tensor | None, ...]:
    u, weight = ctx.saved_tensors
    needs_x, needs_residual, needs_dw = ctx.needs_input_grad[1:4]
    needs_dx = needs_x or needs_residual
    if dy is None:
        dx, dw = du, None
    else:
        dx, dw = backward.op(dy, du, u, weight, *ctx.mode, needs_dx, needs_dw)
    return dx if needs_x else None, dx if needs_residual else None, dw if needs_dw else None, None, None, None


_op = library.define(
    "add_rms_norm(Tensor x, Tensor residual, Tensor? weight, float eps, float offset, str rounding) "
    "-> (Tensor, Tensor)",
    prepare=_prepare,
    fake=_fake,
    autograd=library.Autograd(_save, _backward),
    rows=library.Rows(("x", "residual")),
)


@overload
def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = ...,
    *,
    eps: float = ...,
    offset: float = ...,
    rounding: Rounding = ...,
    quantize: None = ...,
) -> tuple[Tensor, Tensor]: ...


@overload
def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = ...,
    *,
    eps: float = ...,
    offset: float = ...,
    rounding: Rounding = ...,
    quantize: Quantize,
) -> tuple[Tensor, Tensor, Tensor]: ...


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    rounding: Rounding = "llama",
    quantize: Quantize | None = None,
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """`u = x + residual`, rounded to x's dtype, and `y = rms_norm(u, weight)`, in one pass.

    Args:
        x: `(..., N)`, float32, float16 or bfloat16.
        residual: the shape and dtype of x.
        weight, eps, offset, rounding, quantize: as in `rooftile.rms_norm`.

    Returns:
        `(y, u)`, both with the shape and dtype of x, contiguous; gradients flow through both. With `quantize`
        `(y, u, scale)`: y in the quantized dtype, the same u, the scales in float32; no gradients.

    Raises:
        ValueError, TypeError: as `rooftile.rms_norm`, or if residual does not match x.
    """
    if quantize is not None:
        check_quantize("add_rms_norm", quantize)
        library.check_tensors("add_rms_norm", residual=residual)  # which the op does without
        q = quantize
        mode = (eps, offset, rounding, q.dtype_name, q.per, q.group_size)
        y, u, scale = forward.quantized_op(x, residual, weight, q.scale, *mode)
        return y, u, scale if q.scale is None else q.scale
    return _op(x, residual, weight, eps, offset, rounding)
