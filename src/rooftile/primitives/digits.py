"""One row of x times a weight of 8 or 4 bits on the integer matrix unit, with x in three digits of 8 bits.

    x[k] = (65536 d2[k] + 256 d1[k] + d0[k]) * unit[k // 128],   unit = max |x| of those 128 numbers / 2^21

Numbers of 8 bits are multiplied as they were loaded, and those of 4 become numbers of 8 by three instructions for
eight: 0.8 instructions a number with everything, where a conversion to float32 and a sum take 3.9, more than an H200
has time for at 4 bits (`dequantize.py`). The matrix unit multiplies eight columns by a tile of the weight; x's digits
are three of them. Its sums of 128 products are integers, and exact; each becomes float32, times the unit and the
group's scale, and is added up there. So x has 22 bits of the largest number of its 128: more than one of 16 bits has,
and all of those of numbers that are not below 2^-14 of the largest in bfloat16, 2^-11 in float16. A largest below 1e-30
counts as 1e-30.

A program first makes the digits of its part of x, in shared memory, while its first weights are on their way: those
need not wait for the kernel ahead. Then each warp multiplies rows of its own, from the loads to the matrix unit, whose
sums don't mind the order of k, as long as both operands have it: so a thread takes the k for which it gives the matrix
unit its first operand from 16 bytes that lie together. `SLICES` warps share the rows of a tile, each with blocks of K
of its own; their sums meet once, at the end.
"""

from __future__ import annotations

from rooftile import runtime  # noqa: F401  # before Triton: runtime fixes the mode of the process
from rooftile.primitives.assembly import assembly
from rooftile.primitives.pdl import prefetch
from rooftile.primitives.weights import block_scales

import triton  # isort: skip
import triton.experimental.gluon.language as gl  # isort: skip
from triton.experimental import gluon  # isort: skip
from triton.experimental.gluon.language.nvidia.ampere import mma_v2  # isort: skip

# Numbers of x that have one unit, and bytes of a row of the weight that are multiplied at a time, a block: 128 numbers
# of 8 bits, or of 4 two groups of 128, whose low nibbles are the one and whose high nibbles the other.
BLOCK = gl.constexpr(128)

# The bytes of four integers, one after another: the third of each, the second, the first. The integers are 0x8080 too
# large, so that all three are signed.
_DIGITS = assembly(
    """{
    .reg .b32 p, q, r, s;
    prmt.b32 p, $3, $4, 0x5140;
    prmt.b32 q, $5, $6, 0x5140;
    prmt.b32 r, $3, $4, 0x0062;
    prmt.b32 s, $5, $6, 0x0062;
    prmt.b32 $0, r, s, 0x5410;
    prmt.b32 r, p, q, 0x7632;
    prmt.b32 s, p, q, 0x5410;
    xor.b32 $1, r, 0x80808080;
    xor.b32 $2, s, 0x80808080;
}"""
)
# Sixteen times the low nibbles less 8, and the high ones: (byte & 0xf0) ^ 0x80, one instruction where 0x80 is in a
# register.
_NIBBLES = assembly(
    """{
    .reg .b32 low, flip;
    mov.b32 flip, 0x80808080;
    shl.b32 low, $2, 4;
    lop3.b32 $0, low, 0xf0f0f0f0, flip, 0x6a;
    lop3.b32 $1, $2, 0xf0f0f0f0, flip, 0x6a;
}"""
)
# Triton 3.9 has that name; 3.6 has it with an underscore.
_RENAMED = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))
_THREE_BYTES, _TWO_BYTES = gl.constexpr((gl.int8,) * 3), gl.constexpr((gl.int8,) * 2)


@gluon.constexpr_function
def layout_of_sums(warps, slices):
    """Of sums (slices, rows of the weight, columns), and of the matrix unit's operands."""
    return gl.NVMMADistributedLayout([2, 0], [slices, warps // slices, 1], instr_shape=[1, 16, 8])


@gluon.constexpr_function
def layout_of_weights(warps, slices):
    return gl.DotOperandLayout(0, layout_of_sums(warps, slices), 16)


@gluon.constexpr_function
def blocks_of(k, group):
    """Blocks of a row of the weight."""
    return k // (BLOCK.value * (2 if group else 1))


@gluon.constexpr_function
def steps_of(k, group, slices, split):
    """Blocks that each warp multiplies, one after another; of those past the last block x's digits are zero."""
    return triton.cdiv(k // (BLOCK.value * (2 if group else 1)), slices * split)


@gluon.jit
def tile_rows(ROWS: gl.constexpr, SLICES: gl.constexpr):
    """The rows of a tile as weights are loaded, and as they are summed: for a caller to say which of the weight."""
    weights: gl.constexpr = layout_of_weights(gl.num_warps(), SLICES)
    sums: gl.constexpr = layout_of_sums(gl.num_warps(), SLICES)
    loaded = gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, weights)))
    return loaded, gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, sums)))


