"""Attention in plain PyTorch, in two forms that show what the fused kernel is for.

`naive` writes the scores of every query with every key, then reads and writes them again for the mask, the softmax and
the GEMM with v: memory and traffic grow with T squared. `blocked` holds one block of scores at a time, by the online
softmax that the kernel uses. But each of its steps is a PyTorch operation that goes through memory, so it moves as many
bytes, in more launches. Blocking saves memory. Fusing the steps of a block into one kernel, with its scores in
registers, saves time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Window = int | tuple[int | None, int | None]


def sees(p: Tensor, j: Tensor, causal: bool, window: Window | None) -> Tensor:
    """Whether queries at the positions p see the keys j; the two broadcast."""
    left, right = window if isinstance(window, (tuple, list)) else (window, window)
    if isinstance(window, int):  # the key at its own position, and those before (and after) it
        left = right = window - 1
    seen = torch.ones(torch.broadcast_shapes(p.shape, j.shape), dtype=torch.bool, device=p.device)
    if left is not None and left >= 0:
        seen = seen & (j >= p - left)
    if causal:
        seen = seen & (j <= p)
    elif right is not None and right >= 0:
        seen = seen & (j <= p + right)
    return seen


def positions(n_q: int, n_k: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The positions of queries, as a column, and of keys: the last query stands at the last key."""
    return torch.arange(n_q, device=device)[:, None] + (n_k - n_q), torch.arange(n_k, device=device)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    layout: str = "bhtd",
) -> Tensor:
    """The formula in q's dtype; float64 inputs give the truth. It is `naive`, head by head if all would not fit."""
    options = {"causal": causal, "scale": scale, "window": window, "softcap": softcap, "layout": layout}
    return _in_heads(naive, 1 << 28, q, k, v, mask, alibi_slopes, sinks, options)


