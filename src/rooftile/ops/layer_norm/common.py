"""What the forward and the backward kernels share: the statistics of a row, and the checks of the arguments.

The mean that a sum and a division give is off by a rounding of its own size, which is no longer small where a row's
mean is large against its spread, and moves a constant row off its bias. So what the mean has missed, `rest`, is summed
with the squares: it costs an addition an element and no wait more, and goes into xhat's multiplication:

    xhat = (x - mean) * rstd - rest * rstd
"""

from __future__ import annotations

from torch import Tensor

from rooftile import library, runtime  # noqa: F401  # before Triton: runtime fixes the mode of the process

import triton  # isort: skip
import triton.language as tl  # isort: skip


STATS = 3  # numbers that are kept of a row: mean, 1/std, rest/std
STRIDE = tl.constexpr(STATS)


@triton.jit
def centre(x, mask, count, AXIS: tl.constexpr):
    """The mean of the `count` elements of x under the mask, x less the mean, `rest`, and the sum of squares about both.

    Over the second axis of a tile the statistics keep that axis.
    """
    mean = tl.sum(x, axis=AXIS, keep_dims=AXIS == 1) / count
    centred = tl.where(mask, x - mean, 0.0)
    rest = tl.sum(centred, axis=AXIS, keep_dims=AXIS == 1) / count
    m2 = tl.sum(centred * centred, axis=AXIS, keep_dims=AXIS == 1) - count * rest * rest
    return mean, centred, rest, m2


@triton.jit
def combine(means, m2s, counts, N: tl.constexpr):
    """The statistics of a row from those of its parts (Chan, Golub and LeVeque 1983, eq. 2.1), of any lengths."""
    mean = tl.sum(counts * means, axis=0) / N
    offsets = means - mean
    rest = tl.sum(counts * offsets, axis=0) / N
    m2 = tl.sum(m2s + counts * offsets * offsets, axis=0) - N * rest * rest
    return mean, rest, m2


@triton.jit
def inverse_std(m2, EPS: tl.constexpr, N: tl.constexpr):
    """1 / sqrt(var + eps). Rounding can leave a constant row's sum of squares just below zero."""
    return tl.rsqrt(tl.where(m2 < 0.0, 0.0, m2) / N + EPS)


def check(op: str, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 0.0) -> None:
    library.check_floating(op, x=x, weight=weight, bias=bias)
    if not isinstance(eps, (float, int)):
        raise TypeError(f"{op}: eps is a {type(eps).__name__}, expected a number")
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"{op}: x has shape {tuple(x.shape)}, expected at least one dimension, the last of 1 or more")
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None and vector.shape != x.shape[-1:]:
            raise ValueError(
                f"{op}: {name} has shape {tuple(vector.shape)}, expected ({x.shape[-1]},) to match x's last dimension"
            )
