"""A KV cache, contiguous or in pages, and where new tokens go in it."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from rooftile import library, runtime  # noqa: F401  # before Triton: runtime fixes the mode of the process
from rooftile.library import axis_strides, unit_last
from rooftile.primitives import quantize

import triton  # isort: skip
import triton.language as tl  # isort: skip

PAGES = (16, 32, 64, 128, 256, 512)  # tokens of a page that kernels are compiled for
_FP8 = torch.float8_e4m3fn


@triton.jit
def locate_tokens(
    starts_ptr, counts_ptr, table_ptr, stride_tb, batch, tokens, n_tokens, capacity, n_pages, HAS_COUNTS: tl.constexpr,
    PAGE: tl.constexpr,
):  # fmt: skip
    """For each new token of a sequence: whether it exists, its position, and where it goes.

    Without PAGE, a table has each sequence's entry in a contiguous cache; without a table they are in order.

    The last three results are the cache's batch entry or page, the row in it, and whether that is inside the cache.
    """
    start = tl.load(starts_ptr + batch).to(tl.int64)
    exists = (tokens < n_tokens) & (start >= 0)
    if HAS_COUNTS:
        exists &= tokens < tl.load(counts_ptr + batch)
    position = start + tokens
    written = exists & (position < capacity)
    if PAGE > 0:
        page = tl.load(table_ptr + batch * stride_tb + position // PAGE, mask=written, other=-1).to(tl.int64)
        written &= (page >= 0) & (page < n_pages)
        return exists, position, page, position % PAGE, written
    elif table_ptr is None:
        return exists, position, batch + tokens * 0, position, written
    else:
        entry = tl.load(table_ptr + batch * stride_tb).to(tl.int64) + tokens * 0
        return exists, position, entry, position, written & (entry >= 0) & (entry < n_pages)


@triton.jit
def _load_page(pointers, PTX: tl.constexpr):
    """Page indices. Inline PTX, because Triton would pipeline its own load, and halve the depth for keys and values.

    The load without PTX bypasses the L1. Kernels use it before `pdl_wait` too, and what it left in the L1 could be
    stale for the load after the wait.
    """
    if PTX:
        page = tl.inline_asm_elementwise(
            "ld.global.b32 $0, [$1];", "=r,l", [pointers], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        page = tl.load(pointers, cache_modifier=".cg")
    return page


@triton.jit
def page_of(
    pages_ptr, seq, block, key, n_keys, n_pages, stride_pb, PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """The first index into the cache for a block's keys: the sequence, the block's page, or the page of each key.

    Of a contiguous cache a table has each sequence's entry. Clamped to existing pages or entries, whatever the table
    says. The table is not read past the last key.
    """
    if PAGE == 0 and pages_ptr is None:
        page = seq.to(tl.int64)
    elif PAGE == 0:
        page = _load_page(pages_ptr + seq.to(tl.int64) * stride_pb, PTX)
        page = tl.minimum(tl.maximum(page, 0), n_pages - 1).to(tl.int64)
    else:
        token = block * BLOCK_N
        if PAGE < BLOCK_N:
            token += key
        token = tl.maximum(tl.minimum(token, n_keys - 1), 0)
        page = _load_page(pages_ptr + seq.to(tl.int64) * stride_pb + token // PAGE, PTX)
        page = tl.minimum(tl.maximum(page, 0), n_pages - 1).to(tl.int64)
    return page


@triton.jit
def token_in_page(block, key, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The index of a block's first key in its sequence or page; of each key, if the block spans several pages."""
    token = block * BLOCK_N
    if PAGE > 0 and PAGE < BLOCK_N:
        token += key
    if PAGE > 0:
        token %= PAGE
    return token.to(tl.int64)


