"""Softmax of scaled scores, causal or masked or neither.

    y = exp(s - max(s)) / sum(exp(s - max(s))),   s = scale * x where x is kept, else -inf

over the last dimension. Bytes: the forward reads x and writes y, and reads a mask of one byte an element, or less if it
is broadcast. The backward needs only y: it reads dy and y and writes dx:

    dx = scale * y * (dy - sum(dy * y))

A causal row reads only the columns that it keeps, rounded up to whole vectors, forward and backward. It writes all.
"""

from __future__ import annotations

from torch import Tensor

from rooftile import library
from rooftile.ops.softmax import backward, forward

__all__ = ["softmax"]


def _save(ctx, inputs, output) -> None:
    _, _, ctx.scale, ctx.causal = inputs
    ctx.save_for_backward(output)


def _backward(ctx, dy: Tensor | None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 4
    (y,) = ctx.saved_tensors
    return backward.op(dy, y, ctx.scale, ctx.causal), None, None, None


def _splits(x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> range:
    """The dimensions that may be sharded: not those along which the mask varies, nor that of causal queries."""
    kept = 0 if mask is None else max((mask.dim() - d for d in range(mask.dim()) if mask.shape[d] != 1), default=0)
    return range(x.dim() - max(1 + causal, kept))


_op = library.define(
    "softmax(Tensor x, Tensor? mask, float scale, bool causal) -> Tensor",
    prepare=forward.prepare,
    fake=forward.fake,
    autograd=library.Autograd(_save, _backward),
    rows=library.Rows(("x",), _splits),
)


def softmax(x: Tensor, *, scale: float = 1.0, causal: bool = False, mask: Tensor | None = None) -> Tensor:
    """Softmax of `scale * x` over the last dimension, computed in float32 and rounded once.

    Args:
        x: `(..., S)`, float32, float16 or bfloat16. Any strides; copied only if the leading dimensions cannot be viewed
            as one, or if the last stride is not 1.
        scale: x is multiplied by it in float32. Its magnitude is below 2^127, and counts as 0 below 8.15e-39. Each
            value is compiled into its own kernels.
        causal: x is `(..., T, S)`, and row i keeps the columns j <= i + S - T. The last row keeps all, as in attention
            over keys that began before the queries.
        mask: bool, of a shape that broadcasts to x's; True keeps an element, as in
            `torch.nn.functional.scaled_dot_product_attention`. It is read in place, and expanded to x's shape only if
            its leading dimensions cannot be viewed as three. With `causal`, an element is kept if both keep it.

    Returns:
        y with the shape and dtype of x, contiguous. Autocast does not change the dtype.

        A row that keeps nothing, or nothing but -inf, is 0, and so is its gradient. A kept NaN or +inf (of `scale * x`)
        makes its row NaN, and no other row. Elements that are not kept may hold anything.

        Differences within a row are taken before they are scaled, so they must be finite in float32: with 3e38 and
        -3e38 in a row, the lesser becomes 0 whatever the scale, even 1e-38.

    Raises:
        ValueError: x has no dimension, or with `causal` fewer than two; the mask's shape does not broadcast to x's;
            the scale is not finite, or too large; a device is the CPU without the interpreter, or devices differ.
        TypeError: x's dtype is not one of the three, or the mask's is not bool.
    """
    return _op(x, mask, scale, causal)
