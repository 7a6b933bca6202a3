"""What a consumer of the attention for sm_90 does with a block of scores in its registers."""

from __future__ import annotations

from rooftile import runtime  # noqa: F401  # before Triton: runtime fixes the mode of the process

import triton.experimental.gluon.language as gl  # isort: skip
from triton.experimental import gluon  # isort: skip

_LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def capped(s, T: gl.constexpr):
    """Scores before `scale`; tanh by the power of two that one instruction gives."""
    if T.cap_scale != 0:
        e = gl.exp2(s * (T.cap_scale * 2 * _LOG2E))
        return 1.0 - 2.0 / (e + 1.0)
    else:
        return s


@gluon.jit
def hidden(s, row, block, size, T: gl.constexpr):
    """Scores, -inf where the query at `row` and on doesn't see the key."""
    n_q, n_k = size[2], size[3]
    cols = block * T.keys + gl.arange(0, T.keys, layout=gl.SliceLayout(0, T.scores))
    p = (row + n_k - n_q) + gl.arange(0, T.rows, layout=gl.SliceLayout(1, T.scores))
    end = gl.full([T.rows], n_k, gl.int32, gl.SliceLayout(1, T.scores))
    if T.right >= 0:
        end = gl.minimum(p + T.right + 1, n_k)
    seen = cols[None, :] < end[:, None]
    if T.left >= 0:
        seen = seen & (cols[None, :] >= (p - T.left)[:, None])
    return gl.where(seen, s, float("-inf"))


@gluon.jit
def weigh(s, peak, T: gl.constexpr):
    """Of a block of scores: weights, their sums in parts, the maximum from here on, the factor of what was before."""
    by_thread = s.reshape([T.rows, T.keys // 8, 4, 2])
    top = gl.max(gl.max(gl.max(by_thread, 1), 2), 1)
    higher = gl.maximum(peak, gl.convert_layout(top, peak.type.layout, assert_trivial=True))
    factor = gl.exp2((peak - higher) * T.scale)
    weights = gl.exp2(s * T.scale - (higher * T.scale)[:, None])
    sums = gl.sum(gl.sum(weights.reshape([T.rows, T.keys // 8, 4, 2]), 1), 2)
    return weights, sums, higher, factor


@gluon.jit
def as_operand(weights, dtype, T: gl.constexpr):
    return gl.convert_layout(weights.to(dtype), T.weights)