@dataclasses.dataclass(frozen=True)
class Cache:
    """The tensors of a cache that new tokens are written to; they were checked.

    A page table with one dimension has the entry of each sequence in a contiguous cache.

    `scales` is "" without scales, "given" if they are only read, "token" if one is written for each token and head.
    `layout` is that of the caches and of scales by token.
    """

    k: Tensor
    v: Tensor
    starts: Tensor
    page_table: Tensor | None
    counts: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    scales: str
    layout: str

    @property
    def page_size(self) -> int:
        """Tokens of a page; 0 for a contiguous cache."""
        return int(self.k.shape[self.layout.index("t")]) if self.paged else 0

    @property
    def paged(self) -> bool:
        return self.page_table is not None and self.page_table.dim() > 1

    def tensors(self) -> tuple[Tensor | None, ...]:
        return quantize.writable(self.k), quantize.writable(self.v), self.k_scale, self.v_scale

    def strides(self) -> tuple[int, ...]:
        """Batch, head and token strides of k, v, k_scale and v_scale."""
        scales: tuple[int, ...] = (0,) * 6
        if self.k_scale is not None and self.v_scale is not None:
            if self.scales == "token":
                scales = (*axis_strides(self.k_scale, self.layout), *axis_strides(self.v_scale, self.layout))
            else:
                k, v = (scale.stride(0) if scale.dim() else 0 for scale in (self.k_scale, self.v_scale))
                scales = (0, k, 0, 0, v, 0)
        return (*axis_strides(self.k, self.layout), *axis_strides(self.v, self.layout), *scales)

    def indices(self) -> tuple[Tensor | None, ...]:
        """starts, counts and the page table, as a kernel reads them."""
        table = self.page_table
        return (
            self.starts.contiguous(),
            None if self.counts is None else self.counts.contiguous(),
            None if table is None else unit_last(table),
        )

    def numbers(self) -> tuple[int, int]:
        """Positions of a sequence, and pages or entries of the cache (0 without a table)."""
        positions = int(self.k.shape[self.layout.index("t")])
        if self.page_table is None:
            return positions, 0
        return positions * (self.page_table.shape[1] if self.paged else 1), self.k.shape[0]


# The arguments of ops that read a cache


def page_step(t: Tensor) -> int:
    """How many tokens of t (pages, heads, page, dim) a page's begin is from the next one's, if it is a whole number.

    Else 0, also where the tokens to the last page are more than an int32 counts.
    """
    pages, _, page, _ = t.shape
    stride_p, _, stride_t, _ = t.stride()
    step = page if pages <= 1 else stride_p // stride_t if stride_t > 0 and stride_p % stride_t == 0 else 0
    return step if 0 <= pages * step + page < 1 << 31 else 0


def scale_kind(scale: Tensor | None) -> str:
    """Whether a scale is by "head" (a scalar has a head stride of 0) or by "token"; "" without one."""
    return "" if scale is None else "head" if scale.dim() < 2 else "token"


def scale_strides(scale: Tensor | None, cache_layout: str) -> tuple[int, int, int]:
    """Strides of sequences (or pages), tokens and heads."""
    if scale is None or scale.dim() == 0:
        return 0, 0, 0
    if scale.dim() == 1:
        return 0, 0, scale.stride(0)
    batch, head, token = library.axis_strides(scale, cache_layout)
    return batch, token, head


