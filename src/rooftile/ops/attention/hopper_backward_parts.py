"""What the kernels of the Hopper backward share: copies, rings, probabilities, and writing a gradient."""

from __future__ import annotations

from rooftile.primitives.gluon import store_tile

import triton.experimental.gluon.language as gl  # isort: skip
from triton.experimental import gluon  # isort: skip
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared  # isort: skip

_LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def write(z, memory, desc, entry, head, at):
    """Write a consumer's 64 rows of a gradient, by way of shared memory that nobody reads any more."""
    memory.store(z.to(desc.dtype))
    fence_async_shared()
    store_tile(desc, [entry, head, at, 0], memory)


@gluon.jit
def place(ticket, together, blocks, heads):
    """The block and the head of a program. `together` heads' blocks are worked on at the same time, by their number."""
    first = ticket // (together * blocks) * together
    width = gl.minimum(together, heads - first)
    rest = ticket - first * blocks
    block = rest // width
    return block, first + rest - block * width


@gluon.jit
def _tanh(x):
    """1 - 2 / (1 + e^2x): good to float32's last bits for what is added to and taken off 1."""
    return 1.0 - 2.0 / (1.0 + gl.exp2(x * (2.0 * _LOG2E)))


@gluon.jit
def _span(first, N: gl.constexpr, AXIS: gl.constexpr, T: gl.constexpr):
    """Numbers from `first` on, along an axis of a tile of scores."""
    numbers = first + gl.arange(0, N, layout=gl.SliceLayout(1 - AXIS, T.s))
    return gl.expand_dims(numbers, 1 - AXIS)


@gluon.jit
def probabilities(s, lse, key, p_first, n_k, KEY_AXIS: gl.constexpr, T: gl.constexpr):
    """p of a tile of q·k, and with a soft cap the derivative of the capped score by the score, in 16 bits.

    lse, times log2(e), lies along the queries; the tile's keys are those from `key` on, and its first query stands at
    p_first.
    """
    KEYS: gl.constexpr = s.shape[KEY_AXIS]
    ROWS: gl.constexpr = s.shape[1 - KEY_AXIS]
    slope = s
    if T.softcap > 0:
        t = _tanh(s * (T.scale / T.softcap))
        slope = (1.0 - t * t).to(gl.float16)
        p = gl.exp2(t * (T.softcap * _LOG2E) - lse)
    else:
        p = gl.exp2(s * (T.scale * _LOG2E) - lse)
    if T.masked:
        hidden = key + KEYS > n_k
        if T.right >= 0:
            hidden |= key + (KEYS - 1) > p_first + T.right
        if T.left >= 0:
            hidden |= key < p_first + (ROWS - 1) - T.left
        if hidden:
            keys = _span(key, KEYS, KEY_AXIS, T)
            positions = _span(p_first, ROWS, 1 - KEY_AXIS, T)
            seen = (keys < n_k) & (positions >= p_first)
            if T.right >= 0:
                seen &= keys <= positions + T.right
            if T.left >= 0:
                seen &= keys >= positions - T.left
            p = gl.where(seen, p, 0.0)
    return p, slope


@gluon.jit
def scores_gradient(p, slope, dp, delta, dtype: gl.constexpr, T: gl.constexpr):
    """ds of a tile, before `scale`, in 16 bits."""
    ds = p * (dp - delta)
    if T.softcap > 0:
        ds *= slope.to(gl.float32)
    return ds.to(dtype)
