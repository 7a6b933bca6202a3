"""Attention scores: their units, their soft cap, and how a head dimension is split into powers of two.

Scores are kept times log2(e), for a softmax of powers of two: exp2 is one instruction, exp is two.
"""

from __future__ import annotations

import math

from rooftile import library, runtime  # noqa: F401  # before Triton: runtime fixes the mode of the process

import triton  # isort: skip
import triton.language as tl  # isort: skip
from triton.language.extra import libdevice  # isort: skip

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


def split_dim(dim: int) -> tuple[int, int]:
    """The blocks in which a head dimension is computed: one power of two, or a larger and a smaller one.

    80 is 64 + 16, 96 is 64 + 32, 192 is 128 + 64; but 112 is 128, as 64 + 64 would be as much. The last block is masked
    where it is larger than needed. A second block of 0 is none.
    """
    whole = max(16, library.power_of_two(dim))
    first = whole // 2
    if dim <= first or first < 16:
        return whole, 0
    second = max(16, library.power_of_two(dim - first))
    return (whole, 0) if second == first else (first, second)


def score_factors(scale: float, softcap: float) -> tuple[float, float]:
    """What `capped_scores` takes: the factor of q·k, and the cap. softcap 0 is no cap."""
    if softcap == 0.0:
        return float(scale * LOG2E.value), 0.0
    limit = 3e38  # of float32; tanh is 1 long before
    return max(-limit, min(limit, scale / softcap)), float(softcap * LOG2E.value)


def default_factor(head_dim: int, scale: float | None, softcap: float) -> float:
    """The factor of scores without a cap, if `scale` is the default one; else 0.

    Kernels that are bound by FFMA instructions or by latency have it compiled in, as an argument takes a register. A
    scale that differs from the default by less than float32's precision counts as the default.
    """
    usual = 1.0 / math.sqrt(head_dim)
    if softcap or not (scale is None or math.isclose(scale, usual, rel_tol=1e-8)):
        return 0.0
    return score_factors(usual, 0.0)[0]


@triton.jit
def capped_scores(products, factor, cap, CAPPED: tl.constexpr):
    """Scores times log2(e), before biases: q·k times `factor`, or its tanh times `cap`."""
    if CAPPED:
        return libdevice.tanh(products * factor) * cap
    else:
        return products * factor