def _in_heads(
    form: Callable[..., Any],
    most: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    options: dict[str, Any],
) -> Tensor:
    """`form` of all heads; with more than `most` scores, one head after another, computed again in the backward.

    If one head has more, some queries after another: with all keys if positions don't matter, or, if only causality
    limits them, with the keys up to the position of the last query.
    """
    t, h = options["layout"].index("t"), options["layout"].index("h")
    if q.is_meta or q.shape[0] * q.shape[h] * q.shape[t] * k.shape[t] <= most:
        return form(q, k, v, mask=mask, alibi_slopes=alibi_slopes, sinks=sinks, **options)

    def one(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, slope: Tensor | None, sink: Tensor | None) -> Tensor:
        return form(q, k, v, mask=mask, alibi_slopes=slope, sinks=sink, **options)

    n_q, n_k = q.shape[t], k.shape[t]
    alike = options.get("window") is None and alibi_slopes is None and mask is None and n_k >= n_q
    rows = max(1, most // (q.shape[0] * n_k)) if alike else n_q

    def some(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor | None) -> Tensor:
        parts = []
        for i in range(0, n_q, rows):
            of_rows = q.narrow(t, i, min(rows, n_q - i))
            keys = n_k - n_q + i + of_rows.shape[t] if options.get("causal") else n_k
            parts.append(
                checkpoint(one, of_rows, k.narrow(t, 0, keys), v.narrow(t, 0, keys), *rest, use_reentrant=False)
            )
        return torch.cat(parts, t)

    group = q.shape[h] // k.shape[h]
    heads = []
    for i in range(q.shape[h]):
        of_head = (x.narrow(h, j, 1) for x, j in ((q, i), (k, i // group), (v, i // group)))
        seen = mask if mask is None or mask.dim() < 3 or mask.shape[-3] == 1 else mask.narrow(-3, i, 1)
        numbers = (None if x is None else x[..., i : i + 1] for x in (alibi_slopes, sinks))
        heads.append(some(*of_head, seen, *numbers))
    return torch.cat(heads, h)


def naive(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    layout: str = "bhtd",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """All scores at once: (B, H, Tq, Tk) in memory, several times over."""
    if layout == "bthd":
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    group = q.shape[1] // k.shape[1] if k.shape[1] else 1
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    n_q, n_k = q.shape[2], k.shape[2]

    sums = torch.promote_types(q.dtype, torch.float32)
    p, j = positions(n_q, n_k, q.device)
    scores = (q @ k.mT).to(sums) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        scores = scores - alibi_slopes[..., None, None].to(sums) * (p - j).abs()
    if mask is not None and mask.dtype != torch.bool:
        scores = scores + mask
        mask = None
    if causal or window is not None:
        seen = sees(p, j, causal, window)
        mask = seen if mask is None else seen & mask
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)

    if sinks is not None:  # one more score, whose value is zero
        sink = sinks[:, None, None].to(sums).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sink), dim=-1)
    # A finite number stands for the maximum of a row that sees nothing: exp(-inf) is 0, exp(-inf + inf) is not. Its
    # output is zeros, and so is its gradient.
    nothing = scores.new_full((*scores.shape[:3], 1), torch.finfo(sums).min)
    top = torch.cat((scores.detach(), nothing), -1).amax(-1, keepdim=True)
    exp = torch.exp(scores - top)
    total = exp.sum(-1, keepdim=True)
    empty = total == 0
    total = total.masked_fill(empty, 1)
    out = (exp[..., :n_k] / total).to(v.dtype) @ v
    lse = (torch.log(total) + top).masked_fill(empty, -math.inf)[..., 0]
    out = out.transpose(1, 2) if layout == "bthd" else out
    return (out, lse) if return_lse else out


def blocked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: Window | None = None,
    block_m: int = 256,
    block_n: int = 256,
) -> Tensor:
    """The same with one block of scores at a time: the kernel's algorithm, one PyTorch operation a line.

    For a block of queries, m is the largest score so far, denom the sum of exp(s - m), acc the sum of exp(s - m) v. A
    block of keys that raises m scales denom and acc down by exp(m_before - m). At the end acc / denom is the average of
    v by the softmax weights.
    """
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    n_q, n_k = q.shape[2], k.shape[2]
    sums = torch.promote_types(q.dtype, torch.float32)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    p, keys = positions(n_q, n_k, q.device)

    blocks = []
    for i in range(0, n_q, block_m):
        q_block = q[:, :, i : i + block_m]
        rows = q_block.shape[2]
        p_last = i + rows - 1 + n_k - n_q
        m = q.new_full((*q.shape[:2], rows, 1), -math.inf, dtype=sums)
        denom = torch.zeros_like(m)
        acc = q.new_zeros((*q.shape[:2], rows, v.shape[-1]), dtype=sums)
        for j in range(0, min(n_k, p_last + 1) if causal else n_k, block_n):
            k_block, v_block = k[:, :, j : j + block_n], v[:, :, j : j + block_n]
            s = (q_block @ k_block.mT).to(sums) * scale
            if causal or window is not None:
                seen = sees(p[i : i + block_m], keys[j : j + block_n], causal, window)
                s = s.masked_fill(~seen, -math.inf)

            m_new = torch.maximum(m, s.amax(-1, keepdim=True))
            m_off = m_new.masked_fill(m_new == -math.inf, 0)  # no key was seen yet
            alpha = torch.exp(m - m_off)
            weights = torch.exp(s - m_off)
            denom = denom * alpha + weights.sum(-1, keepdim=True)
            acc = acc * alpha + (weights.to(v.dtype) @ v_block).to(sums)
            m = m_new
        blocks.append((acc / torch.where(denom == 0, 1, denom)).to(q.dtype))
    return torch.cat(blocks, dim=2) if blocks else q.new_zeros((*q.shape[:3], v.shape[-1]))


def eager(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    layout: str = "bhtd",
) -> Tensor:
    """As Hugging Face's models write it: scores in q's dtype, their mask added, the softmax in float32 and rounded.

    With more than 2^31 scores, one head after another.
    """
    options = {"causal": causal, "scale": scale, "window": window, "softcap": softcap, "layout": layout}
    return _in_heads(_eager, 1 << 31, q, k, v, mask, alibi_slopes, sinks, options)


def _eager(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    layout: str = "bhtd",
) -> Tensor:
    if layout == "bthd":
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    group = q.shape[1] // k.shape[1] if k.shape[1] else 1
    if group > 1:
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    n_k = k.shape[2]
    p, j = positions(q.shape[2], n_k, q.device)

    scores = torch.matmul(q, k.transpose(2, 3)) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if alibi_slopes is not None:
        scores = scores - alibi_slopes[..., None, None].to(q.dtype) * (p - j).abs().to(q.dtype)
    seen = sees(p, j, causal, window) if causal or window is not None else None
    if mask is not None and mask.dtype == torch.bool:
        seen = mask if seen is None else seen & mask
    elif mask is not None:
        scores = scores + mask.to(q.dtype)
    if seen is not None:
        scores = scores.masked_fill(~seen, torch.finfo(q.dtype).min)
    if sinks is not None:
        sink = sinks[:, None, None].to(q.dtype).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sink), dim=-1)
        scores = scores - scores.amax(dim=-1, keepdim=True)
    weights = torch.softmax(scores, dim=-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
    weights = weights[..., :n_k]
    if seen is not None:  # else a row that sees nothing would be the average of v
        weights = weights.masked_fill(~seen.any(-1, keepdim=True), 0)
    out = torch.matmul(weights, v)
    return out.transpose(1, 2) if layout == "bthd" else out


# Packed sequences: a block-diagonal mask; the fused kernel visits its blocks alone


def packed(starts_q: Tensor, starts_k: Tensor, n_q: int, n_k: int, causal: bool, window: Window | None) -> Tensor:
    """(n_q, n_k): which keys each query sees, computed on the device."""

    def places(starts: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """The sequence of each token, and its position from the end, where last query and last key are alike."""
        tokens = torch.arange(n, device=starts.device)
        sequence = torch.searchsorted(starts[1:].contiguous(), tokens, right=True)
        return sequence, tokens - starts[1:][sequence.clamp(max=starts.shape[0] - 2)]

    sequence_q, p = places(starts_q, n_q)
    sequence_k, j = places(starts_k, n_k)
    return (sequence_q[:, None] == sequence_k) & sees(p[:, None], j, causal, window)


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    alibi_slopes: None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The formula for packed sequences (T, H, D), each of which attends to itself alone; in q's dtype."""
    options = {"scale": scale, "softcap": softcap, "layout": "bhtd"}
    return _varlen(naive, 1 << 28, q, k, v, cu_seqlens_q, cu_seqlens_k, causal, window, sinks, options)


def eager_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    alibi_slopes: None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """As in models that have no packed sequences: a block-diagonal mask."""
    options = {"scale": scale, "softcap": softcap, "layout": "bhtd"}
    return _varlen(_eager, 1 << 31, q, k, v, cu_seqlens_q, cu_seqlens_k, causal, window, sinks, options)


def _varlen(
    form: Callable[..., Any],
    most: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts_q: Tensor,
    starts_k: Tensor | None,
    causal: bool,
    window: Window | None,
    sinks: Tensor | None,
    options: dict[str, Any],
) -> Tensor:
    starts_k = starts_q if starts_k is None else starts_k
    seen = packed(starts_q, starts_k, q.shape[0], k.shape[0], causal, window)
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    return _in_heads(form, most, q, k, v, seen, None, sinks, options)[0].transpose(0, 1)
