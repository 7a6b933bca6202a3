"""A KV cache, contiguous or in pages, and where new tokens go in it."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from rooftile import runtime  # noqa: F401  # before Triton: runtime fixes the mode of the process
from rooftile.library import axis_strides, unit_last
from rooftile.primitives import quantize

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def locate_tokens(
    lengths_ptr, counts_ptr, table_ptr, stride_tb, batch, tokens, n_tokens, capacity, n_pages, HAS_COUNTS: tl.constexpr,
    PAGE: tl.constexpr,
):  # fmt: skip
    """For each new token of a sequence: whether it exists, its position, and where it goes.

    The last three results are the cache's batch entry or page, the row in it, and whether that is inside the cache.
    """
    length = tl.load(lengths_ptr + batch).to(tl.int64)
    exists = (tokens < n_tokens) & (length >= 0)
    if HAS_COUNTS:
        exists &= tokens < tl.load(counts_ptr + batch)
    position = length + tokens
    written = exists & (position < capacity)
    if PAGE > 0:
        page = tl.load(table_ptr + batch * stride_tb + position // PAGE, mask=written, other=-1).to(tl.int64)
        written &= (page >= 0) & (page < n_pages)
        return exists, position, page, position % PAGE, written
    else:
        return exists, position, batch + tokens * 0, position, written


@dataclasses.dataclass(frozen=True)
class Cache:
    """The tensors of a cache that new tokens are written to; they were checked.

    `scales` is "" without scales, "given" if they are only read, "token" if one is written for each token and head.
    `layout` is that of the caches and of scales by token.
    """

    k: Tensor
    v: Tensor
    lengths: Tensor
    page_table: Tensor | None
    counts: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    scales: str
    layout: str

    @property
    def page_size(self) -> int:
        """Tokens of a page; 0 for a contiguous cache."""
        return 0 if self.page_table is None else int(self.k.shape[self.layout.index("t")])

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
        """lengths, counts and the page table, as a kernel reads them."""
        table = self.page_table
        return (
            self.lengths.contiguous(),
            None if self.counts is None else self.counts.contiguous(),
            None if table is None else unit_last(table),
        )

    def numbers(self) -> tuple[int, int]:
        """Positions of a sequence, and pages of the cache (0 if it is contiguous)."""
        positions = int(self.k.shape[self.layout.index("t")])
        if self.page_table is None:
            return positions, 0
        return positions * self.page_table.shape[1], self.k.shape[0]
