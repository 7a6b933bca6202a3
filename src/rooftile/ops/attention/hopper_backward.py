"""The backward of attention for sm_90: warp-specialized kernels with TMA loads and wgmma.

There are two ways. The fast one computes dk, dv and dq in one kernel (hopper_backward_dkdv.py), as FlashAttention-2
does (Dao 2023, https://arxiv.org/abs/2307.08691): five GEMMs a block, and dq summed in memory by atomics, in an order
that differs between runs. The deterministic one computes dk and dv with that kernel, and dq with another
(hopper_backward_dq.py): seven GEMMs and no atomics. It is also taken where only dq, or only dk or dv, are asked for:
then one of the two kernels is enough.

A kernel before them stores lse and delta of the rows as TMA loads them, and one after the fast way casts dq
(row_sums.py). Head dimensions are padded to 64 or 128. block_m is the queries of a step, 128 for the former and 64 for
the latter; block_n is the 128 keys of a tile of dk and dv; num_stages is the pipeline stages of the fast way, from
which the tilings of the other kernels follow.

Packed sequences take the same kernels. The last tile of a sequence is loaded with zeros past its end, where the next
sequence is, and stored without those rows (`primitives.gluon.describe_packed`), so that to the mainloops it is the end
of a tensor. A CTA finds its sequence and block on the device (`slots`). Where sequences have fewer queries on average
than a step, padding would make dq's sum more than twice as long as dq, and dq has its own kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rooftile import library, runtime
from rooftile.ops.attention import hopper_backward_dkdv, hopper_backward_dq, row_sums
from rooftile.ops.attention.hopper_backward_parts import KEYS, ROWS, padded
from rooftile.ops.attention.problem import AttentionConfig, Inputs, Problem
from rooftile.ops.attention.slots import block_slots, prepare_starts
from rooftile.primitives.gluon import is_describable

accepts = is_describable
_DTYPES = (torch.bfloat16, torch.float16)


def can_implement(p: Problem, c: AttentionConfig, target: runtime.Target) -> str | None:
    """None where these kernels can run that problem in that configuration, or the reason why they can't."""
    if not target.gluon:
        return f"kernel 'hopper' is for sm_90, and {target.why_no_gluon}"
    if p.dtype not in _DTYPES:
        return f"kernel 'hopper' takes float16 and bfloat16, not {p.dtype}"
    if p.head_dim != p.value_dim or p.head_dim % 8 or not 8 <= p.head_dim <= 128:
        return (
            "the backward of kernel 'hopper' takes one head_dim for keys and values, a multiple of 8 up to 128, not "
            f"{p.head_dim} and {p.value_dim}"
        )
    if p.mask or p.alibi:
        return "the backward of kernel 'hopper' takes no mask and no ALiBi"
    if not p.aligned:
        return "kernel 'hopper' takes q, k and v whose rows begin at multiples of 16 bytes"
    if min(p.batch, p.heads, p.n_q, p.n_k) < 1:
        return "kernel 'hopper' takes no empty tensors"
    if p.packed:
        rows = keys = p.heads * block_slots(p.tokens, 128, p.batch) * 128
    else:
        rows = p.batch * p.heads * library.cdiv(p.n_q, 128) * 128
        keys = p.batch * p.kv_heads * library.cdiv(p.n_k, KEYS) * KEYS
    if max(rows, keys) >= 2**30 or p.n_q + p.n_k > 2**30:
        return f"the backward of kernel 'hopper' takes fewer than 2^30 rows, all heads together, not {max(rows, keys)}"
    if max(p.scoring.left, p.scoring.right) >= 2**30:
        return "kernel 'hopper' takes windows below 2^30"
    dim = padded(p.head_dim)
    if c.block_m != ROWS[dim] or c.block_n != KEYS or c.num_warps != 8:
        return (
            f"the tile is {c.block_m} x {c.block_n} with {c.num_warps} warps: the backward of kernel 'hopper' takes "
            f"{ROWS[dim]} x {KEYS} and 8 for a head_dim of {p.head_dim}"
        )
    if c.num_stages < 2:
        return f"num_stages is {c.num_stages}: expected 2 or more"
    needs = (
        hopper_backward_dkdv.tiling(dim, True, p.scoring, c.num_stages, True).shared_memory,
        hopper_backward_dkdv.tiling(dim, True, p.scoring, c.num_stages, False).shared_memory,
        hopper_backward_dq.tiling(dim, True, p.scoring, c.num_stages).shared_memory,
    )
    if max(needs) > target.shared_memory:
        return f"num_stages is {c.num_stages}: {max(needs)} bytes of tiles, expected at most {target.shared_memory}"
    return None


