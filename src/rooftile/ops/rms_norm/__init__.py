"""RMSNorm, alone and with a residual add before it.

    u = x + residual                                  (add_rms_norm only)
    y = u * rstd * (weight + offset),   rstd = 1 / sqrt(mean(u^2) + eps)

over the last dimension (Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467, eq. 4).

Bytes: the forward reads x and writes y; with the residual it reads two tensors and writes two. The backward reads dy
and x and writes dx. It recomputes rstd from the row that it holds, so nothing but the input is saved:

    dx = rstd * (g - xhat * mean(g * xhat)),  g = dy * (weight + offset),  xhat = u * rstd
    dweight = sum over rows of dy * xhat

Each program of a persistent grid accumulates dweight in float32 registers. The partial sums are added in a fixed
order, so the result is the same on every run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import overload

import torch
from torch import Tensor

from rooftile import library
from rooftile.ops.rms_norm import backward, forward
from rooftile.ops.rms_norm.forward import ROUNDINGS, Rounding, check
from rooftile.quantize import Quantize, check_quantize

__all__ = ["ROUNDINGS", "Rounding", "rms_norm"]


def _prepare(x: Tensor, weight: Tensor | None, eps: float, offset: float, rounding: str) -> Callable[..., Tensor]:
    start = forward.prepare("rms_norm", x, None, weight, eps, offset, rounding)
    shape, strides, dtype, device = x.shape, library.contiguous_strides(x.shape), x.dtype, x.device

    def run(x: Tensor, weight: Tensor | None, *_: object) -> Tensor:
        y = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        start(x, None, weight, y, None, None)
        return y

    return run


def _fake(x: Tensor, weight: Tensor | None, eps: float, offset: float, rounding: str) -> Tensor:
    check("rms_norm", x, None, weight, eps, offset, rounding)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _save(ctx, inputs, output) -> None:
    x, weight, *ctx.mode = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx, dy: Tensor | None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 5
    x, weight = ctx.saved_tensors
    needs_dx, needs_dw = ctx.needs_input_grad[1:3]
    dx, dw = backward.op(dy, None, x, weight, *ctx.mode, needs_dx, needs_dw)
    return dx if needs_dx else None, dw if needs_dw else None, None, None, None


_op = library.define(
    "rms_norm(Tensor x, Tensor? weight, float eps, float offset, str rounding) -> Tensor",
    prepare=_prepare,
    fake=_fake,
    autograd=library.Autograd(_save, _backward),
    rows=library.Rows(("x",)),
)


@overload
def rms_norm(
    x: Tensor,
    weight: Tensor | None = ...,
    *,
    eps: float = ...,
    offset: float = ...,
    rounding: Rounding = ...,
    quantize: None = ...,
) -> Tensor: ...


@overload
def rms_norm(
    x: Tensor,
    weight: Tensor | None = ...,
    *,
    eps: float = ...,
    offset: float = ...,
    rounding: Rounding = ...,
    quantize: Quantize,
) -> tuple[Tensor, Tensor]: ...


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    rounding: Rounding = "llama",
    quantize: Quantize | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """RMSNorm over the last dimension: `y = x / sqrt(mean(x^2) + eps) * (weight + offset)`.

    Args:
        x: `(..., N)`, float32, float16 or bfloat16. Any strides; copied only if the leading dimensions cannot be viewed
            as one, or if the last stride is not 1.
        weight: `(N,)`, or None for no weight; then `offset` must be 0.
        eps: added to the mean of squares.
        offset: added to the weight in float32; 1.0 for Gemma.
        rounding: where values are rounded to x's dtype. `"llama"`: after the normalization, and again after the weight
            (Llama, Qwen, Mistral, T5). `"gemma"`: once, at the end, as Gemma does; `"none"`: the same single rounding,
            as in `torch.nn.functional.rms_norm`.
        quantize: return y in 8 bits with its scales, see `rooftile.Quantize`; it has no gradients. The float32 result
            is quantized. Of the roundings above only Llama's first one, before the weight, applies.

    Returns:
        y with the shape and dtype of x, contiguous. Statistics are float32. Autocast does not change the dtype. With
        `quantize` `(y, scale)`, both contiguous: y in the quantized dtype, the scales in float32.

    Raises:
        ValueError: the shape of weight is not `(N,)`, there is an offset without a weight, devices differ, a device is
            the CPU without the interpreter, or an input of a quantized result needs a gradient.
        TypeError: a dtype is not one of the three.
    """
    if quantize is not None:
        check_quantize("rms_norm", quantize)
        q = quantize
        mode = (eps, offset, rounding, q.dtype_name, q.per, q.group_size)
        y, _, scale = forward.quantized_op(x, None, weight, q.scale, *mode)
        return y, scale if q.scale is None else q.scale
    return _op(x, weight, eps, offset, rounding)