@gluon.jit
def in_pairs_of_rows(row):
    """Of a row of a tile the pair that it is of, and which of the two: eight first ones, then their second ones, and so
    on. So a thread has the sums of both."""
    return row // 16 * 8 + row % 8, row // 8 % 2


@gluon.jit
def pairs_apart(z, PAIRS: gl.constexpr, LAYOUT: gl.constexpr):
    """The sums of a tile of such pairs: of the first ones, and of the second."""
    a, b = z.reshape([PAIRS // 8, 2, 8]).permute([0, 2, 1]).split()
    return gl.convert_layout(a.reshape([PAIRS]), LAYOUT), gl.convert_layout(b.reshape([PAIRS]), LAYOUT)


@gluon.jit
def _blocks(first, K: gl.constexpr, GROUP: gl.constexpr, EVEN: gl.constexpr, SLICES: gl.constexpr, LIKE: gl.constexpr):
    """The block of each slice from that of the first one on; past the last, the last."""
    block = first + gl.arange(0, SLICES, layout=gl.SliceLayout(1, gl.SliceLayout(2, LIKE)))
    if EVEN:
        return block
    else:
        return gl.minimum(block, blocks_of(K, GROUP) - 1)


@gluon.jit
def _weights(
    w_ptr, rows, split, step: gl.constexpr, K: gl.constexpr, GROUP: gl.constexpr, SLICES: gl.constexpr,
    SPLIT: gl.constexpr, stride_wn,
):  # fmt: skip
    """The weights of a step, in a tuple."""
    STEPS: gl.constexpr = steps_of(K, GROUP, SLICES, SPLIT)
    EVEN: gl.constexpr = blocks_of(K, GROUP) == STEPS * SLICES * SPLIT
    layout: gl.constexpr = layout_of_weights(gl.num_warps(), SLICES)
    block = _blocks((split * STEPS + step) * SLICES, K, GROUP, EVEN, SLICES, layout)
    inner = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    w_rows = w_ptr + rows.to(gl.int64)[None, :, None] * stride_wn
    return (gl.load(w_rows + (block * BLOCK)[:, None, None] + inner[None, None, :], eviction_policy="evict_first"),)


@gluon.jit
def _scales(
    scale_ptr, rows, split, step: gl.constexpr, K: gl.constexpr, GROUP: gl.constexpr, PAIRS: gl.constexpr,
    SLICES: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """The scales of a step's low nibbles and of its high ones, in a tuple; of 8 bits none."""
    if GROUP > 0:
        STEPS: gl.constexpr = steps_of(K, GROUP, SLICES, SPLIT)
        EVEN: gl.constexpr = blocks_of(K, GROUP) == STEPS * SLICES * SPLIT
        layout: gl.constexpr = layout_of_sums(gl.num_warps(), SLICES)
        block = _blocks((split * STEPS + step) * SLICES, K, GROUP, EVEN, SLICES, layout)
        return (block_scales(scale_ptr, rows.to(gl.int64)[None, :], block[:, None], K // GROUP, PAIRS),)
    else:
        return ((),)


@gluon.jit
def first_weights(
    w_ptr, rows, split, K: gl.constexpr, GROUP: gl.constexpr, SLICES: gl.constexpr, SPLIT: gl.constexpr,
    AHEAD: gl.constexpr, stride_wn,
):  # fmt: skip
    """What `sum_products` multiplies first, of AHEAD steps: to be asked for before the kernel ahead has ended.

    No kernel that lets the next one start before it has ended writes integers of 8 bits; any other one has ended. All
    else, scales and biases too, may be such a kernel's results, and is to be asked for behind the wait.
    """
    coming = ()
    for step in gl.static_range(AHEAD):
        if step < steps_of(K, GROUP, SLICES, SPLIT):
            coming += _weights(w_ptr, rows[0], split, step, K, GROUP, SLICES, SPLIT, stride_wn)
    return coming


@gluon.jit
def prefetch_steps(
    w_ptr, row, split, K: gl.constexpr, GROUP: gl.constexpr, SLICES: gl.constexpr, SPLIT: gl.constexpr,
    AHEAD: gl.constexpr, COUNT: gl.constexpr, stride_wn,
):  # fmt: skip
    """Bring the weights of COUNT steps after the first AHEAD into the L2; `row` has the rows of the weight, once."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [16, 2], [gl.num_warps(), 1], [1, 0])
    row = gl.convert_layout(row, gl.SliceLayout(1, layout))
    first = split * (steps_of(K, GROUP, SLICES, SPLIT) * SLICES) + AHEAD * SLICES
    line = first + gl.arange(0, triton.next_power_of_2(COUNT * SLICES), layout=gl.SliceLayout(0, layout))
    line = gl.minimum(line, blocks_of(K, GROUP) - 1) * BLOCK
    prefetch(w_ptr + row.to(gl.int64)[:, None] * stride_wn + line[None, :])


@gluon.jit
def _digits(y):
    """The digits of each number of y `(N, 128)`, as eight columns `(N, 8, 128)` of which the first, the third and the
    fifth count, and the units `(N,)`."""
    # As integers, of which a NaN is the largest.
    largest = gl.max(y.to(gl.int32, bitcast=True) & 0x7FFFFFFF, axis=1).to(gl.float32, bitcast=True)
    unit = gl.where(largest < 1e-30, 1e-30, largest) * (1.0 / 2097152.0)  # the reciprocal is finite
    # 1.5 * 2^23 added: the last bit is worth 1, and the bits are the integer and a constant.
    bits = (y * (1.0 / unit)[:, None] + 12582912.0).to(gl.int32, bitcast=True)
    d2, d1, d0 = gl.inline_asm_elementwise(
        _DIGITS, "=r,=r,=r,r,r,r,r", [bits + (0x8080 - 0x4B400000)], dtype=_THREE_BYTES, is_pure=True, pack=4
    )
    four = gl.join(gl.join(d2, d0), gl.join(d1, d0))
    eight = gl.join(four, four).reshape([y.shape[0], y.shape[1], 8])
    return eight.permute([0, 2, 1]), unit


@gluon.jit
def _worth(COLUMNS_OF: gl.constexpr, GROUP: gl.constexpr):
    """What the sums of a column count."""
    column = gl.arange(0, 8, layout=COLUMNS_OF)
    worth = gl.where(column == 0, 65536.0, gl.where(column == 2, 256.0, gl.where(column == 4, 1.0, 0.0)))
    if GROUP > 0:
        worth *= 1.0 / 16.0
    return worth


@gluon.jit
def issued(number):
    """The number; the assembler moves no load across this. It would put off those of later steps until they are due."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1; bar.warp.sync 0xffffffff;", "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _seen_as(memory, shape: gl.constexpr):
    """The same memory of another shape."""
    if _RENAMED:
        return memory.reinterpret(memory.dtype, shape, memory.layout)
    else:
        return memory._reinterpret(memory.dtype, shape, memory.layout)


@gluon.jit
def sum_products(
    x_ptr, norm_ptr, w_ptr, scale_ptr, rows, coming, split, K: gl.constexpr, GROUP: gl.constexpr, PAIRS: gl.constexpr,
    HAS_NORM: gl.constexpr, OFFSET: gl.constexpr, SLICES: gl.constexpr, SPLIT: gl.constexpr, AHEAD: gl.constexpr,
    stride_wn,
):  # fmt: skip
    """The sums of a tile's rows over this part of K, without what is to multiply whole rows; and of x's squares there,
    if x is to be multiplied by a norm's weight."""
    BLOCKS_OF_X: gl.constexpr = 2 if GROUP > 0 else 1  # beside a block of the weight
    STEPS: gl.constexpr = steps_of(K, GROUP, SLICES, SPLIT)
    ROWS: gl.constexpr = rows[0].shape[0]
    EACH: gl.constexpr = 4 * gl.num_warps()  # blocks that become digits at a time, sixteen numbers to a thread
    ROUNDS: gl.constexpr = (BLOCKS_OF_X * STEPS * SLICES + EACH - 1) // EACH
    # Sixteen bytes of a column lie together, and those of two columns a phase apart: no two lanes ask one bank.
    digits_layout: gl.constexpr = gl.SwizzledSharedLayout(64, 1, 2, order=[2, 1, 0])
    units_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    made = gl.allocate_shared_memory(gl.int8, [ROUNDS, EACH, 8, BLOCK], digits_layout)
    made_units = gl.allocate_shared_memory(gl.float32, [ROUNDS, EACH], units_layout)

    scales = ()
    for ahead in gl.static_range(AHEAD):
        if ahead < STEPS:
            scales += _scales(scale_ptr, rows[1], split, ahead, K, GROUP, PAIRS, SLICES, SPLIT)

    # In the order in which they are multiplied: all low nibbles' blocks, then all high ones'.
    layout: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [gl.num_warps(), 1], [1, 0])
    inner = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, layout))[None, :]
    squares = gl.zeros([EACH], gl.float32, layout=gl.SliceLayout(1, layout))
    for r in range(ROUNDS):
        place = r * EACH + gl.arange(0, EACH, layout=gl.SliceLayout(1, layout))
        step = place // SLICES
        block = (split * STEPS + step % STEPS) * SLICES + place % SLICES
        block = block * BLOCKS_OF_X + step // STEPS
        inside = ((step < BLOCKS_OF_X * STEPS) & (block < K // BLOCK))[:, None] & (inner >= 0)
        columns = block[:, None] * BLOCK + inner
        y = gl.load(x_ptr + columns, mask=inside, other=0.0).to(gl.float32)
        if HAS_NORM:
            squares += gl.sum(y * y, axis=1)
            norm = gl.load(norm_ptr + columns, mask=inside, other=0.0).to(gl.float32)
            if OFFSET != 0:
                norm += OFFSET
            y *= norm
        eight, unit = _digits(y)
        made.index(r).store(eight)
        made_units.index(r).store(unit)
    total = gl.sum(squares, axis=0)

    sums: gl.constexpr = layout_of_sums(gl.num_warps(), SLICES)
    x_layout: gl.constexpr = gl.DotOperandLayout(1, sums, 16)
    units_of: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, sums))
    digits = _seen_as(made, [ROUNDS * EACH // SLICES, SLICES, 8, BLOCK])
    units = _seen_as(made_units, [ROUNDS * EACH // SLICES, SLICES])
    none = gl.zeros([SLICES, ROWS, 8], gl.int32, layout=sums)
    acc = gl.zeros([SLICES, ROWS, 8], gl.float32, layout=sums)
    # All steps one after another: in a loop each byte on its way would have a register of its own.
    for step in gl.static_range(STEPS):
        if step + AHEAD < STEPS:
            coming += _weights(w_ptr, rows[0], split, step + AHEAD, K, GROUP, SLICES, SPLIT, stride_wn)
            scales += _scales(scale_ptr, rows[1], split, step + AHEAD, K, GROUP, PAIRS, SLICES, SPLIT)
        at = issued(split * 0 + step)
        w, scale = coming[0], scales[0]  # type: ignore[misc]  # it sees the tuples as they began
        coming, scales = coming[1:], scales[1:]
        x = digits.index(at).permute([0, 2, 1]).load(x_layout)
        unit = units.index(at).load(units_of)[:, None]
        if GROUP > 0:
            x_high = digits.index(STEPS + at).permute([0, 2, 1]).load(x_layout)
            unit_high = units.index(STEPS + at).load(units_of)[:, None]
            low, high = gl.inline_asm_elementwise(
                _NIBBLES, "=r,=r,r", [w], dtype=_TWO_BYTES, is_pure=True, pack=4
            )  # fmt: skip
            acc += mma_v2(low, x, none).to(gl.float32) * (scale[0] * unit)[:, :, None]
            acc += mma_v2(high, x_high, none).to(gl.float32) * (scale[1] * unit_high)[:, :, None]
        else:
            acc += mma_v2(w, x, none).to(gl.float32) * unit[:, :, None]
    worth = _worth(gl.SliceLayout(0, gl.SliceLayout(1, sums)), GROUP)
    return gl.sum(gl.sum(acc * worth[None, None, :], axis=2), axis=0), total
