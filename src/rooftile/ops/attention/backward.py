"""The portable backward: its two kernels, and their launch configurations.

One kernel computes dk and dv, and walks over the queries (backward_dkdv.py); another computes dq, and walks over the
keys (backward_dq.py). What they share is in backward_parts.py.

With s the scores (scaled, capped, biased), p = exp(s - lse) and ds = p * (dout·v - delta):

    dv = pᵀ @ dout,   dk = scale * dsᵀ @ q,   dq = scale * ds @ k

A program owns a block of keys of one KV head, or of queries of one head, and sums in registers in a fixed order: no
atomics, so a second run gives the same bits. Both kernels compute p again from q, k and the log-sum-exp.

Bytes: q, k, v, out, dout and the log-sum-exp are read; dq, dk and dv are written; delta (`row_sums`), a float32 a row,
is written and read. Both kernels compute the scores and dp, so they have seven GEMMs together, where one kernel that
adds dq by atomics has five, and the forward two. Only the gradients that are asked for are computed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from rooftile import library, runtime
from rooftile.launching import KernelLauncher, bind
from rooftile.ops.attention import row_sums
from rooftile.ops.attention.backward_dkdv import dkdv_kernel
from rooftile.ops.attention.backward_dq import dq_kernel
from rooftile.ops.attention.backward_parts import Tiling
from rooftile.ops.attention.parts import has_unit_rows
from rooftile.ops.attention.problem import AttentionConfig, Inputs, Problem
from rooftile.primitives.scores import split_dim

_SMEM_OPERANDS = ("sm_90", "sm_100")  # their tensor cores read operands from shared memory, with a buffer a stage


@dataclasses.dataclass(frozen=True)
class BackwardConfig(AttentionConfig):
    """How both kernels of the portable backward are launched.

    Args:
        block_m, block_n, num_warps, num_stages: of the dk and dv kernel, whose programs own block_n keys and walk over
            queries in steps of block_m.
        dq_block_m, dq_block_n, dq_num_warps, dq_num_stages: of the dq kernel, whose programs own dq_block_m queries and
            walk over keys in steps of dq_block_n.
    """

    dq_block_m: int = 64
    dq_block_n: int = 64
    dq_num_warps: int = 4
    dq_num_stages: int = 2

    def __post_init__(self) -> None:
        for c in (self.dkdv, self.dq):
            assert c.kernel == self.kernel

    @property
    def dkdv(self) -> AttentionConfig:
        return AttentionConfig(self.kernel, self.block_m, self.block_n, self.num_warps, self.num_stages)

    @property
    def dq(self) -> AttentionConfig:
        return AttentionConfig(self.kernel, self.dq_block_m, self.dq_block_n, self.dq_num_warps, self.dq_num_stages)


def both(c: AttentionConfig) -> BackwardConfig:
    """One tile for both kernels: that of dq owns block_n queries, and walks in steps of block_m keys."""
    if isinstance(c, BackwardConfig):
        return c
    return BackwardConfig(
        c.kernel, c.block_m, c.block_n, c.num_warps, c.num_stages, c.block_n, c.block_m, c.num_warps, c.num_stages
    )


accepts = has_unit_rows


def _shared(owned: int, step: int, stages: int, dims: int, itemsize: int, target: runtime.Target) -> int:
    """About the bytes of shared memory of a program: the tile that it owns, the loads in its pipeline, and p or ds."""
    buffers = stages if target.arch in _SMEM_OPERANDS else max(1, stages - 1)
    if target.warp_size == 64:  # AMD's matrix cores take operands from registers
        return dims * itemsize * buffers * step
    return dims * itemsize * (owned + buffers * step) + owned * step * itemsize


def _dims(p: Problem) -> int:
    return sum(split_dim(p.head_dim)) + sum(split_dim(p.value_dim))


def can_implement(p: Problem, c: AttentionConfig, target: runtime.Target) -> str | None:
    """None where these kernels can run that problem in that configuration, or the reason why they can't."""
    if c.kernel != "portable":
        return f"kernel is {c.kernel!r}, expected 'portable'"
    c = both(c)
    for name, tile, owned, step in (
        ("dk and dv", c.dkdv, c.block_n, c.block_m),
        ("dq", c.dq, c.dq_block_m, c.dq_block_n),
    ):
        if min(owned, step) < 16:
            return f"the tile of {name} is {tile.block_m}x{tile.block_n}, expected 16 of each at least"
        if tile.num_warps * target.warp_size > target.max_threads:
            return f"num_warps of {name} is {tile.num_warps}, expected {target.max_threads // target.warp_size} at most"
        need = _shared(owned, step, tile.num_stages, _dims(p), p.dtype.itemsize, target)
        if need > target.shared_memory:
            return (
                f"the tile of {name} needs {need} bytes of shared memory, and {target.arch} has {target.shared_memory}"
            )
    return None


