"""Rows too long for one program: several programs share a row and exchange their partial results through memory.

The host has zeroed the memory. Each program publishes the complement of its result's bits and waits until all words of
its row are there. A result may be zero, but its complement is zero for one NaN alone, which is never published.

A word is its own flag: nothing else is read once it is there. So relaxed atomics at GPU scope are enough on both sides,
without a fence. To publish is an unsigned maximum with the zero word. Nobody reads its result, so it becomes a
reduction (RED), which the program does not wait for; an exchange would return the old word. To poll is a volatile load,
which PTX defines as a relaxed one.

Every program waits for others, so the whole grid has to be resident: it is launched as a cooperative grid, which the
driver refuses if it does not fit.
"""

from __future__ import annotations

from typing import Any

from rooftile import library, runtime  # before Triton: runtime fixes the mode of the process

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def _canonical(value):
    """One NaN for all: an input's NaN may have the bits whose complement is zero."""
    return tl.where(value == value, value, float("nan"))


@triton.jit
def _write(word_ptr, bits, mask, WORD: tl.constexpr):
    pointer = word_ptr.to(tl.pointer_type(WORD), bitcast=True)
    word = (~bits).to(WORD, bitcast=True)
    tl.atomic_max(pointer, word, mask=tl.full((), mask, tl.int1), sem="relaxed", scope="gpu")


@triton.jit
def publish(word_ptr, value, mask):
    """One float32 in a 32-bit word."""
    _write(word_ptr, _canonical(value).to(tl.int32, bitcast=True), mask, tl.uint32)


@triton.jit
def publish_pair(word_ptr, a, b, mask):
    """Two float32 in a 64-bit word: both are there, or neither."""
    a = _canonical(a).to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    b = _canonical(b).to(tl.int32, bitcast=True).to(tl.int64)
    _write(word_ptr, (b << 32) | a, mask, tl.uint64)


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
