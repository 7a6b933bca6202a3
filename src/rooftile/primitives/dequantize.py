"""int8, int4 and fp8 weights as the tensor cores take them, and those of 8 bits in float32.

At 4 bits an H200's memory brings 35 weights a clock to each SM, which issues 128 instructions a clock, counted by
lanes: 3.7 a weight, for everything. A conversion from an integer runs at half of that rate or less. So on NVIDIA's GPUs
the bits are placed into the mantissa of a number whose last bit is worth 1, two weights an instruction, and that number
is subtracted: 1.4 instructions a weight for int4, and for int8 2 in bfloat16 and 1.25 in float16. All of it is exact.
float8_e4m3fn has a conversion instruction, for two elements; where a GPU has none, fp8 is read as bytes
(`quantize.writable`).
"""

from __future__ import annotations

from rooftile import runtime  # before Triton: runtime fixes the mode of the process
from rooftile.primitives.assembly import assembly

import triton  # isort: skip
import triton.language as tl  # isort: skip

# The four low nibbles of a word, then the four high ones: (MAGIC's number + nibble) - (that number + 8).
_INT4 = """{
    .reg .b32 lo, hi, one, less;
    mov.b32 one, ONE;
    mov.b32 less, LESS;
    and.b32 lo, $4, 0x0f0f0f0f;
    shr.u32 hi, $4, 4;
    and.b32 hi, hi, 0x0f0f0f0f;
    prmt.b32 $0, lo, MAGIC, 0x4140;
    prmt.b32 $1, lo, MAGIC, 0x4342;
    prmt.b32 $2, hi, MAGIC, 0x4140;
    prmt.b32 $3, hi, MAGIC, 0x4342;
    fma.rn.KIND $0, $0, one, less;
    fma.rn.KIND $1, $1, one, less;
    fma.rn.KIND $2, $2, one, less;
    fma.rn.KIND $3, $3, one, less;
}"""
# The same in float32, as 128 + nibble: 136 is not subtracted.
_INT4_FP32 = """{
    .reg .b32 lo, hi;
    and.b32 lo, $8, 0x0f0f0f0f;
    shr.u32 hi, $8, 4;
    and.b32 hi, hi, 0x0f0f0f0f;
    prmt.b32 $0, lo, 0x43000000, 0x7044;
    prmt.b32 $1, lo, 0x43000000, 0x7144;
    prmt.b32 $2, lo, 0x43000000, 0x7244;
    prmt.b32 $3, lo, 0x43000000, 0x7344;
    prmt.b32 $4, hi, 0x43000000, 0x7044;
    prmt.b32 $5, hi, 0x43000000, 0x7144;
    prmt.b32 $6, hi, 0x43000000, 0x7244;
    prmt.b32 $7, hi, 0x43000000, 0x7344;
}"""
# The sign bit is flipped, which adds 128.
_INT8_FP16 = """{
    .reg .b32 word, one, less;
    mov.b32 one, 0x3c003c00;
    mov.b32 less, 0xe480e480;
    xor.b32 word, $2, 0x80808080;
    prmt.b32 $0, word, 0x64646464, 0x4140;
    prmt.b32 $1, word, 0x64646464, 0x4342;
    fma.rn.f16x2 $0, $0, one, less;
    fma.rn.f16x2 $1, $1, one, less;
}"""
# bfloat16 has seven bits: 128 + the low seven, minus 128, or minus 256 where the sign bit is set.
_INT8_BF16 = """{
    .reg .b32 low, sign, one, a, b;
    mov.b32 one, 0x3f803f80;
    and.b32 low, $2, 0x7f7f7f7f;
    and.b32 sign, $2, 0x80808080;
    prmt.b32 $0, low, 0x43434343, 0x4140;
    prmt.b32 $1, low, 0x43434343, 0x4342;
    prmt.b32 a, sign, 0xc3c3c3c3, 0x4140;
    prmt.b32 b, sign, 0xc3c3c3c3, 0x4342;
    fma.rn.bf16x2 $0, $0, one, a;
    fma.rn.bf16x2 $1, $1, one, b;
}"""


