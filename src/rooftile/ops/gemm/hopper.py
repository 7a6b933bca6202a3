"""The many-row mainloop for sm_90 (Gluon): warp-specialized, with TMA loads and wgmma, persistent.

One CTA stays on each SM and walks over its tiles. Its producer warp has TMA fill a ring of `stages` pipeline stages
(slots), each with `block_k` elements of the tile's rows of x and of w. Its consumers are warpgroups with `rows` rows of
the tile each: they accumulate in registers (the `sums` below, float32), both operands come from shared memory. They
free a slot once wgmma has read it. The producer runs on into the next tile during the epilogue of the last one.

    ready[slot]  completed by the bytes that land; the consumers wait for it
    free[slot]   completed by one arrival of each consumer that shares the tile; the producer waits for it

Slots and parities: see primitives/gluon.py. The kernel's one constant, T, is a `HopperTiling`. Its fields are Python
numbers, no constants of Triton's: where one is needed, `gl.constexpr` makes it one.

The tile is limited by registers, of which the accumulators take `HopperTiling.thread_sums`, and the stages by shared
memory. Where a tile's columns are no power of two, and for some gated GEMMs, w has several rings and a consumer several
accumulators, which are multiplied one after another (`HopperTiling`).

A sum can continue over a second pair of operands (`more_x`, `more_w`), such as the factors of a LoRA adapter: the
producer loads their steps after those of x and w, in the same tiles, and the consumers see only more steps.

What the epilogue reads, a residual or gate and up, comes through the same ring: after a tile's last step the producer
loads it into slots of its own, `chunk` columns a slot, in the place of x. So it is being loaded while the mainloop
ends.

The consumers share each tile (cooperative), or two of them take the CTA's tiles in turn (`pingpong`), so that the
epilogue of one overlaps the mainloop of the other. Then each skips the slots of the other's tiles, and

    order[i]     completed by one arrival of the other consumer; consumer i waits for it before a tile's first step

keeps their mainloops apart. It is needed for more than speed: a parity tells a round of the ring from the previous one,
not from the one before that, so a consumer may wait for a slot only once the bytes of the slot's previous round have
landed. A consumer therefore arrives after all slots of its tile have landed, those that its epilogue reads too.

The fp8 kernel of float32 sums (hopper_fp8.py) shares the producer, the ring and the tiling.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor

from rooftile import launching, library, runtime  # before Triton: runtime fixes the mode of the process
from rooftile.launching import Descriptor
from rooftile.ops.gemm.config import GemmConfig, Operands, Problem, Start
from rooftile.ops.gemm.hopper_epilogue import finish, write_chunk
from rooftile.ops.gemm.parts import grouped_tile
from rooftile.primitives.gluon import async_load, next_slot, split_columns, view_as
from rooftile.quantize import BLOCK

import triton.experimental.gluon.language as gl  # isort: skip
from triton.experimental import gluon  # isort: skip
from triton.experimental.gluon.language.nvidia.hopper import (  # isort: skip
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

_DTYPES = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float32: gl.float32,
    torch.float8_e4m3fn: gl.float8e4nv,
}
# Registers of a thread at launch, by consumers. The producer counts as 4 warps, so there are 8, 12 or 16 warps.
# `warp_specialize` then moves most of the producer's registers to the consumers.
REGISTERS = {1: 168, 2: 168, 3: 128}
_BARRIERS = 512  # bytes of shared memory, at most, for barriers, what warps exchange, and alignment


def _powers(cols: int) -> tuple[int, ...]:
    """The powers of two whose sum that is, the largest first."""
    return tuple(1 << i for i in reversed(range(cols.bit_length())) if cols >> i & 1)


@dataclasses.dataclass(frozen=True)
class HopperTiling:
    """All that the kernel is specialized on but the dtypes, as its one constexpr.

    Triton's tensors are powers of two, and a tile's columns need not be: 192 of them are loaded as three pieces of 64,
    and a consumer has two accumulators, of 128 and of 64 columns.

    Args:
        rows: rows of x that one consumer multiplies, 64 or 128.
        cols: columns of the output in a tile; a gated GEMM has as many gate rows and as many up rows of w in it.
        chunk: columns of the output that are written at a time.
        out_buffers: chunks of one consumer that are being written at the same time.
        x_k, w_k: whether k is the contiguous dimension of x and of w. Where not, the tensor cores transpose the tile.
        group_m: rows of tiles that are walked together, see `parts.grouped_tile`.
        pingpong: every consumer has tiles of its own; otherwise all consumers share one, each `rows` rows of it.
        x_scale, w_scale: what shares a scale of fp8 operands; "" for 16-bit ones.
        reads: how many tensors of the output's shape the epilogue reads: 1, a residual; 2, gate and up (see
            `hopper_epilogue.finish`).
        outputs: how many it writes.
    """

    rows: int
    cols: int
    block_k: int
    chunk: int
    consumers: int
    stages: int
    out_buffers: int
    group_m: int
    x_k: bool
    w_k: bool
    gated: bool
    activation: str
    pingpong: bool = False
    x_scale: str = ""
    w_scale: str = ""
    reads: int = 0
    outputs: int = 1

    @property
    def sharing(self) -> int:
        """Consumers that share a tile."""
        return 1 if self.pingpong else self.consumers

    @property
    def tile_rows(self) -> int:
        return self.rows * self.sharing

    @property
    def halves(self) -> int:
        """Rows of w for each column of the output."""
        return 2 if self.gated else 1

    @property
    def piece(self) -> int:
        """Columns of the tile in one load of w: the largest power of two of which they are a multiple."""
        largest = self.cols & -self.cols
        return min(largest, BLOCK) if self.x_scale else largest

    @property
    def w_loads(self) -> int:
        return self.halves * self.cols // self.piece

    @property
    def joined(self) -> bool:
        """Whether all pieces of w in a slot, a gated GEMM's two halves too, are one operand of wgmma.

        A w that is contiguous along k allows it if a row of a piece is no wider than the swizzle, 128 bytes. One that
        is contiguous along n allows it within a half only.
        """
        return self.w_k and self.block_k <= 64

    @property
    def widths(self) -> tuple[int, ...]:
        """Columns of each of a consumer's accumulators: of a gated GEMM those of the gate first."""
        if self.x_scale:
            return (self.piece,) * self.w_loads
        if self.joined:
            return _powers(self.halves * self.cols)
        return _powers(self.cols) * self.halves

    @property
    def n_sums(self) -> int:
        return len(self.widths)

    @property
    def pieces(self) -> tuple[int, ...]:
        """How many loads of w in a slot each sum has."""
        return tuple(n // self.piece for n in self.widths)

    @property
    def begins(self) -> tuple[tuple[int, ...], ...]:
        """The columns of the slot at which each of those loads begins."""
        ends = itertools.accumulate(self.widths)
        return tuple(tuple(range(end - n, end, self.piece)) for end, n in zip(ends, self.widths, strict=True))

    @property
    def chunks(self) -> int:
        return self.cols // self.chunk

    @property
    def read_slots(self) -> int:
        """Slots of the ring for what a tile's epilogue reads."""
        return self.reads * self.chunks

    @property
    def writes(self) -> int:
        """Chunks that a tile's epilogue writes."""
        return self.outputs * self.chunks

    @property
    def x_block(self) -> list[int]:
        return [self.rows, self.block_k] if self.x_k else [self.block_k, self.rows]

    @property
    def w_block(self) -> list[int]:
        return [self.piece, self.block_k] if self.w_k else [self.block_k, self.piece]

    @property
    def out_block(self) -> list[int]:
        return [self.rows, self.chunk]

    @property
    def x_ring(self) -> list[int]:
        return [self.stages * self.sharing, *self.x_block]

    @property
    def w_rings(self) -> tuple[list[int], ...]:
        """Each sum's part of w has a ring of its own: here of pieces, as they are loaded."""
        return tuple([self.stages * n, *self.w_block] for n in self.pieces)

    @property
    def w_tiles(self) -> tuple[list[int], ...]:
        """The same memory, as it is multiplied."""
        return tuple([self.stages, *((n, self.block_k) if self.w_k else (self.block_k, n))] for n in self.widths)

    @property
    def out_ring(self) -> list[int]:
        return [self.consumers * self.out_buffers, *self.out_block]

    @property
    def mma_k(self) -> int:
        """Elements of the sum that one instruction takes: 32 bytes."""
        return 32 if self.x_scale else 16

    @property
    def layouts(self) -> tuple[gl.NVMMADistributedLayout, ...]:
        """The accumulators. With three consumers, a thread has too few registers for wgmma of 256 columns."""
        widest = 128 if self.consumers == 3 else 256
        return tuple(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, min(n, widest), self.mma_k]) for n in self.widths)

    @property
    def part(self) -> gl.NVMMADistributedLayout:
        """A chunk of an accumulator."""
        return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, self.chunk, self.mma_k])

    @property
    def thread_sums(self) -> int:
        """Registers of a thread that the accumulators take."""
        return self.rows * self.halves * self.cols // 128

    def shared_memory(self, out_size: int) -> int:
        """An upper bound in bytes: the ring, the output's buffers and the barriers."""
        step = (self.tile_rows + self.halves * self.cols) * self.block_k * (32 // self.mma_k)
        return self.stages * step + self.consumers * self.out_buffers * self.rows * self.chunk * out_size + _BARRIERS


@gluon.jit
def more_steps(more_x_desc, T: gl.constexpr):
    """Steps of the second pair of operands. Zeros are loaded past their end."""
    rank = more_x_desc.shape[1] if T.x_k else more_x_desc.shape[0]
    return gl.cdiv(rank, gl.constexpr(T.block_k))


@gluon.jit
def count_tiles(size, T: gl.constexpr):
    """How many tiles this CTA has."""
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    tiles = gl.cdiv(size[0], gl.constexpr(T.tile_rows)) * gl.cdiv(size[1], gl.constexpr(T.cols))
    return gl.cdiv(tiles - program, programs)


@gluon.jit
def corner(i, size, T: gl.constexpr):
    """The first row and column in the output of this CTA's tile i."""
    tile = gl.program_id(0) + i * gl.num_programs(0)
    tiles_m = gl.cdiv(size[0], gl.constexpr(T.tile_rows))
    tiles_n = gl.cdiv(size[1], gl.constexpr(T.cols))
    row, col = grouped_tile(tile, tiles_m, tiles_n, T.group_m)
    return row * T.tile_rows, col * T.cols


@gluon.jit
def advance(slot, parity, T: gl.constexpr):
    return next_slot(slot, parity, gl.constexpr(T.stages))


@gluon.jit
def _skip(slot, parity, count, T: gl.constexpr):
    """The slot `count` slots further on, and the parity there; it waits for none of them."""
    slot += count
    turns = slot // T.stages
    return slot - turns * T.stages, parity ^ (turns & 1)


@gluon.jit
def _load_w(w_desc, w_rings, slot, col, n, at, bar, T: gl.constexpr):
    """Start the loads of w for a slot: its rows from col on, and for a gated GEMM also those from n + col on."""
    for i in gl.static_range(gl.constexpr(T.n_sums)):
        for j in gl.static_range(gl.constexpr(T.pieces[i])):
            to = w_rings[i].index(slot * T.pieces[i] + j)
            row = col + T.begins[i][j] // T.cols * n + T.begins[i][j] % T.cols
            if T.w_k:
                async_load(w_desc, [row, at], bar, to)
            else:
                async_load(w_desc, [at, row], bar, to)


@gluon.jit
def _load_step(x_desc, w_desc, ring, slot, parity, row, col, n, at, T: gl.constexpr):
    """Start the loads of a step of the sum, from element `at` on, once the slot is free."""
    STEP_BYTES: gl.constexpr = T.sharing * x_desc.block_type.nbytes + T.w_loads * w_desc.block_type.nbytes
    x_ring, w_rings, ready, free, _ = ring
    bar = ready.index(slot)
    mbarrier.wait(free.index(slot), parity ^ 1)
    mbarrier.expect(bar, STEP_BYTES)
    for j in gl.static_range(gl.constexpr(T.sharing)):
        to = x_ring.index(slot * T.sharing + j)
        if T.x_k:
            async_load(x_desc, [row + j * T.rows, at], bar, to)
        else:
            async_load(x_desc, [at, row + j * T.rows], bar, to)
    _load_w(w_desc, w_rings, slot, col, n, at, bar, T)


@gluon.jit
def _load_read(desc, ring, slot, parity, row, col, T: gl.constexpr):
    """Start the loads of a chunk that the epilogue reads, into the place of x; the next slot and its parity."""
    x_ring, _, ready, free, _ = ring
    bar = ready.index(slot)
    mbarrier.wait(free.index(slot), parity ^ 1)
    mbarrier.expect(bar, T.sharing * desc.block_type.nbytes)
    for j in gl.static_range(gl.constexpr(T.sharing)):
        to = view_as(x_ring.index(slot * T.sharing + j), gl.constexpr(T.out_block), desc)
        async_load(desc, [row + j * T.rows, col], bar, to)
    return advance(slot, parity, T)


@gluon.jit
def produce(x_desc, w_desc, read_desc, read_up_desc, more_x_desc, more_w_desc, ring, size, T: gl.constexpr):
    """The producer: keep the ring full."""
    n = size[1]
    slot = 0
    parity = 0
    for i in range(count_tiles(size, T)):
        steps = gl.cdiv(size[2], gl.constexpr(T.block_k))
        row, col = corner(i, size, T)
        for step in range(steps):
            _load_step(x_desc, w_desc, ring, slot, parity, row, col, n, step * T.block_k, T)
            slot, parity = advance(slot, parity, T)
        if more_x_desc is not None:
            for step in range(more_steps(more_x_desc, T)):
                _load_step(more_x_desc, more_w_desc, ring, slot, parity, row, col, n, step * T.block_k, T)
                slot, parity = advance(slot, parity, T)
        if T.reads > 0:
            for chunk in range(T.chunks):
                slot, parity = _load_read(read_desc, ring, slot, parity, row, col + chunk * T.chunk, T)
                if T.reads == 2:
                    slot, parity = _load_read(read_up_desc, ring, slot, parity, row, col + chunk * T.chunk, T)


@gluon.jit
def _multiply(sums, x_ring, w_rings, slot, use_acc, lane, T: gl.constexpr):
    """Issue a step: sum += x @ w.T for every accumulator, with the tiles in the slot. `lane`: which rows of x."""
    x = x_ring.index(slot * T.sharing + lane)
    if not T.x_k:
        x = x.permute((1, 0))
    after = ()
    for i in gl.static_range(gl.constexpr(T.n_sums)):
        w = view_as(w_rings[i], gl.constexpr(T.w_tiles[i]), w_rings[i]).index(slot)
        if T.w_k:
            w = w.permute((1, 0))
        after += (warpgroup_mma(x, w, sums[i], use_acc=use_acc, is_async=True),)  # type: ignore[assignment]
    return after


@gluon.jit
def _wait(sums, STEPS: gl.constexpr, T: gl.constexpr):
    """Wait until at most STEPS steps are in flight: wgmma complete in the order of issue, n_sums of them a step."""
    if T.n_sums == 1:
        return (warpgroup_mma_wait(STEPS, sums),)
    else:
        return warpgroup_mma_wait(gl.constexpr(STEPS * T.n_sums), sums)


@gluon.jit
def _chunks(sums, T: gl.constexpr):
    """The accumulators in chunks of `chunk` columns: of a gated GEMM first those of the gate."""
    chunks = ()
    for i in gl.static_range(gl.constexpr(T.n_sums)):
        chunks += split_columns(sums[i], gl.constexpr(T.widths[i] // T.chunk))
    return chunks


@gluon.jit
def _read(ring, slot, parity, like, lane: gl.constexpr, T: gl.constexpr):
    """A chunk that the epilogue reads, in float32, whose slot it frees; the next slot and its parity."""
    x_ring, _, ready, free, _ = ring
    mbarrier.wait(ready.index(slot), parity)
    memory = view_as(x_ring.index(slot * T.sharing + lane), gl.constexpr(T.out_block), like)
    chunk = memory.load(T.part).to(gl.float32)
    fence_async_shared()  # it has been read before TMA writes the slot again
    mbarrier.arrive(free.index(slot), count=1)
    slot, parity = advance(slot, parity, T)
    return chunk, slot, parity


@gluon.jit
def _consume(out_descs, bias_ptr, more_x_desc, out_ring, ring, size, mine: gl.constexpr, T: gl.constexpr):
    """Consumer `mine`: mainloop and epilogue of its rows of every tile; with pingpong, of every other tile."""
    x_ring, w_rings, ready, free, order = ring
    n = size[1]
    steps = gl.cdiv(size[2], gl.constexpr(T.block_k))
    if more_x_desc is not None:
        steps += more_steps(more_x_desc, T)
    LANE: gl.constexpr = 0 if T.pingpong else mine
    UP: gl.constexpr = T.chunks if T.gated else 0  # where the columns of up begin, in chunks
    sums = ()
    for i in gl.static_range(gl.constexpr(T.n_sums)):
        sums += (gl.full([T.rows, T.widths[i]], 0, gl.float32, T.layouts[i]),)  # type: ignore[assignment]
    slot = 0
    parity = 0
    turn = 1 - mine  # the parity for which consumer 0's first wait passes
    if T.pingpong and mine > 0:
        slot, parity = _skip(slot, parity, steps + T.read_slots, T)
    for i in range(mine - LANE, count_tiles(size, T), 2 if T.pingpong else 1):
        row, col = corner(i, size, T)
        if T.pingpong:
            mbarrier.wait(order.index(mine), turn)
            turn ^= 1
        mbarrier.wait(ready.index(slot), parity)
        sums = _multiply(sums, x_ring, w_rings, slot, False, LANE, T)
        sums = _wait(sums, 1, T)  # one step is in flight: it waits for nothing
        # One step stays in flight while the next one's bytes are awaited; then the slot of the one before is free.
        for _ in range(1, steps):
            before = slot
            slot, parity = advance(slot, parity, T)
            mbarrier.wait(ready.index(slot), parity)
            sums = _multiply(sums, x_ring, w_rings, slot, True, LANE, T)
            sums = _wait(sums, 1, T)
            mbarrier.arrive(free.index(before), count=1)
        if T.pingpong:  # the other's mainloop may begin once what the epilogue reads has landed too: see `order` above
            later, later_parity = slot, parity
            for _ in gl.static_range(gl.constexpr(T.read_slots)):
                later, later_parity = advance(later, later_parity, T)
                mbarrier.wait(ready.index(later), later_parity)
            mbarrier.arrive(order.index(1 - mine), count=1)
        sums = _wait(sums, 0, T)
        mbarrier.arrive(free.index(slot), count=1)
        slot, parity = advance(slot, parity, T)

        chunks = _chunks(sums, T)
        for j in gl.static_range(gl.constexpr(T.chunks)):
            read = None
            read_up = None
            if T.reads > 0:
                read, slot, parity = _read(ring, slot, parity, out_descs[0], LANE, T)
            if T.reads == 2:
                read_up, slot, parity = _read(ring, slot, parity, out_descs[0], LANE, T)
            z = gl.convert_layout(chunks[UP + j], T.part)
            z_gate = gl.convert_layout(chunks[j], T.part)
            to = [row + LANE * T.rows, col + j * T.chunk]
            results = finish(z, z_gate, read, read_up, bias_ptr, to[1], n, T)
            for k in gl.static_range(gl.constexpr(T.outputs)):
                write_chunk(results[k], out_ring, out_descs[k], to[0], to[1], j * T.outputs + k, mine, T)
        if T.pingpong:
            slot, parity = _skip(slot, parity, steps + T.read_slots, T)
    tma.store_wait(0)


@gluon.jit
def allocate(x_desc, w_desc, out_desc, T: gl.constexpr):
    """Shared memory for the ring, its barriers and the output, and the sizes m, n, k."""
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
    fence_async_shared()  # makes the initialized barriers visible to TMA
    k = x_desc.shape[1] if T.x_k else x_desc.shape[0]
    return (x_ring, w_rings, ready, free, order), out_ring, (out_desc.shape[0], out_desc.shape[1], k)


@gluon.jit(do_not_specialize_on_alignment=["bias_ptr"])
def hopper_gemm(
    x_desc, w_desc, out_desc, read_desc, more_x_desc, more_w_desc, bias_ptr, read_up_desc, out_second_desc,
    out_third_desc, T: gl.constexpr,
):  # fmt: skip
    """out[m, n] = sum over k of x[m, k] * w[n, k] + sum over r of more_x[m, r] * more_w[n, r], and the epilogue.

    The first function of `warp_specialize` runs in the launched 4 warps. Its lists have the warps and registers of the
    others.
    """
    ring, out_ring, size = allocate(x_desc, w_desc, out_desc, T)
    out_descs = (out_desc, out_second_desc, out_third_desc)
    if T.consumers == 1:
        gl.warp_specialize(
            [
                (_consume, (out_descs, bias_ptr, more_x_desc, out_ring, ring, size, 0, T)),
                (produce, (x_desc, w_desc, read_desc, read_up_desc, more_x_desc, more_w_desc, ring, size, T)),
            ],
            [1],
            [24],
        )
    elif T.consumers == 2:
        gl.warp_specialize(
            [
                (_consume, (out_descs, bias_ptr, more_x_desc, out_ring, ring, size, 0, T)),
                (_consume, (out_descs, bias_ptr, more_x_desc, out_ring, ring, size, 1, T)),
                (produce, (x_desc, w_desc, read_desc, read_up_desc, more_x_desc, more_w_desc, ring, size, T)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.static_assert(T.consumers == 3)
        gl.warp_specialize(
            [
                (_consume, (out_descs, bias_ptr, more_x_desc, out_ring, ring, size, 0, T)),
                (_consume, (out_descs, bias_ptr, more_x_desc, out_ring, ring, size, 1, T)),
                (_consume, (out_descs, bias_ptr, more_x_desc, out_ring, ring, size, 2, T)),
                (produce, (x_desc, w_desc, read_desc, read_up_desc, more_x_desc, more_w_desc, ring, size, T)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )


@functools.cache
def tiling_of(
    c: GemmConfig, x_k: bool, w_k: bool, gated: bool, activation: str, x_kind: str, w_kind: str, out_size: int,
    limit: int, reads: int = 0, outputs: int = 1,
) -> HopperTiling:  # fmt: skip
    """What the kernel is compiled for. The output is written in chunks of 128 bytes a row, double-buffered if two fit.

    block_n counts columns of the output: a gated GEMM has as many gate rows and as many up rows of w in a tile.
    num_warps are the warps that multiply, 4, 8 or 12; one more loads. With pingpong a tile of 16-bit elements belongs
    to 4 of 8; one of fp8 is shared by all.
    """
    consumers = max(1, c.num_warps // 4)
    pingpong = c.pingpong and not x_kind
    rows = c.block_m // (1 if pingpong else consumers)
    chunk = min(128 // out_size, c.block_n & -c.block_n, BLOCK if x_kind else c.block_k)  # a part of every sum

    def tiling(out_buffers: int) -> HopperTiling:
        return HopperTiling(
            rows, c.block_n, c.block_k, chunk, consumers, c.num_stages, out_buffers, c.group_m,
            x_k, w_k, gated, activation, pingpong, x_kind, w_kind, reads, outputs,
        )  # fmt: skip

    t = tiling(2) if tiling(2).shared_memory(out_size) <= limit else tiling(1)
    # With pingpong a consumer waits for all that its epilogue reads while it holds the slot of its last step.
    assert not pingpong or t.stages > t.read_slots
    return t


def memory_reason(t: HopperTiling, p: Problem, c: GemmConfig, target: runtime.Target) -> str | None:
    shared = t.shared_memory(p.out_size)
    if shared > target.shared_memory:
        return f"num_stages is {c.num_stages}: {shared} bytes of tiles, expected at most {target.shared_memory}"
    return None


def can_implement(p: Problem, c: GemmConfig, target: runtime.Target) -> str | None:
    """Why this kernel can't compute p as c says; None where it can."""
    if not target.gluon:
        return f"kernel 'hopper' is for sm_90, and {target.why_no_gluon}"
    if p.dtype not in (torch.bfloat16, torch.float16):
        return f"kernel 'hopper' takes float16 and bfloat16, not {p.dtype}"
    if p.batch != 1:
        return f"kernel 'hopper' takes one GEMM at a time, not a batch of {p.batch}"
    if p.x_layout not in ("k", "m") or p.w_layout not in ("k", "n"):
        return "kernel 'hopper' takes operands that are contiguous along one dimension"
    if not (p.x_aligned and p.w_aligned and p.out_aligned) or p.n * p.dtype.itemsize % 16:
        return "kernel 'hopper' takes operands and an output whose rows begin at multiples of 16 bytes"
    if not 0 < min(p.m, p.n, p.k) <= max(p.m, p.n, p.k) < 2**31:
        return f"kernel 'hopper' takes sizes from 1 to 2^31 - 1, not {p.m}, {p.n}, {p.k}"
    if c.split_k != 1:
        return f"split_k is {c.split_k}, expected 1 for kernel 'hopper'"
    if c.pingpong and c.num_warps != 8:
        return f"num_warps is {c.num_warps}: kernel 'hopper' takes 8 with pingpong"
    warps = 4 if c.pingpong else c.num_warps  # of a tile
    if c.num_warps not in (4, 8, 12) or c.block_m * 4 // warps not in (64, 128):
        return f"block_m is {c.block_m}: kernel 'hopper' takes 64 or 128 rows for every 4 of 4, 8 or 12 warps"
    if not 32 <= c.block_n <= 256 or not 32 <= c.block_k <= 128:
        return f"the tile is {c.block_n} x {c.block_k}: kernel 'hopper' takes 32 to 256 columns, and 32 to 128 a step"
    between = c.block_n & (c.block_n - 1) != 0  # powers of two: pieces of w, and several sums
    if between and c.block_k == 128 and p.w_layout == "k":
        return f"block_k is 128, expected 32 or 64 with {c.block_n} columns and a weight that is contiguous along k"
    if between and c.num_warps == 12 and p.gated:  # the compiler spilled registers
        return f"num_warps is 12, expected 4 or 8 with {c.block_n} columns and a gate"
    t = tiling_of(c, True, True, p.gated, "", "", "", 2, target.shared_memory)
    most = 160 if c.num_warps < 12 and not p.gated else 128
    if t.thread_sums > most:
        return f"the tile has {t.thread_sums} sums for each thread of {warps} warps, expected at most {most}"
    if c.pingpong and c.num_stages <= t.chunks:  # one consumer holds the slots of its residual while the other runs
        return f"num_stages is {c.num_stages}: expected more than {t.chunks} with pingpong"
    return memory_reason(t, p, c, target)


def along_k(t: Tensor) -> bool:
    return t.stride(1) == 1 or t.shape[1] == 1


@functools.cache
def _launcher(kernel: Any, t: HopperTiling, dtypes: tuple[torch.dtype | None, ...]) -> launching.KernelLauncher:
    return launching.KernelLauncher(kernel, {"T": t}, num_warps=4, maxnreg=REGISTERS[t.consumers])


def described(t: Tensor, block: list[int]) -> Descriptor:
    """The TMA descriptor of an operand that `can_implement` takes."""
    layout = gl.NVMMASharedLayout.get_default_for(block, _DTYPES[t.dtype])
    found = launching.describe(t, tuple(block), layout)
    assert found is not None, "can_implement takes only what TMA does"
    return found


def bind(
    kernel: Any, o: Operands, t: HopperTiling, descriptors: dict[int, Descriptor], numbers: tuple[int, ...] = ()
) -> Callable[..., None]:
    """The launch of a kernel whose first pointers are the descriptors of x, w and out, then `descriptors`."""
    tiles = library.cdiv(o.out.shape[0], t.tile_rows) * library.cdiv(o.out.shape[1], t.cols)
    programs = min(runtime.target(o.w.device).multiprocessors, tiles)
    descriptors = {
        0: described(o.x if t.x_k else o.x.T, t.x_block),
        1: described(o.w if t.w_k else o.w.T, t.w_block),
        2: described(o.out, t.out_block),
        **descriptors,
    }
    dtypes = tuple(None if tensor is None else tensor.dtype for tensor in (o.x, o.out, o.bias, o.residual, o.more_x))
    return launching.bind(_launcher(kernel, t, dtypes), programs, numbers=numbers, descriptors=descriptors)


def prepare(o: Operands, c: GemmConfig) -> Start:
    """x (M, K), w (N, K) or (2N, K), out (M, N). A residual that TMA can't load is copied."""
    if isinstance(o.x, FunctionalTensor):
        raise launching.Untraceable("TMA descriptors")
    limit = runtime.target(o.w.device).shared_memory
    reads = 0 if o.residual is None else 1
    t = tiling_of(c, along_k(o.x), along_k(o.w), o.gated, o.activation, "", "", 2, limit, reads)
    descriptors = {}
    copies = o.residual is not None and launching.describe(o.residual, tuple(t.out_block)) is None
    if o.residual is not None:
        like = o.residual.clone(memory_format=torch.contiguous_format) if copies else o.residual
        descriptors[3] = described(like, t.out_block)
    if o.more_x is not None and o.more_w is not None:
        descriptors[4] = described(o.more_x if t.x_k else o.more_x.T, t.x_block)
        descriptors[5] = described(o.more_w if t.w_k else o.more_w.T, t.w_block)
    start = bind(hopper_gemm, o, t, descriptors)

    def run(
        x: Tensor, w: Tensor, out: Tensor, bias: Tensor | None, residual: Tensor | None, _: None, __: None, ___: None,
        more_x: Tensor | None = None, more_w: Tensor | None = None,
    ) -> None:  # fmt: skip
        if copies:
            assert residual is not None
            residual = residual.clone(memory_format=torch.contiguous_format)
        start(x, w, out, residual, more_x, more_w, bias, None, None, None)

    return run
