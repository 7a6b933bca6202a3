"""The online softmax of attention in a warpgroup's registers (Gluon), of scores as wgmma leaves them.

In wgmma's layout of an accumulator a row lies in four threads, each with two adjacent columns of every eight. A row's
maximum is needed in every block, and takes shuffles. Its sum is needed only at the end, so each thread keeps a partial
one: row_sum is (rows, 4), and `gl.sum(row_sum, 1)` is the row's.

Maxima are of scores before `scale`. They start at `INITIAL_MAX`, which is finite: with -inf, a fully masked row would
compute -inf - (-inf) = NaN. The sum of such a row is 0.
"""

from __future__ import annotations

from rooftile import runtime  # noqa: F401  # before Triton: runtime fixes the mode of the process

import triton.experimental.gluon.language as gl  # isort: skip
from triton.experimental import gluon  # isort: skip

INITIAL_MAX = gl.constexpr(-1e30)


@gluon.jit
def mask_scores(s, keys, begin, end):
    """The scores of a block, -inf where a row does not see the key. `keys` has the positions of the block's keys.

    A row sees the keys from its `begin` to before its `end`; a `begin` of None is 0.
    """
    seen = keys[None, :] < end[:, None]
    if begin is not None:
        seen = seen & (keys[None, :] >= begin[:, None])
    return gl.where(seen, s, float("-inf"))


@gluon.jit
def softmax_step(s, row_max, row_sum, scale):
    """p = exp2((s - new maximum) * scale) of a block, alpha, which rescales earlier blocks, and the new row_max and
    row_sum. In the first block row_sum is None, and alpha has no use.
    """
    by_thread = s.reshape([s.shape[0], s.shape[1] // 8, 4, 2])
    block_max = gl.max(gl.max(gl.max(by_thread, 1), 2), 1)
    new_max = gl.maximum(row_max, gl.convert_layout(block_max, row_max.type.layout, assert_trivial=True))
    alpha = gl.exp2((row_max - new_max) * scale)
    p = gl.exp2(s * scale - (new_max * scale)[:, None])
    sums = gl.sum(gl.sum(p.reshape([s.shape[0], s.shape[1] // 8, 4, 2]), 1), 2)
    if row_sum is not None:
        factor = gl.convert_layout(alpha, gl.SliceLayout(1, row_sum.type.layout), assert_trivial=True)
        sums = row_sum * factor[:, None] + sums
    return p, alpha, new_max, sums
