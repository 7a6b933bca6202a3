"""Ops that write new keys and values into a KV cache, in one launch.

    position = starts[b] + t                                           of new token t of sequence b
    cache[b, position] = x[b, t]                                        contiguous
    cache[page_table[b, position // page_size], position % page_size] = x[b, t]     paged

`rope_and_cache` also rotates q and k by their positions (`rooftile.ops.rope` has the formula), so that k needs no round
trip through memory. Bytes: k and v are read and written once, q is read and written once, and of cos and sin one of
each pair's two equal entries is read. The rest of the cache is not touched.

A cache has the dtype of k, or is float8_e4m3fn or int8: `stored = round(x / scale)`. The scales are given, one for the
tensor or for each head; or the kernel writes one for each token and head, `max(|x|) / largest`.

Nothing is written outside the cache: the kernel leaves out a token whose position or page leads out of it. Starts and
pages on the CPU are checked before the launch.

`starts` counts the tokens before the new ones; `lengths`, in the ops that read a cache, counts the new ones too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from rooftile import library
from rooftile.ops.kv_cache.kernel import prepare_append, prepare_rope
from rooftile.ops.rope import Style, check_rotary_dim, check_style, dense
from rooftile.primitives.paging import Cache, check_entries, check_entry_values, table_of

Layout = Literal["bthd", "bhtd"]
QUANTIZED = (torch.float8_e4m3fn, torch.int8)

# Checks


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


def check_indices(op: str, batch: int, starts: Tensor, page_table: Tensor | None, counts: Tensor | None) -> None:
    if page_table is not None and page_table.dim() == 1:
        check_entries(op, page_table, batch)
        page_table = None
    for name, x in (("starts", starts), ("counts", counts), ("page_table", page_table)):
        if x is not None and x.dtype != torch.int32:
            raise TypeError(f"{op}: {name} has dtype {x.dtype}, expected int32")
    for name, x in (("starts", starts), ("counts", counts)):
        if x is not None and tuple(x.shape) != (batch,):
            raise ValueError(f"{op}: {name} has shape {tuple(x.shape)}, expected ({batch},), one for each sequence")
    if page_table is not None and (page_table.dim() != 2 or page_table.shape[0] != batch):
        raise ValueError(f"{op}: page_table has shape {tuple(page_table.shape)}, expected ({batch}, max_pages)")


def _check_cache(
    op: str, name: str, x: Tensor, heads: int, cache: Tensor, batch: int | None, tokens: int | None, layout: str
) -> None:
    """Check a cache for x, called `name[0]`: its sequences and positions (None for any, of pages)."""
    x_name = name[0]
    if cache.dtype != x.dtype and cache.dtype not in QUANTIZED:
        raise TypeError(
            f"{op}: {name} has dtype {cache.dtype}, expected {x.dtype} to match {x_name}, float8_e4m3fn or int8"
        )
    h, t = layout.index("h"), layout.index("t")
    wrong = cache.dim() != 4 or (cache.shape[h], cache.shape[3]) != (heads, x.shape[3])
    wrong = wrong or (batch is not None and cache.shape[0] != batch)
    if wrong or (tokens is not None and cache.shape[t] != tokens):
        first, rows = ("pages", "page_size") if batch is None else (batch, "max_seq_len")
        expected = _shape(layout, first, rows if tokens is None else tokens, heads, x.shape[3])
        raise ValueError(f"{op}: {name} has shape {tuple(cache.shape)}, expected {expected} to match {x_name}")
    _check_writable(op, name, cache)


def _check_writable(op: str, name: str, x: Tensor) -> None:
    if x.dim() == 4 and x.shape[-1] > 1 and x.stride(-1) != 1:
        raise ValueError(f"{op}: {name} has a last stride of {x.stride(-1)}, expected 1 to be written in place")
    if any(stride == 0 and size > 1 for size, stride in zip(x.shape, x.stride(), strict=True)):
        raise ValueError(f"{op}: {name} is expanded (strides {x.stride()}), expected an address for each element")


def _check_scales(op: str, k_cache: Tensor, heads: int, scales: dict[str, Tensor | None]) -> None:
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
        raise ValueError(f"{op}: k_scale and v_scale are of two kinds, expected both by token, neither, or none given")
    if k_cache.dtype == torch.int8 and given[0] is None:
        raise ValueError(f"{op}: the cache is int8 and has no scales, expected k_scale and v_scale")


def check(op: str, k: Tensor, v: Tensor, layout: str, cache: Cache) -> None:
    """Raise for shapes, dtypes and strides that do not fit."""
    library.check_layout(op, cache.layout, "cache_layout")
    batch, _, heads = _check_new(op, k, v, layout)
    check_indices(op, batch, cache.starts, cache.page_table, cache.counts)
    entries, t = batch if cache.page_table is None else None, cache.layout.index("t")
    _check_cache(op, "k_cache", k, heads, cache.k, entries, None, cache.layout)
    page = cache.k.shape[t]
    _check_cache(op, "v_cache", v, heads, cache.v, cache.k.shape[0], page, cache.layout)
    if cache.v.dtype != cache.k.dtype:
        raise TypeError(f"{op}: v_cache has dtype {cache.v.dtype}, expected {cache.k.dtype} to match k_cache")
    if cache.paged and (page < 1 or page & (page - 1)):
        raise ValueError(f"{op}: k_cache has pages of {page} tokens, expected a power of two")
    _check_scales(op, cache.k, heads, {"k_scale": cache.k_scale, "v_scale": cache.v_scale})


def check_rope(
    op: str, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, style: str, rotary_dim: int | None, layout: str
) -> None:
    check_rotary_dim(op, q, cos, rotary_dim)
    library.check_floating(op, q=q, cos=cos, sin=sin)
    check_style(op, style)
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


def check_values(op: str, tokens: int, cache: Cache) -> None:
    """Check starts, and pages or entries, that are on the CPU. On a GPU the kernel leaves out what does not fit."""
    starts, counts, page_table = cache.starts, cache.counts, cache.page_table
    if starts.device.type != "cpu" or (counts is not None and counts.device.type != "cpu"):
        return
    rows = cache.k.shape[cache.layout.index("t")]
    capacity, _ = cache.numbers()
    new = [tokens] * len(starts) if counts is None else [int(n) for n in counts]
    table = page_table.tolist() if page_table is not None and page_table.device.type == "cpu" else None
    if table is not None and not cache.paged:
        check_entry_values(op, table, cache.k.shape[0])
        table = None
    for b, (first, n) in enumerate(zip(starts.tolist(), new, strict=True)):
        if n > tokens:
            raise ValueError(f"{op}: counts[{b}] is {n}, expected at most the {tokens} tokens of k")
        if first < 0 or n <= 0:
            continue
        if first + n > capacity:
            raise ValueError(
                f"{op}: starts[{b}] is {first}, and {n} new tokens go beyond the cache's {capacity} positions"
            )
        if table is not None:
            for i in range(first // rows, (first + n - 1) // rows + 1):
                if not 0 <= table[b][i] < cache.k.shape[0]:
                    raise ValueError(
                        f"{op}: page_table[{b}, {i}] is {table[b][i]}, expected one of the {cache.k.shape[0]} pages"
                    )


# The ops

# The arguments that describe a cache. A scale by token is written, a given one is read: two arguments each.
# A page table with one dimension is `cache_batch_idx`.
CACHE_SCHEMA = (
    "Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor starts, Tensor? page_table, Tensor? counts, Tensor? k_scale, "
    "Tensor? v_scale, Tensor(c!)? k_token_scale, Tensor(d!)? v_token_scale, str layout, str cache_layout"
)


def cache_of(
    op: str, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, starts: Tensor, page_table: Tensor | None,
    counts: Tensor | None, k_scale: Tensor | None, v_scale: Tensor | None, k_token_scale: Tensor | None,
    v_token_scale: Tensor | None, layout: str, cache_layout: str,
) -> Cache:  # fmt: skip
    """The cache that an op was given by the arguments of `CACHE_SCHEMA`, after all checks."""
    k_scale, v_scale = k_token_scale if k_scale is None else k_scale, v_token_scale if v_scale is None else v_scale
    scales = "" if k_scale is None else "token" if k_scale.dim() == 3 else "given"
    cache = Cache(k_cache, v_cache, starts, page_table, counts, k_scale, v_scale, scales, cache_layout)
    check(op, k, v, layout, cache)
    return cache


def check_memory(op: str, k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None) -> None:
    """Raise if two tensors that are written are the same memory."""
    for x, y, name in ((k_cache, v_cache, "cache"), (k_scale, v_scale, "scale")):
        if x is not None and y is not None and x.data_ptr() == y.data_ptr() != 0:  # 0: meta and empty tensors
            raise ValueError(f"{op}: v_{name} is the same memory as k_{name}, expected memory of its own")


def _prepare_append(k: Tensor, v: Tensor, *of_cache: Any) -> Callable[..., None]:
    cache = cache_of("append_kv", k, v, *of_cache)
    layout, by_token = of_cache[-2], cache.scales == "token"
    check_values("append_kv", k.shape[layout.index("t")], cache)
    start = prepare_append(k, v, layout, cache)

    def run(
        k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, starts: Tensor, page_table: Tensor | None,
        counts: Tensor | None, k_scale: Tensor | None, v_scale: Tensor | None, k_token: Tensor | None,
        v_token: Tensor | None, *_: object,
    ) -> None:  # fmt: skip
        if by_token:
            k_scale, v_scale = k_token, v_token
        if by_token or k_cache.data_ptr() == v_cache.data_ptr():
            check_memory("append_kv", k_cache, v_cache, k_token, v_token)
        start(k, v, k_cache, v_cache, k_scale, v_scale, starts, counts, page_table)

    return run


def _fake_append(k: Tensor, v: Tensor, *of_cache: Any) -> None:
    cache_of("append_kv", k, v, *of_cache)


def _prepare_rope_into(
    op: str, q: Tensor, k: Tensor, v: Tensor, q_out: Tensor, cos: Tensor, sin: Tensor, *rest: Any
) -> Callable[..., None]:
    *of_cache, style, rotary_dim = rest
    cache, layout = cache_of(op, k, v, *of_cache), of_cache[-2]
    check_rope(op, q, k, cos, sin, style, rotary_dim, layout)
    check_values(op, k.shape[layout.index("t")], cache)
    by_token = cache.scales == "token"
    start = prepare_rope(q, k, v, q_out, cos, sin, style, layout, cache)

    def run(
        op: str, q: Tensor, k: Tensor, v: Tensor, q_out: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor,
        v_cache: Tensor, starts: Tensor, page_table: Tensor | None, counts: Tensor | None, k_scale: Tensor | None,
        v_scale: Tensor | None, k_token: Tensor | None, v_token: Tensor | None, *_: object,
    ) -> None:  # fmt: skip
        if by_token:
            k_scale, v_scale = k_token, v_token
        if by_token or k_cache.data_ptr() == v_cache.data_ptr():
            check_memory(op, k_cache, v_cache, k_token, v_token)
        start(q, k, v, q_out, k_cache, v_cache, k_scale, v_scale, cos, sin, starts, counts, page_table)

    return run


# `rope_and_cache` with memory for q: (op, q, k, v, q_out, cos, sin, then `CACHE_SCHEMA`, style, rotary_dim).
rope_into_cache = library.Prepared(_prepare_rope_into)


def _prepare_rope(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, *rest: Any) -> Callable[..., Tensor]:
    q_out = _fake_rope(q, k, v, cos, sin, *rest)
    into = _prepare_rope_into("rope_and_cache", q, k, v, q_out, cos, sin, *rest)
    shape, strides, dtype, device = q_out.shape, q_out.stride(), q_out.dtype, q_out.device

    def run(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Tensor:
        q_out = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        into("rope_and_cache", q, k, v, q_out, *others)
        return q_out

    return run


def _fake_rope(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, *rest: Any) -> Tensor:
    *of_cache, style, rotary_dim = rest
    cache_of("rope_and_cache", k, v, *of_cache)
    check_rope("rope_and_cache", q, k, cos, sin, style, rotary_dim, of_cache[-2])
    return dense(q, of_cache[-2])


_append = library.define(
    f"append_kv(Tensor k, Tensor v, {CACHE_SCHEMA}) -> ()", prepare=_prepare_append, fake=_fake_append
)
_rope = library.define(
    f"rope_and_cache(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, {CACHE_SCHEMA}, str style, int? rotary_dim)"
    " -> Tensor",
    prepare=_prepare_rope,
    fake=_fake_rope,
)


def cache_arguments(
    op: str,
    k: Tensor,
    k_cache: Tensor,
    starts: Tensor,
    page_table: Tensor | None,
    counts: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    layout: str,
    cache_layout: str,
    cache_batch_idx: Tensor | None = None,
) -> tuple[Any, ...]:
    """The arguments of `CACHE_SCHEMA` after the caches. Starts and pages on the CPU are checked and copied."""
    k_token = v_token = None
    if not (isinstance(k, Tensor) and isinstance(starts, Tensor)):
        library.check_tensors(op, k=k, starts=starts)
    if cache_batch_idx is not None or (isinstance(page_table, Tensor) and page_table.dim() == 1):
        page_table = table_of(op, starts, page_table, cache_batch_idx)
    if k_scale is not None or v_scale is not None:
        library.check_tensors(op, **{n: s for n, s in (("k_scale", k_scale), ("v_scale", v_scale)) if s is not None})
        if k_scale is not None and k_scale.dim() == 3:
            k_scale, k_token = None, k_scale
        if v_scale is not None and v_scale.dim() == 3:
            v_scale, v_token = None, v_scale
    if starts.is_cpu and k.is_cuda:
        # The op reports wrong shapes; while compiling there are no values yet.
        fits = k.dim() == k_cache.dim() == 4 and {layout, cache_layout} <= set(library.LAYOUTS)
        if fits and not torch.compiler.is_compiling():
            check_indices(op, k.shape[0], starts, page_table, counts)
            cache = Cache(k_cache, k_cache, starts, page_table, counts, None, None, "", cache_layout)
            check_values(op, k.shape[layout.index("t")], cache)
        starts = starts.to(k.device)
        page_table, counts = (x if x is None or not x.is_cpu else x.to(k.device) for x in (page_table, counts))
    return starts, page_table, counts, k_scale, v_scale, k_token, v_token, layout, cache_layout


def append_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    starts: Tensor,
    *,
    page_table: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    counts: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    layout: Layout = "bhtd",
    cache_layout: Layout = "bthd",
) -> None:
    """Append new keys and values to a cache, in one launch.

    Token t of sequence b goes to position `starts[b] + t`. `decode_attention` and `attention_paged`, which read the
    cache afterwards, take `lengths = starts + T` (or `starts + counts`): the new tokens counted.

    Args:
        k: `(B, H, T, D)` (or `(B, T, H, D)` with `layout="bthd"`), float32, float16 or bfloat16, of any strides.
        v: as k, but its head dimension may differ.
        k_cache, v_cache: `(B, S, H, D)`, or `(pages, page_size, H, D)` with a page table (with
            `cache_layout="bhtd"`: `(B, H, S, D)`, `(pages, H, page_size, D)`), of k's dtype, float8_e4m3fn or int8,
            with a last stride of 1. Written in place.
        starts: `(B,)`, int32: the tokens that each sequence has in the cache before this call, and so the position of
            its first new one. It is not changed. A sequence with a negative start gets no token.
        page_table: `(B, max_pages)`, int32: the pages of each sequence, in order. The page size is a power of two.
        cache_batch_idx: `(B,)`, int32: the entry of each sequence in a contiguous cache, `k_cache[cache_batch_idx[b]]`,
            as in FlashAttention; b by default. The cache may have any number of entries. No two sequences with new
            tokens may have the same one.
        counts: `(B,)`, int32: how many of the T tokens are the sequence's; all by default.
        k_scale, v_scale: float32, for a float8 or int8 cache: `()` or `(H,)`, the factors of stored elements;
            or one for each token and head, of the caches' first three dimensions, which is written as well. A
            float8 cache without scales has a scale of 1.
        layout: the order of the dimensions of k and v.
        cache_layout: the order of the dimensions of the caches, and of scales by token.

    A token whose position or page lies outside the cache is not written; if the starts are on the CPU, that is an
    error. Starts on the CPU, with page table and counts, are copied to the device, which a CUDA graph cannot capture.

    Raises:
        ValueError: a shape, stride or layout does not fit; a scale is missing, or given where there is none; k or v
            requires grad; starts, counts, entries or a page table on the CPU lead out of the cache; devices differ or
            are the CPU without the interpreter.
        TypeError: a dtype is not one of those named.
    """
    rest = cache_arguments(
        "append_kv", k, k_cache, starts, page_table, counts, k_scale, v_scale, layout, cache_layout, cache_batch_idx
    )
    _append(k, v, k_cache, v_cache, *rest)


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
    page_table: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    counts: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    rotary_dim: int | None = None,
    style: Style = "half",
    layout: Layout = "bhtd",
    cache_layout: Layout = "bthd",
) -> Tensor:
    """`append_kv` of k rotated by its positions, and of v; returns q rotated. One launch.

    Takes the arguments of `append_kv`, and:

    Args:
        q: `(B, Hq, T, D)` (or `(B, T, Hq, D)`, as k), of k's dtype.
        cos, sin: `(positions, R)`, indexed by each token's position; or for each token, `(1, T, R)` or `(B, T, R)`,
            where R is `rotary_dim`. Each angle is stored twice, as models build the tables. A position outside the
            table gives NaN.
        rotary_dim: R, the number of elements of a head that are rotated: even, D by default.
        style: which elements make a pair, as in `rooftile.rope`: `"half"`, `"interleaved"` or `"deepseek"`.

    Returns:
        q rotated, in new memory of the same order; zeros for tokens excluded by `counts` or a negative start.
    """
    rest = cache_arguments(
        "rope_and_cache", k, k_cache, starts, page_table, counts, k_scale, v_scale, layout, cache_layout,
        cache_batch_idx,
    )  # fmt: skip
    return _rope(q, k, v, cos, sin, k_cache, v_cache, *rest, style, rotary_dim)
