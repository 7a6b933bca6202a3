"""What the forward and the backward kernels share: the rounding, and the checks of the arguments."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from rooftile import library

import triton  # isort: skip
import triton.language as tl  # isort: skip

Rounding = Literal["llama", "gemma", "none"]
ROUNDINGS = ("llama", "gemma", "none")


@triton.jit
def scale(xhat, weight, OFFSET: tl.constexpr, DTYPE: tl.constexpr, CAST_FIRST: tl.constexpr):
    """xhat * (weight + offset), with Llama's cast to the model's dtype between the two or without."""
    if CAST_FIRST:
        xhat = xhat.to(DTYPE).to(tl.float32)
    if OFFSET != 0.0:  # the compiler may not leave out a sum with zero, which makes -0 of 0
        weight += OFFSET
    return xhat * weight


def check(
    op: str,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    offset: float,
    rounding: str,
) -> None:
    library.check_floating(op, x=x, weight=weight)
    for name, number in (("eps", eps), ("offset", offset)):
        if not isinstance(number, (float, int)):
            raise TypeError(f"{op}: {name} is a {type(number).__name__}, expected a number")
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"{op}: x has shape {tuple(x.shape)}, expected at least one dimension, the last of 1 or more")
    if residual is not None:
        library.check_same(op, "residual", residual, "x", x)
    if weight is not None and weight.shape != x.shape[-1:]:
        raise ValueError(
            f"{op}: weight has shape {tuple(weight.shape)}, expected ({x.shape[-1]},) to match x's last dimension"
        )
    if rounding not in ROUNDINGS:
        raise ValueError(f"{op}: rounding is {rounding!r}, expected one of {', '.join(ROUNDINGS)}")
