"""What the Hopper kernel is compiled for: the sizes and layouts of its tiles."""

from __future__ import annotations

import dataclasses
import itertools

from rooftile import runtime  # noqa: F401  # before Triton: runtime fixes the mode of the process

import triton.experimental.gluon.language as gl  # isort: skip

_BARRIERS = 512  # bytes of shared memory, at most, for barriers, what warps hand each other, and alignment


def _powers(cols: int) -> tuple[int, ...]:
    """The powers of two whose sum that is, the largest first."""
    return tuple(1 << i for i in reversed(range(cols.bit_length())) if cols >> i & 1)


@dataclasses.dataclass(frozen=True)
class Tiling:
    """All that the kernel is compiled for but the dtypes: one constant of it.

    Triton's tensors are powers of two, and a tile's columns need not be: 192 of them are copied as three pieces of 64,
    and a consumer has two sums, of 128 and of 64 columns.

    Args:
        rows: rows of x that one consumer multiplies, 64 or 128.
        pingpong: every consumer has tiles of its own; otherwise all consumers share one, each `rows` rows of it.
        stream: programs share the steps of the tiles that do not fill a wave.
        cols: columns of the output in a tile; a gated product has as many gate rows and as many up rows of w in it.
        chunk: columns of the output that are written at a time.
        x_k, w_k: k is the contiguous dimension of x and of w. Where it is not, the tensor cores transpose the tile.
        out_buffers: chunks of one consumer that are being written at the same time.
        split: programs that share a tile's sum.
    """

    rows: int
    cols: int
    block_k: int
    chunk: int
    consumers: int
    stages: int
    out_buffers: int
    group_m: int
    split: int
    x_k: bool
    w_k: bool
    gated: bool
    activation: str
    pingpong: bool = False
    stream: bool = False

    @property
    def sharing(self) -> int:
        """Consumers that share a tile."""
        return 1 if self.pingpong else self.consumers

    @property
    def partial(self) -> bool:
        """Whether a tile's sum may be of several programs."""
        return self.stream or self.split > 1

    @property
    def tile_rows(self) -> int:
        return self.rows * self.sharing

    @property
    def halves(self) -> int:
        """Rows of w for each column of the output."""
        return 2 if self.gated else 1

    @property
    def piece(self) -> int:
        """Columns of the tile in one copy of w: the largest power of two of which they are a multiple."""
        return self.cols & -self.cols

    @property
    def w_loads(self) -> int:
        return self.halves * self.cols // self.piece

    @property
    def joined(self) -> bool:
        """Whether pieces of w, a gated product's two halves too, are multiplied as one tile.

        One after the other they lie as the tensor cores read a tile if its rows are no wider than its swizzle, 128
        bytes. Where w is contiguous along n, pieces of one half do in any case.
        """
        return self.w_k and self.block_k <= 64

    @property
    def widths(self) -> tuple[int, ...]:
        """Columns of each of a consumer's sums: of a gated product those of the gate first."""
        if self.joined:
            return _powers(self.halves * self.cols)
        return _powers(self.cols) * self.halves

    @property
    def n_sums(self) -> int:
        return len(self.widths)

    @property
    def pieces(self) -> tuple[int, ...]:
        """Copies of w in a slot for each sum,"""
        return tuple(n // self.piece for n in self.widths)

    @property
    def begins(self) -> tuple[tuple[int, ...], ...]:
        """and the columns of the slot at which they begin."""
        ends = itertools.accumulate(self.widths)
        return tuple(tuple(range(end - n, end, self.piece)) for end, n in zip(ends, self.widths, strict=True))

    @property
    def chunks(self) -> int:
        return self.cols // self.chunk

    @property
    def x_block(self) -> list[int]:
        return [self.rows, self.block_k] if self.x_k else [self.block_k, self.rows]

    @property
    def w_block(self) -> list[int]:
        return [self.piece, self.block_k] if self.w_k else [self.block_k, self.piece]

    @property
    def out_block(self) -> list[int]:
        return [self.rows, self.chunk]

    @property
    def x_ring(self) -> list[int]:
        return [self.stages * self.sharing, *self.x_block]

    @property
    def w_rings(self) -> tuple[list[int], ...]:
        """Each sum's part of w has a ring of its own: of pieces, as they are copied,"""
        return tuple([self.stages * n, *self.w_block] for n in self.pieces)

    @property
    def w_tiles(self) -> tuple[list[int], ...]:
        """and the same memory as it is multiplied."""
        return tuple([self.stages, *((n, self.block_k) if self.w_k else (self.block_k, n))] for n in self.widths)

    @property
    def out_ring(self) -> list[int]:
        return [self.consumers * self.out_buffers, *self.out_block]

    @property
    def layouts(self) -> tuple[gl.NVMMADistributedLayout, ...]:
        """The sums in registers. Of three consumers, none has enough of them for instructions of 256 columns."""
        widest = 128 if self.consumers == 3 else 256
        return tuple(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, min(n, widest), 16]) for n in self.widths)

    @property
    def part(self) -> gl.NVMMADistributedLayout:
        """A chunk of that sum."""
        return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, self.chunk, 16])

    @property
    def thread_sums(self) -> int:
        """Registers of a thread that sums take."""
        return self.rows * self.halves * self.cols // 128

    @property
    def shared_memory(self) -> int:
        """Bytes, or a few more, for elements of 16 bits."""
        step = (self.tile_rows + self.halves * self.cols) * self.block_k
        return 2 * (self.stages * step + self.consumers * self.out_buffers * self.rows * self.chunk) + _BARRIERS
