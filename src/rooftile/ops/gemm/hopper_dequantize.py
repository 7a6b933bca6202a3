"""The GEMM of many rows of x and a quantized weight on sm_90: the Hopper mainloop, its consumers dequantizing.

TMA brings the weight into shared memory as it is stored. A consumer loads its part into registers, in the layout of the
tensor cores' first operand, converts it there, and multiplies it by x from shared memory. While the tensor cores
multiply one step, the consumer converts the next. So the weight goes neither to memory nor to shared memory in 16 bits.

The first operand alone can be in registers, so the product is transposed: a tile has rows of the weight as its rows and
rows of x as its columns, and its sums are transposed on their way to shared memory.

    int8, fp8    each element is exact in x's dtype; the row's scale multiplies the float32 sum
    int4         each element, plus its group's offset if there is one, times the group's scale, is rounded to bfloat16

A step is 64 elements of the sum. All of an int4 step's elements lie in the low nibbles of 64 bytes, or in the high ones
(`packing.py`), so a step loads these bytes and takes half of each. The other halves are a later step's, which loads
them again, from the L2.

Barriers, slots, parities and the walk over tiles are those of hopper.py. It is kernel "hopper" of a quantized weight.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor

from rooftile import launching, library, runtime  # before Triton: runtime fixes the mode of the process
from rooftile.launching import Descriptor
from rooftile.ops.gemm import dispatch
from rooftile.ops.gemm.config import GemmConfig, Operands, Problem, Start
from rooftile.ops.gemm.hopper import REGISTERS, advance, corner, count_tiles
from rooftile.primitives.assembly import assembly
from rooftile.primitives.gluon import async_load, async_store, load_tile, split_columns

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
    torch.int8: gl.int8,
    torch.uint8: gl.uint8,
    torch.float8_e4m3fn: gl.float8e4nv,
}
STEP = gl.constexpr(64)  # elements of the sum: 128 bytes of a row of x, the widest swizzle
_CHUNK = gl.constexpr(64)  # columns of the output that are written at a time: what one instruction has as rows
_BARRIERS = 512

# Each turns two elements of 8 bits, the low half of $1, into two of 16. All are exact. `primitives.dequantize` converts
# the four elements of a word; in the layout of the first operand, a thread has only two adjacent ones. (With the
# constant as prmt's second operand, its selector would be moved to a register each time: an eighth of the step's
# instructions.)
# bfloat16 has seven bits: 128 + the low seven, minus 128, or minus 256 where the sign bit is set.
_INT8_BF16 = assembly(
    """{
    .reg .b32 less;
    prmt.b32 $0, 0x43434343, $1, 0x0504;
    lop3.b32 less, $0, 0x00800080, 0xc300c300, 0xea;
    and.b32 $0, $0, 0xff7fff7f;
    add.rn.bf16x2 $0, $0, less;
}"""
)
# The sign bit is flipped, which adds 128.
_INT8_FP16 = assembly(
    """{
    .reg .b32 less;
    mov.b32 less, 0xe480e480;
    xor.b32 $0, $1, 0x8080;
    prmt.b32 $0, 0x64646464, $0, 0x0504;
    add.rn.f16x2 $0, $0, less;
}"""
)
_E4M3_FP16 = assembly("{ .reg .b16 pair; cvt.u16.u32 pair, $1; cvt.rn.f16x2.e4m3x2 $0, pair; }")
_E4M3_BF16 = assembly(
    """{
    .reg .b16 pair, a, b;
    .reg .f32 x, y;
    cvt.u16.u32 pair, $1;
    cvt.rn.f16x2.e4m3x2 $0, pair;
    mov.b32 {a, b}, $0;
    cvt.f32.f16 x, a;
    cvt.f32.f16 y, b;
    cvt.rn.bf16x2.f32 $0, y, x;
}"""
)
# Nibbles of the low halves of $2 and $3, the low ones or ($4 is 4) the high ones: ((128 + nibble) - (136 - offset)),
# which is exact, times the scale. A row's values are given twice in a word, with each pair of its elements.
_INT4 = """{
    .reg .b32 word, a, b;
    prmt.b32 word, $2, $3, 0x5410;
    shr.u32 word, word, $4;
    and.b32 word, word, 0x0f0f0f0f;
    prmt.b32 $0, 0x43434343, word, 0x0504;
    prmt.b32 $1, 0x43434343, word, 0x0706;
    add.rn.bf16x2 $0, $0, $6;
    add.rn.bf16x2 $1, $1, $7;
    SCALE
}"""
_INT4_SCALED = assembly(_INT4.replace("SCALE", "mul.rn.bf16x2 $0, $0, $8; mul.rn.bf16x2 $1, $1, $9;"))
# By a scale in two parts, which have 16 bits together.
_INT4_SCALED_TWICE = assembly(
    _INT4.replace(
        "SCALE",
        """mul.rn.bf16x2 a, $0, $10;
    mul.rn.bf16x2 b, $1, $11;
    fma.rn.bf16x2 $0, $0, $8, a;
    fma.rn.bf16x2 $1, $1, $9, b;""",
    )
)
_TWICE = gl.constexpr("cvt.rn.bf16x2.f32 $0, $1, $1;")


@gluon.constexpr_function
def _conversion_of(weight, dtype):
    """The PTX for two elements of 8 bits in that dtype."""
    if weight == "int8":
        return (_INT8_BF16 if dtype.is_bf16() else _INT8_FP16).value
    return (_E4M3_BF16 if dtype.is_bf16() else _E4M3_FP16).value


@dataclasses.dataclass(frozen=True)
class DequantizeTiling:
    """All that the kernel is compiled for but the dtypes: one constant of it.

    Args:
        rows: rows of the weight that one consumer multiplies, 64 or 128. All consumers share the tile.
        cols: rows of x in a tile.
        out_buffers: chunks of one consumer that are being written at the same time.
        group_m: rows of tiles that are walked together; here of the weight's.
        weight: "int8", "fp8" or "int4".
        group: elements of an int4 weight that share a scale; 0 for a weight of 8 bits.
        has_offsets: whether each group has an offset beside its scale.
    """

    rows: int
    cols: int
    consumers: int
    stages: int
    out_buffers: int
    group_m: int
    weight: str
    group: int = 0
    has_offsets: bool = False

    @property
    def tile_rows(self) -> int:
        return self.rows * self.consumers

    @property
    def weight_block(self) -> list[int]:
        return [self.rows, STEP.value]

    @property
    def x_block(self) -> list[int]:
        return [self.cols, STEP.value]

    @property
    def out_block(self) -> list[int]:
        """Rows and columns of the output that are written at a time."""
        return [min(self.cols, 128), _CHUNK.value]

    @property
    def weight_ring(self) -> list[int]:
        """In pairs of bytes, as consumers load them,"""
        return [self.stages * self.consumers, self.rows, STEP.value // 2]

    @property
    def weight_layout(self) -> gl.NVMMASharedLayout:
        """and in TMA's swizzle of 64 bytes."""
        return gl.NVMMASharedLayout.get_default_for(self.weight_ring[1:], gl.uint16)

    @property
    def x_ring(self) -> list[int]:
        return [self.stages, *self.x_block]

    @property
    def out_ring(self) -> list[int]:
        return [self.consumers * self.out_buffers, *self.out_block]

    @property
    def layout(self) -> gl.NVMMADistributedLayout:
        """The sums in registers."""
        return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, self.cols, 16])

    @property
    def pairs(self) -> gl.DotOperandLayout:
        """A consumer's part of the weight in registers: pairs of bytes, then words of two elements of 16 bits,"""
        return gl.DotOperandLayout(0, self.layout, 1)

    @property
    def operand(self) -> gl.DotOperandLayout:
        """and the same registers as the tensor cores' operand."""
        return gl.DotOperandLayout(0, self.layout, 2)

    @property
    def part(self) -> gl.NVMMADistributedLayout:
        """Those sums that are written at a time, before they are transposed."""
        return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, self.out_block[0], 16])

    @property
    def parts(self) -> int:
        """How many of those a consumer has: a power of two."""
        return self.rows // _CHUNK.value * self.cols // self.out_block[0]

    @property
    def thread_sums(self) -> int:
        """Registers of a thread that sums take."""
        return self.rows * self.cols // 128

    @property
    def shared_memory(self) -> int:
        """Bytes, or a few more."""
        step = (self.tile_rows + 2 * self.cols) * STEP.value
        out = self.consumers * self.out_buffers * self.out_block[0] * 2 * _CHUNK.value
        return self.stages * step + out + _BARRIERS


