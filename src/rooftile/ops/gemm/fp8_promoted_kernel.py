"""The fp8 product of sm_90 whose partial sums go into float32 registers every 128 elements.

Adding takes a quarter of the time that multiplying does, and one warpgroup can only do one after the other. So two or
three of them share each tile, `rows` rows each, and while one adds, the tensor cores have what another has started.
A warp of its own has the tensor memory accelerator fill a ring of slots, each with 128 elements of the tile's rows of
x and of w, and runs on into the next tile while the last one is written out.

    ready[slot]  completed by the bytes that land; the consumers wait for it
    free[slot]   completed by one arrival of each consumer; the producer waits for it
    order[i]     completed by one arrival of the consumer before i, once it has started to multiply

How the consumers keep apart is T.order: "turns", i waits for order[i] before it multiplies (the first one's first turn
needs none); "late", they begin as slots of the first turn land, the last one with the last, so that they come to the
end of a tile one after another too, and some multiply while one writes; "", as they come.

All walk the ring with a slot and a parity that flips at every turn. A consumer waits for the parity it is at; the
producer for the opposite one, which a fresh barrier counts as completed.

A consumer's registers hold its sums and 128 columns at most of a partial one: a tile of 256 columns is taken in two
halves, `low` and `high`. A half is no wider than a block of the weight that shares a scale, and begins where one does.

The kernel's one constant, T, is a `Tiling` (promoted.py).
"""

from __future__ import annotations

from rooftile.ops.gemm.hopper_work import corner

