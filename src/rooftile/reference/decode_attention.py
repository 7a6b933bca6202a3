from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor


def _sequences(cache: Tensor, page_table: Tensor | None, layout: str) -> Tensor:
    """The cache (or scales by token) as `(B, Hkv, S, ...)`, pages put one after another."""
    if layout == "bthd":
        cache = cache.transpose(1, 2)
    if page_table is None:
        return cache
    pages = cache[page_table.long().clamp(0, cache.shape[0] - 1)]  # (B, pages, Hkv, page_size, ...)
    return pages.transpose(1, 2).flatten(2, 3)


def dequantized(
    cache: Tensor, scale: Tensor | None, page_table: Tensor | None, layout: str, dtype: torch.dtype
) -> Tensor:
    x = _sequences(cache.to(dtype), page_table, layout)
    if scale is None:
        return x
    if scale.dim() < 2:
        return x * scale.to(dtype).reshape(-1, 1, 1)
    return x * _sequences(scale.to(dtype), page_table, layout)[..., None]


def _values(
    k: Tensor, head_dim_v: int | None, v_cache: Tensor | None, v_scale: Tensor | None, page_table: Tensor | None,
    layout: str,
) -> Tensor:  # fmt: skip
    """The values; without a v_cache the first elements of the dequantized keys."""
    if v_cache is None:
        return k[..., :head_dim_v]
    return dequantized(v_cache, v_scale, page_table, layout, k.dtype)


def _seen(n_new: int, n_keys: int, length: Tensor, window: int | None, causal: bool) -> tuple[Tensor, Tensor]:
    """Which keys (columns) each new token sees, and their distance."""
    j = torch.arange(n_keys, device=length.device)
    p = (length.clamp(0, n_keys) - n_new + torch.arange(n_new, device=length.device))[:, None]
    seen = j <= p if causal else (j < length).expand(n_new, n_keys)
    if window is not None:
        seen = seen & (j > p - window)
    return seen, (p - j).abs()


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    lengths: Tensor,
    *,
    head_dim_v: int | None = None,
    page_table: Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    causal: bool = True,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    mask: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    layout: str = "bhtd",
    cache_layout: str = "bthd",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Sequence by sequence, the softmax over all keys at once; in the dtype of q: give it float64 for the truth."""
    k_all = dequantized(k_cache, k_scale, page_table, cache_layout, q.dtype)
    v_all = _values(k_all, head_dim_v, v_cache, v_scale, page_table, cache_layout)
    q = q if layout == "bthd" else q.transpose(1, 2)
    (_, n_new, heads, head_dim), (_, kv_heads, n_keys, _) = q.shape, k_all.shape
    outs, lses = [torch.zeros(0, n_new, heads, v_all.shape[3])], [torch.zeros(0, heads, n_new)]
    masks = [None] * len(q) if mask is None else mask
    slopes = [None] * len(q) if alibi_slopes is None else alibi_slopes.expand(len(q), heads)
    for x, k, v, length, shown, slope in zip(q, k_all, v_all, lengths, masks, slopes, strict=True):
        x = x.transpose(0, 1).unflatten(0, (kv_heads, -1))  # (Hkv, group, T, D)
        s = (x @ k[:, None].transpose(2, 3)) * (head_dim**-0.5 if scale is None else scale)
        if softcap:
            s = softcap * torch.tanh(s / softcap)
        seen, distance = _seen(n_new, n_keys, length, window, causal)
        if shown is not None:
            seen = seen & shown
        if slope is not None:
            s = s - slope.to(s.dtype).view(kv_heads, -1, 1, 1) * distance
        s = s.masked_fill(~seen, float("-inf"))
        lse = torch.logsumexp(s, dim=-1)
        if sinks is not None:
            lse = torch.logaddexp(lse, sinks.to(s.dtype).view(kv_heads, -1, 1))
        p = torch.exp(s - lse.masked_fill(lse == float("-inf"), 0)[..., None])
        # The cache may hold anything beyond the sequence's end.
        v = v.masked_fill(~seen.any(dim=0)[:, None], 0)
        outs.append((p @ v[:, None]).flatten(0, 1).transpose(0, 1)[None])
        lses.append(lse.flatten(0, 1)[None])
    out, lse = (torch.cat(parts[1:]) if len(parts) > 1 else parts[0].to(q) for parts in (outs, lses))
    out = out if layout == "bthd" else out.transpose(1, 2)
    return (out, lse) if return_lse else out


EXPANDED = 1 << 32  # elements of keys that `eager` repeats for their query heads at a time


def eager(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    lengths: Tensor,
    *,
    head_dim_v: int | None = None,
    page_table: Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    causal: bool = True,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    mask: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    layout: str = "bhtd",
    cache_layout: str = "bthd",
) -> Tensor:
    """As Hugging Face models write it: KV heads repeated, a mask added, the softmax in float32 and rounded.

    With more than `EXPANDED` elements of repeated keys, some sequences after another.
    """
    k = dequantized(k_cache, k_scale, page_table, cache_layout, q.dtype)
    v = _values(k, head_dim_v, v_cache, v_scale, page_table, cache_layout)
    q = q.transpose(1, 2) if layout == "bthd" else q
    slopes = None if alibi_slopes is None else alibi_slopes.expand(len(q), q.shape[1])
    n = max(1, EXPANDED // max(1, q.shape[1] * k.shape[2] * k.shape[3]))
    attend: Any = functools.partial(_eager, sinks=sinks, scale=scale, window=window, softcap=softcap, causal=causal)
    outs = []
    for i in range(0, max(1, len(q)), n):
        some: list[Any] = [None if t is None else t[i : i + n] for t in (q, k, v, lengths, slopes, mask)]
        outs.append(attend(*some))
    out = outs[0] if len(outs) == 1 else torch.cat(outs)
    return out.transpose(1, 2) if layout == "bthd" else out


def _eager(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    alibi_slopes: Tensor | None,
    mask: Tensor | None,
    sinks: Tensor | None,
    scale: float | None,
    window: int | None,
    softcap: float | None,
    causal: bool,
) -> Tensor:
    """q, k and v are (B, H, T, D), and alibi_slopes (B, H)."""
    n_new, n_keys = q.shape[2], k.shape[2]
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    s = (q @ k.transpose(2, 3)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    j = torch.arange(n_keys, device=q.device)
    p = (lengths.clamp(0, n_keys)[:, None] - n_new + torch.arange(n_new, device=q.device))[:, None, :, None]
    if alibi_slopes is not None:
        s = s - alibi_slopes.to(s.dtype)[..., None, None] * (p - j).abs()
    seen = (j <= p) if causal else (j < lengths[:, None, None, None])
    if window is not None:
        seen = seen & (j > p - window)
    if mask is not None:
        seen = seen & mask[:, None, None, :]
    s = s.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        s = torch.cat((s, sinks.to(s.dtype)[:, None, None].expand(*s.shape[:3], 1)), -1)
    weights = torch.softmax(s, dim=-1, dtype=torch.float32).to(q.dtype)[..., :n_keys]
    return weights.nan_to_num(0.0) @ v  # a row of nothing but -inf is NaN
