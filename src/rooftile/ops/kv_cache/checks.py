"""What the ops that write into a cache accept."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile import library
from rooftile.ops.rope import STYLES

QUANTIZED = (torch.float8_e4m3fn, torch.int8)


def _shape(layout: str, first: object, tokens: object, heads: object, dim: object) -> str:
    order = (first, tokens, heads, dim) if layout == "bthd" else (first, heads, tokens, dim)
    return f"({', '.join(str(n) for n in order)})"


def _check_new(op: str, k: Tensor, v: Tensor, layout: str) -> tuple[int, int, int]:
    """Batch, tokens and heads of the new keys and values."""
    library.check_layout(op, layout)
    library.check_floating(op, k=k, v=v)
    if k.dim() != 4:
        raise ValueError(f"{op}: k has shape {tuple(k.shape)}, expected 4 dimensions, {layout}")
    if v.dim() != 4 or v.shape[:3] != k.shape[:3]:
        expected = f"({', '.join(str(n) for n in k.shape[:3])}, value_dim)"
        raise ValueError(f"{op}: v has shape {tuple(v.shape)}, expected {expected} to match k")
    if v.dtype != k.dtype:
        raise TypeError(f"{op}: v has dtype {v.dtype}, expected {k.dtype} to match k")
    return k.shape[0], k.shape[layout.index("t")], k.shape[layout.index("h")]


def check_indices(op: str, batch: int, lengths: Tensor, page_table: Tensor | None, counts: Tensor | None) -> None:
    for name, x in (("lengths", lengths), ("counts", counts), ("page_table", page_table)):
        if x is not None and x.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{op}: {name} has dtype {x.dtype}, expected int32 or int64")
    for name, x in (("lengths", lengths), ("counts", counts)):
        if x is not None and tuple(x.shape) != (batch,):
            raise ValueError(f"{op}: {name} has shape {tuple(x.shape)}, expected ({batch},), one for each sequence")
    if page_table is not None and (page_table.dim() != 2 or page_table.shape[0] != batch):
        raise ValueError(f"{op}: page_table has shape {tuple(page_table.shape)}, expected ({batch}, max_pages)")


def _check_cache(
    op: str, name: str, x: Tensor, x_name: str, cache: Tensor, batch: int | None, tokens: int | None, layout: str
) -> None:
    """That a cache can hold x: as many sequences and positions (None: pages of any number and size)."""
    if cache.dtype != x.dtype and cache.dtype not in QUANTIZED:
        raise TypeError(
            f"{op}: {name} has dtype {cache.dtype}, expected {x.dtype} to match {x_name}, float8_e4m3fn or int8"
        )
    h, t = layout.index("h"), layout.index("t")
    wrong = cache.dim() != 4 or (cache.shape[h], cache.shape[3]) != (x.shape[h], x.shape[3])
    wrong = wrong or (batch is not None and cache.shape[0] != batch)
    if wrong or (tokens is not None and cache.shape[t] != tokens):
        first, rows = ("pages", "page_size") if batch is None else (batch, "max_seq_len")
        expected = _shape(layout, first, rows if tokens is None else tokens, x.shape[h], x.shape[3])
        raise ValueError(f"{op}: {name} has shape {tuple(cache.shape)}, expected {expected} to match {x_name}")
    _check_writable(op, name, cache)


def _check_writable(op: str, name: str, x: Tensor) -> None:
    if x.dim() == 4 and x.shape[-1] > 1 and x.stride(-1) != 1:
        raise ValueError(f"{op}: {name} has a last stride of {x.stride(-1)}, expected 1 to be written in place")
    if any(stride == 0 and size > 1 for size, stride in zip(x.shape, x.stride(), strict=True)):
        raise ValueError(f"{op}: {name} is expanded (strides {x.stride()}), expected an address for each element")


def _check_scales(op: str, k_cache: Tensor, layout: str, heads: int, scales: dict[str, Tensor | None]) -> None:
    for name, scale in scales.items():
        if scale is None:
            continue
        if scale.dtype != torch.float32:
            raise TypeError(f"{op}: {name} has dtype {scale.dtype}, expected float32")
        if k_cache.dtype not in QUANTIZED:
            raise ValueError(f"{op}: {name} is given for a cache of {k_cache.dtype}, expected float8_e4m3fn or int8")
        each = tuple(k_cache.shape[:3])
        if tuple(scale.shape) not in ((), (heads,), each):
            raise ValueError(
                f"{op}: {name} has shape {tuple(scale.shape)}, expected (), ({heads},) or, for each token, {each}"
            )
        if scale.dim() == 3:
            _check_writable(op, name, scale)
    given = [None if scale is None else scale.dim() == 3 for scale in scales.values()]
    if given[0] != given[1]:
        raise ValueError(f"{op}: k_scale and v_scale are of two kinds, expected both for each token, both not, or none")
    if k_cache.dtype == torch.int8 and given[0] is None:
        raise ValueError(f"{op}: the cache is int8 and has no scales, expected k_scale and v_scale")


def check(
    op: str,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    page_table: Tensor | None,
    counts: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    layout: str,
) -> None:
    batch, _, heads = _check_new(op, k, v, layout)
    check_indices(op, batch, lengths, page_table, counts)
    entries = batch if page_table is None else None
    _check_cache(op, "k_cache", k, "k", k_cache, entries, None, layout)
    blocks = k_cache.shape[0]
    _check_cache(op, "v_cache", v, "v", v_cache, blocks, k_cache.shape[layout.index("t")], layout)
    if v_cache.dtype != k_cache.dtype:
        raise TypeError(f"{op}: v_cache has dtype {v_cache.dtype}, expected {k_cache.dtype} to match k_cache")
    page = k_cache.shape[layout.index("t")]
    if page_table is not None and (page < 1 or page & (page - 1)):
        raise ValueError(f"{op}: k_cache has pages of {page} tokens, expected a power of two")
    _check_scales(op, k_cache, layout, heads, {"k_scale": k_scale, "v_scale": v_scale})


def check_rope(op: str, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, style: str, layout: str) -> None:
    library.check_floating(op, q=q, cos=cos, sin=sin)
    if style not in STYLES:
        raise ValueError(f"{op}: style is {style!r}, expected one of {', '.join(STYLES)}")
    t = layout.index("t")
    batch, tokens, head_dim = k.shape[0], k.shape[t], k.shape[3]
    if q.dim() != 4 or (q.shape[0], q.shape[t], q.shape[3]) != (batch, tokens, head_dim):
        expected = _shape(layout, batch, tokens, "q_heads", head_dim)
        raise ValueError(f"{op}: q has shape {tuple(q.shape)}, expected {expected} to match k")
    if q.dtype != k.dtype:
        raise TypeError(f"{op}: q has dtype {q.dtype}, expected {k.dtype} to match k")
    library.check_same(op, "sin", sin, "cos", cos)
    if cos.dim() not in (2, 3) or (cos.dim() == 3 and tuple(cos.shape[:2]) not in ((1, tokens), (batch, tokens))):
        raise ValueError(
            f"{op}: cos has shape {tuple(cos.shape)}, expected (positions, R), or for each token (1, {tokens}, R) or "
            f"({batch}, {tokens}, R)"
        )
    rotary = cos.shape[-1]
    if rotary == 0 or rotary % 2 or rotary > head_dim:
        raise ValueError(
            f"{op}: cos has a rotary dimension of {rotary}, expected an even one from 2 to the head_dim {head_dim}"
        )


def check_values(
    op: str, k: Tensor, k_cache: Tensor, lengths: Tensor, page_table: Tensor | None, counts: Tensor | None, layout: str
) -> None:
    """What can be said of lengths and pages that are on the CPU."""
    if lengths.device.type != "cpu" or (counts is not None and counts.device.type != "cpu"):
        return
    tokens, rows = k.shape[layout.index("t")], k_cache.shape[layout.index("t")]
    capacity = rows if page_table is None else rows * page_table.shape[1]
    new = [tokens] * len(lengths) if counts is None else [int(n) for n in counts]
    table = page_table.tolist() if page_table is not None and page_table.device.type == "cpu" else None
    for b, (length, n) in enumerate(zip(lengths.tolist(), new, strict=True)):
        if n > tokens:
            raise ValueError(f"{op}: counts[{b}] is {n}, expected at most the {tokens} tokens of k")
        if length < 0 or n <= 0:
            continue
        if length + n > capacity:
            raise ValueError(
                f"{op}: lengths[{b}] is {length}, and {n} new tokens go beyond the cache's {capacity} positions"
            )
        if table is not None:
            for i in range(length // rows, (length + n - 1) // rows + 1):
                if not 0 <= table[b][i] < k_cache.shape[0]:
                    raise ValueError(
                        f"{op}: page_table[{b}, {i}] is {table[b][i]}, expected one of the {k_cache.shape[0]} pages"
                    )
