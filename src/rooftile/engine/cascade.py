"""Cascade attention: where all sequences of a decoding step begin with the same pages, several read them at once.

    out = (o_common exp(l_common - m) + o_rest exp(l_rest - m)) / (exp(l_common - m) + exp(l_rest - m))

m is the larger of the two log-sum-exps l. Of the common pages, `decode_attention` computes the newest tokens of several
sequences as if they were new tokens of one, without causality: their keys and values are read once for all of them. Of
the rest it computes each sequence as ever, with a page table without those pages. A kernel merges both in place. The
number of common pages is on the device, so one CUDA graph serves any.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rooftile import launching, library, runtime  # noqa: F401  # before Triton: runtime fixes the mode of the process
from rooftile.engine.modes import on
from rooftile.ops.decode_attention import decode_attention
from rooftile.primitives import pdl
from rooftile.primitives.pdl import pdl_launch_dependents, pdl_wait

import triton  # isort: skip
import triton.language as tl  # isort: skip

if TYPE_CHECKING:
    from rooftile.engine.paged_cache import PagedKVCache, PagedSequence

# A step has a group from so many sequences and so many common tokens on. A guess, which is to be measured: below, the
# two launches more take longer than the reads that are saved.
MIN_SEQUENCES = 8
MIN_TOKENS = 512
# The most sequences whose tokens are computed together: the most new tokens that `decode_attention` takes.
TOGETHER = 16


@triton.jit(do_not_specialize=["width"])
def _cascade_tables_kernel(
    group_ptr, lengths_ptr, table_ptr, common_ptr, first_ptr, rest_ptr, rest_table_ptr, width,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Of a sequence: the lengths of the common part and of the rest, and the pages of the rest."""
    if EARLY:
        pdl_launch_dependents()
        pdl_wait()
    seq = tl.program_id(0)
    pages = tl.load(group_ptr)
    owner = tl.load(group_ptr + 1)
    tl.store(common_ptr + seq, pages * PAGE)
    tl.store(rest_ptr + seq, tl.maximum(tl.load(lengths_ptr + seq) - pages * PAGE, 0))
    for start in tl.range(0, width, BLOCK, num_stages=1):
        cols = start + tl.arange(0, BLOCK)
        inside = cols < width
        page = tl.load(table_ptr + seq * width + pages + cols, mask=cols < width - pages, other=-1)
        tl.store(rest_table_ptr + seq * width + cols, page, mask=inside)
        if seq == 0:
            tl.store(first_ptr + cols, tl.load(table_ptr + owner * width + cols, mask=inside), mask=inside)


