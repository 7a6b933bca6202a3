"""The epilogue of the mainloop for many rows on sm_90 (Gluon): from a chunk of the accumulators to memory.

`finish` computes what a chunk becomes, in registers. `write_chunk` has TMA store it from a buffer in shared memory.
"""

from __future__ import annotations

from rooftile import runtime  # noqa: F401  # before Triton: runtime fixes the mode of the process
from rooftile.primitives.activations import activate, activate_with_slope
from rooftile.primitives.gluon import async_store

import triton.experimental.gluon.language as gl  # isort: skip
from triton.experimental import gluon  # isort: skip
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma  # isort: skip


@gluon.jit
def _add_bias(z, bias_ptr, col, n, T: gl.constexpr):
    cols = col + gl.arange(0, T.chunk, layout=gl.SliceLayout(0, T.part))
    bias = gl.load(bias_ptr + cols, mask=cols < n, other=0.0).to(gl.float32)
    return z + bias[None, :]


@gluon.jit
def finish(z, z_gate, read, read_up, bias_ptr, col, n, T: gl.constexpr):
    """The results of a chunk of the sums z, of which the first `T.outputs` are written.

    T.reads is 0: act(z + bias); gated, act(gate) * up, then gate and up, with gate = z_gate + bias and up = z + bias.
    T.reads is 1: the same with the residual added to the first.
    T.reads is 2: the gradients of gate and up, and h = act(gate) * up. z is the gradient of h; gate and up are read.
    """
    if T.reads == 2:
        activated, slope = activate_with_slope(read, gl.constexpr(T.activation))
        return z * read_up * slope, z * activated, activated * read_up
    else:
        if bias_ptr is not None:
            z = _add_bias(z, bias_ptr + n if T.gated else bias_ptr, col, n, T)
            if T.gated:
                z_gate = _add_bias(z_gate, bias_ptr, col, n, T)
        out = z
        if T.gated:
            out = activate(z_gate, gl.constexpr(T.activation)) * z
        elif T.activation != "":
            out = activate(z, gl.constexpr(T.activation))
        if T.reads == 1:
            out += read
        return out, z_gate, z


@gluon.jit
def write_chunk(z, out_ring, out_desc, row, col, i: gl.constexpr, mine: gl.constexpr, T: gl.constexpr):
    """Write a chunk, the i-th that a tile's epilogue writes, from a buffer of consumer `mine`.

    If out_buffers does not divide the chunks of a tile, its first chunk takes the buffer of the previous tile's last
    chunk, which that chunk's store may still be reading.
    """
    if i == 0 and T.writes % T.out_buffers != 0:
        tma.store_wait(0)
    else:
        tma.store_wait(T.out_buffers - 1)
    out = out_ring.index(mine * T.out_buffers + i % T.out_buffers)
    out.store(z.to(out_desc.dtype))
    fence_async_shared()  # makes it visible to TMA
    async_store(out_desc, [row, col], out)
