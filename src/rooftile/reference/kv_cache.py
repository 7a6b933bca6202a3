"""Writes of new keys and values into a cache, with RoPE of q and k."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rooftile.reference import quantize, rope

Nearest = Callable[[Tensor, str], Tensor]


def append_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    starts: Tensor,
    *,
    page_table: Tensor | None = None,
    counts: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    layout: str = "bhtd",
    cache_layout: str = "bthd",
    dtype: str | None = None,
    nearest: Nearest = quantize.nearest,
) -> tuple[Tensor, ...]:
    """The resulting caches and scales, `(0,)` without scales; nothing is written in place.

    `dtype` names that of a quantized cache, which may be given in float64 here.
    """
    k, v = _token_major(k, layout), _token_major(v, layout)
    places = _places(k, k_cache, starts, page_table, counts, cache_layout)
    written: list[Tensor] = []
    scales: list[Tensor] = []
    for x, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        if dtype is not None:
            x, scale = _quantized(x, scale, dtype, places, cache_layout, nearest)
        written.append(_put(x, cache, places, cache_layout))
        scales.append(k.new_empty(0, dtype=torch.float32) if scale is None else scale)
    return *written, *scales


def rope_and_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    starts: Tensor,
    *,
    counts: Tensor | None = None,
    rotary_dim: int | None = None,
    style: str = "half",
    layout: str = "bhtd",
    cache_layout: str = "bthd",
    turn: Callable[..., tuple[Tensor, Tensor]] = rope.rope,
    **options: Any,
) -> tuple[Tensor, ...]:
    """`append_kv`'s results, and q rotated: zeros for absent tokens."""
    t = layout.index("t")
    tokens = torch.arange(k.shape[t], device=k.device)
    if cos.dim() == 2:  # a table: the row of each token's position, NaN where it has none
        position = starts[:, None] + tokens
        known = (position >= 0) & (position < cos.shape[0])
        cos, sin = (x[position.clamp(0, cos.shape[0] - 1)].where(known[..., None], torch.nan) for x in (cos, sin))
    q, k = turn(q, k, cos, sin, style=style, layout=layout)
    there = (starts[:, None] >= 0) & (tokens < (k.shape[t] if counts is None else counts[:, None]))
    q = q.where((there[:, None, :] if layout == "bhtd" else there[:, :, None])[..., None], 0.0)
    return (
        *append_kv(k, v, k_cache, v_cache, starts, counts=counts, layout=layout, cache_layout=cache_layout, **options),
        q,
    )


def append_kv_eager(*args: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """As plain PyTorch does it: quantized in float32, and assigned by index."""
    return append_kv(*args, nearest=_cast, **options)


def rope_and_cache_eager(*args: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """As Hugging Face does it: q and k rotated in their dtype, then assigned by index."""
    return rope_and_cache(*args, turn=rope.eager, nearest=_cast, **options)


def _cast(v: Tensor, dtype: str) -> Tensor:
    v = v.clamp(-quantize.LARGEST[dtype], quantize.LARGEST[dtype])
    return (v.round() if dtype == "int8" else v).to(getattr(torch, dtype))


def _token_major(x: Tensor, layout: str) -> Tensor:
    return x.transpose(1, 2) if layout == "bhtd" else x


def _places(
    k: Tensor, cache: Tensor, starts: Tensor, page_table: Tensor | None, counts: Tensor | None, layout: str
) -> Tensor:
    """The row of the cache, as (blocks * rows, ...), that each token goes to: (B, T); one past the last for none."""
    blocks, rows = cache.shape[0], cache.shape[layout.index("t")]
    tokens = torch.arange(k.shape[1], device=k.device)
    position = starts[:, None].long() + tokens
    there = (starts[:, None] >= 0) & (tokens < (k.shape[1] if counts is None else counts[:, None]))
    if page_table is None:
        block = torch.arange(k.shape[0], device=k.device)[:, None].expand_as(position)
        there = there & (position < rows)
    else:
        there = there & (position < rows * page_table.shape[1])
        index = (position // rows).clamp(0, max(0, page_table.shape[1] - 1))
        block = page_table.long().gather(1, index)
        there = there & (block >= 0) & (block < blocks)
    return torch.where(there, block * rows + position % max(1, rows), blocks * rows)


def _put(x: Tensor, cache: Tensor, places: Tensor, layout: str) -> Tensor:
    """The cache with the tokens x, (B, T, H, D), at their places."""
    by_token = _token_major(cache, layout)
    flat = by_token.reshape(-1, *by_token.shape[2:])
    bits = {1: torch.uint8}.get(flat.element_size(), flat.dtype)  # PyTorch can't index float8 everywhere
    longer = torch.cat((flat.view(bits), flat.new_zeros((1, *flat.shape[1:])).view(bits)))
    new = x.to(cache.dtype).reshape(-1, *flat.shape[1:]).view(bits)
    longer = longer.index_put((places.reshape(-1),), new)[:-1].view(cache.dtype)
    return _token_major(longer.reshape(by_token.shape), layout)


def _quantized(
    x: Tensor, scale: Tensor | None, dtype: str, places: Tensor, layout: str, nearest: Nearest
) -> tuple[Tensor, Tensor | None]:
    """x (B, T, H, D) in the cache's dtype, and the resulting scales."""
    wide = x if x.dtype == torch.float64 else x.float()
    if scale is None or scale.dim() < 3:
        by = 1.0 if scale is None else scale
        return nearest(wide / (by[..., None] if isinstance(by, Tensor) and by.dim() else by), dtype), scale
    own = (wide.abs().amax(-1) / quantize.LARGEST[dtype]).clamp(min=2.0**-126)
    return nearest(wide / own[..., None], dtype), _put(own[..., None], scale[..., None], places, layout)[..., 0]
