"""The persistent product of sm_90: a warp that copies, warpgroups that multiply, and a ring of tiles between them.

One program stays on each multiprocessor and walks over its tiles. Its producer, a single warp, has the tensor memory
accelerator fill a ring of `stages` slots, each with `block_k` elements of the tile's rows of x and of w. Its consumers,
of four warps and `rows` rows of the tile each, feed them to the tensor cores and give a slot back when it has been
read. The producer runs on into the next tile while the consumers write out the last one.

    ready[slot]  completed by the bytes that land; the consumers wait for it
    free[slot]   completed by one arrival of each consumer; the producer waits for it

Both walk the ring with a slot and a parity that flips at every turn. A consumer waits for the parity it is at; the
producer for the opposite one, which a fresh barrier counts as completed.

The kernel's one constant, T, is a `Tiling` (hopper_tiling.py). What it holds are numbers, no constants of Triton's:
where one is needed, `gl.constexpr` makes it one.

Where a tile's columns are no power of two, and for some gated products, w has several rings and a consumer several
sums, which are multiplied one after another (hopper_tiling.py).

The residual comes through the same ring: after a tile's last step the producer sends it in slots of its own, `chunk`
columns a slot, in the place of x. So it is there when the sum is.

The consumers share each tile, or (pingpong) two of them take the program's tiles in turn, and one writes out its tile
while the other multiplies. Then each walks over the slots of the other's tiles without a look at them, and

    order[i]     completed by one arrival of the other consumer; consumer i waits for it before a tile's first step

keeps them from multiplying at the same time. It has to: a parity tells a turn of the ring from the one before, not
from the one before that, so no slot may be waited for before its last turn's bytes have landed. The consumer that
arrives has seen all slots of its tile land, those of the residual too.

Where a tile's sum has parts (hopper_work.py), they are kept in memory, and the program that comes last adds them in
their order.
"""

from __future__ import annotations

from rooftile.ops.gemm.hopper_partial import keep, total
from rooftile.ops.gemm.hopper_work import corner, count_units, unit
from rooftile.primitives.activations import activate
from rooftile.primitives.splitk import arrives_last