@gluon.jit
def steps_of(size):
    """Steps of a tile's sum, an even number. Zeros are loaded past the end of K."""
    return gl.cdiv(size[2], gl.constexpr(2 * STEP)) * 2


@gluon.jit
def _stored_at(step, k, T: gl.constexpr):
    """The first stored column of a step's elements, and by how many bits they are to be shifted down.

    A last group without a second one has its first half in the low nibbles and its second half in the high ones.
    """
    first = step * STEP
    if T.group == 0:
        return first, 0
    else:
        block = first // gl.constexpr(2 * T.group)
        within = first - block * gl.constexpr(2 * T.group)
        half = gl.where((block + 1) * gl.constexpr(2 * T.group) > k, T.group // 2, T.group)
        is_high = within >= half
        return block * T.group + gl.where(is_high, within - half, within), gl.where(is_high, 4, 0)


@gluon.jit
def _produce(w_desc, x_desc, residual_desc, ring, size, T: gl.constexpr):
    """Keep the ring full. After a tile's last step comes the residual, `_CHUNK` columns a slot, in the place of x."""
    STEP_BYTES: gl.constexpr = T.consumers * w_desc.block_type.nbytes + x_desc.block_type.nbytes
    w_ring, x_ring, ready, free = ring
    slot = 0
    parity = 0
    for i in range(count_tiles(size, T)):
        row, col = corner(i, size, T)
        for step in range(steps_of(size)):
            at, _ = _stored_at(step, size[2], T)
            bar = ready.index(slot)
            mbarrier.wait(free.index(slot), parity ^ 1)
            mbarrier.expect(bar, STEP_BYTES)
            for j in gl.static_range(gl.constexpr(T.consumers)):
                load_tile(w_desc, [row + j * T.rows, at], bar, w_ring.index(slot * T.consumers + j))
            async_load(x_desc, [col, step * STEP], bar, x_ring.index(slot))
            slot, parity = advance(slot, parity, T)
        if residual_desc is not None:
            for chunk in range(T.tile_rows // _CHUNK):
                bar = ready.index(slot)
                mbarrier.wait(free.index(slot), parity ^ 1)
                mbarrier.expect(bar, residual_desc.block_type.nbytes)
                async_load(residual_desc, [col, row + chunk * _CHUNK], bar, x_ring.index(slot))
                slot, parity = advance(slot, parity, T)


@gluon.jit
def _load_scales(scale_ptr, row, step, size, T: gl.constexpr):
    """The scales of a step's groups, and offsets if there are any, as `_dequantize` takes them.

    They are loaded a step early. Rows and steps out of bounds have those of the last one.
    """
    if T.group == 0:
        return ()
    else:
        groups = size[2] // T.group
        rows = gl.minimum(row + gl.arange(0, T.rows, layout=gl.SliceLayout(1, T.pairs)), size[0] - 1)
        at = rows.to(gl.int64) * groups + gl.minimum(step * STEP // T.group, groups - 1)
        if T.has_offsets:
            return gl.load(scale_ptr + 2 * at), gl.load(scale_ptr + 2 * at + 1)
        else:
            return (gl.load(scale_ptr + at),)


@gluon.jit
def _twice(y):
    """Each of float32, rounded to bfloat16, in both halves of a word."""
    return gl.inline_asm_elementwise(_TWICE, "=r,r", [y], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _dequantize_int4(pairs, scales, shift, T: gl.constexpr):
    less = gl.full([T.rows], -136, gl.float32, gl.SliceLayout(1, T.pairs))
    if T.has_offsets:
        less += scales[1].to(gl.float32)
    less = _twice(less)[:, None]
    y = scales[0].to(gl.float32)
    scale = _twice(y)
    if scales[0].dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            _INT4_SCALED, "=r,=r,r,r,r,r,r,r,r,r", [pairs, shift, less, scale[:, None]],
            dtype=gl.int32, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        rest = _twice(y - (scale & -65536).to(gl.float32, bitcast=True))
        return gl.inline_asm_elementwise(
            _INT4_SCALED_TWICE, "=r,=r,r,r,r,r,r,r,r,r,r,r", [pairs, shift, less, scale[:, None], rest[:, None]],
            dtype=gl.int32, is_pure=True, pack=2,
        )  # fmt: skip


@gluon.jit
def _dequantize(w_ring, slot, scales, step, size, mine: gl.constexpr, DTYPE: gl.constexpr, T: gl.constexpr):
    """This consumer's part of the weight in a slot, as the tensor cores' first operand."""
    pairs = w_ring.index(slot * T.consumers + mine).load(T.pairs).to(gl.int32)
    if T.weight == "int4":
        _, shift = _stored_at(step, size[2], T)
        words = _dequantize_int4(pairs, scales, shift, T)
    else:
        PTX: gl.constexpr = _conversion_of(T.weight, DTYPE)
        words = gl.inline_asm_elementwise(PTX, "=r,r", [pairs], dtype=gl.int32, is_pure=True, pack=1)
    low = words.to(gl.uint16).to(DTYPE, bitcast=True)
    high = (words >> 16).to(gl.uint16).to(DTYPE, bitcast=True)
    return gl.convert_layout(gl.join(low, high).reshape([T.rows, STEP]), T.operand, assert_trivial=True)


@gluon.jit
def _load_rows(ptr, row, size, T: gl.constexpr):
    """An element for each of a consumer's rows, which are columns of the output: a tuple of 64 each."""
    chunks = ()
    if ptr is not None:
        for i in gl.static_range(gl.constexpr(T.rows // _CHUNK)):
            rows = row + i * _CHUNK + gl.arange(0, _CHUNK, layout=gl.SliceLayout(1, T.part))
            chunks += (gl.load(ptr + gl.minimum(rows, size[0] - 1)).to(gl.float32)[:, None],)  # type: ignore[assignment]
    return chunks


@gluon.jit
def _parts(acc, T: gl.constexpr):
    """The sums of 64 rows of the weight each, and of these as many columns as are written at a time."""
    COUNT: gl.constexpr = T.cols // T.out_block[0]
    if T.rows == _CHUNK:
        return split_columns(acc, COUNT)
    else:
        first, second = acc.reshape([2, T.rows // 2, T.cols]).permute(1, 2, 0).split()
        return split_columns(first, COUNT) + split_columns(second, COUNT)


@gluon.jit
def _multiply(acc, w, x_ring, slot):
    """Start sum += weights @ x.T on what is in the slot."""
    return warpgroup_mma(w, x_ring.index(slot).permute((1, 0)), acc, is_async=True)


@gluon.jit
def _write_chunk(
    parts, factors, biases, residual, out_desc, out_ring, row, col, i: gl.constexpr, mine: gl.constexpr,
    T: gl.constexpr,
):  # fmt: skip
    """The epilogue of this consumer's chunk i: 64 rows of the weight, from row + 64 i on, by the tile's rows of x."""
    ROWS: gl.constexpr = T.out_block[0]
    PARTS: gl.constexpr = T.cols // ROWS
    for j in gl.static_range(PARTS):
        z = gl.convert_layout(parts[i * PARTS + j], T.part)
        if len(factors) > 0:
            z *= factors[i]
        if len(biases) > 0:
            z += biases[i]
        if residual is not None:
            z += residual.slice(j * ROWS, ROWS).permute((1, 0)).load(T.part).to(gl.float32)
        out = out_ring.index(mine * T.out_buffers + (i * PARTS + j) % T.out_buffers)
        tma.store_wait(T.out_buffers - 1)
        out.permute((1, 0)).store(z.to(out_desc.dtype))
        fence_async_shared()
        async_store(out_desc, [col + j * ROWS, row + i * _CHUNK], out)


@gluon.jit
def _consume(
    out_desc, scale_ptr, bias_ptr, out_ring, ring, size, mine: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
    T: gl.constexpr,
):  # fmt: skip
    """Multiply and write out the weight's rows of every tile from mine * rows on."""
    w_ring, x_ring, ready, free = ring
    DTYPE: gl.constexpr = out_desc.dtype
    CHUNKS: gl.constexpr = T.rows // _CHUNK  # of this consumer
    slot = 0
    parity = 0
    tiles = count_tiles(size, T)
    row, col = corner(0, size, T)
    row += mine * T.rows
    scales = _load_scales(scale_ptr, row, 0, size, T)
    for i in range(tiles):
        acc = gl.full([T.rows, T.cols], 0, gl.float32, T.layout)
        factors = _load_rows(scale_ptr if T.group == 0 else None, row, size, T)  # now, so as not to wait at the end
        biases = _load_rows(bias_ptr, row, size, T)
        mbarrier.wait(ready.index(slot), parity)
        w = _dequantize(w_ring, slot, scales, 0, size, mine, DTYPE, T)
        scales = _load_scales(scale_ptr, row, 1, size, T)
        after, parity = advance(slot, parity, T)
        mbarrier.wait(ready.index(after), parity)
        # Two steps at a time, and none in flight from one turn of the loop into the next: ptxas would serialise all
        # products, whose operands are in registers. A barrier is waited for between the second conversion and the wait
        # for the product before it: in one basic block ptxas moves the conversion behind that wait.
        for step in range(2, steps_of(size), 2):
            acc = _multiply(acc, w, x_ring, slot)
            w = _dequantize(w_ring, after, scales, step - 1, size, mine, DTYPE, T)
            scales = _load_scales(scale_ptr, row, step, size, T)
            before = slot
            slot, parity = advance(after, parity, T)
            mbarrier.wait(ready.index(slot), parity)
            acc = _multiply(acc, w, x_ring, after)
            acc = warpgroup_mma_wait(1, (acc,))
            mbarrier.arrive(free.index(before), count=1)
            before = after
            w = _dequantize(w_ring, slot, scales, step, size, mine, DTYPE, T)
            scales = _load_scales(scale_ptr, row, step + 1, size, T)
            after, parity = advance(slot, parity, T)
            mbarrier.wait(ready.index(after), parity)
            acc = warpgroup_mma_wait(0, (acc,))
            mbarrier.arrive(free.index(before), count=1)
        acc = _multiply(acc, w, x_ring, slot)
        w = _dequantize(w_ring, after, scales, steps_of(size) - 1, size, mine, DTYPE, T)
        acc = _multiply(acc, w, x_ring, after)
        acc = warpgroup_mma_wait(0, (acc,))
        mbarrier.arrive(free.index(slot), count=1)
        mbarrier.arrive(free.index(after), count=1)
        slot, parity = advance(after, parity, T)

        # Where the next tile is, and its first scales, are known before this one is written out.
        next_row, next_col = corner(gl.minimum(i + 1, tiles - 1), size, T)
        next_row += mine * T.rows
        scales = _load_scales(scale_ptr, next_row, 0, size, T)
        parts = _parts(acc, T)
        for chunk in gl.static_range(gl.constexpr(T.tile_rows // _CHUNK)):
            if HAS_RESIDUAL:
                mbarrier.wait(ready.index(slot), parity)
            if chunk // CHUNKS == mine:
                residual = x_ring.index(slot) if HAS_RESIDUAL else None
                _write_chunk(parts, factors, biases, residual, out_desc, out_ring, row, col, chunk % CHUNKS, mine, T)
            if HAS_RESIDUAL:
                fence_async_shared()
                mbarrier.arrive(free.index(slot), count=1)
                slot, parity = advance(slot, parity, T)
        row, col = next_row, next_col
    tma.store_wait(0)


@gluon.jit(do_not_specialize_on_alignment=["scale_ptr", "bias_ptr"])
def hopper_gemm_dequantize(w_desc, x_desc, out_desc, residual_desc, scale_ptr, bias_ptr, T: gl.constexpr):
    """out[m, n] = sum over k of x[m, k] * w[n, k] * scale, + bias[n] + residual[m, n]."""
    w_ring = gl.allocate_shared_memory(gl.uint16, T.weight_ring, T.weight_layout)
    x_ring = gl.allocate_shared_memory(x_desc.dtype, T.x_ring, x_desc.layout)
    out_ring = gl.allocate_shared_memory(out_desc.dtype, T.out_ring, out_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [T.stages, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [T.stages, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(gl.constexpr(T.stages)):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=T.consumers)
    fence_async_shared()  # the loads see them initialised too
    ring = (w_ring, x_ring, ready, free)
    size = (out_desc.shape[1], out_desc.shape[0], x_desc.shape[1])  # the tile's rows are the weight's
    HAS_RESIDUAL: gl.constexpr = residual_desc is not None
    if T.consumers == 1:
        gl.warp_specialize(
            [
                (_consume, (out_desc, scale_ptr, bias_ptr, out_ring, ring, size, 0, HAS_RESIDUAL, T)),
                (_produce, (w_desc, x_desc, residual_desc, ring, size, T)),
            ],
            [1],
            [24],
        )
    elif T.consumers == 2:
        gl.warp_specialize(
            [
                (_consume, (out_desc, scale_ptr, bias_ptr, out_ring, ring, size, 0, HAS_RESIDUAL, T)),
                (_consume, (out_desc, scale_ptr, bias_ptr, out_ring, ring, size, 1, HAS_RESIDUAL, T)),
                (_produce, (w_desc, x_desc, residual_desc, ring, size, T)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.static_assert(T.consumers == 3)
        gl.warp_specialize(
            [
                (_consume, (out_desc, scale_ptr, bias_ptr, out_ring, ring, size, 0, HAS_RESIDUAL, T)),
                (_consume, (out_desc, scale_ptr, bias_ptr, out_ring, ring, size, 1, HAS_RESIDUAL, T)),
                (_consume, (out_desc, scale_ptr, bias_ptr, out_ring, ring, size, 2, HAS_RESIDUAL, T)),
                (_produce, (w_desc, x_desc, residual_desc, ring, size, T)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )


@functools.cache
def tiling_of(c: GemmConfig, weight: str, group: int, has_offsets: bool, limit: int) -> DequantizeTiling:
    """What the kernel is compiled for. Two chunks of the output are written at once if both fit."""
    consumers = max(1, c.num_warps // 4)

    rows = c.block_n // consumers

    def tiling(out_buffers: int) -> DequantizeTiling:
        return DequantizeTiling(
            rows, c.block_m, consumers, c.num_stages, out_buffers, c.group_m, weight, group, has_offsets
        )

    one, two = tiling(1), tiling(2)
    return two if two.parts > 1 and two.shared_memory <= limit else one


def can_implement(p: Problem, c: GemmConfig, target: runtime.Target) -> str | None:
    """Why this kernel can't compute p as c says; None where it can."""
    if not target.gluon:
        return f"kernel 'hopper' is for sm_90, and {target.why_no_gluon}"
    if p.dtype != torch.bfloat16 and (p.dtype != torch.float16 or p.weight == "int4"):
        also = "" if p.weight == "int4" else " and float16"
        return f"kernel 'hopper' takes bfloat16{also} with a weight of {p.weight}, not {p.dtype}"
    if not (p.x_layout == p.w_layout == "k" and p.aligned and p.out_aligned) or p.k % 16 or p.n % 8:
        return "kernel 'hopper' takes operands and an output whose rows begin at multiples of 16 bytes"
    if not 0 < min(p.m, p.n, p.k) <= max(p.m, p.n, p.k) < 2**31:
        return f"kernel 'hopper' takes sizes from 1 to 2^31 - 1, not {p.m}, {p.n}, {p.k}"
    if p.group and (p.group < STEP.value or p.k % 128):
        return f"kernel 'hopper' takes groups of 64 and 128 of a K that 128 divides, not of {p.group} and {p.k}"
    if c.split_k != 1 or c.pingpong or c.slices != 1 or c.prefetch is not None:
        return "split_k, pingpong, slices and prefetch are for other kernels and weights than 'hopper' and this one"
    if c.num_warps not in (4, 8, 12) or c.block_n * 4 // c.num_warps not in (64, 128):
        return (
            f"block_n is {c.block_n}: kernel 'hopper' takes 64 or 128 of a quantized weight for 4 of 4, 8 or 12 warps"
        )
    if c.block_m not in (32, 64, 128, 256) or c.block_k != STEP.value:
        return f"the tile is {c.block_m} x {c.block_k}: kernel 'hopper' takes 32 to 256 rows of x, and 64 a step"
    if c.num_stages < 3:
        return f"num_stages is {c.num_stages}, expected at least 3 for kernel 'hopper' and a quantized weight"
    t = tiling_of(c, p.weight, p.group, p.offsets, target.shared_memory)
    most = 64 if c.num_warps == 12 else 128
    if t.thread_sums > most:
        return f"the tile has {t.thread_sums} sums for each thread of {c.num_warps} warps, expected at most {most}"
    if t.shared_memory > target.shared_memory:
        shared, limit = t.shared_memory, target.shared_memory
        return f"num_stages is {c.num_stages}: {shared} bytes of tiles, expected at most {limit}"
    return None


def _described(t: Tensor, block: list[int]) -> Descriptor:
    found = launching.describe(t, tuple(block), gl.NVMMASharedLayout.get_default_for(block, _DTYPES[t.dtype]))
    assert found is not None, "can_implement takes only what TMA does"
    return found


@functools.cache
def _launcher(t: DequantizeTiling, dtypes: tuple[torch.dtype | None, ...]) -> launching.KernelLauncher:
    return launching.KernelLauncher(hopper_gemm_dequantize, {"T": t}, num_warps=4, maxnreg=REGISTERS[t.consumers])


def prepare(o: Operands, c: GemmConfig) -> Start:
    """x (M, K), w (N, K) or (N, K / 2), out (M, N). A residual that TMA can't load is copied."""
    if isinstance(o.x, FunctionalTensor):
        raise launching.Untraceable("TMA descriptors")
    assert o.weight_scale is not None, "the weight is quantized"
    target = runtime.target(o.w.device)
    weight = dispatch.FORMATS[o.w.dtype]
    group = o.x.shape[1] // o.weight_scale.shape[1] if weight == "int4" else 0
    t = tiling_of(c, weight, group, o.weight_scale.dim() == 3, target.shared_memory)
    (m, n), block = o.out.shape, [t.cols, _CHUNK.value]
    descriptors = {0: _described(o.w, t.weight_block), 1: _described(o.x, t.x_block), 2: _described(o.out, t.out_block)}
    copies = o.residual is not None and launching.describe(o.residual, tuple(block)) is None
    if o.residual is not None:
        like = o.residual.clone(memory_format=torch.contiguous_format) if copies else o.residual
        descriptors[3] = _described(like, block)
    dtypes = tuple(None if i is None else i.dtype for i in (o.x, o.w, o.weight_scale, o.bias, o.residual))
    programs = min(target.multiprocessors, library.cdiv(n, t.tile_rows) * library.cdiv(m, t.cols))
    start = launching.bind(_launcher(t, dtypes), programs, descriptors=descriptors)

    def run(
        x: Tensor, w: Tensor, out: Tensor, bias: Tensor | None, residual: Tensor | None, _: None, __: None,
        weight_scale: Tensor,
    ) -> None:  # fmt: skip
        if copies:
            assert residual is not None
            residual = residual.clone(memory_format=torch.contiguous_format)
        start(w, x, out, residual, weight_scale, bias)

    return run