def check_dtypes(op: str, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """Raise unless the cache has q's dtype, e4m3 or int8."""
    library.check_floating(op, q=q)
    if k_cache.dtype not in (q.dtype, _FP8, torch.int8):
        raise TypeError(
            f"{op}: k_cache has dtype {k_cache.dtype}, expected {q.dtype} to match q, float8_e4m3fn or int8"
        )
    if v_cache.dtype != k_cache.dtype:
        raise TypeError(f"{op}: v_cache has dtype {v_cache.dtype}, expected {k_cache.dtype} to match k_cache")


def _check_scale(op: str, name: str, scale: Tensor | None, k_cache: Tensor, kv_heads: int) -> None:
    if scale is None:
        return
    if scale.dtype != torch.float32:
        raise TypeError(f"{op}: {name} has dtype {scale.dtype}, expected float32")
    shapes = ((), (kv_heads,), tuple(k_cache.shape[:3]))
    if tuple(scale.shape) not in shapes:
        expected = ", ".join(map(str, shapes[:2])) + f" or {shapes[2]}"
        raise ValueError(
            f"{op}: {name} has shape {tuple(scale.shape)}, expected {expected}: one for all, "
            "for each head, or for each token"
        )


def check_scales(op: str, k_scale: Tensor | None, v_scale: Tensor | None, k_cache: Tensor, kv_heads: int) -> None:
    """Raise unless the scales fit the cache; one of int8 has them."""
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        _check_scale(op, name, scale, k_cache, kv_heads)
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is None and k_cache.dtype == torch.int8:
            raise ValueError(f"{op}: {name} is None, expected scales for an int8 cache")


def table_of(op: str, starts: Tensor, page_table: Tensor | None, cache_batch_idx: Tensor | None) -> Tensor | None:
    """The page table, or the entries of a contiguous cache, which ops take as a table with one dimension.

    `starts` is a tensor with a number for each sequence: its starts or its length.
    """
    if page_table is not None:
        if cache_batch_idx is not None:
            raise ValueError(f"{op}: cache_batch_idx and page_table are given, expected at most one of them")
        raise ValueError(
            f"{op}: page_table has shape {tuple(page_table.shape)}, expected ({starts.shape[0]}, max_pages)"
        )
    library.check_tensors(op, cache_batch_idx=cache_batch_idx)
    assert cache_batch_idx is not None
    check_entries(op, cache_batch_idx, starts.shape[0])
    if cache_batch_idx.device != starts.device:
        raise ValueError(
            f"{op}: cache_batch_idx is on {cache_batch_idx.device}, expected {starts.device}, as the tokens' counts"
        )
    return cache_batch_idx


def check_entries(op: str, entries: Tensor, batch: int) -> None:
    """Raise unless there is an entry of the cache for each sequence."""
    if tuple(entries.shape) != (batch,):
        raise ValueError(
            f"{op}: cache_batch_idx has shape {tuple(entries.shape)}, expected ({batch},), one for each sequence"
        )
    if entries.dtype != torch.int32:
        raise TypeError(f"{op}: cache_batch_idx has dtype {entries.dtype}, expected int32")


def check_entry_values(op: str, entries: list[int], n_entries: int) -> None:
    for b, entry in enumerate(entries):
        if not 0 <= entry < n_entries:
            raise ValueError(
                f"{op}: cache_batch_idx[{b}] is {entry}, expected 0 to {n_entries - 1}, a sequence of k_cache"
            )


def check_pages(op: str, page_table: Tensor, batch: int, page: int) -> None:
    """Raise unless the table has a row of pages for each sequence, of a size that kernels are compiled for."""
    if page_table.dim() != 2 or page_table.shape[0] != batch:
        raise ValueError(
            f"{op}: page_table has shape {tuple(page_table.shape)}, expected ({batch}, pages of a sequence)"
        )
    if page_table.dtype != torch.int32:
        raise TypeError(f"{op}: page_table has dtype {page_table.dtype}, expected int32")
    if page not in PAGES:
        raise ValueError(f"{op}: k_cache has pages of {page} tokens, expected one of {', '.join(map(str, PAGES))}")


def check_values(op: str, lengths: Tensor, page_table: Tensor | None, capacity: int, page: int, n_pages: int) -> None:
    """Check lengths, and pages or entries, on the CPU. On the GPU that would synchronize; the kernel clamps them."""
    if lengths.device.type == "cpu" and lengths.numel() and int(lengths.max()) > capacity:
        at = int(lengths.argmax())
        raise ValueError(f"{op}: lengths[{at}] is {int(lengths[at])}, expected at most {capacity}, the cache's")
    if page_table is None or page_table.device.type != "cpu" or lengths.device.type != "cpu" or not page_table.numel():
        return
    if page_table.dim() == 1:
        check_entry_values(op, page_table.tolist(), n_pages)
        return
    used = torch.arange(page_table.shape[1], device="cpu") * page < lengths[:, None]
    wrong = used & ((page_table < 0) | (page_table >= n_pages))
    if bool(wrong.any()):
        b, i = (int(n) for n in wrong.nonzero()[0])
        raise ValueError(
            f"{op}: page_table[{b}, {i}] is {int(page_table[b, i])}, expected 0 to {n_pages - 1}: "
            f"k_cache has {n_pages} pages"
        )
