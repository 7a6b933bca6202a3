"""A KV cache in pages, which sequences may share."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rooftile import launching, library  # before Triton: runtime fixes the mode of the process
from rooftile.engine.cache import CacheBase, KVLayout, check_positive, new_tokens
from rooftile.engine.modes import on, plain_mode
from rooftile.ops.kv_cache import Layout
from rooftile.primitives.paging import PAGES

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit(do_not_specialize=["layers"])
def _copy_kernel(x_ptr, pairs_ptr, stride_l, layers, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    """Copy page pairs[i, 0] to page pairs[i, 1] in every layer, as 32-bit words."""
    CHUNKS: tl.constexpr = (WORDS + BLOCK - 1) // BLOCK
    words = (tl.program_id(0) % CHUNKS) * BLOCK + tl.arange(0, BLOCK)
    rest = tl.program_id(0) // CHUNKS
    x_ptr += (rest % layers).to(tl.int64) * stride_l
    old = tl.load(pairs_ptr + 2 * (rest // layers)).to(tl.int64)
    new = tl.load(pairs_ptr + 2 * (rest // layers) + 1).to(tl.int64)
    x = tl.load(x_ptr + old * WORDS + words, mask=words < WORDS)
    tl.store(x_ptr + new * WORDS + words, x, mask=words < WORDS)


@functools.cache
def _copy_plan(words: int) -> launching.KernelLauncher:
    return launching.KernelLauncher(
        _copy_kernel, {"WORDS": words, "BLOCK": min(1024, library.power_of_two(words))}, num_warps=4
    )


class PagedSequence:
    """A sequence of a `PagedKVCache`, until it is freed.

    Attributes:
        slot: its row in the batch, in `page_table` and in `lengths`; -1 after it was freed.
        length: its tokens, including those reserved.
        pages: the pages that hold them, in order.
    """

    __slots__ = ("length", "pages", "slot")

    def __init__(self, slot: int, length: int, pages: list[int]) -> None:
        self.slot, self.length, self.pages = slot, length, pages

    def __repr__(self) -> str:
        state = f"slot {self.slot}, {self.length} tokens" if self.slot >= 0 else "freed"
        return f"<PagedSequence: {state}>"


class PagedKVCache(CacheBase):
    """Keys and values in pages of one pool.

        cache = rooftile.PagedKVCache(pages, page_size, kv_heads, head_dim, max_sequences=64, layers=layers)
        a = cache.allocate()
        cache.extend({a: n})                                     # pages for n tokens of a
        for layer in range(layers):
            q = cache.rope_and_append(layer, q, k, v, cos, sin)  # or cache.append(layer, k, v)
            y = cache.attend(layer, q)                           # rooftile.decode_attention(q, **cache.inputs(layer))
        b = cache.fork(a)                                        # the same tokens, in the same pages
        cache.free(a)

    The batch of q, k and v always has `max_sequences` rows. A sequence is row `sequence.slot`; rows that take no part
    in a step are not written to the cache. So the page table and the lengths keep their addresses, and one CUDA graph
    serves any set of sequences. Pages have reference counts: a fork shares the pages of its source, and a shared page
    that is not full is copied before a sequence writes into it.

    Args:
        pages: the size of the pool.
        page_size: tokens of a page: 16, 32, 64, 128, 256 or 512.
        kv_heads, head_dim, value_dim, layers, dtype, device, layout, scales: as in `KVCache`.
        max_sequences: the most sequences at a time.
        max_seq_len: the most tokens of a sequence; by default what all pages hold.
    """

    page_table: Tensor

    def __init__(
        self,
        pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        *,
        max_sequences: int,
        max_seq_len: int | None = None,
        value_dim: int | None = None,
        layers: int = 1,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        layout: Layout = "bthd",
        scales: str | tuple[Tensor, Tensor] | None = None,
    ) -> None:
        check_positive("PagedKVCache", pages=pages, max_sequences=max_sequences)
        if page_size not in PAGES:
            raise ValueError(
                f"PagedKVCache: page_size is {page_size!r}, expected one of {', '.join(str(n) for n in PAGES)}"
            )
        if max_seq_len is None:
            max_seq_len = pages * page_size
        check_positive("PagedKVCache", max_seq_len=max_seq_len)
        kv = KVLayout(kv_heads, head_dim, value_dim, layers, dtype, device, layout, scales)
        super().__init__(kv, blocks=pages, rows=page_size, slots=max_sequences, capacity=max_seq_len)
        self.page_size = page_size
        shape = (max_sequences, library.cdiv(max_seq_len, page_size))
        with plain_mode(self.k.device):
            self.page_table = torch.full(shape, -1, dtype=torch.int32, device=self.k.device)
            self._no_pages = self.page_table[0].clone()
        self._slots: list[PagedSequence | None] = [None] * max_sequences
        self._free = list(range(pages))[::-1]
        self._users = [0] * pages

    @property
    def sequences(self) -> list[PagedSequence]:
        """The live sequences, by slot."""
        return [s for s in self._slots if s is not None]

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def _known(self, op: str, sequence: PagedSequence) -> PagedSequence:
        if not isinstance(sequence, PagedSequence):
            raise TypeError(
                f"PagedKVCache.{op}: a sequence is a {type(sequence).__name__}, expected what allocate or fork returned"
            )
        if sequence.slot < 0:
            raise ValueError(f"PagedKVCache.{op}: the sequence was freed")
        if self._slots[sequence.slot : sequence.slot + 1] != [sequence]:
            raise ValueError(f"PagedKVCache.{op}: the sequence is another cache's")
        return sequence

    def _empty_slot(self, op: str) -> int:
        if None not in self._slots:
            raise ValueError(f"PagedKVCache.{op}: the cache is full: it has its {len(self._slots)} sequences already")
        return self._slots.index(None)

    def _place(self, sequence: PagedSequence) -> PagedSequence:
        self._slots[sequence.slot] = sequence
        if sequence.length:  # an empty slot has no pages and no tokens on the device
            self._show(sequence, 0)
            self._send(self.lengths[sequence.slot : sequence.slot + 1], [sequence.length])
        return sequence

    def _show(self, sequence: PagedSequence, first: int) -> None:
        """Write the pages from the first one given on to the page table."""
        self._send(self.page_table[sequence.slot, first : len(sequence.pages)], sequence.pages[first:])

    def allocate(self) -> PagedSequence:
        """A new sequence without tokens.

        Raises:
            ValueError: there are `max_sequences` already.
        """
        return self._place(PagedSequence(self._empty_slot("allocate"), 0, []))

    def fork(self, sequence: PagedSequence) -> PagedSequence:
        """A new sequence with the tokens of another, in the same pages. No page is taken and nothing is copied.

        In the middle of a step the fork shares the step's tokens too, as the layers append them to its source.

        Raises:
            ValueError: there are `max_sequences` already, or the sequence was freed.
        """
        self._known("fork", sequence)
        new = PagedSequence(self._empty_slot("fork"), sequence.length, list(sequence.pages))
        for page in new.pages:
            self._users[page] += 1
        return self._place(new)

    def free(self, sequence: PagedSequence) -> None:
        """Release the sequence's slot, and those of its pages that no other sequence shares.

        Raises:
            ValueError: it was freed already, or is another cache's.
        """
        slot = self._known("free", sequence).slot
        for page in reversed(sequence.pages):
            self._release(page)
        sequence.slot, sequence.pages, self._slots[slot] = -1, [], None
        row = self.page_table[slot]
        self._tell(lambda: row.copy_(self._no_pages))  # a fill is a kernel
        self._send(self.lengths[slot : slot + 1], [0])
        self._drop([slot])

    def move(self, slots: Mapping[PagedSequence, int]) -> None:
        """Give sequences other slots, between two steps.

        The device copies their rows of the page table, and is sent the lengths of all sequences as the host has them:
        after a step with proposals call `shorten` first.

        Raises:
            ValueError: a sequence was freed or is another cache's, or a slot is taken, given twice, or none of the
                cache's.
            RuntimeError: `advance` was not called for the tokens reserved before.

        Nothing has changed then.
        """
        self._check_advanced()
        free = {i for i, s in enumerate(self._slots) if s is None}
        for sequence, slot in slots.items():
            self._known("move", sequence)
            if slot not in free:
                raise ValueError(f"PagedKVCache.move: the slot for {sequence} is {slot}, expected one that is free")
            free.remove(slot)
        left = {sequence.slot for sequence in slots}
        for sequence, slot in slots.items():
            old, sequence.slot = sequence.slot, slot
            self._slots[old], self._slots[slot] = None, sequence
            for row, of_old in (
                (self.page_table[slot], self.page_table[old]),
                (self.page_table[old], self._no_pages),
            ):
                self._tell(functools.partial(row.copy_, of_old))
        self._send(self.lengths, [0 if s is None else s.length for s in self._slots])
        self._drop(left)

    def _release(self, page: int) -> None:
        self._users[page] -= 1
        if self._users[page] == 0:
            self._free.append(page)

    def reserve(self, new: int | Mapping[PagedSequence, int]) -> None:
        """Begin a step: new tokens for every sequence (an integer), or for some (a mapping). Takes the pages they need.

        The device gets the page table and `counts` where they change, and copies shared pages that will be written.

        Raises:
            TypeError: a number is not an integer, or a key is not a `PagedSequence`.
            ValueError: a number is negative, a sequence was freed or would be longer than `max_seq_len`, or there are
                not enough free pages.
            RuntimeError: `advance` was not called for the tokens reserved before.

        Nothing has changed then.
        """
        self._check_advanced()
        steps = new if isinstance(new, Mapping) else dict.fromkeys(self.sequences, new)
        if None in steps or not steps.keys() <= set(self._slots):  # free slots hold None
            for sequence in steps:
                self._known("reserve", sequence)
        counts = [0] * len(self._slots)
        users: dict[int, int] = {}  # reference counts of shared last pages, after this step
        shared: list[PagedSequence] = []  # sequences whose last page is copied
        missing: dict[PagedSequence, int] = {}  # pages that sequences take
        size, capacity = self.page_size, self.capacity
        for sequence, n in steps.items():
            if type(n) is not int or n < 0:
                n = new_tokens("PagedKVCache.reserve", sequence, n)
            counts[sequence.slot] = n
            length, pages = sequence.length, sequence.pages
            if length + n > capacity:
                raise ValueError(
                    f"PagedKVCache.reserve: {sequence} has no room for {n} tokens more, expected at most "
                    f"{self.capacity} in all"
                )
            if length + n > len(pages) * size:
                missing[sequence] = -(-(length + n) // size) - len(pages)
            if n and length % size and self._users[last := pages[-1]] > 1:
                left = users.setdefault(last, self._users[last])
                if left > 1:  # the last of its sequences keeps the page
                    users[last] = left - 1
                    shared.append(sequence)
        needed = sum(missing.values())
        if needed + len(shared) > self.free_pages:
            raise ValueError(
                f"PagedKVCache.reserve: the cache is full: the new tokens need {needed + len(shared)} pages, and "
                f"{self.free_pages} are free"
            )

        pairs: list[tuple[int, int]] = []
        changed: dict[PagedSequence, int] = {}  # from which page on
        for sequence in shared:
            pairs.append((sequence.pages[-1], self._take()))
            self._release(sequence.pages[-1])
            sequence.pages[-1] = pairs[-1][1]
            changed[sequence] = len(sequence.pages) - 1
        for sequence in steps:
            sequence.length += counts[sequence.slot]
        for sequence, more in missing.items():
            changed.setdefault(sequence, len(sequence.pages))
            sequence.pages += [self._take() for _ in range(more)]
        for sequence, first in changed.items():
            self._show(sequence, first)
        if pairs:
            self._tell(functools.partial(self._copy, pairs))
        self._begin(counts)

    def _take(self) -> int:
        page = self._free.pop()
        self._users[page] = 1
        return page

    def _copy(self, pairs: list[tuple[int, int]]) -> None:
        by_page = [self.k, self.v]
        if self._scales is not None and self._scales[0].dim() == 4:
            by_page += self._scales
        on_device = torch.empty((len(pairs), 2), dtype=torch.int32, device=self.k.device)
        self._send(on_device.view(-1), itertools.chain.from_iterable(pairs))
        for x in by_page:
            words = x.view(self.layers, x.shape[1], -1).view(torch.int32)
            plan = _copy_plan(words.shape[2])
            programs = len(pairs) * self.layers * library.cdiv(words.shape[2], plan.constants["BLOCK"])
            with on(x.device):
                launching.launch(plan, programs, (words, on_device), (words.stride(0),), (self.layers,))

    def has_room(self, sequences: Sequence[PagedSequence], n: int) -> bool:
        """Whether `reserve` would find room for n more tokens of each of those sequences."""
        needed = sum(max(0, library.cdiv(s.length + n, self.page_size) - len(s.pages)) for s in sequences)
        return needed <= self.free_pages and all(s.length + n <= self.capacity for s in sequences)

    def shorten(self, sequence: PagedSequence, n: int) -> None:
        """Take the last n tokens of a sequence back, on the host: the device has done so by itself.

        Raises:
            ValueError: the sequence was freed, or has fewer tokens.
        """
        self._known("shorten", sequence)
        if not 0 <= n <= sequence.length:
            raise ValueError(f"PagedKVCache.shorten: n is {n} for {sequence}, expected 0 to its tokens")
        sequence.length -= n
        while len(sequence.pages) > library.cdiv(sequence.length, self.page_size):
            self._release(sequence.pages.pop())

    def extend(self, new: int | Mapping[PagedSequence, int]) -> None:
        """`reserve` and `advance`."""
        self.reserve(new)
        self.advance()
