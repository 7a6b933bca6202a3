"""What the Hopper kernel is compiled for: the sizes and layouts of its tiles."""

from __future__ import annotations

import dataclasses

from rooftile import runtime  # noqa: F401  # before Triton: runtime fixes the mode of the process

import triton.experimental.gluon.language as gl  # isort: skip

_BARRIERS = 512  # bytes of shared memory, at most, for barriers, what warps hand each other, and alignment


@dataclasses.dataclass(frozen=True)
class Tiling:
    """All that the kernel is compiled for but the dtypes: one constant of it.

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
    def w_tiles(self) -> int:
        return 2 if self.gated else 1

    @property
    def joined(self) -> bool:
        """Whether a gated product's gate and up rows of w, which lie one after the other, are multiplied as one tile.

        They lie so as the tensor cores read a tile if a row of it is no wider than its swizzle, 128 bytes.
        """
        return self.gated and self.w_k and self.block_k <= 64

    @property
    def joined_ring(self) -> list[int]:
        return [self.stages, 2 * self.cols, self.block_k]

    @property
    def sums(self) -> int:
        """Columns of a consumer's sum; where gate and up are not joined, it has two of them."""
        return 2 * self.cols if self.joined else self.cols

    @property
    def chunks(self) -> int:
        return self.cols // self.chunk

    @property
    def x_block(self) -> list[int]:
        return [self.rows, self.block_k] if self.x_k else [self.block_k, self.rows]

    @property
    def w_block(self) -> list[int]:
        return [self.cols, self.block_k] if self.w_k else [self.block_k, self.cols]

    @property
    def out_block(self) -> list[int]:
        return [self.rows, self.chunk]

    @property
    def x_ring(self) -> list[int]:
        return [self.stages * self.sharing, *self.x_block]

    @property
    def w_ring(self) -> list[int]:
        return [self.stages * self.w_tiles, *self.w_block]

    @property
    def out_ring(self) -> list[int]:
        return [self.consumers * self.out_buffers, *self.out_block]

    @property
    def acc(self) -> gl.NVMMADistributedLayout:
        """A consumer's sum in its registers. Of three, none has enough of them for instructions of 256 columns."""
        cols = min(self.sums, 128) if self.consumers == 3 else self.sums
        return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, cols, 16])

    @property
    def part(self) -> gl.NVMMADistributedLayout:
        """A chunk of that sum."""
        return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, self.chunk, 16])

    @property
    def shared_memory(self) -> int:
        """Bytes, or a few more, for elements of 16 bits."""
        step = (self.tile_rows + self.w_tiles * self.cols) * self.block_k
        return 2 * (self.stages * step + self.consumers * self.out_buffers * self.rows * self.chunk) + _BARRIERS
