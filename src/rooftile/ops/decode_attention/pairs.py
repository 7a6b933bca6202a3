"""Caches of 8 bits as the matrix unit takes them: two neighbouring numbers of a row are a word of 16 bits.

Two words of a register are two rows, or two places of one row, of what the matrix unit multiplies. So the low bytes of
words are one operand, and the high bytes another: a product over a row is the sum of the products over its even and
its odd places, and the values' even and odd columns are results of their own. Words can be transposed on their way from
shared memory as 16-bit numbers can, and bytes can't.

All becomes float16, whose 11 bits hold e4m3 and int8 exactly: of e4m3 the chip converts two in an instruction; an int8
is put behind float16's 1024, which is then taken off. bfloat16's range float16 has not: the query's rows are brought
into it by a power of two each, and weights are 1 at most.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile import runtime  # before Triton: runtime fixes the mode of the process
from rooftile.ops.attention.common import parts
from rooftile.primitives.assembly import assembly

import triton  # isort: skip
import triton.language as tl  # isort: skip

# The low bytes of two words, then the high ones.
_E4M3 = assembly("""{
    .reg .b32 sorted;
    .reg .b16 low, high;
    prmt.b32 sorted, $2, 0, 0x3120;
    mov.b32 {low, high}, sorted;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
}""")
# The sign's bit is turned over, which adds 128.
_INT8 = assembly("""{
    .reg .b32 word, magic, less;
    mov.b32 magic, 0x64646464;
    mov.b32 less, 0xe480e480;
    xor.b32 word, $2, 0x80808080;
    prmt.b32 $0, word, magic, 0x4240;
    prmt.b32 $1, word, magic, 0x4341;
    add.rn.f16x2 $0, $0, less;
    add.rn.f16x2 $1, $1, less;
}""")


def kind_of(q: Tensor, k: Tensor, v: Tensor, target: runtime.Target) -> str:
    """How a cache is read in words: as "e4m3" or "int8"; "" where it is read number by number."""
    e4m3 = k.dtype == torch.float8_e4m3fn
    if k.element_size() > 1 or q.dtype == torch.float32:
        return ""
    if target is not runtime.INTERPRETER:
        arch = target.arch
        if not arch.startswith("sm_") or (e4m3 and int(arch[3:]) < 89):  # older chips don't convert e4m3
            return ""
    for t in (k, v):
        # A second part of the columns, too, has words enough for the matrix unit.
        if any(0 < part < 32 for part in parts(t.shape[3])) or t.shape[3] % 2:
            return ""
    return "e4m3" if e4m3 else "int8"


def words_of(t: Tensor) -> Tensor:
    """A cache as words; copied where its rows begin at odd bytes."""
    if any(stride % 2 for stride in t.stride()[:3]) or t.storage_offset() % 2:
        t = t.clone(memory_format=torch.contiguous_format)
    return t.view(torch.int16)


@triton.jit
def _e4m3(byte):
    """Bits of e4m3, as they are where float16 has them: 2^8 too small."""
    bits = ((byte & 0x80) << 8) | ((byte & 0x7F) << 7)
    number = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((byte & 0x7F) == 0x7F, float("nan"), number).to(tl.float16)


@triton.jit
def halves(words, PAIRS: tl.constexpr, PTX: tl.constexpr):
    """The low bytes and the high bytes of words, in float16."""
    if PTX and PAIRS == "e4m3":
        low, high = tl.inline_asm_elementwise(
            _E4M3, "=r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    elif PTX:
        low, high = tl.inline_asm_elementwise(
            _INT8, "=r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    elif PAIRS == "e4m3":
        low = _e4m3(words.to(tl.int32) & 0xFF)
        high = _e4m3((words.to(tl.int32) >> 8) & 0xFF)
    else:
        low = ((words.to(tl.int32) << 24) >> 24).to(tl.float16)
        high = (words.to(tl.int32) >> 8).to(tl.float16)
    return low, high


@triton.jit
def along_rows(words, PAIRS: tl.constexpr, PTX: tl.constexpr):
    """(rows, words) as (rows, numbers): a row's even places, then its odd ones. No number goes to another thread."""
    low, high = halves(words, PAIRS, PTX)
    both = tl.permute(tl.join(low, high), (0, 2, 1))
    return tl.reshape(both, (words.shape[0], 2 * words.shape[1]))


@triton.jit
def into_range(top):
    """Powers of two for rows whose largest number is `top`: what brings it to 2^14 and more, and its inverse."""
    exponent = tl.minimum(tl.maximum(top.to(tl.int32, bitcast=True) >> 23, 15), 254)
    up = ((268 - exponent) << 23).to(tl.float32, bitcast=True)
    down = ((exponent - 14) << 23).to(tl.float32, bitcast=True)
    return up, down
