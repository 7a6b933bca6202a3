"""Activations and their derivatives in float32, shared by all kernels.

A kernel that reads and writes two bytes an element is bound by memory on an H200 up to some 25 instructions an element,
loads, stores and conversions included. On sm_90 silu takes 9, gelu_tanh 10 and gelu 12; with libdevice's tanh and erf
they would take 29 and 32. A finite x gives a finite result, and a NaN stays NaN.
"""

from __future__ import annotations

from typing import Literal, get_args

from rooftile import runtime  # noqa: F401  # before Triton: runtime fixes the mode of the process

import triton  # isort: skip
import triton.language as tl  # isort: skip

Gelu = Literal["gelu", "gelu_tanh"]  # torch.nn.functional.gelu's approximate="none" and approximate="tanh"
GELUS: tuple[str, ...] = get_args(Gelu)
ACTIVATIONS = ("silu", *GELUS)  # values of a kernel's constant ACTIVATION


def check_activation(op: str, activation: str, accepted: tuple[str, ...] = ACTIVATIONS) -> None:
    """Raise ValueError unless the activation is one of those."""
    if activation not in accepted:
        raise ValueError(f"{op}: activation is {activation!r}, expected one of {', '.join(accepted)}")


@triton.jit
def _exp(x):
    """Two instructions. Subnormal results become zero; tl.exp takes two more instructions to keep them."""
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def silu(x):
    """x * sigmoid(x)."""
    return x / (1 + _exp(-x))


@triton.jit
def silu_with_slope(x):
    """silu(x) and its derivative, sigmoid(x) * (1 + x * (1 - sigmoid(x)))."""
    sigmoid = 1 / (1 + _exp(-x))
    y = x * sigmoid
    return y, sigmoid + y * (1 - sigmoid)


@triton.jit
def _upper_tail(a):
    """The probability that a standard normal variable exceeds a, for 0 <= a <= 15; 0 from 12 on.

    2^p(a): the logarithm of the tail is nearly a parabola, so one polynomial of degree 8 suffices; erf takes two and a
    choice between them. p is minimax over [0, 6] (Remez exchange) with p(0) = -1, for the error in units of 1e-8, or of
    3e-5 of the tail where that is less. Computed in float32 the error is at most 1.2e-7. Relative to the tail it is at
    most 4e-4 up to 5.5 and 2e-3 up to 6, where 1 + erf would have no correct digit; beyond 6 it is below 1e-11.
    """
    p = a * -8.99902716e-07 + 1.55380094e-05
    p = p * a - 7.1416187e-05
    p = p * a - 0.000412427384
    p = p * a + 0.00741194235
    p = p * a - 0.0527212918
    p = p * a - 0.459142774
    p = p * a - 1.15111125
    return tl.exp2(p * a - 1)


@triton.jit
def _clamped_abs(x):
    """min(|x|, 15). At 15 tail and density are zero in float32, and their products with it stay finite."""
    return tl.minimum(tl.abs(x), 15.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def gelu(x):
    """x * Phi(x), as max(x, 0) - |x| * (1 - Phi(|x|)): 1 + erf(x) would cancel where x is far below zero."""
    a = _clamped_abs(x)
    return tl.maximum(x, 0.0) - a * _upper_tail(a)


@triton.jit
def gelu_with_slope(x):
    """gelu(x) and its derivative, Phi(x) + x * phi(x), which is 1 minus that of -x."""
    a = _clamped_abs(x)
    tail = _upper_tail(a)
    below = tail - a * 0.3989422804014327 * tl.exp2(a * a * -0.7213475204444817)
    return tl.maximum(x, 0.0) - a * tail, tl.where(x < 0, below, 1 - below)


@triton.jit
def _exp_minus_2u(x, square):
    """exp(-2u) with u = sqrt(2 / pi) * (x + 0.044715 * x^3) and square = x^2. Both factors include 2 * log2(e)."""
    return tl.exp2(x * (-2.302208198144325 - 0.1029432395800235 * square))


@triton.jit
def gelu_tanh(x):
    """x / 2 * (1 + tanh(u)), as x * sigmoid(2u)."""
    return x / (1 + _exp_minus_2u(x, x * x))


@triton.jit
def gelu_tanh_with_slope(x):
    """gelu_tanh(x) and its derivative, s + x * s * (1 - s) * 2u' with s = sigmoid(2u), which is 1 minus that of -x.

    It is computed at -|x|, where 1 - s is not small: times 2u' the rounding of a small one would be the largest error.
    """
    a = _clamped_abs(x)
    square = a * a
    exp = _exp_minus_2u(a, square)
    above = 1 / (1 + exp)
    tail = exp * above
    below = tail - a * tail * above * (1.5957691216057308 + 0.21406444881780076 * square)
    return tl.maximum(x, 0.0) - a * tail, tl.where(x < 0, below, 1 - below)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """The activation of x."""
    if ACTIVATION == "silu":
        y = silu(x)
    elif ACTIVATION == "gelu":
        y = gelu(x)
    else:
        tl.static_assert(ACTIVATION == "gelu_tanh")
        y = gelu_tanh(x)
    return y


@triton.jit
def activate_with_slope(x, ACTIVATION: tl.constexpr):
    """The activation of x and its derivative."""
    if ACTIVATION == "silu":
        y, slope = silu_with_slope(x)
    elif ACTIVATION == "gelu":
        y, slope = gelu_with_slope(x)
    else:
        tl.static_assert(ACTIVATION == "gelu_tanh")
        y, slope = gelu_tanh_with_slope(x)
    return y, slope