import triton.experimental.gluon.language as gl  # isort: skip
from triton.experimental import gluon  # isort: skip
from triton.experimental.gluon.language.nvidia.hopper import (  # isort: skip
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Triton 3.9 has other names; the old ones of the copies are still there, and raise.
_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
_RENAMED = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def _seen_as(memory, shape: gl.constexpr, like):
    """The same shared memory, seen as a tile of that shape, in the dtype and layout of another."""
    if _RENAMED:
        return memory.reinterpret(like.dtype, shape, like.layout)
    else:
        return memory._reinterpret(like.dtype, shape, like.layout)


@gluon.jit
def _next(slot, parity, T: gl.constexpr):
    """The slot after this one, and the parity there."""
    slot += 1
    around = slot == T.stages
    return gl.where(around, 0, slot), gl.where(around, parity ^ 1, parity)


@gluon.jit
def _skip(slot, parity, count, T: gl.constexpr):
    """The slot `count` slots on, and the parity there."""
    slot += count
    turns = slot // T.stages
    return slot - turns * T.stages, parity ^ (turns & 1)


@gluon.jit
def _copy_w(w_desc, w_rings, slot, col, n, at, bar, T: gl.constexpr):
    """Start the copies of w for a slot: the rows of w from col on, and for a gated product those n rows on too."""
    for i in gl.static_range(gl.constexpr(T.n_sums)):
        for j in gl.static_range(gl.constexpr(T.pieces[i])):
            to = w_rings[i].index(slot * T.pieces[i] + j)
            row = col + T.begins[i][j] // T.cols * n + T.begins[i][j] % T.cols
            if T.w_k:
                _load(w_desc, [row, at], bar, to)
            else:
                _load(w_desc, [at, row], bar, to)


@gluon.jit
def _produce(x_desc, w_desc, residual_desc, ring, size, T: gl.constexpr):
    """Keep the ring full."""
    STEP_BYTES: gl.constexpr = T.sharing * x_desc.block_type.nbytes + T.w_loads * w_desc.block_type.nbytes
    x_ring, w_rings, ready, free, _ = ring
    n = size[1]
    slot = 0
    parity = 0
    for i in range(count_units(size, T)):
        tile, begin, end, _whose = unit(i, size, T)
        row, col = corner(tile, size, T)
        for step in range(begin, end):
            at = step * T.block_k
            bar = ready.index(slot)
            mbarrier.wait(free.index(slot), parity ^ 1)
            mbarrier.expect(bar, STEP_BYTES)
            for j in gl.static_range(gl.constexpr(T.sharing)):
                to = x_ring.index(slot * T.sharing + j)
                if T.x_k:
                    _load(x_desc, [row + j * T.rows, at], bar, to)
                else:
                    _load(x_desc, [at, row + j * T.rows], bar, to)
            _copy_w(w_desc, w_rings, slot, col, n, at, bar, T)
            slot, parity = _next(slot, parity, T)
        if residual_desc is not None:
            for chunk in range(T.chunks):
                bar = ready.index(slot)
                mbarrier.wait(free.index(slot), parity ^ 1)
                mbarrier.expect(bar, T.sharing * residual_desc.block_type.nbytes)
                for j in gl.static_range(gl.constexpr(T.sharing)):
                    to = x_ring.index(slot * T.sharing + j)
                    to = _seen_as(to, gl.constexpr(T.out_block), residual_desc)
                    _load(residual_desc, [row + j * T.rows, col + chunk * T.chunk], bar, to)
                slot, parity = _next(slot, parity, T)


@gluon.jit
def _multiply(sums, x_ring, w_rings, slot, use_acc, lane, T: gl.constexpr):
    """Start sum += x @ w.T for every sum, on what is in the slot."""
    x = x_ring.index(slot * T.sharing + lane)
    if not T.x_k:
        x = x.permute((1, 0))
    after = ()
    for i in gl.static_range(gl.constexpr(T.n_sums)):
        w = _seen_as(w_rings[i], gl.constexpr(T.w_tiles[i]), w_rings[i]).index(slot)
        if T.w_k:
            w = w.permute((1, 0))
        after += (warpgroup_mma(x, w, sums[i], use_acc=use_acc, is_async=True),)  # type: ignore[assignment]
    return after


@gluon.jit
def _wait(sums, STEPS: gl.constexpr, T: gl.constexpr):
    """Wait until at most STEPS steps are under way."""
    if T.n_sums == 1:
        return (warpgroup_mma_wait(STEPS, sums),)
    else:
        return warpgroup_mma_wait(gl.constexpr(STEPS * T.n_sums), sums)


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
def _chunks(sums, T: gl.constexpr):
    """All sums, `chunk` columns each: of a gated product first those of the gate."""
    chunks = ()
    for i in gl.static_range(gl.constexpr(T.n_sums)):
        chunks += _split(sums[i], gl.constexpr(T.widths[i] // T.chunk))
    return chunks


@gluon.jit
def _add_bias(z, bias_ptr, col, n, T: gl.constexpr):
    cols = col + gl.arange(0, T.chunk, layout=gl.SliceLayout(0, T.part))
    bias = gl.load(bias_ptr + cols, mask=cols < n, other=0.0).to(gl.float32)
    return z + bias[None, :]


@gluon.jit
def _finish(
    z, z_gate, residual, out, out_desc, bias_ptr, partial_ptr, whose, row, col, n, lane, which, T: gl.constexpr
):
    """The epilogue of a chunk: z of a consumer, and z_gate for a gated product, written out from the buffer `out`."""
    if T.partial:
        z = total(z, partial_ptr, whose, which, lane, T)
    if bias_ptr is not None:
        z = _add_bias(z, bias_ptr + n if T.gated else bias_ptr, col, n, T)
    if T.gated:
        if T.partial:
            z_gate = total(z_gate, partial_ptr, whose, which + T.chunks, lane, T)
        if bias_ptr is not None:
            z_gate = _add_bias(z_gate, bias_ptr, col, n, T)
        z = activate(z_gate, gl.constexpr(T.activation)) * z
    elif T.activation != "":
        z = activate(z, gl.constexpr(T.activation))
    if residual is not None:
        z += residual.load(T.part).to(gl.float32)
    tma.store_wait(T.out_buffers - 1)
    out.store(z.to(out_desc.dtype))
    fence_async_shared()
    _store(out_desc, [row, col], out)


@gluon.jit
def _consume(
    out_desc,
    bias_ptr,
    partial_ptr,
    counter_ptr,
    out_ring,
    ring,
    size,
    mine: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr,
    T: gl.constexpr,
):
    """Multiply, and write out, the rows of every tile from mine * rows on; of two that take turns, every other tile."""
    x_ring, w_rings, ready, free, order = ring
    n = size[1]
    LANE: gl.constexpr = 0 if T.pingpong else mine
    SLOTS: gl.constexpr = T.chunks if HAS_RESIDUAL else 0
    UP: gl.constexpr = T.chunks if T.gated else 0  # where the columns of up begin, in chunks
    sums = ()
    for i in gl.static_range(gl.constexpr(T.n_sums)):
        sums += (gl.full([T.rows, T.widths[i]], 0, gl.float32, T.layouts[i]),)  # type: ignore[assignment]
    slot = 0
    parity = 0
    turn = 1 - mine  # the first of two finds the door open
    if T.pingpong and mine > 0:
        _tile, begin, end, _whose = unit(0, size, T)
        slot, parity = _skip(slot, parity, end - begin + SLOTS, T)
    for i in range(mine - LANE, count_units(size, T), 2 if T.pingpong else 1):
        tile, begin, end, whose = unit(i, size, T)
        row, col = corner(tile, size, T)
        if T.pingpong:
            mbarrier.wait(order.index(mine), turn)
            turn ^= 1
        mbarrier.wait(ready.index(slot), parity)
        sums = _multiply(sums, x_ring, w_rings, slot, False, LANE, T)
        sums = _wait(sums, 1, T)  # for nothing yet
        for _ in range(begin + 1, end):
            before = slot
            slot, parity = _next(slot, parity, T)
            mbarrier.wait(ready.index(slot), parity)
            sums = _multiply(sums, x_ring, w_rings, slot, True, LANE, T)
            sums = _wait(sums, 1, T)
            mbarrier.arrive(free.index(before), count=1)
        if T.pingpong:
            ahead, ahead_parity = slot, parity
            for _ in gl.static_range(SLOTS):
                ahead, ahead_parity = _next(ahead, ahead_parity, T)
                mbarrier.wait(ready.index(ahead), ahead_parity)
            mbarrier.arrive(order.index(1 - mine), count=1)
        sums = _wait(sums, 0, T)
        mbarrier.arrive(free.index(slot), count=1)
        slot, parity = _next(slot, parity, T)

        chunks = _chunks(sums, T)
        last = True
        if T.partial:
            last = gl.to_tensor(whose[0]) < 2
            if not last:
                for j in gl.static_range(gl.constexpr(T.chunks)):
                    keep(chunks[UP + j], partial_ptr, whose, j, LANE, T)
                    if T.gated:
                        keep(chunks[j], partial_ptr, whose, j + T.chunks, LANE, T)
                last = arrives_last(counter_ptr + tile * T.sharing + LANE, whose[0])
        for j in gl.static_range(gl.constexpr(T.chunks)):
            residual = None
            if HAS_RESIDUAL:
                mbarrier.wait(ready.index(slot), parity)
                residual = x_ring.index(slot * T.sharing + LANE)
                residual = _seen_as(residual, gl.constexpr(T.out_block), out_desc)
            if last:
                z = gl.convert_layout(chunks[UP + j], T.part)
                z_gate = gl.convert_layout(chunks[j], T.part)
                out = out_ring.index(mine * T.out_buffers + j % T.out_buffers)
                at = row + LANE * T.rows
                _finish(
                    z,
                    z_gate,
                    residual,
                    out,
                    out_desc,
                    bias_ptr,
                    partial_ptr,
                    whose,
                    at,
                    col + j * T.chunk,
                    n,
                    LANE,
                    j,
                    T,
                )
            if HAS_RESIDUAL:
                fence_async_shared()
                mbarrier.arrive(free.index(slot), count=1)
                slot, parity = _next(slot, parity, T)
        if T.pingpong:
            _tile, begin, end, _whose = unit(i + 1, size, T)
            slot, parity = _skip(slot, parity, end - begin + SLOTS, T)
    tma.store_wait(0)


@gluon.jit(do_not_specialize_on_alignment=["bias_ptr", "counter_ptr"])
def product(x_desc, w_desc, out_desc, residual_desc, bias_ptr, partial_ptr, counter_ptr, T: gl.constexpr):
    """out[m, n] = sum over k of x[m, k] * w[n, k], and the epilogue."""
    x_ring = gl.allocate_shared_memory(x_desc.dtype, T.x_ring, x_desc.layout)
    w_rings = ()
    for i in gl.static_range(gl.constexpr(T.n_sums)):
        w_rings += (gl.allocate_shared_memory(w_desc.dtype, T.w_rings[i], w_desc.layout),)  # type: ignore[assignment]
    out_ring = gl.allocate_shared_memory(out_desc.dtype, T.out_ring, out_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [T.stages, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [T.stages, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(gl.constexpr(T.stages)):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=T.sharing)
    order = free
    if T.pingpong:
        order = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(2):
            mbarrier.init(order.index(i), count=1)
    fence_async_shared()  # the copies see them initialised too

    m = out_desc.shape[0]
    n = out_desc.shape[1]
    k = x_desc.shape[1] if T.x_k else x_desc.shape[0]
    ring = (x_ring, w_rings, ready, free, order)
    size = (m, n, k)
    HAS_RESIDUAL: gl.constexpr = residual_desc is not None
    if T.consumers == 1:
        gl.warp_specialize(
            [
                (_consume, (out_desc, bias_ptr, partial_ptr, counter_ptr, out_ring, ring, size, 0, HAS_RESIDUAL, T)),
                (_produce, (x_desc, w_desc, residual_desc, ring, size, T)),
            ],
            [1],
            [24],
        )
    elif T.consumers == 2:
        gl.warp_specialize(
            [
                (_consume, (out_desc, bias_ptr, partial_ptr, counter_ptr, out_ring, ring, size, 0, HAS_RESIDUAL, T)),
                (_consume, (out_desc, bias_ptr, partial_ptr, counter_ptr, out_ring, ring, size, 1, HAS_RESIDUAL, T)),
                (_produce, (x_desc, w_desc, residual_desc, ring, size, T)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.static_assert(T.consumers == 3)
        gl.warp_specialize(
            [
                (_consume, (out_desc, bias_ptr, partial_ptr, counter_ptr, out_ring, ring, size, 0, HAS_RESIDUAL, T)),
                (_consume, (out_desc, bias_ptr, partial_ptr, counter_ptr, out_ring, ring, size, 1, HAS_RESIDUAL, T)),
                (_consume, (out_desc, bias_ptr, partial_ptr, counter_ptr, out_ring, ring, size, 2, HAS_RESIDUAL, T)),
                (_produce, (x_desc, w_desc, residual_desc, ring, size, T)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )
