"""The backward of attention for sm_90, on the tensor cores of warpgroups, with copies by the tensor memory accelerator.

There are two ways. The fast one makes dk, dv and dq in one kernel (hopper_backward_kernel.py): five products for each
pair of a query and a key, and dq added up in memory, in an order that is not the same every time. The deterministic one
makes dk and dv with that kernel, and dq with another (hopper_backward_dq_kernel.py): seven products, no additions in
memory. It is also taken where only dq, or only dk or dv, are asked for: then either kernel is enough.

A kernel before them gets the rows' lse and delta ready, and one after the fast way casts dq (hopper_backward_rows.py).
Heads of up to 64 or 128 are computed as 64 or 128: outside of a tensor the accelerator reads zeros, and writes nothing.
block_m are query rows of a step of the fast way, 64 for heads over 64 and 128 for the others; block_n, 128 keys;
num_stages, steps in flight.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor

from rooftile import launching, library, runtime  # before Triton: runtime fixes the mode of the process
from rooftile.ops.attention import delta as row_sums
from rooftile.ops.attention import hopper_backward_rows as of_rows
from rooftile.ops.attention.hopper_backward_dq_kernel import queries_gradient
from rooftile.ops.attention.hopper_backward_kernel import keys_gradients
from rooftile.ops.attention.hopper_backward_tiling import KeysTiling, QueriesTiling
from rooftile.ops.attention.problem import AttentionConfig, Extras, Problem, Scoring
from rooftile.primitives.gluon import describe, is_describable

import triton.experimental.gluon.language as gl  # isort: skip

_DTYPES = (torch.bfloat16, torch.float16)
_KEYS = 128
_ROWS = {64: 128, 128: 64}  # query rows of a step, by padded head_dim
_REGISTERS = 168  # what 12 warps are compiled for; the warps that multiply then take what the one that copies leaves
# Bytes that the programs of a few heads walk over again and again, and that stay in the L2 if they are no more. On an
# H200 with 2 x 16 heads of 8192 causal queries, 8 MiB a head: 536 TF/s with 1 head at a time, 594 with 2, 561 with 4,
# 552 with 8; with 8 x 16 of 2048, 2 MiB a head: 433 with 1, 435 with 2, 450 with 8.
_L2 = 16 << 20


def _padded(head_dim: int) -> int:
    return 64 if head_dim <= 64 else 128


@functools.cache
def _keys_tiling(dim: int, masked: bool, s: Scoring, stages: int, with_dq: bool) -> KeysTiling:
    """What the kernel of dk and dv is compiled for.

    With dq, dv is started early with causal heads of 64: 455 TF/s instead of 437 on an H200, and fewer in all else.
    Without dq, heads of 128 have room for what is started early and late: 673 TF/s (of four products) instead of 591;
    heads of 64 are the fastest with steps of 128 queries and neither, 609 instead of 483. A soft cap takes the
    registers of either.
    """
    if with_dq:
        early = dim == 64 and s.right >= 0 and not s.softcap
        sizes = (_ROWS[dim], stages, True, early, False)
    else:
        loose = dim == 128 and not s.softcap
        sizes = (_ROWS[dim], stages + 1, False, loose, loose)
    return KeysTiling(dim, s.scale, s.softcap, s.left, s.right, masked, _ROWS[dim], *sizes)


@functools.cache
def _queries_tiling(dim: int, masked: bool, s: Scoring, stages: int) -> QueriesTiling:
    """What the kernel of dq is compiled for.

    Heads of 128 take 64 keys a step and start a product late, 764 TF/s (of three products) on an H200, where 128 keys,
    for which the registers hold no second step, have 724. Heads of 64 take 128 keys, and are serialised started late.
    """
    keys = 64 if dim == 128 else 128
    sizes = (keys, stages * (128 // keys), keys == 64)
    return QueriesTiling(dim, s.scale, s.softcap, s.left, s.right, masked, _ROWS[dim], *sizes)


def refuses(p: Problem, c: AttentionConfig, target: runtime.Target) -> str | None:
    """Why these kernels can't run that problem so; None where they can."""
    if target.arch != "sm_90":
        return f"kernel 'hopper' is for sm_90, not {target.arch}"
    if p.dtype not in _DTYPES:
        return f"kernel 'hopper' takes float16 and bfloat16, not {p.dtype}"
    if p.head_dim != p.value_dim or p.head_dim % 8 or not 8 <= p.head_dim <= 128:
        return (
            "the backward of kernel 'hopper' takes one head_dim for keys and values, a multiple of 8 up to 128, not "
            f"{p.head_dim} and {p.value_dim}"
        )
    if p.mask or p.alibi or p.packed:
        return "the backward of kernel 'hopper' takes no mask, ALiBi or packed sequences"
    if not p.aligned:
        return "kernel 'hopper' takes q, k and v whose rows begin at multiples of 16 bytes"
    if min(p.batch, p.heads, p.n_q, p.n_k) < 1:
        return "kernel 'hopper' takes no empty tensors"
    rows = p.batch * p.heads * library.cdiv(p.n_q, 128) * 128
    keys = p.batch * p.kv_heads * library.cdiv(p.n_k, _KEYS) * _KEYS
    if max(rows, keys) >= 2**30 or p.n_q + p.n_k > 2**30:
        return f"the backward of kernel 'hopper' takes fewer than 2^30 rows, all heads together, not {max(rows, keys)}"
    if max(p.scoring.left, p.scoring.right) >= 2**30:
        return "kernel 'hopper' takes windows below 2^30"
    dim = _padded(p.head_dim)
    if c.block_m != _ROWS[dim] or c.block_n != _KEYS or c.num_warps != 8:
        return (
            f"the tile is {c.block_m} x {c.block_n} with {c.num_warps} warps: the backward of kernel 'hopper' takes "
            f"{_ROWS[dim]} x {_KEYS} and 8 for a head_dim of {p.head_dim}"
        )
    if c.num_stages < 2:
        return f"num_stages is {c.num_stages}: expected 2 or more"
    needs = (
        _keys_tiling(dim, True, p.scoring, c.num_stages, True).shared_memory,
        _keys_tiling(dim, True, p.scoring, c.num_stages, False).shared_memory,
        _queries_tiling(dim, True, p.scoring, c.num_stages).shared_memory,
    )
    if max(needs) > target.shared_memory:
        return f"num_stages is {c.num_stages}: {max(needs)} bytes of tiles, expected at most {target.shared_memory}"
    return None


