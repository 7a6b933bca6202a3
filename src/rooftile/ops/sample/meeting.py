"""Where the programs that share a row meet: each leaves words in memory, waits until all have come, reads those of all.

Two sets of words take turns: when a program writes the third, all have come to the second meeting, and so have read the
first. The counter is left at zero by the program that ends last (search.py).
"""

from __future__ import annotations

from rooftile import runtime  # noqa: F401  # before Triton: runtime fixes the mode of the process

import triton  # isort: skip
import triton.language as tl  # isort: skip

WORDS = tl.constexpr(16)  # that a program leaves at a meeting: counts and masses, 8 each


@triton.jit
def meet(counter_ptr, meetings, splits):
    """Wait until all programs of the row have come here; what each has stored can then be read past the L1."""
    tl.debug_barrier()  # all threads of the program have stored their part
    come = tl.atomic_add(counter_ptr, 1, sem="acq_rel") + 1
    while come < splits * (meetings + 1):
        come = tl.atomic_add(counter_ptr, 0, sem="acquire")
    tl.debug_barrier()
    return meetings + 1


@triton.jit
def words_of(words_ptr, meetings, splits):
    """Where the words of this meeting are: those of the last may still be read, those before it no more."""
    return words_ptr + (meetings % 2) * splits * WORDS


@triton.jit
def gather(at, first, splits, SPLITS: tl.constexpr):
    """(programs, 8) words that all have left; zeros for programs that there are not."""
    rows = tl.arange(0, SPLITS)[:, None]
    word_ptrs = at + rows * WORDS + first + tl.arange(0, 8)[None, :]
    return tl.load(word_ptrs, mask=rows < splits, other=0, cache_modifier=".cg")


@triton.jit
def largest(at, word, splits, SPLITS: tl.constexpr):
    rows = tl.arange(0, SPLITS)
    return tl.max(tl.load(at + rows * WORDS + word, mask=rows < splits, other=-(2**63), cache_modifier=".cg"), axis=0)
