"""The attention forward for sm_90: copies by the tensor memory accelerator, warpgroups in turns, persistent programs.

The kernel is in `hopper_forward_kernel.py`; here is what it takes, in which order its programs take their tiles, and
how it is launched. num_warps are the warps that multiply, 4 for each 64 queries of block_m; one more copies.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import heapq
import math
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor

from rooftile import launching, library, runtime  # before Triton: runtime fixes the mode of the process
from rooftile.ops.attention.hopper_forward_kernel import attend
from rooftile.ops.attention.hopper_forward_tiling import Tiling, swizzle_bytes
from rooftile.ops.attention.problem import AttentionConfig, Extras, Problem, Scoring
from rooftile.primitives.gluon import describe

import triton.experimental.gluon.language as gl  # isort: skip

_DTYPES = (torch.bfloat16, torch.float16)
# What a kernel of 12 or 16 warps is compiled for; the warps that multiply then take what the one that copies leaves.
_REGISTERS = {2: 168, 3: 128}
_LOG2E = math.log2(math.e)
_TABLED = 1 << 14  # tiles, at most, whose order is made on the host
_L2 = 32 << 20  # bytes of keys and values that stay in the L2 while they are in use
_OUTSIDE = 1.5  # what a tile costs beside its blocks, in blocks
_MANY = 1024  # tables, at most: lengths may never repeat
_TABLES: dict[Any, Tensor] = {}


@functools.cache
def _tiling(c: AttentionConfig, s: Scoring, head_dim: int, limit: int) -> Tiling:
    """What the kernel is compiled for. Two tiles of queries are there at once if they fit."""
    dim = max(32, 1 << (head_dim - 1).bit_length())
    scale, cap_scale = s.scale * _LOG2E, 0.0
    if s.softcap:
        scale, cap_scale = s.softcap * _LOG2E, s.scale / s.softcap
    # As measured on an H200. Joined is 2 to 8 % ahead, also of tiles that take turns, but with two consumers of short
    # heads, whose turns are 3 % ahead. Heads of more than 128, and three consumers with a cap, would spill.
    three, limited = c.num_warps == 12, s.left >= 0 or s.right >= 0
    short = dim <= 64 and not three
    joined = not short and dim <= 128 and not (three and s.softcap)

    def tiling(q_buffers: int) -> Tiling:
        return Tiling(
            c.block_n, dim, c.num_warps // 4, c.num_stages, q_buffers, short, joined,
            limited, scale, cap_scale, s.left, s.right,
        )  # fmt: skip

    return tiling(2) if tiling(2).shared_memory <= limit else tiling(1)


def refuses(p: Problem, c: AttentionConfig, target: runtime.Target) -> str | None:
    """Why this kernel can't run that problem so; None where it can."""
    if target.arch != "sm_90":
        return f"kernel 'hopper' is for sm_90, not {target.arch}"
    if p.dtype not in _DTYPES:
        return f"kernel 'hopper' takes float16 and bfloat16, not {p.dtype}"
    if p.packed or p.mask or p.alibi:
        return "kernel 'hopper' takes no packed sequences, no mask and no ALiBi"
    if p.head_dim != p.value_dim or p.head_dim % 8 or not 8 <= p.head_dim <= 256:
        return (
            f"kernel 'hopper' takes one head_dim for keys and values, a multiple of 8 up to 256, not {p.head_dim} and "
            f"{p.value_dim}"
        )
    if not p.aligned:
        return "kernel 'hopper' takes tensors whose base and strides are multiples of 16 bytes"
    # What scores are multiplied by, -inf and the lowest maximum (-1e30) among them: neither 0 nor past float32.
    factor = p.scoring.softcap or p.scoring.scale
    if not (p.scoring.scale > 0 and 2.0**-100 < factor < 2.0**27):
        return f"kernel 'hopper' takes a scale above 0, and it or the softcap from 2^-100 to 2^27, not {p.scoring}"
    if min(p.batch, p.heads, p.n_q, p.n_k) < 1 or max(p.n_q, p.n_k) >= 2**30:
        return f"kernel 'hopper' takes from 1 to 2^30 - 1 queries and keys, not {p.n_q} and {p.n_k}"
    if p.batch * p.heads * library.cdiv(p.n_q, 64) >= 2**30:
        return f"kernel 'hopper' takes fewer tiles than {p.batch} x {p.heads} heads of {p.n_q} queries are"
    if c.num_warps not in (8, 12) or c.block_m != 16 * c.num_warps:
        return f"block_m is {c.block_m}: kernel 'hopper' takes 64 queries for every 4 of 8 or 12 warps"
    if not 16 <= c.block_n <= 256:
        return f"block_n is {c.block_n}: kernel 'hopper' takes 16 to 256 keys"
    if c.num_stages < 2:
        return f"num_stages is {c.num_stages}: kernel 'hopper' takes a ring of 2 blocks or more"
    t = _tiling(c, p.scoring, p.head_dim, target.shared_memory)
    if t.rows * (t.dim * 2 + t.keys * 3) // 256 > (180 if t.consumers == 2 else 130):
        return f"the tile is {c.block_m} x {c.block_n}: more than the registers of {c.num_warps} warps hold"
    if t.shared_memory > target.shared_memory:
        return (
            f"num_stages is {c.num_stages}: {t.shared_memory} bytes of tiles, expected at most {target.shared_memory}"
        )
    return None


@functools.cache
def _layout(dim: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_bytes(dim), 16, rank=4)


def _describable(t: Tensor) -> Tensor:
    """t, or a copy of it where dimensions are broadcast."""
    if 0 in t.stride() and any(n > 1 and stride == 0 for n, stride in zip(t.shape, t.stride(), strict=True)):
        return t.contiguous()
    return t


