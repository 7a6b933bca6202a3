"""The forward for sm_90 over a latent cache: the kernel of `decode_attention`, whose queries are packed.

A tile has 64 rows, each of a token and a head, and all keys that its last token sees. Where tiles are few, their keys
are split, and a second kernel combines the splits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rooftile import library, runtime  # before Triton: runtime fixes the mode of the process
from rooftile.launching import KernelLauncher, bind, counters
from rooftile.ops.attention.latent import HOPPER
from rooftile.ops.attention.problem import AttentionConfig, Problem
from rooftile.ops.decode_attention import hopper_latent
from rooftile.ops.decode_attention.choose import Shape
from rooftile.ops.decode_attention.hopper_latent_parts import COLUMNS, KEYS, ROWS
from rooftile.ops.decode_attention.schedule import combine_tiles_kernel, partial_numbers
from rooftile.primitives import pdl

_COMBINE_ROWS = 4  # of a program that combines splits


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
    aligned = p.aligned and p.head_dim % 8 == 0  # also of a q that is copied
    dtypes, least_rows = (p.dtype, p.dtype), ROWS
    reason = hopper_latent.can_run(dtypes, aligned, _shape(p, 0), s.scale, options, target, least_rows)
    if reason is not None:
        return reason
    if p.tokens * p.heads >= 1 << 28:  # times the most sequences, tiles of 64 rows are still fewer than 2^31
        return f"kernel 'hopper' takes fewer than 2^28 query rows over a latent cache, not {p.tokens * p.heads}"
    return None if c == HOPPER else f"it is {c}, and kernel 'hopper' over a latent cache takes {HOPPER}"


@functools.cache
def _launchers(dtype: torch.dtype, **form: Any) -> tuple[KernelLauncher, KernelLauncher]:
    """The kernel, and the one that combines splits, for inputs of that dtype."""
    constants = {
        "VALUE_DIM": form["value_dim"],
        "GROUP": form["group"],
        "CAUSAL": form["causal"],
        "WIDTH": COLUMNS,
        "ROWS": ROWS,
        "BLOCK_B": form["block_b"],
        "BLOCK_N": KEYS,
        "COMBINE_SPLITS": 4,
        "COMBINE_ROWS": _COMBINE_ROWS,
        "PDL": form["pdl"],
    }
    combine = KernelLauncher(combine_tiles_kernel, constants, num_warps=4, **pdl.options(form["pdl"]))
    return hopper_latent.launcher(**form, row_tiles=1, min_blocks=1, slack=0, packed=True), combine


def prepare(q: Tensor, k: Tensor, p: Problem, table: Tensor, target: runtime.Target) -> Callable[..., None]:
    """The launches for tensors like these, to be called with `q, k, out, lse, table, lengths, starts`.

    q is (1, heads, tokens, dim), and k (pages, heads, page, dim).
    """
    programs, rows = target.multiprocessors, ROWS
    split = 2 * p.tokens * p.heads <= programs * rows  # else more than half of the SMs have a tile, if q is full
    main, combine = _launchers(
        p.dtype, group=p.heads // p.kv_heads, page=p.page, value_dim=p.value_dim, causal=p.scoring.right == 0,
        block_b=library.power_of_two(p.batch), pdl=pdl.supported(target), split=split,
    )  # fmt: skip
    scale = p.scoring.numbers[0]
    start = hopper_latent.bind_to(main, q.transpose(1, 2), k, _shape(p, k.shape[0]), table, programs, scale)
    finish = library.start_nothing
    if split:
        numbers = (p.batch, p.tokens, p.kv_heads, p.n_k, programs)
        finish = bind(combine, programs // 2 * (rows // _COMBINE_ROWS), numbers=numbers)
    n_partial, device = partial_numbers(programs, rows, COLUMNS), q.device

    def run(q: Tensor, k: Tensor, out: Tensor, lse: Tensor, table: Tensor, lengths: Tensor, starts: Tensor) -> None:
        partial = torch.empty_strided((n_partial,), (1,), dtype=torch.float32, device=device) if split else None
        start(q, k, out, lengths, table, lse, partial, starts, counters(1, device))
        finish(starts, lengths, partial, out, lse)

    return run