def default_config(p: Problem, target: runtime.Target) -> BackwardConfig:
    """The first of the preferred tiles that fit."""
    for c in _candidates(p, target):
        if can_implement(p, c, target) is None:
            return c
    return both(AttentionConfig("portable", 16, 16, 4, 1))


def _candidates(p: Problem, target: runtime.Target) -> Iterator[BackwardConfig]:
    if target is runtime.INTERPRETER:  # a program costs by its operations, not by their size
        yield both(AttentionConfig("portable", 64, 64, 4, 1))
        return
    dim = max(sum(split_dim(p.head_dim)), sum(split_dim(p.value_dim)))
    warps = 8 * 32 // target.warp_size
    if p.dtype == torch.float32:  # on the FMA units, whose operands are in registers
        if dim <= 128:
            yield BackwardConfig("portable", 32, 32, warps, 1, 32 if dim <= 96 else 16, 32, warps, 1)
        yield BackwardConfig("portable", 16, 32, warps, 1, 16, 16, warps // 2, 1)
        return
    plain = not (p.mask or p.alibi or p.scoring.softcap)  # the others need registers beside the sums
    if target.arch in _SMEM_OPERANDS:
        if dim <= 64:
            yield BackwardConfig("portable", 64, 128, 8, 2, 128, 64, 8, 2)
        elif dim <= 128:
            yield BackwardConfig("portable", 64 if plain else 32, 128, 8, 2, 128, 64, 8, 2)
    elif target.warp_size == 32 and dim <= 128:
        steps = 64 if dim <= 64 else 32
        if split_dim(p.head_dim)[1] or split_dim(p.value_dim)[1]:
            yield BackwardConfig("portable", 32, 64, 8, 1, 64, 32, 4, 1)
        elif dim <= 64 or not plain:
            yield BackwardConfig("portable", 32, 64, 4, 2, 128, steps, 8, 2)
        yield BackwardConfig("portable", 64, 64, 8, 2, 128, 32, 8, 2)
    if target.warp_size == 32:
        yield both(AttentionConfig("portable", 64 if dim <= 128 or p.value_dim <= 128 else 32, 64, 8, 2))
        yield both(AttentionConfig("portable", 32, 64, 8, 2))
    yield both(AttentionConfig("portable", 32, 32, 4, 1))
    yield both(AttentionConfig("portable", 16, 32, 4, 1))


@functools.cache
def _launcher(tiling: Tiling, num_warps: int, dtypes: tuple[torch.dtype | None, ...]) -> KernelLauncher:
    kernel = dq_kernel if tiling.wanted == "dq" else dkdv_kernel
    return KernelLauncher(kernel, {"T": tiling}, newest_assembler=True, num_warps=num_warps)


def _together(head_bytes: int, batch_heads: int, target: runtime.Target) -> int:
    """Lanes (heads of batch entries) that are worked on together: as many as fill half of the L2."""
    return max(1, min(batch_heads, target.l2 // 2 // max(1, head_bytes)))


def _tiling(x: Inputs, c: AttentionConfig, wanted: str) -> Tiling:
    walked, step = (x.k.shape[2], c.block_n) if wanted == "dq" else (x.q.shape[2], c.block_m)
    head_dim, value_dim = x.q.shape[3], x.v.shape[3]
    return Tiling(
        rows=c.block_m,
        cols=c.block_n,
        stages=c.num_stages,
        head_dim=head_dim,
        head_parts=split_dim(head_dim),
        value_dim=value_dim,
        value_parts=split_dim(value_dim),
        shared=x.q.shape[1] > x.k.shape[1],
        capped=x.scoring.flags[0],
        has_left=x.scoring.flags[1],
        has_right=x.scoring.flags[2],
        mask=x.mask_kind,
        alibi=0 if x.alibi_slopes is None else x.alibi_slopes.dim(),
        packed=x.starts_q is not None,
        even=x.starts_q is None and walked % step == 0,
        wanted=wanted,
    )


def _bound(
    x: Inputs, dout: Tensor, gradients: tuple[Tensor | None, ...], c: AttentionConfig, wanted: str
) -> Callable[..., None]:
    """The launch of one kernel: with q, k, v, dout, lse, delta, its gradients, mask, slopes and both starts."""
    heads, kv_heads = x.q.shape[1], x.k.shape[1]
    group, dims, of_queries = heads // kv_heads, x.q.shape[3] + x.v.shape[3], wanted == "dq"
    longest, block = (x.longest_q, c.block_m) if of_queries else (x.longest_k, c.block_n)
    n_heads = heads if of_queries else kv_heads
    batch_heads, blocks = x.sequences * n_heads, library.cdiv(longest, block)
    walked = x.longest_k * dims // group if of_queries else x.longest_q * group * dims
    together = _together(walked * x.q.element_size(), batch_heads, runtime.target(x.q.device))
    read = (x.q, x.k, x.v, dout, *gradients)
    strides = tuple(n for t in read for n in ((0, 0, 0) if t is None else t.stride()[:3]))
    dtypes = tuple(None if t is None else t.dtype for t in (*read, x.mask, x.alibi_slopes))
    numbers = (x.q.shape[2], x.k.shape[2], n_heads, group, batch_heads, blocks, together)
    return bind(
        _launcher(_tiling(x, c, wanted), c.num_warps, dtypes),
        batch_heads * blocks,
        strides=(*strides, *x.mask_strides),
        numbers=(*numbers, x.scoring.scale, *x.scoring.numbers),
    )


def prepare(
    x: Inputs,
    out: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    gradients: tuple[Tensor | None, ...],
    c: AttentionConfig,
    deterministic: bool = True,
) -> Callable[..., None]:
    """The launches for tensors like these, to be called with `q, k, v, out, lse, dout, dlse, *gradients, *x.tensors`.

    The gradients are dq, dk, dv and dsinks; those that nobody asks for are None. All tensors are (B, H, T, D) by
    strides with a last stride of 1, but out and dlse, which may have any. lse is contiguous. Of packed sequences only
    the rows that a sequence covers are written. Gradients are always deterministic.
    """
    dq, dk, dv, dsinks = gradients
    wants_dq = dq is not None and dq.numel() > 0
    wants_dk, wants_dv = (t is not None and t.numel() > 0 for t in (dk, dv))
    if not (wants_dq or wants_dk or wants_dv or dsinks is not None):
        return library.start_nothing
    c = both(c)
    sums = row_sums.prepare_delta(out, dout, dlse, x.sinks, dsinks)
    make_dkdv: Any = None
    if wants_dk or wants_dv:
        wanted = "dkdv" if wants_dk and wants_dv else "dk" if wants_dk else "dv"
        make_dkdv = _bound(x, dout, (dk, dv), c.dkdv, wanted)
    make_dq = _bound(x, dout, (dq,), c.dq, "dq") if wants_dq else None

    def run(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, *rest: Any
    ) -> None:
        dq, dk, dv, dsinks, mask, slopes, sinks, starts_q, starts_k = rest
        delta = torch.empty_like(lse)
        sums(out, dout, dlse, delta, lse, sinks, dsinks)
        if make_dkdv is not None:
            make_dkdv(q, k, v, dout, lse, delta, dk, dv, mask, slopes, starts_q, starts_k)
        if make_dq is not None:
            make_dq(q, k, v, dout, lse, delta, dq, mask, slopes, starts_q, starts_k)

    return run
