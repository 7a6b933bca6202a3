"""The terms of the divergences and their derivatives, element by element: ops/divergence.py has the formulas."""

from __future__ import annotations

from rooftile import runtime  # noqa: F401  # before Triton: runtime fixes the mode of the process

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def terms(x, t, KIND: tl.constexpr, BETA: tl.constexpr, WITH_DTARGET: tl.constexpr):
    """The loss, and its derivatives with respect to input and target; the last only if asked for."""
    if KIND == "kl":
        loss = tl.where(t == 0.0, 0.0, t * tl.log(t)) - t * x
        dx = -t
        dt = tl.where(t == 0.0, 0.0, tl.log(t) + 1.0 - x) if WITH_DTARGET else dx
    elif KIND == "kl_log" or BETA == 0.0:
        p = tl.exp(t)
        loss = p * (t - x)
        dx = -p
        dt = loss + p
    elif BETA == 1.0:
        q = tl.exp(x)
        loss = q * (x - t)
        dx = loss + q
        dt = -q
    else:
        # p, q and m in units of the greater of p and q, so that log m is finite however small they are.
        top = tl.maximum(x, t)
        unit = tl.exp(top)
        lesser = tl.exp(-tl.abs(x - t))
        p = tl.where(t >= x, 1.0, lesser)
        q = tl.where(t >= x, lesser, 1.0)
        log_m = tl.log(BETA * p + (1.0 - BETA) * q)
        # 0 * log(0) is 0. Where both are 0, `unit` is.
        dt = tl.where((p == 0.0) | (unit == 0.0), 0.0, BETA * unit * p * ((t - top) - log_m))
        dx = tl.where((q == 0.0) | (unit == 0.0), 0.0, (1.0 - BETA) * unit * q * ((x - top) - log_m))
        loss = dt + dx
    return loss, dx, dt
