"""Sums of which several programs of the Hopper kernel have parts: how a part is kept in memory, and how they add up."""

from __future__ import annotations

from rooftile import runtime  # noqa: F401  # before Triton: runtime fixes the mode of the process

import triton.experimental.gluon.language as gl  # isort: skip
from triton.experimental import gluon  # isort: skip


@gluon.jit
def _flat(z, T: gl.constexpr):
    """A chunk in an order in which a thread's registers make 16 bytes at a time, and those of a warp lie together."""
    z = z.reshape([T.rows // 16, 2, 8, T.chunk // 8, 4, 2]).permute(0, 3, 2, 4, 1, 5)
    return z.reshape([T.rows * T.chunk])


@gluon.jit
def _from_flat(z, T: gl.constexpr):
    z = z.reshape([T.rows // 16, T.chunk // 8, 8, 4, 2, 2]).permute(0, 4, 2, 1, 3, 5)
    return gl.convert_layout(z.reshape([T.rows, T.chunk]), T.part)


@gluon.jit
def _place(partial_ptr, whose, i, which, lane, T: gl.constexpr):
    """Where a chunk of part i of a tile's sum, or of a consumer's rows of it, is kept for the one that adds them up."""
    STRIDE: gl.constexpr = 2 if T.stream else 1
    place = gl.where(i == 0, whose[2], whose[3] + (i - 1) * STRIDE)
    place = (place * T.sharing + lane) * (T.chunks * T.halves) + which
    return partial_ptr + place.to(gl.int64) * (T.rows * T.chunk)


@gluon.jit
def keep(z, partial_ptr, whose, which, lane, T: gl.constexpr):
    """Keep a chunk of this unit's part."""
    z = _flat(gl.convert_layout(z, T.part), T)
    gl.store(
        _place(partial_ptr, whose, whose[1], which, lane, T) + gl.arange(0, T.rows * T.chunk, layout=z.type.layout), z
    )


@gluon.jit
def total(z, partial_ptr, whose, which, lane, T: gl.constexpr):
    """The sum of all parts, in their order; z is this unit's own."""
    if whose[0] > 1:
        part = whose[1]
        own = _flat(z, T)
        at = gl.arange(0, T.rows * T.chunk, layout=own.type.layout)
        sums = gl.full([T.rows * T.chunk], 0, gl.float32, own.type.layout)
        for i in range(whose[0]):
            place = _place(partial_ptr, whose, i, which, lane, T)
            other = gl.load(
                place + at, mask=at >= gl.where(part == i, T.rows * T.chunk, 0), other=0.0, cache_modifier=".cg"
            )
            sums += gl.where(part == i, own, other)
        z = _from_flat(sums, T)
    return z