import triton.experimental.gluon.language as gl  # isort: skip
from triton.experimental import gluon  # isort: skip
from triton.experimental.gluon.language.nvidia.hopper import (  # isort: skip
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Triton 3.9 has other names for the copies.
_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@gluon.jit
def _next(slot, parity, T: gl.constexpr):
    """The slot after this one, and the parity there."""
    slot += 1
    around = slot == T.stages
    return gl.where(around, 0, slot), gl.where(around, parity ^ 1, parity)


@gluon.jit
def _tiles(size, T: gl.constexpr):
    return gl.cdiv(size[0], gl.constexpr(T.tile_rows)) * gl.cdiv(size[1], gl.constexpr(T.cols))


@gluon.jit
def _produce(x_desc, w_desc, ring, size, T: gl.constexpr):
    """Keep the ring full."""
    STEP_BYTES: gl.constexpr = T.consumers * x_desc.block_type.nbytes + T.halves * w_desc.block_type.nbytes
    x_ring, w_ring, ready, free, _ = ring
    slot = 0
    parity = 0
    for tile in range(gl.program_id(0), _tiles(size, T), gl.num_programs(0)):
        row, col = corner(tile, size, T)
        for step in range(gl.cdiv(size[2], gl.constexpr(T.block_k))):
            bar = ready.index(slot)
            mbarrier.wait(free.index(slot), parity ^ 1)
            mbarrier.expect(bar, STEP_BYTES)
            for j in gl.static_range(gl.constexpr(T.consumers)):
                _load(x_desc, [row + j * T.rows, step * T.block_k], bar, x_ring.index(slot * T.consumers + j))
            for j in gl.static_range(gl.constexpr(T.halves)):
                _load(w_desc, [col + j * T.half, step * T.block_k], bar, w_ring.index(slot * T.halves + j))
            slot, parity = _next(slot, parity, T)


@gluon.jit
def _part_scales(scales, row, col, step, size, T: gl.constexpr):
    """Those of 128 elements of the sum: of a consumer's rows of x, and of either half of the weight's rows.

    They are one for either where they do not belong to 128 elements. What lies outside has those of the last.
    """
    sx_ptr, sw_ptr, stride_sxm, stride_sxk, stride_swn, stride_swk = scales
    step = gl.minimum(step, gl.cdiv(size[2], gl.constexpr(T.block_k)) - 1)
    x = 1.0
    low = 1.0
    high = 1.0
    if T.x_scale == "group":
        rows = row + gl.arange(0, T.rows, layout=gl.SliceLayout(1, T.acc))
        rows = gl.minimum(rows, size[0] - 1).to(gl.int64)
        x = gl.load(sx_ptr + rows * stride_sxm + step.to(gl.int64) * stride_sxk)
    if T.w_scale == "block":
        at = sw_ptr + step.to(gl.int64) * stride_swk
        block = col // 128
        low = gl.load(at + block.to(gl.int64) * stride_swn)
        if T.halves == 2:
            high = gl.load(at + gl.minimum(block + 1, (size[1] - 1) // 128).to(gl.int64) * stride_swn)
    return x, low, high


@gluon.jit
def _multiply(part, x, w, order, turn, mine: gl.constexpr, T: gl.constexpr):
    """part = x @ w.T, once the tensor cores have done it."""
    if T.order == "turns":
        mbarrier.wait(order.index(mine), turn)
    part = warpgroup_mma(x, w.permute((1, 0)), part, use_acc=False, is_async=True)
    if T.order == "turns":
        mbarrier.arrive(order.index((mine + 1) % T.consumers), count=1)
    return warpgroup_mma_wait(0, (part,)), turn ^ 1


@gluon.jit
def _factors(x, low, high, T: gl.constexpr):
    """What each half of a partial sum is multiplied by.

    They are made before the next step's scales are loaded, and the compiler may not move them past the wait. So those
    are loaded into the registers that these were made of; copied from others, they would be waited for at once.
    """
    if T.x_scale == "group":
        if T.w_scale == "block":
            low = x * low
            high = x * high
        else:
            low = x
            high = x
        if T.halves == 2:
            low, high = warpgroup_mma_wait(0, (low, high))
        else:
            low = warpgroup_mma_wait(0, (low,))
    return low, high


@gluon.jit
def _add(acc, part, factor, T: gl.constexpr):
    """acc + part * its factor."""
    if T.x_scale == "group":
        acc += part * factor[:, None]
    elif T.w_scale == "block":
        acc += part * factor
    else:
        acc += part
    # Nothing is under way; but the compiler may not move the sum past it, which would take the registers of two parts.
    return warpgroup_mma_wait(0, (acc,))


@gluon.jit
def _split(acc, PARTS: gl.constexpr):
    """The columns of acc in PARTS equal parts. They are registers of their own: nothing moves."""
    if PARTS == 1:
        return (acc,)
    else:
        halves = acc.reshape([acc.shape[0], 2, acc.shape[1] // 2]).permute(0, 2, 1)
        low, high = halves.split()
        return _split(low, PARTS // 2) + _split(high, PARTS // 2)


@gluon.jit
def _of_columns(ptr, col, size, T: gl.constexpr):
    """One number of each column of a half."""
    cols = col + gl.arange(0, T.half, layout=gl.SliceLayout(0, T.acc))
    even = size[1] // 2 * 2  # n is, and so they are loaded two at a time
    return gl.load(ptr + cols, mask=cols < even, other=0.0).to(gl.float32)[None, :]


@gluon.jit
def _finish(low, high, scales, bias_ptr, row, col, size, T: gl.constexpr):
    """The scales that belong to the whole sum, and the bias. Both halves' are loaded before either is waited for."""
    sx_ptr, sw_ptr, stride_sxm, _stride_sxk, _stride_swn, _stride_swk = scales
    if T.x_scale == "row":
        rows = gl.minimum(row + gl.arange(0, T.rows, layout=gl.SliceLayout(1, T.acc)), size[0] - 1)
        x_scale = gl.load(sx_ptr + rows.to(gl.int64) * stride_sxm)[:, None]
    elif T.x_scale == "tensor":
        x_scale = gl.load(sx_ptr)
    if T.w_scale == "row":
        low_scale = _of_columns(sw_ptr, col, size, T)
        high_scale = low_scale
        if T.halves == 2:
            high_scale = _of_columns(sw_ptr, col + T.half, size, T)
    elif T.w_scale == "tensor":
        low_scale = gl.load(sw_ptr)
        high_scale = low_scale
    if T.x_scale != "group":
        low *= x_scale
        high *= x_scale
    if T.w_scale != "block":
        low *= low_scale
        high *= high_scale
    if bias_ptr is not None:
        if T.w_scale == "row":  # else the compiler would have the bias in registers beside the scales
            low, high = warpgroup_mma_wait(0, (low, high))
        low_bias = _of_columns(bias_ptr, col, size, T)
        high_bias = low_bias
        if T.halves == 2:
            high_bias = _of_columns(bias_ptr, col + T.half, size, T)
        low += low_bias
        high += high_bias
    return low, high


@gluon.jit
def _residual(residual_ptr, row, col, size, T: gl.constexpr):
    """A chunk of what is added to the result."""
    rows = row + gl.arange(0, T.rows, layout=gl.SliceLayout(1, T.part))[:, None]
    cols = col + gl.arange(0, T.chunk, layout=gl.SliceLayout(0, T.part))[None, :]
    n = size[1] // 2 * 2  # it is even, and so they are loaded two at a time
    return gl.load(residual_ptr + rows.to(gl.int64) * n + cols, mask=(rows < size[0]) & (cols < n), other=0.0)


@gluon.jit
def _write(z, residual_ptr, out, out_desc, row, col, size, T: gl.constexpr):
    """A chunk of the result, from the buffer `out`."""
    z = gl.convert_layout(z, T.part)
    if residual_ptr is not None:
        z += _residual(residual_ptr, row, col, size, T).to(gl.float32)
    tma.store_wait(T.out_buffers - 1)
    out.store(z.to(out_desc.dtype))
    fence_async_shared()
    _store(out_desc, [row, col], out)


@gluon.jit
def _consume(out_desc, scales, bias_ptr, residual_ptr, out_ring, ring, size, mine: gl.constexpr, T: gl.constexpr):
    """Multiply, and write out, the rows of every tile from mine * rows on."""
    x_ring, w_ring, ready, free, order = ring
    HALVES: gl.constexpr = T.halves
    CHUNKS: gl.constexpr = T.half // T.chunk
    part = gl.full([T.rows, T.half], 0, gl.float32, T.acc)
    slot = 0
    parity = 0
    turn = 0 if mine else 1  # the first finds the door open
    if T.order == "late":
        steps = gl.cdiv(size[2], gl.constexpr(T.block_k))
        fills = gl.cdiv(_tiles(size, T) - gl.program_id(0), gl.num_programs(0)) * steps
        mbarrier.wait(ready.index(gl.minimum(mine * (T.stages - 1) // (T.consumers - 1), fills - 1)), 0)
    for tile in range(gl.program_id(0), _tiles(size, T), gl.num_programs(0)):
        row, col = corner(tile, size, T)
        row += mine * T.rows
        low = gl.full([T.rows, T.half], 0, gl.float32, T.acc)
        high = low
        x_scale, low_scale, high_scale = _part_scales(scales, row, col, gl.to_tensor(0), size, T)
        for step in range(gl.cdiv(size[2], gl.constexpr(T.block_k))):
            low_factor, high_factor = _factors(x_scale, low_scale, high_scale, T)
            if T.x_scale == "group" or T.w_scale == "block":  # a step ahead: they come from the L2, or farther
                x_scale, low_scale, high_scale = _part_scales(scales, row, col, step + 1, size, T)
            mbarrier.wait(ready.index(slot), parity)
            x = x_ring.index(slot * T.consumers + mine)
            part, turn = _multiply(part, x, w_ring.index(slot * HALVES), order, turn, mine, T)
            if HALVES == 2:
                low = _add(low, part, low_factor, T)
                part, turn = _multiply(part, x, w_ring.index(slot * HALVES + 1), order, turn, mine, T)
                mbarrier.arrive(free.index(slot), count=1)
                high = _add(high, part, high_factor, T)
            else:
                mbarrier.arrive(free.index(slot), count=1)
                low = _add(low, part, low_factor, T)
            slot, parity = _next(slot, parity, T)

        low, high = _finish(low, high, scales, bias_ptr, row, col, size, T)
        for h in gl.static_range(HALVES):
            parts = _split(low if h == 0 else high, CHUNKS)
            for j in gl.static_range(CHUNKS):
                out = out_ring.index(mine * T.out_buffers + (h * CHUNKS + j) % T.out_buffers)
                _write(parts[j], residual_ptr, out, out_desc, row, col + h * T.half + j * T.chunk, size, T)
    tma.store_wait(0)


_NUMBERS = ["stride_sxm", "stride_sxk", "stride_swn", "stride_swk"]


@gluon.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=["sx_ptr"])
def promoted(
    x_desc,
    w_desc,
    out_desc,
    sx_ptr,
    sw_ptr,
    bias_ptr,
    residual_ptr,
    stride_sxm,
    stride_sxk,
    stride_swn,
    stride_swk,
    T: gl.constexpr,
):
    """out[m, n] = sum over k of x[m, k] * x_scale * w[n, k] * w_scale, + bias[n] + residual[m, n]."""
    x_ring = gl.allocate_shared_memory(x_desc.dtype, T.x_ring, x_desc.layout)
    w_ring = gl.allocate_shared_memory(w_desc.dtype, T.w_ring, w_desc.layout)
    out_ring = gl.allocate_shared_memory(out_desc.dtype, T.out_ring, out_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [T.stages, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [T.stages, 1], mbarrier.MBarrierLayout())
    order = gl.allocate_shared_memory(gl.int64, [T.consumers, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(gl.constexpr(T.stages)):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=T.consumers)
    for i in gl.static_range(gl.constexpr(T.consumers)):
        mbarrier.init(order.index(i), count=1)
    fence_async_shared()  # the copies see them initialised too

    ring = (x_ring, w_ring, ready, free, order)
    size = (out_desc.shape[0], out_desc.shape[1], x_desc.shape[1])
    scales = (sx_ptr, sw_ptr, stride_sxm, stride_sxk, stride_swn, stride_swk)
    if T.consumers == 2:
        gl.warp_specialize(
            [
                (_consume, (out_desc, scales, bias_ptr, residual_ptr, out_ring, ring, size, 0, T)),
                (_consume, (out_desc, scales, bias_ptr, residual_ptr, out_ring, ring, size, 1, T)),
                (_produce, (x_desc, w_desc, ring, size, T)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.static_assert(T.consumers == 3)
        gl.warp_specialize(
            [
                (_consume, (out_desc, scales, bias_ptr, residual_ptr, out_ring, ring, size, 0, T)),
                (_consume, (out_desc, scales, bias_ptr, residual_ptr, out_ring, ring, size, 1, T)),
                (_consume, (out_desc, scales, bias_ptr, residual_ptr, out_ring, ring, size, 2, T)),
                (_produce, (x_desc, w_desc, ring, size, T)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )
