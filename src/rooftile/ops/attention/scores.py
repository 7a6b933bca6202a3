"""What the kernels share of the way from q·k to the softmax, and of the way back.

Scores are kept times log2(e), for a softmax of powers of two: exp2 is one instruction of the GPU, exp is two.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def first_key(p_first, LEFT: tl.constexpr):
    """The first key that any query sees of those from position p_first on."""
    if LEFT >= 0:
        return tl.maximum(p_first - LEFT, 0)
    else:
        return p_first * 0


@triton.jit
def end_key(p_last, n_k, RIGHT: tl.constexpr):
    """One past the last key that any query sees of those up to position p_last."""
    if RIGHT >= 0:
        return tl.maximum(tl.minimum(p_last + RIGHT + 1, n_k), 0)
    else:
        return n_k


@triton.jit
def seen(p, cols, n_k, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """Whether the queries at positions p (R, 1) see the keys cols (1, C)."""
    visible = cols < n_k
    if RIGHT >= 0:
        visible &= cols <= p + RIGHT
    if LEFT >= 0:
        visible &= cols >= p - LEFT
    return visible


@triton.jit
def capped(products, SCALE: tl.constexpr, SOFTCAP: tl.constexpr):
    """The scores times log2(e), before biases: of q·k, scaled, and soft-capped where SOFTCAP is not 0."""
    if SOFTCAP > 0:
        return libdevice.tanh(products * (SCALE / SOFTCAP)) * (SOFTCAP * LOG2E)
    else:
        return products * (SCALE * LOG2E)


@triton.jit
def uncapped_gradient(ds, scores, SCALE: tl.constexpr, SOFTCAP: tl.constexpr):
    """The gradient of q·k, given that of the scores, and the scores as `capped` gave them (before biases)."""
    if SOFTCAP > 0:
        t = scores * (1.0 / (SOFTCAP * LOG2E))
        return ds * (1.0 - t * t) * SCALE
    else:
        return ds * SCALE
