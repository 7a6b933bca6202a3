"""Where new tokens go in a KV cache, contiguous or in pages."""

from __future__ import annotations

from rooftile import runtime  # noqa: F401  # before Triton: runtime fixes the mode of the process

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def locate_tokens(
    lengths_ptr,
    counts_ptr,
    table_ptr,
    stride_tb,
    batch,
    tokens,
    n_tokens,
    capacity,
    n_pages,
    HAS_COUNTS: tl.constexpr,
    PAGE: tl.constexpr,
):
    """For a sequence's new tokens: whether each exists, its position, and where it goes.

    The last three results are a block of the cache (the batch entry, or the page), a row in it, and whether that is
    inside of the cache.
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
