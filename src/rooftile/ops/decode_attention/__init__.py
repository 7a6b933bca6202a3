"""Attention of a few new tokens to a KV cache, with a length of its own for each sequence.

    out = softmax(score(scale * q · k)) · v

Bytes: the seen part of the cache, read once for all query heads of a KV head and all new tokens; q and out are small.
A GPU has more than a hundred SMs, but a sequence only some eight KV heads. So the keys are divided into splits, whose
softmaxes are combined afterwards (split-KV; Flash-Decoding). The splits are chosen on the device from the lengths, the
batch and the number of programs: a launch depends on shapes alone, and one CUDA graph serves all lengths.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor

from rooftile import launching, library, runtime  # before Triton: runtime fixes the mode of the process
from rooftile.library import unit_last
from rooftile.ops.decode_attention.choose import (
    DecodeConfig,
    check,
    check_arguments,
    check_values,
    choose,
    decode,
    encode,
    row_tile,
    scale_kind,
    scale_strides,
    shape_of,
    strides_of,
)
from rooftile.ops.decode_attention.kernel import as_pairs, decode_kernel, packed_format
from rooftile.ops.decode_attention.schedule import NEVER_SPLIT, combine_kernel
from rooftile.primitives import pdl
from rooftile.primitives.quantize import writable
from rooftile.primitives.scores import split_dim

__all__ = ["DecodeConfig", "decode_attention"]


@functools.cache
def _plans(
    dtypes: tuple[torch.dtype | None, ...],
    head_dim: int,
    value_dim: int,
    group: int,
    rows: int,
    page: int,
    token_strides: tuple[int, int],
    scale: float,
    softcap: float,
    window: int,
    scales: tuple[str, str],
    has_lse: bool,
    block_b: int,
    c: DecodeConfig,
    early: bool,
    pairs: str,
    ptx: bool,
    split: bool,
    once: bool,
) -> tuple[launching.KernelLauncher, launching.KernelLauncher | None]:
    """The kernel, and the one that brings parts together where that is one of its own.

    `split`: whether items may be cut into parts; `once`: they are not, and each has a program of its own.
    """
    (d0, d1), (v0, v1) = split_dim(head_dim), split_dim(value_dim)
    tile, tiles = row_tile(rows)
    width = max(v0, v1)
    itemsize = 1 if pairs else dtypes[1].itemsize  # type: ignore[union-attr]
    flags = {"HAS_SINKS": dtypes[3] is not None, "HAS_LSE": has_lse, "V0": v0, "V1": v1, "ROWS": tile}
    least = c.min_blocks if split else NEVER_SPLIT.value
    sharing = {"BLOCK_B": block_b, "BLOCK_N": c.block_n, "MIN_BLOCKS": least, "SLACK": c.slack}
    last = max(1, min(64, 1024 * c.num_warps // (tile * width))) if split and c.combine == "last" else 0
    constants = {
        "HEAD_DIM": head_dim,
        "VALUE_DIM": value_dim,
        "GROUP": group,
        "ROW_TILES": tiles,
        "PAGE": page,
        "STRIDE_KT": token_strides[0],
        "STRIDE_VT": token_strides[1],
        "SCALE": scale,
        "SOFTCAP": softcap,
        "WINDOW": window,
        "K_SCALE_KIND": scales[0],
        "V_SCALE_KIND": scales[1],
        "HAS_ALIBI": dtypes[2] is not None,
        "HAS_SINKS": flags["HAS_SINKS"],
        "HAS_MASK": dtypes[4] is not None,
        "HAS_LSE": has_lse,
        "D0": d0,
        "D1": d1,
        "V0": v0,
        "V1": v1,
        "ROWS": tile,
        "BLOCK_B": block_b,
        "BLOCK_M": max(c.block_m, tile),
        "BLOCK_N": c.block_n,
        "STAGES": c.num_stages,
        "MIN_BLOCKS": least,
        "SLACK": c.slack,
        "COMBINE_SPLITS": last,
        "PREFETCH_BLOCKS": c.prefetch_blocks if early else 0,
        "ONE_ITEM": once,
        "K_LINES": library.power_of_two(library.cdiv(head_dim * itemsize, 128)),
        "V_LINES": library.power_of_two(library.cdiv(value_dim * itemsize, 128)),
        "PDL": early,
        "PACKED": pairs,
        "PTX": ptx,
    }
    options = {"launch_pdl": True} if early else {}
    limit: dict[str, Any] = {"maxnreg": c.registers} if c.registers and ptx else {}
    plan = launching.KernelLauncher(
        decode_kernel, constants, newest_assembler=True, num_warps=c.num_warps, **options, **limit
    )
    if last or not split:
        return plan, None
    second = {"VALUE_DIM": value_dim, "GROUP": group, "ROW_TILES": tiles, "WINDOW": window, **flags, **sharing}
    second |= {"COMBINE_SPLITS": max(1, min(64, 8192 // width)), "PDL": early}
    return plan, launching.KernelLauncher(combine_kernel, second, num_warps=4, **options)


def _prepare(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    page_table: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    mask: Tensor | None,
    scale: float | None,
    window: int,
    softcap: float,
    layout: str,
    return_lse: bool,
    config: str,
) -> Callable[..., tuple[Tensor, Tensor]]:
    if isinstance(q, FunctionalTensor):
        raise launching.Untraceable("counters")
    out, lse = _fake(
        q, k_cache, v_cache, lengths, page_table, k_scale, v_scale, alibi_slopes, sinks, mask, scale, window,
        softcap, layout, return_lse, config,
    )  # fmt: skip
    s = shape_of(q, k_cache, v_cache, page_table, layout)
    check_values(lengths, page_table, s)
    if out.numel() == 0:
        return _fake
    if s.capacity == 0 or (s.page and s.n_pages == 0):
        return _without_keys
    target = runtime.target(q.device)
    rows = s.heads // s.kv_heads * s.n_new
    tile, tiles = row_tile(rows)
    items = s.batch * s.kv_heads * tiles
    c = decode(config)
    if c is None:
        c = choose(rows, s.head_dim, s.value_dim, q.dtype, k_cache.dtype, items, s.capacity, s.page, target)
    else:
        c.check_device(target, (s.head_dim + s.value_dim) * k_cache.element_size())

    copies: library.Copies = {}
    if q.stride(-1) != 1:
        q, copies[0] = q.contiguous(), Tensor.contiguous
    pairs = packed_format(q, unit_last(k_cache), unit_last(v_cache), target)

    def readable(cache: Tensor) -> Tensor:
        """A cache as the kernel reads it."""
        cache = unit_last(cache)
        return as_pairs(cache) if pairs else writable(cache)

    k_bytes, v_bytes = readable(k_cache), readable(v_cache)
    for place, read, given in ((1, k_bytes, k_cache), (2, v_bytes, v_cache)):
        if read is not given:
            copies[place] = readable
    for place, matrix in ((4, page_table), (9, mask)):
        if matrix is not None and unit_last(matrix) is not matrix:
            copies[place] = unit_last
    for place, vector in ((3, lengths), (7, alibi_slopes), (8, sinks)):
        library.contiguous_of(vector, copies, place)
    pages, hidden = (None if t is None else unit_last(t) for t in (page_table, mask))
    page_stride = 0 if pages is None else pages.stride(0)
    mask_stride = 1 if hidden is None else hidden.stride(0)  # a 1 is compiled in: without a mask no argument is added

    blocks = items * library.cdiv(s.capacity, c.block_n)
    parts_at_most = items if c.combine == "none" else max(1, blocks // c.min_blocks)
    programs = min(target.multiprocessors * c.programs_per_sm, parts_at_most)
    (_, _), (v0, v1) = split_dim(s.head_dim), split_dim(s.value_dim)
    split = programs > 1 and c.combine != "none"
    n_partial = programs * 2 * tile * (v0 + v1 + 2) if split else 0
    n_counters = items if split and c.combine == "last" else 0
    factor = s.head_dim**-0.5 if scale is None else scale
    optional = (alibi_slopes, sinks, mask, page_table)
    dtypes = (q.dtype, k_bytes.dtype, *(None if t is None else t.dtype for t in optional), lengths.dtype)
    k_strides, v_strides = strides_of(k_bytes, layout), strides_of(v_bytes, layout)
    launcher, second = _plans(
        dtypes, s.head_dim, s.value_dim, s.heads // s.kv_heads, rows, s.page, (k_strides[1], v_strides[1]), factor,
        softcap, window,
        (scale_kind(k_scale), scale_kind(v_scale)), return_lse, library.power_of_two(s.batch), c,
        c.pdl and pdl.supported(target), pairs, target.arch.startswith("sm_"), split,
        not split and programs == items,
    )  # fmt: skip
    strides: tuple[int, ...] = (
        *q.stride()[:3],
        *k_strides[::2],
        *v_strides[::2],
        *scale_strides(k_scale, layout),
        *scale_strides(v_scale, layout),
        page_stride,
        mask_stride,
    )
    sizes = (s.batch, s.n_new, s.kv_heads, s.capacity)
    numbers = (*sizes, s.n_pages, programs)
    start = library.copying(launching.bind(launcher, programs, strides=strides, numbers=numbers), copies)
    combine = library.start_nothing
    if second is not None:
        combine = launching.bind(second, items * tile, numbers=(*sizes, programs))
        combine = library.copying(combine, {i: copies[place] for i, place in ((0, 3), (1, 8)) if place in copies})
    device, dtype = q.device, q.dtype
    out_shape, out_strides, lse_shape, lse_strides = out.shape, out.stride(), lse.shape, lse.stride()

    def run(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        lengths: Tensor,
        page_table: Tensor | None,
        k_scale: Tensor | None,
        v_scale: Tensor | None,
        alibi_slopes: Tensor | None,
        sinks: Tensor | None,
        mask: Tensor | None,
        *_: object,
    ) -> tuple[Tensor, Tensor]:
        out = torch.empty_strided(out_shape, out_strides, dtype=dtype, device=device)
        lse = torch.empty_strided(lse_shape, lse_strides, dtype=torch.float32, device=device)
        lse_or_none = lse if return_lse else None
        partial = counters = None
        if n_partial:
            partial = torch.empty_strided((n_partial,), (1,), dtype=torch.float32, device=device)
        if n_counters:
            counters = launching.counters(n_counters, device)
        start(
            q, k_cache, v_cache, lengths, page_table, k_scale, v_scale, alibi_slopes, sinks, mask, out, lse_or_none,
            partial, counters,
        )  # fmt: skip
        if second is not None:
            combine(lengths, sinks, partial, out, lse_or_none)
        return out, lse

    return run


def _without_keys(*args: Any) -> tuple[Tensor, Tensor]:
    """The result for caches that hold no keys, whatever the lengths."""
    sinks, return_lse = args[8], args[14]
    out, lse = _fake(*args)
    lse.fill_(float("-inf"))
    if sinks is not None and return_lse:
        lse.copy_(sinks[:, None].expand_as(lse))
    return out.zero_(), lse


def _fake(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    page_table: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    mask: Tensor | None,
    scale: float | None,
    window: int,
    softcap: float,
    layout: str,
    return_lse: bool,
    config: str,
) -> tuple[Tensor, Tensor]:
    check(q, k_cache, v_cache, lengths, page_table, k_scale, v_scale, alibi_slopes, sinks, mask, layout)
    batch, n_new, heads, _ = q.shape
    out = torch.empty((batch, n_new, heads, v_cache.shape[3]), dtype=q.dtype, device=q.device)
    shape = (batch, heads, n_new) if return_lse else (0,)
    return out, torch.empty(shape, dtype=torch.float32, device=q.device)


_op = library.define(
    "decode_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor lengths, Tensor? page_table, Tensor? k_scale, "
    "Tensor? v_scale, Tensor? alibi_slopes, Tensor? sinks, Tensor? mask, float? scale, int window, float softcap, "
    "str layout, bool return_lse, str config) -> (Tensor, Tensor)",
    prepare=_prepare,
    fake=_fake,
)


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    *,
    page_table: Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    mask: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    layout: str = "bthd",
    return_lse: bool = False,
    config: DecodeConfig | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of the last T tokens of each sequence to all its keys up to their own position.

    Token i of sequence b stands at position `p = lengths[b] - T + i`, and its keys and values are in the cache already:

        s_j = scale * q · k_j * k_scale,   softcap * tanh(s_j / softcap),   - slope * (p - j)
        out = sum_j exp(s_j) v_j * v_scale / (sum_j exp(s_j) + exp(sink)),   p - window < j <= p,   mask[b, j]

    computed in float32 (products of q's dtype, as in all of Rooftile's attention) and rounded once. It has no
    derivative. The parts that keys are cut into depend on the lengths, the batch and the GPU alone, so results are the
    same to the bit every time.

    Args:
        q: `(B, T, Hq, D)`, T at most 16, float32, float16 or bfloat16. Any strides; copied where the last is not 1.
        k_cache, v_cache: `(B, S, Hkv, D)` in layout `"bthd"`, `(B, Hkv, S, D)` in `"bhtd"`; with a page table
            `(pages, page_size, Hkv, D)` or `(pages, Hkv, page_size, D)`, page_size 16, 32, 64, 128 or 256. Of q's
            dtype, float8_e4m3fn or int8. Query head h reads KV head `h // (Hq // Hkv)`. D, and the last dimension of
            v_cache, which may be another, are 1 to 256. Any strides; copied, whole, where the last is not 1, or where
            rows of 8 bits begin at odd bytes.
        lengths: `(B,)`, int32: keys of each sequence, those of the new tokens among them. 0 or less: none.
            What the cache holds beyond may be anything.
        page_table: `(B, pages of a sequence)`, int32: where the pages of each sequence lie. What is beyond a
            sequence's length is not read.
        scale: of the scores; `1 / sqrt(D)` by default. Each is compiled into a kernel of its own, as are the options:
        window: keys that a token sees at most, its own among them; those before are not read.
        softcap: as in Gemma 2; None or 0 for none.
        alibi_slopes: `(Hq,)`, floating (Press et al. 2022).
        sinks: `(Hq,)`, floating: a score of each head that takes part in the softmax, and has no value.
        mask: `(B, S)`, bool, S keys being what the cache of a sequence holds at most (pages times page_size, with a
            page table): the keys that its tokens see, of those that they see by lengths, position and window. Any
            strides; copied where the last is not 1. What it hides is read all the same, and its values must be finite.
        k_scale, v_scale: float32, what the cached numbers are multiplied by: `()`, `(Hkv,)`, or one for each token and
            head, in the cache's layout: its first three dimensions.
        layout: of the caches, and of scales by token. q and out are `(B, T, Hq, D)` in any case.
        return_lse: also return `(B, Hq, T)`, float32: the logarithm of the softmax's denominator, sinks in it.
        config: how the kernel is launched; chosen by default.

    Returns:
        out, `(B, T, Hq, Dv)`, of q's dtype, contiguous; with `return_lse` (out, lse). A token that sees no key is 0,
        and its lse is -inf, or its sink.

    Raises:
        ValueError: shapes or devices that do not fit together; a length beyond the cache, or a page that is not there,
            where lengths and page table are on the CPU. On the GPU no one looks: a length is cut to the cache's, and a
            page taken as the nearest that there is. Nothing outside the cache is read.
        TypeError: dtypes that are not taken.
    """
    check_arguments(layout, window, softcap, scale)
    library.check_tensors("decode_attention", q=q, lengths=lengths)
    if q.device.type != "cpu" and not torch.compiler.is_compiling() and lengths.device.type == "cpu":
        s = check(q, k_cache, v_cache, lengths, page_table, k_scale, v_scale, alibi_slopes, sinks, mask, layout)
        check_values(lengths, page_table, s)
        lengths = lengths.to(q.device)
        page_table = None if page_table is None else page_table.to(q.device)
    text = (encode.__wrapped__ if torch.compiler.is_compiling() else encode)(config)  # compilers warn of a cache
    out, lse = _op(
        q, k_cache, v_cache, lengths, page_table, k_scale, v_scale, alibi_slopes, sinks, mask, scale, window or 0,
        float(softcap or 0.0), layout, return_lse, text,
    )  # fmt: skip
    return (out, lse) if return_lse else out
