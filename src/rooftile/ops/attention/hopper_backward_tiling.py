"""What the kernels of the Hopper backward are compiled for: the sizes and layouts of their tiles."""

from __future__ import annotations

import dataclasses

from rooftile import runtime  # noqa: F401  # before Triton: runtime fixes the mode of the process

import triton.experimental.gluon.language as gl  # isort: skip

_BARRIERS = 1024  # bytes of shared memory, at most, for barriers, what warps hand each other, and alignment


@dataclasses.dataclass(frozen=True)
class _Scores:
    """What both kernels have in common: what becomes of a score, and which are seen.

    Args:
        dim: columns of a tile of q, k, v and dout, 64 or 128; those past the head's are zeros.
        scale, softcap, left, right: as in Scoring.
        masked: some query may not see some key of a block, or the last block of keys is not whole.
        stat_rows: queries of a block of the rows' lse and delta in memory, (batch, heads, blocks, 2, stat_rows).
    """

    dim: int
    scale: float
    softcap: float
    left: int
    right: int
    masked: bool
    stat_rows: int

    @property
    def acc(self) -> gl.NVMMADistributedLayout:
        """64 rows of dq, dk or dv in a consumer's registers."""
        return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, self.dim, 16])

    @property
    def operand(self) -> gl.DotOperandLayout:
        """p or ds as the tensor cores read it out of registers."""
        return gl.DotOperandLayout(0, self.acc, 2)

    @property
    def shared(self) -> gl.NVMMASharedLayout:
        return gl.NVMMASharedLayout(128, 16, 2)


@dataclasses.dataclass(frozen=True)
class KeysTiling(_Scores):
    """All that the kernel of dk and dv is compiled for but the dtypes: one constant of it. A program owns 128 keys.

    Args:
        rows: queries of a step; with_dq 64 for a dim of 128 and 128 for 64, so that its dq is two tiles of 64 x 64.
        stages: blocks of queries in the rings.
        with_dq: dq is made too, added to its sum in memory.
        early: the product of dv is started before ds is made.
        deferred: the product of dk is started after those of the next step's scores; not with_dq.
        buffers: steps whose ds is in shared memory.
    """

    rows: int
    stages: int
    with_dq: bool
    early: bool = False
    deferred: bool = False
    buffers: int = 2
    keys: int = 128

    @property
    def s(self) -> gl.NVMMADistributedLayout:
        """Scores of a consumer, transposed: 64 keys."""
        return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, self.rows, 16])

    @property
    def dq(self) -> gl.NVMMADistributedLayout:
        return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])

    @property
    def shared_memory(self) -> int:
        """Bytes, or a few more."""
        elements = 2 * self.keys * self.dim + 2 * self.stages * self.rows * self.dim
        if self.with_dq:
            elements += self.buffers * self.keys * self.rows
        return 2 * elements + 8 * self.stages * self.rows + _BARRIERS


@dataclasses.dataclass(frozen=True)
class QueriesTiling(_Scores):
    """The same for the kernel of dq alone. A program owns 128 queries.

    Args:
        keys: keys of a step.
        stages: blocks of keys, and of values, in the rings.
        deferred: the product of dq is started after those of the next step's scores.
    """

    keys: int
    stages: int
    deferred: bool
    rows: int = 128

    @property
    def s(self) -> gl.NVMMADistributedLayout:
        """Scores of a consumer: 64 queries."""
        return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, self.keys, 16])

    @property
    def shared_memory(self) -> int:
        """Bytes, or a few more."""
        return 4 * (self.rows * self.dim + self.stages * self.keys * self.dim) + _BARRIERS