def _int4(kind: str, magic: str, one: str, less: str) -> tl.constexpr:
    text = _INT4.replace("KIND", kind).replace("MAGIC", magic).replace("ONE", one).replace("LESS", less)
    return assembly(text)


INT4_BF16 = _int4("bf16x2", "0x43434343", "0x3f803f80", "0xc308c308")
INT4_FP16 = _int4("f16x2", "0x64646464", "0x3c003c00", "0xe408e408")
INT4_FP32 = assembly(_INT4_FP32)
INT8_BF16 = assembly(_INT8_BF16)
INT8_FP16 = assembly(_INT8_FP16)


def has_fast_conversions(target: runtime.Target) -> bool:
    """Whether the target takes the PTX above; others convert integers."""
    return target.arch.startswith("sm_")


@triton.jit
def e4m3_of_bits(x):
    """Bytes of e4m3 as float32. Their bits, moved to the places of float32's, are 2^-120 of the value."""
    bits = x.to(tl.int32)
    number = (((bits & 0x80) << 24) | ((bits & 0x7F) << 20)).to(tl.float32, bitcast=True) * 2.0**120
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), number)


@triton.jit
def as_float32(w, FAST_CONVERSIONS: tl.constexpr):
    """w of any format in float32; uint8 stands for bytes of e4m3."""
    if w.dtype == tl.uint8:
        y = e4m3_of_bits(w)
    elif FAST_CONVERSIONS and w.dtype == tl.int8:
        y = int8_as(w, tl.float16, FAST_CONVERSIONS).to(tl.float32)  # three instructions in place of a slow conversion
    else:
        y = w.to(tl.float32)
    return y


@triton.jit
def int8_as(w, DTYPE: tl.constexpr, FAST_CONVERSIONS: tl.constexpr):
    """An int8 tile in DTYPE."""
    if FAST_CONVERSIONS and DTYPE.is_bf16():
        y = tl.inline_asm_elementwise(INT8_BF16, "=r,=r,r", [w], dtype=tl.bfloat16, is_pure=True, pack=4)
    elif FAST_CONVERSIONS and DTYPE.is_fp16():
        y = tl.inline_asm_elementwise(INT8_FP16, "=r,=r,r", [w], dtype=tl.float16, is_pure=True, pack=4)
    else:
        y = w.to(tl.float32).to(DTYPE)
    return y


@triton.jit
def eight_bits_as(w, DTYPE: tl.constexpr, FAST_CONVERSIONS: tl.constexpr):
    """A tile of int8, of e4m3, or of e4m3's bytes, in DTYPE."""
    if w.dtype == tl.int8:
        y = int8_as(w, DTYPE, FAST_CONVERSIONS)
    elif w.dtype == tl.uint8:
        y = e4m3_of_bits(w).to(DTYPE)
    else:
        y = w.to(DTYPE)
    return y


@triton.jit
def int4_as_float32(w, FAST_CONVERSIONS: tl.constexpr):
    """The low nibbles of a uint8 tile, and the high ones, in float32, and by how much each is too large."""
    if FAST_CONVERSIONS:
        low, high = tl.inline_asm_elementwise(
            INT4_FP32, "=r,=r,=r,=r,=r,=r,=r,=r,r", [w], dtype=(tl.float32, tl.float32), is_pure=True, pack=4
        )
        return low, high, 136
    else:
        low, high = int4_as(w, tl.float32, False)
        return low, high, 0


@triton.jit
def int4_as(w, DTYPE: tl.constexpr, FAST_CONVERSIONS: tl.constexpr):
    """The low nibbles of a uint8 tile, and the high ones, minus 8, in DTYPE."""
    if FAST_CONVERSIONS and DTYPE.is_bf16():
        low, high = tl.inline_asm_elementwise(
            INT4_BF16, "=r,=r,=r,=r,r", [w], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    elif FAST_CONVERSIONS and DTYPE.is_fp16():
        low, high = tl.inline_asm_elementwise(
            INT4_FP16, "=r,=r,=r,=r,r", [w], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
        )
    else:
        low = ((w & 15).to(tl.float32) - 8).to(DTYPE)
        high = ((w >> 4).to(tl.float32) - 8).to(DTYPE)
    return low, high
