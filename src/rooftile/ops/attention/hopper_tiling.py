"""What the Hopper forward is compiled for: tiles, their layouts, and the form of its main loop."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from rooftile.launching import Descriptor
from rooftile.ops.attention.problem import AttentionConfig
from rooftile.primitives.scores import split_dim

import triton.experimental.gluon.language as gl  # isort: skip

_BARRIERS = 1024  # bytes of shared memory, at most, for barriers, captured arguments of warps, and alignment


def swizzle_bytes(dim: int) -> int:
    """The widest swizzle of rows of so many elements of 16 bits."""
    return min(2 * dim, 128)


def by_place(kernel: Any, **descriptors: Descriptor) -> dict[int, Descriptor]:
    """The descriptors of a kernel's pointers of those names, as `launching.bind` takes them."""
    return {kernel.arg_names.index(name): descriptor for name, descriptor in descriptors.items()}


@dataclasses.dataclass(frozen=True)
class Tiling:
    """All that the kernel is compiled for but the dtypes: its one constant.

    Args:
        keys: keys of a block.
        dim: columns of a tile of q, k, v and the output, a power of two; those past the head are zeros.
        consumers: warpgroups, each with `rows` queries of a tile.
        stages: blocks of k or v that the ring holds.
        q_buffers: tiles of q in shared memory.
        pingpong: the consumers take turns to issue their GEMMs: the softmax of one overlaps the GEMMs of another.
        overlap_tiles: a tile's first q k^T is issued together with the previous tile's last p v.
        capped, has_left, has_right: see `Scoring.flags`.
        scale: `Scoring.default_factor`; if it is 0, the factor is an argument.
        packed: sequences are packed, and `tiles_ptr` is the list of their tiles.
        page: tokens of a page of keys and values; 0 if they are not in pages.
        step: tokens from one page to the next in memory.
        paired: one of two consumers takes a block of queries from the end of the prompt, the other one from its start,
            so that all tiles take about the same time. Each skips the blocks of keys in which all its scores would be
            masked. Only with causality, without a window or `pingpong`.
        multiplied: the columns of q and k that q k^T multiplies, in two parts, as `split_dim` gives them. For heads of
            80 and 96 this is 3 to 7 percent faster on an H200 than multiplying all `dim` columns. p v does multiply all
            of them: the tensor cores would read p from registers once for each part. With both GEMMs in two parts the
            kernel was 2 to 19 percent slower than with neither, from 1024 tokens on.
    """

    keys: int
    dim: int
    consumers: int
    stages: int
    q_buffers: int
    pingpong: bool
    overlap_tiles: bool
    capped: bool
    has_left: bool
    has_right: bool
    scale: float = 0.0
    rows: int = 64
    packed: bool = False
    page: int = 0
    step: int = 0
    paired: bool = False
    multiplied: tuple[int, int] = (0, 0)

    @property
    def single(self) -> bool:
        """Whether each program has one tile; `order` is then a `Reciprocals`."""
        return self.consumers == 1 or self.paired

    @property
    def tile_rows(self) -> int:
        return self.rows * self.consumers

    @property
    def limited(self) -> bool:
        """Whether a query may not see all keys."""
        return self.has_left or self.has_right

    @property
    def ring(self) -> list[int]:
        return [self.stages, self.keys, self.dim]

    @property
    def piece_rows(self) -> int:
        """Keys or values that one copy takes: those of a block, or of a page, if that is less."""
        return self.page if 0 < self.page < self.keys else self.keys

    @property
    def piece_cols(self) -> int:
        """Their columns: all, or in a part of a block those of one swizzle, which are together in shared memory."""
        return self.dim if self.piece_rows == self.keys else min(self.dim, 64)

    @property
    def pieces(self) -> list[int]:
        """The ring by such copies."""
        rows, cols = self.piece_rows, self.piece_cols
        return [self.stages * self.keys * self.dim // (rows * cols), rows, cols]

    @property
    def q_ring(self) -> list[int]:
        return [self.q_buffers * self.consumers, self.rows, self.dim]

    @property
    def out_ring(self) -> list[int]:
        return [self.consumers, self.rows, self.dim]

    @property
    def shared_layout(self) -> gl.NVMMASharedLayout:
        """Of a tile in shared memory."""
        return gl.NVMMASharedLayout(swizzle_bytes(self.dim), 16, rank=2)

    @property
    def scores_layout(self) -> gl.NVMMADistributedLayout:
        """Of a block of scores in a consumer's registers."""
        return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, self.keys, 16])

    @property
    def acc_layout(self) -> gl.NVMMADistributedLayout:
        """Of a consumer's part of the output, in registers."""
        return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, self.dim, 16])

    @property
    def p_layout(self) -> gl.DotOperandLayout:
        """Of a block's p as the first operand of p v, in registers."""
        return gl.DotOperandLayout(0, self.acc_layout, 2)

    @property
    def shared_memory(self) -> int:
        """An upper bound in bytes, for elements of 16 bits."""
        elements = self.stages * self.keys * self.dim + (self.q_buffers + 1) * self.tile_rows * self.dim
        return 2 * elements + _BARRIERS


@functools.cache
def tiling(
    c: AttentionConfig, flags: tuple[bool, bool, bool], head_dim: int, limit: int, packed: bool, pairs: bool = False
) -> Tiling:
    """What the kernel is compiled for. Two tiles of queries are in shared memory at once if a program has several and
    they fit. With `pairs`, two consumers are `paired`.
    """
    dim = max(32, 1 << (head_dim - 1).bit_length())
    multiplied = split_dim(head_dim) if head_dim > 64 else (dim, 0)
    # Measured on an H200: `overlap_tiles` is 2 to 8 percent faster, except for two consumers of heads up to 64, where
    # `pingpong` alone is 3 percent faster. With overlapped tiles, heads over 128 would spill, and so would three
    # consumers with a cap.
    consumers, capped = c.num_warps // 4, flags[0]
    paired = pairs and consumers == 2
    single = consumers == 1 or paired
    pingpong = dim <= 64 and consumers == 2 and not single
    overlap_tiles = not pingpong and not single and dim <= 128 and not (consumers == 3 and capped)

    def of(q_buffers: int) -> Tiling:
        sizes = (c.block_n, dim, consumers, c.num_stages, q_buffers, pingpong, overlap_tiles)
        return Tiling(*sizes, *flags, packed=packed, paired=paired, multiplied=multiplied)

    return of(2) if not single and of(2).shared_memory <= limit else of(1)
