"""What the forward and the backward kernels share: the rounding, and rows that are split over several programs."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from rooftile import library, runtime  # before Triton: runtime fixes the mode of the process

import triton  # isort: skip
import triton.language as tl  # isort: skip

Rounding = Literal["llama", "gemma", "none"]
ROUNDINGS = ("llama", "gemma", "none")


@triton.jit
def scale(xhat, weight, OFFSET: tl.constexpr, DTYPE: tl.constexpr, CAST_FIRST: tl.constexpr):
    """xhat * (weight + offset), with Llama's cast to the model's dtype between the two or without."""
    if CAST_FIRST:
        xhat = xhat.to(DTYPE).to(tl.float32)
    return xhat * (weight + OFFSET)


# A row too long for one program is split over SPLITS of them, which exchange their partial sums through memory that the
# host has zeroed: each publishes the complement of its sum's bits (a sum may well be zero, but its complement is zero
# only for one NaN, which is never published) and waits until all of its row's words are there. The value is its own
# flag, so no fence is needed. Everybody waits for everybody, so the grid must be resident at once: it is launched
# as a cooperative grid, which the driver refuses rather than let it hang.


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
def sum_pairs(words, mask):
    a = (words & 0xFFFFFFFF).to(tl.int32)
    b = (words >> 32).to(tl.int32)
    return sum_words(a, mask), sum_words(b, mask)


def split(op: str, n_rows: int, n_cols: int, block: int, programs: int) -> tuple[int, int]:
    """Splits of `block` columns that a row has, and rows that a grid of that many programs works on at once."""
    splits = library.cdiv(n_cols, block)
    if splits > programs:
        most = programs * block
        raise ValueError(f"{op}: x has a last dimension of {n_cols}, expected at most {most} on this GPU")
    return splits, min(n_rows, programs // splits)


def check(
    op: str,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    offset: float,
    rounding: str,
) -> None:
    library.check_floating(op, x=x, weight=weight)
    for name, number in (("eps", eps), ("offset", offset)):
        if not isinstance(number, (float, int)):
            raise TypeError(f"{op}: {name} is a {type(number).__name__}, expected a number")
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"{op}: x has shape {tuple(x.shape)}, expected at least one dimension, the last of 1 or more")
    if residual is not None:
        library.check_same(op, "residual", residual, "x", x)
    if weight is not None and weight.shape != x.shape[-1:]:
        raise ValueError(
            f"{op}: weight has shape {tuple(weight.shape)}, expected ({x.shape[-1]},) to match x's last dimension"
        )
    if rounding not in ROUNDINGS:
        raise ValueError(f"{op}: rounding is {rounding!r}, expected one of {', '.join(ROUNDINGS)}")


def resident(max_registers: int | None) -> dict[str, Any]:
    """The options of a launch whose programs wait for one another; none in the interpreter: it runs one at a time."""
    if runtime.MODE is runtime.Mode.INTERPRETER:
        return {}
    limit = {} if max_registers is None else {"maxnreg": max_registers}
    return {"launch_cooperative_grid": True, **limit}
