"""The launch configurations of sampling."""

from __future__ import annotations

import dataclasses
import functools

from rooftile import library, runtime


@dataclasses.dataclass(frozen=True, eq=False)  # a key of caches on every call: by identity
class Greedy:
    """Columns of a slice, and the warps of the program that looks at it."""

    block: int
    num_warps: int


@functools.cache
def greedy(target: runtime.Target) -> Greedy:
    """Two loads of 16 bytes a thread in 16 bits: a vocabulary of 128256 is 63 programs."""
    if target is runtime.INTERPRETER:
        return Greedy(4096, num_warps=4)
    return Greedy(2048, num_warps=4 * 32 // target.warp_size)


@dataclasses.dataclass(frozen=True, eq=False)
class Search:
    """Pivots of a pass; lanes and logits of each in a block; warps; programs that a multiprocessor holds at once, and
    the registers that a thread may have for that; programs that share a row at most, whose words are read as one tile.
    """

    pivots: int
    lanes: int
    pack: int
    num_warps: int
    per_multiprocessor: int
    max_registers: int | None
    multiprocessors: int
    most_splits: int = 128

    def programs(self, n_rows: int, n_cols: int) -> tuple[int, int]:
        """Programs that share a row, and rows that are worked on at once: all programs fit the GPU together."""
        most = self.multiprocessors * self.per_multiprocessor
        splits = max(1, min(most // n_rows, library.cdiv(n_cols, self.lanes * self.pack), self.most_splits))
        return splits, min(n_rows, most // splits)


FEW = 16  # rows below which a pass takes longer in its barrier than in its work


@functools.cache
def search(few: bool, target: runtime.Target) -> Search:
    """Three pivots halve a threshold's place twice a pass, seven three times, for nearly twice the work and 150
    registers a thread, of which a multiprocessor holds one program of 256 threads."""
    if target is runtime.INTERPRETER:
        return Search(3, 1024, 4, 4, 1, None, multiprocessors=1, most_splits=4)
    warps = 8 * 32 // target.warp_size
    if few:
        return Search(7, 256, 4, warps, 1, None, target.multiprocessors)
    limit = 128 if target.warp_size == 32 else None  # AMD's compiler takes no such limit
    return Search(3, 256, 4, warps, 2, limit, target.multiprocessors)