def prepare(
    x: Inputs,
    out: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    gradients: tuple[Tensor | None, ...],
    c: AttentionConfig,
    deterministic: bool = False,
) -> Callable[..., None]:
    """The launches for tensors like these, to be called with `q, k, v, out, lse, dout, dlse, *gradients, *x.tensors`.

    The gradients are dq, dk, dv and dsinks; those that nobody asks for are None. All tensors are (B, H, T, D) that TMA
    can describe, but out, of which only the last stride has to be 1. With `deterministic`, the results are the same
    bits every time.
    """
    dq, dk, dv, dsinks = gradients
    batch, heads, n_q, head_dim = x.q.shape
    dim, n_k, s = padded(head_dim), x.k.shape[2], x.scoring
    factor = s.default_factor(head_dim)
    with_keys = dk is not None or dv is not None
    packed = x.starts_q is not None
    sequences = x.sequences if packed else 0
    with_sums = with_keys and dq is not None and not deterministic and n_q >= sequences * c.block_m
    float32: dict[str, Any] = {"dtype": torch.float32, "device": x.q.device}
    of_sinks = None if dsinks is None else row_sums.prepare_delta(out, dout, dlse, x.sinks, dsinks)
    masked = packed or n_k % KEYS != 0 or s.limited
    padded_rows = batch * heads * row_sums.row_blocks(n_q, c.block_m, sequences) * c.block_m
    make_starts = prepare_starts(sequences, n_q, n_k) if packed else None
    make_stats = make_dkdv = make_dq = finish = None
    if with_keys or dq is not None:
        make_stats = row_sums.prepare_stats(out, dout, dlse, with_sums, with_keys, c.block_m, dim, sequences)
    if with_keys:
        t = hopper_backward_dkdv.tiling(dim, masked, s, c.num_stages, with_sums, factor, packed)
        stats = torch.empty(padded_rows * 2, **float32)
        like = (x.k if dk is None else dk, x.v if dv is None else dv)
        make_dkdv = hopper_backward_dkdv.prepare_dkdv(t, x, dout, stats, *like)
    if with_sums:
        assert dq is not None
        finish = row_sums.prepare_finish(dq, s.scale, c.block_m, dim, sequences)
    elif dq is not None:
        t_dq = hopper_backward_dq.tiling(dim, masked, s, c.num_stages, factor, packed)
        make_dq = hopper_backward_dq.prepare_dq(t_dq, x, dout, dq)

    def run(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, *rest: Any
    ) -> None:
        dq, dk, dv, dsinks, _mask, _slopes, sinks, starts_q, starts_k = rest
        if of_sinks is not None:
            of_sinks(out, dout, dlse, torch.empty((batch, heads, n_q), **float32), lse, sinks, dsinks)
        if make_stats is None:
            return
        starts = None if make_starts is None else make_starts(starts_q, starts_k)
        stats = torch.empty(padded_rows * 2, **float32)
        sums = torch.empty(padded_rows * dim, **float32) if with_sums else None
        counter = None if make_dkdv is None else torch.empty(1, dtype=torch.int32, device=q.device)
        make_stats(out, dout, lse, dlse, stats, sums, counter, starts)
        if make_dkdv is not None:  # it writes both, also to scratch memory
            dk = torch.empty_strided(k.shape, k.stride(), dtype=k.dtype, device=k.device) if dk is None else dk
            dv = torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device) if dv is None else dv
            make_dkdv(q, k, v, dout, stats, dk, dv, sums, counter, starts)
        if finish is not None:
            finish(sums, dq, starts)
        elif make_dq is not None:
            make_dq(q, k, v, dout, dq, stats, starts)

    return run