@triton.jit(do_not_specialize=["rows", "heads", "together"])
def _cascade_merge_kernel(
    common_ptr, common_lse_ptr, out_ptr, lse_ptr, rows, heads, together,
    DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Merge the common part into rows of out, each of a sequence and a head."""
    if EARLY:
        pdl_launch_dependents()
        pdl_wait()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    seq = row // heads
    at = (seq // together * heads + row % heads) * together + seq % together
    common_lse = tl.load(common_lse_ptr + at, mask=inside, other=0.0)
    lse = tl.load(lse_ptr + row, mask=inside, other=0.0)
    top = tl.maximum(common_lse, lse)
    top = tl.where(top == float("-inf"), 0.0, top)  # neither part has a key
    common_weight = tl.exp(common_lse - top)
    weight = tl.exp(lse - top)
    total = common_weight + weight
    inverse = tl.where(total == 0.0, 0.0, 1.0 / total)
    cols = tl.arange(0, WIDTH)[None, :]
    place = row.to(tl.int64)[:, None] * DIM + cols
    mask = inside[:, None] & (cols < DIM)
    common = tl.load(common_ptr + place, mask=mask, other=0.0).to(tl.float32)
    out = tl.load(out_ptr + place, mask=mask, other=0.0).to(tl.float32)
    merged = common * (common_weight * inverse)[:, None] + out * (weight * inverse)[:, None]
    tl.store(out_ptr + place, merged.to(out_ptr.dtype.element_ty), mask=mask)


def merge_(common: Tensor, common_lse: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """Merge a common part into out, both `(b, heads, dim)`, and return it. Their log-sum-exps are
    `(b / together, heads, together)` and `(b, heads)`."""
    b, heads, dim = out.shape
    width = library.power_of_two(dim)
    early = pdl.early(out)
    constants = {"DIM": dim, "WIDTH": width, "ROWS": max(1, 1024 // width), "EARLY": early}
    tensors = common, common_lse, out, lse
    plan = launching.launcher(_cascade_merge_kernel, tensors, constants, num_warps=4, **pdl.options(early))
    rows = b * heads
    launching.launch(plan, library.cdiv(rows, constants["ROWS"]), tensors, (), (rows, heads, common_lse.shape[2]))
    return out


def common_pages(sequences: Sequence[PagedSequence], page_size: int) -> int:
    """How many full pages all of those sequences begin with."""
    lists = [s.pages for s in sequences]
    whole = min(s.length for s in sequences) // page_size
    # What the first and the last in lexicographic order begin with, all between them do.
    pairs = zip(min(lists)[:whole], max(lists)[:whole], strict=True)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), whole)


class Cascade:
    """The group of a decoding step: the pages that all of its sequences begin with.

    Args:
        cache: whose steps they are.

    Attributes:
        common, rest: `(slots,)` int32, on the device: the tokens of the common part, and those behind it.
        first, rest_table: int32, on the device: the pages of the common part, in the first columns of `(1, max_pages)`;
            and those of the rest, `(slots, max_pages)`.
    """

    def __init__(self, cache: PagedKVCache) -> None:
        self._cache = cache
        self._live: list[PagedSequence] = []
        self._groups = False
        slots, width = cache.page_table.shape
        # The number of common pages, and a slot that has them.
        self._group, self.common, self.rest = (
            torch.zeros(n, dtype=torch.int32, device=cache.k.device) for n in (2, slots, slots)
        )
        self.first = torch.zeros((1, width), dtype=torch.int32, device=cache.k.device)
        self.rest_table = torch.zeros_like(cache.page_table)

    def may_group(self, b: int) -> bool:
        """Whether a step of the first b slots may have a group."""
        return b >= MIN_SEQUENCES and self._cache.capacity >= MIN_TOKENS

    def forget(self) -> None:
        """Sequences have other slots than in the step before."""
        self._live = []

    def groups(self, live: Sequence[PagedSequence]) -> bool:
        """Whether the next step of those sequences has a group, which the device is told of.

        It looks at their pages only where they are not those of the step before: pages that are full stay, and what
        a sequence adds is its own.
        """
        if live != self._live:
            self._live = list(live)
            n = common_pages(live, self._cache.page_size) if len(live) >= MIN_SEQUENCES else 0
            self._groups = n * self._cache.page_size >= MIN_TOKENS
            if self._groups:
                group = torch.tensor([n, live[0].slot], dtype=torch.int32, device="cpu")
                self._group.copy_(group, non_blocking=True)
        return self._groups

    def lay_out(self, b: int) -> None:
        """Divide the first b slots into the common part and the rest, by one launch, once the cache has advanced."""
        cache = self._cache
        width = cache.page_table.shape[1]
        early = pdl.early(cache.lengths)
        constants = {"PAGE": cache.page_size, "BLOCK": min(1024, library.power_of_two(width)), "EARLY": early}
        tensors = (
            self._group, cache.lengths, cache.page_table, self.common, self.first, self.rest, self.rest_table
        )  # fmt: skip
        plan = launching.launcher(_cascade_tables_kernel, tensors, constants, num_warps=4, **pdl.options(early))
        with on(cache.lengths.device):
            launching.launch(plan, b, tensors, (), (width,))

    def attend(self, layer: int, q: Tensor, **scoring: Any) -> Tensor:
        """Attention of the newest token of each of the first b slots, q `(b, heads, head_dim)`, to a layer's cache."""
        b, given = q.shape[0], self._cache.inputs(layer) | scoring | {"return_lse": True}
        together = max(n for n in range(1, TOGETHER + 1) if b % n == 0)
        groups = b // together
        of_common = {"lengths": self.common[:groups], "page_table": self.first.expand(groups, -1), "causal": False}
        common, common_lse = decode_attention(q.unflatten(0, (groups, together)), **given | of_common)
        of_rest = {"lengths": self.rest[:b], "page_table": self.rest_table[:b]}
        out, lse = decode_attention(q[:, None], **given | of_rest)
        return merge_(common.flatten(0, 1), common_lse, out[:, 0], lse[..., 0])
