"""Activations and their derivatives, float32 in and out: one place for every kernel that applies one.

A kernel that reads and writes two bytes an element has room for some 25 instructions an element on an H200, where its
memory sets the speed, loads, stores and conversions included. On sm_90 silu takes 9, gelu_tanh 10 and gelu 12, where
libdevice's tanh would make 29 of it and its erf 32. Any finite x gives a finite result, and a NaN stays one.
"""

from __future__ import annotations

from typing import Literal

from rooftile import runtime  # noqa: F401  # before Triton: runtime fixes the mode of the process

import triton  # isort: skip
import triton.language as tl  # isort: skip

Approximate = Literal["none", "tanh"]
_GELUS = {"none": "gelu", "tanh": "gelu_tanh"}
# What a kernel's constant ACTIVATION may be.
ACTIVATIONS = ("silu", *_GELUS.values())


def gelu_name(op: str, approximate: str) -> str:
    """The ACTIVATION of gelu, which PyTorch tells apart by `approximate`."""
    if approximate not in _GELUS:
        raise ValueError(f"{op}: approximate is {approximate!r}, expected one of {', '.join(_GELUS)}")
    return _GELUS[approximate]


@triton.jit
def _exp(x):
    """Two instructions: what would be subnormal is zero, for which tl.exp takes two more."""
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
    """The standard normal's probability of more than a, for 0 <= a <= 15; 0 from 12 on.

    2^p(a): the logarithm of the tail is nearly a parabola, so one polynomial of degree 8 serves, where erf takes two
    and a choice between them. Minimax over [0, 6] (Remez' exchange), p(0) = -1, for the error in units of 1e-8, or of
    3e-5 of the tail where that is less. Computed in float32 it is at most 1.2e-7, and relative to the tail at most 4e-4
    up to 5.5 and 2e-3 up to 6, where 1 + erf would have lost every digit; beyond, the tail falls too fast, by less
    than 1e-11.
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
    """|x| up to 15, where both tail and density are zero in float32, so that what they multiply is finite."""
    return tl.minimum(tl.abs(x), 15.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def gelu(x):
    """x * Phi(x), as max(x, 0) - |x| * (1 - Phi(|x|)): nothing is lost to 1 + erf(x) where x is far below zero."""
    a = _clamped_abs(x)
    return tl.maximum(x, 0.0) - a * _upper_tail(a)


@triton.jit
def gelu_with_slope(x):
    """gelu(x) and its derivative, Phi(x) + x * phi(x), which is 1 less that of -x."""
    a = _clamped_abs(x)
    tail = _upper_tail(a)
    below = tail - a * 0.3989422804014327 * tl.exp2(a * a * -0.7213475204444817)
    return tl.maximum(x, 0.0) - a * tail, tl.where(x < 0, below, 1 - below)


@triton.jit
def _exp_minus_2u(x, square):
    """exp(-2u) with u = sqrt(2 / pi) * (x + 0.044715 * x^3) and square = x^2; 2 * log2(e) is in both factors."""
    return tl.exp2(x * (-2.302208198144325 - 0.1029432395800235 * square))


@triton.jit
def gelu_tanh(x):
    """x / 2 * (1 + tanh(u)), as x * sigmoid(2u)."""
    return x / (1 + _exp_minus_2u(x, x * x))


@triton.jit
def gelu_tanh_with_slope(x):
    """gelu_tanh(x) and its derivative, s + x * s * (1 - s) * 2u' with s = sigmoid(2u), which is 1 less that of -x.

    Taken at -|x|, so that 1 - s is never the small one: times 2u' its rounding would be the largest error there is.
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
    """The activation of that name, of x."""
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
    """That activation, and its derivative."""
    if ACTIVATION == "silu":
        y, slope = silu_with_slope(x)
    elif ACTIVATION == "gelu":
        y, slope = gelu_with_slope(x)
    else:
        tl.static_assert(ACTIVATION == "gelu_tanh")
        y, slope = gelu_tanh_with_slope(x)
    return y, slope
