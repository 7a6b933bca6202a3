"""The backward of attention on any GPU: delta by one kernel, dk and dv by another, dq by a third (`backward_kernel`).

Bytes: q, k, v, out, dout and the log-sum-exp are read, dq, dk and dv written, and a float32 a row goes out and back;
nothing of size queries x keys. Products: seven of a head's size for each seen pair of a query and a key, where the
forward has two; the scores and dp are computed by both kernels, so that neither waits for the other's sums or adds to
them by atomics. Only the gradients that are asked for are computed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from rooftile import launching, library, runtime
from rooftile.ops.attention import delta as row_sums
from rooftile.ops.attention.backward_kernel import dkdv_kernel, dq_kernel
from rooftile.ops.attention.backward_parts import Tiling
from rooftile.ops.attention.common import parts, refuse_tracing, unit_last
from rooftile.ops.attention.problem import AttentionConfig, Extras, Problem, Scoring

_WARPGROUPS = ("sm_90", "sm_100")  # whose products take operands out of shared memory, from as many buffers as stages


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


def _shared(owned: int, step: int, stages: int, dims: int, itemsize: int, target: runtime.Target) -> int:
    """About the bytes of shared memory that a program takes: what it owns, loads that are under way, and p or ds."""
    buffers = stages if target.arch in _WARPGROUPS else max(1, stages - 1)
    if target.warp_size == 64:  # AMD's matrix units take operands out of registers
        return dims * itemsize * buffers * step
    return dims * itemsize * (owned + buffers * step) + owned * step * itemsize


def _dims(p: Problem) -> int:
    return sum(parts(p.head_dim)) + sum(parts(p.value_dim))


def refuses(p: Problem, c: AttentionConfig, target: runtime.Target) -> str | None:
    """Why the configuration can't run that problem; None where it can."""
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


@functools.lru_cache(maxsize=4096)
def default_config(p: Problem, target: runtime.Target) -> BackwardConfig:
    """The first of the preferred tiles that fit."""
    for c in _candidates(p, target):
        if refuses(p, c, target) is None:
            return c
    return both(AttentionConfig("portable", 16, 16, 4, 1))


