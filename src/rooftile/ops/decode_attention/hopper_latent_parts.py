"""What the parts of the kernel for sm_90 over a latent cache share (`hopper_latent`): form, messages, results."""

from __future__ import annotations

import dataclasses

from rooftile import runtime  # noqa: F401  # before Triton: runtime fixes the mode of the process
from rooftile.primitives.scores import LN2

import triton.experimental.gluon.language as gl  # isort: skip
from triton.experimental import gluon  # isort: skip
from triton.experimental.gluon.language.nvidia.hopper import mbarrier  # isort: skip

ROWS = 64  # the most query rows of a program
LEAST_ROWS = 16
KEYS = 64  # keys of a block
COLUMNS = 512  # of the output
HALF = gl.constexpr(COLUMNS // 2)  # columns of the output that a warpgroup has
PART = gl.constexpr(64)  # columns of a copy: a swizzle is so wide
PARTS = gl.constexpr(4)  # copies of a half
SLOTS = gl.constexpr(2)
FIELDS = gl.constexpr(8)  # of a message


@dataclasses.dataclass(frozen=True)
class Form:
    """All that the kernel is compiled for but the dtypes: its one constant.

    Args:
        group: query heads of a KV head.
        row_tiles: tiles of their query rows, each with programs of its own.
        page: tokens of a page; 0 for a contiguous cache.
        value_dim: columns of the output, 257 to 512: each warpgroup has some.
        causal: a token sees no later keys.
        block_b: sequences, rounded up to a power of two.
        min_blocks, slack: see `DecodeConfig`.
        pdl: launched while the previous kernel still runs.
        packed: queries are packed, any number of each sequence (`attention_paged`).
        split: of packed queries, tiles may be split where they are few.
        rows: query rows of a tile: 16, 32 or 64.
    """

    group: int
    row_tiles: int
    page: int
    value_dim: int
    causal: bool
    block_b: int
    min_blocks: int
    slack: int
    pdl: bool
    packed: bool = False
    split: bool = False
    rows: int = ROWS
    keys: int = KEYS

    @property
    def piece_rows(self) -> int:
        """Keys that one copy takes: those of a block, or of a page, if that is less."""
        return self.page if 0 < self.page < self.keys else self.keys

    @property
    def pieces(self) -> int:
        """Copies of so many keys in a block."""
        return self.keys // self.piece_rows

    @property
    def q_box(self) -> tuple[int, int, int, int]:
        """What a copy of queries takes: some tokens of all heads of a KV head, or some heads of one token."""
        heads = min(self.group, self.rows)
        return 1, self.rows // heads, heads, PART.value

    @property
    def few_rows(self) -> bool:
        """Whether query rows are the GEMMs' columns (`hopper_latent_few_rows`)."""
        return self.rows < ROWS

    @property
    def transposed(self) -> gl.NVMMADistributedLayout:
        """Scores, (keys, rows), and the output, (columns, rows), of few rows."""
        return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, self.rows, 16])

    @property
    def p_shared(self) -> gl.NVMMASharedLayout:
        """p of few rows, (keys, rows), in shared memory."""
        return gl.NVMMASharedLayout(2 * self.rows, 16, rank=2)

    @property
    def shared(self) -> gl.NVMMASharedLayout:
        """A tile in shared memory."""
        return gl.NVMMASharedLayout(128, 16, rank=2)


@gluon.jit
def _field(messages, i):
    return gl.max(messages.index(i).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def receive(messages, work_ready, work_free, n_new, box, parity, T: gl.constexpr):
    """The next piece of work: sequence, KV head, its keys and tokens, first block, end of blocks, where a partial
    result goes, and how many the item has. The last one has no blocks.

    A tile of packed queries is like a sequence of its tokens. Its first token and head are in place of sequence and KV
    head.
    """
    mbarrier.wait(work_ready.index(box), parity)
    at = box * FIELDS
    seq, kv_head, n_keys = _field(messages, at), _field(messages, at + 1), _field(messages, at + 2)
    low, high = _field(messages, at + 3), _field(messages, at + 4)
    place, count = _field(messages, at + 5), _field(messages, at + 6)
    if T.packed:
        n_new = _field(messages, at + 7)
    mbarrier.arrive(work_free.index(box), count=1)
    return seq, kv_head, (n_keys, n_new), low, high, place, count


@gluon.jit
def write(
    o, row_max, row_sum, outputs, size, seq, kv_head, n_new, tile, place, count, half: gl.constexpr, T: gl.constexpr
):
    """A half of the rows' output, or of their partial result; the left half with what there is one of a row."""
    out_ptr, lse_ptr, partial_ptr = outputs
    kv_heads = size[2]
    WIDTH: gl.constexpr = 2 * HALF
    rows = gl.arange(0, T.rows, layout=gl.SliceLayout(1, o.type.layout))
    cols = half * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(0, o.type.layout))
    index = tile * T.rows + rows
    token = index // T.group
    head = kv_head + index % T.group if T.packed else kv_head * T.group + index % T.group
    heads = kv_heads * T.group
    there = token < n_new
    if partial_ptr is None or count == 1:
        inverse = gl.where(row_sum == 0.0, 0.0, 1.0 / row_sum)
        row = seq.to(gl.int64) + token if T.packed else seq.to(gl.int64) * n_new + token
        at = out_ptr + row * heads * T.value_dim + head * T.value_dim
        mask = there[:, None] & (cols < T.value_dim)[None, :]
        gl.store(at[:, None] + cols[None, :], (o * inverse[:, None]).to(out_ptr.dtype.element_ty), mask=mask)
        if lse_ptr is not None and half == 0:
            lse = gl.where(row_sum == 0.0, float("-inf"), (row_max + gl.log2(row_sum)) * LN2)
            if T.packed:
                of_lse = head.to(gl.int64) * size[1] + row
            else:
                of_lse = (seq.to(gl.int64) * heads + head) * n_new + token
            gl.store(lse_ptr + of_lse, lse, mask=there)
    else:
        partial = partial_ptr + (place * T.row_tiles + tile).to(gl.int64) * (T.rows * (WIDTH + 2))
        gl.store(partial + (rows * WIDTH)[:, None] + cols[None, :], o, mask=there[:, None])
        if half == 0:
            partial += T.rows * WIDTH
            gl.store(partial + rows, row_max, mask=there)
            gl.store(partial + T.rows + rows, row_sum, mask=there)
