"""Tiles of a matrix, one to a program: adjacent programs take adjacent columns, which beat adjacent rows by 4 % on an
H200."""

from __future__ import annotations

from rooftile import library, runtime  # noqa: F401  # before Triton: runtime fixes the mode of the process

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def tile_of(tile, N: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr):
    """The rows of a tile as a column, its first column, and its columns as a row."""
    BLOCKS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    rows = (tile // BLOCKS).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first = (tile % BLOCKS) * BLOCK_N
    return rows[:, None], first, first + tl.arange(0, BLOCK_N)[None, :]


def tiles(n_rows: int, n_cols: int, rows: int, block_n: int) -> int:
    """How many tiles of `rows` by `block_n` cover a matrix."""
    return library.cdiv(n_rows, rows) * library.cdiv(n_cols, block_n)
