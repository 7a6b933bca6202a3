"""A barrier of the programs that share a row: each stores words before it and reads those of all after it.

A program adds to the counter of its row with release semantics, after a barrier of its own threads, and polls it with
acquire semantics; both are at GPU scope. What the others stored before is then visible to loads that go past the L1.

Two sets of words alternate: when a program writes to a set again, every program has passed the barrier after the next,
and so has read that set. The program that ends last leaves the counter at zero (search.py).
"""

from __future__ import annotations

from rooftile import runtime  # noqa: F401  # before Triton: runtime fixes the mode of the process

import triton  # isort: skip
import triton.language as tl  # isort: skip

WORDS = tl.constexpr(16)  # that a program stores for a barrier: counts and masses, 8 each


@triton.jit
def row_barrier(counter_ptr, n_barriers, splits):
    """Wait until all programs of the row are here. What each has stored can then be read past the L1."""
    tl.debug_barrier()  # all threads of the program have stored their part
    come = tl.atomic_add(counter_ptr, 1, sem="acq_rel") + 1
    while come < splits * (n_barriers + 1):
        come = tl.atomic_add(counter_ptr, 0, sem="acquire")
    tl.debug_barrier()
    return n_barriers + 1


@triton.jit
def words_of(words_ptr, n_barriers, splits):
    """The words for the next barrier. Those of the last one may still be read, those before it no more."""
    return words_ptr + (n_barriers % 2) * splits * WORDS


@triton.jit
def gather(at, first, splits, SPLITS: tl.constexpr):
    """(programs, 8) words that all have stored, with zeros past the last program."""
    rows = tl.arange(0, SPLITS)[:, None]
    word_ptrs = at + rows * WORDS + first + tl.arange(0, 8)[None, :]
    return tl.load(word_ptrs, mask=rows < splits, other=0, cache_modifier=".cg")


@triton.jit
def largest(at, word, splits, SPLITS: tl.constexpr):
    rows = tl.arange(0, SPLITS)
    return tl.max(tl.load(at + rows * WORDS + word, mask=rows < splits, other=-(2**63), cache_modifier=".cg"), axis=0)
