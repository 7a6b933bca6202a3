from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rooftile.reference import attention
from rooftile.reference.attention import Window, sees
from rooftile.reference.decode_attention import dequantized


def attention_paged(*args: Any, **options: Any) -> Tensor:
    """The pages of each sequence put one after another, and the formula with a mask; in q's dtype: float64 is exact."""
    return _padded(attention.attention, *args, **options)


def eager(*args: Any, **options: Any) -> Tensor:
    """As in models that have neither pages nor packed sequences: both padded, and a mask."""
    return _padded(attention.eager, *args, **options)


def seen_keys(n_q: Tensor, lengths: Tensor, rows: int, keys: int, causal: bool, window: Window | None) -> Tensor:
    """(sequences, rows, keys): which keys each query sees; row i of n_q[b] stands at lengths[b] - n_q[b] + i."""
    j = torch.arange(keys, device=lengths.device)
    lengths = lengths.clamp(0, keys)[:, None, None]
    p = torch.arange(rows, device=lengths.device)[:, None] + lengths - n_q[:, None, None]
    return sees(p, j, causal, window) & (j < lengths)


def unpacked(q: Tensor, starts: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Packed rows as (sequences, rows, ...), and where in it, flattened, each packed row is."""
    i = torch.arange(rows, device=q.device)
    at = (starts[:-1, None] + i).clamp(max=max(0, q.shape[0] - 1))
    tokens = torch.arange(q.shape[0], device=q.device)
    sequence = torch.searchsorted(starts[1:].contiguous(), tokens, right=True).clamp(max=starts.shape[0] - 2)
    return q[at], sequence * rows + tokens - starts[sequence]


def _padded(
    form: Callable[..., Tensor],
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    page_table: Tensor,
    lengths: Tensor,
    cu_seqlens_q: Tensor,
    *,
    head_dim_v: int | None = None,
    max_seqlen_q: int | None = None,
    causal: bool = True,
    scale: float | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    alibi_slopes: None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    cache_layout: str = "bthd",
) -> Tensor:
    k = dequantized(k_cache, k_scale, page_table, cache_layout, q.dtype)
    if v_cache is None:
        v = k[..., :head_dim_v]
    else:
        v = dequantized(v_cache, v_scale, page_table, cache_layout, q.dtype)
    rows = q.shape[0] if max_seqlen_q is None else max_seqlen_q
    padded, at = unpacked(q, cu_seqlens_q, rows)
    n_q = cu_seqlens_q[1:] - cu_seqlens_q[:-1]
    seen = seen_keys(n_q, lengths, rows, k.shape[2], causal, window)[:, None]
    # The cache may hold anything beyond a sequence's end.
    v = v.masked_fill(~seen.any(2)[..., None], 0)
    out = form(padded.transpose(1, 2), k, v, mask=seen, scale=scale, softcap=softcap, sinks=sinks)
    return out.transpose(1, 2).flatten(0, 1)[at]
