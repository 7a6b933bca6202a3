"""Where blocks of packed sequences are in memory and in a grid: in slots, which need no list.

Block j of sequence i, of so many rows each, has the slot

    starts[i] // rows + i + j      below    tokens // rows + sequences

A sequence has at least as many slots up to the next one's first as it has blocks, so no two blocks share one. The host
knows how many slots there are, and a program finds the block of its slot by a binary search in the starts. Some slots
have no block: about half as many as there are sequences, where lengths have any remainder.

`packed` lists tiles for persistent kernels instead, the longest first.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rooftile import runtime  # noqa: F401  # before Triton: runtime fixes the mode of the process
from rooftile.launching import bind, launcher

import triton  # isort: skip
import triton.language as tl  # isort: skip


def block_slots(tokens: int, rows: int, sequences: int) -> int:
    """The slots of blocks of `rows` rows: as many as any lengths take."""
    return tokens // rows + sequences


@triton.jit
def sequence_span(starts_ptr, index, SIDE: tl.constexpr):
    """Where a sequence begins and how long it is, in q (SIDE 0) or in k (1). `prepare_starts` made the starts."""
    begin = tl.load(starts_ptr + 2 * index + SIDE)
    return begin, tl.load(starts_ptr + 2 * index + 2 + SIDE) - begin


@triton.jit
def find_block(slot, starts_ptr, sequences, SIDE: tl.constexpr, ROWS: tl.constexpr):
    """What has a slot: a sequence, where it begins, its length, and a block. Of no block, length and block are 0."""
    low = sequences * 0
    high = sequences
    while high - low > 1:  # the last sequence whose first slot is not after this one
        middle = (low + high) // 2
        after = tl.load(starts_ptr + 2 * middle + SIDE) // ROWS + middle > slot
        high = tl.where(after, middle, high)
        low = tl.where(after, low, middle)
    begin, length = sequence_span(starts_ptr, low, SIDE)
    block = slot - begin // ROWS - low
    there = (block >= 0) & (block * ROWS < length)
    return low, begin, tl.where(there, length, 0), tl.where(there, block, 0)


@triton.jit
def larger(a, b):
    """For a running maximum."""
    return tl.maximum(a, b)


@triton.jit(
    do_not_specialize=["sequences", "n_q", "n_k"], do_not_specialize_on_alignment=["starts_q_ptr", "starts_k_ptr"]
)
def _starts_kernel(starts_q_ptr, starts_k_ptr, starts_ptr, sequences, n_q, n_k, BLOCK: tl.constexpr):
    """Program 0 takes those of q, program 1 those of k."""
    side = tl.program_id(0)
    total = tl.where(side == 0, n_q, n_k)
    before = 0
    for first in tl.range(0, sequences + 1, BLOCK, num_stages=1):
        at = first + tl.arange(0, BLOCK)
        of_q = tl.load(starts_q_ptr + at, mask=(at <= sequences) & (side == 0), other=0)
        of_k = tl.load(starts_k_ptr + at, mask=(at <= sequences) & (side == 1), other=0)
        starts = tl.maximum(tl.minimum(tl.where(side == 0, of_q, of_k), total), before)
        starts = tl.associative_scan(starts, 0, larger)
        tl.store(starts_ptr + 2 * at + side, starts, mask=at <= sequences)
        before = tl.max(starts, 0)


def prepare_starts(sequences: int, n_q: int, n_k: int) -> Callable[[Tensor, Tensor], Tensor]:
    """The launch, to be called with the starts in q and in k, (sequences + 1,) int32, of n_q and n_k tokens in all.

    It returns both, (sequences + 1, 2), in order whatever was given: they are clamped to the tokens, and one that is
    less than an earlier one counts as that one, so that sequences never overlap.
    """
    start = bind(launcher(_starts_kernel, (), {"BLOCK": 512}, num_warps=4), 2, numbers=(sequences, n_q, n_k))

    def run(starts_q: Tensor, starts_k: Tensor) -> Tensor:
        starts = torch.empty((sequences + 1, 2), dtype=torch.int32, device=starts_q.device)
        start(starts_q, starts_k, starts)
        return starts

    return run
