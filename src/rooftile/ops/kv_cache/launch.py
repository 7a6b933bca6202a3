"""How the kernels that write into a cache are configured and launched."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor

from rooftile import launching, library, runtime
from rooftile.library import axis_strides, unit_last
from rooftile.ops.kv_cache.kernel import append_kernel, rope_kernel
from rooftile.primitives import pdl, quantize


@dataclasses.dataclass(frozen=True, eq=False)  # a key of caches on every call: by identity
class CacheWriteConfig:
    """Tokens that a program writes all heads of, and its warps."""

    tokens: int
    num_warps: int


@functools.cache
def config(elements: int, target: runtime.Target) -> CacheWriteConfig:
    """For the elements of a token, padded, of whatever is the most of q, k and v: 4096 of them a program where a token
    has fewer, 16 a thread."""
    if target is runtime.INTERPRETER:
        return CacheWriteConfig(tokens=16, num_warps=4)
    tokens = max(1, 4096 // elements)
    return CacheWriteConfig(tokens, min(1024 // target.warp_size, max(1, tokens * elements // (16 * target.warp_size))))


@dataclasses.dataclass(frozen=True)
class Cache:
    """Where the new tokens go, of tensors that were checked."""

    k: Tensor
    v: Tensor
    lengths: Tensor
    page_table: Tensor | None
    counts: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    scales: str  # "", "given", "token"
    layout: str

    def tensors(self) -> tuple[Tensor | None, ...]:
        return quantize.writable(self.k), quantize.writable(self.v), self.k_scale, self.v_scale

    def strides(self) -> tuple[int, ...]:
        scales: tuple[int, ...] = (0,) * 6
        if self.k_scale is not None and self.v_scale is not None:
            if self.scales == "token":
                scales = (*axis_strides(self.k_scale, self.layout), *axis_strides(self.v_scale, self.layout))
            else:
                k, v = (scale.stride(0) if scale.dim() else 0 for scale in (self.k_scale, self.v_scale))
                scales = (0, k, 0, 0, v, 0)
        return (*axis_strides(self.k, self.layout), *axis_strides(self.v, self.layout), *scales)

    def indices(self) -> tuple[Tensor | None, ...]:
        table = self.page_table
        return (
            self.lengths.contiguous(),
            None if self.counts is None else self.counts.contiguous(),
            table if table is None or table.stride(1) == 1 or table.shape[1] <= 1 else table.contiguous(),
        )

    def numbers(self) -> tuple[int, int]:
        """Positions that a sequence can have, and pages that there are."""
        positions = int(self.k.shape[self.layout.index("t")])
        if self.page_table is None:
            return positions, 0
        return positions * self.page_table.shape[1], self.k.shape[0]

    def constants(self, heads: int, head_dim: int, value_dim: int) -> tuple[Any, ...]:
        """What of a plan's key is the cache's."""
        page = 0 if self.page_table is None else int(self.k.shape[self.layout.index("t")])
        dtypes = tuple(None if t is None else t.dtype for t in (self.lengths, self.page_table, self.counts))
        return heads, head_dim, value_dim, page, self.counts is not None, self.scales, self.k.dtype, dtypes


def append(k: Tensor, v: Tensor, cache: Cache) -> None:
    if k.numel() + v.numel() == 0:
        return
    k, v = unit_last(k), unit_last(v)
    batch, n_tokens = k.shape[0], k.shape[cache.layout.index("t")]
    heads, head_dim, value_dim = int(k.shape[cache.layout.index("h")]), int(k.shape[3]), int(v.shape[3])
    c = config(_block(heads) * _block(max(head_dim, value_dim)), runtime.target(k.device))
    plan = _append_plan(k.dtype, c, pdl.early(k), *cache.constants(heads, head_dim, value_dim))
    lengths, counts, table = cache.indices()
    strides = (*axis_strides(k, cache.layout), *axis_strides(v, cache.layout), *cache.strides())
    launching.launch(
        plan,
        batch * library.cdiv(n_tokens, c.tokens),
        (k, v, *cache.tensors(), lengths, counts, table),
        (*strides, 0 if table is None else table.stride(0)),
        (n_tokens, *cache.numbers()),
    )


def rotate_and_append(
    q: Tensor, k: Tensor, v: Tensor, q_out: Tensor, cos: Tensor, sin: Tensor, style: str, cache: Cache
) -> None:
    if q.numel() + k.numel() + v.numel() == 0:
        return
    q, k, v, cos, sin = (unit_last(x) for x in (q, k, v, cos, sin))
    h, t = cache.layout.index("h"), cache.layout.index("t")
    batch, n_tokens, q_heads = q.shape[0], q.shape[t], int(q.shape[h])
    heads, head_dim, value_dim, rotary = int(k.shape[h]), int(k.shape[3]), int(v.shape[3]), int(cos.shape[-1])
    most = max(_block(max(heads, q_heads)) * _block(head_dim), _block(heads) * _block(value_dim))
    c = config(most, runtime.target(q.device))
    dtypes = (q.dtype, cos.dtype)
    by_position = cos.dim() == 2
    of_cache = cache.constants(heads, head_dim, value_dim)
    plan = _rope_plan(dtypes, c, pdl.early(q), q_heads, rotary, by_position, style, *of_cache)
    lengths, counts, table = cache.indices()
    tables = [(x.stride(0) if x.dim() == 3 and x.shape[0] > 1 else 0, x.stride(-2)) for x in (cos, sin)]
    strides = [s for x in (q, k, v, q_out) for s in axis_strides(x, cache.layout)]
    launching.launch(
        plan,
        batch * library.cdiv(n_tokens, c.tokens),
        (q, k, v, q_out, *cache.tensors(), cos, sin, lengths, counts, table),
        (*strides, *cache.strides(), *tables[0], *tables[1], 0 if table is None else table.stride(0)),
        (n_tokens, *cache.numbers(), cos.shape[-2]),
    )


def _shared(dtype: torch.dtype, *of_cache: Any) -> dict[str, Any]:
    heads, head_dim, value_dim, page, has_counts, scales, cache_dtype, _ = of_cache
    return {
        "HEADS": heads,
        "D": head_dim,
        "DV": value_dim,
        "PAGE": page,
        "HAS_COUNTS": has_counts,
        "SCALES": scales,
        "FORMAT": "" if cache_dtype == dtype else str(cache_dtype).removeprefix("torch."),
    }


def _block(n: int) -> int:
    return library.power_of_two(max(1, n))


@functools.cache
def _append_plan(dtype: torch.dtype, c: CacheWriteConfig, early: bool, *of_cache: Any) -> launching.KernelLauncher:
    heads, head_dim, value_dim = (_block(n) for n in of_cache[:3])
    blocks = {"BLOCK_T": c.tokens, "BLOCK_H": heads, "BLOCK_D": head_dim, "BLOCK_DV": value_dim}
    constants = _shared(dtype, *of_cache) | blocks | {"EARLY": early}
    return launching.KernelLauncher(append_kernel, constants, num_warps=c.num_warps, **pdl.options(early))


@functools.cache
def _rope_plan(
    dtypes: tuple[torch.dtype, torch.dtype],
    c: CacheWriteConfig,
    early: bool,
    q_heads: int,
    rotary: int,
    by_position: bool,
    style: str,
    *of_cache: Any,
) -> launching.KernelLauncher:
    constants = _shared(dtypes[0], *of_cache) | {
        "Q_HEADS": q_heads,
        "R": rotary,
        "BY_POSITION": by_position,
        "ANGLE_STEP": 2 if style == "interleaved" else 1,
        "PAIRS_IN": style != "half",
        "PAIRS_OUT": style == "interleaved",
        "BLOCK_T": c.tokens,
        "BLOCK_H": _block(of_cache[0]),
        "BLOCK_DV": _block(of_cache[2]),
        "BLOCK_Q": _block(q_heads),
        "BLOCK_R": _block(rotary),
        "BLOCK_REST": _block(of_cache[1] - rotary),
        "EARLY": early,
    }
    return launching.KernelLauncher(rope_kernel, constants, num_warps=c.num_warps, **pdl.options(early))
