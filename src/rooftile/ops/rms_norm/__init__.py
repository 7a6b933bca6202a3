"""RMSNorm, alone and with the residual add in front of it.

    u = x + residual                                  (add_rms_norm only)
    y = u * rstd * (weight + offset),   rstd = 1 / sqrt(mean(u^2) + eps)

over the last dimension (Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467, eq. 4).

Bytes: forward reads x and writes y; with the residual it reads two tensors and writes two. The backward reads dy and x,
recomputes rstd from the row that it holds anyway (so nothing is saved beside the input) and writes dx:

    dx = rstd * (g - xhat * mean(g * xhat)),  g = dy * (weight + offset),  xhat = u * rstd
    dweight = sum over rows of dy * xhat

dweight is accumulated in float32 registers by a grid that stays on the chip, and reduced in a fixed order: the result
is the same on every run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import overload

import torch
from torch import Tensor

from rooftile import library
from rooftile.ops.rms_norm import backward, forward, quantized
from rooftile.ops.rms_norm.common import ROUNDINGS, Rounding, check
from rooftile.quantize import Quantize, check_quantize

__all__ = ["ROUNDINGS", "Rounding", "rms_norm"]


def _prepare(x: Tensor, weight: Tensor | None, eps: float, offset: float, rounding: str) -> Callable[..., Tensor]:
    start = forward.prepare("rms_norm", x, None, weight, eps, offset, rounding)
    shape, strides, dtype, device = x.shape, library.contiguous_strides(x.shape), x.dtype, x.device

    def run(x: Tensor, weight: Tensor | None, *_: object) -> Tensor:
        y = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        start(x, None, weight, y, None)
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
        x: `(..., N)`, float32, float16 or bfloat16. Any strides; copied only where the leading dimensions can't be
            taken as one, or the last stride is not 1.
        weight: `(N,)`, or None for no weight (and then no offset).
        eps: added to the mean of squares.
        offset: added to the weight in float32; 1.0 for Gemma.
        rounding: where x's dtype is rounded to. `"llama"`: after the normalisation, and again after the weight
            (Llama, Qwen, Mistral, T5). `"gemma"`: once, at the end, as Gemma writes it; `"none"`: the same single cast,
            as `torch.nn.functional.rms_norm` does.
        quantize: ask for y in 8 bits with its scales, as `rooftile.Quantize` says, and no gradients. What is quantised
            is the float32 result: of the roundings above, Llama's before the weight alone is kept.

    Returns:
        y with the shape and dtype of x, contiguous. Statistics are float32. Autocast does not change the dtype. With
        `quantize` `(y, scale)`, both contiguous: y in the quantised dtype, and the scales in float32.

    Raises:
        ValueError: the weight's shape is not x's last dimension, a device is the CPU without the interpreter,
            devices differ, or a quantised result is asked for of an input that requires grad, in grad mode.
        TypeError: a dtype is not one of the three.
    """
    if quantize is not None:
        check_quantize("rms_norm", quantize)
        return quantized.rms_norm(x, weight, eps, offset, rounding, quantize)
    return _op(x, weight, eps, offset, rounding)
