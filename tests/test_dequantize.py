"""The assembly that gives numbers of 8 and 4 bits back: every number, worked out here as the chip would, bit by bit."""

import re
import sys

import numpy as np
import pytest
import torch

from rooftile.cases import find_cases
from rooftile.primitives import dequantize

import triton.language as tl  # isort: skip

HALVES = {"bf16x2": torch.bfloat16, "f16x2": torch.float16}


def bits(value):
    return int(value, 0) & 0xFFFFFFFF


def prmt(a, b, selector):
    pool = a.to_bytes(4, "little") + b.to_bytes(4, "little")
    chosen = [selector >> 4 * i & 15 for i in range(4)]
    assert max(chosen) < 8, "no sign is spread"
    return int.from_bytes(bytes(pool[i] for i in chosen), "little")


def halves(word, dtype):
    return torch.from_numpy(np.array([word], dtype=np.uint32).view(np.int16)).view(dtype)


def fma(dtype, a, b, c):
    """A fused multiply-add of both halves: in float64 it is exact, and rounded once."""
    exact = halves(a, dtype).double() * halves(b, dtype).double() + halves(c, dtype).double()
    return int(exact.to(dtype).view(torch.int16).numpy().view(np.uint32)[0])


def run(text, outputs, word):
    """The output registers of one word."""
    registers = {f"${outputs}": word}

    def of(operand):
        return registers[operand] if operand in registers else bits(operand)

    for line in re.findall(r"(?:^{|;) ([^{}.;]\S* [^;]*)(?=;)", text):
        instruction, _, rest = line.partition(" ")
        target, *operands = (o.strip() for o in rest.split(","))
        name, *_, kind = instruction.split(".")
        values = [of(o) for o in operands]
        registers[target] = {
            "mov": lambda v: v[0],
            "and": lambda v: v[0] & v[1],
            "xor": lambda v: v[0] ^ v[1],
            "shr": lambda v: v[0] >> v[1],
            "prmt": lambda v: prmt(*v),
            "fma": lambda v, kind=kind: fma(HALVES[kind], *v),
        }[name](values)
    return [registers[f"${i}"] for i in range(outputs)]


def words():
    """Words of every byte, each at every place."""
    numbers = np.arange(256, dtype=np.uint8)
    return [int(w) for shift in range(4) for w in np.roll(numbers, shift).view(np.uint32)]


def bytes_of(word):
    return np.array([word], dtype=np.uint32).view(np.uint8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_int8(dtype):
    text = dequantize.INT8_BF16 if dtype == torch.bfloat16 else dequantize.INT8_FP16
    for word in words():
        found = torch.cat([halves(r, dtype) for r in run(text.value, 2, word)])
        assert found.tolist() == bytes_of(word).view(np.int8).tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_int4(dtype):
    text = dequantize.INT4_BF16 if dtype == torch.bfloat16 else dequantize.INT4_FP16
    for word in words():
        found = torch.cat([halves(r, dtype) for r in run(text.value, 4, word)])
        nibbles = bytes_of(word)
        assert found.tolist() == [*(nibbles & 15).astype(int) - 8, *(nibbles >> 4).astype(int) - 8]


def test_int4_in_float32_is_136_too_large():
    for word in words():
        found = np.array(run(dequantize.INT4_FP32.value, 8, word), dtype=np.uint32).view(np.float32)
        nibbles = bytes_of(word)
        assert (found - 136).tolist() == [*(nibbles & 15).astype(int) - 8, *(nibbles >> 4).astype(int) - 8]


def test_assembly_is_no_end_of_a_string():
    """torch.compile writes a kernel's constants into a string of its own source, as they are."""
    find_cases()  # every op, and its kernels
    found = [
        value.value
        for name, module in sorted(sys.modules.items())
        if name.startswith("rooftile.")
        for value in vars(module).values()
        if isinstance(value, tl.constexpr) and isinstance(value.value, str)
    ]
    assert any("prmt" in text for text in found)
    assert not [text for text in found if set(text) & set("\n\r\"'\\")]