def _candidates(p: Problem, target: runtime.Target) -> Iterator[BackwardConfig]:
    if target is runtime.INTERPRETER:  # a program costs by its operations, not by their size
        yield both(AttentionConfig("portable", 64, 64, 4, 1))
        return
    dim = max(sum(parts(p.head_dim)), sum(parts(p.value_dim)))
    warps = 8 * 32 // target.warp_size
    if p.dtype == torch.float32:  # on the ordinary units, whose operands are in registers
        if dim <= 128:
            yield BackwardConfig("portable", 32, 32, warps, 1, 32 if dim <= 96 else 16, 32, warps, 1)
        yield BackwardConfig("portable", 16, 32, warps, 1, 16, 16, warps // 2, 1)
        return
    plain = not (p.mask or p.alibi or p.scoring.softcap)  # the others need registers beside the sums
    if target.arch in _WARPGROUPS:
        if dim <= 64:
            yield BackwardConfig("portable", 64, 128, 8, 2, 128, 64, 8, 2)
        elif dim <= 128:
            yield BackwardConfig("portable", 64 if plain else 32, 128, 8, 2, 128, 64, 8, 2)
    elif target.warp_size == 32 and dim <= 128:
        steps = 64 if dim <= 64 else 32
        if parts(p.head_dim)[1] or parts(p.value_dim)[1]:
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
def _plan(tiling: Tiling, num_warps: int, dtypes: tuple[torch.dtype | None, ...]) -> launching.KernelLauncher:
    kernel = dq_kernel if tiling.wanted == "dq" else dkdv_kernel
    return launching.KernelLauncher(kernel, {"T": tiling}, newest_assembler=True, num_warps=num_warps)


def _together(lane_bytes: int, lanes: int, target: runtime.Target) -> int:
    """Lanes whose blocks take turns: as many as leave half of the L2 free, if all programs read along."""
    return max(1, min(lanes, target.l2 // 2 // max(1, lane_bytes)))


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
) -> None:
    """Fill those of dq, dk, dv and dsinks that are not None.

    All are (B, H, T, D) views with a last stride of 1, but out and dout, of any strides: dout is copied where its last
    stride is another. lse is contiguous. Of packed sequences only the rows that one covers are written.
    """
    refuse_tracing(q)
    if all(t is None for t in (dq, dk, dv, dsinks)):
        return
    delta = torch.empty(lse.shape, dtype=torch.float32, device=lse.device)
    row_sums.launch(out, dout, dlse, delta, lse, x.sinks, dsinks)
    dout = unit_last(dout)
    rows = (q, k, v, dout, lse, delta)
    both_sizes = both(c)
    if (dk is not None and dk.numel()) or (dv is not None and dv.numel()):
        _launch_dkdv(rows, dk, dv, x, s, both_sizes.dkdv)
    if dq is not None and dq.numel():
        _launch_dq(rows, dq, x, s, both_sizes.dq)


Rows = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def _tiling(rows: Rows, x: Extras, s: Scoring, c: AttentionConfig, wanted: str) -> Tiling:
    q, k, v = rows[:3]
    walked, step = (k.shape[2], c.block_n) if wanted == "dq" else (q.shape[2], c.block_m)
    return Tiling(
        rows=c.block_m,
        cols=c.block_n,
        stages=c.num_stages,
        head_dim=q.shape[3],
        head_parts=parts(q.shape[3]),
        value_dim=v.shape[3],
        value_parts=parts(v.shape[3]),
        shared=q.shape[1] > k.shape[1],
        scale=s.scale,
        softcap=s.softcap,
        left=s.left,
        right=s.right,
        mask="" if x.mask is None else "bool" if x.mask.dtype == torch.bool else "float",
        alibi=x.alibi_slopes is not None,
        packed=x.starts_q is not None,
        even=x.starts_q is None and walked % step == 0,
        wanted=wanted,
    )


def _strides(*tensors: Tensor | None) -> tuple[int, ...]:
    return tuple(n for t in tensors for n in (t.stride()[:3] if t is not None else (0, 0, 0)))


def _dtypes(*tensors: Tensor | None) -> tuple[torch.dtype | None, ...]:
    return tuple(None if t is None else t.dtype for t in tensors)


def _launch_dkdv(rows: Rows, dk: Tensor | None, dv: Tensor | None, x: Extras, s: Scoring, c: AttentionConfig) -> None:
    q, k, v, dout = rows[:4]
    wanted = "dkdv" if dk is not None and dv is not None else "dk" if dk is not None else "dv"
    tiling = _tiling(rows, x, s, c, wanted)
    sequences = k.shape[0] if x.starts_k is None else x.starts_k.shape[0] - 1
    lanes, blocks = sequences * k.shape[1], library.cdiv(x.longest_k, c.block_n)
    group = q.shape[1] // k.shape[1]
    lane_bytes = x.longest_q * group * (tiling.head_dim + tiling.value_dim) * q.element_size()
    together = _together(lane_bytes, lanes, runtime.target(q.device))
    tensors = (*rows, dk, dv, x.mask, x.alibi_slopes, x.starts_q, x.starts_k)
    strides = (*_strides(q, k, v, dout, dk, dv), *(x.mask.stride() if x.mask is not None else (0, 0, 0, 0)))
    numbers = (q.shape[2], k.shape[2], k.shape[1], group, lanes, blocks, together)
    plan = _plan(tiling, c.num_warps, _dtypes(*tensors))
    launching.launch(plan, lanes * blocks, tensors, strides, numbers)


def _launch_dq(rows: Rows, dq: Tensor, x: Extras, s: Scoring, c: AttentionConfig) -> None:
    q, k, v, dout = rows[:4]
    tiling = _tiling(rows, x, s, c, "dq")
    sequences = q.shape[0] if x.starts_q is None else x.starts_q.shape[0] - 1
    lanes, blocks = sequences * q.shape[1], library.cdiv(x.longest_q, c.block_m)
    group = q.shape[1] // k.shape[1]
    lane_bytes = x.longest_k * (tiling.head_dim + tiling.value_dim) * k.element_size() // group
    together = _together(lane_bytes, lanes, runtime.target(q.device))
    tensors = (*rows, dq, x.mask, x.alibi_slopes, x.starts_q, x.starts_k)
    strides = (*_strides(q, k, v, dout, dq), *(x.mask.stride() if x.mask is not None else (0, 0, 0, 0)))
    numbers = (q.shape[2], k.shape[2], q.shape[1], group, lanes, blocks, together)
    plan = _plan(tiling, c.num_warps, _dtypes(*tensors))
    launching.launch(plan, lanes * blocks, tensors, strides, numbers)
