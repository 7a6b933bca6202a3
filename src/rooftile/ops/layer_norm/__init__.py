"""LayerNorm over the last dimension (Ba, Kiros and Hinton 2016, https://arxiv.org/abs/1607.06450).

    y = (x - mean) * rstd * weight + bias,   rstd = 1 / sqrt(var + eps),   var = mean((x - mean)^2)

Bytes: forward reads x and writes y. The backward reads dy and x and writes dx:

    dx = rstd * (g - mean(g) - xhat * mean(g * xhat)),  g = dy * weight,  xhat = (x - mean) * rstd
    dweight = sum over rows of dy * xhat,  dbias = sum over rows of dy

mean and rstd are those that the forward kept, 12 bytes a row, where it saw that gradients will be asked for: to
compute them again would make a row wait for two sums more, which cost a tenth of the speed and more on an H200.

dweight and dbias are accumulated in float32 registers by a grid that stays on the chip, and reduced in a fixed order:
the result is the same on every run.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile import library
from rooftile.ops.layer_norm import backward, forward

__all__ = ["layer_norm"]


def _save(ctx, inputs, outputs) -> None:
    x, weight, bias, _, keeps_stats = inputs
    if not keeps_stats:
        raise ValueError("layer_norm: keeps_stats is False, expected True where gradients are asked for")
    ctx.mark_non_differentiable(outputs[1])
    ctx.save_for_backward(x, weight, bias, outputs[1])


def _backward(ctx, dy: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 5
    x, weight, bias, stats = ctx.saved_tensors
    needs = ctx.needs_input_grad[1:4]
    grads = backward.op(dy, x, weight, bias, stats, *needs)
    return *(grad if needed else None for grad, needed in zip(grads, needs, strict=True)), None, None


_op = library.define(
    "layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps, bool keeps_stats) -> (Tensor, Tensor)",
    launch=forward.launch,
    fake=forward.fake,
    autograd=library.Autograd(_save, _backward),
)


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5) -> Tensor:
    """LayerNorm over the last dimension: `y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias`.

    `var` is the mean of squares about the mean, without Bessel's correction, as in `torch.nn.functional.layer_norm`.

    Args:
        x: `(..., N)`, float32, float16 or bfloat16. Any strides; copied only where the leading dimensions can't be
            taken as one, or the last stride is not 1.
        weight: `(N,)`, or None for no weight. Any of the three dtypes: float32 over a 16-bit x is usual.
        bias: `(N,)`, or None for no bias; with or without a weight, of any of the three dtypes.
        eps: added to the variance.

    Returns:
        y with the shape and dtype of x, contiguous, rounded once. Statistics are float32. Autocast does not change the
        dtype.

    Raises:
        ValueError: a weight's or bias's shape is not x's last dimension, a device is the CPU without the interpreter,
            or devices differ.
        TypeError: a dtype is not one of the three.
    """
    learns = torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in (x, weight, bias))
    return _op(x, weight, bias, eps, learns)[0]