def _costs(t: Tiling, n_q: int, n_k: int) -> list[float]:
    """What each tile of a head costs, in blocks of keys."""
    shift = n_k - n_q
    costs = []
    for row in range(0, n_q, t.tile_rows):
        begin = max(row + shift - t.left, 0) // t.keys if t.left >= 0 else 0
        end = min(min(row + t.tile_rows, n_q) + shift + t.right, n_k) if t.right >= 0 else n_k
        costs.append(max(library.cdiv(end, t.keys), begin + 1) - begin + _OUTSIDE)
    return costs


def schedule(t: Tiling, batch: int, heads: int, n_q: int, n_k: int, element_size: int, programs: int) -> list[int]:
    """Which tiles each program takes, and when: `programs` counts, then the first tile of each, the second, ...

    Heads are taken by as many as have their keys and values in the L2, and of these the longest tiles first, each by
    the program that is free first. So the last tiles are short ones, and the programs end at about the same time.
    """
    costs = _costs(t, n_q, n_k)
    order = sorted(range(len(costs)), key=lambda m: -costs[m])
    together = max(1, _L2 // (2 * n_k * t.dim * element_size))
    lists: list[list[int]] = [[] for _ in range(programs)]
    free = [(0.0, p) for p in range(programs)]
    for first in range(0, batch * heads, together):
        for m in order:
            for head in range(first, min(first + together, batch * heads)):
                at, p = free[0]
                lists[p].append(head * len(costs) + m)
                heapq.heapreplace(free, (at + costs[m], p))
    rounds = max(len(tiles) for tiles in lists)
    table = [len(tiles) for tiles in lists]
    for i in range(rounds):
        table += [tiles[i] if i < len(tiles) else 0 for tiles in lists]
    return table


def _table(
    t: Tiling, sizes: tuple[int, int, int, int], element_size: int, programs: int, device: torch.device
) -> Tensor | None:
    """The schedule on the device, to stay: graphs may hold it. None where there are too many, or where it isn't there
    and a graph is being captured, which can't wait for it.

    It is made in a thread of its own, outside of the memory pools that the caller may be within: torch.compile's CUDA
    graphs would take the memory back.
    """
    key = (t.keys, t.tile_rows, t.dim, t.left, t.right, sizes, element_size, programs, device)
    found = _TABLES.get(key)
    if found is not None:
        return found
    on_gpu = runtime.MODE is runtime.Mode.GPU
    if len(_TABLES) >= _MANY or (on_gpu and torch.cuda.is_current_stream_capturing()):
        return None

    def make() -> Tensor:
        tiles = schedule(t, *sizes, element_size, programs)
        table = torch.tensor(tiles, dtype=torch.int32, device=device)
        if on_gpu:
            torch.cuda.current_stream(device).synchronize()
        return table

    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        found = _TABLES[key] = thread.submit(make).result()
    return found


@functools.lru_cache(maxsize=4096)
def _prepared(
    t: Tiling, sizes: tuple[int, int, int, int], most: int, dtype: torch.dtype, has_lse: bool, has_sinks: bool
) -> tuple[Tiling, int, launching.KernelLauncher]:
    """The tiling that it is for so many tiles, how many programs walk over them, and the kernel."""
    batch, heads, n_q, _n_k = sizes
    tiles = batch * heads * library.cdiv(n_q, t.tile_rows)
    programs = min(most, tiles)
    if t.tabled and (tiles > _TABLED or tiles == programs):
        t = dataclasses.replace(t, tabled=False)
    return t, programs, _plan(t, dtype, has_lse, has_sinks)


@functools.cache
def _plan(t: Tiling, dtype: torch.dtype, has_lse: bool, has_sinks: bool) -> launching.KernelLauncher:
    return launching.KernelLauncher(attend, {"T": t}, num_warps=4, maxnreg=_REGISTERS[t.consumers])


def launch(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, x: Extras, s: Scoring, c: AttentionConfig
) -> None:
    """Launch it: q, k, v, out (B, H, T, D) by strides, lse (B, H, T). What is broadcast along a dimension is copied."""
    if isinstance(q, FunctionalTensor):
        raise launching.Untraceable("descriptors of tensors")
    run(q, k, v, out, lse, x.sinks, _tiling(c, s, q.shape[3], runtime.target(q.device).shared_memory))


def run(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, sinks: Tensor | None, t: Tiling) -> None:
    """The same, compiled for that."""
    sizes = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    most = runtime.target(q.device).multiprocessors
    t, programs, plan = _prepared(t, sizes, most, q.dtype, lse is not None, sinks is not None)
    table = _table(t, sizes, q.element_size(), programs, q.device) if t.tabled else None
    if t.tabled and table is None:
        t = dataclasses.replace(t, tabled=False)
        plan = _plan(t, q.dtype, lse is not None, sinks is not None)
    layout = _layout(t.dim)
    args = (
        describe(_describable(q), (1, 1, t.rows, t.dim), layout),
        describe(_describable(k), (1, 1, t.keys, t.dim), layout),
        describe(_describable(v), (1, 1, t.keys, t.dim), layout),
        describe(out, (1, 1, t.rows, t.dim), layout),
        lse,
        sinks,
        table,
        t,
    )
    device = q.get_device()
    compiled = plan.compiled.get(device)
    if compiled is not None:
        launching._start(compiled, programs, device, args)
        return
    compiled = attend[(programs,)](*args, **plan.options)
    if runtime.MODE is runtime.Mode.GPU:
        plan.compiled[device] = compiled
