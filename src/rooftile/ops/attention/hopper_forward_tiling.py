"""What the attention kernel for sm_90 is compiled for: its sizes, its layouts, and what happens to a score."""

from __future__ import annotations

import dataclasses

from rooftile import runtime  # noqa: F401  # before Triton: runtime fixes the mode of the process

import triton.experimental.gluon.language as gl  # isort: skip

_BARRIERS = 1024  # bytes of shared memory, at most, for barriers, what warps hand each other, and alignment


def swizzle_bytes(dim: int) -> int:
    """A tile's rows of so many elements are swizzled as widely as they allow."""
    return min(2 * dim, 128)


@dataclasses.dataclass(frozen=True)
class Tiling:
    """All that the kernel is compiled for but the dtypes: one constant of it.

    Args:
        keys: keys of a block.
        dim: columns of a tile of q, k, v and the output, a power of two; those past the head's are zeros.
        consumers: warpgroups that multiply, each with `rows` queries of a tile.
        stages: blocks of k or v that the ring holds.
        q_buffers: tiles of q that are there at the same time.
        turns: the consumers take turns to start their products.
        joined: a tile's first product of scores is started with the last product of values of the tile before.
        tabled: the tiles of each program stand in a table.
        scale: what a score (capped: what its tanh) is multiplied by, log2(e) included.
        cap_scale: what q·k is multiplied by before the tanh; 0 is no cap.
        left, right: as in Scoring.
    """

    keys: int
    dim: int
    consumers: int
    stages: int
    q_buffers: int
    turns: bool
    joined: bool
    tabled: bool
    scale: float
    cap_scale: float
    left: int
    right: int
    rows: int = 64

    @property
    def tile_rows(self) -> int:
        return self.rows * self.consumers

    @property
    def limited(self) -> bool:
        """Whether a query sees some of the keys only."""
        return self.left >= 0 or self.right >= 0

    @property
    def ring(self) -> list[int]:
        return [self.stages, self.keys, self.dim]

    @property
    def q_ring(self) -> list[int]:
        return [self.q_buffers * self.consumers, self.rows, self.dim]

    @property
    def out_ring(self) -> list[int]:
        return [self.consumers, self.rows, self.dim]

    @property
    def shared(self) -> gl.NVMMASharedLayout:
        """A tile in shared memory."""
        return gl.NVMMASharedLayout(swizzle_bytes(self.dim), 16, rank=2)

    @property
    def scores(self) -> gl.NVMMADistributedLayout:
        """A block of scores in a consumer's registers."""
        return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, self.keys, 16])

    @property
    def acc(self) -> gl.NVMMADistributedLayout:
        """A consumer's part of the output."""
        return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, self.dim, 16])

    @property
    def weights(self) -> gl.DotOperandLayout:
        """A block of softmax weights as the tensor cores read it out of registers."""
        return gl.DotOperandLayout(0, self.acc, 2)

    @property
    def shared_memory(self) -> int:
        """Bytes, or a few more, for elements of 16 bits."""
        elements = self.stages * self.keys * self.dim + (self.q_buffers + 1) * self.tile_rows * self.dim
        return 2 * elements + _BARRIERS
