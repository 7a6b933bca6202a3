"""Rows too long for one program: several hold a row together, and exchange their partial results through memory.

The memory has been zeroed by the host: each program publishes the complement of its result's bits (a sum may well be
zero, but its complement is zero only for one NaN, which is never published) and waits until all of its row's words are
there. The value is its own flag, so no fence is needed. Everybody waits for everybody, so the grid must be resident
at once: it is launched as a cooperative grid, which the driver refuses rather than let it hang.
"""

from __future__ import annotations

from typing import Any

from rooftile import library, runtime  # before Triton: runtime fixes the mode of the process

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def _canonical(value):
    """One NaN for all: an input's own may have just the bits whose complement is zero."""
    return tl.where(value == value, value, float("nan"))


@triton.jit
def publish(word_ptr, value, mask):
    value = _canonical(value)
    tl.store(word_ptr, ~value.to(tl.int32, bitcast=True), mask=mask)


@triton.jit
def publish_pair(word_ptr, a, b, mask):
    """Two float32 in one 64-bit word: both are there, or neither."""
    a = _canonical(a).to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    b = _canonical(b).to(tl.int32, bitcast=True).to(tl.int64)
    tl.store(word_ptr, ~((b << 32) | a), mask=mask)


@triton.jit
def gather(words, words_ptr, mask):
    """The words at words_ptr, first read as `words`, read again until all but the masked ones are there."""
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


def resident(max_registers: int | None) -> dict[str, Any]:
    """The options of a launch whose programs wait for one another; none in the interpreter: it runs one at a time."""
    if runtime.MODE is runtime.Mode.INTERPRETER:
        return {}
    limit = {} if max_registers is None else {"maxnreg": max_registers}
    return {"launch_cooperative_grid": True, **limit}
