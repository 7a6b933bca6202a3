"""The forward for sm_90 over a latent cache: the kernel of `decode_attention`, whose queries are packed.

A tile has 64 rows, each of a token and a head, and all keys that its last token sees.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from rooftile import runtime
from rooftile.ops.attention.problem import AttentionConfig, Problem
from rooftile.ops.decode_attention import hopper_latent
from rooftile.ops.decode_attention.choose import Shape

CONFIG = AttentionConfig("hopper", hopper_latent.ROWS, hopper_latent.KEYS, 8, 2)


def _shape(p: Problem, n_pages: int) -> Shape:
    return Shape(
        p.batch, p.tokens, p.heads, p.kv_heads, p.head_dim, p.value_dim, p.n_k, p.page, n_pages, values_in_keys=True
    )


def can_implement(p: Problem, c: AttentionConfig, target: runtime.Target) -> str | None:
    """None where the kernel can run that problem in that configuration, or the reason why it can't."""
    s = p.scoring
    given = {"scales or 8 bits": p.narrow, "alibi_slopes": p.alibi, "sinks": p.sinks, "softcap": s.softcap > 0}
    given["window"] = s.left >= 0 or s.right > 0
    options = tuple(name for name, value in given.items() if value)
    reason = hopper_latent.can_run((p.dtype, p.dtype), p.aligned, _shape(p, 0), s.scale, options, target)
    if reason is not None:
        return reason
    if p.tokens * p.heads >= 1 << 28:  # times the most sequences, tiles of 64 rows are still fewer than 2^31
        return f"kernel 'hopper' takes fewer than 2^28 query rows over a latent cache, not {p.tokens * p.heads}"
    return None if c == CONFIG else f"it is {c}, and kernel 'hopper' over a latent cache takes {CONFIG}"


def prepare(q: Tensor, k: Tensor, p: Problem, table: Tensor, target: runtime.Target) -> Callable[..., None]:
    """The launches for tensors like these, to be called with `q, k, out, lse, table, lengths, starts`.

    q is (1, heads, tokens, dim), and k (pages, heads, page, dim).
    """
    s = _shape(p, k.shape[0])
    causal = p.scoring.right == 0
    return hopper_latent.prepare_packed(q.transpose(1, 2), k, s, table, causal, p.scoring.numbers[0], target)