_TILES = gl.NVMMASharedLayout(128, 16, 4)
_ROW = gl.NVMMASharedLayout(0, 32, 1)


@functools.cache
def _plan(t: KeysTiling | QueriesTiling, dtype: torch.dtype) -> launching.KernelLauncher:
    kernel = keys_gradients if isinstance(t, KeysTiling) else queries_gradient
    return launching.KernelLauncher(kernel, {"T": t}, num_warps=4, maxnreg=_REGISTERS)


def _run(t: KeysTiling | QueriesTiling, programs: int, like: Tensor, args: tuple[Any, ...]) -> None:
    plan = _plan(t, like.dtype)
    device = like.get_device()
    compiled = plan.compiled.get(device)
    if compiled is not None:
        launching._start(compiled, programs, device, (*args, t))
        return
    compiled = plan.kernel[(programs,)](*args, t, **plan.options)
    if runtime.MODE is runtime.Mode.GPU:
        plan.compiled[device] = compiled


def _together(lanes: int, lane_bytes: int) -> int:
    """Heads whose blocks are worked on at the same time."""
    return max(1, min(lanes, _L2 // lane_bytes))


def _written(t: Tensor | None, like: Tensor) -> Tensor:
    """Where a kernel writes a gradient: t itself if the accelerator can, or memory to be copied, or that nobody asked
    for."""
    return t if t is not None and is_describable(t) else torch.empty(like.shape, dtype=like.dtype, device=like.device)


def _make_keys_gradients(
    t: KeysTiling,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    stats: Tensor,
    dk: Tensor | None,
    dv: Tensor | None,
    sums: Tensor | None,
) -> None:
    """Fill dk and dv, and add to dq's sum if there is one."""
    batch, heads, n_q, _ = q.shape
    kv_heads, n_k = k.shape[1:3]
    lanes = batch * kv_heads
    dk_out, dv_out = _written(dk, k), _written(dv, v)
    walked = heads // kv_heads * n_q * t.dim * (4 + (4 if t.with_dq else 0))
    args = (
        describe(q, (1, 1, t.rows, t.dim), _TILES),
        describe(k, (1, 1, 64, t.dim), _TILES),
        describe(v, (1, 1, 64, t.dim), _TILES),
        describe(dout, (1, 1, t.rows, t.dim), _TILES),
        describe(stats, (t.rows,), _ROW),
        describe(dk_out, (1, 1, 64, t.dim), _TILES),
        describe(dv_out, (1, 1, 64, t.dim), _TILES),
        sums,
        heads,
        kv_heads,
        n_q,
        n_k,
        lanes,
        _together(lanes, walked),
    )
    _run(t, lanes * library.cdiv(n_k, t.keys), q, args)
    for wanted, made in ((dk, dk_out), (dv, dv_out)):
        if wanted is not None and wanted is not made:
            wanted.copy_(made)


def _make_queries_gradient(
    t: QueriesTiling, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, stats: Tensor, dq: Tensor
) -> None:
    """Fill dq."""
    batch, heads, n_q, _ = q.shape
    kv_heads, n_k = k.shape[1:3]
    lanes, group = batch * heads, heads // kv_heads
    dq_out = _written(dq, q)
    args = (
        describe(q, (1, 1, 64, t.dim), _TILES),
        describe(k, (1, 1, t.keys, t.dim), _TILES),
        describe(v, (1, 1, t.keys, t.dim), _TILES),
        describe(dout, (1, 1, 64, t.dim), _TILES),
        describe(dq_out, (1, 1, 64, t.dim), _TILES),
        stats,
        heads,
        kv_heads,
        n_q,
        n_k,
        lanes,
        min(lanes, group * _together(lanes, n_k * t.dim * 4)),
    )
    _run(t, lanes * library.cdiv(n_q, t.rows), q, args)
    if dq_out is not dq:
        dq.copy_(dq_out)


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dsinks: Tensor | None,
    x: Extras,
    s: Scoring,
    c: AttentionConfig,
    deterministic: bool = False,
) -> None:
    """Fill those of dq, dk, dv and dsinks that are not None: all (B, H, T, D) views but dsinks.

    What the tensor memory accelerator can't read or write as it lies (strides that are not multiples of 16 bytes, or
    broadcast) goes by way of a copy. With `deterministic` the results are the same bits every time.
    """
    if isinstance(q, FunctionalTensor):
        raise launching.Untraceable("descriptors of tensors")
    batch, heads, n_q, head_dim = q.shape
    options: dict[str, Any] = {"dtype": torch.float32, "device": q.device}
    if dsinks is not None:
        row_sums.launch(out, dout, dlse, torch.empty((batch, heads, n_q), **options), lse, x.sinks, dsinks)
    with_keys = dk is not None or dv is not None
    if not with_keys and dq is None:
        return

    q, k, v, dout = (
        t if is_describable(t) else t.clone(memory_format=torch.contiguous_format) for t in (q, k, v, dout)
    )
    if out.stride(3) != 1:
        out = out.contiguous()
    dim = _padded(head_dim)
    masked = k.shape[2] % _KEYS != 0 or s.left >= 0 or s.right >= 0
    with_sums = with_keys and dq is not None and not deterministic
    padded_rows = batch * heads * library.cdiv(n_q, c.block_m) * c.block_m
    stats = torch.empty(padded_rows * 2, **options)
    sums = torch.empty(padded_rows * dim, **options) if with_sums else None
    of_rows.prepare(out, dout, lse, dlse, stats, sums, c.block_m, dim)
    if with_keys:
        t = _keys_tiling(dim, masked, s, c.num_stages, with_sums)
        _make_keys_gradients(t, q, k, v, dout, stats, dk, dv, sums)
    if dq is None:
        return
    if sums is None:
        _make_queries_gradient(_queries_tiling(dim, masked, s, c.num_stages), q, k, v, dout, stats, dq)
        return
    dq_out = dq if dq.stride(3) == 1 else torch.empty(q.shape, dtype=q.dtype, device=q.device)
    of_rows.finish(sums, dq_out, s.scale, c.block_m, dim)
    if dq_out is not dq:
        dq.copy_(dq_out)
