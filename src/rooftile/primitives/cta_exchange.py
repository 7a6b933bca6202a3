"""Rows too long for one program: several programs share a row and exchange their partial results through memory.

The host has zeroed the memory. Each program publishes the complement of its result's bits and polls until no word of
its row is zero. A result may be zero, but a complement is zero only for the NaN whose bits are all ones, which is never
published (`_canonical`).

A word is its own flag: nothing else is read once it is there. So relaxed accesses at GPU scope are enough on both
sides, without a fence: a relaxed store to publish, and a volatile load, which PTX defines as a relaxed one, to poll.
Triton has no relaxed store. Its atomics return the old word: with one layer_norm's backward over 16384 columns spilled
180 bytes of registers and took 1.5 times as long on an H100. They serve where there is no PTX.

Every program waits for others, so the whole grid has to be resident: it is launched as a cooperative grid, which the
driver rejects if it does not fit.
"""

from __future__ import annotations

from typing import Any

from rooftile import library, runtime  # before Triton: runtime fixes the mode of the process
from rooftile.primitives.assembly import HAS_PTX, assembly

import triton  # isort: skip
import triton.language as tl  # isort: skip


def _store(bits: int) -> tl.constexpr:
    """A relaxed store by the program's first thread, if the mask, an integer, is 1."""
    return assembly(
        f"""{{
    .reg .pred writes;
    .reg .b32 thread;
    mov.u32 thread, %tid.x;
    setp.lt.u32 writes, thread, $3;
    @writes st.relaxed.gpu.global.b{bits} [$1], $2;
    mov.u32 $0, 0;
}}"""
    )


_STORE_32, _STORE_64 = _store(32), _store(64)


@triton.jit
def _canonical(value):
    """One NaN for all: an input's NaN may have the bits whose complement is zero."""
    return tl.where(value == value, value, float("nan"))


@triton.jit
def _write(word_ptr, bits, mask):
    mask = tl.full((), mask, tl.int1)
    if not HAS_PTX:
        tl.atomic_xchg(word_ptr, ~bits, mask=mask, sem="relaxed", scope="gpu")
    elif bits.dtype == tl.int32:
        tl.inline_asm_elementwise(
            _STORE_32, "=r,l,r,r", [word_ptr, ~bits, mask.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        tl.inline_asm_elementwise(
            _STORE_64, "=r,l,l,r", [word_ptr, ~bits, mask.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def publish(word_ptr, value, mask):
    """One float32 in a 32-bit word."""
    _write(word_ptr, _canonical(value).to(tl.int32, bitcast=True), mask)


@triton.jit
def publish_pair(word_ptr, a, b, mask):
    """Two float32 in a 64-bit word: both are there, or neither."""
    a = _canonical(a).to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    b = _canonical(b).to(tl.int32, bitcast=True).to(tl.int64)
    _write(word_ptr, (b << 32) | a, mask)


@triton.jit
def gather(words, words_ptr, mask):
    """The words at words_ptr, which were read once as `words`: polled until all of them are there, but the masked."""
    while tl.min((words != 0).to(tl.int32), axis=0) == 0:
        words = tl.load(words_ptr, mask=mask, other=-1, volatile=True)
    return ~words


@triton.jit
def sum_words(words, mask):
    """The sum of the float32 in each word, always in the same order."""
    return tl.sum(tl.where(mask, words.to(tl.float32, bitcast=True), 0.0), axis=0)


@triton.jit
def _pairs(words):
    """The two float32 of each 64-bit word."""
    a = (words & 0xFFFFFFFF).to(tl.int32).to(tl.float32, bitcast=True)
    b = (words >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return a, b


@triton.jit
def sum_pairs(words, mask):
    """The sums of the first and of the second float32 of each word, always in the same order."""
    a, b = _pairs(words)
    return tl.sum(tl.where(mask, a, 0.0), axis=0), tl.sum(tl.where(mask, b, 0.0), axis=0)


@triton.jit
def softmax_pairs(words, mask, FACTOR: tl.constexpr):
    """The greatest of (maximum, sum) pairs' maxima, and the sum of their sums, each of them to the base of its maximum.

    A sum is of `exp2((z - maximum) * FACTOR)`, and no maximum is -inf.
    """
    tops, sums = _pairs(words)
    top = tl.max(tl.where(mask, tops, float("-inf")), axis=0)
    return top, tl.sum(tl.where(mask, sums * tl.exp2((tops - top) * FACTOR), 0.0), axis=0)


def split(op: str, n_rows: int, n_cols: int, block: int, programs: int) -> tuple[int, int]:
    """Splits of `block` columns that a row has, and rows that a grid of that many programs works on at once."""
    splits = library.cdiv(n_cols, block)
    if splits > programs:
        most = programs * block
        raise ValueError(f"{op}: x has a last dimension of {n_cols}, expected at most {most} on this GPU")
    return splits, min(n_rows, programs // splits)


def resident(max_registers: int | None, cooperative: bool = True) -> dict[str, Any]:
    """The options of a launch with so few registers a thread, and (cooperative) of programs that wait for one another;
    none in the interpreter: it runs one at a time."""
    if runtime.MODE is runtime.Mode.INTERPRETER:
        return {}
    limit = {} if max_registers is None else {"maxnreg": max_registers}
    return {"launch_cooperative_grid": True, **limit} if cooperative else limit
