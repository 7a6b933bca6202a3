"""Parts of prompts, and newest tokens beside them, as a forward pass takes them: packed, and sent in one copy.

Each token carries its place in the cache. Padding follows, up to one of few numbers of tokens, so that each number can
have a CUDA graph. It sees no key, and is never written into the cache.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rooftile.engine.cache import int32
from rooftile.engine.paged_cache import PagedSequence

# The most tokens of a forward pass that gets a graph. With Llama-3-8B on an H200, launching a pass kernel by kernel
# took the host 25 to 31 ms; the device took 11 ms for 512 tokens and needs longer than the host from about 1500 on.
GRAPH_TOKENS = 2048


class Inputs(NamedTuple):
    """A step's tokens on the device: int32 views of one allocation.

    Attributes:
        ids: of all tokens.
        rows: the tokens whose logits are wanted; None for all.
        starts, pages, counts: where keys and values go, as `append_kv` takes it. Each token is a sequence of its own,
            in a cache of one page.
        positions: of each token in its sequence.
        ends: the boundaries of the parts of prompts; None if there are none.
        lengths: of the slots that newest tokens have rows of, the tokens in the cache; None if there are none.
        part_lengths, part_pages: of each part of a prompt, the tokens in the cache, and the pages.
    """

    ids: Tensor
    rows: Tensor | None
    starts: Tensor
    pages: Tensor
    counts: Tensor
    positions: Tensor
    ends: Tensor | None
    lengths: Tensor | None
    part_lengths: Tensor | None
    part_pages: Tensor | None


def rounded(n: int) -> int:
    """Tokens of a mixed step for n that are needed: few numbers, each with launches and a graph of its own."""
    if n <= 64:
        return 1 << (n - 1).bit_length()
    step = 64 if n <= 512 else 128
    return -(-n // step) * step


def slots_of(n: int, most: int) -> int:
    """Slots that have rows in a mixed step, of at most that many, for n that are needed.

    Few numbers, too, so that `warm_up` can capture steps of all of them: 16, 32, 64, 96 ... The least is no larger,
    because empty rows take room from prompts.
    """
    return min(most, max(16, 1 << (n - 1).bit_length()) if n <= 64 else -(-n // 32) * 32)


class MixedBatch:
    """New tokens of sequences, any number of each, whose earlier tokens are in the cache, laid out on the host.

    First come the newest tokens, if there are any, that of each slot in the row of its number; rows of other slots have
    no meaning. The tokens of parts of prompts follow, and padding up to one of few numbers of tokens. Padding sees no
    key, and is not written into the cache.

    Args:
        new: the new tokens of sequences that have the length and the pages with them; None for a single one, the newest
            of the sequence's slot, which the device knows.
        last: the slots where the logits behind new tokens are wanted. Those behind newest tokens always are.
        page_size, blocks: of the cache, and how many pages a sequence may have.
        slots: of the cache.
        every: whether logits of every token of parts are wanted. There are no newest tokens then.

    Attributes:
        numbers: all fields of `Inputs`, int32, in (pinned) host memory.
        shape: (newest, tokens, rows, sequences), which determines all launches: few, because each that recurs gets a
            graph. None if that many tokens get none.
        newest: how many of the first tokens are those of the first slots, which the device knows.
        rows: the number of logits, those of the first slots; slots whose logits are not wanted have any.
        longest: at least the tokens of the longest part.
    """

    shape: tuple[int, ...] | None = None

    def __init__(
        self,
        new: Mapping[PagedSequence, Sequence[int] | None],
        last: Container[int],
        page_size: int,
        blocks: int,
        slots: int,
        *,
        every: bool = False,
        pinned: bool = False,
    ) -> None:
        newest = [s for s, tokens in new.items() if tokens is None]
        texts = [(s, tokens) for s, tokens in new.items() if tokens is not None]
        wanted = [s.slot for s in newest] + [s.slot for s, _ in texts if s.slot in last]
        self.rows = slots_of(max(wanted, default=0) + 1, slots)
        n = self.newest = self.rows if newest else 0
        ids, positions, starts, pages, counts, lengths = ([0] * n for _ in range(6))
        for s in newest:
            slot, end = s.slot, s.length
            positions[slot] = at = end - 1
            starts[slot], pages[slot] = at % page_size, s.pages[at // page_size]
            counts[slot], lengths[slot] = 1, end
        rows, ends = list(range(n)) or [0] * self.rows, [0]
        for s, tokens in texts:
            ids += tokens
            end = s.length
            start = end - len(tokens)
            positions += range(start, end)
            for i in range(start // page_size, -(-end // page_size)):
                first, stop = max(start - i * page_size, 0), min(end - i * page_size, page_size)
                starts += range(first, stop)
                pages += [s.pages[i]] * (stop - first)
            ends.append(len(ids) - n)
            if s.slot in last:
                rows[s.slot] = len(ids) - 1
        total = rounded(len(ids))
        padding = [0] * (total - len(ids))
        counts += [1] * (len(ids) - n)
        for field in (ids, positions, starts, pages, counts):
            field += padding
        self.longest = max(1, total - n)
        # The padding is one more sequence, without keys.
        empty = _sequences(len(texts) + 1) - len(texts) if texts or padding else 0
        ends += [*[ends[-1]] * (empty - 1), total - n]
        part_lengths = [*(s.length for s, _ in texts), *[0] * empty]
        tables: list[int] = []
        for s, _ in texts:
            tables += s.pages
            tables += [-1] * (blocks - len(s.pages))
        tables += [-1] * (blocks * empty)
        if not every and total <= GRAPH_TOKENS:
            self.shape = n, total, self.rows, len(texts) + empty
        self._blocks = blocks
        # In the order of `Inputs`, side by side.
        fields = (
            ids, None if every else rows, starts, pages, counts, positions, ends if empty else None,
            lengths if n else None, part_lengths if empty else None, tables if empty else None,
        )  # fmt: skip
        numbers: list[int] = []
        self._at: list[slice | None] = []
        for x in fields:
            self._at.append(None if x is None else slice(len(numbers), len(numbers) + len(x)))
            numbers += x or ()
            numbers += [0] * (-len(numbers) % 4)  # 16 bytes: Triton compiles another kernel for another alignment
        # New memory each time: the previous step's copy may still run. PyTorch reuses pinned memory only after the
        # copies from it have ended.
        self.numbers = torch.empty(len(numbers), dtype=torch.int32, device="cpu", pin_memory=pinned)
        self.numbers.copy_(int32(numbers))

    def of(self, numbers: Tensor) -> Inputs:
        """The fields as views of a copy of `numbers`."""
        inputs = Inputs(*(None if at is None else numbers[at] for at in self._at))  # type: ignore[arg-type]
        tables = None if inputs.part_pages is None else inputs.part_pages.view(-1, self._blocks)
        return inputs._replace(pages=inputs.pages[:, None], part_pages=tables)

    def filled(self, numbers: Tensor, newest: Tensor) -> Inputs:
        """The same, with the newest tokens of slots in their rows. Nothing waits."""
        inputs = self.of(numbers)
        if self.newest:
            inputs.ids[: self.newest].copy_(newest[: self.newest])
        return inputs


def _sequences(n: int) -> int:
    """Parts of prompts in a mixed step, for n that are needed: 4, 16, 64 ..."""
    bits = (n - 1).bit_length()
    return max(4, 1 << bits + bits % 2)
